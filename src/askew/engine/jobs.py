"""Client jobs: what one request asks of each of its clients, for engines of many clients at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .base import PhaseRequest
from .results import ResultRows


class ClientJobs:
    """The jobs of one request: for each client its batches by name, its numbers, and a row for its result."""

    numbers: Tensor  # [C, 7], once computed: lr, lr0, round, steps, tau, size, coin

    def __init__(self, request: PhaseRequest) -> None:
        self.phase, self.inputs, self.plan, wanted = request
        phase, plan = self.phase, self.plan
        names = [*(["train"] if phase.trains else []), *sorted({*phase.before, *phase.each, *phase.after})]
        every = {name: plan.train if name == "train" else plan.looks[name] for name in names}
        self.batches = [{name: every[name][i] for name in names} for i in range(len(plan.ids))]
        self.results = ResultRows(phase, len(plan.ids), wanted)

    def compute_numbers(self) -> None:
        """Put together what differs between clients and rounds, on the current stream."""
        inputs = self.inputs
        same = [torch.full_like(inputs.steps, value) for value in (inputs.lr, inputs.lr0, inputs.round)]
        self.numbers = torch.stack([*same, inputs.steps, inputs.tau, inputs.size, inputs.coin], 1)

    def key(self) -> Any:
        """Jobs with one key can be done in one another's slots."""
        inputs = self.inputs
        names = tuple(tuple(state) for state in (inputs.server, inputs.memory, inputs.state, inputs.carry))
        return self.phase, inputs.momentum, inputs.decay, inputs.clip, names, inputs.parts_key


Job = tuple[ClientJobs, int]  # a request's jobs, and one of its clients
Jobs = Sequence[Job]
