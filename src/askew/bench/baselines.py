"""Loops that are not ours: the one that one would write by hand, and other frameworks' at the same work.

No run uses anything of this file; `bench` times it beside askew's rounds.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..data import sources
from ..data.dataset import Samples
from ..experiment.build import BuiltRun
from ..models import CharLSTM
from .workloads import LR, work_of

Lap = Callable[[], None]  # called after every round


class PlainLoop:
    """The loop that one would write by hand: one client after another, and the mean of their weights by their samples."""

    def __init__(self, house: BuiltRun) -> None:
        self.house = house
        self.model = copy.deepcopy(house.module).to(house.space.device, house.space.dtype).train()
        self.start = {n: p.clone() for n, p in self.model.state_dict().items()}
        self.x = house.fed.inputs(house.fed.pool.x)  # as numbers, once for all

    def batches(self, ids: list[int], t: int) -> list[list[Tensor]]:
        """The places of each client's batches, on the device."""
        plan = self.house.fed.plan(ids, t, self.house.config.local)
        return [list(torch.split(work.places.to(self.house.space.device), work.lengths())) for work in plan.train]

    def round(self, clients: list[list[Tensor]]) -> dict[str, Tensor]:
        x, y, total = self.x, self.house.fed.pool.y, sum(len(index) for batches in clients for index in batches)
        mean = {n: torch.zeros_like(p) for n, p in self.start.items()}
        for batches in clients:
            self.model.load_state_dict(self.start)
            optimiser = torch.optim.SGD(self.model.parameters(), lr=LR)
            for index in batches:
                optimiser.zero_grad()
                with torch.autocast(x.device.type, torch.bfloat16, enabled=self.house.task.bf16):
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
        ratios = [
            (ours[n] - mean[n]).abs().max() / ((mean[n] - w).abs().max() + noise * w.abs().max())
            for n, w in start.items()
        ]
        return float(torch.stack(ratios).nan_to_num(0).max())  # 0/0: at zero, and neither moved


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


# other frameworks -----------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """A work's network as other frameworks want it: logits alone, a loss and metrics."""

    def __init__(self, name: str) -> None:
        super().__init__()
        work = work_of(name)
        self.inner = work.network.build_module(work.shape, work.classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x)[0]
        return logits

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        return F.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor, eval: bool = False) -> dict[str, float]:
        return {}


@cache
def share(name: str, client: int, device: str) -> tuple[Tensor, Tensor]:
    """One client's samples of a work on numbers."""
    work, g = work_of(name), torch.Generator().manual_seed(client)
    n = work.steps * work.batch
    if work.images:
        x, y = images(work.images)
        own = torch.arange(client * n, (client + 1) * n) % len(y)
        return x[own].to(device), y[own].to(device)
    return torch.randn(n, *work.shape, generator=g).to(device), torch.randint(work.classes, (n,), generator=g).to(
        device
    )


@cache
def images(name: str) -> Samples:
    """A dataset's, as numbers."""
    data = sources[name]().load(0, 1)
    assert data.transform is not None
    return Samples(data.transform(data.train.x, torch.float32), data.train.y)


def with_pfl(name: str, rounds: int, device: str, lap: Lap) -> None:
    """pfl-research's simulated backend, its users' data on the device."""
    load, work = importlib.import_module, work_of(name)
    load("pfl.internal.ops.selector").set_framework_module(load("pfl.internal.ops.pytorch_ops"))
    algorithm, hyper, data = (load(f"pfl.{part}") for part in ("algorithm.base", "hyperparam.base", "data.dataset"))
    callback, metrics = load("pfl.callback.base").TrainingProcessCallback, load("pfl.metrics").Metrics
    net = Plain(name).to(device)

    def ended(self: Any, aggregate: Any, model: Any, *, central_iteration: int) -> tuple[bool, Any]:
        lap()
        return False, metrics()

    clock = type("Clock", (callback,), {"after_central_iteration": ended})
    model = load("pfl.model.pytorch").PyTorchModel(
        model=net, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(net.parameters(), 1.0)
    )
    users = load("pfl.data.sampling").get_user_sampler("minimize_reuse", list(range(work.clients)))
    one = lambda user: data.Dataset(raw_data=list(share(name, user, device)), user_id=str(user))
    held = load("pfl.data.federated_dataset").FederatedDataset(one, users)
    load("pfl.algorithm.federated_averaging").FederatedAveraging().run(
        algorithm_params=algorithm.NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**9, train_cohort_size=work.clients, val_cohort_size=0
        ),
        backend=load("pfl.aggregate.simulate").SimulatedBackend(
            training_data=held, val_data=held, postprocessors=[load("pfl.aggregate.weighting").WeightByUser()]
        ),
        model=model,
        model_train_params=hyper.NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=work.batch
        ),
        model_eval_params=hyper.NNEvalHyperParams(local_batch_size=work.batch),
        callbacks=[clock()],
    )


def with_fedlab(name: str, rounds: int, device: str, lap: Lap) -> None:
    """FedLab's standalone pipeline with its serial trainer."""
    load, work = importlib.import_module, work_of(name)
    from torch.utils.data import DataLoader, TensorDataset

    class Federated:
        def get_dataloader(self, client: int, batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
            return DataLoader(TensorDataset(*share(name, int(client), device)), batch_size=batch_size, shuffle=True)

    cuda = device != "cpu"
    trainer = load("fedlab.contrib.algorithm.basic_client").SGDSerialClientTrainer(Plain(name), work.clients, cuda=cuda)
    trainer.setup_dataset(Federated())
    trainer.setup_optim(1, work.batch, LR)
    handler = load("fedlab.contrib.algorithm.basic_server").SyncServerHandler(
        Plain(name), rounds, sample_ratio=1.0, cuda=cuda
    )
    handler.round_clients = work.clients  # which it would take for one, or not know, by version
    pipeline = load("fedlab.core.standalone").StandalonePipeline(handler, trainer)
    pipeline.evaluate = lap
    pipeline.main()


def with_flwr(name: str, rounds: int, device: str, lap: Lap) -> None:
    """Flower's simulation: clients in Ray actors, as many as threads or four for a GPU."""
    load, work = importlib.import_module, work_of(name)
    records, client, server = load("flwr.app"), load("flwr.clientapp").ClientApp(), load("flwr.serverapp").ServerApp()

    @client.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        from askew.bench import baselines  # the actor's own, whose samples stay between rounds

        torch.set_num_threads(1)
        x, y = baselines.share(name, int(context.node_config["partition-id"]), device)
        net = baselines.Plain(name)
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

    def ended(self: Any, server_round: int, replies: Any) -> Any:
        done = averaging.aggregate_train(self, server_round, replies)
        lap()
        return done

    averaging = load("flwr.serverapp.strategy").FedAvg
    strategy = type("Timed", (averaging,), {"aggregate_train": ended})

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        start = records.ArrayRecord(Plain(name).state_dict())
        strategy(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=work.clients).start(
            grid=grid, initial_arrays=start, num_rounds=rounds
        )

    load("flwr.simulation").run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=work.clients,
        backend_config={
            "client_resources": {"num_cpus": 1.0, "num_gpus": 0.0 if device == "cpu" else 0.25},
            "init_args": {"num_cpus": torch.get_num_threads(), "include_dashboard": False, "log_to_driver": False},
        },
    )


class Framework(NamedTuple):
    """How another framework is given a work."""

    play: Callable[[str, int, str, Lap], None]
    needs: tuple[str, ...]  # packages, itself first
    how: str


FRAMEWORKS = {
    "pfl": Framework(with_pfl, ("pfl",), "simulated backend, one process"),
    "fedlab": Framework(with_fedlab, ("fedlab",), "standalone pipeline, one process"),
    "flwr": Framework(with_flwr, ("flwr", "ray"), "simulation, a Ray actor for each thread"),
}
