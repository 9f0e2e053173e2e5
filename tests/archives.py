"""Small files and archives that stand for published ones in tests."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile

Contents = dict[str, bytes]  # of files, by name


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def make_tar(contents: Contents, mode: str = "w:gz") -> bytes:
    """A tar archive of these files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:  # type: ignore[call-overload]
        for name, data in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def make_zip(contents: Contents) -> bytes:
    """A zip archive of these files."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    return out.getvalue()
