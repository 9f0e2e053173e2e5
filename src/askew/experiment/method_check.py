"""A trial of a user's own method or criterion, before a run: what do engines have to know of it?

Does its loss count samples that pad a batch? Does it draw random numbers? Does it take for numbers what some engines
hand over as tensors, be it of a client or its own settings? Does it fail for several clients at once? A loss without a
gradient, which some engines would train on in silence, results that still require one, and changes in place are
refused. Of what is askew's own nothing is tried, and what only some engines must know is tried for these alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map

from ..core import local
from ..core.algorithm import Algorithm
from ..core.differentiate import GradientResult, differentiate
from ..core.hooks import correct_hook, without_gradient
from ..core.local import Progress
from ..core.settings import is_askews
from ..core.space import Space
from ..core.task import Bound, Functional
from ..core.types import Batch, Client, State
from ..data.federation import Federation, LocalSettings
from ..engine.choose import DIFFERS, FAILS, NEEDS_NUMBERS, NEEDS_SETTINGS, ONE_BY_ONE
from ..engine.stacked import float_settings
from ..errors import AlgorithmError
from .global_generators import other_generators
from .network_check import CLOSE, LARGE, TRIED, check_rows, same_numbers, with_copies

LOCAL_HOOKS = ("begin", "carry", "loss", "direction", "descend", "note", "finish")
NUMBERS = ("lr", "lr0", "steps", "tau", "size", "round", "coin")  # tensors in `slots` and `stacked`
OF_EACH = ("w", "buffers", "steps", "tau", "size", "coin")  # what is a row for each client in `vmapped`
SOME = 0.01  # what is added to states that are zero at first


class Refused(Exception):
    """What the trial itself refuses, in a sentence; whatever else a hook raises is shown when the run calls it."""


class MethodTraits(NamedTuple):
    """What every engine must know of a user's method."""

    counts_padding: bool = False  # does its loss, or the criterion, change if samples of weight 0 pad a batch?
    draws: bool = False  # does a step give another result when it is taken again, as with random numbers?


def method_traits(alg: Algorithm, module: nn.Module, fed: Federation, settings: LocalSettings) -> MethodTraits:
    """What a trial of the method shows, on a few samples of the test set."""
    own, own_criterion = own_hooks(alg), callable(fed.criterion)
    if not own and not own_criterion:
        return MethodTraits()
    with trial_of(alg, module, fed, settings) as trial:
        trial.check_losses()
        counts_padding = ("loss" in own or own_criterion) and trial.counts_padding()
        return MethodTraits(counts_padding, trial.draws())


def ask_when_needed(alg: Algorithm, module: nn.Module, fed: Federation, settings: LocalSettings) -> None:
    """Give the network what answers, by another trial, the questions on its method's hooks that some engines have.

    For one of them torch loads for a second what only engines with rows need; of a large network a trial takes seconds.
    """

    def answer_by(question: Callable[[Trial], bool | str]) -> Callable[[nn.Module], bool | str]:
        def answer(module: nn.Module) -> bool | str:
            with trial_of(alg, module, fed, settings) as trial:
                return question(trial)

        return answer

    setattr(module, NEEDS_NUMBERS, answer_by(Trial.needs_numbers))
    setattr(module, NEEDS_SETTINGS, answer_by(Trial.needs_settings))
    setattr(module, ONE_BY_ONE, answer_by(Trial.goes_one_by_one))


@contextmanager
def trial_of(alg: Algorithm, module: nn.Module, fed: Federation, settings: LocalSettings) -> Iterator[Trial]:
    """A trial, which leaves random generators as they were."""
    with torch.random.fork_rng(devices=[]), other_generators():
        try:
            yield Trial(alg, Bound(module, Space(module, torch.float64), fed.criterion), fed, settings)
        except Refused as refused:
            raise AlgorithmError(str(refused)) from None


def own_hooks(alg: Algorithm) -> list[str]:
    """The hooks of a client, phase by phase, that are not askew's own functions."""
    return [hook for phase in alg.phases() for hook in LOCAL_HOOKS if not is_askews(getattr(type(phase), hook))]


class Key:
    """A number that notes whether it is looked up, or made a text: a tensor in its place is another key."""

    name: str
    looked_up: set[str]  # the names of such numbers, of all that have this set

    @classmethod
    def of(cls, name: str, value: float, looked_up: set[str]) -> Any:
        """The number, under a name."""
        key: Any = IntKey(value) if isinstance(value, int) else FloatKey(value)
        key.name, key.looked_up = name, looked_up
        return key

    def __hash__(self) -> int:
        self.looked_up.add(self.name)
        return super().__hash__()

    def __repr__(self) -> str:
        self.looked_up.add(self.name)
        return super().__repr__()


class FloatKey(Key, float):
    pass


class IntKey(Key, int):
    pass


class Trial:
    """Trial steps of a method on a few samples, in float64."""

    def __init__(self, alg: Algorithm, task: Bound, fed: Federation, settings: LocalSettings) -> None:
        self.alg, self.task, self.fed, self.settings, self.space = alg, task, fed, settings, task.space
        self.phases = alg.phases()  # once, as in a run: a method may make them anew at every call
        self.looked_up = set[str]()  # which of the client's numbers
        self.batch = first_samples(fed, self.space.dtype)
        self.as_given = [t.clone() for t in self.given()]

    def check_losses(self) -> None:
        """Refuse a loss that has no gradient, on which some engines would train in silence."""
        try:
            for phase, client in self.first_clients(1):
                if phase.trains and not is_askews(type(phase).loss):
                    leaf = self.task.load(client.w, client.buffers)
                    value = phase.loss(self.task, leaf, self.batch, client)
                    if isinstance(value, Tensor) and not value.requires_grad:
                        raise Refused(str(without_gradient(phase)))
        except Refused:
            raise
        except Exception:  # it is shown when the run calls it
            return

    def counts_padding(self) -> bool:
        """Does the loss change if further samples, of weight 0, pad its batch? True too where this cannot be tried.

        As by F.cross_entropy(output, batch.y), which knows no weights, or a criterion that looks at the whole batch.
        """
        batch, dtype = self.batch, self.space.dtype
        weight = torch.tensor([1.0] * len(batch.y) + [0.0] * TRIED, dtype=dtype)
        padded = Batch(with_copies(batch.x, TRIED), with_copies(batch.y, TRIED), weight)
        random = torch.randn(self.space.P, dtype=dtype, generator=torch.Generator().manual_seed(0))
        theta = self.space.start + 0.1 * random

        def result(phase: Algorithm, client: Client, batch: Batch) -> GradientResult:
            return differentiate(
                self.task, lambda leaf: phase.loss(self.task, leaf, batch, client), theta, self.space.buffers
            )

        try:
            for phase, client in self.first_clients(1):
                (one, value, _), (other, padded_value, _) = (result(phase, client, b) for b in (batch, padded))
                if differ([one, value], [other, padded_value]):
                    return True
        except Exception:  # whatever a user's hook raises: it is shown when the run calls it
            return True
        return False

    @property
    def rounds(self) -> tuple[int, ...]:
        """The rounds that are tried; what goes by rounds shows itself in the first two."""
        return (1, 2) if self.space.P <= LARGE else (1,)

    def draws(self) -> bool:
        """Do steps give another result when they are taken again, with other random numbers of torch?

        They are refused if they do so with the same ones.
        """
        draws = draws_elsewhere = False
        before = [dict(vars(phase)) for phase in self.phases]
        for round in self.rounds:
            try:
                state = torch.get_rng_state()
                once, again = self.steps(round), self.steps(round)
                torch.set_rng_state(state)
                draws_elsewhere |= differ(once, again) and differ(once, self.steps(round))
            except Refused:
                raise
            except Exception:  # it is shown when the run calls it
                break
            draws |= differ(once, again)
        for phase, old in zip(self.phases, before, strict=True):
            if changed := [name for name, value in vars(phase).items() if old.get(name, value) is not value]:
                raise AlgorithmError(
                    f"{phase.display_name()}: {changed[0]} was changed by one of its hooks, while all clients share "
                    "the method; keep what changes in client_state, server_state or the carry."
                )
        if draws_elsewhere:
            what = f"a hook of {self.alg.display_name()}" if own_hooks(self.alg) else "the criterion"
            raise AlgorithmError(
                f"{what} gives another result when it is called again: it draws random numbers that are not torch's "
                "own, which the seed does not set, or keeps something; draw by torch.rand and the like without a "
                "generator, and keep what changes in client_state, server_state or the carry."
            )
        return draws

    def needs_numbers(self) -> bool:
        """Do steps fail, or give another result, where the client's numbers are tensors, or are such numbers keys?"""
        for round in self.rounds:
            try:
                once, states = self.first_steps(round)
            except Exception:  # it is shown when the run calls it
                return False
            try:
                if self.looked_up or differ(once, self.steps(round, as_tensors=True, states=states)):
                    return True
            except Exception:
                return True
        return False

    def first_steps(self, round: int) -> tuple[list[Tensor], float]:
        """What steps leave, and what was added to the states before: nothing where these are no numbers."""
        try:
            return self.steps(round, states=SOME), SOME
        except Exception:
            return self.steps(round), 0.0

    def needs_settings(self) -> bool:
        """Do steps give another result where settings are tensors? As by isinstance(self.mu, float), or a table in
        which no tensor is found. One that fails is noticed where it is given tensors.
        """
        phases = self.phases
        if not any(map(float_settings, phases)):
            return False
        try:
            once, states = self.first_steps(2)
            self.phases = tuple(map(with_tensors, phases))
            return differ(once, self.steps(2, states=states))
        except Exception:
            return False
        finally:
            self.phases = phases

    def goes_one_by_one(self) -> str:
        """What becomes of hooks for two clients at once, if not the same? .item() fails, or an `if` on a tensor.

        Nothing where torch cannot do that with the network or the criterion: this is another question.
        """
        task = Functional(self.task.module, self.space, self.fed.criterion)
        try:
            check_rows("vmapped", task, self.fed)
            once = self.steps(1)
        except Exception:  # of a hook, it is shown when the run calls it
            return ""
        try:
            return DIFFERS if self.looked_up & {*OF_EACH} or differ(once, self.steps_of_two(task)) else ""
        except Exception:
            return FAILS

    def steps_of_two(self, task: Functional) -> list[Tensor]:
        """What two steps of every phase leave at the first of two equal clients that take them at once."""
        left, memory = list[Tensor](), self.alg.memory(self.space)
        for phase, client in self.first_clients(1):
            numbers = {n: torch.as_tensor(getattr(client, n), dtype=self.space.dtype) for n in OF_EACH}
            stored = {n: t for n, t in client.server.items() if n in memory}
            one = (numbers, stored, client.state, client.carry, self.batch.x, self.batch.y)
            two = tree_map(lambda t: torch.stack([t, t]), one)
            left += [rows[0] for rows in vmap(partial(step_of_one, phase, task, client))(*two)]
        return left

    def steps(self, round: int, as_tensors: bool = False, states: float = 0.0) -> list[Tensor]:
        """What two steps of every phase leave: with numbers, or with tensors of them."""
        left = list[Tensor]()
        for phase, client in self.first_clients(round, as_tensors, states):
            progress = two_steps(phase, self.task, client, self.batch)
            refuse_gradients(phase, ("direction", "descend"), progress.theta, progress.carry["momentum"])
            refuse_gradients(phase, ("note",), *progress.carry.values())
            result = local.finish(phase, client, progress)
            refuse_gradients(phase, ("finish",), *result.up.values(), *result.state.values())
            left += [result.theta, *result.up.values(), *result.state.values()]
        if not all(map(same_numbers, self.given(), self.as_given)):
            raise Refused(
                f"{self.alg.display_name()}: a hook changes in place what it is given, which other clients and steps "
                "still use; compute a new tensor, such as a + b instead of a.add_(b), a += b or a.data.add_(b). "
                f"{correct_hook(self.alg)}"
            )
        return left

    def given(self) -> list[Tensor]:
        """The model and the samples, from which every step begins."""
        return [self.space.start, self.space.buffers, self.batch.x, self.batch.y]

    def first_clients(
        self, round: int, as_tensors: bool = False, states: float = 0.0
    ) -> Iterator[tuple[Algorithm, Client]]:
        """What a client knows before the first step of a round, phase by phase; `states` is added to all states."""
        alg, space, fed, settings = self.alg, self.space, self.fed, self.settings
        state, declared = add_to(alg.client_state(space), states), alg.server_state(space) | alg.memory(space)
        parts = alg.parts(space)
        carry = {"labels": fed.label_counts(fed.eligible[:1].tolist())[0].cpu()} if "labels" in alg.needs else {}
        rates = (settings.lr, settings.lr, settings.momentum, settings.weight_decay, settings.clip_limit)
        for phase in self.phases:
            sent = {
                n: v.to(space.dtype) if v.is_floating_point() else v
                for n, v in add_to(declared, states).items()
                if n in phase.broadcast
            }
            client = Client(space.start, space.buffers, sent, state, carry, parts, *rates, 1.0, 1.0, 1.0, round, 0.5)
            own: dict[str, Any] = {n: getattr(client, n) for n in NUMBERS}
            if as_tensors:
                own = {n: torch.tensor(number, dtype=space.dtype) for n, number in own.items()}
            else:
                own = {n: Key.of(n, number, self.looked_up) for n, number in own.items()}
            client = client._replace(**own)
            begun = local.begin(phase, client)
            refuse_gradients(phase, ("carry",), *begun.carry.values())
            refuse_gradients(phase, ("begin",), begun.theta)
            yield phase, client._replace(carry=begun.carry)
            result = local.finish(phase, client, begun)
            state, carry = result.state, result.carry


def with_tensors(phase: Algorithm) -> Algorithm:
    """The method with its float settings as tensors, as the rows of several runs have them."""
    other = copy.copy(phase)
    for name in float_settings(phase):
        object.__setattr__(other, name, torch.tensor(getattr(phase, name), dtype=torch.float64))
    return other


def add_to(states: State, number: float) -> State:
    """States with a number added to all their numbers: at their beginning most are zero, which hides what uses them."""
    return {n: v + number if number and v.is_floating_point() else v for n, v in states.items()}


def two_steps(phase: Algorithm, task: Bound | Functional, client: Client, batch: Batch) -> Progress:
    """What two local steps leave: in the second one theta is no longer w, and what the first one noted is there."""
    once = local.step(phase, task, client, local.begin(phase, client), batch)
    return local.step(phase, task, client, once, batch)


def step_of_one(
    phase: Algorithm,
    task: Functional,
    client: Client,
    numbers: State,
    stored: State,
    state: State,
    carry: State,
    *xy: Tensor,
) -> list[Tensor]:
    """What two steps leave at a client with these entries: under vmap, at one of several."""
    own: dict[str, Any] = {"server": client.server | stored, "state": state, "carry": carry, **numbers}
    client = client._replace(**own)
    result = local.finish(phase, client, two_steps(phase, task, client, Batch(*xy)))
    return [result.theta, *result.up.values(), *result.state.values()]


def refuse_gradients(phase: Algorithm, hooks: tuple[str, ...], *results: Tensor) -> None:
    """Refuse what these hooks left if it requires a gradient: engines keep it, and compute with it in place."""
    if any(result.requires_grad for result in results):
        own = [f"{hook}()" for hook in hooks if not is_askews(getattr(type(phase), hook))]
        raise Refused(
            f"{phase.display_name()}: {' or '.join(own) or hooks[0] + '()'} returned a tensor that requires a "
            f"gradient; return it without, as by .detach(). {correct_hook(phase)}"
        )


def first_samples(fed: Federation, dtype: torch.dtype) -> Batch:
    """Copies of a few samples of the test set."""
    given = fed.inputs(fed.test.x[:TRIED]).cpu(), fed.test.y[:TRIED].cpu()
    x, y = (t.to(dtype if t.is_floating_point() else t.dtype, copy=True) for t in given)
    return Batch(x, y)


def differ(these: list[Tensor], others: list[Tensor]) -> bool:
    """Are two lists of results further apart than by rounding?"""
    return any(
        float((one - other).abs().max()) > CLOSE * (1 + float(one.abs().max()))
        for one, other in zip(these, others, strict=True)
        if one.is_floating_point() and one.numel()
    )
