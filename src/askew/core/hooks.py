"""Hooks of a client, called and checked: what does not fit is refused by a sentence that names the method and the hook.

Each function here calls the hook of its name. Engines run hooks by these functions, but for trials of what a method
declares. Functions of askew itself, also inherited ones, are tested, and are not checked at every step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor

from ..errors import AlgorithmError
from .algorithm import Algorithm, Gradient
from .settings import is_askews
from .task import Task
from .types import Affine, Batch, Client, State
from .words import in_words

STATE = "a dictionary of tensors by name"
WATCHED_CALLS = 200  # calls of a hook in which it is watched for changes in place
UNWATCHED = nullcontext()


def carry(alg: Algorithm, client: Client) -> State:
    """The method's own entries of the carry."""
    if is_ours(alg, "carry"):
        return alg.carry(client)
    with unchanged(alg, "carry", client):
        own = alg.carry(client)
    if not is_state(own):
        raise wrong_return(alg, "carry", STATE, own)
    return own


def begin(alg: Algorithm, client: Client) -> Tensor:
    """The point where local training starts."""
    if is_ours(alg, "begin"):
        return alg.begin(client)
    with unchanged(alg, "begin", client):
        theta = alg.begin(client)
    if not fits(theta, client.w):
        raise wrong_return(alg, "begin", f"the point where training starts, {in_words(client.w)}", theta)
    return theta


def loss(alg: Algorithm, task: Task, theta: Tensor, batch: Batch, client: Client) -> Tensor:
    """What is differentiated."""
    if is_ours(alg, "loss"):
        return alg.loss(task, theta, batch, client)
    with unchanged(alg, "loss", client, **{"batch.x": batch.x, "batch.y": batch.y}):
        value = alg.loss(task, theta, batch, client)
    if not isinstance(value, Tensor) or value.dim():
        raise wrong_return(alg, "loss", "one number, a tensor of shape []", value)
    if theta.requires_grad and not value.requires_grad:  # under vmap alone, neither says so
        raise without_gradient(alg)
    return value


def direction(alg: Algorithm, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
    """The direction of a local step."""
    if is_ours(alg, "direction"):
        return alg.direction(theta, grad, client)
    with unchanged(alg, "direction", client, theta=theta, **{"grad(theta)": grad(theta)}):  # computed already
        d = alg.direction(theta, grad, client)
    if not fits(d, theta):
        raise wrong_return(alg, "direction", f"the direction of a step, {in_words(theta)}", d)
    return d


def descend(alg: Algorithm, theta: Tensor, d: Tensor, client: Client) -> tuple[Tensor, Tensor]:
    """The new theta and momentum."""
    v = client.carry["momentum"]
    if is_ours(alg, "descend"):
        return alg.descend(theta, d, v, client)
    with unchanged(alg, "descend", client, theta=theta, d=d, v=v):
        new = alg.descend(theta, d, v, client)
    if not (is_pair(new) and fits(new[0], theta) and fits(new[1], v)):
        raise wrong_return(alg, "descend", f"theta and momentum, {in_words((theta, v))}", new)
    return new


def affine_step(alg: Algorithm, client: Client) -> Affine | None:
    """The declared step; None: none is."""
    rule = alg.affine_step(client)
    if is_ours(alg, "affine_step") or rule is None:
        return rule
    if not isinstance(rule, Affine):
        raise wrong_return(alg, "affine_step", "an Affine or None", rule)
    shift = rule.shift
    if shift is not None and not (isinstance(shift, Tensor) and shift.shape in (client.w.shape, ())):
        raise wrong_return(alg, "affine_step", f"a shift of shape {list(client.w.shape)}", shift)
    return rule if shift is None else rule._replace(shift=shift.expand_as(client.w))


def note(alg: Algorithm, theta: Tensor, g: Tensor, d: Tensor, client: Client) -> State:
    """New carry entries after a step."""
    if is_ours(alg, "note"):
        return alg.note(theta, g, d, client)
    with unchanged(alg, "note", client, theta=theta, g=g, d=d):
        new, old = alg.note(theta, g, d, client), client.carry
    if not is_state(new):
        raise wrong_return(alg, "note", STATE, new)
    if unknown := new.keys() - old.keys():
        raise AlgorithmError(
            f"{alg.display_name()}: note() may only renew names that carry() started; new: {sorted(unknown)}."
        )
    if wrong := [n for n in new if not fits(new[n], old[n])]:
        started = in_words({n: old[n] for n in wrong})
        raise wrong_return(alg, "note", f"entries as carry() started them, {started}", {n: new[n] for n in wrong})
    return new


def finish(alg: Algorithm, theta: Tensor, client: Client) -> tuple[State, State]:
    """The upload and the client's new state, whose form the server compares with the declared one."""
    if is_ours(alg, "finish"):
        return alg.finish(theta, client)
    with unchanged(alg, "finish", client, theta=theta):
        sent = alg.finish(theta, client)
    if not (is_pair(sent) and is_state(sent[0]) and is_state(sent[1])):
        raise wrong_return(alg, "finish", f"the upload and the client's state, each {STATE}", sent)
    if "delta" in sent[0] and not fits(sent[0]["delta"], client.w):
        raise wrong_return(alg, "finish", f"as the entry 'delta' {in_words(client.w)}", sent[0]["delta"])
    return sent


# nothing in place -----------------------------------------------------------------------------------------------------


watches_left: dict[tuple[type[Algorithm], str], int] = {}  # by class and hook: calls still watched; askew's: −1


def watch_anew() -> None:
    """Forget which hooks were watched: they may have been replaced since. Called before a run."""
    watches_left.clear()


def calls_left(alg: Algorithm, hook: str) -> int:
    """How many calls of a hook are still watched; −1 if the function is askew's own."""
    key = type(alg), hook
    found = watches_left.get(key)
    if found is None:
        found = watches_left[key] = -1 if is_askews(getattr(type(alg), hook)) else WATCHED_CALLS
    return found


def is_ours(alg: Algorithm, hook: str) -> bool:
    """Is a hook askew's own function, perhaps inherited? It is tested, and not checked at every step."""
    return calls_left(alg, hook) < 0


def is_watched(alg: Algorithm, hook: str) -> bool:
    """Is this one of the first calls of a hook that is not askew's own? What changes tensors does so at once."""
    calls = calls_left(alg, hook)
    if calls > 0:
        watches_left[type(alg), hook] = calls - 1
    return calls > 0


def unchanged(
    alg: Algorithm, hook: str, client: Client | None = None, /, **given: Tensor
) -> AbstractContextManager[None]:
    """Refuse a hook, called inside, that changes in place what it was given: others still use it."""
    return watch_tensors(alg, hook, client, given) if is_watched(alg, hook) else UNWATCHED


@contextmanager
def watch_tensors(alg: Algorithm, hook: str, client: Client | None, given: State) -> Iterator[None]:
    """As `unchanged`, for every call."""
    named = dict(given)
    if client is not None:
        named |= {"client.w": client.w, "client.buffers": client.buffers}
        for part in ("server", "state", "carry"):
            named |= {f'client.{part}["{name}"]': tensor for name, tensor in getattr(client, part).items()}
    before = versions(named.values())
    yield
    for name, old, new in zip(named, before, versions(named.values()), strict=True):
        if old != new:
            raise AlgorithmError(
                f"{alg.display_name()}: {hook}() changed {name} in place, which other clients and steps still use; "
                f"compute a new tensor, such as a + b instead of a.add_(b) or a += b. {correct_hook(alg)}"
            )


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """How often each tensor was changed in place; of a row under vmap, the tensor of all rows."""
    counts = []
    for tensor in tensors:
        while is_batchedtensor(tensor):
            tensor = get_unwrapped(tensor)
        counts.append(0 if tensor.is_inference() else tensor._version)
    return counts


# sentences ------------------------------------------------------------------------------------------------------------


def is_users(alg: Algorithm) -> bool:
    """Is this not one of askew's own methods?"""
    return not is_askews(alg)


def fits(value: object, like: Tensor) -> bool:
    """Is this a tensor of the same shape and type?"""
    return isinstance(value, Tensor) and value.shape == like.shape and value.dtype == like.dtype


def is_state(value: object) -> bool:
    """Is this a dictionary of tensors by name?"""
    return isinstance(value, dict) and all(isinstance(n, str) and isinstance(v, Tensor) for n, v in value.items())


def is_pair(value: object) -> bool:
    """Is this a tuple of two?"""
    return isinstance(value, tuple) and len(value) == 2


def wrong_return(alg: Algorithm, hook: str, expected: str, value: object) -> AlgorithmError:
    """The error for a hook that returned this value instead of what is expected."""
    return AlgorithmError(
        f"{alg.display_name()}: {hook}() must return {expected}, and returned {in_words(value)}. {correct_hook(alg)}"
    )


def without_gradient(alg: Algorithm) -> AlgorithmError:
    """The error for a loss that has no gradient, on which some engines would train in silence."""
    return AlgorithmError(
        f"{alg.display_name()}: loss() returned a number that has no gradient, so that nothing would be trained; "
        f"compute it from task and theta, without torch.no_grad(), .detach() or .item(). {correct_hook(alg)}"
    )


def correct_hook(alg: Algorithm) -> str:
    """What to do about a wrong hook, with the file of a method that is not askew's own."""
    module = alg.settings_class().__module__
    file = None if not is_users(alg) else getattr(sys.modules.get(module), "__file__", None)
    return f"Correct the hook in {file!r}." if file else "Correct the hook."
