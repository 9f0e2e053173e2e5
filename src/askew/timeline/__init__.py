"""The virtual clock of a simulation: how long clients take, when they are there, and how the server waits.

All of it is a function of the seed and the client. Nothing is drawn of a client before it is asked for.
"""

from __future__ import annotations

from .availability import (
    AlwaysThere,
    Availability,
    DayNight,
    OnOff,
    SearchedOnOff,
    TraceIntervals,
    availability_of,
    members,
    refreshes,
)
from .durations import Device, Waited, device_of, wait_for
from .settings import TimeSettings

__all__ = [
    "AlwaysThere",
    "Availability",
    "DayNight",
    "Device",
    "OnOff",
    "SearchedOnOff",
    "TimeSettings",
    "TraceIntervals",
    "Waited",
    "availability_of",
    "device_of",
    "members",
    "refreshes",
    "wait_for",
]
