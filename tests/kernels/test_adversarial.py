"""Plug-ins that try to be trained wrongly: every engine, with kernels in C and without, does what the plain loop does.

A fast path may only be taken where the method declares it, owns it and keeps it. Each class below breaks one of these
in its own way, or looks as if it did.
"""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import askew
from askew.algorithms import FedAvg, FedCM, FedDC, FedDyn, FedProx, Scaffold, algorithms
from askew.core.algorithm import Algorithm, Gradient
from askew.core.settings import setting
from askew.core.space import Space
from askew.core.task import Task
from askew.core.types import Affine, Batch, Client, Number, State
from askew.data import Digits
from askew.errors import ConfigError
from askew.kernels import steps as step_kernels
from askew.kernels.affine import declared_step, keeps_declaration, owns_step
from askew.kernels.cpu import compiler
from askew.kernels.cpu.dense import SOURCE, DenseKernel
from askew.models import MLP

in_c = pytest.mark.skipif(compiler.library(SOURCE, torch.float64) is None, reason="kernels cannot be compiled here")


def mask(client: Client) -> Tensor:
    """Half of the coordinates."""
    return (torch.arange(client.w.shape[-1], device=client.w.device) % 2).to(client.w.dtype)


# plug-ins -------------------------------------------------------------------------------------------------------------


class NesterovShift(FedAvg):
    """The declared shift is the momentum, which is zero in the first step and changes with every one."""

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) + 0.5 * client.carry["momentum"]

    def affine_step(self, client: Client) -> Affine:
        return Affine(shift=0.5 * client.carry["momentum"])


class MaskedStrength(FedDyn):
    """A helper of the direction gives a number for every coordinate."""

    def strength(self, client: Client) -> Number:
        return super().strength(client) * mask(client)


class MaskedVariate(FedDC):
    """Another helper, with a setting that chooses a variant of the method as well."""

    divide_c = True

    def c(self, client: Client) -> Tensor:
        return super().c(client) * mask(client)


class VectorSetting(FedCM):
    """A setting becomes a vector in the local step, and the parent's formula is used with it."""

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        other = copy.copy(self)
        object.__setattr__(other, "alpha", 0.1 + 0.5 * mask(client))
        return FedCM.direction(other, theta, grad, client)


class OwnDirection(Scaffold):
    """The direction is another one; what the parent declares is inherited."""

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return torch.tanh(super().direction(theta, grad, client))


class OwnDescent(FedProx):
    """The step goes along the signs."""

    def descend(self, theta: Tensor, d: Tensor, v: Tensor, client: Client) -> tuple[Tensor, Tensor]:
        return theta - 0.1 * client.lr * torch.sign(d), v


class HalfStep(Algorithm):
    """To be mixed into another method: steps are halved on half of the coordinates."""

    def descend(self, theta: Tensor, d: Tensor, v: Tensor, client: Client) -> tuple[Tensor, Tensor]:
        return super().descend(theta, d * (1 - 0.5 * mask(client)), v, client)


class MixedIn(FedDyn, HalfStep):
    """A class behind FedDyn in the order of its parents changes what FedDyn's descend calls."""


class StateCalledH(FedAvg):
    """A client state with the name of a drift, which is none: a vector of another length that the step reads."""

    def client_state(self, space: Space) -> State:
        return {"h": torch.ones(3, dtype=space.dtype, device=space.device)}

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) * client.state["h"].mean()

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        return {"delta": theta - client.w}, {"h": 0.9 * client.state["h"]}


class StateCalledC(FedAvg):
    """A client state with the name of a control variate that scales gradients instead."""

    def client_state(self, space: Space) -> State:
        return {"c": space.zeros()}

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) * (1 + client.state["c"].abs())

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        return {"delta": theta - client.w}, {"c": client.state["c"] + (theta - client.w)}


class StateCalledPrev(FedProx):
    """A client state called prev: the pull is towards the client's own last model."""

    def client_state(self, space: Space) -> State:
        return {"prev": space.start.clone()}

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return super().direction(theta, grad, client) + 0.3 * (theta - client.state["prev"])

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        return {"delta": theta - client.w}, {"prev": theta}


class OwnLoss(FedDyn):
    """The loss is scaled, the step is FedDyn's."""

    def loss(self, task: Task, theta: Tensor, batch: Batch, client: Client) -> Tensor:
        return 2 * task.loss(theta, batch) + 0.01 * theta.square().sum()


class OwnNote(FedProx):
    """What is noted after every step goes up, the step itself is FedProx's."""

    def carry(self, client: Client) -> State:
        return {"path": torch.zeros_like(client.w)}

    def note(self, theta: Tensor, g: Tensor, d: Tensor, client: Client) -> State:
        return {"path": client.carry["path"] + g.abs()}

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        return {"delta": (theta - client.w) / (1 + client.carry["path"])}, client.state


class NotesWhatItDeclares(FedAvg):
    """The class that declares its step also notes something after every step, which goes up."""

    def carry(self, client: Client) -> State:
        return {"path": torch.zeros_like(client.w)}

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) + 0.1 * theta

    def note(self, theta: Tensor, g: Tensor, d: Tensor, client: Client) -> State:
        return {"path": client.carry["path"] + g.abs()}

    def affine_step(self, client: Client) -> Affine:
        return Affine(pull=0.1)

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        return {"delta": (theta - client.w) / (1 + client.carry["path"])}, client.state


class PlainForOneClient(FedAvg):
    """The declared gain depends on the client: for some, who may come first, the step is the plain one."""

    def gain(self, client: Client) -> float:
        return 1.0 if bool(client.coin < 0.7) else 0.5

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return torch.where(torch.as_tensor(client.coin) < 0.7, 1.0, 0.5).to(theta.dtype) * grad(theta)

    def affine_step(self, client: Client) -> Affine:
        return Affine(gain=self.gain(client))


class ReadsTheCarry(FedAvg):
    """The declared shift is a gradient that is looked at before the first step: there is none before the phase."""

    before: ClassVar[tuple[str, ...]] = ("gradient",)

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) + 0.5 * client.carry["gradient"]

    def affine_step(self, client: Client) -> Affine:
        return Affine(shift=0.5 * client.carry["gradient"])


class ReadsWhatChanges(ReadsTheCarry):
    """The same, and the gradient is looked at again after every step: the shift moves."""

    each: ClassVar[tuple[str, ...]] = ("gradient",)

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) + 0.5 * client.carry["gradient"]

    def affine_step(self, client: Client) -> Affine:
        return Affine(shift=0.5 * client.carry["gradient"])


class DeclaresSometimes(FedAvg):
    """A step is declared in even rounds alone."""

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) + torch.where(torch.as_tensor(client.round) % 2 == 0, 0.1 * theta, 0.1 * theta.square())

    def affine_step(self, client: Client) -> Affine | None:
        return Affine(pull=0.1) if client.round % 2 == 0 else None


class OwnBegin(Scaffold):
    """Training starts elsewhere, which no step needs to know: the fast path stays."""

    def begin(self, client: Client) -> Tensor:
        return 0.9 * client.w


class WrongDeclaration(FedProx):
    """What is declared is not what is done."""

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) + self.mu * torch.tanh(theta - client.w)

    def affine_step(self, client: Client) -> Affine:
        return Affine(pull=self.mu, shift=-self.mu * client.w)


class WrongOnOneCoordinate(FedAvg):
    """What is declared is what is done, but for the last coordinate."""

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        g = grad(theta)
        return g.index_add(0, torch.tensor([g.shape[0] - 1]), 1e-3 * g[-1:])

    def affine_step(self, client: Client) -> Affine:
        return Affine()


class Patched(FedAvg):
    """A helper is replaced on the class itself, after it was defined: nobody overrides anything."""

    strength: ClassVar[float] = 0.5

    def pull(self, theta: Tensor, client: Client) -> Tensor:
        return self.strength * (theta - client.w)

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) + self.pull(theta, client)

    def affine_step(self, client: Client) -> Affine:
        return Affine(pull=self.strength, shift=-self.strength * client.w)


def masked_pull(self: Patched, theta: Tensor, client: Client) -> Tensor:
    return self.strength * mask(client) * (theta - client.w)


Patched.pull = masked_pull  # type: ignore[method-assign]


class OwnDeclaration(FedAvg):
    """A new method that declares its step rightly: a pull that grows with the rounds."""

    mu: float = setting("pull", default=0.2, least=0)

    def strength(self, client: Client) -> Number:
        return self.mu * client.round / client.size

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) + self.strength(client) * (theta - client.w)

    def affine_step(self, client: Client) -> Affine:
        return Affine(pull=self.strength(client), shift=-self.strength(client) * client.w)


class OverridesOwnDeclaration(OwnDeclaration):
    """And a subclass of it that touches its helper."""

    def strength(self, client: Client) -> Number:
        return super().strength(client) * mask(client)


def on_the_instance() -> Algorithm:
    """A helper that is put on the instance, past the class and past what is frozen."""
    made = FedDyn(alpha=0.1)
    object.__setattr__(made, "strength", lambda client: 0.1 * mask(client))
    return made


WARNS = {"WrongDeclaration", "WrongOnOneCoordinate", "Patched", "NesterovShift"}  # declared, owned, and not kept
KEEPS = {"OwnBegin", "OwnDeclaration", "OwnLoss", "PlainForOneClient", "ReadsTheCarry", "ReadsWhatChanges"}  # own it
PLUGINS: dict[str, Algorithm] = {
    type(made).__name__ if name is None else name: made
    for name, made in [
        (None, MaskedStrength(alpha=0.1)),
        (None, NesterovShift()),
        (None, MaskedVariate(alpha=0.1)),
        (None, VectorSetting()),
        (None, OwnDirection()),
        (None, OwnDescent(mu=0.1)),
        (None, MixedIn(alpha=0.1)),
        (None, StateCalledH()),
        (None, StateCalledC()),
        (None, StateCalledPrev(mu=0.1)),
        (None, OwnLoss(alpha=0.1)),
        (None, OwnNote(mu=0.1)),
        (None, NotesWhatItDeclares()),
        (None, PlainForOneClient()),
        (None, ReadsTheCarry()),
        (None, ReadsWhatChanges()),
        (None, DeclaresSometimes()),
        (None, OwnBegin()),
        (None, WrongDeclaration(mu=0.5)),
        (None, WrongOnOneCoordinate()),
        (None, Patched()),
        (None, OwnDeclaration()),
        (None, OverridesOwnDeclaration()),
        ("on_the_instance", on_the_instance()),
    ]
}

DATA = tuple(each[:500] for each in Digits().load(0, 0).train)
LOCALS = {
    "plain": {"lr": 0.05, "batch": 16, "epochs": 1},
    "rich": {"lr": 0.05, "batch": 16, "momentum": 0.5, "weight_decay": 1e-3, "clip": 1.0},
}


@functools.cache
def reference(name: str, local: str) -> Tensor:
    """The same model, trained by the plain loop without any kernel; once for all tests of a process."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        plain(patch)
        return trained(PLUGINS[name], "sequential", local)


def trained(plugin: Algorithm, engine: str, local: str) -> Tensor:
    """The model after two rounds on 500 digits, in float64; clients have 18 to 72 of them, so two to five batches."""
    run = askew.run(
        plugin,
        data=DATA,
        rounds=2,
        clients=8,
        cohort=4,
        model={"name": "mlp", "hidden": [32]},
        local=LOCALS[local],
        engine={"name": engine, "dtype": "float64", "device": "cpu", "workers": 1},
        evaluation={"every": 2},
    )
    return torch.cat([value.flatten() for value in run.model.values()])


def without_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were no C compiler."""
    monkeypatch.setenv("ASKEW_NATIVE", "0")
    monkeypatch.setattr(compiler, "compiler", lambda: ())


def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel at all."""
    monkeypatch.setattr(step_kernels.StepKernels, "client_steps", lambda *_: None)
    monkeypatch.setattr(step_kernels.StepKernels, "gradient", lambda *_: None)
    monkeypatch.setattr(step_kernels.StepKernels, "row_steps", lambda *_: None)
    monkeypatch.setattr(step_kernels.StepKernels, "row_gradients", lambda *_: None)


ENGINES = {  # names, and whether kernels in C may be used
    "in_c": [("sequential", True), ("vmapped", True)],
    "others": [("sequential", False), ("vmapped", False), ("slots", True), ("stacked", True)],
}


def marks_of(name: str, local: str, engines: str) -> list[pytest.MarkDecorator]:
    """Fast are all plug-ins where a kernel in C takes the steps, and one plug-in in all engines and settings."""
    fast = (local, engines) == ("plain", "in_c") or name == "MaskedStrength"
    return [] if fast else [pytest.mark.slow]


CASES = [
    pytest.param(name, local, engines, id=f"{name}-{local}-{kind}", marks=marks_of(name, local, kind))
    for name in PLUGINS
    for local in LOCALS
    for kind, engines in ENGINES.items()
]


@in_c
@pytest.mark.parametrize(("name", "local", "engines"), CASES)
def test_every_engine_trains_a_plug_in_as_the_plain_loop_does(
    name: str, local: str, engines: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, wanted = PLUGINS[name], reference(name, local)
    assert bool(torch.isfinite(wanted).all())
    for engine, native in engines:
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if not native:
                without_c(patch)
            model = trained(plugin, engine, local)
        gap = float((model - wanted).abs().max() / wanted.abs().max())
        assert gap < 1e-12, f"{engine}, {'with' if native else 'without'} C: {gap:.1e}"
        messages = [str(warning.message) for warning in caught]
        assert all(type(plugin).__name__ in text and "affine_step" in text for text in messages), messages
        if engine == "sequential" and native:
            assert len(messages) == (name in WARNS), messages


# who may take the fast path -------------------------------------------------------------------------------------------


def client_of(alg: Algorithm, space: Space, momentum: float = 0.5) -> Client:
    """A client in the middle of things: random states."""
    generator = torch.Generator().manual_seed(1)
    random = lambda t: torch.randn(t.shape, generator=generator, dtype=torch.float64)
    state = {n: random(v) for n, v in alg.client_state(space).items()}
    server = {n: random(v) for n, v in (alg.server_state(space) | alg.memory(space)).items()}
    carry = {"gradient": random(space.start), "momentum": random(space.start), "buffers": space.buffers}
    numbers = (0.1, 0.1, momentum, 0.01, float("inf"), 7.0, 5.0, 1.3, 3, 0.4)
    return Client(random(space.start), space.buffers, server, state, carry, alg.parts(space), *numbers)


@pytest.fixture
def space() -> Space:
    return Space(MLP(hidden=(32,)).module((1, 8, 8), 10), torch.float64)


@pytest.mark.parametrize("name", list(PLUGINS))
def test_only_who_owns_a_declared_step_may_take_it(name: str, space: Space) -> None:
    plugin = PLUGINS[name]
    rule = declared_step(plugin, client_of(plugin, space))
    assert (rule is not None) == (name in WARNS | KEEPS)
    if rule is not None:
        assert keeps_declaration(plugin, client_of(plugin, space)) == (name not in WARNS)


DECLARED = {"fedprox", "fedcm", "feddc", "feddyn", "scaffold", "fedasync"}  # declare a step of their own
OTHER_STEPS = {"fednova", "fedpvr", "fedspeed", "fedamd", "mgda", "focus"}  # have a step that is not declared


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("method", list(algorithms))
def test_our_own_methods_keep_what_they_declare(method: str, momentum: float, space: Space) -> None:
    alg = algorithms[method]()
    client = client_of(alg, space, momentum)
    rule = declared_step(alg, client)
    assert (rule is None) == (method in OTHER_STEPS)
    if rule is not None:
        assert keeps_declaration(alg, client)
        assert (rule.shift is not None) == (method in DECLARED)


def test_a_new_default_and_server_hooks_leave_the_fast_path(space: Space) -> None:
    class NewDefault(FedDyn):
        alpha = 0.3
        extra: float = setting("something new", default=1.0)

        def aggregate(self, w: Tensor, up: State, cohort: Any, server: State) -> tuple[Tensor, State]:
            return super().aggregate(w, up, cohort, server)

    class NewHelper(NewDefault):
        def new_helper(self) -> float:
            return 1.0

    assert owns_step(NewDefault()) and owns_step(NewHelper())
    with pytest.raises(ConfigError):
        NewDefault(alpha=-1)


def test_a_setting_that_is_a_vector_and_attributes_made_up_on_the_way_are_left_to_the_plain_step(space: Space) -> None:
    class MadeUp(FedDyn):
        def __getattribute__(self, name: str) -> Any:
            return super().__getattribute__(name)

    vector = FedDyn()
    object.__setattr__(vector, "alpha", torch.linspace(0, 1, space.P, dtype=torch.float64))
    for alg in (vector, MadeUp()):
        assert declared_step(alg, client_of(alg, space)) is None


def test_numbers_in_tensors_are_left_to_the_plain_step(space: Space) -> None:
    client = client_of(FedAvg(), space)
    assert declared_step(FedAvg(), client) is not None
    for name in ("lr", "momentum", "decay", "clip"):
        assert declared_step(FedAvg(), client._replace(**{name: torch.tensor(0.1)})) is None


@in_c
@pytest.mark.parametrize(("alg", "engine"), [(FedProx(mu=0.5), "sequential"), (FedAvg(), "vmapped")])
def test_a_wrong_kernel_is_noticed_too(alg: Algorithm, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that a kernel takes wrongly, as a miscompiled one might, is refused at the first step of a run."""
    right = trained(alg, engine, "plain")
    take = DenseKernel.steps

    def wrong(self: DenseKernel, w: Tensor, *given: Any) -> Tensor:
        values = take(self, w, *given)
        w[:, 7] += 1e-3
        return values

    monkeypatch.setattr(DenseKernel, "steps", wrong)
    with pytest.warns(UserWarning, match="steps of this network differ from torch's"):
        model = trained(alg, engine, "plain")
    torch.testing.assert_close(model, right, rtol=0, atol=1e-12)


def test_a_declaration_that_is_wrong_in_later_rounds_alone_is_noticed_there() -> None:
    class WrongLater(FedAvg):
        def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
            return grad(theta) * (1.0 if client.round < 4 else 0.5)

        def affine_step(self, client: Client) -> Affine:
            return Affine(gain=1.0)

    runs = {"model": "softmax", "clients": 4, "cohort": 4, "lr": 0.1, "evaluation": {"every": 8}}
    engine = {"name": "sequential", "dtype": "float64", "device": "cpu", "workers": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        askew.run(WrongLater(), rounds=3, engine=engine, **runs)
    with pytest.warns(UserWarning, match="WrongLater"):
        fast = askew.run(WrongLater(), rounds=8, engine=engine, **runs)
    with pytest.MonkeyPatch.context() as patch:
        plain(patch)
        slow = askew.run(WrongLater(), rounds=8, engine=engine, **runs)
    for name, value in slow.model.items():
        torch.testing.assert_close(fast.model[name], value, rtol=0, atol=1e-12)
