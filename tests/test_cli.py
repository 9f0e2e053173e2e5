"""The command line: what each verb prints and leaves behind, for people and for programs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import askew
from askew.cli.main import main
from askew.cli.options import exit_with_command
from askew.cli.progress import ProgressDisplay
from askew.cli.training import DEMO_ROUNDS, DEMO_SEEDS
from askew.data import files
from askew.experiment import demo
from askew.experiment.catalogue import KINDS
from askew.experiment.config import CHOICES, Config, stored_tables
from askew.report import table, terminal
from askew.report.plain_table import FirstThatFits, plain_table

TINY: dict[str, Any] = {"rounds": 2, "model": {"name": "softmax"}, "partition": {"clients": 5}}
SETS = ["--set", "rounds=2", "--set", "model.name=softmax", "--set", "partition.clients=5"]


class Outcome:
    """What one command line returned and printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], arguments: tuple[str | Path, ...]) -> None:
        capsys.readouterr()
        self.code = main([str(argument) for argument in arguments])
        self.out, self.err = capsys.readouterr()

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs command lines in an empty folder, on 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: Outcome(capsys, arguments)


def records(run: askew.Run) -> list[dict[str, Any]]:
    """Rounds without what no two executions share."""
    return [{k: v for k, v in r.items() if k != "seconds"} for r in run.rounds]


def only_run() -> Path:
    [folder] = Path("runs").iterdir()
    return folder


# run ------------------------------------------------------------------------------------------------------------


def test_run_trains_stores_and_says_what_to_type_next(invoke: Any) -> None:
    result = invoke("run", *SETS)
    assert result.code == 0
    folder = only_run()
    assert f"askew show {folder}" in result.out and f"askew report {folder} --out report" in result.out
    run = askew.load(folder)
    assert f"{100 * run.best_accuracy:.1f}% in round {run.best_round}" in result.out
    assert "round 2/2" in result.err and f"engine {run.facts['engine']} ({run.facts['reason']}), on cpu" in result.err


def test_run_as_json_prints_one_document_and_nothing_else(invoke: Any) -> None:
    result = invoke("run", *SETS, "--json")
    wanted = {
        "run",
        "best_accuracy",
        "best_round",
        "final_accuracy",
        "rounds",
        "seconds_per_round",
        "bytes_up",
        "bytes_down",
        "engine",
        "device",
    }
    assert result.code == 0 and wanted <= result.json.keys()
    assert result.json["run"] == str(only_run()) and result.json["rounds"] == 2
    assert result.json == askew.load(only_run()).summary()


def test_quiet_says_nothing(invoke: Any) -> None:
    result = invoke("run", *SETS, "--quiet")
    assert (result.code, result.out, result.err) == (0, "", "")
    assert invoke("run", *SETS, "--quiet", "--json").json["finished"]


def test_quiet_keeps_warnings(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("askew.experiment.run.divergence_sentence", lambda *about: "it has diverged")
    result = invoke("run", *SETS, "--quiet")
    assert (result.code, result.out, result.err) == (0, "", "warning: it has diverged\n")
    assert "warnings and errors stay" in " ".join(invoke("run", "--help").out.split())


def test_the_command_line_and_python_give_the_same_numbers(invoke: Any) -> None:
    Path("tiny.toml").write_text(
        'rounds = 9\n[model]\nname = "softmax"\n[partition]\nclients = 5\n[algorithm]\nname = "scaffold"\n'
    )
    invoke("run", "tiny.toml", "--set", "rounds=3", "--set", "algorithm.server_scale=0.5", "--out", "cli")
    [folder] = Path("cli").iterdir()
    from_python = askew.run("scaffold", rounds=3, model="softmax", clients=5, server_scale=0.5, out="api")
    assert records(askew.load(folder)) == records(from_python)
    assert from_python.folder is not None and from_python.folder.name == folder.name
    assert from_python.config == askew.load(folder).config  # or tables would invoke a run from itself read back


def test_a_finished_run_is_read_back_and_fresh_runs_it_again(invoke: Any) -> None:
    invoke("run", *SETS)
    log = only_run() / "rounds.jsonl"
    before = log.read_text()
    again = invoke("run", *SETS)
    assert again.code == 0 and "already finished, nothing to do; --fresh runs it again" in again.err
    assert log.read_text() == before
    fresh = invoke("run", *SETS, "--fresh")
    assert "already finished" not in fresh.err and log.read_text() != before
    assert [r["accuracy"] for r in map(json.loads, before.splitlines())] == askew.load(only_run()).curve("accuracy")[1]


def test_ctrl_c_ends_the_round_and_the_same_command_goes_on_to_the_same_numbers(invoke: Any) -> None:
    more = ["--set", "rounds=150", "--set", "evaluation.every=50", "--set", "algorithm.name=scaffold"]
    process = subprocess.Popen(
        [sys.executable, "-m", "askew", "run", *SETS, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not any(log.read_text().count("\n") >= 3 for log in Path("runs").glob("*/rounds.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == "" and "Traceback" not in err
    stopped = askew.load(only_run())
    assert not stopped.finished and len(stopped.rounds) >= 3 and stopped.facts["state"] == "interrupted"
    assert (
        f"stopped after round {len(stopped.rounds)} of 150" in err
        and f"askew run {only_run() / 'run.toml'} --out runs" in err
    )
    assert "interrupted" in invoke("show", only_run()).out
    resumed = invoke("run", only_run() / "run.toml", "--out", "runs")
    assert resumed.code == 0 and f"going on after round {len(stopped.rounds)} of 150" in resumed.err
    whole = askew.run("scaffold", **(TINY | {"rounds": 150}), evaluation={"every": 50})
    assert records(askew.load(only_run())) == records(whole)


def test_a_second_ctrl_c_stops_at_once_and_says_how_to_go_on(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("askew.experiment.launch.run_config", interrupted)
    result = invoke("run", *SETS)
    assert result.code == 130 and "stopped at once" in result.err and "run.toml --out runs" in result.err


@pytest.mark.parametrize(
    ("line", "trains"),
    [
        ("sweep --over seed=0,1", "experiment.launch.run_each"),
        ("demo", "experiment.demo.run_all"),
        ("tune --methods fedavg", "experiment.tune.Tuner.run"),
        ("reproduce feddpc/fig6 --scale smoke", "cli.papers.run_missing"),
        ("reproduce --queue queue.toml --scale smoke", "cli.queue.run_queue"),
    ],
)
def test_a_second_ctrl_c_says_how_to_go_on_also_where_many_runs_are_trained(
    line: str, trains: str, invoke: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    Path("queue.toml").write_text('[[entry]]\nexperiment = "feddpc/fig6"\n')
    monkeypatch.setattr(f"askew.{trains}", interrupted)
    result = invoke(*line.split())
    assert result.code == 130 and f"to go on:\n  askew {line.split()[0]} " in result.err
    assert "stopped at once; rounds since the last checkpoint will be run again" in result.err


def test_a_third_ctrl_c_interrupts_neither_the_last_sentence_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Pressing(Console):
        def print(self, *arguments: Any, **options: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            super().print(*arguments, **options)

    def stopped(*arguments: object, **options: object) -> None:
        exit_with_command(Pressing(stderr=True), "stopped", "askew list models")

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("askew.cli.reading.listing.stored_entries", stopped)
    assert main(["list", "models"]) == 130 and "stopped; to go on:" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before  # the process goes on
    monkeypatch.setattr(sys, "argv", ["askew", "list", "models"])
    try:
        assert main() == 130 and signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # it ends
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_command_to_go_on_repeats_what_was_given(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    def stopped_reproduction(*arguments: Any) -> None:
        exit_with_command(Console(stderr=True), "stopped", arguments[-1])

    def stopped_sweep(configs: list[Config], *arguments: object, **options: object) -> Iterator[askew.Run]:
        yield askew.Run(stored_tables(configs[0]))

    monkeypatch.setattr(files, "chosen_folder", None)  # so that it is reset at the end
    monkeypatch.setattr("askew.experiment.launch.run_config", stopped)
    monkeypatch.setattr("askew.experiment.launch.run_each", stopped_sweep)
    monkeypatch.setattr("askew.cli.papers.run_with_progress", stopped_reproduction)
    data = ("--data-dir", "d")
    assert "run.toml --out runs --data-dir d\n" in invoke("run", *SETS, *data).err
    sweep = ("--over", "seed=0,1", *SETS, "--out", "runs", *data)
    assert f"askew sweep {' '.join(sweep)}\n" in invoke("sweep", *sweep).err
    folders = ("--out", "runs", "--results", "results", *data)
    experiment = ("feddpc/fig6", "--scale", "smoke", "--alone", "--workers", "2", *folders)
    assert f"askew reproduce {' '.join(experiment)}\n" in invoke("reproduce", *experiment).err


def test_a_plugin_brings_a_method_of_ones_own(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(CHOICES["algorithm"].members)
    monkeypatch.setattr(CHOICES["algorithm"], "members", dict(known))
    Path("mine.py").write_text(
        "import askew\nfrom askew.algorithms import FedAvg\n\n"
        '@askew.register("halfway")\nclass Halfway(FedAvg):\n'
        '    """Goes half of the way."""\n\n    server_scale = 0.5\n'
    )
    result = invoke("run", *SETS, "--plugin", "mine.py", "--set", "algorithm.name=halfway", "--json")
    assert result.code == 0 and result.json["algorithm"] == "halfway"
    assert records(askew.load(result.json["run"])) == records(askew.run("fedavg", **TINY, server_scale=0.5))
    Path("elsewhere").mkdir()
    Path("mine.py").rename("elsewhere/mine.py")
    monkeypatch.setattr(CHOICES["algorithm"], "members", dict(known))  # as a new process finds it
    moved = invoke("run", *SETS, "--plugin", "elsewhere/mine.py", "--set", "algorithm.name=halfway")
    assert moved.code == 0 and "already finished" in moved.err


def test_what_a_method_remarks_is_shown(invoke: Any) -> None:
    remark = "the network has no batch-norm layer"
    assert remark in invoke("run", *SETS, "--set", "algorithm.name=fedbn").err
    assert remark in invoke("show", only_run()).out


# list -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_lists_have_all_members_and_their_settings(invoke: Any, kind: str) -> None:
    result, as_json = invoke("list", kind), invoke("list", kind, "--json")
    assert [entry["name"] for entry in as_json.json] == list(KINDS[kind])
    for entry in as_json.json:
        assert entry["idea"] and entry["name"] in result.out
        assert {p["name"]: p["default"] for p in entry["parameters"]} == json.loads(
            json.dumps(KINDS[kind][entry["name"]]().table())
        )
        assert all(p["doc"] and p["allowed"] and p["type"] for p in entry["parameters"])
    assert max(map(len, result.out.splitlines())) <= 80


def test_settings_of_all_models_are_listed_once_below_the_list(invoke: Any) -> None:
    rows, below = invoke("list", "models").out.split("every model has these settings too")
    assert "hidden = 256" in rows and "hidden" not in below
    for name in ("head = 0", 'weights = ""', "new_head = false", "seed = –"):
        assert name not in rows and below.count(f"\n{name} ") == 1


def test_one_method_is_explained(invoke: Any) -> None:
    out = " ".join(invoke("list", "algorithms", "feddyn").out.split())
    for text in ("θ ← θ − η (g(θ) + α_i (θ − w + h_i))", "arXiv 2111.04263", "alpha = 0.01"):
        assert text in out
    assert "example askew run --method feddyn --set algorithm.alpha=0.01" in out
    assert invoke("list", "algorithms", "feddyn", "--json").json["name"] == "feddyn"
    assert "settings of [partition]" in invoke("list", "partitions", "dirichlet").out
    unknown = invoke("list", "algorithms", "fedyn")
    assert unknown.code == 2 and "unknown algorithm 'fedyn'; did you mean 'feddyn'?" in unknown.err
    assert "askew reproduce feddpc/table2 --plan" in invoke("list", "experiments", "feddpc/table2").err


def test_costs_of_methods_are_those_of_their_definitions(invoke: Any) -> None:
    result = {entry["name"]: entry for entry in invoke("list", "algorithms", "--json").json}
    costs = lambda name: [
        round(result[name][key], 1) for key in ("down", "up", "server_state", "client_state", "memory")
    ]
    assert costs("fedavg") == [1, 1, 0, 0, 0]
    assert costs("scaffold") == [2, 2, 1, 1, 0]
    assert costs("feddyn") == [1, 1, 2, 1, 0]
    assert costs("feddc") == [2, 2, 2, 2, 0]
    assert costs("fedcm") == [2, 1, 1, 0, 0]
    assert costs("feddpc") == [1, 1, 1, 0, 0]
    assert 0 < result["fedbn"]["down"] < 1 and result["fedbn"]["down"] == result["fedbn"]["up"]
    assert all(entry["down"] is not None for entry in result.values())
    assert {name for name in ("fedavg", "fedprox", "scaffold", "feddyn", "feddc") if result[name]["exact"]} == {
        "scaffold",
        "feddyn",
        "feddc",
    }
    assert (result["fedavg"]["weighting"], result["feddyn"]["weighting"]) == ("samples", "uniform")


def test_a_method_of_ones_own_is_explained_by_its_settings(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHOICES["algorithm"], "members", dict(CHOICES["algorithm"].members))
    Path("mine.py").write_text(
        "import askew\nfrom askew.algorithms import FedAvg\n\n"
        '@askew.register("slower")\nclass Slower(FedAvg):\n    strength: float = 0.5\n'
    )
    result = invoke("list", "algorithms", "slower", "--plugin", "mine.py")
    words = " ".join(result.out.split())
    assert result.code == 0 and "Slower(" not in words and "settings of [algorithm]" in words
    assert "strength = 0.5 (a number)" in words and "weighting = samples weights of the clients" in words


# show, compare, report ------------------------------------------------------------------------------------------


def test_show_prints_settings_figures_rounds_and_what_the_method_logged(invoke: Any) -> None:
    invoke("run", *SETS, "--set", "algorithm.name=feddpc", "--set", "rounds=7")
    run = askew.load(only_run())
    result = invoke("show", only_run())
    assert result.code == 0 and result.err == ""
    for text in (
        "finished, 7 rounds",
        "digits, 5 clients, Dirichlet α = 0.2",
        "lam=1",
        "softmax zeros=true",
        "lr=0.1",
        "█",
        "ratio",
    ):
        assert text in result.out
    shown = [
        line.split()[0] for line in result.out.splitlines() if line.endswith("s") and "kB" in line and "up," not in line
    ]
    assert shown == ["3", "4", "5", "6", "7"]
    assert max(map(len, result.out.splitlines())) <= 80
    as_json = invoke("show", only_run(), "--json").json
    assert (
        as_json["records"] == run.rounds
        and as_json["config"] == run.config
        and as_json["best_accuracy"] == run.best_accuracy
    )


@pytest.fixture
def three(invoke: Any) -> list[askew.Run]:
    """Two seeds of one method and one of another."""
    for change in ("seed=0", "seed=1", "algorithm.name=scaffold"):
        invoke("run", *SETS, "--set", change)
    return [askew.load(folder) for folder in sorted(Path("runs").iterdir())]


def test_compare_joins_seeds_and_counts_rounds_to_a_target(invoke: Any, three: list[askew.Run]) -> None:
    result = invoke("compare", "runs")
    assert result.code == 0 and result.err == "" and max(map(len, result.out.splitlines())) <= 80
    assert [line.split()[0] for line in result.out.splitlines() if line.startswith(("fedavg ", "scaffold "))] == [
        "fedavg",
        "scaffold",
    ]
    assert invoke("compare", "runs", "--json").json == table(three)
    assert invoke("compare", *(run.folder for run in three), "runs", "--json").json == table(three)
    aimed = invoke("compare", "runs", "--target", "0.01", "--json").json
    assert [row["target"] for row in aimed] == [0.01, 0.01] and [row["rounds_to_target"] for row in aimed] == [1, 1]
    assert "Target: accuracy 1.0%." in invoke("compare", "runs", "--target", "0.01").out


def test_a_regression_is_shown_by_its_test_loss(invoke: Any) -> None:
    rows = [f"{site},{k % 17},{0.1 * (k % 17) + 0.05 * (k % 3):.3f}" for k in range(90) for site in "ab"]
    Path("rows.csv").write_text("\n".join(["site,size,price", *rows]))
    words = {"data.name": "csv", "data.file": "rows.csv", "data.client": "site", "data.label": "price", "rounds": 2}
    sets = [word for key, value in words.items() for word in ("--set", f"{key}={value}")]
    result = invoke("run", *sets)
    run = askew.load(only_run())
    last = f"{run.rounds[-1]['loss']:.3g}"
    assert f"round 2/2 · test loss {last} · training loss {run.rounds[-1]['train_loss']:.3g}\n" in result.err
    shown = invoke("show", only_run())
    for text in (result.out, shown.out):
        assert "accuracy" not in text and f"last test loss    {last} " in text and "lowest test loss" in text
    assert "test loss by round" in shown.out and "█" in shown.out
    swept = invoke("sweep", *sets, "--over", "seed=0,1", "--over", "algorithm.name=fedavg,scaffold")
    assert f"fedavg, seed 1: last test loss {float(row_of('fedavg', seed=1).rounds[-1]['loss']):.3g}\n" in swept.err
    compared = invoke("compare", "runs")
    losses = [row_of("fedavg", seed).rounds[-1]["loss"] for seed in (0, 1)]
    assert f" {sum(losses) / 2:.4g} ± " in compared.out and compared.out == swept.out
    assert "last test" in compared.out and "acc" not in compared.out
    refused = invoke("compare", "runs", "--target", "0.5")
    assert refused.code == 2 and "none of these runs has one; leave it out." in refused.err


def row_of(algorithm: str, seed: int) -> askew.Run:
    runs = map(askew.load, Path("runs").iterdir())
    return next(run for run in runs if (run.algorithm, run.config["seed"]) == (algorithm, seed))


def test_tables_that_most_runs_do_not_have_are_shown_where_they_are_used(invoke: Any) -> None:
    changes = ["time.wait=deadline", "time.deadline=50", "attack.name=sign_flip", "attack.fraction=0.4"]
    more = [*changes, "robust.rule=median", "participation.name=full"]
    invoke("run", *SETS, *(word for change in more for word in ("--set", change)))
    out = invoke("show", only_run()).out
    assert "attack      sign_flip fraction=0.4" in out and "time        wait=deadline deadline=50" in out
    assert "robust      rule=median" in out and "faults" not in out and "latency" not in out


def test_narrow_terminals_break_labels_between_words_and_cut_no_number() -> None:
    label = "fedavg participation.fraction=0.25 local.weight_decay=0.0001"
    for width, columns in ((120, 9), (80, 7), (60, 5), (30, 4)):
        console = Console(file=StringIO(), width=width)
        console.print(wide_table(label), crop=False)
        assert isinstance(console.file, StringIO)
        lines = console.file.getvalue().splitlines()
        assert max(map(len, lines)) <= max(width, 47) and "…" not in console.file.getvalue()
        first = next(line for line in lines if line.startswith("fedavg"))
        assert first.split("12.34 ± 0.12")[1].split() == ["567.8"] * (columns - 2)
        words = " ".join(line[: first.index("12.34")].strip() for line in lines[-8:] if not line.startswith("method"))
        for piece in ("participation.", "fraction=0.25", "local.", "weight_decay=0.0001"):
            assert piece in words


def wide_table(label: str) -> FirstThatFits:
    """Tables of a method and eight, seven … three columns of numbers."""
    choices = []
    for count in range(8, 2, -1):
        table = plain_table("method", *(f"column\n{n}" for n in range(count)))
        table.columns[0].justify = "left"
        table.add_row(label, "12.34 ± 0.12", *["567.8"] * (count - 1))
        choices.append(table)
    return FirstThatFits(choices)


def test_compare_highlights_the_best_of_a_task() -> None:
    runs = [fake("fedavg", [0.1, 0.5]), fake("feddyn", [0.2, 0.7]), fake("fedavg", [0.1, 0.9], clients=9)]
    console = Console(file=StringIO(), force_terminal=True, color_system="standard", width=100)
    console.print(terminal.comparison(runs))
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    green = {text: any("\x1b[1;32m" in line and text in line for line in lines) for text in ("50.0", "70.0", "90.0")}
    assert green == {"50.0": False, "70.0": True, "90.0": False}  # the third has a task of its own


def fake(algorithm: str, accuracy: list[float], clients: int = 5) -> askew.Run:
    tables = askew.Config.build(
        {"rounds": 2, "algorithm": {"name": algorithm}, "partition": {"clients": clients}}
    ).tables()
    other = {
        "bytes_up": 1,
        "bytes_down": 1,
        "seconds": 0.1,
        "dropped": 0,
        "participants": [0],
        "train_loss": 1.0,
        "loss": 1.0,
    }
    return askew.Run(tables, [{"round": t, "accuracy": a, **other} for t, a in enumerate(accuracy, 1)])


def test_report_writes_a_page_and_prints_its_path(invoke: Any, three: list[askew.Run]) -> None:
    result = invoke("report", "runs", "--out", "pages", "--title", "Three <runs>")
    assert (result.code, result.out, result.err) == (0, "pages/index.html\n", "")
    assert "Three &lt;runs&gt;" in Path("pages/index.html").read_text()


# demo -----------------------------------------------------------------------------------------------------------


def test_the_demo_compares_seven_methods_and_the_second_time_trains_nothing(invoke: Any) -> None:
    first = invoke("demo", "--rounds", "1", "--seeds", "1", "--out", "shown")
    assert first.code == 0 and "7/7 runs" in first.err
    rows = [line.split("  ")[0] for line in first.out.splitlines() if line.startswith(("fed", "scaffold"))]
    assert rows == [
        "fedavg server_scale=1",
        "fedavg server_scale=2",
        "fedprox",
        "scaffold",
        "feddyn",
        "feddc",
        "feddpc",
    ]
    assert re.findall(r"runs: (.*), seed 0: best accuracy", first.err) == rows
    assert "shown/report/index.html" in first.out and Path("shown/report/index.html").exists()
    logs = {log: log.stat().st_mtime_ns for log in Path("shown/runs").glob("*/rounds.jsonl")}
    assert len(logs) == 7
    second = invoke("demo", "--rounds", "1", "--seeds", "1", "--out", "shown")
    assert second.code == 0 and "all 7 runs were finished already and are read back" in second.err
    assert second.out == first.out and {log: log.stat().st_mtime_ns for log in logs} == logs


def test_the_demo_differs_in_method_and_seed_alone() -> None:
    configs = demo.configs(DEMO_ROUNDS, DEMO_SEEDS)
    assert len(configs) == DEMO_SEEDS * len(demo.METHODS) == len({config.name() for config in configs})
    same = ("rounds", "data", "partition", "participation", "model", "local", "engine", "evaluation")
    assert len({json.dumps([config.tables()[name] for name in same]) for config in configs}) == 1
    default = askew.Config.build({}).tables()
    assert all(configs[0].tables()[name] == default[name] for name in ("data", "partition", "participation", "model"))


def test_an_interrupted_demo_says_how_to_go_on(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: object, **options: object) -> list[askew.Run]:
        return [fake("fedavg", [0.1])]

    monkeypatch.setattr("askew.experiment.demo.run_all", stopped)
    result = invoke("demo", "--seeds", "1", "--out", "shown")
    assert (
        result.code == 130
        and "stopped in run 1 of 7" in result.err
        and "askew demo --out shown --rounds 30 --seeds 1" in result.err
    )


# the terminal ---------------------------------------------------------------------------------------------------


def test_without_a_terminal_a_long_run_says_at_most_twenty_lines(invoke: Any) -> None:
    result = invoke("run", *SETS, "--set", "rounds=45", "--set", "evaluation.every=45")
    lines = [line for line in result.err.splitlines() if line.startswith("round ")]
    assert 10 <= len(lines) <= 20 and re.fullmatch(r"round 45/45 · accuracy [\d.]+% · training loss [\d.]+", lines[-1])


def test_on_a_terminal_bars_show_the_round_and_the_accuracy() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80, force_interactive=True, color_system=None)
    with ProgressDisplay(console) as ticker:
        ticker.bars.auto_refresh = False
        askew.run("fedavg", **TINY, watch=ticker)
        ticker.bars.refresh()
    assert isinstance(console.file, StringIO)
    assert "round 2/2 · accuracy" in console.file.getvalue()


def test_on_a_terminal_the_bar_names_a_run_as_the_table_does() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80, force_interactive=True, color_system=None)
    configs = [
        askew.Config.build(TINY | {"algorithm": {"name": "fedavg", "server_scale": scale}}) for scale in (1.0, 2.0)
    ]
    with ProgressDisplay(console, configs) as ticker:
        ticker.bars.auto_refresh = False
        askew.run(configs[1], watch=ticker)
        ticker.bars.refresh()
    assert isinstance(console.file, StringIO)
    assert "fedavg server_scale=2, seed 0" in console.file.getvalue()


def test_curves_in_blocks() -> None:
    assert terminal.spark([0.0, 0.5, 1.0], 20) == "▁▅█"
    assert terminal.spark([3.0, 3.0], 20) == "▁▁"
    assert len(terminal.spark([float(v) for v in range(1000)], 20)) == 20
    lines = terminal.chart([1, 2], [0.25, 0.75]).plain.splitlines()
    assert (
        lines[0].startswith("  75.0% │")
        and lines[-2].startswith("  25.0% │")
        and lines[-1].split() == ["round", "1", "2"]
    )
    assert lines[0].count("█") == 30 and lines[-2].count("█") == 30 and lines[-2].count("▁") == 30


def test_help_is_what_askew_alone_shows_and_each_verb_has_examples(invoke: Any) -> None:
    alone = invoke()
    assert alone.code == 0 and alone.out == invoke("--help").out
    for verb in ("run", "list", "show", "compare", "report", "demo", "deploy"):
        result = invoke(verb, "--help")
        assert (
            result.code == 0
            and f"Usage: askew {verb}" in result.out
            and f"\n $ askew {verb}" in result.out.split("Examples:")[1]
        )
        assert verb in alone.out


def test_the_version(invoke: Any) -> None:
    assert invoke("--version").out == f"askew {askew.__version__}\n"


@pytest.mark.slow
def test_version_as_a_module() -> None:
    result = subprocess.run([sys.executable, "-m", "askew", "--version"], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == (f"askew {askew.__version__}\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--json"], []], ids=["json", "table"])
def test_a_closed_pipe_is_no_error(more: list[str]) -> None:
    source, sink = os.pipe()
    os.close(source)
    with os.fdopen(sink, "w") as closed:
        result = subprocess.run(
            [sys.executable, "-m", "askew", "list", "models", *more], stdout=closed, stderr=subprocess.PIPE, text=True
        )
    assert result.stderr == ""


def test_a_reader_that_has_enough_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `askew list algorithms --json | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        monkeypatch.setattr(sys, "stderr", sys.stderr)  # click wraps both
        assert main(["list", "participations", "--json"]) == 0
