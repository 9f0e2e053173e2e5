"""The server of rounds whose answers may start from an older model: asynchronous ones, and those that use late answers.

The clients that begin in a round are trained together, from the newest model. Their answers wait at the server until
the round that uses them; `overlapping_clock.py` says which one that is.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch

from ..core.bank import Bank
from ..core.records import Record
from ..data.federation import ClientBatches, RoundPlan
from ..participation import Turnout, UsedAnswer
from .base import UPLOAD, PhaseOutputs, PhaseRequest, uploads_in
from .expected_uploads import answer_bytes, zero_uploads
from .finite import finite_rows
from .server import Server, answers_sent, with_work

NOTHING = torch.zeros(0, dtype=torch.int64)


class OverlappingServer(Server):
    """A server whose rounds use answers of clients that began in this round or in an earlier one.

    A client reads its state when it begins, and its new state counts when its answer is used.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        (up,), one = zero_uploads(self), self.space.start.new_zeros(())
        answer = {UPLOAD + n: t for n, t in up.items()} | {"loss": one}
        answer |= {"buffers": self.space.buffers} if self.space.Q else {}
        answer |= {} if self.private.empty else {"theta": self.space.start}
        self.answers = Bank(answer)  # that wait until they are used, by client
        self.answer_states = Bank(self.clients.start, owns=self.clients.owns)
        self.bytes_down, self.bytes_up = answer_bytes(self)
        self.versions = [0]  # the number of steps that were made before each round, from the first

    @property
    def stored_banks(self) -> dict[str, Bank]:
        return self.banks | {"answers": self.answers, "answer_states": self.answer_states}

    def resume(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Count the steps of a run that is continued: a round without a used answer made none."""
        self.versions = [0]
        for record in records:
            self.versions.append(self.versions[-1] + (len(record["participants"]) > record["dropped"]))

    def turnout_requests(self, round: int, turnout: Turnout) -> Generator[PhaseRequest, PhaseOutputs, Record]:
        """One round: train those who begin in it, keep their answers, and make a step with those that have come."""
        assert turnout.used is not None
        (phase,) = self.phases
        beginning = with_work(self.prepare(round, turnout.ids.tolist(), turnout.share.tolist()))
        if beginning.ids:
            self.keep(beginning.ids, (yield self.first_request(round, beginning)))
        never_trained = turnout.record["asked"] - len(turnout.ids)  # as they leave, or never answer
        self.staleness = {a.client: self.versions[round - 1] - self.versions[a.round - 1] for a in turnout.used}
        ids = [answer.client for answer in turnout.used]
        current = self.begin_round(round, ids, turnout.reasons, self.used_plan(beginning, turnout.used))
        current.bytes_down = self.bytes_down * (len(beginning.ids) + never_trained)
        if current.plan.ids:
            outputs = self.take(current.plan.ids)
            if self.stages:
                outputs = self.through_stages(self.phase_request(0, current, {}), outputs)
            current.bytes_up = self.bytes_up * answers_sent(outputs)
            self.receive(current, phase, outputs)
        record = self.end_round(current)
        self.versions.append(self.versions[-1] + current.finite)
        return record | {"staleness": [self.staleness[client] for client in record["participants"]]}

    def used_plan(self, plan: RoundPlan, used: Sequence[UsedAnswer]) -> RoundPlan:
        """The plan of those whose answers are used, as far as the server's step needs it: how many steps each took."""
        train = [ClientBatches(NOTHING, [0] * (answer.batches + 1)) for answer in used]
        return with_work(plan._replace(ids=[answer.client for answer in used], train=train, looks={}))

    def keep(self, ids: Sequence[int], outputs: PhaseOutputs) -> None:
        """Keep answers until they are used."""
        outputs = self.messages.without_private(outputs)
        if outputs.state:  # of a client's state only its owner knows whether it is finite
            finite = finite_rows(outputs.state.values())
            outputs = outputs._replace(loss=torch.where(finite, outputs.loss, torch.nan))
        self.answers.write(ids, outputs.entries())
        self.answer_states.write(ids, outputs.state)

    def take(self, ids: Sequence[int]) -> PhaseOutputs:
        """The answers of these clients, which wait no longer."""
        rows, state = self.answers.read(ids), self.answer_states.read(ids)
        for bank in (self.answers, self.answer_states):
            bank.forget(ids)
        buffers = rows.get("buffers", rows["loss"].new_zeros(len(ids), 0))
        return PhaseOutputs(uploads_in(rows), state, {}, buffers, rows["loss"], rows.get("theta"))
