"""askew beside other frameworks: the same rounds in each of them, with two cores, taking turns round by round.

    python benchmarks/rivals.py --rival pfl=PYTHON --rival fedlab=PYTHON --rival flgo=PYTHON --rival flwr=PYTHON

PYTHON is the interpreter of an environment that has the framework, the torch of this one, and safetensors for askew's
networks. A round trains 10 of 100 clients: the same networks, as many samples, batches and steps, the same SGD;
evaluation is left out. Samples are random numbers; of the workload `mnist` they are that dataset's images, where its
files are there (ASKEW_DATA says where), which others hold as normalised numbers. Every contender is tried in all its
ways to use two cores, and shown in its fastest. All of them are alive at once, so that a busy machine disturbs them
alike, each with its own samples: with four rivals LeNet5 takes 16 GB.

*Products alone* is no framework: a dense network's products of matrices and nothing else, which nobody can leave out.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import askew
from askew.bench.baselines import LogitsNetwork, client_samples
from askew.bench.workloads import LR, RandomSamples, find_workload
from askew.data import files
from askew.engine.process_group import process_group
from askew.errors import did_you_mean
from askew.experiment.build import build
from askew.experiment.config import Config
from askew.experiment.process_state import torch_state
from askew.experiment.process_tuning import tune_process

CLIENTS = 100  # of which as many as a workload has take part in a round
FOREVER = 10**6  # rounds; the process that asks for them ends it
WORKLOADS = {  # by the names of the command line: title, and the workload of `askew bench`
    "lenet": ("LeNet5, 10 steps of 50", "lenet-10x10x50"),
    "softmax": ("softmax regression, 10 steps of 10", "softmax-10x10x10"),
    "small": ("MLP 64-64-10, 10 steps of 10", "mlp64-10x10x10"),
    "mlp": ("MLP 784-200-200-10, 12 steps of 50", "mlp-10x12x50"),
    "mnist": ("the same on MNIST", "mnist-10x12x50"),
}

NextRound = Callable[[], None]  # called after every round; returns when the next one may begin


class Way(NamedTuple):
    """A way to use two cores."""

    title: str
    processes: int = 1
    threads: int = 1  # of each process
    clients: int = 1  # that the framework itself trains side by side


ONE, THREADS, PROCESSES = Way("one thread"), Way("two threads", threads=2), Way("two processes", processes=2)


# what a contender's process does --------------------------------------------------------------------------------


@cache
def all_samples(name: str, first: int = 0, count: int = CLIENTS) -> list[tuple[Tensor, Tensor]]:
    """Inputs and labels of each client, all drawn before the first round ends."""
    return [client_samples(name, client, "cpu") for client in range(first, first + count)]


def train(net: LogitsNetwork, x: Tensor, y: Tensor, batch: int) -> None:
    optimiser = torch.optim.SGD(net.parameters(), lr=LR)
    for index in torch.split(torch.randperm(len(y)), batch):
        optimiser.zero_grad()
        net.loss(x[index], y[index]).backward()
        optimiser.step()


def with_askew(name: str, way: Way, next_round: NextRound) -> None:
    workload, group = find_workload(name), process_group()
    tables = {
        "data": RandomSamples(
            samples=CLIENTS * workload.steps * workload.batch,
            shape=workload.shape,
            classes=workload.classes,
            images=workload.images,
        ),
        "partition": {"name": "iid", "clients": CLIENTS},
        "participation": {"cohort": workload.clients},
        "model": workload.network,
        "local": {"batch": workload.batch, "lr": LR},
        "engine": {"device": "cpu", "workers": way.processes},
        "rounds": FOREVER,
    }
    config = Config.build(tables)
    with torch_state(config, group):
        built = build(config, group=group)
        fed, server = built.fed, built.server
        cohort = lambda t: config.participation.sample(config.seed, t, fed.eligible, fed.clients).tolist()
        for t in range(1, FOREVER):
            server.run_round(t, cohort(t), meanwhile=lambda t=t: server.prepare(t + 1, cohort(t + 1)))
            next_round()


def plain_loop(name: str, way: Way, next_round: NextRound) -> None:
    workload, net = find_workload(name), LogitsNetwork(name)
    start = {n: p.clone() for n, p in net.state_dict().items()}
    while True:
        mean = {n: torch.zeros_like(p) for n, p in start.items()}
        for client in random.sample(range(CLIENTS), workload.clients):
            net.load_state_dict(start)
            train(net, *all_samples(name)[client], workload.batch)
            for n, p in net.state_dict().items():
                mean[n] += p / workload.clients
        start = mean
        next_round()


def with_pfl(name: str, way: Way, next_round: NextRound) -> None:
    from pfl.aggregate import simulate, weighting
    from pfl.algorithm import base, federated_averaging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data import dataset, federated_dataset, sampling
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.internal.ops import pytorch_ops, selector
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Clock(TrainingProcessCallback):
        def after_central_iteration(
            self, aggregate: Any, model: Any, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            next_round()
            return False, Metrics()

    selector.set_framework_module(pytorch_ops)
    workload, net, sgd = find_workload(name), LogitsNetwork(name), torch.optim.SGD
    user_data = lambda user: dataset.Dataset(raw_data=list(all_samples(name)[user]), user_id=str(user))
    data = federated_dataset.FederatedDataset(
        user_data, sampling.get_user_sampler("minimize_reuse", list(range(CLIENTS)))
    )
    rounds = {"central_num_iterations": FOREVER, "evaluation_frequency": 2 * FOREVER}
    federated_averaging.FederatedAveraging().run(
        algorithm_params=base.NNAlgorithmParams(**rounds, train_cohort_size=workload.clients, val_cohort_size=0),
        backend=simulate.SimulatedBackend(training_data=data, val_data=data, postprocessors=[weighting.WeightByUser()]),
        model=PyTorchModel(model=net, local_optimizer_create=sgd, central_optimizer=sgd(net.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=workload.batch
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=workload.batch),
        callbacks=[Clock()],
    )


def with_fedlab(name: str, way: Way, next_round: NextRound) -> None:
    """Its pipeline in one process; in three, a server and two that hold half of the clients each."""
    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler
    from fedlab.core.client.manager import PassiveClientManager
    from fedlab.core.network import DistNetwork
    from fedlab.core.server.manager import SynchronousServerManager
    from fedlab.core.standalone import StandalonePipeline

    workload, rank, holders = find_workload(name), int(os.environ["RANK"]), max(way.processes - 1, 1)
    clients_each = CLIENTS // holders

    class Data:
        def get_dataloader(self, client: int, batch_size: int) -> DataLoader[Any]:
            samples = all_samples(name, max(rank - 1, 0) * clients_each, clients_each)
            return DataLoader(TensorDataset(*samples[int(client)]), batch_size=batch_size, shuffle=True)

    class Server(SyncServerHandler):
        def sample_clients(self) -> list[int]:  # as many of each holder, so that none waits for the other
            count = workload.clients // holders
            return [clients_each * h + i for h in range(holders) for i in random.sample(range(clients_each), count)]

        def global_update(self, buffer: Any) -> None:
            super().global_update(buffer)
            next_round()

    server, trainer = (
        Server(LogitsNetwork(name), FOREVER, workload.clients / CLIENTS),
        SGDSerialClientTrainer(LogitsNetwork(name), clients_each),
    )
    trainer.setup_dataset(Data())
    trainer.setup_optim(1, workload.batch, LR)
    if way.processes == 1:
        pipeline = StandalonePipeline(server, trainer)
        pipeline.evaluate = lambda: None
        pipeline.main()
    else:
        network = DistNetwork((os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]), way.processes, rank)
        (PassiveClientManager(network, trainer) if rank else SynchronousServerManager(network, server)).run()


def with_flgo(name: str, way: Way, next_round: NextRound) -> None:
    import flgo
    from flgo.algorithm import fedavg
    from flgo.benchmark.partition import IIDPartitioner
    from flgo.benchmark.toolkits.cv.classification import FromDatasetPipe

    class Timed:
        Client = fedavg.Client

        class Server(fedavg.Server):
            def iterate(self) -> Any:
                result = super().iterate()
                next_round()
                return result

    # torch refuses its subsets of samples without this
    FromDatasetPipe.TaskDataset.__getitems__ = lambda self, places: [self[place] for place in places]
    workload, samples, net = find_workload(name), f"rivals.sample_pairs({name!r})", f"rivals.LogitsNetwork({name!r})"
    Path("generated.py").write_text(f"import rivals\ntrain_data = test_data = {samples}\nget_model = lambda: {net}\n")
    benchmark = flgo.gen_benchmark_from_file("noise", "generated.py", data_type="cv", task_type="classification")
    flgo.gen_task_by_(importlib.import_module(benchmark), IIDPartitioner(num_clients=CLIENTS), "task")
    option = {
        "num_rounds": FOREVER,
        "eval_interval": 2 * FOREVER,
        "proportion": workload.clients / CLIENTS,
        "num_epochs": 1,
        "train_holdout": 0.0,
    }
    option |= {
        "batch_size": workload.batch,
        "learning_rate": LR,
        "learning_rate_decay": 1.0,
        "torch_num_threads": way.threads,
    }
    option |= {"num_parallels": way.clients, "parallel_type": "t", "no_tqdm": True, "no_log_console": True}
    flgo.init("task", Timed, option).run()


def sample_pairs(name: str) -> list[tuple[Tensor, int]]:
    """All clients' samples, one by one."""
    return [pair for x, y in all_samples(name) for pair in zip(x, y.tolist(), strict=True)]


def with_flwr(name: str, way: Way, next_round: NextRound) -> None:
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    workload, client, server = find_workload(name), ClientApp(), ServerApp()

    @client.train()
    def answer(message: Any, context: Any) -> Any:
        torch.set_num_threads(1)
        net, (x, y) = LogitsNetwork(name), all_samples(name)[int(context.node_config["partition-id"])]
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train(net, x, y, workload.batch)
        content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
        return Message(content=RecordDict(content), reply_to=message)

    class Timed(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            aggregated = super().aggregate_train(server_round, replies)
            next_round()
            return aggregated

    @server.main()
    def main(grid: Any, context: Any) -> None:
        strategy = Timed(fraction_train=workload.clients / CLIENTS, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        strategy.start(grid=grid, initial_arrays=ArrayRecord(LogitsNetwork(name).state_dict()), num_rounds=FOREVER)

    ray = {"num_cpus": way.clients, "include_dashboard": False, "log_to_driver": False}
    backend = {"client_resources": {"num_cpus": 1.0, "num_gpus": 0.0}, "init_args": ray}
    run_simulation(server_app=server, client_app=client, num_supernodes=CLIENTS, backend_config=backend)


def products(name: str, way: Way, next_round: NextRound) -> None:
    """The products of matrices alone: of every layer and step its output, its weights' gradient and its input's."""
    if way.processes > 1:
        dist.init_process_group("gloo")
    workload, layers = find_workload(name), list[tuple[Tensor, ...]]()
    for w in (layer.weight.detach() for layer in LogitsNetwork(name).modules() if isinstance(layer, nn.Linear)):
        x, y = torch.randn(workload.batch, w.shape[1]), torch.randn(workload.batch, w.shape[0])
        layers.append((w, x, y, torch.empty_like(w), torch.empty_like(x), torch.empty_like(y)))
    while True:
        for _ in range(workload.clients // way.processes * workload.steps):
            for i, (w, x, y, dw, dx, out) in enumerate(layers):
                torch.mm(x, w.T, out=out)
                torch.mm(y.T, x, out=dw)
                if i:
                    torch.mm(y, w, out=dx)
        if way.processes > 1:
            dist.barrier()
        next_round()


class Contender(NamedTuple):
    """A framework, or a loop, and the ways in which it can use two cores."""

    title: str
    run: Callable[[str, Way, NextRound], None]
    ways: tuple[Way, ...]
    packages: tuple[str, ...] = ()  # of a rival, itself first


CONTENDERS = {
    "askew": Contender("askew", with_askew, (ONE, PROCESSES)),
    "loop": Contender("plain loop", plain_loop, (ONE, THREADS)),
    "pfl": Contender("pfl", with_pfl, (ONE, THREADS, PROCESSES), ("pfl",)),
    "fedlab": Contender(
        "FedLab", with_fedlab, (ONE, THREADS, Way("two processes and a server", processes=3)), ("fedlab",)
    ),
    "flgo": Contender("FLGo", with_flgo, (ONE, THREADS, Way("two clients at once", clients=2)), ("flgo",)),
    "flwr": Contender("Flower", with_flwr, (Way("two actors", clients=2),), ("flwr", "ray")),
    "products": Contender("products alone", products, (ONE, THREADS, PROCESSES)),
}
RIVALS = [key for key, contender in CONTENDERS.items() if contender.packages]


def contend(key: str, name: str, way: Way) -> None:
    """All that a contender's process does: it prints the seconds of every round and waits to be asked for the next."""
    answers, began = os.fdopen(os.dup(1), "w"), time.perf_counter()
    os.dup2(2, 1)  # what a framework prints is no answer

    def next_round() -> None:
        nonlocal began
        if os.environ["RANK"] == "0":
            print(time.perf_counter() - began, file=answers, flush=True)
        if not sys.stdin.readline():
            os._exit(0)  # nobody asks any more; a framework's threads would go on
        began = time.perf_counter()

    torch.set_num_threads(way.threads)
    tune_process()  # which askew does for itself: nobody shall be slower for the lack of it
    CONTENDERS[key].run(name, way, next_round)


# the parent, which starts the contenders and asks them for rounds -----------------------------------------------

ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parent.resolve(), Path(askew.__file__).parent.parent))),
    "GLOO_SOCKET_IFNAME": next(name for _, name in socket.if_nameindex() if name.startswith("lo")),
    "THP_MEM_ALLOC_ENABLE": "1",  # which askew gives its own processes: nobody shall be slower for the lack of it
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def last_line(text: str) -> str:
    """The last line of what a process printed."""
    return (text.strip().splitlines() or ["without a word"])[-1]


class RunningContender:
    """A contender in one of its ways: its processes, which wait between rounds, and the milliseconds of its rounds."""

    def __init__(self, key: str, name: str, way: Way, python: str, folder: Path) -> None:
        self.key, self.way, self.log, self.laps = key, way, folder / "log", list[float]()
        with socket.create_server(("127.0.0.1", 0)) as free:
            group = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free.getsockname()[1]),
                "WORLD_SIZE": str(way.processes),
            }
        group |= {"TORCHELASTIC_RUN_ID": "rivals"} if way.processes > 1 else {}  # pfl looks for it
        command = [python, "-W", "ignore", "-c", f"import rivals; rivals.contend({key!r}, {name!r}, rivals.{way!r})"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        folder.mkdir()
        self.processes = list[subprocess.Popen[str]]()
        for rank in map(str, range(way.processes)):
            env = ENVIRONMENT | group | {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": str(way.threads)}
            with self.log.open("a") as log:
                self.processes.append(
                    subprocess.Popen(command, env=env, cwd=folder, stderr=log, start_new_session=True, **pipes)
                )

    def answer(self) -> float:
        """Milliseconds of the round that was asked for, once it is over."""
        output = self.processes[0].stdout
        while not select.select([output], [], [], 1.0)[0] and all(p.poll() is None for p in self.processes):
            pass
        if any(process.poll() is not None for process in self.processes):
            raise ChildProcessError(f"{self.key} with {self.way.title} ended early: {last_line(self.log.read_text())}")
        return 1e3 * float(output.readline())

    def time_round(self) -> None:
        """Ask for a round, and add its milliseconds to the laps."""
        for process in self.processes:
            with suppress(BrokenPipeError):  # it has ended, which `answer` reports
                process.stdin.write("go\n")
                process.stdin.flush()
        self.laps.append(self.answer())

    def end(self) -> None:
        """Kill the processes and all that they started."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def measure(name: str, pythons: dict[str, str], rounds: int) -> dict[str, tuple[float, str]]:
    """Of each contender the median of its fastest way, in milliseconds a round, and that way."""
    running = list[RunningContender]()
    with tempfile.TemporaryDirectory(prefix="rivals-", ignore_cleanup_errors=True) as folder:
        try:
            for key, python in pythons.items():
                for way in CONTENDERS[key].ways:
                    print(f"{name}: {key} with {way.title}", file=sys.stderr)
                    running.append(RunningContender(key, name, way, python, Path(folder, f"{len(running)}")))
                    running[-1].answer()  # the first round, which is not counted
            for t in range(rounds):
                first = t % len(running)
                for contender in running[first:] + running[:first]:
                    contender.time_round()
        finally:
            for contender in running:
                contender.end()
    return {key: min((statistics.median(c.laps), c.way.title) for c in running if c.key == key) for key in pythons}


def version(key: str, python: str) -> str:
    """A rival's version; ValueError if its environment lacks something."""
    code = "import sys, importlib.metadata as m, askew.bench.baselines; print(*map(m.version, sys.argv[1:]))"
    command, ours = [python, "-W", "ignore", "-c", code, "torch", *CONTENDERS[key].packages], metadata.version("torch")
    try:
        process = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    except OSError as e:
        raise ValueError(f"{key}: cannot start {python} ({e.strerror}); give a Python interpreter.") from None
    if process.returncode or not process.stdout:
        raise ValueError(f"{key}: {python} will not do ({last_line(process.stderr)}); install there what is missing.")
    theirs, found, *_ = process.stdout.split()
    if theirs != ours:
        raise ValueError(f"{key}: {python} has torch {theirs}, and askew's is {ours}; install the same one.")
    return found


def table_row(title: str, figures: dict[str, tuple[float, str]], columns: dict[str, str]) -> str:
    """A workload's row of the Markdown table."""
    cells = ["{:.3g} ({})".format(*figures[key]) if key in figures else "–" for key in columns]
    others = min(ms for key, (ms, _) in figures.items() if key not in ("askew", "products"))
    return f"| {title} | {' | '.join(cells)} | {others / figures['askew'][0]:.2f} |"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"rivals: {message}\n")


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rival", action="append", default=[], metavar="NAME=PYTHON", help=f"one of {', '.join(RIVALS)}; repeatable"
    )
    parser.add_argument("--work", action="append", choices=WORKLOADS, help="repeatable; all if none is given")
    parser.add_argument("--rounds", type=int, default=10, help="that each contender does after a first one")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be ≥ 1, got {options.rounds}; 10 is the default.")
    pythons = {key: sys.executable for key in CONTENDERS if key not in RIVALS}
    titles = {key: contender.title for key, contender in CONTENDERS.items()}
    for rival in options.rival:
        key, _, python = rival.partition("=")
        if key not in RIVALS or not python:
            parser.error(f"--rival must be NAME=PYTHON, got {rival!r}; {did_you_mean(key, RIVALS)}")
        python = str(Path(shutil.which(python) or python).absolute())  # contenders work in a folder of their own
        try:
            pythons[key], titles[key] = python, f"{CONTENDERS[key].title} {version(key, python)}"
        except ValueError as e:
            parser.error(str(e))
    pythons = {key: pythons[key] for key in CONTENDERS if key in pythons}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the contenders are ended too
    lines = [
        f"| ms a round | {' | '.join(titles[key] for key in pythons)} | times as fast as the fastest of the others |"
    ]
    lines.append(f"| --- |{' ---: |' * (len(pythons) + 1)}")
    possible = [key for key, (_, name) in WORKLOADS.items() if key != "mnist" or find_workload(name).images]
    if {*(options.work or [])} - {*possible}:
        parser.error(
            f"mnist: its files are not in {files.folder()}; run `askew data get mnist`, or leave this workload out."
        )
    for title, name in (WORKLOADS[key] for key in options.work or possible):
        dense = not name.startswith("lenet")  # whose convolutions are not products of matrices
        try:
            figures = measure(
                name, {key: python for key, python in pythons.items() if dense or key != "products"}, options.rounds
            )
        except ChildProcessError as e:
            parser.exit(1, f"rivals: {e}\n")
        lines.append(table_row(title, figures, pythons))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
