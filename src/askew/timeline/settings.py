"""The settings of the virtual clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..core.settings import Settings, setting
from ..core.text import count_text
from ..errors import ConfigError
from .files import read_table

# Settings that one way to wait alone uses.
USED_BY = {"deadline": "deadline", "late": "deadline", "spare": "first", "buffer": "buffer", "at_work": "buffer"}
FURTHEST = 1e4  # times that one mean stay may be longer than the other: more would take long to search


def unused_settings(clock: Mapping[str, Any]) -> list[str]:
    """The settings in a clock's table that its `wait` does not use."""
    wait = clock.get("wait", "none")
    return [key for key in clock if USED_BY.get(key, wait) != wait]


class TimeSettings(Settings):
    """A virtual clock: how long clients take, when they are there, and how the server waits for their answers.

    Simulations only. `wait` switches it on. An answer takes latency + bytes down / `down` + samples · seconds a sample
    + bytes up / `up` + latency.
    """

    title = "time"
    wait: str = setting(
        "how the server waits: for all answers, until the deadline, for the first answers of a larger cohort, or "
        "asynchronously until `buffer` answers have come; none: there is no clock",
        default="none",
        choices=("none", "all", "deadline", "first", "buffer"),
    )
    deadline: float = setting(
        "seconds after which a round ends, with wait = deadline; may be inf",
        default=0.0,
        least=0,
        infinite=True,
    )
    late: str = setting(
        "what becomes of answers after the deadline: drop: they are lost; next: the client stays at work, and its "
        "answer is used in the round in which it comes",
        default="drop",
        choices=("drop", "next"),
    )
    spare: int = setting("clients that are asked beyond the cohort, with wait = first", default=0, least=0)
    buffer: int = setting("answers that make a step of the server, with wait = buffer", default=0, least=0)
    at_work: int = setting(
        "clients that are at work at the same time, with wait = buffer; 0: the cohort of the participation rule",
        default=0,
        least=0,
    )
    seconds: float = setting("seconds that a client computes for each sample", default=0.01, least=0, most=1e9)
    speed: str = setting(
        "how clients differ: all take `seconds`; lognormal with that median; Pareto with that least value; "
        "half-normal with that standard deviation; or in proportion to their number of samples, the mean client taking "
        "`seconds`",
        default="constant",
        choices=("constant", "lognormal", "pareto", "halfnormal", "size"),
    )
    sigma: float = setting("standard deviation of log seconds, with speed = lognormal", default=0.5, least=0, most=10)
    tail: float = setting(
        "tail index of the Pareto distribution, with speed = pareto; smaller: more very slow clients",
        default=2.0,
        least=0.1,
    )
    latency: float = setting(
        "seconds that a message travels, each way, beside its bytes", default=0.0, least=0, most=1e9
    )
    up: float = setting("bytes a second from a client to the server; 0: no limit", default=0.0, least=0)
    down: float = setting("bytes a second from the server to a client; 0: no limit", default=0.0, least=0)
    clients: str = setting(
        "a CSV file with the columns client and seconds, a row for each client; also latency, up and down, if it has "
        "them; its numbers replace the settings above",
        default="",
    )
    availability: str = setting(
        "when clients are there: always; markov: on and off for exponential times; day: between two hours of their "
        "local day",
        default="always",
        choices=("always", "markov", "day"),
    )
    mean_on: float = setting("mean seconds that a client stays, with availability = markov", default=3600.0, above=0)
    mean_off: float = setting("mean seconds that it stays away", default=3600.0, above=0)
    opens: float = setting(
        "local hour from which a client is there, with availability = day", default=22.0, least=0, most=24
    )
    closes: float = setting("local hour from which it is away", default=6.0, least=0, most=24)
    zones: int = setting("time zones, evenly over the day, in which clients live", default=24, least=1, most=24)
    trace: str = setting(
        "a CSV file with the columns client, from and to (seconds): when clients are there, instead of availability; "
        "it begins again after its last second",
        default="",
    )

    def check(self) -> None:
        if not self.on and any(getattr(self, field.name) != field.default for field in fields(self)):
            raise ConfigError(
                'time: the clock is off without time.wait; set wait = "all", "deadline", "first" or "buffer".'
            )
        for field in fields(self):
            user = USED_BY.get(field.name, self.wait)
            if self.on and self.wait != user and getattr(self, field.name) != field.default:
                raise ConfigError(
                    f'time: time.{field.name} has no effect with wait = "{self.wait}"; leave it out, or set '
                    f'wait = "{user}".'
                )
        if self.wait == "deadline" and not self.deadline:
            raise ConfigError('time: wait = "deadline" needs time.deadline, in seconds; set it, for example to 60.')
        if self.wait == "buffer" and not self.buffer:
            raise ConfigError(
                'time: wait = "buffer" needs time.buffer, a number of answers; set it, for example to 10.'
            )
        if self.wait == "buffer" and 0 < self.at_work < self.buffer:
            raise ConfigError(
                f"time: a buffer of {self.buffer} answers never fills with {count_text(self.at_work, 'client')} at "
                "work; lower time.buffer or raise time.at_work."
            )
        if self.clients and self.speed != "constant":
            raise ConfigError(
                f"time: the file {self.clients} says every client's seconds; leave out time.speed or time.clients."
            )
        if self.trace and self.availability != "always":
            raise ConfigError(
                f"time: the file {self.trace} says when clients are there; leave out time.availability or time.trace."
            )
        if self.availability == "markov" and not 1 / FURTHEST <= self.mean_on / self.mean_off <= FURTHEST:
            raise ConfigError(
                f"time: mean_on and mean_off may differ by a factor of {FURTHEST:,.0f} at most, got {self.mean_on:g} "
                f"and {self.mean_off:g}; set them nearer to each other."
            )
        if self.availability == "day" and (self.closes - self.opens) % 24 == 0:
            raise ConfigError(
                f"time: opens and closes must be different hours, got {self.opens:g} and {self.closes:g}; "
                'set another hour, or availability = "always".'
            )

    @property
    def on(self) -> bool:
        """Is there a clock?"""
        return self.wait != "none"

    @property
    def overlapping(self) -> bool:
        """May an answer be used in a later round than that in which its client began?"""
        return self.wait == "buffer" or (self.wait == "deadline" and self.late == "next")

    def reads(self) -> tuple[Path, ...]:
        return tuple(Path(name) for name in (self.clients, self.trace) if name)

    def check_clients(self, clients: int) -> None:
        """Refuse files that do not fit so many clients; called when the configuration loads."""
        if self.clients:
            read_table(self.clients, "clients", clients)
        if self.trace:
            read_table(self.trace, "trace", clients)
