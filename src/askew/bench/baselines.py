"""What askew is timed against: a plain PyTorch loop, and other frameworks with the same workload.

No run uses anything of this file.
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
from .workloads import LR, find_workload

OnRoundEnd = Callable[[], None]  # called after every round


class PlainLoop:
    """FedAvg as one would write it by hand: one client after another, then the mean of their weights by samples."""

    def __init__(self, built: BuiltRun) -> None:
        self.built = built
        self.model = copy.deepcopy(built.module).to(built.space.device, built.space.dtype).train()
        self.start = {n: p.clone() for n, p in self.model.state_dict().items()}
        self.x = built.fed.inputs(built.fed.pool.x)  # as numbers, once for all

    def batches(self, ids: list[int], t: int) -> list[list[Tensor]]:
        """The sample indices of each client's batches in round t, on the device."""
        plan = self.built.fed.plan(ids, t, self.built.config.local)
        return [list(torch.split(work.places.to(self.built.space.device), work.lengths())) for work in plan.train]

    def round(self, clients: list[list[Tensor]]) -> dict[str, Tensor]:
        """Train every client on its batches from the first model, and return the mean of their weights by name."""
        x, y, total = self.x, self.built.fed.pool.y, sum(len(index) for batches in clients for index in batches)
        mean = {n: torch.zeros_like(p) for n, p in self.start.items()}
        for batches in clients:
            self.model.load_state_dict(self.start)
            optimiser = torch.optim.SGD(self.model.parameters(), lr=LR)
            for index in batches:
                optimiser.zero_grad()
                with torch.autocast(x.device.type, torch.bfloat16, enabled=self.built.task.bf16):
                    output = self.model(x[index])[0]
                torch.autograd.backward(F.cross_entropy(output.to(self.built.space.dtype), y[index]))
                optimiser.step()
            for n, p in self.model.state_dict().items():
                mean[n] += p * (sum(len(index) for index in batches) / total)
        return mean

    def difference(self, mean: dict[str, Tensor], w: Tensor) -> float:
        """How far the model w [P] is from `mean`, relative to how far that moved: the worst of all weights and biases.

        Those that hardly move at all, as an LSTM's first layer does, differ by rounding alone, which must not count.
        """
        space = self.built.space
        ours, start, noise = space.split(w), space.split(space.start), 100 * torch.finfo(space.dtype).eps
        ratios = [
            (ours[n] - mean[n]).abs().max() / ((mean[n] - first).abs().max() + noise * first.abs().max())
            for n, first in start.items()
        ]
        return float(torch.stack(ratios).nan_to_num(0).max())  # 0/0: at zero, and neither moved


@cache
def step_flops(name: str) -> int:
    """Floating-point operations of one batch's forward and backward pass, counted without computing anything."""
    workload = find_workload(name)
    with torch.device("meta"):
        model = workload.network.build_module(workload.shape, workload.classes)
        size = (workload.batch, *workload.shape)
        x = torch.zeros(size, dtype=torch.long) if isinstance(workload.network, CharLSTM) else torch.zeros(size)
        y = torch.zeros(workload.batch, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(F.cross_entropy(model(x)[0], y))
    return int(counter.get_total_flops())


# other frameworks -----------------------------------------------------------------------------------------------


class LogitsNetwork(nn.Module):
    """A workload's network as other frameworks want it: it returns logits alone, and has a loss and metrics."""

    def __init__(self, name: str) -> None:
        super().__init__()
        workload = find_workload(name)
        self.inner = workload.network.build_module(workload.shape, workload.classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x)[0]
        return logits

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        return F.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor, eval: bool = False) -> dict[str, float]:
        return {}


@cache
def client_samples(name: str, client: int, device: str) -> tuple[Tensor, Tensor]:
    """The inputs and labels of one client of a workload, for other frameworks."""
    workload, g = find_workload(name), torch.Generator().manual_seed(client)
    n = workload.steps * workload.batch
    if workload.images:
        x, y = dataset_images(workload.images)
        index = torch.arange(client * n, (client + 1) * n) % len(y)
        return x[index].to(device), y[index].to(device)
    x, y = torch.randn(n, *workload.shape, generator=g), torch.randint(workload.classes, (n,), generator=g)
    return x.to(device), y.to(device)


@cache
def dataset_images(name: str) -> Samples:
    """A dataset's training samples, its images as numbers."""
    data = sources[name]().load(0, 1)
    assert data.transform is not None
    return Samples(data.transform(data.train.x, torch.float32), data.train.y)


def with_pfl(name: str, rounds: int, device: str, on_round_end: OnRoundEnd) -> None:
    """pfl-research's simulated backend, its users' data on the device."""
    load, workload = importlib.import_module, find_workload(name)
    load("pfl.internal.ops.selector").set_framework_module(load("pfl.internal.ops.pytorch_ops"))
    algorithm, hyper, data = (load(f"pfl.{part}") for part in ("algorithm.base", "hyperparam.base", "data.dataset"))
    callback, metrics = load("pfl.callback.base").TrainingProcessCallback, load("pfl.metrics").Metrics
    net = LogitsNetwork(name).to(device)

    def ended(self: Any, aggregate: Any, model: Any, *, central_iteration: int) -> tuple[bool, Any]:
        on_round_end()
        return False, metrics()

    clock = type("Clock", (callback,), {"after_central_iteration": ended})
    model = load("pfl.model.pytorch").PyTorchModel(
        model=net, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(net.parameters(), 1.0)
    )
    users = load("pfl.data.sampling").get_user_sampler("minimize_reuse", list(range(workload.clients)))
    user_data = lambda user: data.Dataset(raw_data=list(client_samples(name, user, device)), user_id=str(user))
    dataset = load("pfl.data.federated_dataset").FederatedDataset(user_data, users)
    load("pfl.algorithm.federated_averaging").FederatedAveraging().run(
        algorithm_params=algorithm.NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**9,
            train_cohort_size=workload.clients,
            val_cohort_size=0,
        ),
        backend=load("pfl.aggregate.simulate").SimulatedBackend(
            training_data=dataset, val_data=dataset, postprocessors=[load("pfl.aggregate.weighting").WeightByUser()]
        ),
        model=model,
        model_train_params=hyper.NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=workload.batch
        ),
        model_eval_params=hyper.NNEvalHyperParams(local_batch_size=workload.batch),
        callbacks=[clock()],
    )


def with_fedlab(name: str, rounds: int, device: str, on_round_end: OnRoundEnd) -> None:
    """FedLab's standalone pipeline with its serial trainer."""
    load, workload = importlib.import_module, find_workload(name)
    from torch.utils.data import DataLoader, TensorDataset

    class Federated:
        def get_dataloader(self, client: int, batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
            return DataLoader(
                TensorDataset(*client_samples(name, int(client), device)), batch_size=batch_size, shuffle=True
            )

    cuda = device != "cpu"
    trainer = load("fedlab.contrib.algorithm.basic_client").SGDSerialClientTrainer(
        LogitsNetwork(name), workload.clients, cuda=cuda
    )
    trainer.setup_dataset(Federated())
    trainer.setup_optim(1, workload.batch, LR)
    handler = load("fedlab.contrib.algorithm.basic_server").SyncServerHandler(
        LogitsNetwork(name), rounds, sample_ratio=1.0, cuda=cuda
    )
    handler.round_clients = workload.clients  # which it would take for one, or not have, by version
    pipeline = load("fedlab.core.standalone").StandalonePipeline(handler, trainer)
    pipeline.evaluate = on_round_end
    pipeline.main()


def with_flwr(name: str, rounds: int, device: str, on_round_end: OnRoundEnd) -> None:
    """Flower's simulation: clients in Ray actors, as many as threads or four for a GPU."""
    load, workload = importlib.import_module, find_workload(name)
    records, client, server = load("flwr.app"), load("flwr.clientapp").ClientApp(), load("flwr.serverapp").ServerApp()

    @client.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        from askew.bench import baselines  # the actor's own, whose samples stay between rounds

        torch.set_num_threads(1)
        x, y = baselines.client_samples(name, int(context.node_config["partition-id"]), device)
        net = baselines.LogitsNetwork(name)
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        net.to(device)
        optimiser = torch.optim.SGD(net.parameters(), lr=LR)
        for index in torch.split(torch.randperm(len(y), device=device), workload.batch):
            optimiser.zero_grad()
            torch.autograd.backward(net.loss(x[index], y[index]))
            optimiser.step()
        arrays = records.ArrayRecord({n: p.cpu() for n, p in net.state_dict().items()})
        content = {"arrays": arrays, "metrics": records.MetricRecord({"num-examples": len(y)})}
        return records.Message(content=records.RecordDict(content), reply_to=message)

    def ended(self: Any, server_round: int, replies: Any) -> Any:
        aggregated = averaging.aggregate_train(self, server_round, replies)
        on_round_end()
        return aggregated

    averaging = load("flwr.serverapp.strategy").FedAvg
    strategy = type("Timed", (averaging,), {"aggregate_train": ended})

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        start = records.ArrayRecord(LogitsNetwork(name).state_dict())
        strategy(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=workload.clients).start(
            grid=grid, initial_arrays=start, num_rounds=rounds
        )

    load("flwr.simulation").run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=workload.clients,
        backend_config={
            "client_resources": {"num_cpus": 1.0, "num_gpus": 0.0 if device == "cpu" else 0.25},
            "init_args": {"num_cpus": torch.get_num_threads(), "include_dashboard": False, "log_to_driver": False},
        },
    )


class Framework(NamedTuple):
    """Another framework: the function that runs a workload in it, and the packages it needs."""

    run: Callable[[str, int, str, OnRoundEnd], None]  # of a workload's name, rounds, device
    needs: tuple[str, ...]  # packages, itself first
    how: str  # how it runs, for the table


FRAMEWORKS = {
    "pfl": Framework(with_pfl, ("pfl",), "simulated backend, one process"),
    "fedlab": Framework(with_fedlab, ("fedlab",), "standalone pipeline, one process"),
    "flwr": Framework(with_flwr, ("flwr", "ray"), "simulation, a Ray actor for each thread"),
}
