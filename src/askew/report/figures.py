"""The pictures of a report, drawn with matplotlib from groups of runs.

Curves over rounds, the best of each method, prediction sets and drift; pictures of who holds what and who took part are
in `federation_figures`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import ceil
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from ..experiment.store import Run
from .federation_figures import MAX_FEDERATIONS, participation_picture, partition_picture
from .picture import (
    BLUE,
    COLOURS,
    DASHES,
    GREY,
    HATCHES,
    INK,
    MARKERS,
    WIDTH,
    Picture,
    canvas,
    draw_legend,
    drawn_for,
    legend_height,
    legend_label,
    style,
    write_picture,
)
from .tables import RunGroup, average, best_groups, by_federation, group_runs, sample_std
from .timeline_figure import timeline_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTHED_ROUNDS = 100  # curves of more rounds are drawn with their running mean
OVER = {"round": "Round", "clock": "Virtual clock, seconds"}  # what curves are drawn over
MAX_DECADES = 4  # of a logarithmic axis, above which 1, 2 and 5 of each are too many marks
MAX_LINES = 14  # methods whose lines a reader can distinguish: every colour twice
MAX_BARS = 40  # methods of a picture with a row for each
LOWEST_COVERAGE = 50  # percent of coverage from which prediction sets are drawn


def write_figures(runs: Iterable[Run], folder: Path, kind: str = "png", size: str | None = None) -> list[Path]:
    """Write each picture that the runs have data for as a file of this kind: png, svg or pdf.

    `size` is "column" or "page" of a two-column paper, with fonts that fit it; None is the size of a report.
    """
    with drawn_for(size) if size else nullcontext():
        return [write_picture(picture, folder, kind) for picture in draw_pictures(group_runs(runs))]


def draw_pictures(groups: Sequence[RunGroup]) -> list[Picture]:
    """All pictures that the groups have data for; of several federations, those of the first few, one by one."""
    federations = by_federation(groups)
    if len(federations) <= 1:
        return draw_federation(groups)
    return [
        replace(
            picture, name=f"{picture.name}-{number}", title=f"{picture.title}: {its[0].federation}", federation=number
        )
        for number, its in enumerate(federations[:MAX_FEDERATIONS], 1)
        for picture in draw_federation(its)
    ]


def draw_federation(groups: Sequence[RunGroup]) -> list[Picture]:
    """All pictures that the groups of one federation have data for; of very many groups, the best are drawn."""
    lines, bars = best_groups(groups, MAX_LINES), best_groups(groups, MAX_BARS)
    drawn: tuple[tuple[Callable[[Sequence[RunGroup]], Picture | None], Sequence[RunGroup]], ...] = (
        (accuracy_picture, lines),
        (clock_picture, lines),
        (method_picture, bars),
        (loss_picture, lines),
        (coverage_picture, lines),
        (drift_picture, lines),
        (layer_picture, lines),
        (partition_picture, groups),
        (participation_picture, groups),
        (timeline_picture, groups),
    )
    with style():
        pictures = [(draw(its), len(its)) for draw, its in drawn]
    return [say_left_out(picture, count, len(groups)) for picture, count in pictures if picture]


def say_left_out(picture: Picture, drawn: int, groups: int) -> Picture:
    """The picture, with a note on the groups that are not in it."""
    if drawn == groups:
        return picture
    return replace(picture, note=f"Of {groups} methods, the best {drawn} are drawn. {picture.note}".strip())


# curves over rounds ---------------------------------------------------------------------------------------------


def accuracy_picture(groups: Sequence[RunGroup]) -> Picture | None:
    """Test accuracy over rounds."""
    figure, last_values = draw_curves(groups, {"accuracy": "Test accuracy, %"}, scale=100)
    if not last_values:
        return None
    alt = f"Line chart of test accuracy by round. {last_values}"
    return Picture("accuracy", "Accuracy", alt, seeds_note(groups), figure)


def clock_picture(groups: Sequence[RunGroup]) -> Picture | None:
    """Test accuracy over the seconds of the virtual clock."""
    clocked = [g for g in groups if g.curve("clock").rounds]
    if not clocked:
        return None
    figure, last_values = draw_curves(groups, {"accuracy": "Test accuracy, %"}, scale=100, over="clock")
    if not last_values:
        return None
    without = " Runs without a clock are not shown." if len(clocked) < len(groups) else ""
    alt = f"Line chart of test accuracy by seconds of the virtual clock. {last_values}"
    return Picture("clock", "Accuracy by virtual time", alt, seeds_note(groups) + without, figure)


def loss_picture(groups: Sequence[RunGroup]) -> Picture | None:
    """Training and test loss over rounds."""
    figure, last_values = draw_curves(groups, {"train_loss": "Training loss", "loss": "Test loss"})
    if not last_values:
        return None
    note = "Training loss: mean of the mini-batch losses of those who took part. " + seeds_note(groups)
    return Picture("loss", "Loss", f"Line charts of training and test loss by round. {last_values}", note, figure)


def seeds_note(groups: Sequence[RunGroup]) -> str:
    """What lines and bands are, where there are several seeds."""
    return "Line: mean over seeds; band: ± one standard deviation." if any(len(g.runs) > 1 for g in groups) else ""


def draw_curves(
    groups: Sequence[RunGroup], panels: dict[str, str], scale: float = 1, logs: bool = True, over: str = "round"
) -> tuple[Figure, str]:
    """Draw one panel for each record key that has values, over rounds or the clock; `panels` are the axes' labels.

    Also returns the methods' last values in words; empty where there is no curve.
    """
    recorded = {key: label for key, label in panels.items() if any(g.curve(key).rounds for g in groups)}
    labels = {g.label: legend_label(g.label) for g in groups}
    figure = canvas(WIDTH, 3.5 + (legend_height([*labels.values()]) if len(groups) > 1 else 0))
    handles: dict[str, Any] = {}
    ends: dict[str, float] = {}
    for i, (key, label) in enumerate(recorded.items(), 1):
        axes = figure.add_subplot(1, len(recorded), i, xlabel=OVER[over], ylabel=label)
        all_values: list[float] = []
        for n, g in enumerate(groups):
            curve = g.curve(key)
            if at := places(g, curve.rounds, over):
                values = [scale * v for v in curve.mean]
                handles[g.label] = draw_line(axes, n, at, values, [scale * s for s in curve.std])
                ends[g.label] = values[-1]
                all_values += values
        if logs and all_values:
            use_log_axis(axes, all_values)
        if over == "round":
            axes.locator_params(axis="x", integer=True)
            if (ends_at := axes.get_xlim())[1] - ends_at[0] < 1:  # one round: ticks at whole numbers only
                axes.set_xlim(round(ends_at[0]) - 1, round(ends_at[0]) + 1)
    order = sorted(handles, key=lambda label: -ends[label])
    if len(groups) > 1 and order:  # in the order of the right ends of the lines
        draw_legend(figure, [handles[k] for k in order], [labels[k] for k in order])
    last = [f"{k} {ends[k]:.3g}{' %' if scale == 100 else ''}" for k in order]
    return figure, f"Last values: {', '.join(last)}." if last else ""


def places(group: RunGroup, rounds: Sequence[int], over: str) -> Sequence[float]:
    """Where these rounds stand on the axis: their numbers, or the clock after them, mean over the seeds."""
    if over == "round":
        return rounds
    clock = group.curve("clock")
    known = dict(zip(clock.rounds, clock.mean, strict=True))
    return [known[r] for r in rounds] if all(r in known for r in rounds) else []


def draw_line(axes: Axes, n: int, rounds: Sequence[float], values: list[float], std: list[float]) -> Any:
    """Draw the n-th method's line, in a colour, marker and dash of its own; few points are all marked."""
    colour, every = COLOURS[n % len(COLOURS)], max(1, len(rounds) // 9)
    sparse = slice(None, None, ceil(len(rounds) / 400))
    if any(std):
        low, high = ([v + sign * s for v, s in zip(values, std, strict=True)] for sign in (-1, 1))
        axes.fill_between(rounds[sparse], low[sparse], high[sparse], color=colour, alpha=0.13, linewidth=0)
    dash, marker = DASHES[n // len(COLOURS) % len(DASHES)], MARKERS[n % len(MARKERS)]
    look: dict[str, Any] = {"marker": marker, "markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.6}
    first = (n * every // 4) % every if len(rounds) > 20 else 0  # so that markers of near lines do not hide each other
    if len(values) > SMOOTHED_ROUNDS:  # what jumps from round to round is drawn thin, and its running mean over it
        axes.plot(rounds, values, color=colour, linewidth=0.6, alpha=0.3)
        values = running_mean(values, len(values) // 40)
    return axes.plot(rounds, values, color=colour, linestyle=dash, linewidth=1.8, markevery=(first, every), **look)[0]


def running_mean(values: Sequence[float], reach: int) -> list[float]:
    """The mean of each value and its neighbours, `reach` on either side where there are as many."""
    return [mean(values[max(0, n - reach) : n + reach + 1]) for n in range(len(values))]


def use_log_axis(axes: Axes, values: Sequence[float]) -> None:
    """Make the axis logarithmic where the values need it; over many decades only powers of ten are marked."""
    from matplotlib.ticker import LogFormatterMathtext, LogLocator

    if min(values) > 0 and max(values) > 30 * min(values):
        many = max(values) > 10**MAX_DECADES * min(values)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=7) if many else LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(LogFormatterMathtext() if many else "{x:g}")
        axes.minorticks_off()
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, min(values) / 2), min(high, 2 * max(values)))  # bands may leave the axis


# methods --------------------------------------------------------------------------------------------------------


def method_picture(groups: Sequence[RunGroup]) -> Picture | None:
    """Best accuracy of each method: seeds as dots, mean and deviation as a bar; last test loss without accuracy."""
    accurate = any(g.values(lambda run: run.best_accuracy) for g in groups)
    results = {
        n: [100 * v for v in g.values(lambda run: run.best_accuracy)] if accurate else g.last("loss")
        for n, g in enumerate(groups)
    }
    order = sorted((n for n in results if results[n]), key=lambda n: average(results[n]) or 0, reverse=not accurate)
    if len(order) < 2:
        return None
    labels = [legend_label(groups[n].label) for n in order]
    figure = canvas(WIDTH, 0.9 + sum(0.25 + 0.17 * (text.count("\n") + 1) for text in labels))
    axes = figure.add_subplot(xlabel="Best test accuracy, %" if accurate else "Last test loss")
    texts, looks = [], method_looks(groups)
    for y, n in enumerate(order):
        (colour, marker), values = looks.get(groups[n].label, (GREY, "o")), results[n]
        middle, std = average(values) or 0.0, sample_std(values)
        axes.errorbar(middle, y, xerr=std, color=colour, elinewidth=7, alpha=0.35)
        axes.plot(values, [y] * len(values), "o", color=colour, markersize=4, alpha=0.8)
        axes.plot(middle, y, marker, color=colour, markersize=10, markeredgecolor="white")
        text = f"{middle:.1f}" if accurate else f"{middle:.3g}"
        text += f" ± {std:.1f}" if accurate and std is not None else ""
        axes.annotate(
            text,
            (1.01, y),
            xycoords=("axes fraction", "data"),
            va="center",
            fontweight="bold" if y == len(order) - 1 else None,
        )
        texts.append(f"{groups[n].label} {text}")
    axes.set_yticks(range(len(order)), labels)
    axes.set_ylim(-0.6, len(order) - 0.4)
    axes.margins(x=0.08)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    what = "Best test accuracy, in %" if accurate else "Last test loss"
    alt = f"{what}, of each method: {', '.join(reversed(texts))}."
    marks = "Large mark: mean; small dots: seeds; bar: ± one standard deviation. " if seeds_note(groups) else ""
    return Picture("bars", "Methods", alt, f"{marks}The axis does not begin at zero.", figure)


def method_looks(groups: Sequence[RunGroup]) -> dict[str, tuple[str, str]]:
    """Colours and markers, as in the pictures with lines, of the groups that are in these."""
    lines = best_groups(groups, MAX_LINES)
    return {g.label: (COLOURS[n % len(COLOURS)], MARKERS[n % len(MARKERS)]) for n, g in enumerate(lines)}


def coverage_picture(groups: Sequence[RunGroup]) -> Picture | None:
    """Coverage of prediction sets against their mean size, and what the uncalibrated ones cover; means over seeds."""
    import numpy as np

    measured = {n: [run.conformal["curves"] for run in g.runs if run.conformal] for n, g in enumerate(groups)}
    measured = {n: curves for n, curves in measured.items() if curves}
    if not measured:
        return None
    labels = {n: legend_label(groups[n].label) for n in measured}
    figure = canvas(WIDTH, 3.2 + legend_height([*labels.values()]))
    titles = {"raps": "RAPS", "aps": "APS", "naive": "Naive, not calibrated"}
    panels = dict(zip(titles, figure.subplots(1, 3, sharey=True), strict=True))
    handles, texts = {}, []
    for n, curves in measured.items():
        asked = 100 * (1 - np.asarray(curves[0]["raps"]["alpha"]))
        shown = asked >= LOWEST_COVERAGE
        for method, axes in panels.items():
            covered, size = (np.mean([each[method][what] for each in curves], axis=0) for what in ("coverage", "size"))
            x = asked if method == "naive" else size
            handles[n] = draw_line(axes, n, x[shown].tolist(), (100 * covered[shown]).tolist(), [])
            if method == "raps":
                texts.append(f"{groups[n].label} {np.interp(-90, -100 * covered, size):.2f}")
    for method, axes in panels.items():
        axes.set(title=titles[method], xlabel="Coverage asked for, %" if method == "naive" else "Mean set size")
    panels["raps"].set_ylabel("Coverage, %")
    panels["aps"].sharex(panels["raps"])
    diagonal = [LOWEST_COVERAGE, 100]
    panels["naive"].plot(diagonal, diagonal, color=INK, linewidth=1, linestyle=":", zorder=1)
    if len(measured) > 1:
        draw_legend(figure, list(handles.values()), list(labels.values()))
    splits = max(run.conformal["settings"]["splits"] for g in groups for run in g.runs if run.conformal)
    seeds = " and over seeds" if seeds_note(groups) else ""
    note = (
        f"Means over {splits} divisions of the test set into calibration and measurement{seeds}. "
        "Further left is better: fewer classes for the same coverage. Dotted: what is covered is what was asked for."
    )
    alt = f"Coverage of prediction sets by their mean size. RAPS, classes at 90 % coverage: {', '.join(texts)}."
    return Picture("coverage", "Prediction sets", alt, note, figure)


# drift ----------------------------------------------------------------------------------------------------------


def drift_picture(groups: Sequence[RunGroup]) -> Picture | None:
    """How the participants' updates lie to the global update, to the one before, and to each other."""
    panels = {
        "drift_cosine_mean": "Cosine to the global update",
        "drift_previous_mean": "Cosine to the one before",
        "drift_diversity": "Drift diversity",
    }
    diversities = [v for g in groups for v in g.curve("drift_diversity").mean]
    if not diversities:
        return None
    figure, last_values = draw_curves(groups, panels, logs=False)
    alone = len(groups) == 1 and len(groups[0].runs) == 1
    for axes, key in zip(figure.axes[:-1], ("drift_cosine", "drift_previous"), strict=False):
        if alone:
            least, most = (groups[0].curve(f"{key}_{end}") for end in ("min", "max"))
            axes.fill_between(least.rounds, least.mean, most.mean, color=BLUE, alpha=0.13, linewidth=0)
    for axes in figure.axes[:-1]:  # the band of a deviation has no limits, a cosine has
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -1.03), min(high, 1.03))
    use_log_axis(figure.axes[-1], diversities)
    mark_diversity(figure.axes[-1], groups)
    note = f"Cosines: mean over those who took part{'; band: from the lowest to the highest' * alone}. "
    note += diversity_note(groups) + seeds_note(groups)
    alt = f"Line charts of cosines of updates and of drift diversity by round. {last_values}"
    return Picture("drift", "Drift", alt, note, figure)


def layer_picture(groups: Sequence[RunGroup]) -> Picture | None:
    """Drift diversity of each layer: the median over rounds, mean over seeds."""
    records = [r for g in groups for run in g.runs for r in run.rounds]
    names = list(dict.fromkeys(name for r in records for name in r.get("drift_layers") or ()))
    heights: dict[int, dict[str, float]] = {}
    for n, g in enumerate(groups):
        medians = {name: [median(v) for run in g.runs if (v := run.curve(f"drift_layers.{name}")[1])] for name in names}
        if any(medians.values()):
            heights[n] = {name: mean(values) for name, values in medians.items() if values}
    if not heights:
        return None
    shown = [legend_label(groups[n].label) for n in heights]
    figure = canvas(WIDTH, (3.4 if len(names) <= 12 else 4.7) + legend_height(shown))
    axes = figure.add_subplot(ylabel="Drift diversity")
    room = 0.82 / len(heights)
    for k, (n, each) in enumerate(heights.items()):
        at = [names.index(name) + (k + 0.5) * room - 0.41 for name in each]
        look: dict[str, Any] = {"color": COLOURS[n % len(COLOURS)], "hatch": HATCHES[n // len(COLOURS) % len(HATCHES)]}
        look |= {"edgecolor": "white", "linewidth": 0, "label": legend_label(groups[n].label)}
        axes.bar(at, list(each.values()), width=0.92 * room, **look)
    every = ceil(len(names) / 32)
    crowded: dict[str, Any] = {"rotation": 90, "fontsize": 9} if len(names) > 12 else {}
    axes.set_xticks(range(0, len(names), every), names[::every], **crowded)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.grid(visible=False, axis="x")
    axes.tick_params(axis="x", length=0)
    use_log_axis(axes, [v for each in heights.values() for v in each.values()])
    mark_diversity(axes, groups)
    if len(heights) > 1:
        draw_legend(figure, *axes.get_legend_handles_labels())
    most = [f"{groups[n].label} {max(each.items(), key=lambda item: item[1])[0]}" for n, each in heights.items()]
    alt = f"Bars of drift diversity by layer. Most diverse: {', '.join(most)}."
    note = f"Medians over the rounds, layers from input to output. {diversity_note(groups)}"
    return Picture("layers", "Drift by layer", alt, note, figure)


def usual_cohort(groups: Sequence[RunGroup]) -> int:
    """How many clients took part in most of the rounds with a record of drift."""
    records = (r for g in groups for run in g.runs for r in run.rounds if r.get("drift_diversity") is not None)
    return int(Counter(len(r["participants"]) - r["dropped"] for r in records).most_common(1)[0][0])


def mark_diversity(axes: Axes, groups: Sequence[RunGroup]) -> None:
    """Draw lines at the drift diversity of orthogonal updates and at that of equal ones."""
    for height in (1, 1 / usual_cohort(groups)):
        axes.axhline(height, color=INK, linewidth=1, linestyle=":", zorder=1)


def diversity_note(groups: Sequence[RunGroup]) -> str:
    """What the values of drift diversity mean."""
    cohort = usual_cohort(groups)
    equal = f"1/{cohort} where the updates of {cohort} clients are equal"
    return f"Drift diversity is {equal}, 1 where they are orthogonal and more where they cancel (dotted lines). "
