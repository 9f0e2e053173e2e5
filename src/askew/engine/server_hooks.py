"""Hooks that the server calls, and what they must return; `core/hooks.py` has those of a client.

What does not fit is refused by a sentence that names the method and the hook.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.hooks import STATE, correct_hook, is_ours, is_pair, is_state, is_users, unchanged, wrong_return
from ..core.space import Space
from ..core.types import Cohort, State
from ..core.words import in_words
from ..errors import AlgorithmError

WEIGHTS_CLOSE = 1e-3  # how far from 1 the sum of weights may be, by rounding


def declared_state(alg: Algorithm, hook: str, space: Space) -> State:
    """What one of the hooks that declare a state returns."""
    state: State = getattr(alg, hook)(space)
    if not is_state(state):
        raise wrong_return(alg, hook, STATE, state)
    return state


def weights(phase: Algorithm, up: State, cohort: Cohort) -> Tensor:
    """The participants' weights [C]."""
    with unchanged_inputs(phase, "weights", up, cohort, {}):
        given = phase.weights(up, cohort)
    fitting = isinstance(given, Tensor) and given.shape == cohort.p.shape
    if not fitting or (is_users(phase) and given.dtype != cohort.p.dtype):
        raise wrong_return(phase, "weights", f"a weight for each client, {in_words(cohort.p)}", given)
    return given.to(cohort.p.dtype)


def check_weights(phase: Algorithm, up: State, cohort: Cohort) -> None:
    """Refuse weights of a user's hook that are no shares of a whole, unless a report that is not finite spoils them."""
    if is_ours(phase, "weights"):
        return
    given = weights(phase, up, cohort)
    is_close = (given.sum() - 1).abs() <= WEIGHTS_CLOSE  # of a number that is none, neither holds
    if bool(is_close & (given >= 0).all()):
        return
    if all(bool(torch.isfinite(report).all()) for report in (*up.values(), cohort.loss)):
        raise AlgorithmError(
            f"{phase.display_name()}: weights() must return weights of 0 or more that sum to 1, and in round "
            f"{cohort.round} it returned {float(given.min()):.4g} to {float(given.max()):.4g}, with the sum "
            f"{float(given.sum()):.4g}; divide them by their sum. {correct_hook(phase)}"
        )


def aggregate(
    phase: Algorithm, w: Tensor, up: State, cohort: Cohort, server: State, memory: State
) -> tuple[Tensor, State, State]:
    """The new model, server state and memory rows."""
    with unchanged_inputs(phase, "aggregate", up, cohort, server | memory, w=w):
        aggregated = phase.aggregate(w, up, cohort, server | memory)
    if not (is_pair(aggregated) and isinstance(aggregated[0], Tensor) and is_state(aggregated[1])):
        raise wrong_return(phase, "aggregate", f"the new model and {STATE}", aggregated)
    new, entries = aggregated
    same_form(phase, "aggregate", "model", {"w": w}, {"w": new})
    entries = same_form(phase, "aggregate", "server state", server | memory, entries)
    return new, {n: entries[n] for n in server}, {n: entries[n] for n in memory}


def unchanged_inputs(
    phase: Algorithm, hook: str, up: State, cohort: Cohort, server: State, **given: Tensor
) -> AbstractContextManager[None]:
    """Refuse a hook of a user's, called inside, that changes in place what it is given: others use it, too."""
    if is_ours(phase, hook):
        return nullcontext()
    states = {"up": up, "server": server, "cohort.public": cohort.public or {}}
    given |= {f"{name}[{n!r}]": t for name, state in states.items() for n, t in state.items()}
    numbers = reversed(cohort._asdict().items())  # size before steps: they may be rows of one tensor
    given |= {f"cohort.{name}": value for name, value in numbers if isinstance(value, Tensor)}
    return unchanged(phase, hook, **given)


def same_form(phase: Algorithm, hook: str, what: str, old: State, new: State) -> State:
    """The new state; refused without its names, shapes and dtypes: a bank, a message and a checkpoint must hold it."""
    declared, returned = ({n: f"{tuple(v.shape)} {v.dtype}" for n, v in state.items()} for state in (old, new))
    if declared != returned:
        name = next(n for n in {**declared, **returned} if declared.get(n) != returned.get(n))
        raise AlgorithmError(
            f"{phase.display_name()}: {hook}() must return the {what} with its declared names, shapes and types; "
            f"{name!r} was declared {declared.get(name, 'not at all')} and came back "
            f"{returned.get(name, 'not at all')}. {correct_hook(phase)}"
        )
    return new
