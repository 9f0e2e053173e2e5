"""Clients that misbehave in a simulation: faults, drawn from the seed, in answers that are judged as deployed ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.records import CLIENT_ERROR, LATE, NO_ANSWER
from ..core.rng import generator
from ..core.settings import Settings, setting
from ..errors import ConfigError
from .answers import SCALE_LIMIT, Answer, AskedPhase, judge, split_answers
from .base import PhaseOutputs, PhaseRequest

NUMBERS_LOST = (math.nan, math.inf, -math.inf)


class Faults(Settings):
    """Faults of clients in a simulation, and the check of answers that finds them.

    A rate is the chance that an answer of a client (one for each phase of a round) has this fault; an answer has at
    most one. A deployment has only `scale_limit` of this table.
    """

    title = "faults"
    missing: float = setting("rate of answers that never come", default=0.0, least=0, most=1)
    late: float = setting("rate of answers that come in a later round", default=0.0, least=0, most=1)
    error: float = setting("rate of errors at the client instead of an answer", default=0.0, least=0, most=1)
    not_finite: float = setting("rate of answers with a number that is NaN or infinite", default=0.0, least=0, most=1)
    wrong_shape: float = setting("rate of answers with tensors of another shape", default=0.0, least=0, most=1)
    wrong_type: float = setting("rate of answers with tensors of another type", default=0.0, least=0, most=1)
    scaled: float = setting("rate of answers whose numbers are multiplied by `factor`", default=0.0, least=0, most=1)
    repeated: float = setting("rate of answers that come twice", default=0.0, least=0, most=1)
    old_round: float = setting("rate of answers that say they are of the round before", default=0.0, least=0, most=1)
    factor: float = setting("factor of scaled answers", default=1e6, above=0)
    scale_limit: float = setting(
        "an update longer than so many times the median of its round, and longer than the model, is refused; 0: never",
        default=SCALE_LIMIT,
        least=0,
    )
    check_answers: bool = setting("check all answers, also where no fault has a rate", default=False)

    def check(self) -> None:
        if sum(self.rates().values()) > 1 + 1e-9:
            raise ConfigError(
                f"faults: the rates must sum to at most 1, got {sum(self.rates().values()):g}; lower some of them."
            )

    def rates(self) -> dict[str, float]:
        """The rate of each kind of fault."""
        return {kind: getattr(self, kind) for kind in (*NOTHING_COMES, "late", *CHANGES, "repeated")}

    @property
    def on(self) -> bool:
        """Are answers checked in a simulation?"""
        return self.check_answers or any(self.rates().values())


class FaultStage:
    """Puts faults into the answers of a phase's clients and leaves out those that the check refuses.

    Which fault an answer has depends on seed, round, phase and client alone: neither on who else takes part nor on the
    rounds before. Late answers are kept for the next round and refused there; a resumed run has none, and is the same.
    """

    def __init__(self, faults: Faults, seed: int) -> None:
        self.faults, self.seed = faults, seed
        self.phases: list[Algorithm] = []  # in the order in which they were first asked for, which is that of a round
        self.late: list[Answer] = []

    def __call__(self, request: PhaseRequest, outputs: PhaseOutputs) -> PhaseOutputs:
        inputs, ids = request.inputs, request.plan.ids
        rows = outputs.cohort_rows()
        if not rows:
            return outputs
        clients, n = [ids[row] for row in rows], self._phase_number(request.phase)
        honest = split_answers(inputs, n, outputs, clients)
        steps = dict(zip(clients, inputs.steps[rows].tolist(), strict=True))
        limit = self.faults.scale_limit if request.phase.alike else 0.0
        asked = AskedPhase(inputs.round, n, steps, honest[0].form(), inputs.w, limit)
        answers, missing = [late for late in self.late if late.round < inputs.round], dict[int, str]()
        self.late = [late for late in self.late if late.round == inputs.round]
        for answer in honest:
            came = self._with_fault(answer)
            answers += came if isinstance(came, list) else []
            missing |= {} if isinstance(came, list) else {answer.client: came}
        used, incidents = judge(asked, answers, missing)
        if not incidents and all(used[answer.client] is answer for answer in honest):
            return outputs
        left = outputs.leave_out(incidents, ids)
        if not used:
            return left
        up = {name: torch.stack([answer.up[name] for answer in used.values()]) for name in outputs.up}
        return left._replace(up=up, buffers=torch.stack([answer.buffers for answer in used.values()]))

    def _phase_number(self, phase: Algorithm) -> int:
        """Which phase of the round this is, from 0."""
        if not any(known is phase for known in self.phases):
            self.phases.append(phase)
        return next(n for n, known in enumerate(self.phases) if known is phase)

    def _with_fault(self, answer: Answer) -> list[Answer] | str:
        """What comes of an answer: one, two, or the reason why none does."""
        rng = generator(self.seed, f"faults {answer.phase}", answer.round, answer.client)
        kinds, place = list(self.faults.rates()), rng.random()
        drawn = int(np.searchsorted(np.cumsum(list(self.faults.rates().values())), place, side="right"))
        kind = kinds[drawn] if drawn < len(kinds) else ""
        if kind in CHANGES:
            return [CHANGES[kind](answer, self.faults, rng)]
        if kind == "late":
            self.late.append(answer)
        if kind in NOTHING_COMES or kind == "late":
            return NOTHING_COMES.get(kind, LATE)
        return [answer] * (2 if kind == "repeated" else 1)


# faults -----------------------------------------------------------------------------------------------------------

NOTHING_COMES = {"missing": NO_ANSWER, "error": CLIENT_ERROR}


def change_tensors(answer: Answer, change: Callable[[Tensor], Tensor]) -> Answer:
    """The answer with all that it sends changed."""
    return answer._replace(up={name: change(t) for name, t in answer.up.items()}, buffers=change(answer.buffers))


def lose_a_number(answer: Answer, faults: Faults, rng: np.random.Generator) -> Answer:
    """The answer with NaN or an infinity in one place; where it sends no real number, as its loss."""
    value = NUMBERS_LOST[rng.integers(len(NUMBERS_LOST))]
    names = [name for name, t in answer.up.items() if t.is_floating_point() and t.numel()]
    if not names:
        return answer._replace(loss=torch.full_like(answer.loss, value))
    name = names[rng.integers(len(names))]
    spoiled = answer.up[name].clone()
    spoiled.view(-1)[int(rng.integers(spoiled.numel()))] = value
    return answer._replace(up=answer.up | {name: spoiled})


def append_number(answer: Answer, faults: Faults, rng: np.random.Generator) -> Answer:
    """The answer with one number too many in every tensor."""
    return change_tensors(answer, lambda t: torch.cat([t.flatten(), t.new_zeros(1)]))


def change_type(answer: Answer, faults: Faults, rng: np.random.Generator) -> Answer:
    """The answer in another precision."""
    return change_tensors(answer, lambda t: t.float() if t.dtype == torch.float64 else t.double())


def multiply(answer: Answer, faults: Faults, rng: np.random.Generator) -> Answer:
    """The answer with all real numbers multiplied."""
    return change_tensors(answer, lambda t: t * faults.factor if t.is_floating_point() else t)


def say_round_before(answer: Answer, faults: Faults, rng: np.random.Generator) -> Answer:
    """The answer as one of the round before."""
    return answer._replace(round=answer.round - 1)


CHANGES: dict[str, Callable[[Answer, Faults, np.random.Generator], Answer]] = {
    "not_finite": lose_a_number,
    "wrong_shape": append_number,
    "wrong_type": change_type,
    "scaled": multiply,
    "old_round": say_round_before,
}
