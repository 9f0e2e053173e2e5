"""The answer of `askew tune`: the ranking as rows, as a table in a terminal, and as a picture of the curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from .picture import Picture, write_picture
from .plain_table import plain_table
from .runs import Runs, as_html, as_text, draw_key
from .significance import PairedComparison, judge_pairs
from .statistics import MIN_SEEDS, t_interval
from .tables import value_text
from .terminal import BEST, QUIET, WARNING, duration, pairs, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..experiment.config import Config
    from ..experiment.tune import Standing, TuneResult

ORIGIN = (
    "Settings were chosen at one seed and methods are ranked at fresh ones, by the samples that clients hold out; the "
    "test set chose nothing. Test: in the round that held-out samples choose, mean over seeds ± half of the 95% "
    "t-interval; against the best: paired on the test set, corrected by Holm. Methods that reached the final stand "
    "before the others. The first of several close methods owes some of its place to chance."
)


class Tuning:
    """The answer of `askew.tune`: the best method and setting as `winner`, all methods as rows in `ranking`.

    `refused` has the reasons of methods that cannot run here, `runs` the runs at fresh seeds. It prints as a table.
    """

    def __init__(self, result: TuneResult, folder: Path | None = None) -> None:
        self.result, self.folder, self.refused = result, folder, dict(result.refused)
        self.winner: Config = result.standings[0].config
        self.runs = Runs(result.runs)
        tests = dict(zip([s.method for s in result.standings[1:]], compare_with_winner(result), strict=True))
        self.ranking = [
            make_row(rank, standing, tests.get(standing.method)) for rank, standing in enumerate(result.standings, 1)
        ]

    def summary(self) -> dict[str, Any]:
        """All of it as plain values, as `askew tune --json` prints them."""
        result = self.result
        return {
            "ranking": self.ranking,
            "refused": self.refused,
            "budget": None if result.budget is None else result.budget._asdict(),
            "spent": result.spent,
            "plan": result.plan._asdict(),
            "remarks": result.remarks,
            "winner": self.winner.tables(),
            "folder": None if self.folder is None else str(self.folder),
        }

    @property
    def best(self) -> str:
        """The name of the best method."""
        return self.result.standings[0].method

    def spent_text(self) -> str:
        """What was spent, and of which budget."""
        unit = self.result.budget.unit if self.result.budget else "rounds"
        text = amount_words(self.result.spent, unit)
        return f"{text} of {amount_words(self.result.budget.amount, unit)}" if self.result.budget else text

    def plot(self, size: str | None = None) -> Figure:
        """A figure of the accuracy, or loss, on held-out samples over the rounds, mean over the fresh seeds."""
        return draw_key(self.runs, "accuracy_validation" if self.result.classes else "loss_validation", size)

    def write_curves(self, folder: Path) -> Path | None:
        """Write the figure as curves.svg; None where no fresh seed was trained."""
        if not self.runs:
            return None
        picture = Picture("curves", "Held-out samples", "Curves of every method by round.", "", self.plot())
        return write_picture(picture, folder, "svg")

    def rich(self) -> RenderableType:
        """The ranking as `rich` prints it, then what cannot run here and what there is to say."""
        parts: list[RenderableType] = [ranking_table(self.ranking, self.result.classes)]
        parts += [Text(" ".join([*self.result.remarks, ORIGIN]), QUIET), Text(), cost_table(self.ranking)]
        if self.refused:
            refused = pairs([(name, Text(reason, WARNING)) for name, reason in self.refused.items()])
            parts += [Text("\ncannot run here", "bold"), refused]
        return Group(*parts)

    def __repr__(self) -> str:
        return as_text(self.rich())

    def _repr_html_(self) -> str:
        return as_html(self.rich())


def compare_with_winner(result: TuneResult) -> list[PairedComparison]:
    """Every other method against the best one, on the test set, over the fresh seeds that both have."""
    found = []
    for other in result.standings[1:]:
        best = result.standings[0]
        values = {seed: (value, best.tests.get(seed)) for seed, value in other.tests.items()}
        known = {seed: a - b for seed, (a, b) in values.items() if a is not None and b is not None}
        found.append(
            PairedComparison(
                other.method,
                best.method,
                "",
                "final_accuracy" if result.classes else "test_loss",
                list(known),
                list(known.values()),
                {},
                [],
                1 if result.classes else -1,
            )
        )
    return judge_pairs(found)


def make_row(rank: int, standing: Standing, test: PairedComparison | None) -> dict[str, Any]:
    """One method as plain values."""
    tests = {seed: value for seed, value in standing.tests.items() if value is not None}
    return {
        "rank": rank,
        "method": standing.method,
        "setting": standing.setting,
        "settings": standing.settings,
        "validation": abs(standing.validation),  # a loss is negated while methods are ranked
        "test": mean(tests.values()) if tests else None,
        "test_interval": t_interval([*tests.values()], 0.95) if len(tests) >= MIN_SEEDS else None,
        "tests": tests,
        "best_rounds": standing.best_rounds,
        "difference": test.mean if test else None,
        "p_holm": test.p_holm if test else None,
        "verdict": test.verdict if test else None,
        "stage": standing.last,
        **standing.costs,
    }


def amount_words(amount: float, unit: str) -> str:
    """An amount of rounds, seconds or bytes in words."""
    return {"seconds": duration, "bytes": size}[unit](amount) if unit != "rounds" else f"{amount:,.0f} rounds"


def setting_words(setting: dict[str, Any]) -> str:
    """A setting in one line: "lr=0.3 mu=0.1"."""
    return " ".join(f"{key.rpartition('.')[2]}={value_text(value)}" for key, value in setting.items())


def ranking_table(rows: Sequence[dict[str, Any]], classes: bool) -> RenderableType:
    """The ranking: a row for each method, the best first."""
    unit = " %" if classes else " loss"
    table = plain_table("", "method and setting", f"held\nout{unit}", f"test{unit}", "seeds", "against\nthe best", "")
    table.columns[1].justify = table.columns[-1].justify = "left"
    for row in rows:
        interval = row["test_interval"]
        half = "" if interval is None else f" ± {number((interval[1] - interval[0]) / 2, classes)}"
        table.add_row(
            str(row["rank"]),
            Text(f"{row['method']} {setting_words(row['setting'])}", BEST if row["rank"] == 1 else ""),
            number(row["validation"], classes),
            "–" if row["test"] is None else f"{number(row['test'], classes)}{half}",
            str(len(row["tests"])),
            against_text(row, classes),
            Text("" if row["verdict"] is None else row["verdict"], QUIET),
        )
    return table


def cost_table(rows: Sequence[dict[str, Any]]) -> RenderableType:
    """What was trained of each method, and until which stage it was."""
    table = plain_table("method", "settings\ntried", "rounds", "time", "sent", "reached")
    table.columns[0].justify = table.columns[-1].justify = "left"
    for row in rows:
        costs = (f"{row['rounds']:,.0f}", duration(row["seconds"]), size(row["bytes"]))
        table.add_row(row["method"], str(row["settings"]), *costs, row["stage"])
    return table


def number(value: float, classes: bool) -> str:
    """An accuracy in percent, or a loss."""
    return f"{100 * value:.1f}" if classes else f"{value:.4g}"


def against_text(row: dict[str, Any], classes: bool) -> str:
    """The difference from the best method on the test set."""
    if row["difference"] is None:
        return ""
    return f"{100 * row['difference']:+.1f}" if classes else f"{row['difference']:+.3g}"
