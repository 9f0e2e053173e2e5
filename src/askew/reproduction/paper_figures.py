"""The papers' figures from stored results: curves with the paper's axes, bars, prediction sets, and what is there before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..data.skew import heterogeneity
from ..experiment.build import client_label_counts
from ..experiment.store import write_atomic
from ..report import skew
from ..report.figures import BLUE, Picture, canvas, line, short, style, wide
from ..report.tables import Curve, partition_name, spread
from .papers import Planned, scenes, words
from .reproduce import Reproduction, choices, grouped
from .results import curve
from .worked_examples import WorkedExample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AXES = {"accuracy": "Test accuracy, %", "train_loss": "Training loss", "loss": "Test loss"}
COLUMNS = 3  # panels side by side
WANTED = 0.7  # coverage from which prediction sets are drawn


class Panel(NamedTuple):
    """Lines over one pair of axes."""

    title: str
    y: str
    lines: dict[str, Curve]
    x: str = "Round"


def write(begun: Reproduction, folder: Path, toy: WorkedExample | None = None) -> list[Path]:
    """The figures that there is something to draw for, as PNG files."""
    paths = []
    with style():
        for name, figure in drawn(begun, toy).items():
            path = folder / f"{begun.experiment.id.replace('/', '-')}{name}-{begun.scale}.png"
            write_atomic(path, Picture(path.stem, begun.experiment.title, "", "", figure).render("png"))
            paths.append(path)
    return paths


def drawn(begun: Reproduction, toy: WorkedExample | None) -> dict[str, Figure]:
    """Figures by what is added to the file's name."""
    e = begun.experiment
    if e.shows == "heatmap":
        return {f"-{name}": heat_map(p) for name, p in still(begun).items()}
    if e.shows == "histogram":
        return {"": histogram(still(begun))}
    if toy is not None:
        lines = {name: Curve(list(range(len(path))), path, [0.0] * len(path)) for name, path in toy.curves.items()}
        found = [Panel("", toy.axis, lines)]
    else:
        found = coverage(begun) if e.shows == "coverage" else by_number(begun) if e.shows == "bars" else curves(begun)
    found = [panel for panel in found if panel.lines]
    return {"": panels(found, COLUMNS if len(e.axis.get("y", ())) < 2 else len(e.axis["y"]))} if found else {}


# lines ----------------------------------------------------------------------------------------------------------


def shown(begun: Reproduction) -> dict[tuple[str, str, str], list[Planned]]:
    """The runs that are drawn by (case, method, what else tells a line): the chosen points, or those that the file names, or all."""
    chosen, wanted, found = (
        choices(begun, begun.planned),
        begun.experiment.axis.get("hyper", {}),
        dict[tuple[str, str, str], list[Planned]](),
    )
    for key, points in grouped(begun.planned).items():
        if key in chosen:
            points = [p for p in points if p.hyper in chosen[key][:1]]
        else:
            points = [p for p in points if all(p.hyper.get(k) == v for k, v in wanted.items())] or points
        several = len({words(p.hyper) for p in points}) > 1
        for p in points:
            found.setdefault((key[1], key[2], words(p.hyper) if several else ""), []).append(p)
    return found


def mean_curve(begun: Reproduction, points: Sequence[Planned], key: str) -> Curve:
    """Over seeds, at the rounds that all of them have; up to the last one that the paper shows."""
    told = [
        dict(zip(*curve(metrics[key]), strict=True)) for p in points if (metrics := begun.found(p)) and metrics.get(key)
    ]
    last = begun.experiment.axis.get("rounds", np.inf)
    rounds = [r for r in told[0] if r <= last and all(r in each for each in told)] if told else []
    columns = [[(100 if key == "accuracy" else 1) * each[r] for each in told] for r in rounds]
    return Curve(rounds, [fmean(c) for c in columns], [spread(c) or 0.0 for c in columns])


def curves(begun: Reproduction) -> list[Panel]:
    """A panel for each case with a line for each method, or the other way round; two panels where two quantities are shown."""
    axis, lines = begun.experiment.axis, shown(begun)
    cases, methods = (list(dict.fromkeys(key[n] for key in lines)) for n in (0, 1))
    methods = axis.get("methods", methods)
    if axis.get("lines") == "case":
        groups: Mapping[str, Sequence[str]] = axis.get("panels", {"": cases})
        places = [
            (
                ", ".join(word for word in (name, method if len(methods) > 1 else "") if word),
                [(c, method, label) for c, label in zip(group, apart(group), strict=True)],
            )
            for name, group in groups.items()
            for method in methods
        ]
    else:
        places = [(case if len(cases) > 1 else "", [(case, m, m) for m in methods]) for case in cases]
    return [
        Panel(
            title,
            AXES[y],
            {
                f"{label}{f', {hyper}' if hyper else ''}": told
                for case, method, label in members
                for (c, m, hyper), points in lines.items()
                if (c, m) == (case, method) and (told := mean_curve(begun, points, y)).rounds
            },
        )
        for title, members in places
        for y in axis.get("y", ())
    ]


def apart(names: Sequence[str]) -> list[str]:
    """Names without the last part where all have the same, so that a line keeps its colour from panel to panel."""
    parts = [name.rpartition("-") for name in names]
    return (
        [part[0] for part in parts]
        if len(names) > 1 and all(p[0] and p[2] == parts[0][2] for p in parts)
        else list(names)
    )


def by_number(begun: Reproduction) -> list[Panel]:
    """The headline of each method over the number of clients."""
    metric, found = begun.experiment.metric, dict[str, dict[int, list[float]]]()
    for (_, method, _), points in shown(begun).items():
        values = [100 * float(m[metric]) for p in points if (m := begun.found(p)) and metric in m]
        if values:
            found.setdefault(method, {})[points[0].config.partition.clients] = values
    lines = {
        m: Curve(list(at), [fmean(v) for v in at.values()], [spread(v) or 0.0 for v in at.values()])
        for m, at in found.items()
    }
    return [Panel("", "Best test accuracy, %", lines, "Clients")]


def coverage(begun: Reproduction) -> list[Panel]:
    """Coverage over the mean size of prediction sets, means over seeds."""
    found: dict[str, Curve] = {}
    for (_, method, _), points in shown(begun).items():
        told = [m for p in points if (m := begun.found(p)) and m.get("coverages_raps")]
        if told:
            covered, sizes = (
                np.mean([curve(m[f"{what}_raps"])[1] for m in told], 0) for what in ("coverages", "set_sizes")
            )
            kept = covered >= WANTED
            found[method] = Curve(sizes[kept].tolist(), (100 * covered[kept]).tolist(), [0.0] * int(kept.sum()))
    return [Panel("", "Empirical coverage, %", found, "Mean size of the sets")]


def panels(found: Sequence[Panel], columns: int) -> Figure:
    """All panels with one legend; a method keeps its colour in all of them."""
    columns = min(columns, len(found))
    rows = ceil(len(found) / columns)
    labels = list(dict.fromkeys(label for panel in found for label in panel.lines))
    figure = canvas(max(6.0, 4.2 * columns), max(0.22 * len(labels) + 0.6, 3.3 * rows))
    handles: dict[str, Any] = {}
    for n, panel in enumerate(found, 1):
        axes = figure.add_subplot(rows, columns, n, xlabel=panel.x, ylabel=panel.y, title=panel.title)
        for label, told in panel.lines.items():
            handles[label] = line(axes, labels.index(label), told.rounds, told.mean, told.std)
        if panel.x != "Mean size of the sets":
            axes.locator_params(axis="x", integer=True)
    if len(labels) > 1:
        figure.legend([handles[k] for k in labels], [short(k) for k in labels], loc="outside right upper", fontsize=9.5)
    return figure


# before training ------------------------------------------------------------------------------------------------


def still(begun: Reproduction) -> dict[str, Planned]:
    """What there is to show, by case, and by seed where there are several."""
    found = scenes(begun.experiment, begun.scale, begun.seeds, begun.only)
    several = len({p.seed for p in found}) > 1
    return {f"{p.case}-seed{p.seed}" if several else p.case: p for p in found}


def heat_map(p: Planned) -> Figure:
    counts, sizes = client_label_counts(p.config)
    scene = p.config.tables()
    return skew.picture(counts, sizes, f"{scene['data']['name']}, {len(sizes):,} clients, {partition_name(scene)}")


def turns(p: Planned) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How often each client takes part."""
    clients = p.config.partition.clients
    everybody = np.arange(clients)
    drawn = [
        p.config.participation.sample(p.config.participation.drawn_by(p.seed), t, everybody, clients)
        for t in range(1, p.config.rounds + 1)
    ]
    return np.bincount(np.concatenate(drawn), minlength=clients)


def histogram(found: Mapping[str, Planned]) -> Figure:
    """Rounds that each client takes part in, a panel for each case."""
    columns = min(COLUMNS, len(found))
    rows = ceil(len(found) / columns)
    figure = canvas(4.2 * columns, 2.6 * rows)
    for n, (name, p) in enumerate(found.items(), 1):
        counts = turns(p)
        axes = figure.add_subplot(rows, columns, n, xlabel="Client", ylabel="Rounds taken part in", title=name)
        axes.bar(range(len(counts)), counts, color=BLUE, width=wide(len(counts)))
    return figure


def gini(counts: np.ndarray[Any, Any]) -> float:
    """0: all alike; towards 1: one has all."""
    ordered, n = np.sort(counts), len(counts)
    return float((2 * np.arange(1, n + 1) - n - 1) @ ordered / (n * max(ordered.sum(), 1)))


def told(begun: Reproduction) -> tuple[list[str], list[list[str]]]:
    """The figures in words: headings and a row for each case."""
    if begun.experiment.shows == "histogram":
        rows = [(name, turns(p)) for name, p in still(begun).items()]
        return ["case", "Gini", "never drawn", "most often"], [
            [case, f"{gini(counts):.3f}", str(int((counts == 0).sum())), str(int(counts.max()))]
            for case, counts in rows
        ]
    skewed = [(name, heterogeneity(client_label_counts(p.config)[0])) for name, p in still(begun).items()]
    return ["case", "samples of a client", "classes of a client", "total variation"], [
        [case, f"{f['size_min']:,} to {f['size_max']:,}", f"{f['classes_mean']:.2f}", f"{f['tv_mean']:.3f}"]
        for case, f in skewed
    ]
