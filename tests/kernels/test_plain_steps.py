"""Plain SGD steps by kernels, of one network in place and of many rows at once, against the plain step."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from askew.algorithms import FedAvg
from askew.core.differentiate import differentiate
from askew.core.space import Space
from askew.core.task import Bound, Functional, Task, WithFeatures
from askew.core.types import Batch, Client, State
from askew.kernels.dense import DenseNetwork, dense_layers
from askew.models import networks


class WithNote(FedAvg):
    """FedAvg with a hook of its own in the step, which so is not known to be plain."""

    def note(self, theta: Tensor, g: Tensor, d: Tensor, client: Client) -> State:
        return {}


class Penalised(FedAvg):
    """FedAvg with a loss that depends on theta itself."""

    def loss(self, task: Task, theta: Tensor, batch: Batch, client: Client) -> Tensor:
        return task.loss(theta, batch) + 0.1 * (theta - client.w + 1).square().sum()


class OddLinears(nn.Module):
    """Linear layers that are called twice, with a third dimension, without a bias, never, or by their weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.bare, self.deep = nn.Linear(6, 6), nn.Linear(6, 4, bias=False), nn.Linear(3, 2)
        self.never, self.out, self.scale = nn.Linear(2, 2), nn.Linear(8, 3), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.twice(torch.tanh(self.twice(x * self.scale))))
        h = torch.cat([self.bare(h), self.deep(h.view(-1, 2, 3)).flatten(1)], 1)
        return self.out(h) + F.linear(x[:, :4], self.bare.weight[:3, :4]), h


class Reversed(nn.Sequential):
    """Layers that are run from the last to the first."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


def mlp(norm: str = "none") -> nn.Module:
    torch.manual_seed(0)
    return networks["mlp"].build({"hidden": [8], "norm": norm}).module((6,), 3)


def cnn() -> nn.Module:
    return networks["cnn"].build({}).module((1, 8, 8), 3)


def linears(*layers: nn.Module) -> nn.Module:
    """Two linear layers with others between them."""
    return WithFeatures(nn.Sequential(nn.Flatten(), nn.Linear(6, 5), *layers, nn.Linear(5, 3, bias=False)))


def make_client(space: Space, momentum: float = 0.0, decay: float = 0.0, clip: float = math.inf) -> Client:
    return Client(space.start, space.buffers, {}, {}, {}, {}, 0.1, 0.1, momentum, decay, clip, 3.0, 3.0, 1.0, 1, 0.5)


# one network ----------------------------------------------------------------------------------------------------------


# many networks --------------------------------------------------------------------------------------------------------

IN_TWO_PLACES = nn.ReLU()


@pytest.mark.parametrize(
    "module",
    [
        mlp(),
        linears(nn.Tanh(), nn.Sigmoid()),
        linears(nn.GELU(), nn.Identity()),
        linears(nn.GELU("tanh"), IN_TWO_PLACES, nn.Linear(5, 5), IN_TWO_PLACES),
    ],
    ids=["mlp", "tanh-sigmoid", "gelu", "gelu-relu-twice"],
)
@pytest.mark.parametrize("criterion", ["cross_entropy", "squared_error"])
@pytest.mark.parametrize("padded", [False, True])
def test_steps_of_many_rows_are_each_ones_own(module: nn.Module, criterion: str, padded: bool) -> None:
    """Gradients and steps in place of three of four rows, in C where that can be had and as products."""
    space = Space(module, torch.float64)
    client, task, bound = make_client(space), Functional(module, space, criterion), Bound(module, space, criterion)
    theta = space.start + 0.1 * torch.randn(4, space.P, dtype=torch.float64)
    x = torch.randn(4, 5, 2, 3, dtype=torch.float64)
    y = torch.randint(0, 3, (4, 5)) if criterion == "cross_entropy" else torch.randn(4, 5, 3, dtype=torch.float64)
    weight = (torch.arange(5) < torch.tensor([[5], [3], [1], [4]])).double() if padded else None
    three = Batch(x[:3], y[:3], None if weight is None else weight[:3])
    in_c, products = DenseNetwork.of(task), DenseNetwork.of(task)
    assert in_c is not None and products is not None
    products.kernel = None
    for dense in (in_c, products):
        new = theta.clone()
        gradients, values = dense.gradients(theta[:3], three)
        torch.testing.assert_close(dense.plain_steps(new[:3], three, client), values, rtol=1e-12, atol=0)
        for i in range(3):
            batch = Batch(x[i], y[i], None if weight is None else weight[i])
            g, value, _ = differentiate(bound, lambda u, batch=batch: bound.loss(u, batch), theta[i], space.buffers)
            torch.testing.assert_close(gradients[i], g, rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(new[i], theta[i] - 0.1 * g, rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(values[i], value, rtol=1e-12, atol=0)
        assert torch.equal(new[3], theta[3])  # a row without a batch


def test_networks_that_are_not_linear_layers_in_a_row_are_not_dense() -> None:
    assert [name for name, _ in dense_layers(mlp())] == ["flat", "fc1", "fc_relu1", "out"]
    assert [name for name, _ in dense_layers(linears(nn.ReLU()))] == ["module.0", "module.1", "module.2", "module.3"]
    frozen = linears(nn.ReLU())
    frozen.get_submodule("module.1").requires_grad_(False)
    others = [frozen, mlp("batch"), OddLinears(), linears(nn.LayerNorm(5)), linears(nn.Sequential(nn.Linear(5, 5)))]
    others += [WithFeatures(Reversed(nn.Linear(5, 3), nn.Linear(6, 5))), cnn()]
    others += [WithFeatures(nn.Sequential(nn.Flatten(2), nn.Linear(3, 3)))]
    shared, tied = nn.Linear(5, 5), linears(nn.Linear(5, 5), nn.Linear(5, 5))
    tied.get_submodule("module.2").weight = tied.get_submodule("module.3").weight
    others += [linears(shared, shared), tied]  # weights of two layers
    others += [linears(nn.Tanh(), nn.ReLU(inplace=True))]  # an output that changes
    others += [WithFeatures(nn.Sequential(nn.Linear(3, 2), nn.Flatten(), nn.Linear(4, 3)))]  # the first is not flat
    for module in others:
        assert not dense_layers(module)


@pytest.mark.parametrize("kind", [Functional, Bound])
def test_networks_in_bfloat16_are_left_to_torch(kind: type[Task]) -> None:
    assert DenseNetwork.of(kind(mlp(), Space(mlp()), bf16=True)) is None
