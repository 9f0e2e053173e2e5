"""Draw the pictures of docs/data.md, in colours that can be seen on white and on black, and those of docs/time.md.

python docs/img/draw.py        partitions.png and participation.png; needs CIFAR-10 (askew data get cifar10)
python docs/img/draw.py RUN    cifar10.png: the accuracy of the run in the folder RUN
python docs/img/draw.py time   timeline.png and timeline-buffer.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure

import askew
from askew.experiment.build import client_label_counts
from askew.experiment.config import Config
from askew.participation import participations
from askew.report.figures import accuracy_picture, group_runs
from askew.report.picture import STYLE, canvas, style
from askew.report.timeline_figure import timeline_picture

HERE = Path(__file__).parent
GREY, BLUE = "#868E96", "#3B8FD6"
# From transparent (no samples) to blue (many): the page's background is seen through the picture.
SHADES: Any = LinearSegmentedColormap.from_list(
    "shades", [to_rgba(BLUE, share**0.5) for share in np.linspace(0, 1, 64)]
)
TEXT_COLOURS = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY)
NEUTRAL = STYLE | TEXT_COLOURS | {"axes.grid": False, "font.size": 12.5, "axes.titlesize": 12.5}

PARTITIONS: dict[str, dict[str, Any]] = {
    "iid": {"name": "iid"},
    "lognormal, sigma = 0.6": {"name": "lognormal", "sigma": 0.6},
    "dirichlet, alpha = 0.2": {"name": "dirichlet", "alpha": 0.2},
    "dirichlet_prior, alpha = 0.3": {"name": "dirichlet_prior", "alpha": 0.3},
    "labels, labels = 3": {"name": "labels", "labels": 3},
    "shards, shards = 2": {"name": "shards", "shards": 2},
}
PARTICIPATIONS: dict[str, dict[str, Any]] = {
    "uniform, cohort = 10": {"name": "uniform", "cohort": 10},
    "skewed, gamma = 5, cohort = 10": {"name": "skewed", "gamma": 5, "cohort": 10},
    "cyclic, groups = 5, shuffle = false, cohort = 10": {"name": "cyclic", "groups": 5, "shuffle": False, "cohort": 10},
    "markov, join = 0.02, leave = 0.1, fraction = 1": {"name": "markov", "join": 0.02, "leave": 0.1, "fraction": 1.0},
}

TIME = {"speed": "lognormal", "sigma": 0.7, "up": 1e5} | {
    "availability": "markov",
    "mean_on": 6.0,
    "mean_off": 2.0,
}
WAITS: dict[str, dict[str, Any]] = {
    "timeline": {"wait": "deadline", "deadline": 0.8},
    "timeline-buffer": {"wait": "buffer", "buffer": 3},
}


def partition_figure(clients: int = 40) -> Figure:
    """Heat maps of CIFAR-10's samples by class and client, each below a bar chart of the clients' sizes."""
    figure = canvas(10, 5.6)
    grid: Any = figure.subplots(4, 3, sharex=True, height_ratios=[1, 3.2, 1, 3.2])
    for k, (title, table) in enumerate(PARTITIONS.items()):
        config = Config.build({"data": {"name": "cifar10"}, "partition": table | {"clients": clients}})
        counts, sizes = client_label_counts(config)
        (bars, heat), (row, column) = grid[2 * (k // 3) : 2 * (k // 3) + 2, k % 3], divmod(k, 3)
        bars.bar(range(clients), sizes, width=0.85, color=GREY)
        bars.set_title(title)
        bars.set(
            ylim=(0, 3600),
            yticks=(0, 3000),
            yticklabels=() if column else ("0", "3,000"),
            ylabel="" if column else "Samples",
        )
        draw_shades(heat, counts.T, 1250)
        heat.set(xlabel="Client" if row else "", ylabel="" if column else "Class", yticks=range(0, 10, 3))
    return figure


def draw_shades(axes: Axes, values: np.ndarray, most: float, first: int = 0) -> None:
    """Draw a matrix: 0 is transparent, `most` the darkest; columns are numbered from `first`."""
    rows, columns = values.shape
    edges = (first - 0.5, first + columns - 0.5, -0.5, rows - 0.5)
    axes.imshow(
        values, cmap=SHADES, vmin=0, vmax=most, aspect="auto", interpolation="none", origin="lower", extent=edges
    )


def participation_figure(clients: int = 100, rounds: int = 100) -> Figure:
    """A mark for each client that takes part in a round, by rounds and clients."""
    figure = canvas(10, 6.6)
    grid: Any = figure.subplots(2, 2, sharex=True, sharey=True)
    for k, (axes, (title, table)) in enumerate(zip(grid.flat, PARTICIPATIONS.items(), strict=True)):
        name, *settings = table.items()
        rule, taking_part = participations[name[1]].build(dict(settings)), np.zeros((clients, rounds))
        for t in range(1, rounds + 1):
            taking_part[rule.sample(0, t, np.arange(clients), clients), t - 1] = 1
        draw_shades(axes, taking_part, 1, first=1)
        axes.set_title(title)
        axes.set(xlabel="Round" if k > 1 else "", ylabel="" if k % 2 else "Client")
    return figure


if __name__ == "__main__":
    if sys.argv[1:] == ["time"]:
        for name, wait in WAITS.items():
            run = askew.run("fedavg", rounds=6, model="softmax", participation={"dropout": 0.1}, time=TIME | wait)
            with style():
                picture = timeline_picture(group_runs([run]))
            assert picture is not None
            (HERE / f"{name}.png").write_bytes(picture.render("png"))
    elif len(sys.argv) > 1:
        with style():
            picture = accuracy_picture(group_runs([askew.load(sys.argv[1])]))
        assert picture is not None
        (HERE / "cifar10.png").write_bytes(picture.render("png"))
    else:
        with rc_context(NEUTRAL):
            for name, figure in (("partitions", partition_figure()), ("participation", participation_figure())):
                figure.savefig(HERE / f"{name}.png", dpi=160, transparent=True)
