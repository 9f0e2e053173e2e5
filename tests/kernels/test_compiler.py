"""How kernels in C are had: compiled once, kept where only this user can write, checked before they are loaded."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import askew
from askew.kernels.cpu import compiler, conv, dense

in_c = pytest.mark.skipif(
    compiler.library(dense.SOURCE, torch.float64) is None, reason="kernels cannot be compiled here"
)
UNFIT = ("without fused multiplication", "__builtin_shufflevector")  # the machine, or a compiler that is too old
SOURCE = "int twice(int n) { return n * FACTOR; }\n"


@pytest.mark.skipif(not compiler.compiler(), reason="there is no C compiler")
def test_they_compile_wherever_there_is_a_compiler() -> None:
    """What must hold besides, only where they do."""
    image = {"CI": 3, "CO": 6, "H": 32, "W": 32, "K": 5, "PAD": 0}
    for source, sizes in {dense.SOURCE: (), conv.SOURCE: tuple(image.items())}.items():
        for dtype in (torch.float32, torch.float64):
            why = compiler.why_not(source)
            assert compiler.library(source, dtype, *sizes) or any(text in why for text in UNFIT), why


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that has compiled nothing yet."""
    for function in (compiler.compiler, compiler._library):
        monkeypatch.setattr(compiler, function.__name__, function.__wrapped__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir(mode=0o700)
    (tmp_path / "twice.c").write_text(SOURCE)
    return tmp_path


def twice(folder: Path, factor: int = 2) -> ctypes.CDLL | None:
    return compiler.library(folder / "twice.c", torch.float32, ("FACTOR", factor))


def in_home(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "askew" / "native").glob("*"))


@in_c
def test_what_was_compiled_is_found_again(fresh: Path) -> None:
    first, second = twice(fresh, 2), twice(fresh, 3)
    assert first and first.twice(21) == 42 and second and second.twice(14) == 42
    files = in_home(fresh)
    times = [path.stat().st_mtime_ns for path in files]
    again = twice(fresh, 2)
    assert again and again.twice(4) == 8
    assert len(files) == 2 and [path.stat().st_mtime_ns for path in files] == times
    assert not list((fresh / "tmp").iterdir())  # the folder for temporary files is not even made


@in_c
def test_where_the_home_cache_cannot_be_written_the_temporary_folder_will_do(fresh: Path) -> None:
    (fresh / "cache").write_text("a file in the way")
    library = twice(fresh)
    assert library and library.twice(4) == 8
    (folder,) = (fresh / "tmp").glob("askew-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and list(folder.iterdir())


@in_c
def test_a_user_without_a_home_has_them_too(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    library = twice(fresh)
    assert library and library.twice(4) == 8


@in_c
@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "replaced"])
def test_a_damaged_file_is_never_loaded_and_compiled_again(fresh: Path, damage: str) -> None:
    twice(fresh, 5)
    (path,) = in_home(fresh)
    content = path.read_bytes()
    middle = len(content) // 2
    path.unlink()  # this process has it loaded: written in place, its code would change under its feet
    path.write_bytes(
        {
            "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "cut": content[:middle],
            "empty": b"",
            "replaced": b"#!/bin/sh\n",
        }[damage]
    )
    library = twice(fresh, 5)
    assert library and library.twice(4) == 20
    (path,) = in_home(fresh)
    assert path.read_bytes() == content


# what another user could prepare --------------------------------------------------------------------------------------


def planted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are loaded."""
    paths, load = list[Path](), ctypes.CDLL

    def watch(path: str) -> ctypes.CDLL:
        paths.append(Path(path))
        return load(path)

    monkeypatch.setattr(ctypes, "CDLL", watch)
    return paths


@in_c
def test_a_link_in_place_of_the_temporary_folder_is_not_followed(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack: a link in the folder for everybody leads to a folder that is the user's own, with a file in it."""
    (fresh / "cache").write_text("no home cache")
    elsewhere = fresh / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (fresh / "tmp" / f"askew-{os.getuid()}").symlink_to(elsewhere)
    paths = planted(monkeypatch)
    assert twice(fresh) is None and "no safe folder" in compiler.why_not(fresh / "twice.c")
    assert not paths and not list(elsewhere.iterdir())


@in_c
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_is_not_used(fresh: Path, mode: int) -> None:
    twice(fresh)
    (fresh / "cache" / "askew" / "native").chmod(mode)
    before = {path: path.stat().st_mtime_ns for path in in_home(fresh)}
    assert twice(fresh) is not None  # from the temporary folder
    assert {path: path.stat().st_mtime_ns for path in in_home(fresh)} == before
    assert list((fresh / "tmp").glob("askew-*/*.so"))


@in_c
def test_a_folder_above_that_everybody_may_rename_in_is_not_used(fresh: Path) -> None:
    twice(fresh)
    (fresh / "cache").chmod(0o777)
    assert compiler.safe_folder(fresh / "cache" / "askew" / "native") is None
    (fresh / "cache").chmod(0o1777)  # with the sticky bit nobody can rename what is another's
    assert compiler.safe_folder(fresh / "cache" / "askew" / "native") is not None


@in_c
def test_a_folder_or_file_of_another_user_is_not_used(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twice(fresh)
    (path,) = in_home(fresh)
    found = path.lstat()
    assert compiler.is_private(found, stat.S_IFREG)
    monkeypatch.setattr(os, "getuid", lambda: found.st_uid + 1)
    assert not compiler.is_private(found, stat.S_IFREG)
    assert compiler.safe_folder(path.parent) is None and not list(compiler.stored_files(path.parent, path.name[:38]))


@in_c
@pytest.mark.parametrize("how", ["link", "writable"])
def test_a_file_that_is_a_link_or_that_others_may_write_is_replaced(
    fresh: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice(fresh)
    (path,) = in_home(fresh)
    content = path.read_bytes()
    if how == "link":
        (fresh / "planted.so").write_bytes(content)
        path.unlink()
        path.symlink_to(fresh / "planted.so")
    else:
        path.chmod(0o766)
    paths = planted(monkeypatch)
    assert twice(fresh) is not None
    assert paths == [path] and not path.is_symlink() and not stat.S_IMODE(path.stat().st_mode) & 0o022


# without them ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"), [("CC", "no-such-compiler"), ("CC", "false"), ("CC", "gcc '"), ("ASKEW_NATIVE", "0")]
)
def test_without_a_compiler_there_are_none(name: str, value: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert compiler.library(fresh / "twice.c", torch.float32) is None and compiler.why_not(fresh / "twice.c")


@in_c
def test_what_does_not_compile_is_done_without(fresh: Path) -> None:
    assert compiler.library(fresh / "twice.c", torch.float32) is None
    assert "FACTOR" in compiler.why_not(fresh / "twice.c")  # is not known
    assert not in_home(fresh)


def test_a_compiler_that_hangs_is_given_up_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = fresh / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o700)
    monkeypatch.setenv("CC", str(slow))
    monkeypatch.setattr(compiler, "TIMEOUT", 0.2)
    calls, run = list[object](), subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **more: calls.append(args) or run(*args, **more))
    monkeypatch.setattr(compiler, "hanging", set())
    assert twice(fresh) is None and len(calls) == 1
    assert f"{slow} took longer than 0.2 seconds" in compiler.why_not(fresh / "twice.c")
    (fresh / "thrice.c").write_text(SOURCE)  # another kernel does not wait again
    assert compiler.library(fresh / "thrice.c", torch.float32, ("FACTOR", 3)) is None and len(calls) == 1
    assert "took longer" in compiler.why_not(fresh / "thrice.c")


def test_a_quote_that_is_not_closed_is_said(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc '")
    assert twice(fresh) is None and "a quote is not closed" in compiler.why_not(fresh / "twice.c")


@in_c
@pytest.mark.parametrize("home", [True, False])
def test_they_need_no_folder_for_temporary_files(fresh: Path, home: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the compiler; where there is no cache either, they are done without."""

    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    monkeypatch.setenv("TMPDIR", str(fresh / "not there"))
    if not home:
        (fresh / "cache").write_text("a file in the way")
    library = twice(fresh)
    if home:
        assert library and library.twice(4) == 8 and len(in_home(fresh)) == 1
    else:
        assert library is None and "no safe folder" in compiler.why_not(fresh / "twice.c")


RUN = """
import askew
for model, engine in (("mlp", "sequential"), ("softmax", "vmapped"), ("cnn", "sequential")):
    tables = {"data": "digits", "model": {"name": model}, "rounds": 2, "engine": {"dtype": "float64", "name": engine}}
    run = askew.run(tables)
    print(*(float(v.double().pow(2).sum()) for v in run.model.values()), run.rounds[-1]["loss"])
"""


@in_c
@pytest.mark.slow
def test_a_run_is_the_same_with_and_without_them() -> None:
    results = list[list[float]]()
    for wanted in ("0", "1"):
        env = os.environ | {"ASKEW_NATIVE": wanted}
        done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, env=env, check=True)
        results.append([float(number) for number in done.stdout.split()])
    assert results[0] == pytest.approx(results[1], rel=1e-10)


def test_the_sources_are_in_the_package() -> None:
    root = Path(askew.__file__).parent
    settings = tomllib.loads((root.parent.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["askew"]
    for source in (conv.SOURCE, dense.SOURCE, compiler.COMMON):
        assert any(source.relative_to(root).match(pattern) for pattern in patterns), source
