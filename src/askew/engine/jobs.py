"""Client jobs: what one request asks of each of its clients, for engines of many clients at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..data.federation import ClientBatches
from .base import PhaseRequest
from .results import ResultRows

# the columns of RequestJobs.numbers: fields of Client that differ between rounds or clients
NUMBERS = ("lr", "lr0", "round", "steps", "tau", "size", "coin")


class RequestJobs:
    """The jobs of one request: for each client its batches by name, its numbers, and a row for its result."""

    numbers: Tensor  # [C, 7], once computed

    def __init__(self, request: PhaseRequest) -> None:
        self.phase, self.inputs, self.plan, wanted = request
        phase, plan = self.phase, self.plan
        names = [*(["train"] if phase.trains else []), *sorted({*phase.before, *phase.each, *phase.after})]
        every = {name: plan.train if name == "train" else plan.looks[name] for name in names}
        self.batches = [{name: every[name][i] for name in names} for i in range(len(plan.ids))]
        self.results = ResultRows(phase, len(plan.ids), wanted)

    def jobs(self) -> list[Job]:
        """The job of each client. They are not kept: with a circle of references, memory would be freed late."""
        works = zip(self.batches, self.plan.train, strict=True)
        return [Job(self, i, batches, train.batches) for i, (batches, train) in enumerate(works)]

    def compute_numbers(self) -> None:
        """Put together what differs between clients and rounds, on the current stream."""
        steps, values = self.inputs.steps, [getattr(self.inputs, name) for name in NUMBERS]
        self.numbers = torch.stack([v if isinstance(v, Tensor) else torch.full_like(steps, v) for v in values], 1)

    def key(self) -> Any:
        """Jobs with one key can be done in one another's slots."""
        inputs = self.inputs
        names = tuple(tuple(state) for state in (inputs.server, inputs.memory, inputs.state, inputs.carry))
        return self.phase, inputs.momentum, inputs.decay, inputs.clip, names, inputs.parts_key


class Job(NamedTuple):
    """The phase of one client: the i-th of a request."""

    request: RequestJobs
    i: int
    batches: dict[str, ClientBatches]  # by name those to train on, and those of its looks
    steps: int  # how many it takes


Jobs = Sequence[Job]


def by_name(numbers: Tensor) -> dict[str, Tensor]:
    """One client's numbers as fields of Client."""
    return dict(zip(NUMBERS, numbers.unbind(), strict=True))


def longest_first(requests: Sequence[RequestJobs]) -> Jobs:
    """All jobs of some requests, those with most steps first."""
    return sorted((job for request in requests for job in request.jobs()), key=lambda job: -job.steps)


def requests_of(jobs: Jobs) -> list[RequestJobs]:
    """The requests of some jobs, in the order of their first ones."""
    return list({id(job.request): job.request for job in jobs}.values())
