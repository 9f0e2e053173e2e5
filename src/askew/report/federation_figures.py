"""Pictures of federations: who holds what, and who took part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any

from ..core.text import count_text
from ..experiment.store import Run
from .picture import BLUE, GREY, ORANGE, WIDTH, Picture, bar_width, canvas
from .tables import RunGroup, client_count, participation_name, partition_name, settings_key

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

MAX_FEDERATIONS = 4  # the most that one picture shows
MAX_NAMED, MAX_NAMED_CLASSES, MAX_LETTERS = 30, 20, 16  # clients, classes and letters of a name that are written
MAX_CLIENTS = 500  # the most that one picture shows one by one


def distinct_runs(runs: Iterable[Run], *tables: str) -> list[Run]:
    """The longest run for each number of clients and each content of these tables of the configuration."""
    found: dict[tuple[int, str], Run] = {}
    for run in runs:
        key = client_count(run), settings_key(run.config, tables)
        if key not in found or len(run.rounds) > len(found[key].rounds):
            found[key] = run
    return list(found.values())


def left_out_note(groups: Sequence[RunGroup], runs: Sequence[Run]) -> str:
    """What a picture of federations, of which these runs are one each, does not show."""
    federations = f" Of {len(runs)}, the first {MAX_FEDERATIONS} are shown." if len(runs) > MAX_FEDERATIONS else ""
    return federations + (" Of several seeds, one is shown." if any(len(g.runs) > 1 for g in groups) else "")


def partition_picture(groups: Sequence[RunGroup]) -> Picture | None:
    """Samples by class and client, below a strip of the clients' sizes; one pair for each federation."""
    import numpy as np

    recorded = (run for g in groups for run in g.runs if run.federation.get("labels") or run.federation.get("sizes"))
    runs = distinct_runs(recorded, "data", "partition")
    if not runs:
        return None
    counts = [
        np.asarray(run.federation.get("labels") or np.zeros((0, 0)), dtype=float)[:MAX_CLIENTS].T
        for run in runs[:MAX_FEDERATIONS]
    ]
    heights = [1.75 + (heat_map_height(len(count)) if count.size else 0) for count in counts]
    figure = canvas(WIDTH, sum(heights))
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    notes = []
    for run, count, part, height in zip(runs, counts, parts, heights, strict=False):
        sizes = np.asarray(run.federation.get("sizes") or count.sum(0), dtype=float)[: count.shape[1] or MAX_CLIENTS]
        total, shown = client_count(run) or len(sizes), len(sizes)
        panels, mesh = draw_partition(part, count, sizes, height - 1.75)
        if mesh is not None:
            part.colorbar(mesh, ax=panels, label="Samples of a class", pad=0.01, aspect=30).outline.set_visible(False)
        panels[-1].set(xlabel="Client")
        panels[-1].locator_params(axis="x", integer=True)
        names = [run.federation.get(key) or () for key in ("client_names", "class_names")]
        write_names(panels[-1], *names, shown=len(sizes), classes=len(count) if mesh is not None else 0)
        about = (run.config["data"]["name"], partition_name(run.config), count_text(total, "client"))
        title = ", ".join(about) if len(runs) > 1 else ""
        panels[0].set_title(title)
        held = (count > 0).sum(0)  # classes of each client
        all_classes = count_text(len(count), "class", "classes")
        classes = f"{span_text(held.min(), held.max())} of {all_classes} and " if count.size else ""
        first = f"The first {shown} of {total:,} clients are shown: each" if shown < total else "A client"
        known = sizes[sizes > 0] if run.deployed else sizes  # in a deployment those who never came have size 0
        samples = f"{span_text(known.min(), known.max())} {'sample' if known.max() == 1 else 'samples'}"
        unknown = f"; of {count_text(shown - len(known), 'client')} that is not known" if len(known) < shown else ""
        notes.append(f"{title}{': ' if title else ''}{first} holds {classes}{samples}{unknown}.")
    text = " ".join(notes)
    alt = f"Heat map of samples by class and client. {text}"
    return Picture("partition", "Who holds what", alt, text + left_out_note(groups, runs), figure)


def span_text(low: float, high: float) -> str:
    """Two whole numbers as a span, "3 to 5", or the one that both are."""
    return f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"


def write_names(
    axes: Axes, client_names: Sequence[str], class_names: Sequence[str], *, shown: int, classes: int
) -> None:
    """Write the names of clients and classes at the axes of a heat map, where there are some and room for them."""
    named = any(name != str(k) for k, name in enumerate(client_names))
    if named and len(client_names) == shown <= MAX_NAMED:
        names = [name[:MAX_LETTERS] for name in client_names]
        axes.set_xticks(range(shown), names, rotation=0 if shown * max(map(len, names)) < 100 else 45)
    if class_names and len(class_names) == classes <= MAX_NAMED_CLASSES:
        axes.set_yticks(range(classes), [name[:MAX_LETTERS] for name in class_names])


def heat_map_height(classes: int) -> float:
    """Inches that a heat map with so many rows needs."""
    return min(4.6, max(1.7, 0.24 * classes))


def draw_partition(part: Figure | SubFigure, count: Any, sizes: Any, height: float) -> tuple[Any, Any]:
    """Draw the clients' sizes [N] as bars and, where there are classes, samples by class and client [K, N] below.

    Returns the panels' axes and the heat map (None without classes), which is so many inches high.
    """
    ratios = [0.8, height] if count.size else [1]
    panels = part.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    panels[0].bar(range(len(sizes)), sizes, width=bar_width(len(sizes)), color=GREY)
    panels[0].set(ylabel="Samples", xlim=(-0.5, len(sizes) - 0.5))
    return panels, draw_heat_map(panels[1], count) if count.size else None


def draw_heat_map(axes: Axes, count: Any) -> Any:
    """Draw counts by class and client [K, N]; cells have rims and classes numbers where there is room for them."""
    classes, columns = count.shape
    rims = {"edgecolors": "white", "linewidth": 0.6} if count.size <= 3000 else {"rasterized": True}
    axes.grid(visible=False)
    axes.set_ylabel("Class")
    if classes <= 20:
        axes.set_yticks(range(classes))
    edges = ([at - 0.5 for at in range(n + 1)] for n in (columns, classes))
    return axes.pcolormesh(*edges, count, cmap="Blues", vmin=0, **rims)


def participation_picture(groups: Sequence[RunGroup]) -> Picture | None:
    """How often each client took part; above 500 clients, how many clients took part how often."""
    recorded = (run for g in groups for run in g.runs if any(r.get("participants") for r in run.rounds))
    runs = distinct_runs(recorded, "participation")
    if not runs:
        return None
    rows = min(len(runs), MAX_FEDERATIONS)
    figure = canvas(WIDTH, 2.7 * rows)
    notes = []
    for i, run in enumerate(runs[:rows], 1):
        turns = Counter(client for r in run.rounds for client in r.get("participants") or ())
        total, rounds = max(client_count(run), max(turns) + 1), len(run.rounds)
        counts = [turns[c] for c in range(total)]
        title = f"{count_text(total, 'client')}, {participation_name(run.config)}" if len(runs) > 1 else ""
        draw_participation(figure.add_subplot(rows, 1, i, title=title), counts, rounds)
        never = counts.count(0)
        left_out = f"{never:,} never did" if never else "nobody was left out"
        span = f"{span_text(min(counts), max(counts))} of {count_text(rounds, 'round')}"
        notes.append(f"{title}{': ' if title else ''}Clients took part in {span}; {left_out}.")
    text = " ".join(notes)
    alt = f"Histogram of the clients' turns. {text}"
    return Picture("participation", "Who took part", alt, text + left_out_note(groups, runs), figure)


def draw_participation(axes: Axes, counts: Sequence[int], rounds: int) -> None:
    """Draw in how many of the rounds each client took part [N], and what equal chances would give."""
    total = len(counts)
    equal = sum(counts) / total
    deviations = 2 * sqrt(equal * max(0.0, 1 - equal / rounds))
    many = total > MAX_CLIENTS
    if many:
        tally = Counter(counts)
        axes.bar(list(tally), list(tally.values()), color=BLUE, width=0.85)
    else:
        axes.bar(range(total), counts, color=BLUE, width=bar_width(total))
        axes.set_xlim(-0.5, total - 0.5)
    draw_mark, draw_span = (axes.axvline, axes.axvspan) if many else (axes.axhline, axes.axhspan)
    band: dict[str, Any] = {"color": ORANGE, "alpha": 0.15, "linewidth": 0, "zorder": 0.5}
    if deviations:
        draw_span(max(0.0, equal - deviations), equal + deviations, label="± 2 deviations by chance", **band)
    label = f"Equal turns: {equal:.3g} of {count_text(rounds, 'round')}"
    draw_mark(equal, color=ORANGE, linestyle="--", linewidth=1.6, label=label)
    labels = ("Rounds taken part in", "Clients") if many else ("Client", "Rounds taken part in")
    axes.set(xlabel=labels[0], ylabel=labels[1])
    axes.locator_params(integer=True)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=9, borderaxespad=0.2)
