"""What hooks return is checked: one sentence names the method, its file, the hook and what was expected."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import askew
from askew.algorithms import FedAvg, Scaffold
from askew.cli.main import main
from askew.core.algorithm import Algorithm
from askew.core.space import Space
from askew.core.types import Client, Cohort, State
from askew.data.federation import LocalSettings
from askew.errors import AlgorithmError
from askew.experiment.config import CHOICES
from askew.experiment.launch import FailedRun, run_each
from askew.experiment.sweep import grid
from problems import classification, make_server, skewed_samples

LOCAL = LocalSettings(steps=1, batch=4, lr=0.1, momentum=0.5)
P = 4 * 4 + 4 + 4 * 3 + 3  # of the network of `classification`

OTHERS = ("vmapped", "stacked", "slots")  # engines

# The hook, what it returns instead of what it should, and how the sentence goes on.
WRONG: list[tuple[str, Any, str]] = [
    ("begin", lambda self, client: client.w[1:], f"the point where training starts, .*{P}.*, and returned .*{P - 1}"),
    ("begin", lambda self, client: None, "the point where training starts, .*, and returned None"),
    ("carry", lambda self, client: [client.w], "a dictionary of tensors by name, and returned a value of type list"),
    ("loss", lambda self, task, theta, batch, client: theta, r"one number, .*\[\], and returned a tensor"),
    ("direction", lambda self, theta, grad, client: grad(theta)[:1], rf"the direction.*\[{P}\].*returned .*\[1\]"),
    ("direction", lambda self, theta, grad, client: grad(theta).float(), "float64, and returned .*float32"),
    ("descend", lambda self, theta, d, v, client: theta - d, "theta and momentum"),
    ("descend", lambda self, theta, d, v, client: (theta - d, v[:2]), r"theta and momentum.*returned .*\[2\]"),
    ("note", lambda self, theta, g, d, client: {"momentum": g[:2]}, r"entries as carry\(\) started them.*\[2\]"),
    ("note", lambda self, theta, g, d, client: None, "a dictionary of tensors by name, and returned None"),
    ("finish", lambda self, theta, client: {"delta": theta}, "the upload and the client's state"),
    ("finish", lambda self, theta, client: ({"delta": theta[:3]}, {}), r"'delta' .*, and returned .*\[3\]"),
    ("finish", lambda self, theta, client: ({"delta": theta}, {"c": theta}), "client state"),
    ("weights", lambda self, up, cohort: cohort.p[:1], r"a weight for each client, .*\[2\].*, and returned .*\[1\]"),
    ("weights", lambda self, up, cohort: 1.0, "a weight for each client, .*, and returned a value of type float"),
    ("aggregate", lambda self, w, up, cohort, server: w, "the new model and a dictionary"),
    ("aggregate", lambda self, w, up, cohort, server: (w[1:], server), "the model with its declared names, shapes"),
    ("aggregate", lambda self, w, up, cohort, server: (w, {"c": w}), "server state with its declared names, shapes"),
    ("server_state", lambda self, space: [space.zeros()], "a dictionary of tensors by name"),
    ("client_state", lambda self, space: {"c": 0.0}, "a dictionary of tensors by name, .*'c': a value of type float"),
    ("memory", lambda self, space: None, "a dictionary of tensors by name, and returned None"),
]


def method_with(hook: str, function: Any, base: type[Algorithm] = FedAvg) -> Algorithm:
    """A method of which one hook is replaced."""
    return type("Own", (base,), {hook: function, "__module__": __name__})()


@pytest.mark.parametrize("engine", ["kernels", *(pytest.param(e, marks=pytest.mark.slow) for e in OTHERS)])
@pytest.mark.parametrize(("hook", "function", "says"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_a_hook_that_returns_something_else_is_named(hook: str, function: Any, says: str, engine: str) -> None:
    problem = classification(skewed_samples([6, 5]))
    with pytest.raises(AlgorithmError, match=rf"^Own: {hook}\(\) must return .*{says}.*[Cc]orrect the hook in '"):
        make_server(method_with(hook, function), problem, LOCAL, engine).run_round(1, [0, 1])


def test_models_to_evaluate_are_checked() -> None:
    for wrong in (lambda self, w, server: {"global": w[:2]}, lambda self, w, server: {}):
        with pytest.raises(AlgorithmError, match=r"Own: models\(\) must return one model or more by name"):
            askew.run(method_with("models", wrong), model="softmax", rounds=1, clients=4)


def test_no_method_of_ours_is_refused_where_a_hook_is_inherited() -> None:
    """A subclass that replaces nothing goes on as before, kernels and all."""
    server = make_server(type("Own", (Scaffold,), {})(), classification(skewed_samples([6, 5])), LOCAL, "kernels")
    server.run_round(1, [0, 1])
    assert server.engine.kernels.used  # type: ignore[attr-defined]


# plugins --------------------------------------------------------------------------------------------------------------

PLUGIN = """
import askew
from askew.algorithms import FedAvg

@askew.register("bad")
class Bad(FedAvg):
    def direction(self, theta, grad, client):
        return grad(theta)[:5]

@askew.register("odd")
class Odd(FedAvg):
    def aggregate(self, w, up, cohort, server):
        up["delta"] = up["delta"][:, 1:]
        return super().aggregate(w, up, cohort, server)

@askew.register("hidden")
class Hidden(FedAvg):
    def private(self, space):
        return askew.Part(3, 4)
"""
SETS = [
    *("--set", "rounds=1", "--set", "partition.clients=4", "--set", "model.name=softmax"),
    *("--set", "engine.device=cpu", "--plugin", "own.py"),
]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in CHOICES.values():
        monkeypatch.setattr(registry, "members", dict(registry.members))
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(PLUGIN)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("bad", r"Bad: direction() must return the direction of a step, a tensor of shape [650]"),
        ("odd", "own.py' failed in line"),
    ],
)
def test_the_sentence_names_the_plugin(
    plugin: None, method: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *SETS, "--set", f"algorithm.name={method}", "--quiet"]) == 2
    err = capsys.readouterr().err
    assert says in err and "own.py'" in err and "defect of askew" not in err and err.count("\n") == 1


def test_what_no_check_foresees_is_said_to_come_from_the_plugins_hooks(
    plugin: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *SETS, "--set", "algorithm.name=hidden", "--quiet"]) == 2
    err = capsys.readouterr().err
    assert "Hidden: askew failed on what its hooks returned (IndexError: " in err and "own.py'" in err


def test_a_bad_plugin_does_not_end_a_sweep(plugin: None, capsys: pytest.CaptureFixture[str]) -> None:
    methods = "algorithm.name=fedavg,bad,fedprox"
    assert main(["sweep", *SETS, "--over", methods, "--json"]) == 2
    out, err = capsys.readouterr()
    assert [run["algorithm"] for run in json.loads(out)] == ["fedavg", "fedprox"]
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: bad-digits-seed0-") and "Bad: direction() must return" in last
    finished = sorted(f.name.split("-")[0] for f in Path("runs").iterdir() if (f / "model.safetensors").exists())
    assert finished == ["fedavg", "fedprox"]
    assert main(["sweep", *SETS, "--over", "algorithm.name=bad,bad", "--json"]) == 2  # nothing but failures
    assert "Traceback" not in capsys.readouterr().err


def test_runs_that_were_trained_together_go_on_without_the_one_that_failed(
    plugin: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a GPU, where one run's failure ends the batch."""
    tables: dict[str, Any] = {"rounds": 1, "partition": {"clients": 4}, "model": {"name": "softmax"}}
    tables |= {"plugins": ["own.py"], "engine": {"name": "stacked", "device": "cpu"}}
    configs = grid(tables, {"algorithm.name": ["fedavg", "bad", "fedprox", "fedavgm"]})
    monkeypatch.setattr("askew.experiment.launch.next_batch", lambda waiting: list(waiting[:3]))
    ended = list(run_each(configs, tmp_path / "runs"))
    names = [end.config.algorithm.display_name() if isinstance(end, FailedRun) else end.algorithm for end in ended]
    assert names == ["fedavg", "Bad", "fedprox", "fedavgm"]
    assert isinstance(ended[1], FailedRun) and isinstance(ended[1].error, AlgorithmError)
    full = OSError(28, "No space left on device")
    monkeypatch.setattr("askew.experiment.launch.run_batch", lambda *args: (_ for _ in ()).throw(full))
    with pytest.raises(OSError, match="No space left"):
        list(run_each(configs, os.fspath(tmp_path / "more")))


class Personal(Algorithm):
    """A phase: every client trains a model of its own, which stays near the new global one."""

    lam: float = askew.setting("pull", default=0.1, least=0)

    def begin(self, client: Client) -> Tensor:
        return client.state["v"]

    def direction(self, theta: Tensor, grad: Any, client: Client) -> Tensor:
        return grad(theta) + self.lam * (theta - client.w)

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        return {}, {"v": theta}

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        return w, server


class TwoModels(FedAvg):
    """As in Ditto: FedAvg, then each client's own model. The second phase is made anew, with a setting of the first."""

    lam: float = askew.setting("pull", default=0.25, least=0)

    def client_state(self, space: Space) -> State:
        return {"v": space.start.clone()}

    def phases(self) -> tuple[Algorithm, ...]:
        return (self, Personal(lam=self.lam))


class OwnFirst(TwoModels):
    """The same in the other order: the second phase begins with the model that the clients know."""

    def phases(self) -> tuple[Algorithm, ...]:
        return (Personal(lam=self.lam), self)


@pytest.mark.parametrize(("method", "models"), [(TwoModels, 2), (OwnFirst, 1)])
def test_a_phase_counts_the_model_where_the_one_before_changed_it(method: type[Algorithm], models: int) -> None:
    common: dict[str, Any] = {"rounds": 2, "partition": {"name": "iid", "clients": 6}, "cohort": 2, "model": "softmax"}
    run, reference = askew.run(method(lam=0.5), **common), askew.run("fedavg", **common)
    assert run.bytes_down == models * reference.bytes_down and run.bytes_up == reference.bytes_up
    assert run.curve("loss") == reference.curve("loss")
