"""What the ledger comes to: how far ours is from what is printed, by how much a paper's method leads, and in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from ..core.text import count_text
from ..errors import ConfigError
from ..report.statistics import MIN_SEEDS, t_interval
from .claim_results import ClaimResult
from .claim_rules import FAILS, HOLDS, NOT_RUN, UNDECIDED
from .ledger import PaperSection
from .ledger_rows import LedgerRow
from .titles import own_methods

LEVEL = 0.1  # points; a smaller mean difference is called level
PLACEHOLDER = re.compile(r"\{([^{}]+)\}")
# A verdict as the end of a sentence: "That it is fair …"
VERDICT_WORDS = {HOLDS: "holds", FAILS: "does not hold", UNDECIDED: "is undecided", NOT_RUN: "was not run"}


def accuracy_rows(rows: Iterable[LedgerRow]) -> list[LedgerRow]:
    """Those of the rows that are measured in percent of accuracy whose printed number is one."""
    return [row for row in rows if row.gap is not None]


def gap_sizes(rows: Iterable[LedgerRow]) -> list[float]:
    """How far our accuracies are from the printed ones, in points."""
    return [abs(row.gap) for row in rows if row.gap is not None]


# leads ----------------------------------------------------------------------------------------------------------


class Lead(NamedTuple):
    """By how many points a paper's method is above another one in one column of a table, at the seeds of both."""

    experiment: str
    case: str
    method: str
    rival: str
    ours: float
    printed: float
    seeds: int  # at which both were measured
    low: float  # the ends of the 95% interval of the mean over these seeds
    high: float

    @property
    def is_ahead(self) -> bool:
        """Whether three seeds or more put the whole interval above 0."""
        return self.seeds >= MIN_SEEDS and self.low > 0

    @property
    def is_behind(self) -> bool:
        """Whether three seeds or more put the whole interval below 0."""
        return self.seeds >= MIN_SEEDS and self.high < 0

    @property
    def sure(self) -> str:
        """The number of seeds, and whether they tell the lead from 0."""
        return f"{count_text(self.seeds, 'seed')}, {'clear' if self.is_ahead or self.is_behind else 'unsure'}"


def accuracy_columns(section: PaperSection) -> dict[tuple[str, str, str], dict[str, LedgerRow]]:
    """The rows with printed accuracies by method, for every experiment, case and metric; where a case is not the
    published problem, its numbers say nothing of the methods.
    """
    columns: dict[tuple[str, str, str], dict[str, LedgerRow]] = {}
    for table in section.tables:
        for row in table.rows:
            p = row.printed
            if row.prints_accuracy and table.experiment.is_comparable(p.case):
                columns.setdefault((p.experiment, p.case, p.metric), {})[p.method] = row
    return columns


def count_columns(section: PaperSection) -> int:
    """In how many columns the paper prints accuracies of its own methods and of others."""
    own = own_methods(section.name)
    beside = {key[:2]: rows.keys() for key, rows in accuracy_columns(section).items() if rows.keys() & {*own}}
    return sum(bool(methods - {*own}) for methods in beside.values())


def find_leads(section: PaperSection) -> list[Lead]:
    """The leads of the paper's methods over all others, wherever both were measured.

    A seed by which the settings of one of the two were chosen is left out where there are others: there it is ahead by
    the choice.
    """
    own, leads = own_methods(section.name), list[Lead]()
    for (experiment, case, _), rows in accuracy_columns(section).items():
        for method in (name for name in own if name in rows):
            for rival, other in ((name, row) for name, row in rows.items() if name not in own):
                by_seed, rival_by_seed = (dict(zip(r.seeds, r.values, strict=False)) for r in (rows[method], other))
                both = sorted(by_seed.keys() & rival_by_seed.keys())
                both = [seed for seed in both if seed not in (*rows[method].tuned, *other.tuned)] or both
                if both:
                    points = [by_seed[seed] - rival_by_seed[seed] for seed in both]
                    printed = float(rows[method].printed.value) - float(other.printed.value)
                    ends = t_interval(points, 0.95)
                    leads.append(Lead(experiment, case, method, rival, fmean(points), printed, len(both), *ends))
    return leads


class PaperStanding(NamedTuple):
    """How a paper's methods stand in the columns of its tables beside all others that were measured."""

    first: int  # columns in which one of them is clearly ahead of every other one
    behind: int  # in which another one is clearly ahead of each of them
    columns: int
    printed: int  # in which one of them is ahead of every other one in print

    @property
    def answer(self) -> str:
        """Whether the paper's methods are better than the others."""
        if self.first and self.behind:
            return "in part"
        return "yes" if self.first else "no" if self.behind else "undecided"

    @property
    def text(self) -> str:
        """The columns in words."""
        unsure = self.columns - self.first - self.behind
        return f"clearly first in {self.first}, unsure in {unsure}, clearly behind in {self.behind}"


def leads_by_column(leads: Iterable[Lead]) -> dict[tuple[str, str], list[list[Lead]]]:
    """The leads by experiment and case; in each of these, those of every method of the paper apart."""
    columns: dict[tuple[str, str], dict[str, list[Lead]]] = {}
    for lead in leads:
        columns.setdefault((lead.experiment, lead.case), {}).setdefault(lead.method, []).append(lead)
    return {column: list(methods.values()) for column, methods in columns.items()}


def find_standing(leads: Iterable[Lead]) -> PaperStanding:
    """The standing, here and in the paper's own numbers for the same methods."""
    columns = leads_by_column(leads).values()
    return PaperStanding(
        first=sum(any(all(lead.is_ahead for lead in each) for each in methods) for methods in columns),
        behind=sum(all(any(lead.is_behind for lead in each) for each in methods) for methods in columns),
        columns=len(columns),
        printed=sum(any(all(lead.printed > 0 for lead in each) for each in methods) for methods in columns),
    )


def best_rivals(leads: Iterable[Lead]) -> list[Lead]:
    """The lead over the best other method in every column, of that method of the paper which has the most of it."""
    columns = leads_by_column(leads).values()
    return [max((min(each, key=lambda lead: lead.ours) for each in m), key=lambda lead: lead.ours) for m in columns]


# summaries ------------------------------------------------------------------------------------------------------


def summary_texts(section: PaperSection) -> tuple[str, str]:
    """The finding in a sentence and the summary of a paper, from papers/NAME/summary.md; empty where there is none.

    Every number and verdict in it is a placeholder, which is filled from the ledger.
    """
    finding, _, summary = section.summary_template.partition("\n\n")
    first, second = (PLACEHOLDER.sub(lambda m: fill_placeholder(section, m[1]), text) for text in (finding, summary))
    finding = " ".join(first.split())
    return finding[:1].upper() + finding[1:], " ".join(second.split())


def fill_placeholder(section: PaperSection, text: str) -> str:
    """The words for one placeholder: its first word says what, the rest of which."""
    what, _, about = text.partition(" ")
    if what not in PLACEHOLDERS:
        raise ConfigError(
            f"papers/{section.name}/summary.md: {{{text}}} is unknown; it begins with {', '.join(PLACEHOLDERS)}."
        )
    return PLACEHOLDERS[what](section, about)


def verdict_words(section: PaperSection, about: str) -> str:
    """The verdict on a claim, with a reference to it."""
    found = [result for result in section.claims if result.claim.id == about]
    if not found:
        raise ConfigError(f"papers/{section.name}/summary.md: there is no claim {about!r}; correct it.")
    verdict, readings = found[0].verdict, found[0].readings
    undecided = verdict == UNDECIDED and next(iter(readings.values())) != UNDECIDED  # as other readings are open
    if undecided or found[0].has_open_reading or found[0].is_reversed:
        return f"{', '.join(f'{bold_verdict(v)} with the {reading}' for reading, v in readings.items())} ({about})"
    return f"{bold_verdict(verdict)} ({about})"


def bold_verdict(verdict: str) -> str:
    """A verdict as the end of a sentence."""
    return f"**{VERDICT_WORDS.get(verdict, verdict)}**"


def named_leads(section: PaperSection, about: str) -> tuple[str, str, list[Lead]]:
    """The method, the rival and the leads: of "CASE | METHOD | RIVAL", or "METHOD | RIVAL" in all columns with both."""
    *case, method, rival = (part.strip() for part in about.split("|"))
    known = {row.printed.method for row in section.rows}
    if not {method, rival} <= known:
        raise ConfigError(f"papers/{section.name}/summary.md: {about!r} names a method that is not printed.")
    leads = [lead for lead in find_leads(section) if (lead.method, lead.rival) == (method, rival)]
    return method, rival, [lead for lead in leads if not case or lead.case == case[0]]


def beat_words(section: PaperSection, about: str) -> str:
    """Whether a method beats another one, as a sentence."""
    method, rival, leads = named_leads(section, about)
    ahead, behind = sum(lead.is_ahead for lead in leads), sum(lead.is_behind for lead in leads)
    if not ahead and not behind:
        return f"**Whether {method} beats {rival} is undecided.**"
    if ahead and behind:
        return f"**{method} beats {rival} in {ahead} of {len(leads)} columns, and is clearly behind in {behind}.**"
    if ahead:
        return f"**{method} beats {rival}{f' in {ahead} of {len(leads)} columns' if ahead < len(leads) else ''}.**"
    where = f": it is clearly behind in {behind} of {len(leads)} columns" if behind < len(leads) else ""
    return f"**{method} does not beat {rival}{where}.**"


def brief_words(section: PaperSection, about: str) -> str:
    """How far a method is ahead of another one or behind, and how sure that is."""
    _, rival, leads = named_leads(section, about)
    return f"{place_words(fmean(lead.ours for lead in leads), rival, leads)})" if leads else f"not run beside {rival}"


def ahead_words(section: PaperSection, about: str) -> str:
    """The same, and what the paper prints of it."""
    _, rival, leads = named_leads(section, about)
    if not leads:
        return f"not run beside {rival}"
    printed = fmean(lead.printed for lead in leads)
    in_print = f"{abs(printed):.1f} {'ahead' if printed > 0 else 'behind'}"
    return f"{place_words(fmean(lead.ours for lead in leads), rival, leads)}; in print {in_print})"


def place_words(mean: float, rival: str, leads: Sequence[Lead]) -> str:
    """A mean lead in words, with an open bracket in which stands how sure it is."""
    place = f"{abs(mean):.1f} points {'ahead of' if mean > 0 else 'behind'}" if abs(mean) >= LEVEL else "level with"
    if len(leads) == 1:
        return f"{place} {rival} ({leads[0].sure}"
    counts = {"ahead": sum(lead.is_ahead for lead in leads), "behind": sum(lead.is_behind for lead in leads)}
    clear = ", ".join(f"clearly {where} in {count}" for where, count in counts.items() if count) or "none clear"
    return f"{place} {rival} on average ({len(leads)} columns, {clear}"


PLACEHOLDERS: dict[str, Callable[[PaperSection, str], str]] = {
    "verdict": verdict_words,
    "beats": beat_words,
    "brief": brief_words,
    "ahead": ahead_words,
}


# claims by grounds ----------------------------------------------------------------------------------------------

TRAINED, COUNTED, DEDUCED, NO_RULE = "trained", "counted", "deduced", "without a rule"


def claim_grounds(result: ClaimResult) -> str:
    """What a verdict comes from: runs that were trained, counts, or the methods' code and arithmetic alone.

    Of several readings of the paper the default one, which is the first, says it.
    """
    rules = result.claim.rules
    tests = {rule.test for rule in rules if rule.reading == rules[0].reading}
    return NO_RULE if not tests else TRAINED if tests - {"fact", "custom"} else COUNTED if "fact" in tests else DEDUCED
