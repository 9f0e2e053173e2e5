"""`askew bench`: what is timed is the work it is said to be, and the figures follow from each other."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from askew.bench import baselines
from askew.bench import timing as bench
from askew.bench import workloads as works
from askew.cli import bench as cli_bench
from askew.data.dataset import Dataset, Samples
from askew.data.transform import PixelTransform
from askew.engine.choose import EngineSettings
from askew.errors import ConfigError
from askew.experiment.build import build

app = typer.Typer()
app.callback()(lambda: None)
app.command("bench", epilog=cli_bench.EPILOG)(cli_bench.bench)


def on_cpu(name: str = "auto") -> EngineSettings:
    return EngineSettings(name=name, device="cpu")


def tell(*words: str) -> Any:
    return CliRunner().invoke(app, ["bench", *words], env={"COLUMNS": "200"})


# works ----------------------------------------------------------------------------------------------------------


def test_names_say_clients_steps_and_batch() -> None:
    for name, work in works.WORKS.items():
        network, *rest = name.split("-")
        if rest and rest[-1].count("x") == 2:
            assert rest[-1] == f"{work.clients}x{work.steps}x{work.batch}"
            assert network == work.network.called().lower()


@pytest.mark.parametrize("name", ["tiny", "softmax-100", "charlstm-10x5x10"])
def test_every_client_takes_its_steps_of_full_batches(name: str) -> None:
    work, house = works.WORKS[name], build(works.configured(name, on_cpu()))
    plan = house.server.prepare(1, house.fed.eligible.tolist())
    assert [w.lengths() for w in plan.train] == [[work.batch] * work.steps] * work.clients
    assert house.fed.shape == work.shape and house.fed.classes == work.classes


def test_skewed_clients_differ_in_size_and_hold_as_much_in_all() -> None:
    house = build(works.configured("softmax-100", on_cpu(), skewed=True))
    assert house.fed.sizes.sum() == works.WORKS["softmax-100"].samples
    assert house.fed.sizes.max() > 2 * house.fed.mean_size


def test_images_are_taken_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """And seen alike by us, by the loop by hand, and by other frameworks."""
    x, y = torch.randint(0, 256, (40, 1, 28, 28), dtype=torch.uint8), torch.randint(0, 10, (40,))
    samples = Samples(x, y)
    real = Dataset(
        samples, samples, 10, transform=PixelTransform(torch.full((1, 1, 1), 0.25), torch.full((1, 1, 1), 0.5))
    )
    monkeypatch.setattr(works.files, "find", lambda name: name == "mnist")
    for module in (works, baselines):
        monkeypatch.setattr(module, "sources", {"mnist": lambda: SimpleNamespace(load=lambda *_: real)})
    baselines.images.cache_clear()
    house = build(works.configured("mnist-3x2x5", on_cpu()))
    assert house.fed.pool.x.dtype is torch.uint8 and len(house.fed.pool.y) == 30
    ids, hand = house.fed.eligible.tolist(), baselines.PlainLoop(house)
    house.server.run_round(1, ids)
    assert hand.apart(hand.round(hand.batches(ids, 1)), house.server.w) < 1e-3
    shared, labels = baselines.share("mnist-3x2x5", 4, "cpu")  # after four times ten of the forty it begins anew
    torch.testing.assert_close(shared, (x[:10] / 255 - 0.25) / 0.5)
    assert torch.equal(labels, y[:10])
    baselines.images.cache_clear()


def test_without_images_the_bench_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(works.files, "find", lambda name: None)
    assert build(works.configured("mnist-2x1x3", on_cpu())).fed.pool.x.dtype is torch.float32
    told = tell("--work", "mnist-2x1x3", "--rounds", "1", "--device", "cpu")
    assert "mnist-2x1x3: on random numbers, as there are no files of MNIST" in " ".join(told.stdout.split())


def test_without_names_a_cpu_is_spared_the_heavy_works() -> None:
    todo = bench.chosen((), "cpu")
    assert "lenet-10x10x50" in todo and "tiny" not in todo
    assert not any(works.WORKS[name].heavy for name in todo)
    assert bench.chosen(["resnet18-10x10x50", "tiny", "tiny"], "cpu") == ["resnet18-10x10x50", "tiny"]


def test_any_sizes_can_be_asked_for() -> None:
    assert works.work_of("lenet-20x5x64") == works.WORKS["lenet-10x10x50"]._replace(clients=20, steps=5, batch=64)
    told = bench.measure("softmax-2x3x4", on_cpu(), rounds=1)
    assert (told.clients, told.steps, told.samples) == (2, 6, 24)


@pytest.mark.parametrize("name", ["lenet-0x5x64", "lenet-20x5", "tree-20x5x64", "lenet-20x5x64x", "softmax-1x1x-1"])
def test_sizes_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="NETWORK-CLIENTSxSTEPSxBATCH"):
        works.work_of(name)


# floors ---------------------------------------------------------------------------------------------------------


def test_flops_are_those_of_the_layers() -> None:
    """2·B·in·out forward, as much for the weights' gradient, and as much for the inputs' of all layers but the first."""
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


def test_flops_of_an_lstm_count_every_position() -> None:
    length, hidden, batch = 80, 256, 10
    gates = [4 * hidden * (8 + hidden), 4 * hidden * (hidden + hidden)]
    forward = 2 * batch * (length * sum(gates) + hidden * 80)
    assert 2.9 * forward < baselines.step_flops("charlstm-10x5x10") <= 3 * forward


def test_the_launch_floor_counts_the_steps_and_not_what_surrounds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    house = build(works.configured("tiny", on_cpu()))
    taken = list[int]()
    monkeypatch.setattr(baselines.PlainLoop, "round", lambda self, clients: taken.append(len(clients[0])))

    def kernels(go: Any) -> int:
        go()
        return 100 + 7 * taken[-1]

    monkeypatch.setattr(bench, "kernels", kernels)
    monkeypatch.setattr(bench, "empty_kernel", lambda device: 0.5)
    assert bench.launch_floor(house, steps=6) == 6 * 7 * 0.5


# figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sequential", "vmapped", "slots"])
@pytest.mark.parametrize("skewed", [False, True])
def test_the_loop_by_hand_does_the_same_work(engine: str, skewed: bool) -> None:
    told = bench.measure("tiny", on_cpu(engine), rounds=1, skewed=skewed)
    assert told.apart < 1e-5
    assert told.engine == engine and told.samples == 24


def test_models_that_differ_are_seen_to() -> None:
    house = build(works.configured("tiny", on_cpu()))
    hand = baselines.PlainLoop(house)
    mean = hand.round(hand.batches([0, 1, 2], 1))
    flat = torch.cat([t.reshape(-1) for t in mean.values()])
    assert hand.apart(mean, flat) == 0
    assert hand.apart(mean, house.space.start) == 1
    assert hand.apart(mean, 2 * flat - house.space.start) == pytest.approx(1)
    flat[-1] = house.space.start[-1]  # a small layer that stays behind counts as much as a large one
    assert hand.apart(mean, flat) > 0.5 * float(mean["out.bias"][-1].abs() / mean["out.bias"].abs().max())


def test_a_layer_that_neither_loop_moves_is_not_apart() -> None:
    house = build(works.configured("tiny", on_cpu()))
    hand = baselines.PlainLoop(house)
    assert hand.apart(hand.start, house.space.start) == 0


def test_loops_that_train_differently_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines.PlainLoop, "batches", lambda self, ids, t: [[torch.arange(2)]])
    assert "do not train alike" in tell("--work", "tiny", "--rounds", "1", "--device", "cpu").stderr
    monkeypatch.undo()
    assert "do not train alike" not in tell("--work", "tiny", "--rounds", "1", "--device", "cpu").stderr


def test_the_loop_by_hand_weights_clients_by_their_samples() -> None:
    house = build(works.configured("tiny", on_cpu()))
    hand = baselines.PlainLoop(house)
    batches = hand.batches([0, 1], 1)
    alone = [hand.round([work]) for work in (batches[0][:1], batches[1])]
    both = hand.round([batches[0][:1], batches[1]])
    for name, value in both.items():
        torch.testing.assert_close(value, (alone[0][name] + 2 * alone[1][name]) / 3)


def test_figures_follow_from_each_other() -> None:
    ticks = list[int]()
    told = bench.measure("tiny", on_cpu(), rounds=3, tick=lambda: ticks.append(1))
    assert (told.clients, told.steps, told.samples, told.rounds, len(ticks)) == (3, 6, 24, 3, 4)
    assert told.samples_per_s == pytest.approx(1e3 * told.samples / told.round_ms)
    assert told.flops == told.steps * baselines.step_flops("tiny")
    assert told.floor_ms == pytest.approx(1e3 * told.flops / told.matmul_flops_per_s)
    assert told.over_floor == pytest.approx(told.round_ms / told.floor_ms)
    assert told.launch_ms is None and told.over_launch is None
    assert told.peak_bytes is None or told.peak_bytes > 10_000_000


def test_processes_share_the_work_and_each_adds_to_the_floor() -> None:
    ticks = list[int]()
    settings = EngineSettings(name="sequential", device="cpu", workers=2)
    told = bench.measure("tiny", settings, rounds=2, tick=lambda: ticks.append(1))
    assert (told.workers, told.clients, told.steps, told.samples) == (2, 3, 6, 24) and told.apart < 1e-5
    assert told.floor_ms == pytest.approx(1e3 * told.flops / told.matmul_flops_per_s / 2)
    assert len(ticks) >= 3


def test_skewed_work_counts_its_samples_once() -> None:
    even, skewed = (bench.measure("tiny", on_cpu(), rounds=1, skewed=skewed) for skewed in (False, True))
    assert skewed.flops == even.flops and skewed.samples == even.samples


def test_wrong_wishes_are_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match="did you mean 'lenet-10x10x50'"):
        bench.chosen(["lenet10x10x50"])
    with pytest.raises(ConfigError, match="rounds must be ≥ 1, got 0"):
        bench.measure("tiny", on_cpu(), rounds=0)


# other frameworks -----------------------------------------------------------------------------------------------


def test_a_framework_that_is_not_there_is_said_not_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    assert bench.rival("pfl", "tiny") == bench.Rival("tiny", "pfl", "", 1, None, None, None, "not installed")


def test_flower_needs_ray_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None if name == "ray" else object())
    assert bench.installed("fedlab") and not bench.installed("flwr")


def test_a_frameworks_first_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    laps = [[9.0, 1.0], [0.4, 0.2], [0.2, 0.2], [0.6, 0.2]]
    done = subprocess.CompletedProcess([], 0, stdout=f"a word\n{json.dumps(laps)}\n", stderr="")
    monkeypatch.setattr(bench, "find_spec", lambda name: object())
    monkeypatch.setattr(subprocess, "run", lambda *given, **more: done)
    told = bench.rival("fedlab", "tiny", device="cpu")
    assert (told.round_ms, told.bare_ms, told.speedup) == pytest.approx((400, 200, 0.5))


def test_a_framework_that_fails_does_not_end_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **more: Any) -> None:
        raise subprocess.CalledProcessError(1, "x", stderr="Traceback\nImportError: no such thing\n")

    monkeypatch.setattr(bench, "find_spec", lambda name: object())
    monkeypatch.setattr(subprocess, "run", fail)
    told = bench.rival("fedlab", "tiny", device="cpu")
    assert told.round_ms is None and told.note == "failed: ImportError: no such thing"


@pytest.mark.parametrize("name", works.SHARED)
def test_what_frameworks_are_given_is_the_work(name: str) -> None:
    work = works.WORKS[name]
    x, y = baselines.share(name, 3, "cpu")
    assert x.shape == (work.steps * work.batch, *work.shape) and len(y) == len(x)
    assert baselines.Plain(name)(x[:2]).shape == (2, work.classes)


def test_a_framework_is_timed_between_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, which the command names: one lap for each round, and one for the first."""
    told = list[list[str]]()
    monkeypatch.setattr(bench, "find_spec", lambda name: object())
    laps = subprocess.CompletedProcess([], 0, stdout="[[1, 1], [1, 1]]", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda command, **more: told.append(command) or laps)
    bench.rival("pfl", "tiny", 4, "cpu", threads=2)
    assert told[0][-6:] == ["askew.bench.timing", "pfl", "tiny", "4", "cpu", "2"]
    lap = bench.Laps("tiny", "cpu")
    lap()
    lap()
    assert len(lap.pairs) == 2 and all(a > 0 and b > 0 for a, b in lap.pairs)


# command line ---------------------------------------------------------------------------------------------------


def test_the_list_names_every_work() -> None:
    told = tell("--list")
    assert told.exit_code == 0 and all(name in told.stdout for name in works.WORKS)
    assert [row["work"] for row in json.loads(tell("--list", "--json").stdout)] == list(works.WORKS)


def test_json_is_all_there_is_on_standard_output() -> None:
    told = tell("--work", "tiny", "--rounds", "1", "--device", "cpu", "--skewed", "--json")
    page = json.loads(told.stdout)
    assert [row["work"] for row in page["works"]] == ["tiny"] and page["works"][0]["skewed"] is True
    assert page["rivals"] == []
    assert "tiny" in told.stderr


def test_the_table_shows_the_figures() -> None:
    told = tell("--work", "tiny", "--rounds", "1", "--device", "cpu", "--engine", "vmapped")
    assert told.exit_code == 0 and "vmapped" in told.stdout and "GFLOP/s" in told.stdout


def test_other_frameworks_are_asked_where_their_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_bench, "SHARED", ("tiny", "softmax-100"))
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    told = tell("--work", "tiny", "--rounds", "1", "--device", "cpu")
    assert all(name in told.stdout for name in baselines.FRAMEWORKS) and "not installed" in told.stdout
    assert "softmax-100" not in told.stdout


def test_with_workers_other_frameworks_get_as_many_threads_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    timing, asked = bench.measure("tiny", on_cpu(), rounds=1), set[tuple[str, int]]()

    def rival(name: str, work: str, rounds: int, device: str, threads: int) -> bench.Rival:
        asked.add((name, threads))
        return bench.Rival(work, name, "1.0", threads, 5.0, 5.0, 1.0, "")

    monkeypatch.setattr(cli_bench, "SHARED", ("tiny",))
    monkeypatch.setattr(bench, "installed", lambda name: name == "pfl")
    monkeypatch.setattr(bench, "measure", lambda *given: timing._replace(workers=2))
    monkeypatch.setattr(bench, "rival", rival)
    assert "2 processes" in tell("--work", "tiny", "--workers", "2", "--device", "cpu").stdout
    assert asked == {("pfl", 1), ("pfl", 2), ("fedlab", 1), ("flwr", 1)}


@pytest.mark.parametrize(
    "words", [["--work", "lenet"], ["--rounds", "0", "--work", "tiny"], ["--dtype", "half"], ["--engine", "fast"]]
)
def test_the_command_line_refuses_what_is_not_there(words: list[str]) -> None:
    told = tell(*words)
    assert isinstance(told.exception, ConfigError) and str(told.exception).endswith(".")
