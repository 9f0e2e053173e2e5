"""Are an engine's results those of the sequential one? On a GPU this is asked before the first results are used.

A kernel that is wrong for some shape, or an index that is too large for its type, would spoil a run without a word. So
the first steps of a round are taken once more, by the engine for all clients, and for a few of them one by one in plain
torch. It is done again where a round has many more clients than any that was checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..errors import EngineError
from .base import Engine, PhaseInputs, PhaseOutputs, PhaseRequest, prepare_next

CHECKED_STEPS = 2  # of each client: rounding errors have no time to grow
CLIENTS = 6  # that are compared
GROWTH = 1.2  # times as many clients as were checked: checked again
# of the length of a result: what the engine's may be away from the sequential one's without a further look
FAR = {"float64": 1e-6, "float32": 0.05, "tf32": 0.1, "bf16": 0.5}
MORE = 4  # times as far from the result without tf32 as rounding takes the sequential engine: not by rounding alone
TF32_LOST_BITS = 13  # last bits of a float32 that TF32 does not have


class WrongResult(EngineError):
    """An engine's result is not the sequential one's."""


class CheckedEngine:
    """An engine whose first results are compared with the sequential engine's."""

    def __init__(self, engine: Engine, reference: Callable[[], Engine], dtype: str) -> None:
        """`reference` makes the sequential engine; `dtype` is the precision as the user named it."""
        self.engine, self.make_reference, self.dtype = engine, reference, dtype
        self.name = engine.name
        self.reference: Engine | None = None
        self.checked: dict[Hashable, int] = {}  # clients, by the methods at work

    def run(self, requests: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        """The engine's results, which are checked where these are more clients than before."""
        outputs = self.engine.run(requests)  # first: what it allocates for the round serves its first steps too
        kind, clients = frozenset(type(r.phase) for r in requests), sum(len(r.plan.ids) for r in requests)
        if clients > GROWTH * self.checked.get(kind, 0):
            self.checked[kind] = clients
            self.check([request.first_steps(CHECKED_STEPS)._replace(wanted=()) for request in requests])
        return outputs

    def prepare(self, requests: Sequence[PhaseRequest]) -> None:
        """Pass on the requests that come next."""
        prepare_next(self.engine, requests)

    def check(self, requests: Sequence[PhaseRequest]) -> None:
        """Compare the engine's results of some clients, from the first to the last, with the sequential ones."""
        self.reference = self.reference or self.make_reference()
        outputs = self.engine.run(requests)
        jobs = [(n, i) for n, request in enumerate(requests) for i in range(len(request.plan.ids))]
        picked = torch.linspace(0, len(jobs) - 1, min(CLIENTS, len(jobs))).round().long().tolist()
        for n, i in (jobs[k] for k in picked):
            request = requests[n]
            alone = request.only([i])
            [right] = self.reference.run([alone])
            ours = outputs[n].rows([i])
            distance = upload_distance(ours, right, rounding(alone.inputs))
            if distance > FAR[self.dtype] and not self.rounds_as(ours, right, alone):
                raise WrongResult(
                    f"engine: after {CHECKED_STEPS} steps the {self.name} engine's result of client "
                    f"{request.plan.ids[i]} is {distance:.2g} times its length away from the sequential engine's, "
                    f'with {len(jobs)} clients at a time; set engine.name = "sequential", and please report this.'
                )

    def rounds_as(self, ours: PhaseOutputs, right: PhaseOutputs, alone: PhaseRequest) -> bool:
        """Is the engine's result no further from the one without tf32 than rounding may take it?

        In tf32 the sequential engine's own result may be very near to the exact one: cuDNN rounds to the nearest, or
        not at all, where other kernels cut bits off. So the result from weights whose bits are cut counts too.
        """
        assert self.reference is not None
        inputs, rounded = alone.inputs, [right]
        with without_tf32():
            [exact] = self.reference.run([alone])
            if self.dtype == "tf32":
                rounded += self.reference.run([alone._replace(inputs=inputs._replace(w=cut_to_tf32(inputs.w)))])
        small = rounding(inputs)
        return upload_distance(ours, exact, small) <= MORE * max(upload_distance(r, exact, small) for r in rounded)


def cut_to_tf32(x: Tensor) -> Tensor:
    """float32 without the bits that TF32 does not have."""
    return (x.view(torch.int32) & -(1 << TF32_LOST_BITS)).view(torch.float32)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Inside, products of float32 are not rounded to TF32."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


def rounding(inputs: PhaseInputs) -> float:
    """How far two right results may be apart as weights are rounded; variates divide that by rate and steps."""
    small = torch.finfo(inputs.w.dtype).eps * 100 * float(inputs.w.double().norm())
    return small * max(1.0, 1 / (inputs.lr * float(inputs.steps[0].clamp(min=1)) or 1.0))


def upload_distance(ours: PhaseOutputs, right: PhaseOutputs, rounding: float) -> float:
    """The distance of two results beyond rounding, in lengths of the second: that of the worst part of the upload.

    Where the second is not finite nothing is compared, as a run may diverge by itself.
    """
    worst = 0.0
    for a, b in zip((ours.loss, *ours.up.values()), (right.loss, *right.up.values()), strict=True):
        if not b.isfinite().all():
            continue
        beyond = float((a.double() - b.double()).norm()) - rounding
        if beyond != beyond:  # not a number
            return math.inf
        if beyond > 0:
            worst = max(worst, beyond / max(float(b.double().norm()), rounding))
    return worst
