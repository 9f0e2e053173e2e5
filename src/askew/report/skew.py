"""A partition before any run: its picture, and its measures of skew as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from ..core.text import count_text
from .federation_figures import MAX_CLIENTS, draw_partition, heat_map_height, write_names
from .picture import canvas, style
from .terminal import pairs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_IN_ORDER = 100  # up to so many clients are shown in their own order
# The largest value is cut if it is so many times the 98th percentile; otherwise nothing else could be seen.
CUT_RATIO = 3


def draw_skew(
    counts: Any, sizes: Any, title: str, client_names: Sequence[str] = (), class_names: Sequence[str] = ()
) -> Figure:
    """Draw samples by class and client, [N, K], below a strip of the clients' sizes, [N]; the strip alone if K = 0.

    More than 100 clients are ordered by their most frequent class, so that a pattern shows; of more than 500, those at
    even steps of that order are shown. The label of the axis says so. Names of clients and classes are written where
    there is room for them.
    """
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    counts, sizes = np.asarray(counts), np.asarray(sizes)
    (total, classes), shown, label = counts.shape, np.arange(len(sizes)), "Client"
    if total > MAX_IN_ORDER:
        share = counts / counts.sum(1, keepdims=True).clip(1)
        shown = np.lexsort((-share.max(1), share.argmax(1))) if classes else np.argsort(-sizes, kind="stable")
        label = f"{count_text(total, 'client')}, ordered by {'their most frequent class' if classes else 'size'}"
    if total > MAX_CLIENTS:
        shown = shown[np.arange(MAX_CLIENTS) * total // MAX_CLIENTS]
        label = f"{MAX_CLIENTS} of {label}, at even steps"
    count, sizes = counts[shown].T.astype(float), sizes[shown]
    height = heat_map_height(classes)
    with style():
        figure = canvas(10, height + 1.9 if classes else 2.2)
        panels, mesh = draw_partition(figure, count, sizes, height)
        panels[0].set_title(title, pad=14)
        most = axis_limit(sizes)
        if most < sizes.max():
            panels[0].set_ylim(0, 1.2 * most)
            panels[0].annotate(f"{sizes.max():,}", (sizes.argmax(), 1.2 * most), ha="center", va="bottom", fontsize=9)
        if mesh is not None:
            most = axis_limit(count[count > 0])
            mesh.set_clim(0, most)
            look: dict[str, Any] = {"label": "Samples of a class", "pad": 0.01, "aspect": 30}
            look |= {"extend": "max" if most < count.max() else "neither", "ticks": MaxNLocator("auto", integer=True)}
            figure.colorbar(mesh, ax=panels, **look).outline.set_visible(False)
        panels[-1].set(xlabel=label)
        panels[-1].locator_params(axis="x", integer=True)
        if total > MAX_IN_ORDER:
            panels[-1].set_xticks([])
        write_names(panels[-1], client_names, class_names, shown=total, classes=classes)
    return figure


def axis_limit(values: Any) -> float:
    """Where an axis ends: at the largest value, or at the 98th percentile if the largest lies far beyond it."""
    import numpy as np

    if not values.size:
        return 1.0
    usual, most = float(np.quantile(values, 0.98, method="lower")), float(values.max())
    return usual if most > CUT_RATIO * usual > 0 else most


def skew_table(figures: dict[str, float | int], *more: tuple[str, str]) -> RenderableType:
    """The measures of `heterogeneity` as a small table, and further lines."""
    f = figures
    empty = f["clients"] - f["clients_with_samples"]
    rows = [
        ("clients", f"{f['clients']:,}" + (f", {empty:,} of them without samples" if empty else "")),
        ("samples", f"{f['samples']:,}"),
        (
            "samples of a client",
            f"{f['size_min']:,} to {f['size_max']:,}, median {f['size_median']:,.10g}, mean {f['size_mean']:,.1f}",
        ),
        ("variation of sizes", f"{f['size_cv']:.3f}, standard deviation by mean"),
    ]
    if "tv_mean" in f:  # not in a regression
        rows += [
            ("classes of a client", f"mean {f['classes_mean']:.2f}"),
            (
                "effective classes",
                f"mean {f['effective_classes_mean']:.2f}, least {f['effective_classes_min']:.2f}; exp of the entropy",
            ),
            ("total variation", f"mean {f['tv_mean']:.3f}, largest {f['tv_max']:.3f}; a client's labels against all"),
            ("Jensen–Shannon", f"mean {f['js_mean']:.3f}, largest {f['js_max']:.3f} bits; likewise"),
        ]
    return pairs([*rows, *more])
