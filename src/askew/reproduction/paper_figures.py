"""The papers' figures from stored results, as PNG files.

Curves with the paper's axes, bars and prediction sets; and what is there before training: partitions and participation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import count
from math import ceil, inf, isfinite
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..data.skew import heterogeneity
from ..experiment.build import client_label_counts
from ..experiment.store import write_atomic
from ..report.figures import draw_line
from ..report.picture import BLUE, COLOURS, Picture, bar_width, canvas, legend_label, style
from ..report.skew import draw_skew
from ..report.tables import MeanCurve, partition_name, sample_std
from .papers import Experiment
from .participation_counts import Counts, gini, participation_counts
from .plan import Reproduction, chosen_points, runs_by_method
from .planned_runs import PlannedRun, configure_runs, hyper_text
from .run_metrics import Metrics, parse_curve
from .titles import case_title, own_methods
from .worked_examples import WorkedExample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AXIS_LABELS = {"accuracy": "Test accuracy, %", "train_loss": "Training loss", "loss": "Test loss"}
SET_SIZE_LABEL = "Mean size of the sets"
MAX_COLUMNS = 3  # panels side by side
LEGEND_COLUMNS = 3  # of a legend below the panels
LOWEST_COVERAGE = 0.7  # from which prediction sets are drawn

LineKey = tuple[str, str, str]  # case, method, and the grid point if the method has several lines
Lines = Mapping[LineKey, Sequence[Metrics]]  # the measured runs of every line, one for each seed


class Panel(NamedTuple):
    """Lines over one pair of axes."""

    title: str
    y: str  # label of the axis
    lines: dict[str, MeanCurve]  # by label
    seeds: Mapping[str, int]  # of the lines, where one number says it
    x: str = "Round"


def write_paper_figures(reproduction: Reproduction, folder: Path, example: WorkedExample | None = None) -> list[Path]:
    """Write the figures that there is something to draw for as PNG files; return their paths."""
    e, paths = reproduction.experiment, []
    with style():
        for suffix, figure in draw_paper_figures(reproduction, example).items():
            path = folder / f"{e.id.replace('/', '-')}{suffix}-{reproduction.scale}.png"
            write_atomic(path, Picture(path.stem, e.title, "", "", figure).render("png"))
            paths.append(path)
    return paths


def draw_paper_figures(reproduction: Reproduction, example: WorkedExample | None) -> dict[str, Figure]:
    """The figures of an experiment, by what is added to the file's name."""
    e = reproduction.experiment
    if e.shows == "heatmap":
        return {f"-{name}": draw_partition_map(p) for name, p in untrained_runs(reproduction).items()}
    if e.shows == "histogram":
        return {"": draw_histograms(untrained_runs(reproduction))}
    if example is not None:
        paths = example.curves.items()
        lines = {name: MeanCurve(list(range(len(path))), path, [0.0] * len(path)) for name, path in paths}
        panels = [Panel("", example.axis, lines, {})] if lines else []
    else:
        clients = {p.case: p.config.partition.clients for p in reproduction.planned}
        panels = measured_panels(e, shown_lines(reproduction), clients)
    return {"": draw_panels(panels, panel_columns(e), own=own_methods(e.paper))} if panels else {}


def panel_columns(e: Experiment) -> int:
    """How many panels stand side by side: where a case has several quantities, these."""
    quantities = len(e.axis.get("y", ()))
    return MAX_COLUMNS if quantities < 2 else quantities


# lines ----------------------------------------------------------------------------------------------------------


def shown_lines(reproduction: Reproduction) -> Lines:
    """The runs of every line that is drawn: those of the chosen points, or of points that the file names, or all."""
    chosen = chosen_points(reproduction, reproduction.planned)
    wanted, lines = reproduction.experiment.axis.get("hyper", {}), dict[LineKey, list[Metrics]]()
    for key, runs in runs_by_method(reproduction.planned).items():
        if key in chosen:
            runs = [p for p in runs if p.hyper in chosen[key][:1]]
        else:
            runs = [p for p in runs if all(p.hyper.get(k) == v for k, v in wanted.items())] or runs
        several = len({hyper_text(p.hyper) for p in runs}) > 1
        for p in runs:
            line = lines.setdefault((p.case, p.method, hyper_text(p.hyper) if several else ""), [])
            line += [metrics] if (metrics := reproduction.metrics_of(p)) else []
    return lines


def measured_panels(e: Experiment, lines: Lines, clients: Mapping[str, int]) -> list[Panel]:
    """The panels of a figure that have a line; `clients` are the numbers of clients by case."""
    if e.shows == "coverage":
        panels = [coverage_panel(lines)]
    elif e.shows == "bars":
        panels = [clients_panel(e.metric, lines, clients)]
    else:
        panels = curve_panels(e.axis, lines)
    return [panel for panel in panels if panel.lines]


def mean_curve(runs: Sequence[Metrics], key: str, last: float) -> MeanCurve:
    """The mean over seeds at the rounds that all of them have, up to the last one that the paper shows."""
    curves = [dict(zip(*parse_curve(metrics[key]), strict=True)) for metrics in runs if metrics.get(key)]
    rounds = [r for r in curves[0] if r <= last and all(r in curve for curve in curves)] if curves else []
    columns = [[(100 if key == "accuracy" else 1) * curve[r] for curve in curves] for r in rounds]
    with np.errstate(invalid="ignore"):  # a diverged run has infinite losses
        std = np.std(columns, axis=1, ddof=1).tolist() if rounds and len(curves) > 1 else [0.0] * len(rounds)
    return MeanCurve(rounds, [fmean(c) for c in columns], std)


def curve_panels(axis: Mapping[str, Any], lines: Lines) -> list[Panel]:
    """A panel for each case with a line for each method, or the other way round; once for each quantity shown."""
    last = axis.get("rounds", np.inf)
    cases, methods = (list(dict.fromkeys(key[n] for key in lines)) for n in (0, 1))
    methods = axis.get("methods", methods)
    members: list[tuple[str, list[tuple[str, str, str]]]] = []  # title of a panel; case, method and label of its lines
    if axis.get("lines") == "case":
        panels: Mapping[str, Sequence[str]] = axis.get("panels", {"": cases})
        for name, panel_cases in panels.items():
            for method in methods:
                title = ", ".join(word for word in (name, method if len(methods) > 1 else "") if word)
                labels = without_common_end(panel_cases)
                members.append((title, [(c, method, label) for c, label in zip(panel_cases, labels, strict=True)]))
    else:
        members = [(case_title(case) if len(cases) > 1 else "", [(case, m, m) for m in methods]) for case in cases]
    found = []
    for title, entries in members:
        for y in axis.get("y", ()):
            curves, seeds = dict[str, MeanCurve](), dict[str, int]()
            for case, method, label in entries:
                for (c, m, hyper), runs in lines.items():
                    if (c, m) == (case, method) and (curve := mean_curve(runs, y, last)).rounds:
                        label = f"{label}, {hyper}" if hyper else label
                        curves[label], seeds[label] = curve, len(runs)
            found.append(Panel(title, AXIS_LABELS[y], curves, seeds))
    return found


def without_common_end(names: Sequence[str]) -> list[str]:
    """Names in words, without the part after the last "-" if all have the same: a line keeps its colour everywhere."""
    parts = [name.rpartition("-") for name in names]
    common = len(names) > 1 and all(begin and end == parts[0][2] for begin, _, end in parts)
    return [case_title(begin if common else name) for name, (begin, _, _) in zip(names, parts, strict=True)]


def clients_panel(metric: str, lines: Lines, clients: Mapping[str, int]) -> Panel:
    """The headline metric of each method over the number of clients."""
    found = dict[str, dict[int, list[float]]]()
    for (case, method, _), runs in lines.items():
        values = [100 * float(metrics[metric]) for metrics in runs if metric in metrics]
        if values:
            found.setdefault(method, {})[clients[case]] = values
    curves = {
        method: MeanCurve(
            list(by_clients),
            [fmean(values) for values in by_clients.values()],
            [sample_std(values) or 0.0 for values in by_clients.values()],
        )
        for method, by_clients in found.items()
    }
    return Panel("", "Best test accuracy, %", curves, {}, "Clients")


def coverage_panel(lines: Lines) -> Panel:
    """Coverage of each method over the mean size of prediction sets, means over seeds."""
    curves, seeds = dict[str, MeanCurve](), dict[str, int]()
    for (_, method, _), runs in lines.items():
        measured = [metrics for metrics in runs if metrics.get("coverages_raps")]
        if measured:
            coverages, sizes = (
                np.mean([parse_curve(metrics[key])[1] for metrics in measured], 0)
                for key in ("coverages_raps", "set_sizes_raps")
            )
            shown = coverages >= LOWEST_COVERAGE
            no_band = [0.0] * int(shown.sum())
            seeds[method] = len(measured)
            curves[method] = MeanCurve(sizes[shown].tolist(), (100 * coverages[shown]).tolist(), no_band)
    return Panel("", "Empirical coverage, %", curves, seeds, SET_SIZE_LABEL)


def draw_panels(panels: Sequence[Panel], max_columns: int, below: bool = False, own: Collection[str] = ()) -> Figure:
    """Draw all panels with one legend, at the right or below; a method keeps its colour in all of them.

    The dark colour is that of the paper's `own` methods alone.
    """
    columns = min(max_columns, len(panels))
    rows = ceil(len(panels) / columns)
    labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
    dark = count(len(COLOURS) - 1, len(COLOURS))
    others = (n for n in count() if n % len(COLOURS) != len(COLOURS) - 1)
    places = {label: next(dark if label.partition(",")[0] in own else others) for label in labels}
    ranges = shown_ranges(panels)
    legend = 0.22 * ceil(len(labels) / LEGEND_COLUMNS if below else len(labels))  # its height in inches
    height = 3.1 * rows + legend if below else max(legend + 0.6, 3.3 * rows)
    figure = canvas(max(6.0, 4.2 * columns), height)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.08)
    handles: dict[str, Any] = {}
    for n, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, n, xlabel=panel.x, ylabel=panel.y, title=panel.title)
        for label, curve in panel.lines.items():
            handles[label] = draw_line(axes, places[label], curve.rounds, curve.mean, curve.std)
        axes.set_ylim(*ranges[n - 1])
        if panel.x != SET_SIZE_LABEL:
            axes.locator_params(axis="x", integer=True)
    if len(labels) > 1:
        texts = [legend_label(f"{label}{seeds_text(panels, label)}") for label in labels]
        where: Any = (
            {"loc": "outside lower center", "ncols": LEGEND_COLUMNS} if below else {"loc": "outside right upper"}
        )
        figure.legend([handles[label] for label in labels], texts, fontsize=9.5, **where)
    return figure


def shown_ranges(panels: Sequence[Panel]) -> list[tuple[float, float]]:
    """From where to where each panel goes: its means after a tenth of the rounds, and a little more.

    Panels of one quantity have the same range where it is not much longer than theirs.
    """
    own = list[tuple[float, float]]()
    for panel in panels:
        curves = panel.lines.values()
        first = max((at for c in curves for at in c.rounds), default=0) / 10 if panel.x == "Round" else -inf
        means = [m for c in curves for at, m in zip(c.rounds, c.mean, strict=True) if at >= first and isfinite(m)]
        own.append((min(means, default=0.0), max(means, default=1.0)))
    found = list[tuple[float, float]]()
    for panel, (low, high) in zip(panels, own, strict=True):
        same = [span for other, span in zip(panels, own, strict=True) if other.y == panel.y]
        lowest, highest = min(span[0] for span in same), max(span[1] for span in same)
        if highest - lowest < 2 * min(span[1] - span[0] for span in same):
            low, high = lowest, highest
        room = 0.1 * (high - low) or 1.0
        limits = (0.0, 100.5) if panel.y.endswith("%") else (-inf, inf)  # bands do not leave what is possible
        found.append((max(low - room, limits[0]), min(high + room, limits[1])))
    return found


def seeds_text(panels: Sequence[Panel], label: str) -> str:
    """The seeds of a line, where lines differ in it: " (1 to 3)"."""
    seeds = sorted({panel.seeds[label] for panel in panels if label in panel.seeds})
    if len({number for panel in panels for number in panel.seeds.values()}) < 2 or not seeds:
        return ""
    return f" ({seeds[0]} to {seeds[-1]})" if len(seeds) > 1 else f" ({seeds[0]})"


# before training ------------------------------------------------------------------------------------------------


def untrained_runs(reproduction: Reproduction) -> dict[str, PlannedRun]:
    """The settings that a figure without training shows, by case, and by seed where there are several."""
    runs = configure_runs(reproduction.experiment, reproduction.scale, reproduction.seeds, reproduction.only)
    several = len({p.seed for p in runs}) > 1
    return {f"{p.case}-seed{p.seed}" if several else p.case: p for p in runs}


def draw_partition_map(planned: PlannedRun) -> Figure:
    """Samples by class and client of a partition."""
    counts, sizes = client_label_counts(planned.config)
    tables = planned.config.tables()
    return draw_skew(counts, sizes, f"{tables['data']['name']}, {len(sizes):,} clients, {partition_name(tables)}")


def run_participation_counts(planned: PlannedRun) -> Counts:
    """In how many rounds of a run each client takes part, [N]."""
    config = planned.config
    return participation_counts(config.participation, planned.seed, config.partition.clients, config.rounds)


def draw_histograms(runs: Mapping[str, PlannedRun]) -> Figure:
    """Rounds that each client takes part in, a panel for each case."""
    columns = min(MAX_COLUMNS, len(runs))
    rows = ceil(len(runs) / columns)
    figure = canvas(4.2 * columns, 2.6 * rows)
    for n, (name, planned) in enumerate(runs.items(), 1):
        counts = run_participation_counts(planned)
        axes = figure.add_subplot(rows, columns, n, xlabel="Client", ylabel="Rounds taken part in", title=name)
        axes.bar(range(len(counts)), counts, color=BLUE, width=bar_width(len(counts)))
    return figure


def untrained_table(reproduction: Reproduction) -> tuple[list[str], list[list[str]]]:
    """The numbers behind a figure without training: headings and a row for each case."""
    runs = untrained_runs(reproduction)
    if reproduction.experiment.shows == "histogram":
        all_counts = [(case, run_participation_counts(p)) for case, p in runs.items()]
        return ["case", "Gini", "never drawn", "most often"], [
            [case, f"{gini(counts):.3f}", str(int((counts == 0).sum())), str(int(counts.max()))]
            for case, counts in all_counts
        ]
    measures = [(case, heterogeneity(client_label_counts(p.config)[0])) for case, p in runs.items()]
    return ["case", "samples of a client", "classes of a client", "total variation"], [
        [case, f"{m['size_min']:,} to {m['size_max']:,}", f"{m['classes_mean']:.2f}", f"{m['tv_mean']:.3f}"]
        for case, m in measures
    ]
