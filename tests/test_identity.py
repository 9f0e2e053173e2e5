"""What is handed in from Python has a hash of its own: two things that compute otherwise are never taken for one."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import askew
from askew.algorithms import FedAvg
from askew.errors import Remark
from askew.experiment.api import NetworkMaker, OwnData, OwnNetwork
from askew.experiment.config import Config

TINY: dict[str, Any] = {"clients": 2, "cohort": 2, "rounds": 1, "partition": "iid", "progress": False}
X, Y = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2


class Net(nn.Module):
    """Two layers with the same weights every time, and whatever else is given."""

    def __init__(self, act: Any = torch.relu, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.act = nn.Linear(3, 3), nn.Linear(3, 2), act
        vars(self).update(more)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.act(self.a(x)))


class Scale:
    """An object that is called."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: Tensor) -> Tensor:
        return self.by * x


class Linked:
    """An object that holds itself."""

    def __init__(self, by: float) -> None:
        self.by, self.own = by, [self]


def scaled(by: float) -> Callable[[Tensor], Tensor]:
    return lambda x: by * x


def by_default(by: float) -> Callable[[Tensor], Tensor]:
    return lambda x, by=by: by * x  # type: ignore[misc]


def by_keyword(by: float) -> Callable[[Tensor], Tensor]:
    def scale(x: Tensor, *, factor: float = by) -> Tensor:
        return factor * x

    return scale


def with_attribute(by: float) -> Callable[[Tensor], Tensor]:
    def scale(x: Tensor) -> Tensor:
        return scale.by * x  # type: ignore[attr-defined,no-any-return]

    scale.by = by  # type: ignore[attr-defined]
    return scale


def recursive(by: float) -> Callable[[Tensor], Tensor]:
    def scale(x: Tensor, times: int = 1) -> Tensor:
        return scale(by * x, times - 1) if times else x

    return scale


def made_class(by: float) -> type[Net]:
    class Made(Net):
        factor = by

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor  # type: ignore[no-any-return]

    return Made


def derived(base: type[nn.Module]) -> nn.Module:
    class Derived(base):  # type: ignore[valid-type,misc]
        pass

    return Derived()


class Tanh(Net):
    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x).tanh())


def frozen(module: nn.Module) -> nn.Module:
    module.get_submodule("a").requires_grad_(False)
    return module


def hooked(by: float) -> nn.Module:
    module = Net()
    module.a.register_forward_hook(lambda layer, inputs, output: by * output)
    return module


def with_buffer(by: float) -> nn.Module:
    module = Net()
    module.register_buffer("by", torch.tensor(by), persistent=False)
    return module


def tied(same: bool) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    if same:
        module[1].weight = module[0].weight
    return module


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


ONE_LINE = [lambda x: 1.0 * x, lambda x: 2.0 * x]  # fmt: skip
# pairs of networks with the same weights that compute otherwise
NETWORKS: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "functions of torch": lambda: (Net(torch.relu), Net(torch.tanh)),
    "functions of torch in Python": lambda: (Net(F.leaky_relu), Net(F.softsign)),
    "methods of tensors": lambda: (Net(Tensor.relu), Net(Tensor.tanh)),
    "numbers": lambda: (Net(skip=0), Net(skip=0.0)),
    "closures": lambda: (Net(scaled(1.0)), Net(scaled(2.0))),
    "defaults": lambda: (Net(by_default(1.0)), Net(by_default(2.0))),
    "keyword defaults": lambda: (Net(by_keyword(1.0)), Net(by_keyword(2.0))),
    "attributes of functions": lambda: (Net(with_attribute(1.0)), Net(with_attribute(2.0))),
    "functions that call themselves": lambda: (Net(recursive(1.0)), Net(recursive(2.0))),
    "partial functions": lambda: (Net(functools.partial(F.elu, alpha=1.0)), Net(functools.partial(F.elu, alpha=2.0))),
    "objects": lambda: (Net(Scale(1.0)), Net(Scale(2.0))),
    "bound methods": lambda: (Net(Scale(1.0).__call__), Net(Scale(2.0).__call__)),
    "objects that hold themselves": lambda: (Net(more=Linked(1.0)), Net(more=Linked(2.0))),
    "lambdas on one line": lambda: (Net(ONE_LINE[0]), Net(ONE_LINE[1])),
    "containers": lambda: (Net(more={"a": [1, (2,)]}), Net(more={"a": [1, (3,)]})),
    "sets": lambda: (Net(more={"a", "b"}), Net(more={"a", "c"})),
    "tensors": lambda: (Net(more=torch.zeros(2)), Net(more=torch.ones(2))),
    "arrays": lambda: (Net(more=np.zeros(2)), Net(more=np.ones(2))),
    "modules in a list": lambda: (Net(more=[Net(torch.relu)]), Net(more=[Net(torch.tanh)])),
    "types of numbers": lambda: (Net(more=torch.float32), Net(more=torch.float64)),
    "class attributes": lambda: (made_class(1.0)(), made_class(2.0)()),
    "base classes": lambda: (derived(Net), derived(Tanh)),
    "inner layers": lambda: (nn.Sequential(Net(torch.relu)), nn.Sequential(Net(torch.tanh))),
    "frozen weights": lambda: (Net(), frozen(Net())),
    "tied weights": lambda: (tied(False), tied(True)),
    "hooks": lambda: (hooked(1.0), hooked(2.0)),
    "buffers that are not stored": lambda: (with_buffer(1.0), with_buffer(2.0)),
    "layers of torch": lambda: (nn.AvgPool2d(2), nn.AvgPool2d(2, ceil_mode=True)),
    "heads": lambda: (seeded(lambda: nn.MultiheadAttention(8, 2)), seeded(lambda: nn.MultiheadAttention(8, 4))),
    "order in a layer": lambda: (
        seeded(lambda: nn.TransformerEncoderLayer(8, 2, 16)),
        seeded(lambda: nn.TransformerEncoderLayer(8, 2, 16, norm_first=True)),
    ),
}


def huber(delta: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, y: Tensor) -> Tensor:
        return F.huber_loss(output, y, reduction="none", delta=delta).flatten(1).sum(1)

    return loss


def with_delta(output: Tensor, y: Tensor, delta: float = 1.0) -> Tensor:
    return F.huber_loss(output, y, reduction="none", delta=delta).flatten(1).sum(1)


class Loss(nn.Module):
    """A criterion that is a module."""

    def __init__(self, delta: float) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return with_delta(output, y, self.delta)


CRITERIA: dict[str, Callable[[float], Any]] = {
    "closures": huber,
    "partial functions": lambda delta: functools.partial(with_delta, delta=delta),
    "modules": Loss,
}


def prox(mu: float) -> FedAvg:
    class Prox(FedAvg):
        def direction(self, theta: Tensor, grad: Any, client: askew.Client) -> Tensor:
            return grad(theta) + mu * (theta - client.w)  # type: ignore[no-any-return]

    return Prox()


def prox_attribute(by: float) -> FedAvg:
    class Prox(FedAvg):
        mu = by

        def direction(self, theta: Tensor, grad: Any, client: askew.Client) -> Tensor:
            return grad(theta) + self.mu * (theta - client.w)  # type: ignore[no-any-return]

    return Prox()


def data_with(criterion: Any) -> askew.Dataset:
    samples = askew.Samples(X, X[:, :1])
    return askew.Dataset(samples, samples, classes=0, criterion=criterion)


def digest_of(method: FedAvg) -> str:
    return Config.build({"algorithm": method, "model": {"name": "softmax"}}).digest()


def all_marks() -> list[str]:
    """The hashes of everything above, twice over, in the order in which it stands here."""
    pairs = [pair() for pair in NETWORKS.values() for _ in range(2)]
    marks = [OwnNetwork.of(module).fingerprint for pair in pairs for module in pair]
    marks += [OwnData.of(data_with(make(d)), None).fingerprint for make in CRITERIA.values() for d in (0.1, 5.0)]
    marks += [digest_of(make(mu)) for make in (prox, prox_attribute) for mu in (0.0, 5.0)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Remark)
        return [*marks, *(OwnNetwork.of(Net(lock=threading.Lock())).fingerprint for _ in range(2))]


@pytest.mark.parametrize("what", NETWORKS)
def test_networks_that_compute_otherwise_have_other_hashes(what: str) -> None:
    first, second, again = (*NETWORKS[what](), NETWORKS[what]()[0])
    marks = [OwnNetwork.of(module).fingerprint for module in (first, second, again)]
    assert marks[0] == marks[2] != marks[1]
    made = [NetworkMaker.of(functools.partial(lambda m: m, module)).fingerprint for module in (first, second, again)]
    assert made[0] == made[2] != made[1]


@pytest.mark.parametrize("what", CRITERIA)
def test_criteria_that_compute_otherwise_have_other_hashes(what: str) -> None:
    marks = [OwnData.of(data_with(CRITERIA[what](delta)), None).fingerprint for delta in (0.1, 5.0, 0.1)]
    assert marks[0] == marks[2] != marks[1]


@pytest.mark.parametrize("make", [prox, prox_attribute])
def test_methods_that_compute_otherwise_have_other_hashes(make: Callable[[float], FedAvg]) -> None:
    marks = [digest_of(make(mu)) for mu in (0.0, 5.0, 0.0)]
    assert marks[0] == marks[2] != marks[1]


def test_a_value_that_a_function_finds_anew_is_noticed_and_one_that_it_collects_is_not() -> None:
    by, seen, count = 1.0, list[float](), 0

    def scale(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        seen.append(by)
        return by * x

    first = OwnNetwork.of(Net(scale)).fingerprint
    scale(X)
    assert OwnNetwork.of(Net(scale)).fingerprint == first
    by = 2.0
    assert OwnNetwork.of(Net(scale)).fingerprint != first


ACTIVATION: Any = torch.relu


class ByGlobal(Net):
    def forward(self, x: Tensor) -> Any:
        return self.b(ACTIVATION(self.a(x)))


def test_a_function_that_code_uses_by_a_name_of_its_module_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    first = OwnNetwork.of(ByGlobal()).fingerprint
    monkeypatch.setattr(sys.modules[__name__], "ACTIVATION", torch.tanh)
    assert OwnNetwork.of(ByGlobal()).fingerprint != first


def test_two_classes_of_one_name_are_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from torch import nn\n"
    for by in (1, 2):
        text += f"class Twice(nn.Linear):\n    def forward(self, x):\n        return {by} * super().forward(x)\n"
        text += f"kept_{by} = Twice\n"
    file = tmp_path / "twice.py"
    file.write_text(text)
    module = types.ModuleType("twice")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "twice", module)
    exec(compile(text, str(file), "exec"), module.__dict__)
    networks = [seeded(lambda by=by: vars(module)[f"kept_{by}"](3, 2)) for by in (1, 2)]  # type: ignore[misc]
    assert OwnNetwork.of(networks[0]).fingerprint != OwnNetwork.of(networks[1]).fingerprint


def test_hashes_are_the_same_in_every_process() -> None:
    """Neither an address nor the order of a set is in them."""
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_identity as t; "
    script += "print(*t.all_marks())"
    seen = set()
    for seed in ("1", "2"):
        surroundings = {**os.environ, "PYTHONHASHSEED": seed, "ASKEW_FILLER": "x" * int(seed) * 1000}
        done = subprocess.run([sys.executable, "-c", script], env=surroundings, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        seen.add(done.stdout)
    assert len(seen) == 1


def test_what_cannot_be_described_has_a_number() -> None:
    """Two such networks are two, one is found again, and a remark says what that means."""
    first, second = (Net(lock=threading.Lock()) for _ in range(2))
    with pytest.warns(Remark, match=r"holds a value of type _thread\.lock, of which no description can be stored"):
        mark = OwnNetwork.of(first).fingerprint
    with pytest.warns(Remark, match="no description"):
        assert OwnNetwork.of(second).fingerprint != mark
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert OwnNetwork.of(first).fingerprint == mark


def test_a_layer_that_prints_a_function_prints_no_address() -> None:
    class Shown(Net):
        def extra_repr(self) -> str:
            return f"act={self.act}"

    marks = [OwnNetwork.of(Shown(scaled(1.0))) for _ in range(2)]
    assert marks[0].structure == marks[1].structure


def test_a_sweep_keeps_every_network_and_a_stored_run_is_found_again(tmp_path: Path) -> None:
    nets: list[Any] = [Net(torch.relu), Net(torch.tanh), lambda: Net(scaled(1.0)), lambda: Net(scaled(2.0))]
    swept = askew.sweep(over={"model": nets}, data=(X, Y), out=tmp_path, **TINY)
    assert len(swept) == 4 and len({run.folder for run in swept}) == 4
    alone = [askew.run(data=(X, Y), model=net, **TINY).curve("loss") for net in nets]
    assert [run.curve("loss") for run in swept] == alone
    again = askew.run(data=(X, Y), model=lambda: Net(scaled(2.0)), out=tmp_path, **TINY)
    assert again.folder == swept[3].folder and len([*tmp_path.glob("fedavg-*")]) == 4
    methods = askew.sweep(over={"method": [prox(0.0), prox(5.0)]}, data=(X, Y), model="softmax", **TINY)
    assert len(methods) == 2
