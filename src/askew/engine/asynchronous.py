"""Rounds whose answers may start from an older model: asynchronous ones, and those that use late answers.

How long an answer takes depends on the plan and the bytes alone. So the clock knows before a round is trained who
begins in it and whose answers it uses. The clients that begin are trained together, from the newest model, and their
answers wait at the server until the round that uses them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.bank import Bank
from ..core.records import LEFT, NO_ANSWER, Record
from ..core.rng import uniforms
from ..core.types import State
from ..data.federation import ClientBatches, RoundPlan
from ..participation import MANY, CohortParticipation, Participation, Skewed, Turnout, UsedAnswer, keep, looks_at_all
from ..timeline import Availability, TimeSettings, members
from .base import PhaseOutputs, PhaseRequest
from .clock import SPARSE, VirtualClock, takes_any
from .expected_uploads import answer_bytes, zero_uploads
from .finite import finite_rows
from .server import Server, answers_sent, with_work

NOTHING = torch.zeros(0, dtype=torch.int64)
LEAST_TRIES = 8  # random clients that are looked at before all are

# the clock ------------------------------------------------------------------------------------------------------------


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


class FreeClients(NamedTuple):
    """When clients are there and free: those who are busy count as away."""

    availability: Availability
    busy: Set[int]

    def is_there(self, client: int, t: float) -> bool:
        return client not in self.busy and self.availability.is_there(client, t)

    def until(self, client: int, t: float) -> float:
        return t if client in self.busy else self.availability.until(client, t)

    def since(self, client: int, t: float) -> float:
        return math.inf if client in self.busy else self.availability.since(client, t)

    def earliest(self, clients: np.ndarray, t: float) -> float:
        busy = members(np.array(sorted(self.busy), dtype=np.int64), clients)
        return self.availability.earliest(np.delete(clients, np.searchsorted(clients, busy)), t)

    def longest_stay(self, client: int) -> float:
        return self.availability.longest_stay(client)

    def few(self, t: float, most: int) -> np.ndarray | None:
        there = self.availability.few(t, most + len(self.busy))
        return None if there is None else np.array([i for i in there.tolist() if i not in self.busy], dtype=np.int64)


class Replayed:
    """The items of an iterator, as often as one likes; each is asked for once."""

    def __init__(self, items: Iterator[int]) -> None:
        self.items, self.known = items, list[int]()

    def __iter__(self) -> Iterator[int]:
        yield from self.known
        for item in self.items:
            self.known.append(item)
            yield item


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
        draw, nobody_before = self.draws(round), -math.inf  # a moment before which nobody else comes
        while True:
            self.end_work(came, lost, self.settings.buffer)
            if len(came) == self.settings.buffer:
                break
            if len(self.jobs) < at_work and self.now >= nobody_before:
                places = at_work - len(self.jobs)
                ids = draw(places)
                jobs, absent = self.begin(ids, round, self.now)
                started += jobs
                lost |= absent
                if absent:
                    continue  # others may begin in their place
                nobody_before = self.arrival(round) if len(ids) < places else -math.inf
            following = min(self.next_end(), nobody_before if len(self.jobs) < at_work else math.inf)
            if math.isinf(following):
                break
            if not (started or came or lost or self.jobs):
                began = following  # nobody was there
            self.now = max(self.now, following)
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

    def draws(self, round: int) -> Callable[[int], list[int]]:
        """A function that draws so many clients that are there and free now, sorted, or all if they are fewer.

        The first draw is the participation rule's own for this round.
        """
        rule, seed, clients, eligible = self.rule, self.rule.drawn_by(self.seed), self.fed.clients, self.fed.eligible
        assert isinstance(rule, CohortParticipation)
        any_m, order = takes_any(rule), None
        if type(rule) is Skewed and not any_m:
            order = Replayed(rule.order(seed, round, eligible, clients))
        pool = rule.present(seed, round, eligible, clients) if any_m else eligible
        count, busy, chance, first = len(pool), self.busy, uniforms(seed, "time starts", round), True

        def draw(places: int) -> list[int]:
            nonlocal first
            found: list[int] = []
            if not any_m:  # in the rule's order of this round: those who began are not free, the next ones follow
                if order is not None:
                    return sorted(islice(filter(self.is_free, order), places))
                own = replace(rule, cohort=places)
                if looks_at_all(rule):
                    found = own.draw(seed, round, keep(eligible, self.is_free), clients).tolist()
                else:
                    found = own.sample_there(seed, round, eligible, clients, self.is_free).tolist()
                return found
            there = self.availability.few(self.now, count // SPARSE) if count > MANY else None
            if first:
                found = [*filter(self.is_free, rule.choose(seed, round, pool, clients).tolist())]
                found = sorted(found, key=lambda client: next(chance))[:places] if len(found) > places else found
            # after so many it is faster to look at all; where nobody can be asked there is nothing to try
            tries = count // 2 + LEAST_TRIES if there is None and count else 0
            is_there, now = self.there.is_there, self.now
            while len(found) < places and tries:
                client, tries = pool.item(int(next(chance) * count)), tries - 1
                if client not in busy and client not in found and is_there(client, now):
                    found.append(client)
            if len(found) < places:
                free = keep(pool, self.is_free) if there is None else members(there, pool)
                others = np.setdiff1d(free, found)
                found += sorted(others.tolist(), key=lambda client: next(chance))[: places - len(found)]
            first = first and not found
            return sorted(found)

        return draw

    def is_free(self, client: int) -> bool:
        """Can a client begin now?"""
        return self.availability.is_there(client, self.now)

    def arrival(self, round: int) -> float:
        """The first moment from now on at which somebody is there whom the round can still ask; perhaps never."""
        rule, pool = self.rule, self.fed.eligible
        assert isinstance(rule, CohortParticipation)
        pool = rule.present(rule.drawn_by(self.seed), round, pool, self.fed.clients)
        return self.availability.earliest(pool, self.now)

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


# the server -----------------------------------------------------------------------------------------------------------


class OverlappingServer(Server):
    """A server whose rounds use answers of clients that began in this round or in an earlier one.

    A client reads its state when it begins, and its new state counts when its answer is used.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        (up,), one = zero_uploads(self), self.space.start.new_zeros(())
        answer = {f"up.{n}": t for n, t in up.items()} | {"loss": one}
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
        loss = outputs.loss
        if outputs.state:  # of a client's state only its owner knows whether it is finite
            loss = torch.where(finite_rows(outputs.state.values()), loss, torch.nan)
        rows = {f"up.{n}": t for n, t in outputs.up.items()} | {"loss": loss, "buffers": outputs.buffers}
        self.answers.write(ids, rows | ({} if outputs.theta is None else {"theta": outputs.theta}))
        self.answer_states.write(ids, outputs.state)

    def take(self, ids: Sequence[int]) -> PhaseOutputs:
        """The answers of these clients, which wait no longer."""
        rows, state = self.answers.read(ids), self.answer_states.read(ids)
        for bank in (self.answers, self.answer_states):
            bank.forget(ids)
        up: State = {n.removeprefix("up."): t for n, t in rows.items() if n.startswith("up.")}
        loss = rows["loss"]
        return PhaseOutputs(up, state, {}, rows.get("buffers", loss.new_zeros(len(ids), 0)), loss, rows.get("theta"))
