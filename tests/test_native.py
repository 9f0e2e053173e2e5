"""Kernels in C: what they compute against torch's, and how they are had, or done without."""

from __future__ import annotations

import copy
import ctypes
import itertools
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import askew
from askew.algorithms import algorithms
from askew.core import dense, local, native
from askew.core.local import slope_rows
from askew.core.space import Space
from askew.core.task import Bound, WithFeatures
from askew.core.types import Batch, Client
from askew.data.dataset import Dataset, Samples
from askew.data.transform import PixelTransform
from askew.engine import sequential
from askew.models import conv
from askew.models.network import fuse
from askew.models.small import CNN, CNN64, LeNet

here = pytest.mark.skipif(native.library(dense.SOURCE, torch.float64) is None, reason="kernels cannot be compiled here")
UNFIT = ("without fused multiplication", "__builtin_shufflevector")  # the machine, or a compiler that is too old
SOURCE = "int twice(int n) { return n * FACTOR; }\n"


# convolution, ReLU and pooling ----------------------------------------------------------------------------------


def layers(ci: int, co: int, k: int, pad: int) -> tuple[nn.Conv2d, nn.ReLU, nn.MaxPool2d]:
    return nn.Conv2d(ci, co, k, padding=pad).double(), nn.ReLU(), nn.MaxPool2d(2)


@here
@pytest.mark.parametrize("pad", [0, 2])
@pytest.mark.parametrize(
    ("ci", "co", "k"), [(1, 1, 1), (3, 6, 5), (6, 16, 5), (1, 5, 3), (2, 7, 4), (13, 9, 3), (16, 12, 2), (5, 24, 7)]
)
@pytest.mark.parametrize("size", [(8, 7), (33, 18)])
def test_a_convolution_is_torchs(ci: int, co: int, k: int, pad: int, size: tuple[int, int]) -> None:
    row, x = layers(ci, co, k, pad), torch.randn(5, ci, *size, dtype=torch.float64, requires_grad=True)
    if min(size) + 2 * pad < k + 1:
        assert not conv.fits(x, *row)  # there is nothing to pool
        return
    assert conv.fits(x, *row)
    plain, y = nn.Sequential(*row)(x), conv.conv_relu_pool(x, row[0])
    torch.testing.assert_close(y, plain, rtol=1e-12, atol=1e-13)
    behind, wanted = torch.randn_like(y), (x, row[0].weight, row[0].bias)
    for a, b in zip(torch.autograd.grad(y, wanted, behind), torch.autograd.grad(plain, wanted, behind), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@here
def test_of_equal_pixels_the_first_has_the_slope_and_what_is_no_number_is_seen() -> None:
    row, x = layers(2, 3, 3, 1), torch.zeros(4, 2, 10, 10, dtype=torch.float64)
    x[1, :, 3, 4], x[2, 1, 5, 5] = float("nan"), float("inf")
    x[3] = 1.0
    plain, y = nn.Sequential(*row)(x), conv.conv_relu_pool(x, row[0])
    torch.testing.assert_close(y, plain, equal_nan=True)
    assert y[1].isnan().any()
    even = x[[0, 3]]
    mine, theirs = (
        torch.autograd.grad(t.sum(), row[0].weight)[0]
        for t in (conv.conv_relu_pool(even, row[0]), nn.Sequential(*row)(even))
    )
    torch.testing.assert_close(mine, theirs)


@here
@pytest.mark.parametrize("network", [CNN(), LeNet(), LeNet(padding=2), CNN64()])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 19, 21)])
def test_single_precision_is_as_good_as_torchs(network: CNN | LeNet, shape: tuple[int, ...]) -> None:
    plain = network.build_module(shape, 5)
    fast, truth = copy.deepcopy(plain), copy.deepcopy(plain).double()
    fuse(fast)
    x, y = torch.randn(24, *shape), torch.randint(0, 5, (24,))

    def told(module: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        logits, features = module(x)
        return torch.cat([logits, features], 1), list(
            torch.autograd.grad(F.cross_entropy(logits, y), list(module.parameters()))
        )

    (right, slope), (theirs, _), (ours, mine) = told(truth, x.double()), told(plain, x), told(fast, x)
    rounding = torch.finfo(torch.float32).eps * right.abs().max()
    assert (ours - right).abs().max() <= 2 * (theirs - right).abs().max() + 4 * rounding
    for a, b in zip(
        mine, slope, strict=True
    ):  # of two pixels that are almost equal, rounding decides which has the slope
        assert (a - b).norm() <= 0.1 * b.norm()


@here
@pytest.mark.parametrize(
    "row",
    [
        (nn.Conv2d(2, 3, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2)),
        (nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.MaxPool2d(2)),
        (nn.Conv2d(2, 3, 3, dilation=2), nn.ReLU(), nn.MaxPool2d(2)),
        (nn.Conv2d(2, 3, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2)),
        (nn.Conv2d(2, 3, (3, 5)), nn.ReLU(), nn.MaxPool2d(2)),
        (nn.Conv2d(2, 3, 3, padding=(1, 0)), nn.ReLU(), nn.MaxPool2d(2)),
        (nn.Conv2d(2, 3, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2)),
        (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), nn.ReLU(), nn.MaxPool2d(2)),
        (nn.Conv2d(2, 3, 3), nn.Tanh(), nn.MaxPool2d(2)),
        (nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AvgPool2d(2)),
        (nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(3)),
        (nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2, padding=1)),
        (nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)),
        (nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2, stride=1)),
        (nn.Conv2d(2, 3, 3).half(), nn.ReLU(), nn.MaxPool2d(2)),
    ],
    ids=repr,
)
def test_other_layers_are_left_to_torch(row: tuple[nn.Module, ...]) -> None:
    assert not conv.fits(torch.zeros(2, 2, 9, 9, dtype=row[0].weight.dtype), *row)


@here
def test_what_is_vmapped_or_cast_is_left_to_torch() -> None:
    row, x = layers(2, 3, 3, 0), torch.zeros(4, 1, 2, 8, 8, dtype=torch.float64)
    seen = list[bool]()
    torch.func.vmap(lambda x: seen.append(conv.fits(x, *row)) or x)(x)
    with torch.autocast("cpu", torch.bfloat16):
        seen.append(conv.fits(x[0], *row))
    assert seen == [False, False] and conv.fits(x[0], *row)


# dense networks -------------------------------------------------------------------------------------------------


def rows(widths: list[int], biased: bool = True) -> nn.Module:
    body = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(widths[:-1]):
        body += [nn.Linear(inputs, outputs, bias=biased), nn.ReLU()]
    return WithFeatures(nn.Sequential(*body, nn.Linear(*widths[-2:], bias=biased)))


@here
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    "widths", [[30, 5], [3, 7, 2], [17, 33, 16, 3], [784, 200, 200, 10], [64, 64, 10], [5, 1, 9], [129, 40, 4], [1, 1]]
)
def test_steps_in_a_row_are_torchs(widths: list[int], biased: bool) -> None:
    module, rate, sizes = rows(widths, biased).double(), 0.05, [50, 50, 37, 1, 2, 13]
    task = Bound(module, Space(module, torch.float64))
    assert task.walk is not None
    x, y = torch.randn(sum(sizes), widths[0], dtype=torch.float64), torch.randint(0, widths[-1], (sum(sizes),))
    w, cuts = task.space.start.clone()[None], [0, *torch.tensor(sizes).cumsum(0).tolist()]
    (value,) = task.walk(w, w, -rate, x, y, dense.in_a_row(cuts))
    theirs, total = copy.deepcopy(module), 0.0
    optimiser = torch.optim.SGD(theirs.parameters(), lr=rate)
    for a, b in itertools.pairwise(cuts):
        optimiser.zero_grad()
        loss = F.cross_entropy(theirs(x[a:b])[0], y[a:b])
        loss.backward()
        optimiser.step()
        total += loss.item()
    right = torch.cat([p.detach().reshape(-1) for p in theirs.parameters()])
    torch.testing.assert_close(w[0], right, rtol=1e-12, atol=1e-13)
    assert value.item() == pytest.approx(total, rel=1e-13, abs=1e-13)


@here
@pytest.mark.parametrize(
    ("momentum", "decay", "clip"),
    [(0.9, 0.0, 0.0), (0.0, 0.01, 0.0), (0.0, 0.0, 0.3), (0.5, 0.02, 0.4), (0.5, 0.02, 1e3)],
)
def test_steps_by_the_common_rule_are_torchs(momentum: float, decay: float, clip: float) -> None:
    """Decay and momentum come after clipping, as everywhere here; torch's optimiser is handed a clipped gradient."""
    module, sizes = rows([17, 33, 3]).double(), [50, 37, 1, 2, 13]
    task = Bound(module, Space(module, torch.float64))
    x, y = 3 * torch.randn(sum(sizes), 17, dtype=torch.float64), torch.randint(0, 3, (sum(sizes),))
    w, cuts = task.space.start.clone()[None], [0, *torch.tensor(sizes).cumsum(0).tolist()]
    v, rule = torch.zeros_like(w) if momentum else None, dense.Rule(1.0, 0.0, momentum, decay, clip or float("inf"))
    assert task.walk is not None
    (value,) = task.walk(w, w, -0.1, x, y, dense.in_a_row(cuts), rule, v=v)
    theirs, total, cut = copy.deepcopy(module), 0.0, 0
    optimiser = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=momentum, weight_decay=decay)
    for a, b in itertools.pairwise(cuts):
        optimiser.zero_grad()
        loss = F.cross_entropy(theirs(x[a:b])[0], y[a:b])
        loss.backward()
        if clip:
            cut += bool(nn.utils.clip_grad_norm_(theirs.parameters(), clip) > clip)
        optimiser.step()
        total += loss.item()
    right = torch.cat([p.detach().reshape(-1) for p in theirs.parameters()])
    torch.testing.assert_close(w[0], right, rtol=1e-12, atol=1e-13)
    assert value.item() == pytest.approx(total, rel=1e-13)
    assert (cut > 0) == (0 < clip < 1)


def images(count: int, size: int, ground: int, share: float) -> Tensor:
    """Bytes, of which about this share stands out of the ground; one image is all ground, one is none of it."""
    x = torch.where(torch.rand(count, 1, size, 1) < share, torch.randint(0, 256, (count, 1, size, 1)), ground).to(
        torch.uint8
    )
    x[3], x[5] = ground, (ground + 1) % 256
    return x


@here
@pytest.mark.parametrize("rule", [None, dense.Rule(1.1, 0.02, 0.9, 1e-3, 2.0)], ids=["straight", "by a rule"])
@pytest.mark.parametrize("level", [0.0, -0.42])
@pytest.mark.parametrize("widths", [[784, 200, 10], [64, 7], [50, 33, 16, 3], [9, 41, 2], [128, 129, 4]])
@pytest.mark.parametrize("share", [0.2, 0.9])
def test_steps_on_bytes_are_those_on_what_they_stand_for(
    widths: list[int], share: float, level: float, rule: dense.Rule | None
) -> None:
    """Images that are mostly background, whose first layer is another, and those that are not."""
    module, sizes, ground = rows(widths).double(), [50, 50, 37, 1, 2, 13], 7
    task = Bound(module, Space(module, torch.float64))
    assert task.walk is not None
    table = torch.linspace(-1, 2, 256, dtype=torch.float64)
    table[ground] = level
    pool, places = images(200, widths[0], ground, share), torch.randint(0, 200, (sum(sizes),))
    places[[4, 60]], places[[9, 70]] = 3, 5
    y, cuts = torch.randint(0, widths[-1], (1, sum(sizes))), [0, *torch.tensor(sizes).cumsum(0).tolist()]
    w, b = task.space.start.clone()[None], torch.randn(1, task.space.P, dtype=torch.float64) if rule else None

    def walked(x: Tensor, *bytes: Tensor) -> tuple[Tensor, ...]:
        own, v = w.clone(), torch.full_like(w, 0.1)
        assert task.walk is not None
        return task.walk(own, own, -0.05, x, y, dense.in_a_row(cuts), rule, b, v if rule else None, *bytes), own, v

    for ours, right in zip(walked(pool, places, table), walked(table[pool[places].long()]), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-13)


@here
def test_bytes_and_places_that_do_not_fit_are_refused() -> None:
    module = rows([8, 3])
    walk = Bound(module, Space(module)).walk
    w, y = torch.zeros(1, 27), torch.zeros(1, 6, dtype=torch.long)
    assert walk is not None
    for x, places, told in (
        (torch.zeros(9, 8), torch.arange(6), r"8 numbers of type torch\.uint8"),
        (torch.zeros(9, 8, dtype=torch.uint8), torch.arange(5), "one for every label"),
        (torch.zeros(9, 8, dtype=torch.uint8), torch.arange(6).int(), "whole numbers in a row"),
    ):
        with pytest.raises(ValueError, match=told):
            walk(w, w, -0.1, x, y, dense.in_a_row([0, 3, 6]), places=places, table=torch.zeros(256))


@here
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_run_on_images_in_bytes_is_the_one_on_numbers(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way, with a transform that makes pixels numbers; clients that take one step see them as ever."""
    pool = images(300, 64, 0, 0.2).view(300, 1, 8, 8)
    transform = PixelTransform(torch.full((1, 1, 1), 0.3), torch.full((1, 1, 1), 0.5))
    samples = Samples(pool, torch.randint(0, 4, (300,)))
    data = Dataset(samples, samples, 4, transform=transform)
    seen, walk = list[bool](), dense.Walk.__call__
    monkeypatch.setattr(dense.Walk, "__call__", lambda *given: (seen.append(given[-1] is not None), walk(*given))[1])
    given = {
        "data": data,
        "partition": {"name": "dirichlet", "alpha": 0.3, "min_size": 1},
        "clients": 12,
        "rounds": 3,
        "model": "mlp",
    }
    given |= {
        "local": {"epochs": 2, "batch": 16},
        "engine": {"name": "sequential", "dtype": "float64", "device": "cpu"},
    }
    one = askew.run(method, **given)  # type: ignore[arg-type]
    assert any(seen)
    monkeypatch.setattr(PixelTransform, "table", lambda *_: None)
    seen.clear()
    other = askew.run(method, **given)  # type: ignore[arg-type]
    assert seen and not any(seen)
    assert max(float((one.model[n] - v).abs().max()) for n, v in other.model.items()) < 1e-13


def test_only_pixels_that_are_all_seen_alike_have_a_table() -> None:
    one, three = (torch.full((n, 1, 1), 0.25) for n in (1, 3))
    told = PixelTransform(one, 2 * one).table(1, torch.float64)
    assert told is not None and told.dtype is torch.float64
    torch.testing.assert_close(told, (torch.arange(256) / 255 - 0.25) / 0.5, check_dtype=False)
    assert PixelTransform(three, three).table(3, torch.float32) is None
    assert all(
        PixelTransform(one, one, **chance).table(1, torch.float32) is None
        for chance in ({"flip": True}, {"pad": 2}, {"crop": 5})
    )


PULLED = ("fedprox", "fedcm", "feddc", "feddyn", "scaffold")


@here
@pytest.mark.parametrize("method", PULLED)
def test_steps_with_a_pull_are_those_one_by_one(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods whose direction is affine: many steps at a time in C against direction, clipping and descend at every step."""
    seen, ask = list[bool](), local.affine_rule

    def spied(alg: Any, client: Any) -> Any:
        rule, b = ask(alg, client)
        seen.append(b is not None)
        return rule, b

    monkeypatch.setattr(local, "affine_rule", spied)
    steps = {"epochs": 2, "batch": 16, "lr": 0.1, "momentum": 0.5, "weight_decay": 1e-3, "clip": 0.4}
    given = {"clients": 12, "cohort": 5, "rounds": 4, "model": "mlp", "local": steps}
    given |= {"engine": {"name": "sequential", "dtype": "float64", "device": "cpu"}}
    one = askew.run(method, **given)  # type: ignore[arg-type]
    assert seen == [True] * 20
    monkeypatch.setattr(sequential, "together", lambda *_: False)
    other = askew.run(method, **given)  # type: ignore[arg-type]
    assert len(seen) == 20
    for name, value in one.model.items():
        torch.testing.assert_close(value, other.model[name], rtol=0, atol=1e-13)


@pytest.mark.parametrize("method", list(algorithms))
def test_who_says_that_its_direction_is_affine_says_so_for_its_own_hooks(method: str) -> None:
    """Gain and pull are one number for all coordinates, and the rest does not depend on w or the gradient."""
    made, space = algorithms[method](), Space(rows([4, 3, 2]).double(), torch.float64)
    state = lambda told: {n: torch.randn_like(v.double()) for n, v in told.items()}
    numbers = (0.1, 0.1, 0.5, 0.01, float("inf"), 7.0, 5.0, 1.3, 3, 0.4)
    mine, server = state(made.client_state(space)), state(made.server_state(space) | made.memory(space))
    me = Client(torch.randn(space.P).double(), space.buffers, server, mine, {}, made.parts(space), *numbers)
    assert local.affine(made, me) == (method in PULLED or local.common(made, "direction", "descend", "note"))
    if method in PULLED:
        rule, b = local.affine_rule(made, me)
        w, g, v = torch.randn(3, space.P).double().unbind()
        assert rule is not None and b is not None
        torch.testing.assert_close(
            made.direction(w, lambda u: g, me), rule.gain * g + rule.pull * w + b, rtol=1e-12, atol=1e-12
        )
        d = v * me.momentum + g + rule.decay * w
        torch.testing.assert_close(made.descend(w, g, v, me), (w - me.lr * d, d), rtol=1e-12, atol=1e-12)
        inherits = type("Inherits", (type(made),), {"direction": lambda self, w, grad, me: grad(w) * w})
        assert not local.affine(inherits(), me)


@here
def test_gradients_of_many_networks_are_each_ones_own() -> None:
    module = rows([20, 11, 4]).double()
    task = Bound(module, Space(module, torch.float64))
    w, x, y = (
        torch.randn(3, task.space.P, dtype=torch.float64),
        torch.randn(3, 6, 20, dtype=torch.float64),
        torch.randint(0, 4, (3, 6)),
    )
    weight = (torch.arange(6) < torch.tensor([[6], [1], [4]])).double()
    slopes, values = slope_rows(task, w, Batch(x, y, weight))
    for i, count in enumerate((6, 1, 4)):
        leaf = task.load(w[i], task.space.buffers)
        loss = task.loss(leaf, Batch(x[i, :count], y[i, :count]))
        right = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, task.parameters)])
        torch.testing.assert_close(slopes[i], right, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(values[i], loss.detach(), rtol=1e-13, atol=0)


@here
def test_what_does_not_fit_is_refused_and_a_loss_that_is_no_number_seen() -> None:
    module = rows([4, 3]).double()
    task = Bound(module, Space(module, torch.float64))
    w, x = task.space.start.clone()[None], torch.randn(2, 4, dtype=torch.float64)
    for wrong in (3, -1):
        with pytest.raises(IndexError, match="3 classes"):
            task.walk(w, w, -1.0, x, torch.tensor([0, wrong]), dense.in_a_row([0, 2]))
    for inputs in (x.float(), x[:, :3]):
        with pytest.raises(ValueError, match="4 numbers"):
            task.walk(w, w, -1.0, inputs, torch.tensor([0, 1]), dense.in_a_row([0, 2]))
    assert torch.equal(w[0], task.space.start)
    w[0, 0] = float("nan")
    assert task.walk(w, w, -1.0, x, torch.tensor([0, 1]), dense.in_a_row([0, 2])).isnan()


@pytest.mark.parametrize("cached", [1, 2000, 2**20])
def test_how_many_steps_are_taken_at_a_time_changes_no_bit(cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {
        "data": "digits",
        "model": {"name": "mlp"},
        "rounds": 2,
        "local": {"epochs": 2, "batch": 7},
        "engine": {"name": "sequential"},
    }
    usual = askew.run(tables)
    monkeypatch.setattr(sequential, "CACHED", cached)
    assert torch.equal(askew.run(tables).model["fc1.weight"], usual.model["fc1.weight"])


# how they are had -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not native.commands(), reason="there is no C compiler")
def test_they_compile_wherever_there_is_a_compiler() -> None:
    """What must hold besides, only where they do."""
    image = {"CI": 3, "CO": 6, "H": 32, "W": 32, "K": 5, "PAD": 0}
    sizes = {dense.SOURCE: (), conv.SOURCE: tuple(image.items())}
    for source, constants in sizes.items():
        for dtype in (torch.float32, torch.float64):
            made = native.library(source, dtype, *constants)
            assert made or any(text in native.why_not(source) for text in UNFIT), native.why_not(source)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that has compiled nothing yet."""
    for function in (native.commands, native.library):
        monkeypatch.setattr(native, function.__name__, function.__wrapped__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / "twice.c").write_text(SOURCE)
    return tmp_path


@here
def test_what_was_compiled_is_found_again(fresh: Path) -> None:
    assert native.library(fresh / "twice.c", torch.float32, ("FACTOR", 2)).twice(21) == 42
    assert native.library(fresh / "twice.c", torch.float32, ("FACTOR", 3)).twice(14) == 42
    made = sorted((fresh / "cache" / "askew" / "native").iterdir())
    times = [path.stat().st_mtime_ns for path in made]
    assert native.library(fresh / "twice.c", torch.float32, ("FACTOR", 2)).twice(4) == 8
    assert len(made) == 2 and [path.stat().st_mtime_ns for path in made] == times


@here
def test_where_the_cache_cannot_be_written_another_folder_will_do(fresh: Path) -> None:
    (fresh / "cache").write_text("a file in the way")
    assert native.library(fresh / "twice.c", torch.float32, ("FACTOR", 2)).twice(4) == 8
    assert list((fresh / f"askew-{os.getuid()}").iterdir())


@here
def test_a_user_without_a_home_has_them_too(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert native.library(fresh / "twice.c", torch.float32, ("FACTOR", 2)).twice(4) == 8


@here
def test_a_broken_file_in_the_cache_is_made_again(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.library(fresh / "twice.c", torch.float32, ("FACTOR", 5))
    (made,) = (fresh / "cache" / "askew" / "native").iterdir()
    before, tries, loaded = made.stat().st_ino, list[str](), ctypes.CDLL

    def load(path: str) -> ctypes.CDLL:
        tries.append(path)
        if len(tries) == 1:
            raise OSError("not a library")
        return loaded(path)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert native.library(fresh / "twice.c", torch.float32, ("FACTOR", 5)).twice(4) == 20
    assert tries == [str(made)] * 2 and made.stat().st_ino != before


@pytest.mark.parametrize(("name", "value"), [("CC", "no-such-compiler"), ("CC", "false"), ("ASKEW_NATIVE", "0")])
def test_without_a_compiler_there_are_none(name: str, value: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert native.library(fresh / "twice.c", torch.float32) is None and native.why_not(fresh / "twice.c")


@here
def test_what_does_not_compile_is_done_without(fresh: Path) -> None:
    assert native.library(fresh / "twice.c", torch.float32) is None
    assert "FACTOR" in native.why_not(fresh / "twice.c")  # is not known
    assert not list((fresh / "cache" / "askew" / "native").iterdir())


RUN = """
import askew
for model, engine in (("mlp", "sequential"), ("softmax", "vmapped"), ("cnn", "sequential")):
    run = askew.run({"data": "digits", "model": {"name": model}, "rounds": 2, "engine": {"dtype": "float64", "name": engine}})
    print(*(float(v.double().pow(2).sum()) for v in run.model.values()), run.rounds[-1]["loss"])
"""


@here
def test_a_run_is_the_same_with_and_without_them() -> None:
    told = list[list[float]]()
    for wanted in ("0", "1"):
        env = os.environ | {"ASKEW_NATIVE": wanted}
        done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, env=env, check=True)
        told.append([float(number) for number in done.stdout.split()])
    assert told[0] == pytest.approx(told[1], rel=1e-10)


def test_the_sources_are_in_the_package() -> None:
    root = Path(askew.__file__).parent
    patterns = tomllib.loads((root.parent.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "askew"
    ]
    for source in (conv.SOURCE, dense.SOURCE, native.COMMON):
        assert any(source.relative_to(root).match(pattern) for pattern in patterns), source
