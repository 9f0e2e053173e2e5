"""Which engine a run gets, and why: by a rule, and by a stopwatch where more than one applies and there is much to do.

Engines agree only to rounding, so the choice is part of a run's record, and a run that is resumed keeps it. Small works
go by the rule alone: their numbers then are the same on a busy machine as on an idle one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ..core.settings import is_askews
from ..core.space import BATCH_NORMS, Space
from ..errors import EngineError
from ..kernels import batched_lstm
from .base import Engine, PhaseRequest
from .check import WrongResult
from .settings import ROW_ENGINES

MUCH_WORK = 10**11  # parameters times samples of all rounds; below, a trial costs more than it can win
TRIAL_SECONDS = 0.06  # that one trial may take on a CPU, one client after another
TRIAL_STEPS = 2  # of each client in a trial; more if they fit into TRIAL_SECONDS
TRIALS = 3  # of each engine, after one that does not count
SHORTEST_TIME = 1e-6  # seconds; a measured time counts as this at least
MAX_SLOWDOWN = 2.0  # times the time of the rule's engine; one that takes longer is not tried again
TIME_SHARE_TO_WIN = 0.9  # of the time of the rule's engine: what another must stay below to be taken
SMALL_NETWORK = 100_000  # parameters; above, one client's step keeps a core busy by itself
WIDE = 8.0  # clients at work side by side, on average; below, a vmapped step costs more than the steps it replaces
DENSE = (
    *(nn.Linear, nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid, nn.Flatten),
    *(nn.GroupNorm, nn.LayerNorm, nn.Identity, nn.Sequential),
)
CONVOLUTION_LAYERS = {"Conv2d", "MaxPool2d", "AvgPool2d"}  # which work under vmap too, and are slow there on a CPU
RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)
# attributes that a trial of a user's network, method and criterion gives the network
DRAWS, FORBIDS_PADDING = "_askew_draws", "_askew_forbids_padding"
# functions of the network that try a user's method: they take a while, and the answers matter to some engines alone
NEEDS_NUMBERS, NEEDS_SETTINGS, ONE_BY_ONE = "_askew_needs_numbers", "_askew_needs_settings", "_askew_one_by_one"
FAILS, DIFFERS = "fails", "differs"  # what becomes of hooks that work for one client at a time where there are several
AS_CONFIGURED = "as configured"  # the reason for an engine that was named
TENSOR_ENGINES = ("slots", "stacked")  # engines in which a client's numbers are tensors


def stochastic(module: nn.Module) -> bool:
    """Are random numbers drawn in training? By the network's layers, or as a trial of it and the method has shown."""
    by_layers = any(isinstance(layer, RANDOM) and getattr(layer, "p", 1) for layer in module.modules())
    return by_layers or getattr(module, DRAWS, False)


def has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(layer, BATCH_NORMS) for layer in module.modules())


def forbids_padding(module: nn.Module) -> bool:
    """Would padding its batches change a result? By its layers, or as a trial of it and the method's loss has shown."""
    return has_batch_norm(module) or getattr(module, FORBIDS_PADDING, False)


def is_dense(layer: nn.Module) -> bool:
    """Is it one of the layers of dense networks, or of a subclass that computes the same?"""
    return isinstance(layer, DENSE) and any(type(layer).forward is kind.forward for kind in DENSE)


def skips_a_token(module: nn.Module) -> bool:
    """Has an embedding a token whose row is never trained? Stacked, torch skips it in the first of the rows alone."""
    return any(isinstance(layer, nn.Embedding) and layer.padding_idx is not None for layer in module.modules())


class EngineChoice(NamedTuple):
    """An engine and why it; `others` apply as well."""

    name: str
    reason: str
    others: tuple[str, ...] = ()


def choose(
    name: str,
    module: nn.Module,
    space: Space,
    width: float,
    *,
    compiled: bool = False,
    bf16: bool = False,
    client_steps: bool = False,
) -> EngineChoice:
    """The engine by the rule; `width` is a cohort's work divided by its longest client's.

    `client_steps`: a kernel takes the steps of a small network faster one client after another.
    """
    check_named(name, module)
    if name == "stacked" and forbids_padding(module):
        return EngineChoice(
            "vmapped", "stacked would pad batches, and batch norm, or another layer or loss, would count that"
        )
    if name == "stacked" and skips_a_token(module):
        return EngineChoice("vmapped", "stacked would train the embedding's padding_idx")
    if name != "auto":
        return EngineChoice(name, AS_CONFIGURED)
    if stochastic(module):
        return EngineChoice("sequential", "random numbers are drawn while training")
    choice = choose_by_rule(module, space, width, compiled, bf16, client_steps)
    if (choice.name != "sequential" or choice.others) and ask(module, ONE_BY_ONE):
        return EngineChoice("sequential", "a hook of the method works for one client at a time alone")
    return choice


def ask(module: nn.Module, question: str) -> str | bool:
    """What a trial of the method answers; nothing of askew's own methods."""
    trial: Callable[[nn.Module], str | bool] | None = getattr(module, question, None)
    return trial(module) if trial else False


def choose_by_rule(
    module: nn.Module, space: Space, width: float, compiled: bool, bf16: bool, client_steps: bool
) -> EngineChoice:
    """The engine by the rule, of those that can run this network; the arguments are as for `choose`."""
    not_dense = [type(m).__name__ for m in module.modules() if not is_dense(m) and not is_askews(type(m))]
    if space.device.type != "cuda":
        return choose_on_cpu(space, width, not_dense, compiled or bf16, client_steps)
    if ask(module, NEEDS_NUMBERS):
        return EngineChoice("sequential", "a hook of the method needs numbers where a GPU has tensors")
    return choose_on_cuda(module, space, not_dense, compiled, bf16)


def check_named(name: str, module: nn.Module) -> None:
    """Refuse an engine that cannot run this network or method."""
    if name in (*ROW_ENGINES, "slots") and stochastic(module):
        raise EngineError(
            f'engine: "{name}" cannot run a network with dropout, or a method that draws random numbers, reproducibly; '
            'use engine.name = "sequential".'
        )
    if name in ROW_ENGINES and ask(module, ONE_BY_ONE) == DIFFERS:  # one that fails says so itself
        raise EngineError(
            f'engine: "{name}" trains many clients at once, with which a hook of this method gives another result; '
            "let it not look a number up in a dictionary, ask for its type, turn it into text or catch the errors of "
            'tensors, or use engine.name = "sequential".'
        )
    if name in TENSOR_ENGINES and ask(module, NEEDS_NUMBERS):
        raise EngineError(
            f'engine: "{name}" hands over the round, the learning rate and the like as tensors, with which a hook of '
            "this method fails or gives another result; compute with them as with numbers (no dictionary, str or "
            'isinstance, and torch.where instead of if), or use engine.name = "sequential" or "vmapped".'
        )


def choose_on_cpu(
    space: Space, width: float, not_dense: Sequence[str], one_by_one: bool, client_steps: bool
) -> EngineChoice:
    """The engine on a CPU by the rule; `not_dense` are the names of its layers that are not known to be dense.

    `one_by_one`: the network is compiled, or trained in bfloat16.
    """
    if not_dense:
        return EngineChoice("sequential", f"{not_dense[0]} is faster, or only known to work, one client at a time")
    if one_by_one:
        return EngineChoice("sequential", "compiled and bfloat16 networks are trained one client at a time")
    side_by_side = f"only about {width:.1f} clients would be at work side by side"
    if width < 2:
        return EngineChoice("sequential", side_by_side)
    if space.P > SMALL_NETWORK:
        busy = f"with {space.P:,} parameters one client's step keeps the machine busy"
        return EngineChoice("sequential", busy, ("vmapped",))
    if width < WIDE:
        return EngineChoice("sequential", side_by_side, ("vmapped",))
    if client_steps:
        return EngineChoice("sequential", "one call of a kernel takes all steps of a client", ("vmapped",))
    few = f"a small dense network ({space.P:,} parameters), about {width:.0f} clients at work side by side"
    return EngineChoice("vmapped", few, ("sequential",))


def choose_on_cuda(
    module: nn.Module, space: Space, not_dense: Collection[str], compiled: bool, bf16: bool
) -> EngineChoice:
    """The engine on a GPU by the rule; `not_dense` are the names of its layers that are not known to be dense."""
    slots = "a GPU is kept busy by many clients at a time"
    known = not compiled and not forbids_padding(module) and not skips_a_token(module)
    if known and not bf16 and {*not_dense} <= {"Embedding"} and batched_lstm.runs_on_gpu(module, space.dtype):
        return EngineChoice("stacked", "an LSTM: one kernel a time step serves many clients", ("slots",))
    if not known or {*not_dense} - CONVOLUTION_LAYERS:
        return EngineChoice("slots", slots)
    if bf16:  # kernels take rows of convolutions that are pooled; of others, torch makes one slow convolution
        return EngineChoice("slots", slots, ("stacked",) if not not_dense or getattr(module, "pooled", False) else ())
    if space.P <= SMALL_NETWORK:
        return EngineChoice("stacked", f"a small network ({space.P:,} parameters): one kernel serves many clients")
    if not_dense:
        return EngineChoice("slots", slots, ("stacked",))
    return EngineChoice("stacked", "dense: one product serves many", ("slots",))


def worth_a_trial(request: PhaseRequest, rounds: int) -> bool:
    """Is there so much to do, if all rounds are like this one, that a trial pays?"""
    samples = sum(len(work.places) for work in request.plan.train)
    return rounds * request.inputs.w.shape[-1] * samples >= MUCH_WORK


def fastest(
    rule: EngineChoice,
    request: PhaseRequest,
    width: float,
    make: Callable[[str], Engine],
    clock: Callable[[], float] = time.perf_counter,
) -> EngineChoice:
    """The fastest of a rule's engines at some of a round's work, whose results are thrown away."""
    device, times = request.inputs.w.device, dict[str, float]()

    def seconds(engine: Engine, request: PhaseRequest) -> float:
        began = clock()
        engine.run([request])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - began

    engines = {name: make(name) for name in (rule.name, *rule.others)}
    if device.type == "cpu":  # on CUDA all of it, for whose shapes graphs are captured that are of use later
        some = trial_request(request, width, partial(seconds, engines["sequential"]))
        if some is None:
            return rule
        request = some
    wrong = list[str]()
    for name in (rule.name, *rule.others):
        try:
            seconds(engines[name], request)
        except Exception as e:  # not this network, not in this memory, not on this GPU (Triton's own), another result
            if len(engines) == 1:
                raise
            del engines[name]
            wrong += [name] if isinstance(e, WrongResult) else []
    for _ in range(TRIALS):
        for name, engine in engines.items():
            if times.get(name, 0.0) <= MAX_SLOWDOWN * times.get(rule.name, math.inf):
                times[name] = min(times.get(name, math.inf), seconds(engine, request))
    best = min(times, key=lambda name: times[name] if name == rule.name else times[name] / TIME_SHARE_TO_WIN)
    measured = ", ".join([*(f"{name} {1e3 * s:.3g} ms" for name, s in times.items()), *(f"{n} wrong" for n in wrong)])
    return EngineChoice(best, f"measured on some steps of the first round: {measured}")


def trial_request(request: PhaseRequest, width: float, seconds: Callable[[PhaseRequest], float]) -> PhaseRequest | None:
    """As many clients and steps of a request as a trial has time for; None if it has none for two clients.

    `seconds` is how long the sequential engine takes.
    """
    one = first_steps(request, 1, 1)
    seconds(one)  # which does not count
    alone = max(seconds(one), SHORTEST_TIME)
    count = min(round(width), int(TRIAL_SECONDS / TRIAL_STEPS / alone))
    return first_steps(request, count, int(TRIAL_SECONDS / count / alone)) if count >= 2 else None


def first_steps(request: PhaseRequest, clients: int, steps: int) -> PhaseRequest:
    """The first steps of the clients that have most of them."""
    works = request.plan.train
    rows = sorted(range(len(works)), key=lambda i: -works[i].batches)[:clients]
    return request.only(rows).first_steps(steps)
