"""The papers' figures in the ledger: their lines from stored curves, and in words what is missing of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import ceil, isfinite
from statistics import fmean, median
from typing import NamedTuple

from ..core.text import count_text
from ..report.picture import Picture, style
from ..report.statistics import MIN_SEEDS
from ..report.tables import MeanCurve
from .evidence import Evidence, GridPoint, choose_point
from .paper_figures import LineKey, Lines, Panel, draw_panels, measured_panels, panel_columns, shown_ranges
from .papers import Experiment
from .planned_runs import build_config, hyper_text, run_specs
from .run_metrics import TO_TARGET, Metrics
from .titles import own_methods

FIGURE = re.compile(r"\bFigures? \d")  # in the place in the paper of what has a published figure
POINTS = 60  # of a line at most: a page with all figures stays small
BAND_SHARE = 0.5  # of a panel's height: bands that are typically higher would cover its lines


class PaperFigure(NamedTuple):
    """A published figure as far as its runs are stored."""

    experiment: Experiment
    panels: tuple[Panel, ...]  # with a line at least
    seeds: tuple[int, ...]  # numbers of seeds of its lines, in order
    published: int  # seeds that the paper has
    missing: str  # lines without a run, in words
    planned: int  # lines that the whole figure has
    stopped: bool = False  # whether there are lines of runs that were stopped at an accuracy
    wide: float = 0.0  # the typical deviation over seeds of the panels whose bands are left out; 0: there are none

    @property
    def is_shown(self) -> bool:
        """Whether there is something to compare: two lines, or all that there are."""
        return len(self.seeds) >= min(2, self.planned)

    @property
    def note(self) -> str:
        """What is drawn and which runs are missing."""
        few, most = self.seeds[0], self.seeds[-1]
        seeds = f"{few} to {most} seeds" if few < most else count_text(most, "seed")
        paper = f" (the paper: {self.published})" if few < self.published else ""
        band = "; bands: ± one standard deviation over seeds" if any(any(line.std) for line in self.lines) else ""
        if self.wide:
            band += f"; bands that would cover the lines are left out (± {self.wide:.2g} points over seeds)"
        band += "; a line that ends early: the run was stopped at its target" if self.stopped else ""
        legend = ", in brackets behind each name" if few < most else ""
        missing = f"Not run: {self.missing}." if self.missing else "All lines of the paper's figure are here."
        return f"Means over {seeds}{legend}{paper}{band}. {missing}"

    @property
    def file_name(self) -> str:
        return self.experiment.id.replace("/", "-")

    @property
    def title(self) -> str:
        return f"{self.experiment.where}: {self.experiment.title}"

    @property
    def alt(self) -> str:
        """The picture in words: its lines."""
        labels = dict.fromkeys(label for panel in self.panels for label in panel.lines)
        return f"{self.experiment.where} from our runs: {', '.join(labels)}."

    @property
    def lines(self) -> list[MeanCurve]:
        return [line for panel in self.panels for line in panel.lines.values()]


def missing_text(lines: Lines) -> str:
    """The lines without a run by case: "FedProx in cifar10-0.6; all lines in cifar100-0.2, cifar100-0.6"."""
    by_case: dict[str, list[tuple[str, bool]]] = {}
    for (case, method, hyper), runs in lines.items():
        by_case.setdefault(case, []).append((f"{method}, {hyper}" if hyper else method, bool(runs)))
    cases: dict[str, list[str]] = {}
    for case, names in by_case.items():
        missing = [name for name, measured in names if not measured]
        every = len(missing) == len(names) > 1
        if missing:
            cases.setdefault("all lines" if every else ", ".join(missing), []).append(case)
    return "; ".join(f"{names} in {', '.join(where)}" for names, where in cases.items())


def collect_figure(e: Experiment, evidence: Evidence) -> PaperFigure | None:
    """A figure of a paper from what is stored; None where an experiment has none, or nothing of it was run."""
    if not FIGURE.search(e.where) or not (e.axis or e.shows == "coverage"):
        return None
    by_seed, stopped = dict[LineKey, Mapping[int, Metrics]](), False
    for (case, method), points in evidence.points(e.id).items():
        if method in e.axis.get("methods", (method,)):
            shown = line_points(e, evidence, points)
            for point in shown:
                hyper = hyper_text(point.hyper) if len(shown) > 1 else ""
                runs = point.runs or stopped_curves(e, evidence, point)
                by_seed[case, method, hyper] = runs
                stopped = stopped or bool(runs and not point.runs)
            if not shown:
                by_seed[case, method, ""] = {}
    lines = with_shared_seeds(by_seed, of_cases=e.axis.get("lines") == "case")
    seeds = sorted(len(runs) for runs in lines.values() if runs)
    if not seeds:
        return None
    specs = run_specs(e, "full", [0]) if e.shows == "bars" else ()
    clients = {spec.case.name: build_config(spec, "full").partition.clients for spec in specs}
    panels = [thin_panel(panel) for panel in measured_panels(e, lines, clients)]
    panels = [panel for panel in panels if any(len(line.rounds) > 1 for line in panel.lines.values())]
    panels, wide = without_wide_bands(panels)
    published = len((evidence.known[e.runs[0]] if e.runs else e).seeds)
    figure = PaperFigure(e, tuple(panels), tuple(seeds), published, missing_text(lines), len(lines), stopped, wide)
    return figure if panels else None


def without_wide_bands(panels: Sequence[Panel]) -> tuple[list[Panel], float]:
    """The panels without the bands that would cover most of them, and the largest typical deviation of these, or 0.

    Seeds are partitions, so a deviation over seeds may be many times the distance of the lines.
    """
    shown, wide = list[Panel](), 0.0
    for panel, (low, high) in zip(panels, shown_ranges(panels), strict=True):
        deviations = [std for line in panel.lines.values() for std in line.std if isfinite(std)]
        typical = median(deviations) if deviations and panel.y.endswith("%") else 0.0
        if 2 * typical > BAND_SHARE * (high - low):
            bare = {label: line._replace(std=[0.0] * len(line.std)) for label, line in panel.lines.items()}
            panel, wide = panel._replace(lines=bare), max(wide, typical)
        shown.append(panel)
    return shown, wide


def with_shared_seeds(by_seed: Mapping[LineKey, Mapping[int, Metrics]], *, of_cases: bool) -> Lines:
    """Runs of lines that are drawn together are of the same seeds where they share enough, for a seed is a partition.

    Those are the lines of one case; `of_cases`: of one method.
    """
    shares, together = 1 if of_cases else 0, dict[str, list[set[int]]]()
    for key, runs in by_seed.items():
        if runs:
            together.setdefault(key[shares], []).append({*runs})
    shared = {name: seeds for name, each in together.items() if len(seeds := set.intersection(*each)) >= MIN_SEEDS}
    return {
        key: [metrics for seed, metrics in sorted(runs.items()) if seed in shared.get(key[shares], runs)]
        for key, runs in by_seed.items()
    }


def stopped_curves(e: Experiment, evidence: Evidence, point: GridPoint) -> dict[int, Metrics]:
    """The accuracies of runs that were stopped at one, by seed, where a figure shows nothing else."""
    if e.shows in ("bars", "coverage"):
        return {}
    return {seed: {"accuracy": evidence.stopped[digest, seed][TO_TARGET]} for seed, digest in point.stopped.items()}


def line_points(e: Experiment, evidence: Evidence, points: Sequence[GridPoint]) -> list[GridPoint]:
    """The grid points of a method that are drawn: the chosen one; where the whole grid is the result, those named."""
    if len(points) == 1:
        return list(points)
    rule = evidence.known[e.runs[0]].choose if e.runs else e.choose
    if rule:
        point = choose_point(points, rule, evidence.tuning_seeds(points))
        return [point] if point else []
    wanted = e.axis.get("hyper", {})
    return [p for p in points if all(p.hyper.get(k) == v for k, v in wanted.items())] or list(points)


def thin_panel(panel: Panel) -> Panel:
    """The panel with few points a line, each the mean of neighbouring rounds."""
    return panel._replace(lines={label: thin_curve(curve) for label, curve in panel.lines.items()})


def thin_curve(curve: MeanCurve) -> MeanCurve:
    """The curve with at most POINTS points; what has no number everywhere keeps none there."""
    each = ceil(len(curve.rounds) / POINTS)
    parts = [slice(n, n + each) for n in range(0, len(curve.rounds), each)]
    rounds, mean, std = ([fmean(values[part]) for part in parts] for values in curve)
    return MeanCurve([round(r) for r in rounds], mean, std) if each > 1 else curve


def figure_picture(figure: PaperFigure) -> Picture:
    """The figure drawn, with its note."""
    e = figure.experiment
    with style():
        drawn = draw_panels(figure.panels, min(2, panel_columns(e)), below=True, own=own_methods(e.paper))
    return Picture(figure.file_name, figure.title, figure.alt, figure.note, drawn)
