"""Which methods' local steps a kernel may take: those whose class declares them affine and owns what they go through.

The declaration is a method's `affine_step`. It counts only if the class that declares it also defines `direction`
(the base class declares its own), if nothing is noted after a step, and if no other class of the method overrides
anything of the declaring class but what is listed in HARMLESS and plain defaults of settings. The declaration is also
checked against the hooks, in float64 at a random point and in every coordinate, and must stay the same while momentum
and buffers change: a method that does not do what it declares loses the fast path, with a warning.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from ..core import hooks
from ..core.algorithm import Algorithm
from ..core.settings import is_off
from ..core.types import Affine, Client, State

# What a subclass may override without touching a local step: its descriptions, states, and hooks before and after it.
DESCRIPTIONS = ("title", "paper", "idea", "variants", "settings_class", "remark", "exact", "stale", "pooled", "alike")
REQUIREMENTS = ("own_weights", "divides_by_rate", "needs", "reads", "check", "check_learning_rate", "phases", "trains")
STATES = ("server_state", "client_state", "memory", "drift_state", "parts", "private", "broadcast")
CLIENT_HOOKS = ("before", "each", "after", "begin", "carry", "loss", "finish")
SERVER_HOOKS = ("weights", "aggregate", "combines", "models", "evaluates")
HARMLESS = frozenset((*DESCRIPTIONS, *REQUIREMENTS, *STATES, *CLIENT_HOOKS, *SERVER_HOOKS))
CHANGING = ("momentum", "buffers")  # what the local loop changes with every step
CLOSE = 1e-10  # of the largest number involved: how near the two ways must be, in float64


def declared_step(alg: Algorithm, client: Client) -> Affine | None:
    """The method's next local step as an affine rule; None where it is not declared, not owned or not made of numbers.

    `client` is the client in the middle of its phase: a rule may read what the phase carries, but for momentum and
    buffers, which change with every step.
    """
    rule = hooks.affine_step(alg, client) if owns_step(alg) and has_numbers(client) else None
    if rule is None or not all(isinstance(number, (int, float)) for number in (rule.gain, rule.pull, rule.decay)):
        return None
    return rule


def has_numbers(client: Client) -> bool:
    """Are the learning rate, momentum, weight decay and clipping numbers? A sweep hands in tensors."""
    return not any(isinstance(value, Tensor) for value in (client.lr, client.momentum, client.decay, client.clip))


def takes_plain_steps(alg: Algorithm) -> bool:
    """Is the step the base class's own, along the gradient, whatever the client?"""
    return declaring_class(type(alg)) is Algorithm and owns_step(alg)


def owns_step(alg: Algorithm) -> bool:
    """Does the class that declares the step define all that the step goes through?"""
    method: type = type(alg)
    return class_owns_step(method) and vars(alg).keys() <= setting_names(method)


@lru_cache(maxsize=1000)
def class_owns_step(method: type) -> bool:
    """Does the class that declares the step define it, as far as classes show it?"""
    kinds, owner = method.__mro__, declaring_class(method)
    if owner is not Algorithm and "direction" not in vars(owner):
        return False
    for hook in ("direction", "descend"):
        if defining_class(method, hook) not in (owner, Algorithm):
            return False
    if defining_class(method, "note") is not Algorithm:  # kernels note nothing
        return False
    others = [kind for kind in kinds if kind not in owner.__mro__]
    return not any(overrides_more(kind, owner, setting_names(method)) for kind in others)


def declaring_class(method: type) -> type:
    """The class that declares a method's step."""
    return defining_class(method, "affine_step")


def defining_class(method: type, hook: str) -> type:
    """The class whose hook a method has."""
    return next(kind for kind in method.__mro__ if hook in vars(kind))


@lru_cache(maxsize=1000)
def setting_names(method: type) -> frozenset[str]:
    """The names of a method's settings."""
    return frozenset(field.name for field in dataclasses.fields(cast(Any, method)))


def overrides_more(kind: type, owner: type, settings: frozenset[str]) -> bool:
    """Does a class override anything of the owner that may have a part in a local step?"""
    for name, value in vars(kind).items():
        if name in HARMLESS or not hasattr(owner, name):
            continue
        if name in settings and isinstance(value, (bool, int, float, str, tuple, type(None))):
            continue  # another default
        if name.startswith("__") and name != "__getattribute__":
            continue  # what every class has, and what dataclasses add
        return True
    return False


def keeps_declaration(alg: Algorithm, client: Client) -> bool:
    """Do the method's hooks do what it declares? In float64 at a random point, compared in every coordinate.

    Where that gives no numbers, as by the root of a state that is never negative, at a point without negative ones.
    """
    for positive in (False, True):
        pairs = declared_and_done(alg, client, positive)
        if pairs is not None and all(bool(torch.isfinite(t).all()) for pair in pairs for t in pair):
            break
    return pairs is not None and all(
        one.shape == other.shape and largest(one - other) <= CLOSE * largest(other) for one, other in pairs
    )


def declared_and_done(alg: Algorithm, client: Client, positive: bool) -> list[tuple[Tensor, Tensor]] | None:
    """What a step at a random point does, and what is declared: direction, momentum and theta; None: not declared."""
    generator = torch.Generator().manual_seed(0)

    def random_like(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t.cpu()
        values = torch.randn(t.shape, generator=generator, dtype=torch.float64)
        return values.abs() if positive else values

    def random_state(state: State) -> State:
        return {name: random_like(entry) for name, entry in state.items()}

    theta, v, w = (random_like(client.w) for _ in range(3))
    probe = client._replace(
        w=w, server=random_state(client.server), state=random_state(client.state), carry=random_state(client.carry)
    )
    rule = declared_step(alg, probe)
    changed = {name: random_like(entry) for name, entry in probe.carry.items() if name in CHANGING}
    later = declared_step(alg, probe._replace(carry=probe.carry | changed))
    if rule is None or later is None or not same_rule(rule, later):
        return None
    grad = torch.sin  # a "gradient" that differs at every point, so that one taken elsewhere is noticed
    d = alg.direction(theta, grad, probe)
    expected = rule.gain * grad(theta) + rule.pull * theta + (0.0 if rule.shift is None else rule.shift)
    new, momentum = alg.descend(theta, d, v, probe)
    outer = d + (float(probe.decay) + rule.decay) * theta
    expected_momentum = v if is_off(probe.momentum) else float(probe.momentum) * v + outer
    step = outer if is_off(probe.momentum) else expected_momentum
    expected_new = theta - float(probe.lr) * step
    return [(d, expected), (momentum, expected_momentum), (new, expected_new)]


def same_rule(one: Affine, other: Affine) -> bool:
    """Are two rules the same, to the last digit?"""
    shifts = [shift for shift in (one.shift, other.shift) if shift is not None]
    same = len(shifts) != 1 and (not shifts or torch.equal(*shifts))
    return same and one._replace(shift=None) == other._replace(shift=None)


def largest(t: Tensor) -> float:
    """The largest absolute value."""
    return float(t.abs().amax()) if t.numel() else 0.0
