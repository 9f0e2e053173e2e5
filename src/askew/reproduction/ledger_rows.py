"""Printed numbers beside ours, row by row and table by table."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from ..core.text import count_text
from ..report.tables import sample_std
from .bills import MissingRuns
from .claim_rules import NOT_RUN
from .papers import Experiment, Gap
from .printed import PrintedNumber

TRIED = re.compile(r"\b(Tried|Not tried(?: yet)?|Suspected(?: and not tried)?):")  # which begins a part of a cause
LARGE_GAP = 2.0  # points of accuracy; a larger difference from a printed number needs a cause


class LedgerRow(NamedTuple):
    """One printed number and ours."""

    printed: PrintedNumber
    values: tuple[float, ...]  # ours, one for each seed
    missed: int  # seeds that never reached the target
    held_out: tuple[float, ...]  # settings and round chosen on one half of the test set, measured on the other
    hyper: str  # the chosen grid point, where there is a grid
    missing: MissingRuns | None  # of a number that was not measured
    command: str
    seeds: tuple[int, ...] = ()  # of the values
    tuned: tuple[int, ...] = ()  # seeds by which a grid point was chosen, where there is a grid

    @property
    def digits(self) -> int:
        """As many decimals as are printed; one more for a mean of whole numbers, and three for seconds."""
        if self.printed.metric == "seconds_per_round":
            return 3
        decimals = len(self.printed.value.partition(".")[2]) if is_number(self.printed.value) else 0
        return decimals or int(len(self.values) > 1)

    @property
    def gap(self) -> float | None:
        """Our mean less the printed number, in points of accuracy; None where one of them is no accuracy."""
        known = bool(self.values) and self.prints_accuracy
        return fmean(self.values) - float(self.printed.value) if known else None

    @property
    def prints_accuracy(self) -> bool:
        """Whether the printed number is an accuracy."""
        return "accuracy" in self.printed.metric and is_number(self.printed.value)

    @property
    def is_gap(self) -> bool:
        """Whether ours is more than two points of accuracy from the printed number."""
        return self.gap is not None and abs(self.gap) > LARGE_GAP

    @property
    def ours(self) -> str:
        """Our number in words: "48.10 ± 0.10 (3 seeds)", "> 4 (1 seed)", "not run: 3 runs, 4.31 k samples"."""
        if not self.values:
            return f"{NOT_RUN}: {self.missing}" if self.missing else "–"
        return f"{self.number} ({self.seeds_text})"

    @property
    def number(self) -> str:
        """Our number alone: "48.10 ± 0.10", "> 4"."""
        return f"> {self.values[0] - 1:.0f}" if self.missed == len(self.values) else self.mean_text(self.values)

    @property
    def seeds_text(self) -> str:
        """The number of its seeds, and of those that missed a target which others reached."""
        missed = f", {self.missed} missed" if 0 < self.missed < len(self.values) else ""
        return f"{count_text(len(self.values), 'seed')}{missed}"

    @property
    def validated(self) -> str:
        """Our number with settings and round chosen on held-out samples; – if there is none."""
        return self.mean_text(self.held_out) if self.held_out else "–"

    @property
    def difference(self) -> str:
        """Our mean less the printed number; – where one of them is not a number."""
        if not self.values or self.missed or not is_number(self.printed.value):
            return "–"
        return f"{fmean(self.values) - float(self.printed.value):+.{self.digits}f}"

    def mean_text(self, values: Sequence[float]) -> str:
        """The mean ± one standard deviation, with the row's number of decimals."""
        std = sample_std(values)
        return f"{fmean(values):.{self.digits}f}" + ("" if std is None else f" ± {std:.{self.digits}f}")


class LedgerTable(NamedTuple):
    """The printed numbers of one experiment."""

    experiment: Experiment
    rows: tuple[LedgerRow, ...]
    machines: tuple[str, ...]  # what ours were measured on
    choices: Mapping[str, str]  # what the paper leaves open, and what is done here
    missing: MissingRuns | None = None  # of all its numbers that were not measured, together

    def choice_texts(self, shared: Collection[tuple[str, str]] = ()) -> list[str]:
        """What the paper leaves open and what is done; of shared choices, whose texts stand elsewhere, the names."""
        own = [f"{key}: {text}" for key, text in self.choices.items() if (key, text) not in shared]
        names = [key for key, text in self.choices.items() if (key, text) in shared]
        return [*([f"as above: {', '.join(names)}"] if names else []), *own]

    def remarks(self, shared: Collection[tuple[str, str]] = ()) -> list[str]:
        """Notes and choices in sentences."""
        choices = self.choice_texts(shared)
        return [*self.experiment.notes, *([f"Our choices. {'; '.join(choices)}."] if choices else [])]

    def count_runs(self, gap: Gap) -> int:
        """How many stored runs the accuracies come from that a cause is about."""
        counts = dict[tuple[str, str], int]()
        for r in self.rows:
            key = r.printed.case, r.printed.method.partition(" @ ")[0]
            if key[0] in gap.cases and key[1] in gap.methods:
                counts[key] = max(counts.get(key, 0), len(r.values))
        return sum(counts.values())

    @property
    def causes(self) -> list[str]:
        """The causes of large gaps, each with the cells that it is about; last the cells without an entry."""
        open_gaps = {(r.printed.case, r.printed.method.partition(" @ ")[0]): r for r in self.rows if r.is_gap}
        texts = list[str]()
        for gap in self.experiment.gaps:
            own = {key: r for key, r in open_gaps.items() if key[0] in gap.cases and key[1] in gap.methods}
            open_gaps = {key: r for key, r in open_gaps.items() if key not in own}
            if own:
                stored = self.count_runs(gap)
                stale = f" (written of {gap.runs} runs, and {stored} are stored)" if gap.runs not in (0, stored) else ""
                cause = TRIED.sub(r"*\1:*", gap.cause)
                texts.append(f"**{gap_cells(own.values())}**: {cause}{stale}")
        return texts + ([f"**{gap_cells(open_gaps.values())}**: no cause looked for yet"] if open_gaps else [])


def gap_cells(rows: Iterable[LedgerRow]) -> str:
    """The cells of some rows with their differences."""
    return ", ".join(f"{r.printed.method}, {r.printed.case} ({r.difference})" for r in rows)


def count_measured(rows: Iterable[LedgerRow]) -> int:
    """How many of the rows have a number of ours."""
    return sum(bool(row.values) for row in rows)


def is_number(text: str) -> bool:
    """Whether a printed text is a number; ">600" and "O(d)" are not."""
    return bool(re.fullmatch(r"-?\d+(\.\d+)?", text)) and text != "00"
