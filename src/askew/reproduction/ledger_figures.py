"""The ledger's pictures: printed numbers against ours, and the claims' effects with their intervals."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from statistics import median, stdev
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from ..report.picture import COLOURS, GREY, INK, MARKERS, WIDTH, Picture, canvas, style
from ..report.statistics import MIN_SEEDS, paired_test, t_interval
from .claim_results import ClaimResult
from .claim_rules import FAILS, HOLDS, ClaimRule, Finding, cell_terms, fill_names
from .ledger import PaperSection
from .ledger_rows import LARGE_GAP, LedgerRow
from .ledger_summary import accuracy_rows, best_rivals, find_leads, find_standing, gap_sizes
from .titles import case_title, data_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VERDICT_COLOURS = {HOLDS: COLOURS[2], FAILS: COLOURS[1]}  # the others are grey
LEVEL = 0.9  # of the intervals; a one-sided test at 5% has the same bound
POINT_RANGE = (-12.0, 12.0)  # points of accuracy that the picture shows; what lies outside is cut
GAP_RANGE = 12.0  # points on both sides that the differences show
FAR = 20.0  # points; where numbers are so far off, the picture says which
STD_RANGE = (-8.0, 8.0)  # standard deviations that it shows
LEAD_RANGE = (-6.5, 6.5)  # points by which methods lead
LINE, AXIS_ROOM = 0.15, 0.6  # inches of a line of a claim, and of an axis below
LABEL = 46  # letters in a line of a claim beside its effect
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
        figure = canvas(9, 4.3)
        left, right = figure.subplots(1, 2, width_ratios=[1, 1.05])
        left.fill_between([0, 100], [-LARGE_GAP, 100 - LARGE_GAP], [LARGE_GAP, 100 + LARGE_GAP], color=GREY, alpha=0.25)
        left.plot([0, 100], [0, 100], color=INK, linewidth=1)
        right.axvspan(-LARGE_GAP, LARGE_GAP, color=GREY, alpha=0.25, linewidth=0)
        right.axvline(0, color=INK, linewidth=1)
        for n, (title, each) in enumerate(rows.items()):
            look: dict[str, Any] = {"color": COLOURS[n], "marker": MARKERS[n], "alpha": 0.65, "linestyle": ""}
            printed, gaps = [float(row.printed.value) for row in each], [row.gap or 0.0 for row in each]
            ours = [p + g for p, g in zip(printed, gaps, strict=True)]
            left.plot(printed, ours, markersize=5, label=title, **look)
            draw_gaps(right, gaps, n, look)
            right.plot([median(gaps)] * 2, [n - 0.42, n + 0.42], color=COLOURS[n], linewidth=2.5)
        left.set(xlim=(0, 100), ylim=(0, 100), xlabel="Printed accuracy, %", ylabel="Ours, %", aspect="equal")
        left.set_title("Every measured accuracy")
        left.legend(loc="upper left", fontsize=9.5, handletextpad=0.1)
        right.set_yticks(range(len(rows)), [f"{title}\n{len(each)} numbers" for title, each in rows.items()])
        right.set(xlim=(-GAP_RANGE, GAP_RANGE), ylim=(len(rows) - 0.4, -0.6), title="Differences")
        right.set_xlabel("Ours minus printed, points")
        right.grid(visible=False, axis="y")
    medians = ", ".join(f"{title} {median(gap_sizes(each)):.1f}" for title, each in rows.items())
    alt = f"Printed accuracies against ours. Median distances in points: {medians}."
    cases = Counter(far_place(row) for each in rows.values() for row in each if abs(row.gap or 0.0) > FAR)
    far = "; ".join(f"{count} in {place}" for place, count in cases.items())
    note = f"Grey: within {LARGE_GAP:g} points. Left: the line is where both are equal. " + (
        "Right: the bar is the median difference, ours minus printed."
        f"{f' More than {FAR:g} points off: {far}.' if far else ''}"
    )
    return Picture("numbers", "Paper against ours", alt, note, figure)


def far_place(row: LedgerRow) -> str:
    """The experiment and data of a number that is far off; the number of participants says nothing there."""
    return f"{row.printed.experiment}, {case_title(row.printed.case).rpartition(', ')[0] or row.printed.case}"


def draw_gaps(axes: Axes, gaps: Sequence[float], height: int, look: dict[str, Any]) -> None:
    """Points for the differences of one paper; those outside are counted at the edge."""
    inside = [gap for gap in gaps if abs(gap) < GAP_RANGE]
    axes.plot(inside, spread_points(inside, height), markersize=4, **look)
    for sign, arrow, side in ((-1, "← {}", "left"), (1, "{} →", "right")):
        outside = [gap for gap in gaps if sign * gap >= GAP_RANGE]
        if outside:
            near = f"near {median(outside):.0f}".replace("-", "−")
            text = arrow.format(f"{len(outside)} more, {near}")
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


def leads_picture(sections: Sequence[PaperSection]) -> Picture | None:
    """By how much a paper's method leads the best other one, in every column of its tables."""
    papers = [(section, sorted(best_rivals(find_leads(section)), key=lambda lead: -lead.ours)) for section in sections]
    leads = [lead for _, each in papers for lead in each]
    if not leads:
        return None
    with style():
        figure = canvas(WIDTH, 0.2 * (len(leads) + len(papers)) + 0.6)
        axes = figure.add_subplot(xlim=LEAD_RANGE, xlabel="Points ahead of the best other one")
        axes.axvline(0, color=INK, linewidth=1)
        labels, y = list[tuple[int, str]](), 0
        for n, (section, each) in enumerate(papers):
            known = {table.experiment.id: table.experiment for table in section.tables}
            for lead in each:
                draw_interval(
                    axes, y, (lead.low, lead.ours, lead.high), LEAD_RANGE, COLOURS[n], lead.seeds >= MIN_SEEDS
                )
                axes.plot(lead.printed, y, "x", color=GREY, markersize=5, zorder=1)
                labels.append(
                    (y, f"{lead.method} – {lead.rival}: {data_title(known[lead.experiment], lead.case)} ({lead.seeds})")
                )
                y += 1
            y += bool(each)
        axes.set_yticks(*zip(*labels, strict=True), fontsize=9)
        axes.set_ylim(y - 1.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    standings = [f"{section.title} {find_standing(find_leads(section)).text}" for section, each in papers if each]
    note = (
        f"A line for every column of the tables: the paper's method and the best other one, the data, the seeds of "
        f"both. Dots with 95% intervals: here; hollow: fewer than {MIN_SEEDS} seeds; crosses: in print."
    )
    return Picture("leads", "Who is ahead", f"Leads over the best other method. {'; '.join(standings)}.", note, figure)


def draw_interval(
    axes: Axes,
    y: float,
    ends: tuple[float, float, float],
    limits: tuple[float, float],
    colour: str,
    filled: bool = True,
) -> None:
    """A mean between the ends of its interval; arrows where it goes on outside."""
    (low, mean, high), (least, most) = ends, limits
    left, right = max(low, least), min(high, most)
    if left < right:
        axes.plot([left, right], [y, y], color=colour, linewidth=2)
    if least <= mean <= most:
        axes.plot(mean, y, "o", color=colour, markersize=6, markerfacecolor=colour if filled else "white")
    for end, cut, mark in ((least, low < least, "<"), (most, high > most, ">")):
        if cut:
            axes.plot(end, y, mark, color=colour, markersize=6, clip_on=False)


# effects --------------------------------------------------------------------------------------------------------


class Effect(NamedTuple):
    """The weakest cell of a claim: how far it is above its bound, with an interval, and the other cells' means."""

    result: ClaimResult
    points: bool  # in points of accuracy; otherwise in standard deviations over seeds
    mean: float
    low: float
    high: float
    others: tuple[float, ...]
    p: float  # of the test that it is above its bound

    @property
    def lines(self) -> list[str]:
        """The claim's id and text in lines."""
        return wrap(f"{self.result.claim.id}: {self.result.claim.text}".replace("$", r"\$"), LABEL)


def claim_effects(section: PaperSection) -> list[Effect]:
    """The effects of a paper's claims with a test of a mean."""
    found = list[Effect]()
    for result in (result for result in section.claims if result.claim.rules):
        rules, reading = result.claim.rules, result.claim.rules[0].reading  # the colour is the verdict in the first
        effects = [
            e
            for rule, f in zip(rules, result.findings["full"], strict=True)
            if rule.test == "above" and rule.refutes and rule.reading == reading
            for e in rule_effect(result, rule, f)
        ]
        found += [max(effects, key=lambda e: (e.p, -e.mean))] if effects else []
    return found


def rule_effect(result: ClaimResult, rule: ClaimRule, finding: Finding) -> list[Effect]:
    """The effect of one rule, if a cell of it has enough seeds for an interval; otherwise nothing."""
    deciding = [(n, c) for n, c in enumerate(finding.cells) if c.n >= MIN_SEEDS and c.comparable]
    tested = [(n, c) for n, c in deciding if stdev(c.values) > 1e-9]
    if not tested:
        return []
    points = all(in_points(rule, rule.cells[n]) for n, _ in tested)
    ends = list[tuple[float, float, float, float]]()  # p-value, less the mean, and the interval
    for _, c in tested:
        unit = 1.0 if points else stdev(c.values)
        low, high = ((end - rule.bound) / unit for end in t_interval(c.values, LEVEL))
        ends.append((paired_test([v - rule.bound for v in c.values]).p_above, -(low + high) / 2, low, high))
    (p, mean, low, high), *others = sorted(ends, reverse=True)  # the weakest as in the evidence: the largest p-value
    return [Effect(result, points, -mean, low, high, tuple(-mean for _, mean, _, _ in others), p)]


def in_points(rule: ClaimRule, names: dict[str, str]) -> bool:
    """Whether a cell's number is a difference in points of accuracy."""
    text = TERMS.sub("", fill_names(rule.d, names))
    return all("accuracy" in t.metric for t in cell_terms(rule, names)) and bool(POINTS.fullmatch(text))


def forest_picture(section: PaperSection) -> Picture | None:
    """The weakest comparison of every claim of a paper with a test of a mean: above 0 is what the paper claims."""
    effects = claim_effects(section)
    panels = [
        ([e for e in effects if e.points], "Points of accuracy above the claim", POINT_RANGE),
        ([e for e in effects if not e.points], "Others: standard deviations over seeds", STD_RANGE),
    ]
    panels = [panel for panel in panels if panel[0]]
    if not panels:
        return None
    heights = [LINE * sum(len(e.lines) + 0.5 for e in shown) for shown, _, _ in panels]
    with style():
        whole = top = sum(heights) + AXIS_ROOM * len(heights) + 0.35  # inches; the legend is at the top
        figure = canvas(WIDTH, whole)
        figure.set_layout_engine("none")  # labels of several lines as high as their parts
        top -= 0.35
        for (shown, label, limits), height in zip(panels, heights, strict=True):
            axes = figure.add_axes((0.45, (top - height) / whole, 0.52, height / whole))
            draw_forest(axes, shown, label, limits)
            top -= height + AXIS_ROOM
        texts = {HOLDS: "holds", FAILS: "does not hold", "": "undecided"}
        first = figure.axes[0]
        handles = [first.plot([], [], "o-", color=VERDICT_COLOURS.get(v, GREY), label=t)[0] for v, t in texts.items()]
        figure.legend(handles=handles, loc="upper right", ncols=3, fontsize=9.5)
    counted = {verdict: sum(e.result.verdict == verdict for e in effects) for verdict in (HOLDS, FAILS)}
    alt = (
        f"Effects of {len(effects)} claims with intervals: {counted[HOLDS]} hold, {counted[FAILS]} do not, "
        f"{len(effects) - sum(counted.values())} are undecided."
    )
    note = (
        f"A line for a claim: its weakest comparison (the largest p) of those with {MIN_SEEDS} seeds or more, with a "
        f"{100 * LEVEL:g}% interval; pale: its other comparisons. Right of 0 is what the paper claims; arrows: it goes "
        "on outside. Claims that no such comparison tests have no line."
    )
    return Picture(f"{section.name}-effects", "Effects behind the claims", alt, note, figure)


def draw_forest(axes: Axes, effects: Sequence[Effect], label: str, limits: tuple[float, float]) -> None:
    """One line for each effect, from the top down, as high as its label."""
    low, high = limits
    axes.axvline(0, color=INK, linewidth=1)
    at, top = list[float](), 0.0
    for e in effects:
        y = top + len(e.lines) / 2
        top += len(e.lines) + 0.5
        at.append(y)
        colour = VERDICT_COLOURS.get(e.result.verdict, GREY)
        inside = [v for v in e.others if low < v < high]
        axes.plot(inside, [y] * len(inside), "o", color=colour, markersize=3, alpha=0.35)
        for end, mark, cut in (
            (low, "<", any(v <= low for v in e.others)),
            (high, ">", any(v >= high for v in e.others)),
        ):
            axes.plot([end] * cut, [y] * cut, mark, color=colour, markersize=5, alpha=0.35, clip_on=False)
        draw_interval(axes, y, (e.low, e.mean, e.high), limits, colour)
    axes.set_yticks(at, ["\n".join(e.lines) for e in effects], fontsize=8.5, linespacing=1.1)
    margin = 0.02 * (high - low)
    axes.set(xlim=(low - margin, high + margin), ylim=(top, -0.3), xlabel=label)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
