"""How fast rounds are: full rounds as a user gets them, against a loop written by hand and against what the arithmetic needs.

A round is `Server.play`: batches are gathered, every client is trained, the model is averaged, the next round's batches are
planned; evaluation is apart. The loop by hand trains the same clients on the same batches one after the other, its batches
planned before the clock starts. Rounds of the two alternate, so that a busy machine disturbs them alike, and both start
once from the same model, so that what is timed is known to be the same work (`apart`).

Samples are random: nothing is downloaded, and no time depends on their values.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..core.settings import setting
from ..data.dataset import Dataset, Samples, Source
from ..engine.choose import EngineSettings
from ..errors import ConfigError, did_you_mean
from ..models import CNN64, MLP, CharLSTM, LeNet, Network, ResNet18, Softmax
from .build import House, build, device_of
from .config import Config, Handed
from .run import enough_memory, torch_state

ROUNDS = 10
FAR = 0.1  # models so far apart were not trained alike; rounding stays far below
LR = 0.01
TEST = 10  # samples of the test set, which no bench looks at
PATIENCE = 900  # seconds that another framework may take
IMAGE = (3, 32, 32)

Tick = Callable[[], None]  # called after every round


class Work(NamedTuple):
    """What one round trains: clients, and of each its steps and batch size."""

    network: Network
    shape: tuple[int, ...]
    classes: int
    clients: int
    steps: int
    batch: int
    heavy: bool = False  # minutes a round on a CPU

    @property
    def samples(self) -> int:
        return self.clients * self.steps * self.batch


# network: itself, the shape of an input, classes
NETWORKS: dict[str, tuple[Network, tuple[int, ...], int]] = {
    "lenet": (LeNet(), IMAGE, 10),
    "cnn64": (CNN64(), IMAGE, 10),
    "resnet18": (ResNet18(), IMAGE, 100),
    "mlp": (MLP(hidden=(200, 200)), (784,), 10),
    "softmax": (Softmax(), (60,), 10),
    "charlstm": (CharLSTM(), (80,), 80),
}
SIZES = re.compile(rf"({'|'.join(NETWORKS)})-([1-9]\d*)x([1-9]\d*)x([1-9]\d*)")
WORKS = {
    "lenet-10x10x50": Work(*NETWORKS["lenet"], 10, 10, 50),
    "lenet-10x2x256": Work(*NETWORKS["lenet"], 10, 2, 256),
    "lenet-100x10x50": Work(*NETWORKS["lenet"], 100, 10, 50),
    "cnn64-15x50x50": Work(*NETWORKS["cnn64"], 15, 50, 50, heavy=True),
    "cnn64-100x10x50": Work(*NETWORKS["cnn64"], 100, 10, 50, heavy=True),
    "resnet18-10x10x50": Work(*NETWORKS["resnet18"], 10, 10, 50, heavy=True),
    "resnet18-10x2x256": Work(*NETWORKS["resnet18"], 10, 2, 256, heavy=True),
    "mlp-mnist-100": Work(*NETWORKS["mlp"], 100, 12, 50),
    "softmax-100": Work(*NETWORKS["softmax"], 100, 10, 10),
    "charlstm-10x5x10": Work(*NETWORKS["charlstm"], 10, 5, 10),
    "tiny": Work(Softmax(), (4,), 2, 3, 2, 4),
}
SHARED = "lenet-10x10x50"  # the work that other frameworks are given


def work_of(name: str) -> Work:
    """A work by its name: one of the list, or a network with any number of clients, steps and samples in a batch."""
    if name in WORKS:
        return WORKS[name]
    if sizes := SIZES.fullmatch(name):
        return Work(*NETWORKS[sizes[1]], int(sizes[2]), int(sizes[3]), int(sizes[4]))
    raise ConfigError(
        f"bench: unknown work {name!r}; allowed is NETWORK-CLIENTSxSTEPSxBATCH, as lenet-20x5x64, besides: {did_you_mean(name, WORKS)}"
    )


class Timing(NamedTuple):
    """One work's figures. Times are medians over the rounds."""

    work: str
    engine: str
    device: str
    dtype: str
    compile: bool
    skewed: bool
    parameters: int
    clients: int
    steps: int  # of all clients together
    samples: int
    rounds: int
    first_s: float  # the first round, with all that is chosen, compiled or captured in it
    round_ms: float
    samples_per_s: float
    bare_ms: float  # the loop by hand
    speedup: float  # of a round against the loop's beside it
    apart: float  # after the first round: the two models' largest difference over the largest change, of the worst parameter
    flops: int  # of forward and backward passes
    matmul_flops_per_s: float  # what one large product of matrices reaches here
    floor_ms: float  # the flops at that speed
    over_floor: float
    launch_ms: float | None  # a GPU: the longest client's kernels one after the other, each for as long as an empty one takes
    over_launch: float | None
    peak_bytes: int | None  # of the device's memory, or of the process


class Noise(Handed, Source):
    """Random samples; of a text, random tokens."""

    samples: int = setting("training samples", default=1, least=1)
    shape: tuple[int, ...] = setting("shape of one input", default=())
    classes: int = setting("classes", default=2, least=2)
    tokens: bool = setting("inputs are tokens", default=False)

    def load(self, seed: int, clients: int) -> Dataset:
        g = torch.Generator().manual_seed(seed)

        def some(n: int) -> Samples:
            size = (n, *self.shape)
            x = torch.randint(self.classes, size, generator=g) if self.tokens else torch.randn(size, generator=g)
            return Samples(x, torch.randint(self.classes, (n,), generator=g))

        return Dataset(some(self.samples), some(TEST), self.classes)


def chosen(names: Sequence[str], device: str = "auto") -> list[str]:
    """The works to do: the named ones, or all of the list that a device does in bearable time."""
    for name in names:
        work_of(name)
    cpu = device_of(device).type == "cpu"
    return list(dict.fromkeys(names)) or [name for name, work in WORKS.items() if name != "tiny" and not (cpu and work.heavy)]


def configured(name: str, engine: EngineSettings, skewed: bool = False) -> Config:
    """A work as a configuration; skewed: clients differ in size, and the samples are as many in all."""
    work = work_of(name)
    tokens = isinstance(work.network, CharLSTM)
    partition = {"name": "dirichlet", "alpha": 0.2, "min_size": 0} if skewed else {"name": "iid"}
    return Config.build(
        {
            "data": Noise(samples=work.samples, shape=work.shape, classes=work.classes, tokens=tokens),
            "partition": partition | {"clients": work.clients},
            "participation": {"name": "full"},
            "model": work.network,
            "local": {"batch": work.batch, "lr": LR},
            "engine": engine,
        }
    )


def measure(name: str, engine: EngineSettings, rounds: int = ROUNDS, skewed: bool = False, tick: Tick = lambda: None) -> Timing:
    """Play rounds of a work, and time them."""
    if rounds < 1:
        raise ConfigError(f"bench: rounds must be ≥ 1, got {rounds}; the default is {ROUNDS}.")
    config = configured(name, engine, skewed)
    with torch_state(config), enough_memory():
        house = build(config)
        device, ids = house.space.device, house.fed.eligible.tolist()
        hand = Hand(house)
        ours, bare, peaks = list[float](), list[float](), list[int | None]()

        def play(t: int) -> None:
            forget_peak(device)
            ours.append(timed(device, lambda: house.server.play(t, ids, meanwhile=lambda: ahead(t + 1))))
            peaks.append(peak(device))

        def ahead(t: int) -> None:
            house.server.prepare(t, ids)

        def loop(t: int) -> None:
            batches = hand.batches(ids, t)
            bare.append(timed(device, lambda: hand.round(batches)))

        speed = matmul_speed(device, engine.dtype)
        play(1)
        apart = hand.apart(hand.round(hand.batches(ids, 1)), house.server.x)
        tick()
        for t in range(2, rounds + 2):
            for turn in (play, loop) if t % 2 else (loop, play):
                turn(t)
            tick()
        works = house.server.prepare(rounds + 2, ids).train
        samples, first = sum(len(work.places) for work in works), ours.pop(0)
        round_s = statistics.median(ours)
        flops = round(step_flops(name) * samples / work_of(name).batch)
        speed = max(speed, matmul_speed(device, engine.dtype))
        launch = launch_floor(house, max(work.batches for work in works)) if device.type == "cuda" else None
    known = [p for p in peaks if p is not None]
    return Timing(
        work=name,
        engine=house.facts["engine"],
        device=house.facts["device"],
        dtype=engine.dtype,
        compile=engine.compile,
        skewed=skewed,
        parameters=house.space.P,
        clients=len(ids),
        steps=sum(work.batches for work in works),
        samples=samples,
        rounds=rounds,
        first_s=first,
        round_ms=1e3 * round_s,
        samples_per_s=samples / round_s,
        bare_ms=1e3 * statistics.median(bare),
        speedup=statistics.median(b / a for a, b in zip(ours, bare, strict=True)),
        apart=apart,
        flops=flops,
        matmul_flops_per_s=speed,
        floor_ms=1e3 * flops / speed,
        over_floor=round_s * speed / flops,
        launch_ms=None if launch is None else 1e3 * launch,
        over_launch=None if launch is None else round_s / launch,
        peak_bytes=max(known, default=None),
    )


class Hand:
    """The loop that one would write by hand: one client after another, and the mean of their weights by their samples."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.model = copy.deepcopy(house.module).to(house.space.device, house.space.dtype).train()
        self.start = {n: p.clone() for n, p in self.model.state_dict().items()}

    def batches(self, ids: list[int], t: int) -> list[list[Tensor]]:
        """The places of each client's batches, on the device."""
        plan = self.house.fed.plan(ids, t, self.house.config.local)
        return [list(torch.split(work.places.to(self.house.space.device), work.lengths())) for work in plan.train]

    def round(self, clients: list[list[Tensor]]) -> dict[str, Tensor]:
        (x, y), total = self.house.fed.pool, sum(len(index) for batches in clients for index in batches)
        mean = {n: torch.zeros_like(p) for n, p in self.start.items()}
        for batches in clients:
            self.model.load_state_dict(self.start)
            optimiser = torch.optim.SGD(self.model.parameters(), lr=LR)
            for index in batches:
                optimiser.zero_grad()
                with torch.autocast(x.device.type, torch.bfloat16, enabled=self.house.task.half):
                    output = self.model(x[index])[0]
                torch.autograd.backward(F.cross_entropy(output.to(self.house.space.dtype), y[index]))
                optimiser.step()
            for n, p in self.model.state_dict().items():
                mean[n] += p * (sum(len(index) for index in batches) / total)
        return mean

    def apart(self, mean: dict[str, Tensor], x: Tensor) -> float:
        """How far x is from the mean, relative to how far that went: of all layers' weights and biases the worst.

        Those that hardly move at all, as an LSTM's first layer does, differ by rounding alone, which must not count.
        """
        space = self.house.space
        ours, start, noise = space.split(x), space.split(space.start), 100 * torch.finfo(space.dtype).eps
        ratios = [(ours[n] - mean[n]).abs().max() / ((mean[n] - w).abs().max() + noise * w.abs().max()) for n, w in start.items()]
        return float(torch.stack(ratios).nan_to_num(0).max())  # 0/0: at zero, and neither moved


def timed(device: torch.device, go: Callable[[], object]) -> float:
    """Seconds until it is done, on the device too."""
    settle(device)
    began = time.perf_counter()
    go()
    settle(device)
    return time.perf_counter() - began


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# memory ---------------------------------------------------------------------------------------------------------


def forget_peak(device: torch.device) -> None:
    """Let the peak begin anew; of a process that is Linux's to give, elsewhere the peak is that of its whole life."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> int | None:
    """Bytes: the most that were allocated on the device, or resident in the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# floors ---------------------------------------------------------------------------------------------------------


@cache
def step_flops(name: str) -> int:
    """Forward and backward pass of one batch, counted without computing anything (on the meta device)."""
    work = work_of(name)
    with torch.device("meta"):
        model = work.network.build_module(work.shape, work.classes)
        size = (work.batch, *work.shape)
        x = torch.zeros(size, dtype=torch.long) if isinstance(work.network, CharLSTM) else torch.zeros(size)
        y = torch.zeros(work.batch, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(F.cross_entropy(model(x)[0], y))
    return int(counter.get_total_flops())


def matmul_speed(device: torch.device, dtype: str) -> float:
    """Operations a second of one large product of matrices: the best of several, as a floor should not depend on who disturbs."""
    n = 8192 if device.type == "cuda" else 1024
    kind = {"float64": torch.float64, "bf16": torch.bfloat16}.get(dtype, torch.float32)
    a, b = (torch.randn(n, n, device=device).to(kind) for _ in range(2))
    return 2 * n**3 / min(timed(device, lambda: a @ b) for _ in range(12))


def launch_floor(house: House, steps: int) -> float:
    """Seconds that the kernels of one client's steps take one after the other if each is empty."""
    hand = Hand(house)
    batch = torch.arange(house.config.local.batch, device=house.space.device)
    hand.round([[batch]])
    one, two = (kernels(lambda count=count: hand.round([[batch] * count])) for count in (1, 2))  # type: ignore[misc]
    return steps * (two - one) * empty_kernel(house.space.device)  # what surrounds the steps is in both


def kernels(go: Callable[[], object]) -> int:
    """How many kernels the device is given."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        go()
    return sum(event.device_type.name == "CUDA" for event in seen.events() or ())


@cache
def empty_kernel(device: torch.device) -> float:
    """Seconds that a kernel with nothing to do takes in a captured graph."""
    count, number = 1000, torch.zeros(1, device=device)
    number.add_(1)
    settle(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            number.add_(1)
    return min(timed(device, graph.replay) for _ in range(10)) / count


# other frameworks -----------------------------------------------------------------------------------------------


class Rival(NamedTuple):
    """Another framework at the same work, against the loop by hand in its own process; or why there are no figures."""

    name: str
    version: str
    round_ms: float | None
    bare_ms: float | None
    speedup: float | None
    note: str


def installed(name: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in (name, *RIVALS[name][0]))


def rival(name: str, rounds: int = ROUNDS, device: str = "auto") -> Rival:
    """Give the shared work to another framework, in a process of its own."""
    if not installed(name):
        return Rival(name, "", None, None, None, "not installed")
    version = ""
    with suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version(name)
    command = [sys.executable, "-W", "ignore", "-m", "askew.experiment.bench", name, str(rounds), str(device_of(device))]
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=os.environ | quiet, check=True)
    except subprocess.TimeoutExpired:
        return Rival(name, version, None, None, None, f"not done after {PATIENCE} s")
    except subprocess.CalledProcessError as e:
        return Rival(name, version, None, None, None, f"failed: {(e.stderr.strip().splitlines() or ['without a word'])[-1]}")
    laps = json.loads(told.stdout.splitlines()[-1])[1:]
    round_ms, bare_ms = (1e3 * statistics.median(column) for column in zip(*laps, strict=True))
    return Rival(name, version, round_ms, bare_ms, statistics.median(b / a for a, b in laps), RIVALS[name][2])


class Plain(nn.Module):
    """The shared network as other frameworks want it: logits alone, a loss and metrics."""

    def __init__(self) -> None:
        super().__init__()
        work = WORKS[SHARED]
        self.inner = work.network.build_module(work.shape, work.classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x)[0]
        return logits

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        return F.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor, eval: bool = False) -> dict[str, float]:
        return {}


@cache
def share(client: int, device: str) -> tuple[Tensor, Tensor]:
    """One client's samples of the shared work."""
    work, g = WORKS[SHARED], torch.Generator().manual_seed(client)
    n = work.steps * work.batch
    return torch.randn(n, *work.shape, generator=g).to(device), torch.randint(work.classes, (n,), generator=g).to(device)


class Laps:
    """Seconds between calls, and after each those of the loop by hand."""

    def __init__(self, device: str) -> None:
        self.device, self.pairs = torch.device(device), list[tuple[float, float]]()
        house = build(configured(SHARED, EngineSettings(name="sequential", device=device)))
        self.hand = Hand(house)
        self.batches = self.hand.batches(house.fed.eligible.tolist(), 1)
        self.last = time.perf_counter()

    def __call__(self) -> None:
        settle(self.device)
        lap = time.perf_counter() - self.last
        self.pairs.append((lap, timed(self.device, lambda: self.hand.round(self.batches))))
        self.last = time.perf_counter()


def with_pfl(rounds: int, device: str) -> list[tuple[float, float]]:
    """pfl-research's simulated backend, its users' data on the device."""
    load, work = importlib.import_module, WORKS[SHARED]
    load("pfl.internal.ops.selector").set_framework_module(load("pfl.internal.ops.pytorch_ops"))
    algorithm, hyper, data = (load(f"pfl.{name}") for name in ("algorithm.base", "hyperparam.base", "data.dataset"))
    callback, metrics = load("pfl.callback.base").TrainingProcessCallback, load("pfl.metrics").Metrics
    net, laps = Plain().to(device), Laps(device)

    def lap(self: Any, aggregate: Any, model: Any, *, central_iteration: int) -> tuple[bool, Any]:
        laps()
        return False, metrics()

    clock = type("Clock", (callback,), {"after_central_iteration": lap})
    model = load("pfl.model.pytorch").PyTorchModel(
        model=net, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(net.parameters(), 1.0)
    )
    users = load("pfl.data.sampling").get_user_sampler("minimize_reuse", list(range(work.clients)))
    one = lambda user: data.Dataset(raw_data=list(share(user, device)), user_id=str(user))
    held = load("pfl.data.federated_dataset").FederatedDataset(one, users)
    load("pfl.algorithm.federated_averaging").FederatedAveraging().run(
        algorithm_params=algorithm.NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**9, train_cohort_size=work.clients, val_cohort_size=0
        ),
        backend=load("pfl.aggregate.simulate").SimulatedBackend(
            training_data=held, val_data=held, postprocessors=[load("pfl.aggregate.weighting").WeightByUser()]
        ),
        model=model,
        model_train_params=hyper.NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=work.batch),
        model_eval_params=hyper.NNEvalHyperParams(local_batch_size=work.batch),
        callbacks=[clock()],
    )
    return laps.pairs


def with_fedlab(rounds: int, device: str) -> list[tuple[float, float]]:
    """FedLab's standalone pipeline with its serial trainer."""
    load, work, laps = importlib.import_module, WORKS[SHARED], Laps(device)
    from torch.utils.data import DataLoader, TensorDataset

    class Federated:
        def get_dataloader(self, client: int, batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
            return DataLoader(TensorDataset(*share(int(client), device)), batch_size=batch_size, shuffle=True)

    cuda = device != "cpu"
    trainer = load("fedlab.contrib.algorithm.basic_client").SGDSerialClientTrainer(Plain(), work.clients, cuda=cuda)
    trainer.setup_dataset(Federated())
    trainer.setup_optim(1, work.batch, LR)
    handler = load("fedlab.contrib.algorithm.basic_server").SyncServerHandler(Plain(), rounds, sample_ratio=1.0, cuda=cuda)
    handler.round_clients = work.clients  # which it would take for one, or not know, by version
    pipeline = load("fedlab.core.standalone").StandalonePipeline(handler, trainer)
    pipeline.evaluate = laps
    pipeline.main()
    return laps.pairs


def with_flwr(rounds: int, device: str) -> list[tuple[float, float]]:
    """Flower's simulation: clients in Ray actors, one for every core or four for a GPU."""
    load, work, laps = importlib.import_module, WORKS[SHARED], Laps(device)
    records, client, server = load("flwr.app"), load("flwr.clientapp").ClientApp(), load("flwr.serverapp").ServerApp()

    @client.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        from askew.experiment import bench  # the actor's own, whose samples stay between rounds

        torch.set_num_threads(1)
        x, y = bench.share(int(context.node_config["partition-id"]), device)
        net = bench.Plain()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        net.to(device)
        optimiser = torch.optim.SGD(net.parameters(), lr=LR)
        for index in torch.split(torch.randperm(len(y), device=device), work.batch):
            optimiser.zero_grad()
            torch.autograd.backward(net.loss(x[index], y[index]))
            optimiser.step()
        arrays = records.ArrayRecord({n: p.cpu() for n, p in net.state_dict().items()})
        told = {"arrays": arrays, "metrics": records.MetricRecord({"num-examples": len(y)})}
        return records.Message(content=records.RecordDict(told), reply_to=message)

    def lap(self: Any, server_round: int, replies: Any) -> Any:
        done = averaging.aggregate_train(self, server_round, replies)
        laps()
        return done

    averaging = load("flwr.serverapp.strategy").FedAvg
    strategy = type("Timed", (averaging,), {"aggregate_train": lap})

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        start = records.ArrayRecord(Plain().state_dict())
        strategy(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=work.clients).start(
            grid=grid, initial_arrays=start, num_rounds=rounds
        )

    load("flwr.simulation").run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=work.clients,
        backend_config={"client_resources": {"num_cpus": 1.0, "num_gpus": 0.0 if device == "cpu" else 0.25}},
    )
    return laps.pairs


# name: what it needs besides, how it is run, what to say of it
RIVALS: dict[str, tuple[tuple[str, ...], Callable[[int, str], list[tuple[float, float]]], str]] = {
    "pfl": ((), with_pfl, "simulated backend, one process"),
    "fedlab": ((), with_fedlab, "standalone pipeline, one process"),
    "flwr": (("ray",), with_flwr, "simulation, Ray actors of one thread each"),
}


if __name__ == "__main__":
    which, count, where = sys.argv[1:]
    torch.set_num_threads(1)
    print(json.dumps(RIVALS[which][1](int(count) + 1, where)))
