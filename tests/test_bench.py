"""`askew bench`: what is timed is the workload of that name, and the figures follow from each other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from askew.bench import baselines, start, timing, workloads
from askew.cli import bench as cli_bench
from askew.data.dataset import Dataset, Samples
from askew.data.transform import PixelTransform
from askew.engine.settings import EngineSettings
from askew.errors import ConfigError
from askew.experiment.build import build
from askew.experiment.config import Config

app = typer.Typer()
app.callback()(lambda: None)
app.command("bench", epilog=cli_bench.EPILOG)(cli_bench.bench)


@pytest.fixture(autouse=True)
def known_speed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products are taken to be of one speed: measuring it takes longer than all else here."""
    if "matmul_speed" not in request.node.name:
        monkeypatch.setattr(timing, "matmul_speed", lambda device, dtype: 1e10)


def on_cpu(name: str = "auto") -> EngineSettings:
    return EngineSettings(name=name, device="cpu")


def invoke(*arguments: str) -> Any:
    """The result of `askew bench` with these arguments."""
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})


# workloads ------------------------------------------------------------------------------------------------------


def test_names_say_clients_steps_and_batch() -> None:
    for name, workload in workloads.WORKLOADS.items():
        network, *sizes = name.split("-")
        if sizes and sizes[-1].count("x") == 2:
            assert sizes[-1] == f"{workload.clients}x{workload.steps}x{workload.batch}"
            assert network == workload.network.display_name().lower()


@pytest.mark.parametrize("name", ["tiny", "softmax-100", "charlstm-10x5x10"])
def test_every_client_takes_its_steps_of_full_batches(name: str) -> None:
    work, built = workloads.WORKLOADS[name], build(workloads.workload_config(name, on_cpu()))
    plan = built.server.prepare(1, built.fed.eligible.tolist())
    assert [w.lengths() for w in plan.train] == [[work.batch] * work.steps] * work.clients
    assert built.fed.shape == work.shape and built.fed.classes == work.classes


def test_skewed_clients_differ_in_size_and_hold_as_much_in_all() -> None:
    built = build(workloads.workload_config("softmax-100", on_cpu(), skewed=True))
    assert built.fed.sizes.sum() == workloads.WORKLOADS["softmax-100"].samples
    assert built.fed.sizes.max() > 2 * built.fed.mean_size


def test_images_are_taken_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """And they are the same for askew, for the plain loop and for other frameworks."""
    x, y = torch.randint(0, 256, (40, 1, 28, 28), dtype=torch.uint8), torch.randint(0, 10, (40,))
    samples = Samples(x, y)
    real = Dataset(
        samples, samples, 10, transform=PixelTransform(torch.full((1, 1, 1), 0.25), torch.full((1, 1, 1), 0.5))
    )
    monkeypatch.setattr(workloads.files, "find", lambda name: name == "mnist")
    for module in (workloads, baselines):
        monkeypatch.setattr(module, "sources", {"mnist": lambda: SimpleNamespace(load=lambda *_: real)})
    baselines.dataset_images.cache_clear()
    built = build(workloads.workload_config("mnist-3x2x5", on_cpu()))
    assert built.fed.pool.x.dtype is torch.uint8 and len(built.fed.pool.y) == 30
    ids, loop = built.fed.eligible.tolist(), baselines.PlainLoop(built)
    built.server.run_round(1, ids)
    assert loop.difference(loop.round(loop.batches(ids, 1)), built.server.w) < 1e-3
    shared, labels = baselines.client_samples(
        "mnist-3x2x5", 4, "cpu"
    )  # after four times ten of the forty it begins anew
    torch.testing.assert_close(shared, (x[:10] / 255 - 0.25) / 0.5)
    assert torch.equal(labels, y[:10])
    baselines.dataset_images.cache_clear()


def test_without_images_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads.files, "find", lambda name: None)
    assert build(workloads.workload_config("mnist-2x1x3", on_cpu())).fed.pool.x.dtype is torch.float32
    result = invoke("--work", "mnist-2x1x3", "--rounds", "1", "--device", "cpu")
    assert "mnist-2x1x3: on random numbers, as there are no files of MNIST" in " ".join(result.stdout.split())


def test_without_names_heavy_workloads_are_left_out_on_a_cpu() -> None:
    todo = timing.selected_workloads((), "cpu")
    assert "lenet-10x10x50" in todo and "tiny" not in todo
    assert not any(workloads.WORKLOADS[name].heavy for name in todo)
    assert timing.selected_workloads(["resnet18-10x10x50", "tiny", "tiny"], "cpu") == ["resnet18-10x10x50", "tiny"]


def test_any_sizes_can_be_asked_for() -> None:
    assert workloads.find_workload("lenet-20x5x64") == workloads.WORKLOADS["lenet-10x10x50"]._replace(
        clients=20, steps=5, batch=64
    )
    result = timing.time_workload("softmax-2x3x4", on_cpu(), rounds=1)
    assert (result.clients, result.steps, result.samples) == (2, 6, 24)


@pytest.mark.parametrize("name", ["lenet-0x5x64", "lenet-20x5", "tree-20x5x64", "lenet-20x5x64x", "softmax-1x1x-1"])
def test_malformed_sizes_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="NETWORK-CLIENTSxSTEPSxBATCH"):
        workloads.find_workload(name)


# floors ---------------------------------------------------------------------------------------------------------


def test_flops_are_those_of_the_layers() -> None:
    """2·B·in·out forward, as much for the weights' gradient, and as much for the inputs' but in the first layer."""
    layers, batch = [(784, 200), (200, 200), (200, 10)], 50
    passes = [2, 3, 3]
    assert baselines.step_flops("mlp-mnist-100") == sum(
        n * 2 * batch * a * b for n, (a, b) in zip(passes, layers, strict=True)
    )
    convolutions = [(3 * 25, 6, 28 * 28), (6 * 25, 16, 10 * 10)]
    dense = [(400, 120, 1), (120, 84, 1), (84, 10, 1)]
    assert baselines.step_flops("lenet-10x10x50") == sum(
        n * 2 * batch * a * b * pixels for n, (a, b, pixels) in zip([2, 3, 3, 3, 3], convolutions + dense, strict=True)
    )


@pytest.mark.slow
def test_flops_of_an_lstm_count_every_position() -> None:
    length, hidden, batch = 80, 256, 10
    gates = [4 * hidden * (8 + hidden), 4 * hidden * (hidden + hidden)]
    forward = 2 * batch * (length * sum(gates) + hidden * 80)
    assert 2.9 * forward < baselines.step_flops("charlstm-10x5x10") <= 3 * forward


def test_the_launch_floor_counts_the_steps_and_not_what_surrounds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(workloads.workload_config("tiny", on_cpu()))
    taken = list[int]()
    monkeypatch.setattr(baselines.PlainLoop, "round", lambda self, clients: taken.append(len(clients[0])))

    def count_kernels(go: Any) -> int:
        go()
        return 100 + 7 * taken[-1]

    monkeypatch.setattr(timing, "count_kernels", count_kernels)
    monkeypatch.setattr(timing, "empty_kernel_seconds", lambda device: 0.5)
    assert timing.launch_floor(built, steps=6) == 6 * 7 * 0.5


# figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sequential", "vmapped", "slots"])
@pytest.mark.parametrize("skewed", [False, True])
def test_the_plain_loop_trains_the_same_model(engine: str, skewed: bool) -> None:
    result = timing.time_workload("tiny", on_cpu(engine), rounds=1, skewed=skewed)
    assert result.apart < 1e-5
    assert result.engine == engine and result.samples == 24


def test_the_difference_of_two_models() -> None:
    built = build(workloads.workload_config("tiny", on_cpu()))
    loop = baselines.PlainLoop(built)
    mean = loop.round(loop.batches([0, 1, 2], 1))
    flat = torch.cat([t.reshape(-1) for t in mean.values()])
    assert loop.difference(mean, flat) == 0
    assert loop.difference(mean, built.space.start) == 1
    assert loop.difference(mean, 2 * flat - built.space.start) == pytest.approx(1)
    flat[-1] = built.space.start[-1]  # a small layer that stays behind counts as much as a large one
    assert loop.difference(mean, flat) > 0.5 * float(mean["out.bias"][-1].abs() / mean["out.bias"].abs().max())


def test_a_layer_that_neither_loop_moves_makes_no_difference() -> None:
    built = build(workloads.workload_config("tiny", on_cpu()))
    loop = baselines.PlainLoop(built)
    assert loop.difference(loop.start, built.space.start) == 0


def test_loops_that_train_differently_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines.PlainLoop, "batches", lambda self, ids, t: [[torch.arange(2)]])
    assert "do not train alike" in invoke("--work", "tiny", "--rounds", "1", "--device", "cpu").stderr
    monkeypatch.undo()
    assert "do not train alike" not in invoke("--work", "tiny", "--rounds", "1", "--device", "cpu").stderr


def test_the_plain_loop_weights_clients_by_their_samples() -> None:
    built = build(workloads.workload_config("tiny", on_cpu()))
    loop = baselines.PlainLoop(built)
    batches = loop.batches([0, 1], 1)
    alone = [loop.round([work]) for work in (batches[0][:1], batches[1])]
    both = loop.round([batches[0][:1], batches[1]])
    for name, value in both.items():
        torch.testing.assert_close(value, (alone[0][name] + 2 * alone[1][name]) / 3)


def test_figures_follow_from_each_other() -> None:
    ticks = list[int]()
    result = timing.time_workload("tiny", on_cpu(), rounds=3, on_round_end=lambda: ticks.append(1))
    assert (result.clients, result.steps, result.samples, result.rounds, len(ticks)) == (3, 6, 24, 3, 4)
    assert result.samples_per_s == pytest.approx(1e3 * result.samples / result.round_ms)
    assert result.flops == result.steps * baselines.step_flops("tiny")
    assert result.floor_ms == pytest.approx(1e3 * result.flops / result.matmul_flops_per_s)
    assert result.over_floor == pytest.approx(result.round_ms / result.floor_ms)
    assert result.launch_ms is None and result.over_launch is None
    assert result.peak_bytes is None or result.peak_bytes > 10_000_000


def test_matmul_speed_is_that_of_large_products() -> None:
    speed = timing.matmul_speed(torch.device("cpu"), "float32")
    a = torch.randn(64, 64)
    small = 2 * 64**3 / min(timing.seconds_of(torch.device("cpu"), lambda: a @ a) for _ in range(5))
    assert speed > 1e8 and speed > 0.2 * small


def test_a_worker_sends_a_message_after_each_round_and_then_the_figures() -> None:
    messages: list[dict[str, Any]] = []
    engine = EngineSettings(name="sequential", device="cpu")
    job = {"workload": "tiny", "engine": engine.table(), "rounds": 2, "skewed": False}
    timing.time_in_worker(json.loads(json.dumps(job)), messages.append)
    figures = timing.Timing(**messages.pop())
    assert messages == [{}] * 3 and (figures.work, figures.rounds, figures.workers) == ("tiny", 2, 1)


@pytest.mark.slow
def test_workers_share_the_rounds_and_each_adds_to_the_floor() -> None:
    ticks = list[int]()
    settings = EngineSettings(name="sequential", device="cpu", workers=2)
    result = timing.time_workload("tiny", settings, rounds=2, on_round_end=lambda: ticks.append(1))
    assert (result.workers, result.clients, result.steps, result.samples) == (2, 3, 6, 24) and result.apart < 1e-5
    assert result.floor_ms == pytest.approx(1e3 * result.flops / result.matmul_flops_per_s / 2)
    assert len(ticks) >= 3


def test_skewed_clients_have_as_many_samples_in_all() -> None:
    even, skewed = (timing.time_workload("tiny", on_cpu(), rounds=1, skewed=skewed) for skewed in (False, True))
    assert skewed.flops == even.flops and skewed.samples == even.samples


def test_wrong_names_and_rounds_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'lenet-10x10x50'"):
        timing.selected_workloads(["lenet10x10x50"])
    with pytest.raises(ConfigError, match="rounds must be ≥ 1, got 0"):
        timing.time_workload("tiny", on_cpu(), rounds=0)


# other frameworks -----------------------------------------------------------------------------------------------


def test_a_framework_that_is_not_installed_is_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "find_spec", lambda name: None)
    assert timing.time_framework("pfl", "tiny") == timing.FrameworkTiming(
        "tiny", "pfl", "", 1, None, None, None, "not installed"
    )


def test_flower_needs_ray_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "find_spec", lambda name: None if name == "ray" else object())
    assert timing.is_installed("fedlab") and not timing.is_installed("flwr")


def test_a_frameworks_first_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    laps = [[9.0, 1.0], [0.4, 0.2], [0.2, 0.2], [0.6, 0.2]]
    done = subprocess.CompletedProcess([], 0, stdout=f"a word\n{json.dumps(laps)}\n", stderr="")
    monkeypatch.setattr(timing, "find_spec", lambda name: object())
    monkeypatch.setattr(subprocess, "run", lambda *given, **more: done)
    result = timing.time_framework("fedlab", "tiny", device="cpu")
    assert (result.round_ms, result.bare_ms, result.speedup) == pytest.approx((400, 200, 0.5))


def test_a_framework_that_fails_does_not_end_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **more: Any) -> None:
        raise subprocess.CalledProcessError(1, "x", stderr="Traceback\nImportError: no such thing\n")

    monkeypatch.setattr(timing, "find_spec", lambda name: object())
    monkeypatch.setattr(subprocess, "run", fail)
    result = timing.time_framework("fedlab", "tiny", device="cpu")
    assert result.round_ms is None and result.note == "failed: ImportError: no such thing"


@pytest.mark.parametrize("name", workloads.FRAMEWORK_WORKLOADS)
def test_frameworks_get_the_workloads_shapes(name: str) -> None:
    work = workloads.WORKLOADS[name]
    x, y = baselines.client_samples(name, 3, "cpu")
    assert x.shape == (work.steps * work.batch, *work.shape) and len(y) == len(x)
    assert baselines.LogitsNetwork(name)(x[:2]).shape == (2, work.classes)


def test_a_framework_is_timed_between_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, which the command names: one lap for each round, and one for the first."""
    commands = list[list[str]]()
    monkeypatch.setattr(timing, "find_spec", lambda name: object())
    laps = subprocess.CompletedProcess([], 0, stdout="[[1, 1], [1, 1]]", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda command, **more: commands.append(command) or laps)
    timing.time_framework("pfl", "tiny", 4, "cpu", threads=2)
    assert commands[0][-6:] == ["askew.bench.timing", "pfl", "tiny", "4", "cpu", "2"]
    lap = timing.LapTimer("tiny", "cpu")
    lap()
    lap()
    assert len(lap.pairs) == 2 and all(a > 0 and b > 0 for a, b in lap.pairs)


# command line ---------------------------------------------------------------------------------------------------


def test_the_list_names_every_workload() -> None:
    result = invoke("--list")
    assert result.exit_code == 0 and all(name in result.stdout for name in workloads.WORKLOADS)
    assert [row["work"] for row in json.loads(invoke("--list", "--json").stdout)] == [
        *workloads.WORKLOADS,
        *cli_bench.EXPERIMENTS,
    ]


def test_json_is_all_there_is_on_standard_output() -> None:
    result = invoke("--work", "tiny", "--rounds", "1", "--device", "cpu", "--skewed", "--json")
    document = json.loads(result.stdout)
    assert [row["work"] for row in document["works"]] == ["tiny"] and document["works"][0]["skewed"] is True
    assert document["rivals"] == []
    assert "tiny" in result.stderr


def test_the_table_shows_the_figures() -> None:
    result = invoke("--work", "tiny", "--rounds", "1", "--device", "cpu", "--engine", "vmapped")
    assert result.exit_code == 0 and "vmapped" in result.stdout and "GFLOP/s" in result.stdout


def test_other_frameworks_are_timed_with_their_workloads_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_bench, "FRAMEWORK_WORKLOADS", ("tiny", "softmax-100"))
    monkeypatch.setattr(timing, "find_spec", lambda name: None)
    result = invoke("--work", "tiny", "--rounds", "1", "--device", "cpu")
    assert all(name in result.stdout for name in baselines.FRAMEWORKS) and "not installed" in result.stdout
    assert "softmax-100" not in result.stdout and " in pfl" not in result.stderr


def test_with_workers_other_frameworks_get_as_many_threads_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    figures, asked = timing.time_workload("tiny", on_cpu(), rounds=1), set[tuple[str, int]]()

    def time_framework(name: str, work: str, rounds: int, device: str, threads: int) -> timing.FrameworkTiming:
        asked.add((name, threads))
        return timing.FrameworkTiming(work, name, "1.0", threads, 5.0, 5.0, 1.0, "")

    monkeypatch.setattr(cli_bench, "FRAMEWORK_WORKLOADS", ("tiny",))
    monkeypatch.setattr(timing, "is_installed", lambda name: name == "pfl")
    monkeypatch.setattr(timing, "time_workload", lambda *given: figures._replace(workers=2))
    monkeypatch.setattr(timing, "time_framework", time_framework)
    assert "2 processes" in invoke("--work", "tiny", "--workers", "2", "--device", "cpu").stdout
    assert asked == {("pfl", 1), ("pfl", 2), ("fedlab", 1), ("flwr", 1)}


@pytest.mark.parametrize(
    "arguments", [["--work", "lenet"], ["--rounds", "0", "--work", "tiny"], ["--dtype", "half"], ["--engine", "fast"]]
)
def test_the_command_line_refuses_unknown_values(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert isinstance(result.exception, ConfigError) and str(result.exception).endswith(".")


def test_a_papers_run_is_timed_on_random_images_with_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Config]()

    def time_experiment(name: str, config: Config, engine: EngineSettings, *more: object) -> timing.ExperimentTiming:
        seen.append(workloads.with_random_images(config))
        return timing.ExperimentTiming(name, "FedDC", "stacked", "cpu", "float32", False, 1, 1.0, 76.1)

    monkeypatch.setattr(timing, "time_experiment", time_experiment)
    result = invoke("--work", "feddc-cifar10", "--rounds", "1", "--device", "cpu")
    assert result.exit_code == 0 and "76.1" in result.stdout and "softmax-100" not in result.stdout
    (config,) = seen
    assert (config.local.clip, config.local.weight_decay, config.evaluation.every) == (10.0, 1e-3, 1)
    data = config.data.load(0, 100)
    assert data.train.x.shape == (50_000, 3, 32, 32) and len(data.test.y) == 10_000
    assert torch.bincount(data.train.y).tolist() == [5000] * 10
    assert isinstance(data.transform, PixelTransform) and data.transform.flip and data.transform.pad == 4


def test_rounds_of_a_run_are_timed_after_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "with_random_images", lambda config: config)
    config = Config.build({"data": {"name": "synthetic", "samples": 20}, "partition": {"clients": 4}, "rounds": 99})
    ends = list[None]()
    figures = timing.time_experiment("own", config, on_cpu(), rounds=2, on_round_end=lambda: ends.append(None))
    assert len(ends) == timing.FIRST_ROUNDS + 2 and figures.rounds == 2 and figures.round_ms > 0
    with pytest.raises(ConfigError, match="rounds must be"):
        timing.time_experiment("own", config, on_cpu(), rounds=0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--work", "feddc-cifar10", "--skewed"], "feddc-cifar10, whose clients are those of the paper"),
        (["--start", "--skewed"], "--skewed does not go with --start"),
        (["--start", "--rounds", "3"], "--rounds does not go with --start"),
    ],
)
def test_options_that_would_change_nothing_are_refused(arguments: list[str], says: str) -> None:
    result = invoke(*arguments)
    assert isinstance(result.exception, ConfigError) and says in str(result.exception)


def test_what_was_timed_before_ctrl_c_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a paper's run, which ends after its round: of rounds that were not trained there is no median."""

    def interrupt(task: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    own = Config.build({"data": {"name": "synthetic", "samples": 20}, "partition": {"clients": 4}})
    monkeypatch.setattr(timing, "with_random_images", lambda config: config)
    monkeypatch.setattr(cli_bench, "experiment_config", lambda name: own)
    monkeypatch.setattr(
        cli_bench.BenchProgress, "advance", lambda self: interrupt(self) if "cifar" in self.what else None
    )
    arguments = ("--work", "tiny", "--rounds", "1", "--device", "cpu", "--work", "feddpc-cifar10")
    for result in (invoke(*arguments), invoke(*arguments, "--json")):
        assert result.exit_code == 130 and "stopped while feddpc-cifar10 was timed" in result.stderr
        assert "sequential" in result.stdout and "cifar" not in result.stdout


def test_the_table_fits_in_80_columns() -> None:
    figures = timing.time_workload("tiny", on_cpu(), rounds=1)
    wide = figures._replace(work="resnet18-10x10x50", engine="sequential", round_ms=1280.5, bare_ms=2540.0, apart=1e-3)
    console = Console(width=80)
    with console.capture() as capture:
        console.print(cli_bench.timing_table([wide]))
    assert "…" not in capture.get() and "resnet18-10x10x50" in capture.get()


# the start of a run ---------------------------------------------------------------------------------------------------


def test_the_start_of_a_run_stage_by_stage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The stages follow each other without a gap, and the child's lines are those that the parent runs."""
    config, began = Config.build({"model": {"name": "softmax"}}), time.time()
    times = [began - 6.0, began - 5.0, began - 3.0, began]
    start.print_stages(times, json.dumps(config.tables()), random_images=False)
    stages = [start.Stage(*each) for each in json.loads(capsys.readouterr().out)]
    assert [stage.seconds for stage in stages[:3]] == pytest.approx([1, 2, 3])
    names = ["Python", "torch", "askew", "samples", "network, engine and server", "first round", "second round"]
    assert [stage.name for stage in stages] == [*names, "a later round"]
    assert sum(stage.seconds for stage in stages[3:]) <= time.time() - began

    def child(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert json.loads(command[4]) == config.tables() and command[5] == "stored"
        return subprocess.CompletedProcess(command, 0, "a remark\n" + json.dumps(stages), "")

    monkeypatch.setattr(start.subprocess, "run", child)
    assert start.time_start(config) == stages
    monkeypatch.setattr(cli_bench, "time_start", lambda config, random_images: stages)
    lines = invoke("--start").output.splitlines()
    assert any(line.split() == ["torch", "2.000"] for line in lines)
    total = sum(stage.seconds for stage in stages[:6])
    assert f"the default configuration: {total:.2f} s from the shell" in lines[-1]


def test_a_start_that_fails_says_why() -> None:
    result = invoke("--start", "--work", "tiny")
    assert isinstance(result.exception, ConfigError) and "feddc-cifar10" in str(result.exception)
