"""A program as a user writes it; a test checks that mypy --strict passes on it. It is not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import askew
from askew.algorithms import FedAvg


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(12, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.body(x).relu())
        return logits


@askew.register("typed_momentum")
class Momentum(askew.Algorithm):
    """The server's step has momentum."""

    paper = "ours"
    idea = "the server's step has momentum"
    broadcast = ("M",)

    beta: float = askew.setting("momentum of the server's step", default=0.5, least=0, below=1)

    def server_state(self, space: askew.Space) -> askew.State:
        return {"M": space.zeros()}

    def direction(self, theta: Tensor, grad: askew.Gradient, client: askew.Client) -> Tensor:
        return grad(theta) + 0.0 * client.server["M"]

    def finish(self, theta: Tensor, client: askew.Client) -> tuple[askew.State, askew.State]:
        return {"delta": theta - client.w}, client.state

    def aggregate(
        self, w: Tensor, up: askew.State, cohort: askew.Cohort, server: askew.State
    ) -> tuple[Tensor, askew.State]:
        M = self.beta * server["M"] + cohort.p @ up["delta"]
        return w + M, {"M": M}


class Head(FedAvg):
    """The last layer stays with its client."""

    needs = ("labels",)

    def private(self, space: askew.Space) -> askew.Part:
        return space.last_layers(1)

    def evaluates(self) -> str:
        return "clients"


@askew.register("typed_partition")
class OneClass(askew.Partition):
    idea = "one class a client"

    def split(
        self, labels: np.ndarray[Any, Any], seed: int, owner: np.ndarray[Any, Any] | None = None
    ) -> askew.Assignment:
        order = np.argsort(labels, kind="stable")
        return askew.Assignment(order, np.linspace(0, len(order), self.clients + 1).astype(np.int64))


def show(run: askew.Run, record: dict[str, Any] | None) -> None:
    print(run.name, record and record["round"])


def main() -> None:
    x, y = torch.randn(100, 12), torch.arange(100) % 4
    data = askew.Dataset(askew.Samples(x, y), askew.Samples(x, y), classes=4, owner=np.arange(100) % 5)
    run = askew.run(Momentum(beta=0.9), data=(x, y), model=Net, clients=5, rounds=2, lr=0.1, watch=show)
    best: float | None = run.best_accuracy
    rounds, values = run.curve("accuracy")
    figure = run.plot()
    figure.savefig("accuracy.png")
    print(best, rounds, values, run.facts["engine"], run.model["out.weight"].shape, run.frame())
    run = askew.run("fedavg", data=data, model=lambda: Net(8), partition={"name": "natural"}, engine="sequential")
    run = askew.run(Head, data=data, model=Net(8), local={"epochs": 2}, progress=False, out=Path("runs"))
    runs = askew.sweep("fedprox", over={"mu": [0.1, 1.0], "lr": (0.1, 0.01)}, seeds=3, data=data, model=Net)
    for each in runs:
        print(each.summary()["best_accuracy"])
    first: askew.Run = runs[0]
    some: askew.Runs = runs[:2]
    rows: list[dict[str, Any]] = askew.compare(some, first, "runs", target=0.8)
    page: Path = askew.report(runs, Path("more"), out="report", title="A comparison")
    config: askew.Config = askew.load_config("experiment.toml", overrides=["local.lr=0.1"])
    print(rows, page, config.toml(), askew.load("runs/name").final_accuracy, runs.plot("loss"), runs.table())


if __name__ == "__main__":
    try:
        main()
    except askew.AskewError as e:
        print(e)
