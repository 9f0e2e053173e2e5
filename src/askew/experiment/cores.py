"""How many cores this process may use, and so how many processes askew may start."""

from __future__ import annotations

import os

from ..errors import ConfigError

MANY = "ASKEW_MANY_PROCESSES"  # the environment variable that allows more processes than cores


def own_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def are_too_many(processes: int) -> bool:
    """Are these more processes than cores, unless ASKEW_MANY_PROCESSES=1 says that this is meant?"""
    return processes > max(1, own_cores()) and os.environ.get(MANY) != "1"


def check_cores(processes: int, setting: str) -> None:
    """Refuse too many processes."""
    if are_too_many(processes):
        raise ConfigError(
            f"{setting} = {processes} is more than the {own_cores()} cores here, and so many processes can stop the "
            f"machine; use at most {own_cores()}, or set the environment variable {MANY}=1 to do it all the same."
        )
