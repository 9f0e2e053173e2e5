"""What runs on this machine."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from pathlib import Path


def environment(process: int) -> list[bytes]:
    with suppress(OSError):
        return Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return []


def with_home(home: Path) -> list[int]:
    """The processes of one federation: those that have its Flower home."""
    wanted = f"FLWR_HOME={home}".encode()
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if wanted in environment(int(path.name))]


def assert_none_left(home: Path, patience: float = 20.0) -> None:
    end = time.monotonic() + patience
    while (left := with_home(home)) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left, subprocess.run(
        ["ps", "-fp", ",".join(map(str, left))], capture_output=True, text=True, check=False
    ).stdout
