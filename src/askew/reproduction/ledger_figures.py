"""The ledger's pictures: printed numbers against ours, and the claims' effects with their intervals."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median, stdev
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

from ..report.picture import COLOURS, GREY, INK, MARKERS, Picture, canvas, style
from ..report.statistics import MIN_SEEDS, t_interval
from .claim_rules import FAILS, HOLDS, ClaimRule, Finding, cell_terms, fill_names
from .ledger import LARGE_GAP, ClaimResult, PaperSection
from .ledger_summary import accuracy_rows, find_gaps, gap_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VERDICT_COLOURS = {HOLDS: COLOURS[2], FAILS: COLOURS[1]}  # the others are grey
LEVEL = 0.9  # of the intervals; a one-sided test at 5% has the same bound
POINT_RANGE = (-12.0, 12.0)  # points of accuracy that the picture shows; what lies outside is cut
GAP_RANGE = 12.0  # points on both sides that the differences show
STD_RANGE = (-8.0, 8.0)  # standard deviations that it shows
LABEL = 60  # letters of a claim beside its effect
PATH, DECIMALS = re.compile(rb' d="[^"]*"'), re.compile(rb"-?\d+\.\d{3,}")  # in a file of SVG
TERMS = re.compile(r"\[[^\]]*\]")
# An expression whose terms are accuracies and that has nothing else than these is a difference in points.
POINTS = re.compile(r"(mean|best|last|at|early|late|max|min|smooth|[-+(),.\d\s*])*")


def svg_with_text(picture: Picture) -> bytes:
    """The picture as SVG whose letters are text, which can be searched, and with few decimals: a third of the size."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        content = picture.render("svg")
    content = PATH.sub(lambda path: DECIMALS.sub(lambda number: b"%.2f" % float(number[0]), path[0]), content)
    return content.replace(b"'DejaVu Sans'", b"'DejaVu Sans', Verdana, sans-serif")  # where the first is not there


def scatter_picture(sections: Sequence[PaperSection]) -> Picture | None:
    """Every measured accuracy: the printed number and ours, by paper; and their differences."""
    rows = {section.title: found for section in sections if (found := accuracy_rows(section.rows))}
    if not rows:
        return None
    with style():
        figure = canvas(10, 4.6)
        left, right = figure.subplots(1, 2, width_ratios=[1, 1.05])
        left.fill_between([0, 100], [-LARGE_GAP, 100 - LARGE_GAP], [LARGE_GAP, 100 + LARGE_GAP], color=GREY, alpha=0.25)
        left.plot([0, 100], [0, 100], color=INK, linewidth=1)
        right.axvspan(-LARGE_GAP, LARGE_GAP, color=GREY, alpha=0.25, linewidth=0)
        right.axvline(0, color=INK, linewidth=1)
        for n, each in enumerate(rows.values()):
            look: dict[str, Any] = {"color": COLOURS[n], "marker": MARKERS[n], "alpha": 0.65, "linestyle": ""}
            printed = [float(row.printed.value) for row in each]
            gaps = [gap_of(row) for row in each]
            left.plot(printed, [p + g for p, g in zip(printed, gaps, strict=True)], markersize=5, **look)
            draw_gaps(right, gaps, n, look)
            right.plot([median(gaps)] * 2, [n - 0.42, n + 0.42], color=COLOURS[n], linewidth=2.5)
        left.set(xlim=(0, 100), ylim=(0, 100), xlabel="Printed accuracy, %", ylabel="Ours, %", aspect="equal")
        left.set_title("Every measured accuracy")
        right.set_yticks(range(len(rows)), [f"{title}\n{len(each)} numbers" for title, each in rows.items()])
        right.set(xlim=(-GAP_RANGE, GAP_RANGE), ylim=(len(rows) - 0.4, -0.6), title="Differences")
        right.set_xlabel("Ours less printed, points")
        right.grid(visible=False, axis="y")
    medians = ", ".join(f"{title} {find_gaps(each).median:.1f}" for title, each in rows.items())
    alt = f"Printed accuracies against ours. Median distances in points: {medians}."
    note = f"Grey: within {LARGE_GAP:g} points. Left: the line is where both are equal. Right: a line is a median."
    return Picture("numbers", "Paper against ours", alt, note, figure)


def draw_gaps(axes: Axes, gaps: Sequence[float], height: int, look: dict[str, Any]) -> None:
    """Points for the differences of one paper; those outside are counted at the edge."""
    inside = [gap for gap in gaps if abs(gap) < GAP_RANGE]
    axes.plot(inside, spread_points(inside, height), markersize=4, **look)
    for sign, arrow, side in ((-1, "← {}", "left"), (1, "{} →", "right")):
        outside = [gap for gap in gaps if sign * gap >= GAP_RANGE]
        if outside:
            text = arrow.format(f"{len(outside)} at {median(outside):.0f}")
            where = (sign * 0.97 * GAP_RANGE, height - 0.25)  # above the points near the edge
            axes.annotate(text, where, ha=side, va="center", color=look["color"], fontsize=9.5)


def spread_points(values: Sequence[float], middle: float) -> list[float]:
    """Heights around the middle, such that points of nearly equal values do not hide each other."""
    taken: dict[int, int] = {}
    heights = []
    for value in values:
        k = taken[round(2 * value)] = taken.get(round(2 * value), -1) + 1
        heights.append(middle + (-1) ** k * ((k + 1) // 2) * 0.07)
    return [min(max(height, middle - 0.4), middle + 0.4) for height in heights]


# effects --------------------------------------------------------------------------------------------------------


class Effect(NamedTuple):
    """The weakest cell of a claim: how far it is above its bound, with an interval, and the other cells' means."""

    result: ClaimResult
    points: bool  # in points of accuracy; otherwise in standard deviations over seeds
    mean: float
    low: float
    high: float
    others: tuple[float, ...]

    @property
    def label(self) -> str:
        claim = self.result.claim
        return f"{shorten(claim.text, LABEL, placeholder=' …')}  {claim.id}"


def claim_effects(sections: Sequence[PaperSection]) -> list[Effect]:
    """The effects of all claims with a test of a mean, paper by paper."""
    found = list[Effect]()
    for result in (result for section in sections for result in section.claims if result.claim.rules):
        rules, reading = result.claim.rules, result.claim.rules[0].reading  # the colour is the verdict in the first
        effects = [
            e
            for rule, f in zip(rules, result.findings["full"], strict=True)
            if rule.test == "above" and rule.refutes and rule.reading == reading
            for e in rule_effect(result, rule, f)
        ]
        found += [min(effects, key=lambda e: e.mean)] if effects else []
    return found


def rule_effect(result: ClaimResult, rule: ClaimRule, finding: Finding) -> list[Effect]:
    """The effect of one rule, if a cell of it has enough seeds for an interval; otherwise nothing."""
    deciding = [(n, c) for n, c in enumerate(finding.cells) if c.n >= MIN_SEEDS and c.comparable]
    tested = [(n, c) for n, c in deciding if stdev(c.values) > 1e-9]
    if not tested:
        return []
    points = all(in_points(rule, rule.cells[n]) for n, _ in tested)
    ends = list[tuple[float, float, float]]()
    for _, c in tested:
        unit = 1.0 if points else stdev(c.values)
        low, high = ((end - rule.bound) / unit for end in t_interval(c.values, LEVEL))
        ends.append(((low + high) / 2, low, high))
    ends.sort()
    return [Effect(result, points, *ends[0], tuple(mean for mean, _, _ in ends[1:]))]


def in_points(rule: ClaimRule, names: dict[str, str]) -> bool:
    """Whether a cell's number is a difference in points of accuracy."""
    text = TERMS.sub("", fill_names(rule.d, names))
    return all("accuracy" in t.metric for t in cell_terms(rule, names)) and bool(POINTS.fullmatch(text))


def forest_picture(sections: Sequence[PaperSection]) -> Picture | None:
    """The weakest cell of every claim with a test of a mean: above 0 is what the paper claims."""
    effects = claim_effects(sections)
    panels = [
        ([e for e in effects if e.points], "Points of accuracy above what is claimed", POINT_RANGE),
        ([e for e in effects if not e.points], "Other measures, in standard deviations over seeds", STD_RANGE),
    ]
    panels = [panel for panel in panels if panel[0]]
    if not panels:
        return None
    heights = [len(shown) + 3 for shown, _, _ in panels]
    with style():
        figure = canvas(10, 0.235 * sum(heights) + 0.5)
        all_axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)
        for axes, (shown, label, limits) in zip(all_axes.flat, panels, strict=True):
            draw_forest(axes, shown, label, limits)
        texts = {HOLDS: "the claim holds", FAILS: "it does not hold", "": "undecided"}
        first = figure.axes[0]
        handles = [first.plot([], [], "o-", color=VERDICT_COLOURS.get(v, GREY), label=t)[0] for v, t in texts.items()]
        figure.legend(handles=handles, loc="outside upper right", ncols=3, fontsize=9.5)
    counted = {verdict: sum(e.result.verdict == verdict for e in effects) for verdict in (HOLDS, FAILS)}
    alt = (
        f"Effects of {len(effects)} claims with intervals: {counted[HOLDS]} hold, {counted[FAILS]} do not, "
        f"{len(effects) - sum(counted.values())} are undecided."
    )
    note = (
        f"One line for a claim: its weakest comparison of those with {MIN_SEEDS} seeds or more, with a "
        f"{100 * LEVEL:g}% interval; pale dots are its other comparisons. "
        "Right of 0 is what the paper claims. Arrows: it goes on outside. Claims that cover "
        "comparisons without runs stay undecided. Claims that are counted or deduced, or that no comparison of 3 seeds "
        "tests by its sign, have no line."
    )
    return Picture("effects", "Effects behind the claims", alt, note, figure)


def draw_forest(axes: Axes, effects: Sequence[Effect], label: str, limits: tuple[float, float]) -> None:
    """One line for each effect, from the top down."""
    low, high = limits
    axes.axvline(0, color=INK, linewidth=1)
    for y, e in enumerate(effects):
        colour = VERDICT_COLOURS.get(e.result.verdict, GREY)
        inside = [v for v in e.others if low < v < high]
        axes.plot(inside, [y] * len(inside), "o", color=colour, markersize=3, alpha=0.35)
        left, right = max(e.low, low), min(e.high, high)
        if left < right:
            axes.plot([left, right], [y, y], color=colour, linewidth=2)
        if low <= e.mean <= high:
            axes.plot(e.mean, y, "o", color=colour, markersize=6)
        for end, cut, mark in ((low, e.low < low, "<"), (high, e.high > high, ">")):
            if cut:
                axes.plot(end, y, mark, color=colour, markersize=6, clip_on=False)
    axes.set_yticks(range(len(effects)), [e.label.replace("$", r"\$") for e in effects], fontsize=8.5)
    margin = 0.02 * (high - low)
    axes.set(xlim=(low - margin, high + margin), ylim=(len(effects) - 0.4, -0.6), xlabel=label)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
