"""LSTM layers of many networks at once, against torch's LSTM of each."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import askew
from askew.core.space import Space
from askew.engine.choose import choose
from askew.kernels import batched_lstm
from askew.kernels.interface import Kernels
from askew.models import CharLSTM
from askew.models.lstm import LastOutputLSTM
from askew.models.network import use_kernels


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def reference(layers: list[LastOutputLSTM], x: Tensor, weight: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Each layer's last output in torch, and the gradients of its weighted sum by input and parameters."""
    outputs, gradients = list[Tensor](), list[tuple[Tensor, ...]]()
    for layer, own, each in zip(layers, x, weight, strict=True):
        leaf = own.clone().requires_grad_()
        y = layer(leaf)
        outputs.append(y.detach())
        gradients.append(torch.autograd.grad((y * each).sum(), [leaf, *layer.parameters()]))
    return torch.stack(outputs), [torch.stack(same) for same in zip(*gradients, strict=True)]


@pytest.mark.parametrize(
    ("groups", "batch", "times", "inputs", "units", "layers"),
    [(3, 5, 6, 4, 8, 2), (2, 3, 7, 1, 13, 3), (1, 1, 1, 3, 5, 1), (2, 17, 4, 3, 1, 2)],
)
def test_outputs_and_gradients(groups: int, batch: int, times: int, inputs: int, units: int, layers: int) -> None:
    """By autograd around vmap, and by vmap around a gradient."""
    networks = [LastOutputLSTM(inputs, units, layers, batch_first=True).double() for _ in range(groups)]
    assert batched_lstm.supports(networks[0])
    x, weight = torch.randn(groups, batch, times, inputs).double(), torch.randn(groups, batch, units).double()
    exact, exact_gradients = reference(networks, x, weight)
    stacked = [torch.stack(same).detach() for same in zip(*(n.parameters() for n in networks), strict=True)]

    def weighted(given: tuple[Tensor, ...], each: Tensor) -> tuple[Tensor, Tensor]:
        state = dict(zip(dict(networks[0].named_parameters()), given[1:], strict=True))
        y = functional_call(Read(networks[0]), {f"layer.{n}": t for n, t in state.items()}, (given[0],))
        return (y * each).sum(), y

    leaves = [t.clone().requires_grad_() for t in (x, *stacked)]
    value, y = vmap(weighted)(tuple(leaves), weight)
    torch.testing.assert_close(y.detach(), exact, rtol=1e-12, atol=1e-13)
    around = torch.autograd.grad(value.sum(), leaves)
    inside, _ = vmap(grad(weighted, has_aux=True))((x, *stacked), weight)
    for one, other, wanted in zip(around, inside, exact_gradients, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-11, atol=1e-12)
        assert torch.equal(one, other)


class Read(nn.Module):
    """A layer's output by kernels."""

    def __init__(self, layer: LastOutputLSTM) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return batched_lstm.last_output(x, self.layer)


def test_a_large_layer_of_one_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch is slow, training takes the kernels; evaluation does not, which would keep every time step."""
    plain = CharLSTM(hidden=64).module((9,), 6).double()
    x, y = torch.randint(6, (20, 9)), torch.randint(6, (20,))
    for on_arm in (False, True):
        monkeypatch.setattr(batched_lstm, "ON_ARM", on_arm)
        kernels = Kernels(torch.device("cpu"), torch.float64)
        fast = use_kernels(plain, kernels)
        with torch.no_grad():
            fast(x)
        assert not kernels.used
        gradients = [torch.autograd.grad(F.cross_entropy(n(x)[0], y), [*n.parameters()]) for n in (plain, fast)]
        assert kernels.used == ({"torch (LSTM layers)"} if on_arm else set())
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("extra", [{"bidirectional": True}, {"dropout": 0.5}, {"proj_size": 3}, {"bias": False}, {}])
def test_a_layer_with_extras_is_left_to_torch(extra: dict[str, bool | float]) -> None:
    layer = LastOutputLSTM(4, 8, 2, batch_first=True, **extra)  # type: ignore[arg-type]
    assert batched_lstm.supports(layer) is (not extra)
    assert not batched_lstm.supports(nn.LSTM(4, 8, 2, batch_first=True, **extra))  # type: ignore[arg-type]


def test_the_engine_of_an_lstm_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    module = CharLSTM(hidden=4).build_module((6,), 5)
    for there, dtype, lower, name in (
        (True, torch.float32, {}, "stacked"),
        (False, torch.float32, {}, "slots"),
        (True, torch.float64, {}, "slots"),
        (True, torch.float32, {"compiled": True}, "slots"),
        (True, torch.float32, {"bf16": True}, "slots"),
    ):
        monkeypatch.setattr(batched_lstm, "available", lambda there=there: there)
        space = Space(module)
        space.device, space.dtype = torch.device("cuda"), dtype
        choice = choose("auto", module, space, 10.0, **lower)
        assert (choice.name, choice.others) == (name, ("slots",) if name == "stacked" else ())


@pytest.mark.parametrize("engine", ["stacked", "vmapped"])
@pytest.mark.parametrize("method", ["fedavg", "moon", "scaffold", "fedspeed"])
def test_rows_equal_one_client_at_a_time(method: str, engine: str) -> None:
    """Clients of unequal size, so that batches are padded."""
    tokens = torch.randint(5, (60, 6)), torch.randint(5, (60,))
    settings = {
        "data": tokens,
        "model": {"name": "charlstm", "hidden": 7, "embedding": 3},
        "partition": {"clients": 5, "alpha": 0.5, "min_size": 1},
        "clients": 5,
        "rounds": 2,
        "local": {"batch": 8, "lr": 0.5, "momentum": 0.5},
    }
    one, other = (
        askew.run(method, engine={"name": name, "device": "cpu", "dtype": "float64"}, **settings)  # type: ignore[arg-type]
        for name in ("sequential", engine)
    )
    gaps = [float((other.model[n] - t).abs().max()) for n, t in one.model.items()]
    assert other.facts["engine"] == engine and 0 <= max(gaps) < 1e-12
