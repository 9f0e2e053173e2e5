"""The rounds of one run on the virtual clock: who is asked, whose answers count, and how long each round lasts.

Durations depend on the plan and on the sizes of messages alone. So all of it is known before anybody trains, and who
is dropped is never trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from ..core.records import LATE, LEFT, NO_ANSWER, NOT_AWAITED
from ..core.rng import generator
from ..errors import ConfigError
from ..participation import MANY, SPARSE, CohortParticipation, Participation, Turnout, keep, looks_at_all, takes_any
from ..timeline import AlwaysThere, Device, TimeSettings, availability_of, device_of, members, wait_for
from .expected_uploads import answer_bytes
from .server import Server

CHECKED = 4096  # clients of which it is looked at together whether they can answer
ROUNDED = 1e-9  # of a stay: what the difference of two moments may be wrong by
PREVIEWED = 20  # rounds from which the expected length of a round is taken


class VirtualClock:
    """Says for one round after the other who takes part; `now` is the end of the last one asked for, in seconds."""

    def __init__(self, settings: TimeSettings, rule: Participation, server: Server, seed: int) -> None:
        self.settings, self.rule, self.server, self.seed, self.fed = settings, rule, server, seed, server.fed
        self.now = 0.0
        self.availability = availability_of(settings, seed, self.fed.clients)
        self.devices: dict[int, Device] = {}  # of the clients that were asked so far
        self.bytes_down, self.bytes_up = answer_bytes(server)
        if not any(math.isfinite(self.availability.since(i, 0.0)) for i in self.fed.eligible.tolist()):
            raise ConfigError(
                f"time: no client that has samples is ever there by {settings.trace}; name another file in time.trace."
            )
        self.check_answers()

    def check_answers(self) -> None:
        """Refuse a clock on which nobody can ever answer before it leaves, and by the deadline, if that is the end."""
        how, ids = self.settings, self.fed.eligible
        deadline = how.deadline if how.wait == "deadline" and not how.overlapping else math.inf
        if math.isinf(deadline) and not how.trace and how.availability != "day":
            return  # a stay may be of any length
        least, fastest = self.rule.least_work if self.rule.stragglers else 1.0, math.inf
        misses, nearest = math.inf, (0, 0.0, 0.0)  # the client that misses by least: its answer and its longest stay
        for k in range(0, len(ids), CHECKED):  # most often one of the first can answer
            some = ids[k : k + CHECKED]
            samples = self.planned_work(some, np.full(len(some), least))[1].tolist()
            for i, count in zip(some.tolist(), samples, strict=True):
                answer, stay = self.answer_seconds(i, count, keep=False), self.availability.longest_stay(i)
                if answer <= deadline and answer <= stay * (1 + ROUNDED):
                    return
                fastest = min(fastest, answer)
                if stay and answer - min(deadline, stay) < misses:
                    misses, nearest = answer - min(deadline, stay), (i, answer, stay)
        if fastest > deadline:
            raise ConfigError(
                f"time: no client can answer within time.deadline = {deadline:g} seconds, the fastest needs "
                f"{fastest:.4g}; raise the deadline, or lower the work or time.seconds."
            )
        client, answer, stay = nearest
        raise ConfigError(
            f"time: nobody can ever answer before it leaves{'' if math.isinf(deadline) else ' and by the deadline'}: "
            f"client {client}, which misses that by least, needs {answer:.4g} seconds and stays for {stay:.4g} at most"
            "; lower the work or time.seconds, or let clients stay longer."
        )

    # durations ----------------------------------------------------------------------------------------------------

    def planned_work(self, ids: Sequence[int] | np.ndarray, share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How many batches each of these clients trains on, and with how many samples it computes in all phases."""
        batches, trained = self.fed.planned_work(ids, self.server.local, self.server.smallest_batch, share.tolist())
        total = np.zeros(len(ids), dtype=np.int64)
        for phase in self.server.phases:
            once = [self.fed.looked_at(name, ids) for name in (*phase.before, *phase.after)]
            total += sum(once, np.zeros_like(total))
            if phase.trains:
                each = [batches * self.fed.looked_at(name, ids) for name in phase.each]
                total += sum(each, trained)
        return batches, total

    def answer_seconds(self, client: int, samples: float, keep: bool = True) -> float:
        """How long a client's answer takes."""
        device = self.devices.get(client)
        if device is None:
            size = float(self.fed.sizes[client] / self.fed.mean_size)
            device = device_of(self.settings, self.seed, client, size, self.fed.clients)
            if keep:
                self.devices[client] = device
        seconds = device.answer_seconds(samples, self.bytes_down, self.bytes_up, len(self.server.phases))
        if seconds == math.inf:
            raise ConfigError(
                f"time: an answer of client {client} never ends; give it fewer seconds a sample, or raise time.up and "
                "time.down."
            )
        return seconds

    # who is asked -------------------------------------------------------------------------------------------------

    def ask(self, round: int, moment: float) -> tuple[np.ndarray, int]:
        """Who is asked in a round that begins at this moment, and how many answers are wanted.

        The participation rule draws among those who are there. With most rules they are looked at one by one: of a
        million clients only those who may be asked.
        """
        rule, eligible = self.rule, len(self.fed.eligible)
        cohort = rule.size(self.fed.clients) if isinstance(rule, CohortParticipation) else 0
        spare = self.settings.spare if cohort and self.settings.wait == "first" else 0
        # if no more are there, all are looked at
        few = max(cohort + spare, eligible // SPARSE if eligible > MANY else 0)
        if isinstance(rule, CohortParticipation) and takes_any(rule):
            return self._ask_any(rule, round, moment, spare, few)
        wider: Participation = replace(cast(Any, rule), cohort=cohort + spare) if spare else rule
        chosen = self._ask_by_rule(wider, round, moment, few)
        return chosen, min(cohort, len(chosen)) if spare else len(chosen)

    def _ask_any(
        self, rule: CohortParticipation, round: int, moment: float, spare: int, few: int
    ) -> tuple[np.ndarray, int]:
        """As `ask`: those of the rule's own draw that are there, and others at random in place of the rest."""
        seed = rule.drawn_by(self.seed)
        pool = rule.present(seed, round, self.fed.eligible, self.fed.clients)
        wanted, there = min(rule.size(self.fed.clients), len(pool)), self.availability.few(moment, few)
        if there is None:
            is_there: Callable[[int], bool] = lambda i: self.availability.is_there(i, moment)
            drawn = rule.choose(seed, round, pool, self.fed.clients)
            asked = keep(drawn, is_there).tolist()
            asked += self.stand_ins(round, pool, drawn, wanted + spare - len(asked), is_there)
        else:
            asked = members(there, pool).tolist()
            if len(asked) > wanted + spare:
                asked = generator(seed, "time others", round).choice(asked, wanted + spare, replace=False).tolist()
        return np.array(sorted(asked), dtype=np.int64), wanted

    def _ask_by_rule(self, rule: Participation, round: int, moment: float, few: int) -> np.ndarray:
        """Whom the rule draws among those who are there."""
        seed, clients, eligible = rule.drawn_by(self.seed), self.fed.clients, self.fed.eligible
        is_there: Callable[[int], bool] = lambda i: self.availability.is_there(i, moment)
        there = self.availability.few(moment, clients if looks_at_all(rule) else max(few, SPARSE))
        if there is not None:
            return rule.draw(seed, round, members(there, eligible), clients)
        if isinstance(self.availability, AlwaysThere):
            return rule.draw(seed, round, eligible, clients)
        if looks_at_all(rule):
            return rule.draw(seed, round, keep(eligible, is_there), clients)
        return rule.sample_there(seed, round, eligible, clients, is_there)

    def stand_ins(
        self, round: int, pool: np.ndarray, drawn: np.ndarray, missing: int, is_there: Callable[[int], bool]
    ) -> list[int]:
        """So many others of the pool that are there, at random, or all if they are fewer."""
        rng = generator(self.rule.drawn_by(self.seed), "time others", round)
        tried, found = {*drawn.tolist()}, list[int]()
        while len(found) < missing and len(tried) < len(pool):
            if 2 * len(tried) < len(pool):
                candidates = pool[rng.integers(len(pool), size=2 * missing + 16)]
            else:
                candidates = rng.permutation(np.setdiff1d(pool, [*tried]))
            for i in dict.fromkeys(candidates.tolist()):
                if i not in tried and len(found) < missing:
                    tried.add(i)
                    found += [i] if is_there(i) else []
        return found

    def could_be_asked(self, round: int) -> np.ndarray:
        """The clients that a round could ask if they were there."""
        rule, eligible = self.rule, self.fed.eligible
        if not isinstance(rule, CohortParticipation):
            return eligible
        return rule.present(rule.drawn_by(self.seed), round, eligible, self.fed.clients)

    def next_arrival(self, round: int, moment: float) -> float:
        """The first moment from this one on at which somebody is there that the round could ask."""
        pool = self.could_be_asked(round)
        arrival = self.availability.earliest(pool, moment) if len(pool) else moment
        if math.isinf(arrival):
            raise ConfigError(
                f"time: nobody that round {round} could ask is ever there by {self.settings.trace}; "
                "name another file in time.trace, or another participation."
            )
        return arrival

    # rounds -------------------------------------------------------------------------------------------------------

    def turnout(self, round: int) -> Turnout:
        """Who takes part in the next round, which begins now or when somebody is there; the clock moves to its end."""
        began = self.now
        asked, wanted = self.ask(round, began)
        if not len(asked) and (arrival := self.next_arrival(round, began)) > began:
            began = arrival
            asked, wanted = self.ask(round, began)
        turnout = self.rule.answering(self.seed, round, asked, self.fed.clients)
        ids = turnout.ids.tolist()
        work = self.planned_work(ids, turnout.share)[1].tolist()
        answers = [self.answer_seconds(i, samples) for i, samples in zip(ids, work, strict=True)]
        until = [self.availability.until(i, began) for i in ids]
        leaves = [moment - began for moment in until]
        waited = wait_for(self.settings, wanted, answers, leaves)
        left = [moment for moment, reason in zip(until, waited.reasons, strict=True) if reason == LEFT]
        self.now = end_of_round(began, waited.seconds, left)
        used = np.array([not reason for reason in waited.reasons], dtype=bool)
        lost = {i: reason for i, reason in zip(ids, waited.reasons, strict=True) if reason}
        lost |= dict.fromkeys(turnout.absent.tolist(), NO_ANSWER)
        at_work = {
            i: leave if reason == LEFT else answer
            for i, answer, leave, reason in zip(ids, answers, leaves, waited.reasons, strict=True)
        }
        record: dict[str, Any] = {
            "clock": self.now,
            "began": began,
            "asked": len(asked),
            "late": sum(reason in (LATE, NOT_AWAITED) for reason in waited.reasons),
            "away": len(left),
            "answer_seconds": [at_work.get(i, 0.0) for i in asked.tolist()],  # or until it left
        }
        absent = np.array(sorted(lost), dtype=np.int64)
        return Turnout(turnout.ids[used], turnout.share[used], absent, dict(sorted(lost.items())), record)

    def resume(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Go on where the records of a run that is continued leave off."""
        self.now = float(records[-1]["clock"])

    def preview(self) -> str:
        """The expected length of a round, in words, from the first rounds; the clock stays where it is."""
        now = self.now
        rounds = [self.turnout(t).record for t in range(1, PREVIEWED + 1)]
        self.now = now
        lengths = [record["clock"] - record["began"] for record in rounds]
        asked, late, away = (sum(record[key] for record in rounds) / PREVIEWED for key in ("asked", "late", "away"))
        text = f"about {np.mean(lengths):.3g} seconds ({min(lengths):.3g} to {max(lengths):.3g} in {PREVIEWED} rounds)"
        lost = [f"{count:.3g} {what}" for count, what in ((late, "late"), (away, "leaving")) if count]
        return text + (f", {' and '.join(lost)} of {asked:.3g} asked clients" if lost else "")


def end_of_round(began: float, seconds: float, left: Sequence[float]) -> float:
    """When a round of this length ends, in which clients left at these moments.

    The moment at which somebody left is known, and the sum of the round's begin and length may be rounded to before it,
    where the client would be there again, or to after it.
    """
    lasted_until_one_left = any(moment - began == seconds for moment in left)
    return max(left) if lasted_until_one_left else max([*left, began + seconds])
