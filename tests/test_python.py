"""From Python: sweeps, comparisons and reports, runs that show themselves, own networks over seeds, edited methods."""

from __future__ import annotations

import io
import json
import sys
import types
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import askew
from askew.algorithms import FedAvg
from askew.cli.main import main
from askew.errors import AlgorithmError, ConfigError, Remark, StoreError
from askew.experiment import progress
from askew.experiment.api import NetworkMaker
from askew.experiment.config import CHOICES, Config
from askew.experiment.run_folder import without_surroundings
from askew.report.runs import ComparisonTable
from askew.report.tables import group_runs

TINY: dict[str, Any] = {"model": "softmax", "clients": 4, "cohort": 2, "rounds": 2, "progress": False}
ENGINES = ("sequential", "vmapped", "stacked", "slots")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> askew.Runs:
    out = tmp_path_factory.mktemp("runs")
    return askew.sweep(over={"method": ["fedavg", "scaffold"]}, seeds=2, out=out, **TINY)


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in CHOICES.values():
        monkeypatch.setattr(registry, "members", dict(registry.members))


# sweep, compare, report -----------------------------------------------------------------------------------------------


def test_a_sweep_is_that_of_the_command(runs: askew.Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    over = ("algorithm.name=fedavg,scaffold", "seed=0,1")
    sets = ("model.name=softmax", "partition.clients=4", "participation.cohort=2", "rounds=2")
    words = [word for flag, values in (("--over", over), ("--set", sets)) for value in values for word in (flag, value)]
    assert main(["sweep", *words, "--out", str(tmp_path), "--json"]) == 0
    summaries = json.loads(capsys.readouterr().out)
    assert [(s["name"], s["best_accuracy"]) for s in summaries] == [(run.name, run.best_accuracy) for run in runs]
    assert main(["compare", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    ours = askew.compare(tmp_path)
    assert rows == json.loads(json.dumps(ours)) and [row["seeds"] for row in ours] == [2, 2]
    assert main(["compare", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert all(row["label"] in shown and row["label"] in repr(ours) for row in ours)


def test_a_comparison_takes_runs_folders_and_lists(
    runs: askew.Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("askew.report.page.draw_pictures", lambda groups: [])  # which takes seconds
    folder = runs[0].folder
    assert folder is not None
    labels = [row["label"] for row in runs.table()]
    assert [row["label"] for row in askew.compare(folder.parent)] == labels
    assert [row["label"] for row in askew.compare(runs[0], [str(folder), *runs[1:]])] == labels  # each once
    page = askew.report(runs, out=tmp_path, title="A <title>")
    assert page == tmp_path / "index.html" and "A &lt;title&gt;" in page.read_text(encoding="utf-8")
    import askew.report.tables as tables  # the package of that name is still one

    assert tables.table(runs) == runs.table()


def test_a_sweep_takes_networks_methods_and_files(tmp_path: Path) -> None:
    x, y = torch.randn(40, 3), torch.arange(40) % 2
    wide = lambda: nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2))
    common: dict[str, Any] = {"data": (x, y), "partition": "iid", "clients": 2, "rounds": 1, "progress": False}
    swept = askew.sweep(over={"model": [lambda: nn.Linear(3, 2), wide], "method": [FedAvg(), "fedprox"]}, **common)
    assert [(run.config["model"]["kind"], run.algorithm) for run in swept] == [
        *(("Linear", "fedavg"), ("Linear", "fedprox"), ("Sequential", "fedavg"), ("Sequential", "fedprox")),
    ]
    file = tmp_path / "grid.toml"
    file.write_text('rounds = 1\n[partition]\nclients = 2\n[sweep]\n"local.lr" = [0.1, 0.2]\n')
    assert [run.config["local"]["lr"] for run in askew.sweep(file, progress=False)] == [0.1, 0.2]
    config = Config.build({"rounds": 1, "model": {"name": "softmax"}, "partition": {"clients": 2}})
    swept = askew.sweep(config, over={"lr": (0.1, 0.2)}, progress=False)
    assert [run.config["local"]["lr"] for run in swept] == [0.1, 0.2]


def test_a_run_that_fails_does_not_end_a_sweep() -> None:
    class Bad(FedAvg):
        def finish(self, theta: Tensor, client: askew.Client) -> Any:
            raise KeyError("c")

    with pytest.warns(Remark, match=r"bad-digits-seed0-.* failed: Bad: finish\(\) failed in line .* KeyError"):
        swept = askew.sweep(over={"method": [Bad(), FedAvg()]}, **TINY)
    assert [run.algorithm for run in swept] == ["fedavg"] and isinstance(swept.failed[0].error, AlgorithmError)
    with pytest.raises(AlgorithmError, match="Bad: finish"):
        askew.sweep(Bad(), over={"lr": [0.1, 0.2]}, **TINY)


# runs that show themselves --------------------------------------------------------------------------------------------


class Checked(HTMLParser):
    """Refuses tags that load something or run, and collects the text."""

    text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("pre", "span"), tag
        assert not {name for name, _ in attrs} - {"style"}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_texts_are_short_and_html_is_escaped(runs: askew.Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs[0].algorithm == "fedavg" and repr(runs[0]).startswith("fedavg on digits, 4 clients")
    assert len(repr(runs[0]).splitlines()) <= 6 and len(repr(runs).splitlines()) <= 6
    assert "4 runs of 2 configurations" in repr(runs) and "  scaffold: best accuracy" in repr(runs)
    evil = askew.Run(runs[0].config | {"algorithm": {"name": "<script>\x1b[2J"}}, runs[0].rounds)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)  # where `rich` would print beside the result
    monkeypatch.setattr("rich.jupyter.display", lambda *_: pytest.fail("shown twice"))
    for shown in (evil._repr_html_(), askew.Runs([evil])._repr_html_(), runs.table()._repr_html_()):
        page = Checked()
        page.feed(shown)
        assert "<script" not in shown and "\x1b" not in shown and len(page.text) > 100
        assert "background:inherit" in shown and "color:inherit" in shown  # light and dark as the page around it
    assert "\x1b" not in repr(evil) and repr(askew.Run({})) == "Run({})"
    assert isinstance(runs[:2], askew.Runs) and runs[-1] is list(runs)[-1]


def test_frames_are_those_of_pandas(runs: askew.Runs) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas: pip install -e '.[dev]'")
    for frame in (runs.frame(), runs[0].frame(), runs.table().frame()):
        assert isinstance(frame, pandas.DataFrame)
    assert runs[0].frame()["accuracy"].tolist() == runs[0].curve("accuracy")[1]
    assert set(runs.frame()["clients"]) == {2}


def test_figures_and_frames(runs: askew.Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = runs.plot()
    assert figure._repr_png_().startswith(b"\x89PNG")  # by which a notebook shows it
    (axes,) = figure.axes
    assert len(axes.get_lines()) >= 2 and axes.get_ylabel() == "Test accuracy, %"
    (axes,) = runs[0].plot("train_loss").axes
    assert list(axes.get_lines()[0].get_ydata()) == runs[0].curve("train_loss")[1]
    with pytest.raises(ConfigError, match=r"no number is recorded as 'acuracy' .* recorded are accuracy, "):
        runs.plot("acuracy")
    frame = types.ModuleType("pandas")
    frame.DataFrame = lambda rows: rows  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", frame)
    rows = runs.frame()
    assert len(rows) == 8 and rows[0]["label"] == "fedavg" and rows[0]["clients"] == 2
    assert [row["accuracy"] for row in runs[0].frame()] == runs[0].curve("accuracy")[1]
    assert runs.table().frame() == list(runs.table())
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(StoreError, match=r"frame.. makes a frame of pandas, which is not installed; pip install"):
        runs.frame()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(StoreError, match=r"plot.. draws with matplotlib, which is not installed"):
        runs.plot()


def test_progress_is_a_renewed_line_or_a_line_every_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"rounds": 100, "seed": 3, "algorithm": {"name": "fedavg"}}

    def train(stream: io.StringIO, seconds: float) -> str:
        times = iter([0.0, *(seconds * k for k in range(200))])
        run, shown = askew.Run(config, facts={"name": "r"}), progress.ScriptProgress(2, stream, lambda: next(times))
        shown(run, None)
        for k in range(1, 101):
            run.rounds.append({"round": k, "accuracy": k / 200, "train_loss": 0.5})
            shown(run, run.rounds[-1])
        shown.close()
        return stream.getvalue()

    assert train(io.StringIO(), 0.1) == ""  # ten seconds
    lines = train(io.StringIO(), 1.0).splitlines()
    assert len(lines) == 3 and lines[0].endswith("70 s left")
    assert lines[0].startswith("run 1 of 2, fedavg, seed 3: round 30 of 100, accuracy 15.0%, training loss 0.5, ")
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    text = train(terminal, 0.1)
    assert text.count("\n") == 1 and text.count("\r") > 30 and "round 100 of 100" in text.split("\r")[-1]
    shell = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", shell)  # type: ignore[arg-type]
    assert "\r" in train(io.StringIO(), 0.1)


def test_progress_can_be_switched_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    seen: list[int] = []
    askew.run(**TINY, watch=lambda run, record: seen.append(len(run.rounds)))
    assert capsys.readouterr().err == "" and seen == [0, 1, 2]
    askew.run(**{**TINY, "progress": True}, watch=lambda run, record: seen.append(len(run.rounds)))
    assert "fedavg, seed 0: round 2 of 2, accuracy" in capsys.readouterr().err and seen[3:] == [0, 1, 2]


# networks over seeds --------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(64, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x.flatten(1)).relu())


def test_the_seed_decides_the_weights_of_a_network_that_is_made() -> None:
    common = {**TINY, "lr": 1e-6}  # so that the last weights are the first
    makers = (Small, lambda: Small(5))
    runs = [askew.run(**{**common, "model": make, "seed": seed}) for seed in (0, 1) for make in makers]
    first = [run.model["out.weight"] for run in runs]
    assert torch.equal(first[0], first[1]) and torch.equal(first[2], first[3])  # a class or a function
    assert (first[0] - first[2]).abs().max() > 0.1
    torch.manual_seed(5)
    again = askew.run(**{**common, "model": Small})
    assert torch.equal(again.model["out.weight"], first[0]) and torch.initial_seed() == 5
    (row,) = askew.compare(runs)
    assert row["seeds"] == 2 and row["label"] == "fedavg"
    other = askew.run(**{**common, "model": lambda: Small(6)})
    assert len(askew.compare(runs, other)) == 2


def test_one_instance_over_seeds_is_remarked_once_and_instances_share_a_row(recwarn: Any) -> None:
    torch.manual_seed(0)
    network, own = Small(), {**TINY, "rounds": 1}
    runs = [askew.run(**{**own, "model": network, "seed": 0}) for _ in range(2)]
    assert not recwarn.list
    with pytest.warns(Remark, match="every seed starts from the weights of this one Small; .* model=Small"):
        runs.append(askew.run(**{**own, "model": network, "seed": 1}))
    runs.append(askew.run(**{**own, "model": network, "seed": 2}))
    assert len(askew.compare(runs)) == 1
    each = [askew.run(**{**own, "model": Small(), "seed": seed}) for seed in (0, 1)]
    (row,) = askew.compare(each)
    assert row["seeds"] == 2
    two_starts = askew.compare(each, askew.run(**{**own, "model": Small(), "seed": 0}))
    assert len(two_starts) > 1  # one seed with two starts: these are compared
    pair = group_runs([each[0], askew.run("fedprox", **{**own, "model": Small(), "seed": 0})])
    assert pair[0].task == pair[1].task  # methods may be compared, wherever they start
    old = {key: value for key, value in runs[0].config["model"].items() if key != "structure"}
    assert without_surroundings({"model": old}) == without_surroundings({"model": runs[0].config["model"]})


class Tied(nn.Module):
    """Tied and frozen weights, statistics, a whole number, and a buffer that the state dictionary leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.BatchNorm1d(64)
        self.b.weight = self.a.weight
        self.frozen, self.out = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 10)
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.frozen(self.norm(self.b(self.a(x.flatten(1)).relu()))) * self.scale)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_trained_model_loads_into_its_network(dtype: str, tmp_path: Path) -> None:
    network = Tied()
    frozen, before = network.frozen.weight.clone(), network.a.weight.clone()
    own = {**TINY, "model": network, "engine": {"dtype": dtype}}
    run = askew.run(out=tmp_path, **own)
    assert run.model.keys() | {"norm.num_batches_tracked"} == network.state_dict().keys()
    network.load_state_dict(run.model)
    assert torch.equal(network.frozen.weight, frozen) and int(network.steps) == 7  # type: ignore[arg-type]
    assert network.b.weight is network.a.weight and not torch.equal(network.a.weight, before)
    (file,) = tmp_path.glob("*/model.safetensors")
    Tied().load_state_dict(load_file(file))


# methods --------------------------------------------------------------------------------------------------------------

CELL = """
import askew
from askew.algorithms import FedAvg

scale = {scale}

def step(p, delta):
    return scale * (p @ delta)

@askew.register("cell")
class {name}(FedAvg):
    def aggregate(self, w, up, cohort, server):
        return w + step(cohort.p, up["delta"]), server
"""


def run_cell(module: types.ModuleType, scale: float, name: str = "Cell") -> None:
    """Run a cell of a notebook: its code is in no file."""
    exec(compile(CELL.format(scale=scale, name=name), "<cell>", "exec"), module.__dict__)


def test_an_edited_cell_replaces_its_method(registries: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    run_cell(notebook, 1.0)
    first = askew.run("cell", out=tmp_path, **TINY)
    with pytest.warns(Remark, match="the algorithm 'cell' was registered again; runs from now on use the new class"):
        run_cell(notebook, 0.5)
    second = askew.run("cell", out=tmp_path, **TINY)
    half = askew.run("fedavg", server_scale=0.5, **TINY)
    assert second.curve("loss") == half.curve("loss") != first.curve("loss")
    assert first.folder != second.folder  # a run of the old class is not taken for one of the new
    notebook.__dict__["scale"] = 1.0  # which the class uses by a function beside it
    assert askew.run("cell", out=tmp_path, **TINY).curve("loss") == first.curve("loss")
    with pytest.warns(Remark):
        run_cell(notebook, 1.0, "Renamed")
    other = types.ModuleType("somewhere_else")
    monkeypatch.setitem(sys.modules, other.__name__, other)
    with pytest.raises(ConfigError, match="'cell' exists already"):  # another file's
        run_cell(other, 1.0)


NETWORK = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return {scale} * self.layer(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(x)
"""


def test_an_edited_layer_is_another_network(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    marks = []
    for scale in (1, 2, 1):
        exec(compile(NETWORK.format(scale=scale), "<cell>", "exec"), notebook.__dict__)
        marks.append(NetworkMaker.of(notebook.__dict__["Net"]).fingerprint)
    assert marks[0] == marks[2] != marks[1]


class Disco(FedAvg):
    """FedDisco: p_i ∝ max(0, n_i/n − a d_i + b), d_i the distance of the labels' shares from even ones."""

    needs = ("labels",)
    combines = "reports"

    def finish(self, theta: Tensor, client: askew.Client) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        share = client.carry["labels"] / client.carry["labels"].sum()
        return {"delta": theta - client.w, "d": askew.norm(share - 1 / len(share))}, client.state

    def weights(self, up: dict[str, Tensor], cohort: askew.Cohort) -> Tensor:
        p = (cohort.p - 0.5 * up["d"] + 0.1).clamp(min=0)
        return p / p.sum()


def test_label_counts_reach_the_hooks() -> None:
    """FedDisco's step by hand: the mean of the clients' models by its weights; the same in all engines."""
    counts = np.array([[4, 4, 0], [2, 2, 4], [1, 1, 2]])
    y = np.concatenate([np.repeat(np.arange(3), row) for row in counts])
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    samples = askew.Samples(x, torch.from_numpy(y))
    data = askew.Dataset(samples, samples, classes=3, owner=np.repeat(np.arange(3), counts.sum(1)))
    network = nn.Linear(3, 3, dtype=torch.float64)
    nn.init.zeros_(network.weight)
    nn.init.zeros_(network.bias)
    common: dict[str, Any] = {"data": data, "model": network, "partition": "natural", "clients": 3, "cohort": 3}
    common |= {"rounds": 1, "lr": 0.1, "local": {"steps": 1, "batch": 0}, "progress": False}
    shares, size = counts / counts.sum(1, keepdims=True), counts.sum(1) / counts.sum()
    p = np.maximum(0, size - 0.5 * np.linalg.norm(shares - 1 / 3, axis=1) + 0.1)
    step = np.zeros((3, 3))
    for weight, own in zip(p / p.sum(), np.split(np.arange(20), np.cumsum(counts.sum(1))[:-1]), strict=True):
        gradient = (np.full((len(own), 3), 1 / 3) - np.eye(3)[y[own]]).T @ x.numpy()[own] / len(own)
        step -= 0.1 * weight * gradient
    for engine in ENGINES:
        run = askew.run(Disco(), engine={"name": engine, "dtype": "float64"}, **common)
        assert np.abs(run.model["weight"].numpy() - step).max() < 1e-12, engine
        assert run.bytes_up == 3 * 8 * (12 + 1)  # the distance is counted, the labels stay


def test_targets_may_be_flat() -> None:
    """Targets [n] are those of outputs [n, 1], and not compared with the outputs of all other samples."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    common: dict[str, Any] = {
        "model": nn.Linear(3, 1),
        "partition": "iid",
        "clients": 2,
        "rounds": 2,
        "progress": False,
    }
    flat, column = (askew.run(data=(x, y), **common) for y in (x[:, 0], x[:, :1]))
    assert flat.curve("loss") == column.curve("loss") and flat.curve("train_loss") == column.curve("train_loss")


def test_a_table_is_a_list_of_rows(runs: askew.Runs) -> None:
    table = runs.table(target=0.5)
    assert isinstance(table, ComparisonTable) and isinstance(table, list) and table[0]["target"] == 0.5
    with pytest.raises(ConfigError, match="must be > 0 and ≤ 1, got 50"):
        runs.table(target=50)
