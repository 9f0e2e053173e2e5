"""Networks: their numbers of parameters, features, norms, heads and blocks against formulas, and torch.func."""

from __future__ import annotations

import copy
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from askew.core.space import BATCH_NORMS, Space
from askew.core.task import Bound, Functional
from askew.core.types import Batch
from askew.errors import ConfigError, ModelError, UnknownName
from askew.models import (
    CNN,
    CNN64,
    MLP,
    VGG19,
    CharLSTM,
    ConvNet,
    LeNet,
    LeNetPMVR,
    Network,
    ResNet18,
    ResNet50,
    Softmax,
    networks,
)
from askew.models.network import norm_layer, run_narrow
from askew.models.resnet import ResidualBlock

IMAGES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]
SMALL = [Softmax(), Softmax(zeros=False), MLP(), MLP(hidden=(20, 12)), CNN(), LeNet()]
WITH_NORM = [kind(norm=norm) for kind in (MLP, CNN, LeNet) for norm in ("batch", "group")]
LARGER = [
    (CNN64(), (1, 8, 8)),
    (LeNetPMVR(), (1, 17, 16)),
    (CharLSTM(), (6,)),
    (ResNet18(), (3, 8, 9)),
    (ResNet18(norm="batch", stem="imagenet"), (3, 64, 64)),
    pytest.param(VGG19(norm="none"), (3, 64, 64), marks=pytest.mark.slow),
    (VGG19(), (3, 32, 32)),
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def linear(*widths: int) -> int:
    return sum(a * b + b for a, b in pairwise(widths))


def conv(inputs: int, outputs: int, kernel: int) -> int:
    return kernel**2 * inputs * outputs + outputs


def basic(inputs: int, w: int) -> int:
    """A stage of two basic blocks: four 3×3 convolutions, their norms, and a 1×1 shortcut where the width changes."""
    return 9 * (inputs + 3 * w) * w + 4 * 2 * w + (inputs * w + 2 * w if inputs != w else 0)


def bottlenecks(inputs: int, w: int, blocks: int) -> int:
    return (inputs + 4 * w) * w + (blocks - 1) * 8 * w * w + blocks * (9 * w * w + 12 * w) + inputs * 4 * w + 8 * w


def inputs_for(shape: tuple[int, ...], count: int = 2, tokens: int = 10) -> Tensor:
    return torch.randint(tokens, (count, *shape)) if len(shape) == 1 else torch.rand(count, *shape)


RESNET18 = 2 * 64 + basic(64, 64) + basic(64, 128) + basic(128, 256) + basic(256, 512)  # without first and last layer
RESNET50 = (
    2 * 64 + bottlenecks(64, 64, 3) + bottlenecks(256, 128, 4) + bottlenecks(512, 256, 6) + bottlenecks(1024, 512, 3)
)
VGG = [(3, 64), (64, 64), (64, 128), (128, 128), (128, 256), *3 * [(256, 256)], (256, 512), *7 * [(512, 512)]]
CIFAR_CNN = conv(3, 6, 5) + conv(6, 16, 5) + linear(400, 120, 84)  # up to the features
CELL = 4 * 256  # rows of the four gates


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
        (
            LeNet(),
            (1, 8, 8),
            10,
            (25 * 6 + 6) + (25 * 6 * 16 + 16) + (2 * 2 * 16 * 120 + 120) + (120 * 84 + 84) + (84 * 10 + 10),
        ),
        (LeNet(norm="batch"), (3, 32, 32), 10, 62_006 + 2 * 6 + 2 * 16),
        (LeNet(padding=2), (1, 28, 28), 10, 61_706),
        (LeNet(head=256), (3, 32, 32), 10, CIFAR_CNN + linear(84, 84, 256, 10)),  # 92,626
        (LeNet(head=256), (3, 32, 32), 100, 115_756),
        (
            LeNetPMVR(),
            (1, 28, 28),
            10,
            conv(1, 6, 5) + conv(6, 6, 5) + linear(6, 120) + linear(16 * 120, 84, 10),
        ),  # 164,116
        (ConvNet(), (3, 32, 32), 10, conv(3, 32, 3) + conv(32, 32, 3) + linear(2048, 256, 64, 10)),  # 551,786
        (
            ConvNet(channels=(32,) * 4, hidden=(), padding=2, norm="instance"),
            (3, 32, 32),
            10,
            conv(3, 32, 3) + 3 * conv(32, 32, 3) + 4 * 64 + linear(288, 10),
        ),  # 31,786
        (CNN64(), (3, 32, 32), 10, conv(3, 64, 5) + conv(64, 64, 5) + linear(1600, 384, 192, 10)),  # 797,962
        (CNN64(), (3, 32, 32), 100, 815_332),
        (CNN64(), (3, 28, 28), 100, conv(3, 64, 5) + conv(64, 64, 5) + linear(1024, 384, 192, 100)),  # 594,148
        (CharLSTM(), (80,), 80, 80 * 8 + CELL * (8 + 256 + 2) + CELL * (256 + 256 + 2) + linear(256, 80)),  # 819,920
        (CharLSTM(), (80,), 90, 822_570),
        (ResNet18(), (3, 32, 32), 100, 9 * 3 * 64 + RESNET18 + linear(512, 100)),  # 11,220,132
        (ResNet18(), (3, 64, 64), 200, 11_271_432),
        (ResNet18(stem="imagenet"), (3, 64, 64), 200, 49 * 3 * 64 + RESNET18 + linear(512, 200)),  # 11,279,112
        (
            ResNet18(norm="batch", head=256),
            (3, 64, 64),
            200,
            9 * 3 * 64 + RESNET18 + linear(512, 512, 256, 200),
        ),  # 11,614,216
        (
            ResNet50(norm="batch", head=256),
            (3, 32, 32),
            10,
            9 * 3 * 64 + RESNET50 + linear(2048, 2048, 256, 10),
        ),  # 28,223,818
        (
            VGG19(norm="none"),
            (3, 32, 32),
            10,
            sum(conv(a, b, 3) for a, b in VGG) + linear(512, 512, 512, 10),
        ),  # 20,554,826
        (VGG19(), (3, 32, 32), 10, 20_554_826 + 2 * sum(b for _, b in VGG)),  # 20,565,834
    ],
)
def test_parameters_counted_by_hand(network: Network, shape: tuple[int, ...], classes: int, expected: int) -> None:
    with torch.device("meta"):  # shapes without numbers
        assert count(network.build_module(shape, classes)) == expected


def test_the_formulas_by_hand_give_the_papers_numbers() -> None:
    assert CIFAR_CNN + linear(84, 10) == 62_006 and CIFAR_CNN + linear(84, 84, 256, 10) == 92_626
    assert (
        9 * 3 * 64 + RESNET18 + linear(512, 100) == 11_220_132
        and 49 * 3 * 64 + RESNET18 + linear(512, 200) == 11_279_112
    )
    assert 9 * 3 * 64 + RESNET18 + linear(512, 512, 256, 200) == 11_614_216
    assert 9 * 3 * 64 + RESNET50 + linear(2048, 2048, 256, 10) == 28_223_818
    assert sum(conv(a, b, 3) for a, b in VGG) + linear(512, 512, 512, 10) == 20_554_826
    assert conv(1, 6, 5) + conv(6, 6, 5) + linear(6, 120) + linear(1920, 84, 10) == 164_116
    assert 80 * 8 + CELL * (8 + 256 + 2) + CELL * (256 + 256 + 2) + linear(256, 80) == 819_920
    assert conv(3, 64, 5) + conv(64, 64, 5) + linear(1024, 384, 192, 100) == 594_148


@pytest.mark.parametrize("shape", IMAGES)
@pytest.mark.parametrize("network", SMALL + WITH_NORM)
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


@pytest.mark.parametrize(
    ("network", "shape"), [*LARGER, pytest.param(ResNet50(norm="batch"), (3, 32, 32), marks=pytest.mark.slow)]
)
def test_larger_networks_are_functions_of_a_flat_vector(network: Network, shape: tuple[int, ...]) -> None:
    module = network.module(shape, 10)
    x, last = inputs_for(shape), [*module.children()][-1]
    space = Space(module)
    w = space.start + 0.01 * torch.randn(space.P)
    # copies, whose addresses are multiples of 64 as the module's own are: oneDNN's rounding depends on it with AVX2
    weights = {name: weight.clone() for name, weight in space.split(w).items()}
    logits, features = functional_call(module, weights, (x,))
    assert logits.shape == (2, 10) and features.ndim == 2
    assert torch.isfinite(logits).all() and not torch.equal(features[0], features[1])
    module.load_state_dict(space.split(w), strict=False)
    loaded_logits, loaded_features = module(x)
    assert torch.equal(loaded_logits, logits) and torch.equal(loaded_features, features)
    assert torch.equal(last(features), logits)


@pytest.mark.parametrize(("network", "shape"), [(n, (1, 8, 8)) for n in SMALL] + LARGER)
def test_a_projection_head_stands_before_the_last_layer(network: Network, shape: tuple[int, ...]) -> None:
    headed = type(network)(**network.table() | {"head": 7}).build_module(shape, 10)
    with torch.device("meta"):
        plain = network.module(shape, 10)
    f = [*plain.children()][-1].in_features
    x = inputs_for(shape)
    logits, z = headed(x)
    names, parts = zip(*headed.named_children(), strict=True)
    assert names[-4:-1] == ("head1", "head_relu", "head2") and names[-1] == [n for n, _ in plain.named_children()][-1]
    assert (parts[-4].in_features, parts[-4].out_features, parts[-2].in_features) == (f, f, f)
    assert z.shape == (2, 7) and logits.shape == (2, 10) and torch.equal(parts[-1](z), logits)
    features = nn.Sequential(*parts[:-4])(x)
    assert torch.allclose(z, parts[-2](parts[-4](features).relu()), atol=1e-6)


def test_heads_of_other_networks() -> None:
    class Own(Network):
        def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
            return modules[-1]

    modules: list[nn.Module] = [
        nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Linear(5, 3, bias=False, dtype=torch.float64))
    ]
    headed = Own(head=2).build_module((4,), 3)
    assert [n for n, _ in headed.named_children()] == ["0", "1", "head1", "head_relu", "head2", "2"]
    assert headed.get_submodule("2").bias is None and headed.get_submodule("head1").weight.dtype == torch.float64
    assert [n for n, _ in modules[0].named_children()] == ["0", "1", "2"]  # the given module stays as it is
    assert Own().build_module((4,), 3) is modules[0]
    for module in (nn.Bilinear(2, 2, 3), nn.Sequential(), nn.Sequential(nn.Linear(4, 3), nn.Tanh())):
        modules.append(module)
        with pytest.raises(
            ModelError, match=r"model.head = 2 needs a network whose layers stand in a row .*; leave head out"
        ):
            Own(head=2).build_module((4,), 3)


def test_softmax_starts_at_zero_by_default() -> None:
    x = torch.rand(3, 1, 4, 4)
    logits, features = Softmax().module((1, 4, 4), 3)(x)
    assert logits.abs().max() == 0
    assert torch.equal(features, x.reshape(3, 16))
    assert Softmax(zeros=False).module((1, 4, 4), 3)(x)[0].abs().max() > 0


def test_names_of_layers() -> None:
    assert list(dict(LeNet().module((1, 28, 28), 10).named_parameters())) == [
        f"{layer}.{part}" for layer in ("conv1", "conv2", "fc1", "fc2", "out") for part in ("weight", "bias")
    ]
    named = dict(MLP(hidden=(8, 8), norm="batch").module((4,), 2).named_modules())
    assert {"fc1", "fc_norm1", "fc2", "fc_norm2", "out"} <= set(named)
    assert {"conv1", "norm1", "conv2", "norm2", "fc1", "out"} <= set(
        dict(CNN(norm="group").module((1, 8, 8), 2).named_modules())
    )


def test_an_mlp_computes_its_formula() -> None:
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


@pytest.mark.parametrize("network", [*SMALL, MLP(norm="group"), CNN(norm="group"), LeNet(norm="group")])
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


@pytest.mark.parametrize(
    ("network", "shape"),
    [
        pytest.param(ResNet18(head=4), (1, 8, 8), marks=pytest.mark.slow),
        pytest.param(ResNet18(norm="batch"), (1, 16, 16), marks=pytest.mark.slow),
        (LeNetPMVR(), (1, 16, 16)),
        (CNN64(), (1, 4, 4)),
    ],
)
def test_larger_networks_learn_under_vmap(network: Network, shape: tuple[int, ...]) -> None:
    module = network.build_module(shape, 3)
    space = Space(module, torch.float64)  # batch norm over two samples makes much of float32's roundings
    many, one = Functional(module, space), Bound(module, space)
    w, buffers = space.start * torch.tensor([[1.0], [1.01]]), space.buffers.expand(2, -1)
    x, y = torch.rand(2, 2, *shape, dtype=torch.float64), torch.tensor([[0, 1], [2, 1]])

    def loss(w: Tensor, buffers: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        many.load(buffers)
        return many.loss(w, Batch(x, y, None)), many.unload(buffers)

    slopes, statistics = vmap(grad(loss, has_aux=True))(w, buffers, x, y)
    for i in range(2):
        one.module.zero_grad()
        one.loss(one.load(w[i], buffers[i]), Batch(x[i], y[i], None)).backward()
        slope = torch.cat([p.grad.flatten() for p in one.parameters if p.grad is not None])
        assert (slopes[i] - slope).norm() < 1e-9 * slope.norm()
        assert torch.allclose(statistics[i], one.flat_buffers, atol=1e-12)
        assert not space.Q or not torch.equal(statistics[i], space.buffers)


@pytest.mark.slow
def test_vgg_runs_under_vmap() -> None:
    module = VGG19().module((1, 32, 32), 3)
    space = Space(module)
    x, w = torch.rand(2, 2, 1, 32, 32), space.start.clone()
    task = Functional(module, space)

    def logits(w: Tensor, buffers: Tensor, x: Tensor) -> Tensor:
        task.load(buffers)
        return task(w, Batch(x, x, None))[0]

    with torch.no_grad():
        many = vmap(logits)(w.expand(2, -1), space.buffers.expand(2, -1), x)
        assert torch.allclose(many, torch.stack([module(part)[0] for part in x]), atol=1e-4)


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
    # Group norm takes out the scale of its input, so that doubling the first layer changes nothing.
    first = next(iter(group.named_parameters()))[0].split(".")[0]
    before = group(x)[0]
    with torch.no_grad():
        for parameter in group.get_submodule(first).parameters():
            parameter.mul_(2)
    assert torch.allclose(group(x)[0], before, atol=1e-3)


def test_batch_norm_is_found_by_type_and_group_norm_has_its_groups() -> None:
    for network, channels in ((VGG19(), 5_504), (ResNet18(norm="batch"), 4_800), (ResNet18(), 0)):
        found = Space(network.module((3, 32, 32), 10)).layers_of_type(*BATCH_NORMS)
        assert len(found.indices) == len(found.buffer_indices) == 2 * channels
    for groups in (2, 32):
        with torch.device("meta"):
            norms = [m for m in ResNet18(groups=groups).module((3, 8, 8), 10).modules() if isinstance(m, nn.GroupNorm)]
        assert len(norms) == 20 and {m.num_groups for m in norms} == {groups}
        assert sum(m.num_channels for m in norms) == 4_800


@pytest.mark.parametrize(
    ("network", "side", "sizes"),
    [
        (ResNet18(), 32, {"conv1": 32, "layer1": 32, "layer2": 16, "layer3": 8, "layer4": 4}),
        (ResNet50(), 64, {"conv1": 64, "layer1": 64, "layer2": 32, "layer3": 16, "layer4": 8}),
        (
            ResNet18(stem="imagenet"),
            64,
            {"conv1": 32, "maxpool": 16, "layer1": 16, "layer2": 8, "layer3": 4, "layer4": 2},
        ),
        (VGG19(), 32, {"pool1": 16, "pool2": 8, "pool3": 4, "pool4": 2, "pool5": 1, "avgpool": 1}),
        (VGG19(), 64, {"pool1": 32, "pool5": 2, "avgpool": 1}),
        (LeNet(padding=2), 28, {"conv1": 28, "pool1": 14, "conv2": 10, "pool2": 5}),
        (
            ConvNet(channels=(32,) * 4, hidden=(), padding=2, norm="instance"),
            32,
            {"conv1": 34, "pool1": 17, "norm2": 19, "pool2": 9, "pool3": 5, "pool4": 3},
        ),
        (LeNetPMVR(), 28, {"conv1": 24, "pool1": 12, "conv2": 8, "pool2": 4, "each": 4}),
    ],
)
def test_sides_of_feature_maps(network: Network, side: int, sizes: dict[str, int]) -> None:
    channels = 1 if side == 28 else 3
    with torch.device("meta"):
        module, x = network.module((channels, side, side), 10), torch.empty(2, channels, side, side)
    found = {}
    for name, layer in module.named_children():
        x = layer(x)
        found[name] = x.shape[2:]
    assert {n: (s, s) for n, s in sizes.items()} == {n: tuple(found[n]) for n in sizes}


def test_the_last_position_is_read_and_tokens_alone_are() -> None:
    module = CharLSTM(embedding=3, hidden=5, layers=1).module((6,), 4)
    w = dict(module.named_parameters())
    x = torch.tensor([[3, 1, 2, 0, 0, 1]])
    h, c = torch.zeros(5), torch.zeros(5)
    for token in x[0]:
        gates = (
            w["lstm.weight_ih_l0"] @ w["embedding.weight"][token]
            + w["lstm.bias_ih_l0"]
            + w["lstm.weight_hh_l0"] @ h
            + w["lstm.bias_hh_l0"]
        )
        i, f, g, o = gates.split(5)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    logits, features = module(x)
    assert torch.allclose(features[0], h, atol=1e-6)
    assert torch.allclose(logits[0], w["out.weight"] @ h + w["out.bias"], atol=1e-6)
    with pytest.raises(
        ModelError, match=r"charlstm reads tokens, whole numbers from 0, and these inputs are torch.float32; use"
    ):
        module(x.float())
    for shape, classes in (((1, 8, 8), 10), ((0,), 10), ((6,), 0)):
        with pytest.raises(
            ModelError,
            match=r"charlstm needs inputs \[length\] of tokens and one class for each token, got .*; use a text",
        ):
            CharLSTM().module(shape, classes)
    with pytest.raises(ModelError, match="charlstm trains one client at a time"):
        vmap(lambda w: functional_call(module, w, (x,)))({n: torch.stack([t, t]) for n, t in w.items()})


def test_the_lenet_of_pmvr_computes_its_formula() -> None:
    module, x = LeNetPMVR().module((1, 28, 28), 10), torch.rand(2, 1, 28, 28)
    w = dict(module.named_parameters())
    h = x
    for k in (1, 2):
        h = F.avg_pool2d(F.conv2d(h, w[f"conv{k}.weight"], w[f"conv{k}.bias"]).tanh(), 2)
    each = (
        h.movedim(1, -1) @ w["each.weight"][:, :, 0, 0].T + w["each.bias"]
    ).tanh()  # a linear layer at each position
    h = (each.movedim(-1, 1).flatten(1) @ w["fc.weight"].T + w["fc.bias"]).tanh()
    assert torch.allclose(module(x)[1], h, atol=1e-6)


def test_residual_blocks_compute_their_formula() -> None:
    norm = lambda y: F.group_norm(y, 2)  # weights 1 and biases 0, as they start
    x = torch.randn(2, 4, 6, 6)
    basic, bottleneck, same = (
        ResidualBlock(4, w, s, deep, lambda n: nn.GroupNorm(2, n))
        for w, s, deep in ((8, 2, False), (2, 2, True), (4, 1, False))
    )
    first, second = basic.conv1.weight, basic.conv2.weight
    short = norm(F.conv2d(x, basic.downsample[0].weight, stride=2))
    y = norm(F.conv2d(norm(F.conv2d(x, first, stride=2, padding=1)).relu(), second, padding=1))
    assert torch.allclose(basic(x), (y + short).relu(), atol=1e-6) and basic(x).shape == (2, 8, 3, 3)
    y = norm(F.conv2d(x, bottleneck.conv1.weight)).relu()
    y = norm(F.conv2d(y, bottleneck.conv2.weight, stride=2, padding=1)).relu()
    y = norm(F.conv2d(y, bottleneck.conv3.weight)) + norm(F.conv2d(x, bottleneck.downsample[0].weight, stride=2))
    assert torch.allclose(bottleneck(x), y.relu(), atol=1e-6) and y.shape == (2, 8, 3, 3)
    y = norm(F.conv2d(norm(F.conv2d(x, same.conv1.weight, padding=1)).relu(), same.conv2.weight, padding=1))
    assert torch.allclose(same(x), (y + x).relu(), atol=1e-6)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("bottleneck", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_quarter_of_a_residual_block_is_a_narrow_block(
    norm: str, bottleneck: bool, training: bool, stride: int
) -> None:
    width = 256 if bottleneck else 64
    wide, narrow = (
        ResidualBlock(inputs, w, stride, bottleneck, partial(norm_layer, norm)).train(training)
        for inputs, w in ((width, 64), (width // 4, 16))
    )
    with torch.no_grad():
        for name, whole in wide.state_dict().items():
            if whole.ndim == 1 and "num_batches" not in name:
                whole.uniform_(0.5, 1.5)
            part = narrow.state_dict()[name]
            part.copy_(whole[tuple(slice(0, n) for n in part.shape)])
    before = copy.deepcopy(wide.state_dict())
    x = torch.rand(2, width // 4, 4, 4)
    assert torch.allclose(wide(x, run_narrow), narrow(x), atol=1e-5)
    assert all(torch.equal(t, before[n]) for n, t in wide.state_dict().items())


def test_a_quarter_of_a_group_norm_has_two_values_in_a_group_or_no_statistics() -> None:
    x = torch.tensor([[1.0, 3.0, 5.0, 9.0]])
    layer = nn.GroupNorm(2, 16)
    nn.init.constant_(layer.weight, 2.0)
    for n, expected in ((4, [-2, 2, -2, 2]), (2, [-2, 2]), (1, [2])):
        assert torch.allclose(run_narrow(layer, x[:, :n]), torch.tensor([expected]).float(), atol=1e-4)


def test_the_transfer_of_a_residual_network_is_that_of_its_last_stage() -> None:
    module = ResNet18(norm="batch", head=6).build_module((3, 16, 16), 10)
    plain, x = copy.deepcopy(module), torch.rand(2, 3, 16, 16)
    logits, before, full, before_narrow, narrow = module(x, call="transfer")
    expected, features = plain(x)
    assert torch.equal(logits, expected)
    assert (before.shape, full.shape, narrow.shape) == ((2, 256, 4), (2, 512, 4), (2, 128, 4))
    assert torch.equal(module.head2(module.head1(full.mean(2)).relu()), features)
    assert all(
        torch.equal(a, b) for a, b in zip(module.buffers(), plain.buffers(), strict=True)
    )  # each statistic counted once
    narrow.square().sum().backward()
    touched = {n.rpartition(".")[0] for n, p in module.named_parameters() if p.grad is not None}
    blocks = {f"layer4.{k}.{layer}" for k in (0, 1) for layer in ("conv1", "bn1", "conv2", "bn2")}
    assert touched == blocks | {"layer4.0.downsample.0", "layer4.0.downsample.1"}
    for layer in (plain.conv1, plain.bn1, plain.relu, plain.layer1, plain.layer2, plain.layer3):
        x = layer(x)
    assert torch.allclose(before, F.avg_pool2d(x, 2).flatten(2)) and torch.equal(before_narrow, before[:, :64])
    with pytest.raises(ModelError, match="no hidden layer whose transfer could be measured; use mlp"):
        CharLSTM().module((5,), 4)(torch.randint(4, (2, 5)), call="transfer")


def test_a_regression_has_one_output() -> None:
    assert Softmax().module((30,), 0)(torch.rand(2, 30))[0].shape == (2, 1)


@pytest.mark.parametrize("network", [CNN(), LeNet()])
@pytest.mark.parametrize("shape", [(30,), (8, 8), (1, 3, 8), (2, 3, 8, 8)])
def test_convolutions_refuse_what_is_no_image(network: Network, shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ModelError,
        match=r"(cnn|lenet) needs images \[channels, height, width\] of 4×4 pixels or more, got .*; use mlp or softmax",
    ):
        network.module(shape, 10)


@pytest.mark.parametrize("network", [CNN(), LeNet()])
@pytest.mark.parametrize("side", [4, 5, 12, 15, 16, 17, 33])
def test_convolutions_take_any_image_of_four_pixels_or_more(network: Network, side: int) -> None:
    assert network.module((2, side, side + 1), 3)(torch.rand(2, 2, side, side + 1))[0].shape == (2, 3)


@pytest.mark.parametrize(
    ("network", "shape", "sentence"),
    [
        (
            ResNet18(),
            (1, 7, 8),
            r"resnet18 needs images .* of 8×8 pixels or more, got inputs of shape \[1, 7, 8\]; use mlp",
        ),
        (ResNet50(), (30,), r"resnet50 needs images .* of 8×8 pixels or more"),
        (
            ResNet18(stem="imagenet"),
            (3, 28, 28),
            r'resnet18 with stem = "imagenet" needs .* 32×32 .* use stem = "small"',
        ),
        (VGG19(), (3, 28, 28), r"vgg19 needs images .* of 32×32 pixels or more, got .*; use cnn or lenet"),
        (LeNetPMVR(), (1, 15, 15), r"lenet_pmvr needs images .* of 16×16 pixels or more, got .*; use lenet"),
        (CNN64(), (1, 3, 3), r"cnn64 needs images .* of 4×4 pixels or more"),
        (ConvNet(channels=(4,) * 4), (1, 8, 8), r"convnet: images .* too small for 4 convolutions .*; set fewer"),
    ],
)
def test_images_too_small_are_refused(network: Network, shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        network.module(shape, 10)


def test_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ConvNet: channels must be .* got channels = \[\] and .*; try channels"):
        ConvNet(channels=())
    with pytest.raises(ConfigError, match=r'ConvNet: norm = "group" needs even channels, got \[3\]; try'):
        ConvNet(channels=(3,), norm="group")
    with pytest.raises(ConfigError, match="ResNet18: groups must divide 64 channels, got 3; try 2 or 32"):
        ResNet18(groups=3)
    with pytest.raises(ConfigError, match="LeNet: padding must be ≥ 0 and ≤ 4, got 5"):
        LeNet(padding=5)
    for kind in (MLP, CNN, ResNet18, LeNet):
        with pytest.raises(
            ConfigError, match=rf"{kind.__name__}: new_head = true is about model.weights, which is not set; set it"
        ):
            kind(new_head=True)
    with pytest.raises(UnknownName, match="VGG19: unknown norm 'group'"):
        VGG19(norm="group")
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
    assert network.reads() == () and networks[name].build({"weights": "x.pt"}).reads() == (Path("x.pt"),)


def test_kaimings_weights_have_the_spread_that_keeps_relus_alive() -> None:
    """He et al. 2015: a standard deviation of √(2 / inputs of a unit), biases 0; the last layer is torch's own."""
    torch.manual_seed(0)
    network = ConvNet(init="kaiming").module((3, 32, 32), 10)
    for name, inputs in (("conv1", 27), ("conv2", 288), ("fc1", 2048), ("fc2", 256)):
        layer = network.get_submodule(name)
        assert float(layer.weight.detach().std()) == pytest.approx((2 / inputs) ** 0.5, rel=0.05)
        assert not layer.bias.any()
    last = network.get_submodule("out")
    assert float(last.weight.detach().abs().max()) <= 64**-0.5 and last.bias.any()
