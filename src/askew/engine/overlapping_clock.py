"""The virtual clock of rounds whose answers may start from an older model: who begins, and whose answers are used.

How long an answer takes depends on the plan and the bytes alone. So all of it is known before anybody trains.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.records import LEFT, NO_ANSWER
from ..participation import CohortParticipation, Participation, Turnout, UsedAnswer
from ..timeline import TimeSettings
from .client_draws import Draw, FreeClients, draw_of
from .clock import VirtualClock
from .overlapping_server import OverlappingServer


class ClientWork(NamedTuple):
    """The work of one client, from when it is asked until its answer comes or it leaves."""

    client: int
    round: int  # in which it began, from the newest model
    began: float  # moment
    ends: float  # moment
    seconds: float
    leaves: bool  # before its answer has come
    share: float  # the fraction of its local steps that it does
    batches: int  # that it trains on


class OverlappingClock(VirtualClock):
    """Says for one round after the other who begins in it and whose answers it uses."""

    server: OverlappingServer

    def __init__(self, settings: TimeSettings, rule: Participation, server: OverlappingServer, seed: int) -> None:
        super().__init__(settings, rule, server, seed)
        self.jobs: dict[int, ClientWork] = {}  # of the clients at work
        self.ends: list[tuple[float, int]] = []  # their ends and clients, as a heap
        self.of_size: dict[int, tuple[int, int]] = {}  # the work of a client of this size
        self.all_answer = type(rule).answering is Participation.answering and not (rule.dropout or rule.stragglers)
        # Who cannot be asked: who is at work, whose answer waits, and who left or dropped out in this round: it would
        # do the same work again. Until the round ends they only become more.
        self.busy: set[int] = set()
        self.there, self.availability = self.availability, FreeClients(self.availability, self.busy)

    def turnout(self, round: int) -> Turnout:
        """Who begins in the next round and whose answers it uses; the clock moves to its end."""
        self.busy.clear()
        self.busy.update(self.jobs)
        return self.until_buffer_full(round) if self.settings.wait == "buffer" else self.until_deadline(round)

    # what clients do --------------------------------------------------------------------------------------------------

    def begin(self, ids: list[int], round: int, moment: float) -> tuple[list[ClientWork], dict[int, str]]:
        """Let these clients begin; returns their work, and why others never answer."""
        self.busy.update(ids)
        jobs, lost = self.work(ids, round, moment)
        self.add(jobs)
        return jobs, lost

    def work(self, ids: list[int], round: int, moment: float) -> tuple[list[ClientWork], dict[int, str]]:
        """The work of clients that are asked in a round, at this moment, and why others never answer."""
        shares, lost, jobs = [1.0] * len(ids), dict[int, str](), list[ClientWork]()
        if not self.all_answer:
            turnout = self.rule.answering(self.seed, round, np.array(ids, dtype=np.int64), self.fed.clients)
            ids, shares = turnout.ids.tolist(), turnout.share.tolist()
            lost = dict.fromkeys(turnout.absent.tolist(), NO_ANSWER)
        for client, share, (batches, samples) in zip(ids, shares, self.work_by_size(ids, shares), strict=True):
            answer, until = self.answer_seconds(client, samples), self.there.until(client, moment)
            leaves = until - moment < answer
            ends, seconds = (until, until - moment) if leaves else (moment + answer, answer)
            jobs.append(ClientWork(client, round, moment, ends, seconds, leaves, share, batches))
        return jobs, lost

    def work_by_size(self, ids: list[int], shares: list[float]) -> list[tuple[int, int]]:
        """The batches and samples of `planned_work` for each of these clients; those of one size have as many."""
        sizes, known = [self.fed.sizes.item(client) for client in ids], self.of_size
        by_size = self.all_answer and not self.server.looks
        if by_size and all(size in known for size in sizes):
            return [known[size] for size in sizes]
        batches, samples = self.planned_work(ids, np.array(shares))
        work = list(zip(batches.tolist(), samples.tolist(), strict=True))
        known |= zip(sizes, work, strict=True) if by_size else ()
        return work

    def add(self, jobs: Sequence[ClientWork]) -> None:
        """Take up work."""
        for job in jobs:
            self.jobs[job.client] = job
            heapq.heappush(self.ends, (job.ends, job.client))

    def next_end(self) -> float:
        """When the next answer comes or the next client at work leaves; infinity if nobody is at work."""
        return self.ends[0][0] if self.ends else math.inf

    def end_work(self, came: list[ClientWork], lost: dict[int, str], most: float = math.inf) -> None:
        """Add to `came` and `lost` the work that has ended by now, until so many answers have come.

        Of work that ends at one moment, that of the first client comes first.
        """
        while self.next_end() <= self.now and len(came) < most:
            job = self.jobs.pop(heapq.heappop(self.ends)[1])
            if job.leaves:
                lost[job.client] = LEFT
            else:
                came.append(job)

    def resume(self, records: Sequence[Mapping[str, Any]]) -> None:
        super().resume(records)
        began: dict[int, tuple[int, float]] = {}
        for record in records:
            moments = zip(record["started"], record["started_at"], strict=True)
            began |= {client: (record["round"], moment) for client, moment in moments}
            incidents = record.get("incidents", {}).values()
            for client in {*record["participants"], *(client for clients in incidents for client in clients)}:
                began.pop(client, None)
        for client, (round, moment) in began.items():
            self.add(self.work([client], round, moment)[0])
        self.server.resume(records)

    def preview(self) -> str:
        jobs, ends = dict(self.jobs), list(self.ends)
        try:
            return super().preview()
        finally:
            self.jobs, self.ends = jobs, ends

    # how the server waits ---------------------------------------------------------------------------------------------

    def until_deadline(self, round: int) -> Turnout:
        """A round that ends at its deadline, or when nobody is at work any more."""
        began = self.now
        asked, _ = self.ask(round, began)
        if not len(asked) and not self.jobs and (arrival := self.next_arrival(round, began)) > began:
            began = arrival
            asked, _ = self.ask(round, began)
        started, lost = self.begin(asked.tolist(), round, began)
        last = max((job.ends for job in self.jobs.values()), default=began)
        self.now = min(began + self.settings.deadline, last)
        came: list[ClientWork] = []
        self.end_work(came, lost)
        late = sum(job.client in self.jobs for job in started)
        return self.summary(began, len(asked), late, started, came, lost)

    def until_buffer_full(self, round: int) -> Turnout:
        """A round that ends when so many answers have come: before that, a client begins where another one ended.

        If nobody is at work and nobody can come any more, it ends with the answers that there are.
        """
        began, at_work = self.now, self.at_work
        started, came, lost = list[ClientWork](), list[ClientWork](), dict[int, str]()
        draw, nobody_before = self.draw_of_round(round), -math.inf  # a moment before which nobody else comes
        while True:
            self.end_work(came, lost, self.settings.buffer)
            if len(came) == self.settings.buffer:
                break
            if len(self.jobs) < at_work and self.now >= nobody_before:
                places = at_work - len(self.jobs)
                ids = draw(places, self.now)
                jobs, absent = self.begin(ids, round, self.now)
                started += jobs
                lost |= absent
                if absent:
                    continue  # others may begin in their place
                nobody_before = self.arrival(round) if len(ids) < places else -math.inf
            next_event = min(self.next_end(), nobody_before if len(self.jobs) < at_work else math.inf)
            if math.isinf(next_event):
                break
            if not (started or came or lost or self.jobs):
                began = next_event  # nobody was there
            self.now = max(self.now, next_event)
        if not (started or came or lost):
            self.next_arrival(round, self.now)  # which refuses a round that can never ask anybody
        asked = len(started) + sum(reason == NO_ANSWER for reason in lost.values())
        return self.summary(began, asked, 0, started, came, lost)

    @property
    def at_work(self) -> int:
        """How many clients work at the same time, if so many are there."""
        rule = self.rule
        assert isinstance(rule, CohortParticipation)
        return self.settings.at_work or rule.size(self.fed.clients)

    def draw_of_round(self, round: int) -> Draw:
        """How the clients that begin in a round are drawn."""
        assert isinstance(self.rule, CohortParticipation) and isinstance(self.availability, FreeClients)
        return draw_of(self.rule, self.seed, round, self.fed, self.availability)

    def arrival(self, round: int) -> float:
        """The first moment from now on at which somebody is there whom the round can still ask; perhaps never."""
        return self.availability.earliest(self.could_be_asked(round), self.now)

    def summary(
        self,
        began: float,
        asked: int,
        late: int,
        started: list[ClientWork],
        came: list[ClientWork],
        lost: dict[int, str],
    ) -> Turnout:
        """What the server must know of a round that has just ended on the clock."""
        record: dict[str, Any] = {
            "clock": self.now,
            "began": began,
            "asked": asked,
            "late": late,
            "away": sum(reason == LEFT for reason in lost.values()),
            "answer_seconds": [job.seconds for job in started],  # or until it left
            "started": [job.client for job in started],
            "started_at": [job.began for job in started],
        }
        trained = sorted((job.client, job.share) for job in started if not job.leaves)
        ids, share = (np.array([pair[k] for pair in trained], dtype=kind) for k, kind in ((0, np.int64), (1, float)))
        used = [UsedAnswer(job.client, job.round, job.batches) for job in sorted(came)]
        return Turnout(ids, share, np.array(sorted(lost), dtype=np.int64), dict(sorted(lost.items())), record, used)
