"""Answers of clients and the one check of them, by which simulations and deployments refuse the same answers.

A client whose answer is refused is left out of the phase: its stored state stays as it was, and the weights are
normalised over the others. Every reason why an answer is not used is one of the constants below, in all records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.records import NO_ANSWER, REPEATED
from ..core.types import State
from .base import UPLOAD, Incident, PhaseInputs, PhaseOutputs
from .distributed import TensorSpec
from .finite import finite_rows

# Reasons of incidents, beside those in core/records.py that nothing came. Something came, and it was refused:
OTHER_CLIENT = "answer of another client"
OTHER_ROUND = "answer to another round"
WRONG_FORM = "wrong names, shapes or types"
TOO_LARGE = "update too large"
# An answer came, and it cannot be used:
NOT_FINITE = "not finite"
NO_BATCH = "not a whole batch of samples"
# Good answers of a round that cannot be used as a whole:
TOO_FEW = "too few answers in the round"
NO_SECURE_SUM = "no secure sum in the round"
MODEL_NOT_FINITE = "new model not finite"

ARRIVED = (NOT_FINITE, NO_BATCH, TOO_FEW, MODEL_NOT_FINITE, REPEATED)  # an answer came that was not refused
LEAST_COMPARED = 3  # answers, from which on their lengths are compared: of two, it cannot be decided which one is wrong
SCALE_LIMIT = 100.0  # times the median length, by default


class Answer(NamedTuple):
    """What one client returns for one phase: what it sends, and in a simulation also what it keeps."""

    client: int
    round: int
    phase: int  # from 0
    up: State
    buffers: Tensor  # [Q]
    loss: Tensor  # 0-d
    kept: State  # its new state and its model; empty where they stay with the client

    def sent(self) -> State:
        """The tensors of the answer."""
        return {**{UPLOAD + name: t for name, t in self.up.items()}, "buffers": self.buffers}

    def form(self) -> dict[str, TensorSpec]:
        """Shapes and types of these tensors."""
        return {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in self.sent().items()}

    def is_finite(self) -> bool:
        """Are all of its numbers finite?"""
        numbers = (*self.up.values(), self.buffers, self.loss, *self.kept.values())
        return all(bool(torch.isfinite(t).all()) for t in numbers)


class AskedPhase(NamedTuple):
    """What the clients of a phase were asked for."""

    round: int
    phase: int
    steps: dict[int, float]  # local steps by client, in the order of the cohort
    specs: dict[str, TensorSpec]  # shapes and types of the tensors of an answer
    w: Tensor  # the model that they were sent, [P] or [C, P]
    scale_limit: float  # 0: lengths are not compared


def answer_incident(client: int, reason: str) -> Incident:
    """The incident of a client whose answer is not used for this reason."""
    return Incident(client, reason, reason in ARRIVED, reason != REPEATED)


def judge(
    asked: AskedPhase, answers: Sequence[Answer], missing: Mapping[int, str]
) -> tuple[dict[int, Answer], list[Incident]]:
    """The accepted answers by client, in the order of the cohort, and an incident for each other client that was asked.

    `answers` are in the order in which they came, from whomever; `missing` has by client why no answer of it came. A
    second answer is an incident too. An answer to another round is none if its client's answer to this one is there:
    it was counted when it was due.
    """
    accepted, refused, incidents = dict[int, Answer](), dict[int, str](), list[Incident]()
    for answer in answers:
        reason = refusal(asked, answer)
        if answer.client not in asked.steps or (answer.client in accepted and reason == OTHER_ROUND):
            continue
        if answer.client in accepted:
            incidents.append(answer_incident(answer.client, REPEATED))
        elif reason:
            refused[answer.client] = reason
        else:
            accepted[answer.client] = answer
    for client in too_large(asked, accepted):
        refused[client] = TOO_LARGE
        del accepted[client]
    used = {client: accepted[client] for client in asked.steps if client in accepted}
    reasons = {client: missing.get(client) or refused.get(client, NO_ANSWER) for client in asked.steps}
    incidents += [answer_incident(client, reason) for client, reason in reasons.items() if client not in used]
    return used, incidents


def refusal(asked: AskedPhase, answer: Answer) -> str:
    """Why an answer by itself cannot be used; empty if it can."""
    if (answer.round, answer.phase) != (asked.round, asked.phase):
        return OTHER_ROUND
    if answer.form() != asked.specs:
        return WRONG_FORM
    return "" if answer.is_finite() else NOT_FINITE


def too_large(asked: AskedPhase, answers: Mapping[int, Answer]) -> list[int]:
    """The clients whose upload is longer than the limit times the median of all, and longer than the model itself;
    or whose buffers are longer than the limit times the median.

    Two things keep right answers from being refused. Local training moves as far as its steps are many: who is asked
    for more steps than the median client may have an update that is as many times longer. And where most clients hardly
    move any more, one with other data may move far; that is no fault as long as it is less than the model's length.
    """
    if not asked.scale_limit or len(answers) < LEAST_COMPARED:
        return []
    steps = torch.tensor([asked.steps[client] for client in answers], dtype=torch.float64)
    allowed = asked.scale_limit * (steps / steps.median().clamp(min=1)).clamp(min=1)
    uploads = torch.stack([length(list(one.up.values())) for one in answers.values()])
    buffers = torch.stack([length([one.buffers]) for one in answers.values()])
    model = length([asked.w if asked.w.dim() == 1 else asked.w[0]])
    uploads, buffers, model = uploads.cpu(), buffers.cpu(), model.cpu()
    wrong = (uploads > allowed * uploads.median()) & (uploads > model) & (uploads.median() > 0)
    wrong |= (buffers > allowed * buffers.median()) & (buffers.median() > 0)
    return [client for client, is_wrong in zip(answers, wrong.tolist(), strict=True) if is_wrong]


def length(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all numbers of some tensors, in float64; whole numbers do not count."""
    squares = [t.double().square().sum() for t in tensors if t.is_floating_point()]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)


# the answers of a cohort ------------------------------------------------------------------------------------------


def split_answers(inputs: PhaseInputs, phase: int, outputs: PhaseOutputs, clients: Sequence[int]) -> list[Answer]:
    """A phase's outputs as one answer for each of these clients, in the order of the rows."""
    kept = {f"state.{name}": t for name, t in outputs.state.items()}
    kept |= {} if outputs.theta is None else {"theta": outputs.theta}
    answers = []
    for i, client in enumerate(clients):
        up, own = ({name: t[i] for name, t in entries.items()} for entries in (outputs.up, kept))
        answers.append(Answer(client, inputs.round, phase, up, outputs.buffers[i], outputs.loss[i], own))
    return answers


def leave_out_not_finite(outputs: PhaseOutputs, ids: Sequence[int], reports: Iterable[Tensor]) -> PhaseOutputs:
    """The outputs without the clients whose rows of these reports are not finite; `ids` are the whole cohort's."""
    finite = finite_rows(reports).tolist()
    broken = [ids[row] for row, fine in zip(outputs.cohort_rows(), finite, strict=True) if not fine]
    return outputs.leave_out([answer_incident(client, NOT_FINITE) for client in broken], ids) if broken else outputs
