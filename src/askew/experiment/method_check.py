"""A trial of a user's own method or criterion, before a run: what do engines have to know of it?

Does its loss count samples that pad a batch? Does it draw random numbers? Does it take for numbers what some engines
hand over as tensors, be it of a client or its own settings? Does it fail for several clients at once? A loss without a
gradient, which some engines would train on in silence, and results that still require one are refused. Of what is
askew's own nothing is tried.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
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
from ..engine.stacked import float_settings
from ..errors import AlgorithmError
from .global_generators import other_generators
from .network_check import CLOSE, LARGE, TRIED, check_rows, with_copies

LOCAL_HOOKS = ("begin", "carry", "loss", "direction", "descend", "note", "finish")
NUMBERS = ("lr", "lr0", "steps", "tau", "size", "round", "coin")  # tensors in `slots` and `stacked`
OF_EACH = ("w", "buffers", "steps", "tau", "size", "coin")  # what is a row for each client in `vmapped`
SOME = 0.01  # what is added to states that are zero at first


class Refused(Exception):
    """What the trial itself refuses, in a sentence; whatever else a hook raises is shown when the run calls it."""


class MethodTraits(NamedTuple):
    """What engines must know of a user's method."""

    counts_padding: bool = False  # does its loss, or the criterion, change if samples of weight 0 pad a batch?
    draws: bool = False  # does a step give another result when it is taken again, as with random numbers?
    needs_numbers: bool = False  # does it give another result where its numbers are tensors?
    needs_settings: bool = False  # does it, where its settings are?
    one_by_one: bool = False  # does it fail, or give another result, for two clients at once?


def method_traits(alg: Algorithm, module: nn.Module, fed: Federation, settings: LocalSettings) -> MethodTraits:
    """What a trial of the method shows, on a few samples of the test set."""
    own = [hook for phase in alg.phases() for hook in LOCAL_HOOKS if not is_askews(getattr(type(phase), hook))]
    own_criterion = callable(fed.criterion)
    if not own and not own_criterion:
        return MethodTraits()
    space = Space(module, torch.float64)
    trial = Trial(alg, Bound(module, space, fed.criterion), fed, settings, bool(own))
    with torch.random.fork_rng(devices=[]), other_generators():
        try:
            trial.check_losses()
            counts_padding = ("loss" in own or own_criterion) and trial.counts_padding()
            draws, needs_numbers = trial.compare_steps()
            needs_settings = bool(own) and not draws and trial.needs_settings()
            return MethodTraits(
                counts_padding, draws, needs_numbers, needs_settings, bool(own) and trial.goes_one_by_one()
            )
        except Refused as refused:
            raise AlgorithmError(str(refused)) from None


class Trial:
    """Trial steps of a method on a few samples, in float64."""

    def __init__(
        self, alg: Algorithm, task: Bound, fed: Federation, settings: LocalSettings, own_hooks: bool = True
    ) -> None:
        """`own_hooks`: hooks of a client are the user's, and not the criterion alone."""
        self.own_hooks = own_hooks
        self.alg, self.task, self.fed, self.settings, self.space = alg, task, fed, settings, task.space
        self.phases = alg.phases()  # once, as in a run: a method may make them anew at every call
        self.batch = first_samples(fed, self.space.dtype)

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

    def compare_steps(self) -> tuple[bool, bool]:
        """Do steps give another result when they are taken again, and where the client's numbers are tensors?"""
        draws = draws_elsewhere = needs_numbers = False
        before = [dict(vars(phase)) for phase in self.phases]
        for round in (1, 2) if self.space.P <= LARGE else (1,):  # a table by rounds shows itself in the first two
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
            needs_numbers |= self.needs_numbers(round)
        for phase, old in zip(self.phases, before, strict=True):
            if changed := [name for name, value in vars(phase).items() if old.get(name, value) is not value]:
                raise AlgorithmError(
                    f"{phase.display_name()}: {changed[0]} was changed by one of its hooks, while all clients share "
                    "the method; keep what changes in client_state, server_state or the carry."
                )
        if draws_elsewhere:
            what = f"a hook of {self.alg.display_name()}" if self.own_hooks else "the criterion"
            raise AlgorithmError(
                f"{what} gives another result when it is called again: it draws random numbers that are not torch's "
                "own, which the seed does not set, or keeps something; draw by torch.rand and the like without a "
                "generator, and keep what changes in client_state, server_state or the carry."
            )
        return draws, needs_numbers and not draws

    def needs_numbers(self, round: int) -> bool:
        """Do steps fail, or give another result, where the client's numbers are tensors?"""
        for states in (SOME, 0.0):
            try:
                once = self.steps(round, states=states)
            except Exception:  # a state may be what nothing can be added to
                continue
            try:
                return differ(once, self.steps(round, as_tensors=True, states=states))
            except Exception:
                return True
        return False

    def needs_settings(self) -> bool:
        """Do steps give another result where settings are tensors? As by isinstance(self.mu, float), or a table in
        which no tensor is found. One that fails is noticed where it is given tensors.
        """
        phases = self.phases
        try:
            once = self.steps(2, states=SOME)
            self.phases = tuple(map(with_tensors, phases))
            return differ(once, self.steps(2, states=SOME))
        except Exception:
            return False
        finally:
            self.phases = phases

    def goes_one_by_one(self) -> bool:
        """Do hooks fail, or give another result, for two clients at once? As by .item(), or an `if` on a tensor.

        False where torch cannot do that with the network or the criterion: this is another question.
        """
        task = Functional(self.task.module, self.space, self.fed.criterion)
        try:
            check_rows("vmapped", task, self.fed)
            once = self.steps(1)
        except Exception:  # of a hook, it is shown when the run calls it
            return False
        try:
            return differ(once, self.steps_of_two(task))
        except Exception:
            return True

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
        return left

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
            if as_tensors:
                numbers: dict[str, Any] = {n: torch.tensor(getattr(client, n), dtype=space.dtype) for n in NUMBERS}
                client = client._replace(**numbers)
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
    """A few samples of the test set."""
    given = fed.inputs(fed.test.x[:TRIED]).cpu(), fed.test.y[:TRIED].cpu()
    x, y = (t.to(dtype) if t.is_floating_point() else t for t in given)
    return Batch(x, y)


def differ(these: list[Tensor], others: list[Tensor]) -> bool:
    """Are two lists of results further apart than by rounding?"""
    return any(
        float((one - other).abs().max()) > CLOSE * (1 + float(one.abs().max()))
        for one, other in zip(these, others, strict=True)
        if one.is_floating_point() and one.numel()
    )
