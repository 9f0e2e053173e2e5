"""The memory that is free, and the refusal of what cannot fit into it: before it is allocated, in one sentence."""

from __future__ import annotations

import math
from pathlib import Path

from ..errors import EngineError

UNCHECKED_BYTES = 2**28  # bytes; less is not even compared with what is free
USABLE_SHARE = 0.9  # of the free memory that one thing may take


def free_memory() -> float:
    """Bytes of memory that this process can still get; infinity where the system does not say."""
    limits = [math.inf]
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        limits.append(1024.0 * int(lines["MemAvailable"].split()[0]))
    except (OSError, KeyError, ValueError):
        pass
    for limit, used in CGROUPS:
        try:
            limits.append(float(int(Path(limit).read_text()) - int(Path(used).read_text())))
        except (OSError, ValueError):  # "max": there is no limit
            continue
    return max(0.0, min(limits))


CGROUPS = (  # files with the limit of a container's memory and what is used of it, by version
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def require_memory(needed: float, what: str, advice: str) -> None:
    """Refuse what needs more bytes than are free."""
    if needed < UNCHECKED_BYTES:
        return
    free = free_memory()
    if needed > USABLE_SHARE * free:
        raise EngineError(
            f"{what} would take about {gigabytes(needed)} of memory, and {gigabytes(free)} are free; {advice}."
        )


def gigabytes(count: float) -> str:
    """A number of bytes in gigabytes: "1.5 GB"."""
    return f"{count / 1e9:,.0f} GB" if count >= 1e10 else f"{count / 1e9:.1f} GB"
