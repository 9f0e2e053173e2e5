"""Networks: parameters counted by hand, features, norms, and torch.func."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

from askew.errors import ConfigError, ModelError, UnknownName
from askew.models import CNN, MLP, LeNet, Network, Softmax, networks

IMAGES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]
EVERY = [Softmax(), Softmax(zeros=False), MLP(), MLP(hidden=(20, 12)), CNN(), LeNet()]
NORMED = [kind(norm=norm) for kind in (MLP, CNN, LeNet) for norm in ("batch", "group")]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(
    ("network", "shape", "classes", "expected"),
    [
        (Softmax(), (30,), 5, 30 * 5 + 5),  # 155
        (MLP(hidden=(200, 200)), (1, 28, 28), 10, 784 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10),  # 199,210
        (MLP(hidden=(100, 100)), (784,), 10, 89_610),
        (MLP(norm="batch"), (30,), 5, 30 * 64 + 64 + 2 * 64 + 64 * 5 + 5),
        (CNN(), (1, 8, 8), 10, (9 * 16 + 16) + (9 * 16 * 32 + 32) + (2 * 2 * 32 * 64 + 64) + (64 * 10 + 10)),  # 13,706
        (CNN(width=8), (3, 32, 32), 10, (27 * 8 + 8) + (9 * 8 * 16 + 16) + (8 * 8 * 16 * 64 + 64) + 650),
        (CNN(norm="group"), (1, 8, 8), 10, 13_706 + 2 * 16 + 2 * 32),
        (LeNet(), (1, 28, 28), 10, 44_426),
        (LeNet(), (3, 32, 32), 10, 62_006),
        (LeNet(), (1, 8, 8), 10, (25 * 6 + 6) + (25 * 6 * 16 + 16) + (2 * 2 * 16 * 120 + 120) + (120 * 84 + 84) + (84 * 10 + 10)),
        (LeNet(norm="batch"), (3, 32, 32), 10, 62_006 + 2 * 6 + 2 * 16),
    ],
)
def test_parameters_counted_by_hand(network: Network, shape: tuple[int, ...], classes: int, expected: int) -> None:
    assert count(network.module(shape, classes)) == expected


@pytest.mark.parametrize("shape", IMAGES)
@pytest.mark.parametrize("network", EVERY + NORMED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_features_are_the_input_of_the_last_layer(network: Network, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    module = network.module(shape, 10).to(dtype)
    x = torch.rand(5, *shape, dtype=dtype)
    before = x.clone()
    logits, features = module(x)
    assert logits.shape == (5, 10) and features.ndim == 2 and logits.dtype == dtype
    assert torch.equal(module.out(features), logits)
    assert torch.equal(x, before)
    assert not torch.equal(features[0], features[1])


def test_softmax_starts_at_zero_unless_told() -> None:
    x = torch.rand(3, 1, 4, 4)
    logits, features = Softmax().module((1, 4, 4), 3)(x)
    assert logits.abs().max() == 0
    assert torch.equal(features, x.reshape(3, 16))
    assert Softmax(zeros=False).module((1, 4, 4), 3)(x)[0].abs().max() > 0


def test_layers_bear_their_names() -> None:
    assert list(dict(LeNet().module((1, 28, 28), 10).named_parameters())) == [
        f"{layer}.{part}" for layer in ("conv1", "conv2", "fc1", "fc2", "out") for part in ("weight", "bias")
    ]
    named = dict(MLP(hidden=(8, 8), norm="batch").module((4,), 2).named_modules())
    assert {"fc1", "fc_norm1", "fc2", "fc_norm2", "out"} <= set(named)
    assert {"conv1", "norm1", "conv2", "norm2", "fc1", "out"} <= set(dict(CNN(norm="group").module((1, 8, 8), 2).named_modules()))


def test_an_mlp_is_its_formula() -> None:
    module = MLP(hidden=(6, 5)).module((4,), 3).double()
    x = torch.randn(7, 4, dtype=torch.float64)
    w = dict(module.named_parameters())
    h = (x @ w["fc1.weight"].T + w["fc1.bias"]).relu()
    h = (h @ w["fc2.weight"].T + w["fc2.bias"]).relu()
    logits, features = module(x)
    assert torch.allclose(features, h) and torch.allclose(logits, h @ w["out.weight"].T + w["out.bias"])


def test_initialisation_is_that_of_torch() -> None:
    torch.manual_seed(0)
    module = MLP(hidden=(6,)).module((4,), 3)
    torch.manual_seed(0)
    first, last = nn.Linear(4, 6), nn.Linear(6, 3)
    assert torch.equal(module.fc1.weight, first.weight) and torch.equal(module.out.bias, last.bias)


@pytest.mark.parametrize("network", [*EVERY, MLP(norm="group"), CNN(norm="group"), LeNet(norm="group")])
def test_gradients_under_vmap_are_those_of_a_loop(network: Network) -> None:
    shape = (1, 8, 8)
    modules = [network.module(shape, 4).double() for _ in range(3)]
    stacked, _ = stack_module_state(modules)
    x, y = torch.rand(3, 5, *shape, dtype=torch.float64), torch.randint(4, (3, 5))

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(modules[0], parameters, (x,))[0], y)

    many = vmap(grad(loss))(stacked, x, y)
    for i, module in enumerate(modules):
        nn.functional.cross_entropy(module(x[i])[0], y[i]).backward()
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            assert torch.allclose(many[name][i], parameter.grad, atol=1e-12)


@pytest.mark.parametrize("kind", [MLP, CNN, LeNet])
def test_batch_norm_learns_statistics_and_group_norm_has_none(kind: type[Network]) -> None:
    batch, group, none = (kind(norm=norm).module((1, 8, 8), 4) for norm in ("batch", "group", "none"))
    x = 3 + 2 * torch.randn(16, 1, 8, 8)
    start = {name: buffer.clone() for name, buffer in batch.named_buffers()}
    batch(x)
    moved = [name for name, buffer in batch.named_buffers() if not torch.equal(buffer, start[name])]
    assert len(moved) == len(start) > 0
    assert not list(group.buffers()) and not list(none.buffers())
    # Group norm treats each sample alone; batch norm does not.
    assert torch.allclose(group(x)[0][:4], group(x[:4])[0], atol=1e-5)
    assert not torch.allclose(batch(x)[0][:4], batch(x[:4])[0], atol=1e-3)
    # Group norm forgets the scale of what enters it (there is no bias to tell): doubling the first layer changes nothing.
    first = next(iter(group.named_parameters()))[0].split(".")[0]
    before = group(x)[0]
    with torch.no_grad():
        for parameter in group.get_submodule(first).parameters():
            parameter.mul_(2)
    assert torch.allclose(group(x)[0], before, atol=1e-3)


def test_a_regression_has_one_output() -> None:
    assert Softmax().module((30,), 0)(torch.rand(2, 30))[0].shape == (2, 1)


@pytest.mark.parametrize("network", [CNN(), LeNet()])
@pytest.mark.parametrize("shape", [(30,), (8, 8), (1, 3, 8), (2, 3, 8, 8)])
def test_convolutions_refuse_what_is_no_image(network: Network, shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ModelError, match=r"(cnn|lenet) needs images \[channels, height, width\] of 4×4 pixels or more, got .*; use mlp or softmax"
    ):
        network.module(shape, 10)


@pytest.mark.parametrize("network", [CNN(), LeNet()])
@pytest.mark.parametrize("side", [4, 5, 12, 15, 16, 17, 33])
def test_convolutions_take_any_image_of_four_pixels_or_more(network: Network, side: int) -> None:
    assert network.module((2, side, side + 1), 3)(torch.rand(2, 2, side, side + 1))[0].shape == (2, 3)


def test_settings_are_refused() -> None:
    with pytest.raises(UnknownName, match="CNN: unknown norm 'bach'; did you mean 'batch'"):
        CNN(norm="bach")
    with pytest.raises(ConfigError, match='CNN: norm = "group" needs an even width, got 7; try 8'):
        CNN(norm="group", width=7)
    with pytest.raises(ConfigError, match='MLP: norm = "group" needs even widths ≥ 4'):
        MLP(norm="group", hidden=(64, 2))
    for hidden in ((), (0,)):
        with pytest.raises(ConfigError, match="MLP: hidden must be one width ≥ 1 or several"):
            MLP(hidden=hidden)
    with pytest.raises(ModelError, match="at least one number"):
        Softmax().module((0,), 2)


@pytest.mark.parametrize("name", list(networks))
def test_every_network_is_built_from_a_table(name: str) -> None:
    network = networks[name].build({})
    assert network.idea and networks[name].build(network.table()) == network
