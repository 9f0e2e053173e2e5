"""What the ledger comes to: how far ours is from what is printed, by how much a paper's method leads, and in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import NamedTuple

from ..errors import ConfigError
from ..report.statistics import MIN_SEEDS, t_interval
from .claim_rules import FAILS, HOLDS, NOT_RUN, UNDECIDED
from .ledger import ClaimResult, LedgerRow, PaperSection, count_measured, count_seeds, is_number

# The methods that a paper proposes or compares with FedAvg, where they are not called like the paper.
OWN_METHODS = {"mldl24": ("Loss-biased", "MGDA")}
PLACEHOLDER = re.compile(r"\{([^{}]+)\}")
# A verdict as the end of a sentence: "That it is fair …"
VERDICT_WORDS = {HOLDS: "holds", FAILS: "does not hold", UNDECIDED: "is undecided", NOT_RUN: "was not run"}


def accuracy_rows(rows: Iterable[LedgerRow]) -> list[LedgerRow]:
    """Those of the rows that are measured in percent of accuracy whose printed number is one."""
    return [row for row in rows if row.values and "accuracy" in row.printed.metric and is_number(row.printed.value)]


def gap_of(row: LedgerRow) -> float:
    """Our mean less the printed number."""
    return fmean(row.values) - float(row.printed.value)


class Gaps(NamedTuple):
    """Distances of measured accuracies from the printed ones, in points."""

    total: int
    median: float
    largest: LedgerRow | None
    close: int  # how many are within a point


def find_gaps(rows: Sequence[LedgerRow]) -> Gaps:
    """The distances of rows of accuracy."""
    sizes = [abs(gap_of(row)) for row in rows]
    largest = max(rows, key=lambda row: abs(gap_of(row)), default=None)
    return Gaps(len(rows), median(sizes) if sizes else 0.0, largest, sum(size <= 1 for size in sizes))


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
    clear: bool = False  # whether the 95% interval of the mean over these seeds is on one side of 0


def own_methods(section: PaperSection) -> tuple[str, ...]:
    """The methods that the paper proposes."""
    return OWN_METHODS.get(section.name, (section.title,))


def find_leads(section: PaperSection) -> list[Lead]:
    """The leads of the paper's methods over all others, wherever both were measured."""
    columns: dict[tuple[str, str, str], dict[str, LedgerRow]] = {}
    for row in accuracy_rows(section.rows):
        p = row.printed
        columns.setdefault((p.experiment, p.case, p.metric), {})[p.method] = row
    own, leads = own_methods(section), list[Lead]()
    for (experiment, case, _), rows in columns.items():
        for method in (name for name in own if name in rows):
            for rival, other in ((name, row) for name, row in rows.items() if name not in own):
                by_seed, rival_by_seed = (dict(zip(r.seeds, r.values, strict=False)) for r in (rows[method], other))
                both = sorted(by_seed.keys() & rival_by_seed.keys())
                if both:
                    points = [by_seed[seed] - rival_by_seed[seed] for seed in both]
                    printed = float(rows[method].printed.value) - float(other.printed.value)
                    clear = is_clear(points)
                    leads.append(Lead(experiment, case, method, rival, fmean(points), printed, len(both), clear))
    return leads


def is_clear(points: Sequence[float]) -> bool:
    """Whether three seeds or more tell a difference from 0: its 95% interval is on one side of it."""
    low, high = t_interval(points, 0.95)
    return len(points) >= MIN_SEEDS and (low > 0 or high < 0)


def lead_seeds(leads: Sequence[Lead]) -> str:
    """The numbers of seeds of some leads in words: "1 seed", "2 to 10 seeds"."""
    fewest, most = min(lead.seeds for lead in leads), max(lead.seeds for lead in leads)
    return f"{fewest} to {most} seeds" if fewest < most else count_seeds(most)


class Wins(NamedTuple):
    """In how many columns of the tables a paper's method is above every other one that was measured."""

    columns: int
    ours: int
    printed: int


def count_wins(leads: Sequence[Lead]) -> Wins:
    """The wins, here and in the paper's own numbers for the same methods."""
    columns: dict[tuple[str, str, str], list[Lead]] = {}
    for lead in leads:
        columns.setdefault((lead.experiment, lead.case, lead.method), []).append(lead)
    ours, printed = (
        sum(all(getattr(lead, which) > 0 for lead in each) for each in columns.values())
        for which in ("ours", "printed")
    )
    return Wins(len(columns), ours, printed)


# summaries ------------------------------------------------------------------------------------------------------


def summary_texts(section: PaperSection) -> tuple[str, str]:
    """The finding in a sentence and the summary of a paper, from papers/NAME/summary.md; empty where there is none.

    Every number and verdict in it is a placeholder, which is filled from the ledger.
    """
    finding, _, summary = section.summary_template.partition("\n\n")
    first, second = (PLACEHOLDER.sub(lambda m: fill_placeholder(section, m[1]), text) for text in (finding, summary))
    return " ".join(first.split()), " ".join(second.split())


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
    if verdict == UNDECIDED and next(iter(readings.values())) != UNDECIDED:  # decided in the default reading alone
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


def lead_words(section: PaperSection, about: str) -> str:
    """A lead as a number with its sign, on average where there are several columns."""
    _, _, leads = named_leads(section, about)
    if not leads:
        return "not run"
    mean = " on average" if len(leads) > 1 else ""
    ours, printed = fmean(lead.ours for lead in leads), fmean(lead.printed for lead in leads)
    return f"{ours:+z{point_digits(ours)}} points{mean} ({lead_seeds(leads)}; printed {printed:+z.1f})"


def ahead_words(section: PaperSection, about: str) -> str:
    """Which of two methods is ahead, and by how much; in one column, whether that could be chance."""
    method, rival, leads = named_leads(section, about)
    if not leads:
        return f"{method} and {rival} were not both run"
    ours, printed = fmean(lead.ours for lead in leads), fmean(lead.printed for lead in leads)
    first, second = (method, rival) if ours > 0 else (rival, method)
    in_print = "too" if printed * ours > 0 else f"{second} is ahead"
    of = f"on average over {len(leads)} columns, {lead_seeds(leads)}" if len(leads) > 1 else chance_words(leads[0])
    return (
        f"{first} is {abs(ours):{point_digits(ours)}} points ahead of {second} ({of}; in print {in_print}, by "
        f"{abs(printed):.1f})"
    )


def chance_words(lead: Lead) -> str:
    """The number of seeds of one lead, and whether they tell it from 0."""
    sure = "clear" if lead.clear else "could be chance" if lead.seeds >= MIN_SEEDS else "too few to be sure"
    return f"{count_seeds(lead.seeds)}, {sure}"


def point_digits(points: float) -> str:
    """How points are printed: with one digit, where this is not 0.0."""
    return ".1f" if abs(points) >= 0.05 else ".2f"


def win_words(section: PaperSection, about: str) -> str:
    """In how many columns the paper's method is first, here and in print."""
    wins = count_wins(find_leads(section))
    if not wins.columns:
        return "in no measured column (none has it beside another method)"
    plural = "s" * (wins.columns != 1)
    return f"in {wins.ours} of {wins.columns} measured column{plural} (in print {wins.printed})"


def gap_words(section: PaperSection, about: str) -> str:
    """The median distance of our accuracies from the printed ones."""
    return f"{find_gaps(accuracy_rows(section.rows)).median:.1f} points"


def measured_words(section: PaperSection, about: str) -> str:
    """How many printed numbers are measured."""
    return f"{count_measured(section.rows)} of {len(section.rows)}"


PLACEHOLDERS: dict[str, Callable[[PaperSection, str], str]] = {
    "verdict": verdict_words,
    "lead": lead_words,
    "ahead": ahead_words,
    "wins": win_words,
    "gap": gap_words,
    "measured": measured_words,
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
