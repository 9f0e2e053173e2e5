"""The tests of `askew compare --test` in a terminal: a table for each federation, and sentences below it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from .plain_table import plain_table
from .significance import BETTER, EQUAL, LEVEL, METRICS, MOST_SEEDS, TOO_FEW, UNDECIDED, WORSE, PairedComparison
from .statistics import MIN_SEEDS
from .tables import shorten_label
from .terminal import QUIET

COLOURS = {BETTER: "green", WORSE: "red"}


def verdict_tables(tests: Sequence[PairedComparison]) -> RenderableType:
    """A table for each federation, with a row for each method that was compared with the reference."""
    parts, federations = list[RenderableType](), dict.fromkeys(test.federation for test in tests)
    for federation in federations:
        its = [test for test in tests if test.federation == federation]
        parts += [Text()] if parts else []
        parts += [Text(f"{heading(its)}: {federation}" if len(federations) > 1 else heading(its), "bold"), Text()]
        parts += [federation_tests(its), Text(" ".join(verdict_remarks(its)), QUIET)]
    return Group(*parts)


def heading(tests: Sequence[PairedComparison]) -> str:
    """What is compared with what: "Best accuracy against fedavg"."""
    name = METRICS[tests[0].metric].name
    return f"{name[0].upper()}{name[1:]} against {shorten_label(tests[0].against)}"


def federation_tests(tests: Sequence[PairedComparison]) -> RenderableType:
    """The table of one federation."""
    percent = METRICS[tests[0].metric].percent
    names = ("differ-\nence", "95% interval\nby t", "95% interval\nby bootstrap", "p\n(Holm)", "d_z", "")
    rows = plain_table("method", "n", *names)
    rows.columns[0].justify = rows.columns[-1].justify = "left"
    for *texts, verdict in federation_texts(tests, percent):
        rows.add_row(*texts, Text(verdict, COLOURS.get(verdict, QUIET)))
    return rows


def federation_texts(tests: Sequence[PairedComparison], percent: bool) -> list[list[str]]:
    """Of each test its method, seeds, difference, intervals, p-value, effect size and verdict."""
    return [
        [
            shorten_label(test.method),
            str(len(test.seeds)),
            "–" if test.mean is None else signed(test.mean, percent),
            interval_text(test.t_interval, percent),
            interval_text(test.bootstrap_interval, percent),
            p_text(test.p_holm),
            "–" if test.effect is None else f"{test.effect:.2f}",
            test.verdict,
        ]
        for test in tests
    ]


def signed(value: float, percent: bool) -> str:
    """A difference with its sign; accuracies in percentage points."""
    return f"{100 * value:+.2f}" if percent else f"{value:+.4g}"


def interval_text(interval: tuple[float, float] | None, percent: bool) -> str:
    """An interval of differences: "+0.12, +1.90"."""
    return "–" if interval is None else f"{signed(interval[0], percent)}, {signed(interval[1], percent)}"


def p_text(p: float | None) -> str:
    """A p-value with as many digits as say something."""
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def seeds_text(seeds: Iterable[int]) -> str:
    """Seeds in words: "seed 3" or "seeds 3, 4"."""
    numbers = list(seeds)
    return f"seed{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def verdict_remarks(tests: Sequence[PairedComparison]) -> list[str]:
    """Sentences below a table: what was done, what would decide it, and which seeds are missing."""
    unit = " in percentage points" if METRICS[tests[0].metric].percent else ""
    first = f"Differences{unit} within n seeds: the same clients, turns and start. Two-sided t-tests"
    tested = sum(test.p_holm is not None for test in tests)
    first += f", corrected by Holm over {tested} methods" if tested > 1 else ""
    first += f"; p below {LEVEL:g} decides."
    return [first, *seeds_remarks(tests), *dict.fromkeys(each for test in tests for each in remarks_of(test))]


def seeds_remarks(tests: Sequence[PairedComparison]) -> list[str]:
    """How many more seeds would decide what is undecided."""
    more = [f"{test.more_seeds:,} for {shorten_label(test.method)}" for test in tests if test.more_seeds]
    return [f"More seeds that would decide it (power 0.8, if differences stay as they are): {', '.join(more)}."] * bool(
        more
    )


def remarks_of(test: PairedComparison) -> list[str]:
    """What there is to say of one comparison."""
    name, sentences = shorten_label(test.method), list[str]()
    if test.verdict == UNDECIDED and test.effect is None:
        sentences.append(f"{name}: all differences are equal; from six seeds on that decides.")
    elif test.verdict == UNDECIDED and not test.more_seeds:
        sentences.append(f"{name}: {MOST_SEEDS:,} seeds would not decide a difference as small as this one.")
    elif test.verdict == EQUAL:
        sentences.append(f"{name}: the same figure at every seed.")
    elif test.verdict == TOO_FEW:
        sentences.append(f"{name}: fewer than {MIN_SEEDS} seeds are compared, which decides nothing.")
    sentences += [f"Missing: {seeds_text(seeds)} of {shorten_label(label)}." for label, seeds in test.missing.items()]
    return sentences + test.refused
