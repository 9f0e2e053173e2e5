"""What the entries of a queue would bring: printed numbers and claims, and in how many seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .claim_rules import NOT_RUN, UNDECIDED, rule_terms
from .claims import Claim
from .cost import estimate_seconds, training_speeds
from .ledger import PaperSection, collect_ledger
from .papers import experiments, papers_folder
from .plan import MethodKey
from .printed import PrintedNumber
from .queue import QueueEntry
from .results import read_results
from .schedule import ScheduledExperiment


class EntryPlan(NamedTuple):
    """What is missing of an entry, what it would bring and what it takes."""

    entry: QueueEntry
    missing: int  # runs
    stored: int  # runs
    numbers: int  # printed numbers that are not measured yet and need these runs
    claims: tuple[str, ...]  # undecided claims that rest on these runs, by id
    seconds: float | None  # on the device; None where its speed is not known

    @property
    def numbers_per_minute(self) -> float | None:
        """Printed numbers for each minute; None where there are no runs to make, or their time is not known."""
        return 60 * self.numbers / self.seconds if self.seconds else None


def plan_queue(
    entries: Sequence[QueueEntry], scheduled: Sequence[ScheduledExperiment], results: Path, device: str
) -> list[EntryPlan]:
    """The plan of every entry, each as if it were the only one: entries may share runs."""
    papers, speeds = papers_folder(), training_speeds(read_results(results))
    sections = collect_ledger(papers, results)
    return [
        EntryPlan(
            entry,
            missing=len(e.waiting),
            stored=e.stored,
            numbers=count_numbers(sections, missing := method_keys(e)),
            claims=tuple(undecided_claims(sections, missing)),
            seconds=estimate_seconds([p.config for p in e.waiting], device, speeds),
        )
        for entry, e in zip(entries, scheduled, strict=True)
    ]


def method_keys(e: ScheduledExperiment) -> set[MethodKey]:
    """The experiments, cases and methods of missing runs at full scale, which alone bring numbers and claims."""
    return {(p.experiment, p.case, p.method) for p in e.waiting if p.scale == "full"}


def count_numbers(sections: Sequence[PaperSection], missing: set[MethodKey]) -> int:
    """How many printed numbers that are not measured need these runs."""
    rows = [row for section in sections for row in section.rows if not row.values and row.missing]
    return sum(any(key in missing for key in number_keys(row.printed)) for row in rows)


def number_keys(number: PrintedNumber) -> Iterator[MethodKey]:
    """The experiments, cases and methods that a printed number may come from: its own, or those that it shows."""
    method = number.method.partition(" @ ")[0]
    for id in (number.experiment, *experiments()[number.experiment].runs):
        yield id, number.case, method


def undecided_claims(sections: Sequence[PaperSection], missing: set[MethodKey]) -> Iterator[str]:
    """The ids of undecided claims one of whose rules is about these runs."""
    for section in sections:
        for result in section.claims:
            if result.verdict in (NOT_RUN, UNDECIDED) and any(key in missing for key in claim_keys(result.claim)):
                yield result.claim.id


def claim_keys(claim: Claim) -> Iterator[MethodKey]:
    """The experiments, cases and methods that the rules are about on which a claim's verdict rests."""
    rules = [rule for rule in claim.rules if claim.needs_reading(rule.reading)]
    for term in [term for rule in rules for term in rule_terms(rule)]:
        for id in [term.experiment] if term.experiment else claim.experiments:
            for owner in (id, *experiments()[id].runs):
                yield owner, term.case, term.method


def sort_entries(plans: Sequence[EntryPlan]) -> list[QueueEntry]:
    """The entries with missing runs: those that bring most numbers a minute first, then most claims a minute."""

    def worth(plan: EntryPlan) -> tuple[float, float, float]:
        seconds = plan.seconds or math.inf
        return -plan.numbers / seconds, -len(plan.claims) / seconds, seconds

    return [plan.entry for plan in sorted(plans, key=worth) if plan.missing]
