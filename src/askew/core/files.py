"""Files that are written whole or not at all, and hashes that show whether what is read is what was written."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # those who only read run folders do without the seconds that loading torch takes
    import numpy as np
    from torch import Tensor

# control characters but for tabs and line ends, those that change the direction of writing, and what Python makes of
# the bytes in the name of a file that are not UTF-8, which cannot be written
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
LARGEST = 2**36  # bytes; a larger file of weights or text is not one of ours


@contextmanager
def write_atomically(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """A temporary path in the same folder; what is written there takes this path's name when it is on the disk.

    A process that is killed leaves the temporary file, whose name begins with a dot and the name of the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(mode)
        flush_to_disk(temporary)
        temporary.replace(path)
        with suppress(OSError):  # some network file systems cannot do this to a folder
            flush_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_file(path: Path) -> bool:
    """Is this a regular file? A name that no file can have, too long or with a zero byte in it, is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_readable_file(path: Path) -> bool:
    """Is this a regular file of a size that can be read? A device or a pipe may have no end."""
    return is_file(path) and path.stat().st_size <= LARGEST


def map_array(path: Path) -> np.ndarray:
    """The array of a file of numpy.save, mapped: nothing is unpickled, and a false header allocates nothing.

    A ValueError if the file is damaged.
    """
    import numpy as np

    try:
        return np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception:  # numpy parses the header as Python text, where anything may go wrong
        raise ValueError("it is empty, damaged or no plain array of numpy.save") from None


def printable(text: str) -> str:
    """A text from a file without the characters by which it could control a terminal."""
    return CONTROL.sub("\ufffd", text)


def tensors_sha256(tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> str:
    """The SHA-256 of the names, types, shapes and values of tensors, and of what is noted about them."""
    import torch

    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        # a single number that was expanded is contiguous with a stride of 0, which cannot be viewed as bytes
        flat = flat if flat.stride(-1) == 1 else flat.clone(memory_format=torch.contiguous_format)
        total.update(flat.view(torch.uint8).numpy().data)
    if about:
        total.update(json.dumps(sorted(about.items())).encode())
    return total.hexdigest()


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file by name, and what is noted about them; a ValueError if the file is damaged.

    Files without a hash, as other programs and older versions write them, are taken as they are.
    """
    from safetensors import safe_open

    if not is_readable_file(path):
        raise ValueError("is no regular file")
    try:
        with safe_open(path, framework="pt") as file:
            about: dict[str, str] = dict(file.metadata() or {})
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
    except PermissionError:
        raise
    except Exception:  # anything may go wrong inside a damaged file
        raise ValueError("is damaged") from None
    sha256 = about.pop("sha256", None)
    if sha256 is not None and sha256 != tensors_sha256(tensors, about):
        raise ValueError("is damaged")
    return tensors, about


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write a safetensors file atomically, with a hash of all that is in it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    noted = {**about, "sha256": tensors_sha256(stored, about)}
    with write_atomically(path) as temporary:
        try:
            save_file(stored, temporary, metadata=noted)
        except SafetensorError as e:
            raise system_error(str(e)) from None


def system_error(text: str) -> OSError:
    """The error of the system that safetensors reports, as in "I/O error: No space left on device (os error 28)"."""
    number = text.rpartition("(os error ")[2].rstrip(")")
    return OSError(int(number), os.strerror(int(number))) if number.isdigit() else OSError(None, text)
