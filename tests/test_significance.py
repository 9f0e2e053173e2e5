"""Paired tests by hand and against published tables; pairs that are none; and tables to paste that compile."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import askew
from askew.cli.main import main
from askew.errors import ConfigError, UnknownName
from askew.experiment.store import Run
from askew.report.paste import PasteCell, PasteTable, PasteTables, latex_text, markdown_text
from askew.report.runs import Runs
from askew.report.significance import LEVEL, PairedComparison, compare_methods, judge_pairs
from askew.report.statistics import bootstrap_interval, seeds_needed, t_quantile, two_sided_p
from askew.report.tables import group_runs
from askew.reproduction.comparison import TableCell
from askew.reproduction.paste_experiment import case_tests

ROOT = Path(__file__).parents[1]


def make_run(method: str, accuracy: float, seed: int, **changes: Any) -> Run:
    """A finished run of two rounds in memory."""
    config: dict[str, Any] = {
        "seed": seed,
        "rounds": 2,
        "data": {"name": "digits"},
        "partition": {"name": "dirichlet", "clients": 2},
        "participation": {"name": "uniform", "fraction": 0.5},
        "model": {"name": "mlp"} | changes.get("model", {}),
        "algorithm": {"name": method} | changes.get("settings", {}),
    } | changes.get("config", {})
    numbers = {"seconds": 0.1, "bytes_up": 1, "bytes_down": 1, "dropped": 0}
    turns = changes.get("turns", ([0], [1]))
    rounds = [
        {"round": t, "participants": ids, "accuracy": accuracy, "loss": 1 - accuracy} | numbers
        for t, ids in enumerate(turns, 1)
    ]
    return Run(config, rounds, federation={"clients": 2, "sizes": changes.get("sizes", [3, seed])})


def make_runs(method: str, accuracies: Sequence[float], **changes: Any) -> list[Run]:
    """A run for each seed, from 0 on."""
    return [make_run(method, value, seed, **changes) for seed, value in enumerate(accuracies)]


def pairs(differences: Sequence[float], method: str = "m") -> PairedComparison:
    return PairedComparison(method, "base", "", "best_accuracy", list(range(len(differences))), [*differences], {}, [])


# mathematics ----------------------------------------------------------------------------------------------------


def test_five_seeds_by_hand() -> None:
    base = [0.5, 0.6, 0.4, 0.7, 0.55]
    runs = make_runs("fedavg", base) + make_runs(
        "feddyn", [b + d for b, d in zip(base, (1e-2, 2e-2, 3e-2, 4e-2, 5e-2), strict=True)]
    )
    (test,) = compare_methods(group_runs(runs))
    # t = 0.03 / (0.0158114 / √5) = 4.2426; the table of t has 2.776 at 97.5% and 4 degrees of freedom
    assert (test.method, test.against, test.seeds, test.verdict) == ("feddyn", "fedavg", [0, 1, 2, 3, 4], "better")
    assert test.mean == pytest.approx(0.03) and test.std == pytest.approx(0.01581139)
    assert test.t_interval == pytest.approx((0.03 - 2.776 * 0.00707107, 0.03 + 2.776 * 0.00707107), abs=4e-6)
    assert test.p == test.p_holm == pytest.approx(0.01324, abs=1e-5)
    assert test.effect == pytest.approx(1.8974, abs=1e-4)
    assert test.bootstrap_interval and 0.01 < test.bootstrap_interval[0] < 0.02
    (loss,) = compare_methods(group_runs(runs), metric="test_loss")  # less is better
    assert loss.mean == pytest.approx(-0.03) and loss.verdict == "better"
    (other,) = compare_methods(group_runs(runs), against="feddyn")
    assert other.method == "fedavg" and other.verdict == "worse"


@pytest.mark.parametrize(("freedom", "value"), [(1, 12.706), (4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980)])
def test_quantiles_are_those_of_the_published_table(freedom: int, value: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(value, abs=5e-4)


@pytest.mark.parametrize(("effect", "seeds"), [(0.2, 199), (0.5, 34), (0.8, 15)])
def test_seeds_for_cohens_small_medium_and_large_effects(effect: float, seeds: int) -> None:
    assert seeds_needed(effect, 0.025, most=1000) == seeds  # two-sided 5%, power 0.8


def test_holm_over_the_methods_compared_and_the_seeds_that_would_decide() -> None:
    values = [[1.0, 2, 3, 4, 5], [-1.0, 2, -3, 4, 1], [2.0, 3, 1, -1, 2]]
    alone = [judge_pairs([pairs(each)])[0] for each in values]
    family = judge_pairs([pairs(each) for each in values])
    p = [test.p or 0 for test in alone]
    assert [test.p_holm for test in family] == pytest.approx([3 * p[0], max(2 * p[2], p[1]), 2 * p[2]])
    assert [test.p for test in family] == p
    assert alone[2].more_seeds == (seeds_needed(abs(alone[2].effect or 0), LEVEL / 2, 6, most=1000) or 0) - 5
    assert (family[2].more_seeds or 0) > (alone[2].more_seeds or 0)  # a stricter level needs more


def test_equal_differences_are_decided_by_flips_of_signs() -> None:
    assert two_sided_p([0.1] * 3) == 0.25 and two_sided_p([0.1] * 6) == pytest.approx(2 / 64)
    verdicts = [judge_pairs([pairs([value] * n)])[0].verdict for value, n in ((0.1, 3), (0.1, 5), (0.1, 6), (0.0, 3))]
    assert verdicts == ["undecided", "undecided", "better", "equal"]
    assert judge_pairs([pairs([0.1, 0.2])])[0].verdict == "too few seeds"


def test_the_bootstrap_is_seeded_and_that_of_two_values_known() -> None:
    assert bootstrap_interval([0.0, 1.0]) == (0.0, 1.0)  # means 0, ½ and 1 with chances ¼, ½ and ¼
    assert bootstrap_interval([1.0, 2, 4]) == bootstrap_interval([1.0, 2, 4])
    assert bootstrap_interval([0.0, 1.0], level=0.4) == (0.5, 0.5)


# pairs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"turns": ([0], [0])}, "different clients took part in round 2"),
        ({"sizes": [4, 4]}, "their clients hold different samples"),
        ({"model": {"fingerprint": "b"}}, "their networks start from different weights"),
        ({"model": {"width": 9}}, "their settings of network differ"),
        ({"config": {"participation": {"name": "full"}}}, "their settings of participation differ"),
        ({"config": {"rounds": 3}}, "one has 3 rounds and the other 2"),
        ({"turns": ([0],)}, "feddyn was stopped after round 1 of 2"),
    ],
)
def test_runs_that_do_not_share_clients_turns_and_start_are_no_pair(changes: dict[str, Any], reason: str) -> None:
    (test,) = compare_methods(group_runs([make_run("fedavg", 0.5, 1), make_run("feddyn", 0.6, 1, **changes)]))
    assert test.seeds == [] and test.mean is None and test.verdict == "too few seeds"
    assert test.refused == [f"Seed 1 of feddyn{test.method[6:]} and {test.against} is left out: {reason}."]


def test_missing_seeds_are_named_and_the_reference_is_chosen() -> None:
    runs = [*make_runs("feddyn", [0.5, 0.7, 0.6]), *make_runs("fedavg", [0.4, 0.5, 0.6, 0.5])[1:]]
    table = askew.compare(runs, test=True)
    (test,) = table.tests
    assert test.missing == {"feddyn": [3], "fedavg": [0]} and test.seeds == [1, 2]
    assert "Missing: seed 3 of feddyn. Missing: seed 0 of fedavg." in " ".join(repr(table).split())
    assert [row["test"] and row["test"]["against"] for row in table] == ["fedavg", None]
    with pytest.raises(UnknownName, match=r"no method is called 'fedavgg'.*did you mean 'fedavg'"):
        askew.compare(runs, test=True, against="fedavgg")
    with pytest.raises(UnknownName, match="unknown metric"):
        askew.compare(runs, test=True, metric="accuracy")
    with pytest.raises(ConfigError, match="give test=True"):
        askew.compare(runs, against="fedavg")
    with pytest.raises(ConfigError, match="two methods on the same federation"):
        askew.compare(runs[:2], test=True)
    two = [*runs[:3], *(run for n in (2.0, 3.0) for run in make_runs("fedavg", [0.4], settings={"server_scale": n}))]
    with pytest.raises(ConfigError, match=r"give the label of one: 'fedavg.*', 'fedavg.*'"):
        askew.compare(two, test=True, against="fedavg")


def test_the_seed_that_tuned_is_not_tested() -> None:
    def cell(method: str, values: list[float]) -> TableCell:
        return TableCell("c", method, "", "rounds_to", [0, 1, 2, 3], values, 9, None, [], "")

    cells = [cell("FedAvg", [9.0, 8, 7, 9]), cell("New", [1.0, 4, 4, 5])]
    (all_seeds,) = case_tests(cells, "FedAvg", None).values()
    (blind,) = case_tests(cells, "FedAvg", 0).values()
    assert all_seeds.seeds == [0, 1, 2, 3] and blind.differences == [-4.0, -3.0, -4.0]
    assert blind.verdict == "better"  # fewer rounds


# tables to paste ------------------------------------------------------------------------------------------------

ODD = r"a_b%&#${}\^~|<α 中 é*"


def odd_tables() -> PasteTables:
    cells = [PasteCell(81.234, 0.5, best=True, mark="*"), PasteCell(-1.0, None, mark="†"), PasteCell(None)]
    table = PasteTable(ODD, ["Method", ODD, "b", "c"], [(ODD, cells)], [ODD])
    wide = PasteTable("wide", ["M", *(f"a long heading {n}" for n in range(14))], [("m", [PasteCell(1.0)] * 14)])
    return PasteTables([table, wide], [{"label": "=1+1", "seeds": [0, 1], "p": 0.5}], ["askew compare\nx"])


def test_nothing_in_a_label_is_an_instruction() -> None:
    assert latex_text(r"50% α_1 \x") == r"50\% $\alpha$\_1 \textbackslash{}x"
    assert latex_text("中Ω") == r"[U+4E2D]$\Omega$"
    assert markdown_text("a|b*") == r"a\|b\*"
    tables = odd_tables()
    latex, markdown = tables.latex(), tables.markdown()
    assert r"\textbf{81.23} $\pm$ 0.50$^{*}$ & $-$1.00$^{\dagger}$ & -- \\" in latex
    assert all(line.startswith(("%", "\\", " ")) for line in latex.split("\n") if line)
    bare = re.sub(r"\\[{}]", "", latex)
    assert bare.count("{") == bare.count("}") and latex.count(r"\begin{tabular}") > 2  # the wide one is divided
    assert "**81.23 ± 0.50**\\* | -1.00† | – |" in markdown
    assert list(csv.reader(io.StringIO(tables.csv()))) == [["label", "seeds", "p"], ["'=1+1", "0 1", "0.5"]]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("pdflatex"), reason="needs pdflatex")
def test_latex_compiles_without_a_line_that_is_too_wide(tmp_path: Path) -> None:
    (tmp_path / "t.tex").write_text(odd_tables().latex(), encoding="utf-8")
    (tmp_path / "p.tex").write_text(
        r"\documentclass[twocolumn]{article}\usepackage[margin=0.8in]{geometry}\usepackage{booktabs}"
        r"\begin{document}\input{t}\end{document}"
    )
    words = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "p.tex"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Overfull" not in done.stdout, done.stdout


def test_a_comparison_is_pasted_with_marks_and_its_commands() -> None:
    runs = make_runs("fedavg", [0.5, 0.6, 0.4, 0.7]) + make_runs("fed_dyn", [0.6, 0.71, 0.5, 0.82])
    for run in runs:
        run.folder = Path("runs") / f"{run.algorithm}-{run.config['seed']}"
    latex = askew.compare(runs, test=True).latex()
    assert r"fed\_dyn & \textbf{65.75} $\pm$ 13.82$^{*}$ &" in latex
    assert "%   askew run runs/fedavg-0/run.toml --out runs\n" in latex and "%   askew compare runs/fedavg-0 " in latex
    assert "better than fedavg: paired t-tests over seeds" in latex
    row = list(csv.DictReader(io.StringIO(askew.compare(runs, test=True).csv())))[1]
    assert row["test_verdict"] == "better" and float(row["best_accuracy"]) == pytest.approx(0.6575)
    assert row["test_seeds"] == "0 1 2 3"


def test_commands_that_paste(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results"
    results.mkdir()
    shutil.copy(ROOT / "results/fedpdc-adaptive-full.csv", results)
    out = tmp_path / "a.tex"
    assert main(["table", "fedpdc/adaptive", "--results", str(results), "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert r"\toprule" in text and "%   askew reproduce fedpdc/adaptive --scale full" in text
    capsys.readouterr()
    for words, sentence in (
        (["table", "feddpc/fig6", "--results", str(results)], "no results of feddpc/fig6 are stored"),
        (["table", "fedpdc/adaptive", "--results", str(results), "--out", "a.doc"], "give --format"),
        (["table", "fedpdc/adaptive", "--results", str(results), "--format", "word"], "unknown format 'word'"),
        (["table", "fedpdc/adaptive", "--results", str(results), "--against", "X"], "no method is called 'X'"),
        (["report", str(tmp_path), "--size", "column"], "--size is that of --figures"),
    ):
        assert main(words) == 2
        assert sentence in " ".join(capsys.readouterr().err.split())


def test_figures_fit_a_column_or_a_page(tmp_path: Path) -> None:
    runs = Runs(make_runs("fedavg", [0.5, 0.6]) + make_runs("feddyn", [0.6, 0.7]))
    figures = {size: runs.plot(size=size) for size in ("column", "page", None)}
    widths = {size: (f.get_size_inches()[0], f.axes[0].xaxis.label.get_size()) for size, f in figures.items()}
    assert widths == {"column": (3.3, 8), "page": (6.9, 9), None: (6.8, 10.5)}
    figures["column"].savefig(tmp_path / "a.pdf")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    with pytest.raises(UnknownName, match="unknown size"):
        runs.plot(size="colum")
