"""What a run is made of: data, network, engine and server, built from its configuration."""

from __future__ import annotations

import copy
import os
import platform
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn

from ..core import dense, native
from ..core.rng import torch_seed
from ..core.space import Space
from ..core.task import Bound, Functional, Task, with_features
from ..data.dataset import Dataset, NaturalSource, Source
from ..data.federation import Federation
from ..data.partition import Iid, Natural, Partition
from ..engine.base import Engine
from ..engine.choose import EngineChoice, EngineSettings, choose, has_batch_norm, stochastic, tried, worth
from ..engine.distributed import ALONE, DistributedEngine, ProcessGroup, SharedEvaluator
from ..engine.evaluate import Evaluator
from ..engine.round_metrics import ClientWeights, LocalFit
from ..engine.sequential import Sequential
from ..engine.server import Server
from ..engine.slots import Slots
from ..engine.stacked import Stacked
from ..engine.vmapped import Vmapped
from ..errors import EngineError, ModelError
from ..models import fused
from ..models.network import Chain, fuse
from ..version import __version__
from .config import Config

GRAPHS = ("cuda",)  # devices on which clients side by side are captured as graphs


class BuiltRun(NamedTuple):
    """Everything a run is made of."""

    config: Config
    fed: Federation
    module: nn.Module
    space: Space
    task: Task
    exam: Evaluator
    server: Server
    facts: dict[str, Any]


def device_of(name: str) -> torch.device:
    """The device a configuration names."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise EngineError(f"engine: unknown device {name!r}; allowed are auto, cpu, cuda and cuda:N. Try auto.")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise EngineError(
            f"engine: there is no device {name!r} here ({torch.cuda.device_count()} CUDA devices); use auto or cpu."
        )
    return torch.device(name)


def own_device(device: torch.device, group: ProcessGroup) -> torch.device:
    """The CUDA device of a rank: each has one to itself."""
    count, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", group.rank))
    if device.index is not None or local >= count:
        raise EngineError(
            f"engine: {group.size} processes need a CUDA device each, and there are {count} here; use as many, and device cuda or auto."
        )
    return torch.device("cuda", local)


class BuildCache:
    """What runs that are played together share: samples on the device, engines with their slots, exams."""

    found: ClassVar[
        dict[Any, EngineChoice]
    ] = {}  # by trial, for all workshops of a process: the runs of a sweep get one engine

    def __init__(self) -> None:
        self.data: dict[Any, Dataset] = {}
        self.federations: dict[Any, Federation] = {}
        self.engines: dict[Any, tuple[Engine, Task]] = {}
        self.exams: dict[Any, Evaluator] = {}

    def samples(
        self, source: Source, partition: Partition, clients: int, seed: int, device: torch.device, dtype: torch.dtype
    ) -> Any:
        """The source's samples, on the device once for all runs; a source whose clients are drawn one by one stays itself."""
        if isinstance(source, NaturalSource) and isinstance(partition, Natural):
            return source
        key = (source, seed if source.seeded else 0, clients, device, dtype)
        if key not in self.data:
            self.data[key] = source.load(seed, clients).to(device, dtype)
        return self.data[key]

    def federation(
        self,
        source: Source,
        partition: Partition,
        clients: int,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        needs: Sequence[str],
    ) -> Federation:
        """Who holds what, once for all runs that divide the same samples alike."""
        key = (source, partition, clients, seed, device, dtype, "public" in needs, "validation" in needs)
        if key not in self.federations:
            samples = self.samples(source, partition, clients, seed, device, dtype)
            self.federations[key] = Federation(samples, partition, seed, device, dtype, needs)
        return self.federations[key]


def build(
    config: Config, shop: BuildCache | None = None, group: ProcessGroup = ALONE, kept: EngineChoice | None = None
) -> BuiltRun:
    """Data, network, engine and server, as configured; for a rank of a group, its part of them.

    `kept` is the engine that rounds before were played with, which auto then takes again.
    """
    shop = shop or BuildCache()
    device, dtype, half = device_of(config.engine.device), config.engine.storage, config.engine.dtype == "bf16"
    if group.size > 1 and device.type == "cuda":
        device = own_device(device, group)
    if config.engine.compile and device.type == "cpu":  # torch 2.13 compiles some convolutions' gradients to zero there
        raise EngineError("engine: compile = true needs a CUDA device, and this run is on the CPU; leave compile out.")
    alg = config.algorithm
    partition = Iid(clients=1, public=config.partition.public) if alg.pooled else config.partition
    fed = shop.federation(config.data, partition, config.partition.clients, config.seed, device, dtype, alg.needs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(config.seed if config.model.seed is None else config.model.seed, "model"))
        module = config.model.build_module(fed.shape, fed.classes)
    module = checked_module(module, fed, [need for need in alg.needs if need not in ("public", "validation")])
    space = Space(module, dtype, device, last=matrix_units(module, device, config.engine))
    draw = config.participation.drawn_by(config.seed)
    first = fed.sizes[config.participation.sample(draw, 1, fed.eligible, fed.clients)]
    width = float(first.sum() / first.max()) if len(first) else 1.0
    rule = choose(config.engine.name, module, space, width, half or config.engine.compile)
    make = cache(lambda name: engine_of(name, module, space, fed, config, half))
    name, reason = elect(rule, kept, config, space, fed, width / group.size, make, group)
    # Slots hold nothing of a run but its network's structure, unless part of the network is never trained.
    alike = (
        name != "sequential"
        and all(p.requires_grad for p in module.parameters())
        and all(b.is_floating_point() for b in module.buffers())
    )
    key = (name, config.model, fed.shape, fed.classes, fed.criterion, config.engine) if alike else object()
    if key not in shop.engines:
        shop.engines[key] = make(name)
    engine, task = shop.engines[key]
    exam, halves = (key, id(fed.test.x), config.evaluation.halves), config.evaluation.halves
    if exam not in shop.exams:
        shop.exams[exam] = (
            SharedEvaluator(task, fed, fed.test, group, halves)
            if group.size > 1
            else Evaluator(task, fed, fed.test, halves)
        )
    judged = "public" in alg.needs or config.evaluation.weights
    examine = Evaluator(task, fed, fed.public) if fed.public is not None and judged else None
    least = 2 if has_batch_norm(module) else 1
    engine, owns = (DistributedEngine(engine, group), group.owns) if group.size > 1 else (engine, None)
    server = Server(
        alg,
        space,
        fed,
        config.local,
        engine,
        config.seed,
        least,
        rounds=config.rounds,
        examine=examine,
        owns=owns,
        drift=config.evaluation.drift,
        times=config.evaluation.times,
        witnesses=[
            *([LocalFit(task, fed)] * config.evaluation.fit),
            *([ClientWeights(fed, examine)] if config.evaluation.weights else []),
        ],
    )
    facts = {
        "name": config.name(),
        "state": "running",
        "engine": name,
        "reason": reason,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "kernels": kernels_on(device, space.dtype),
        "workers": group.size,
        "parameters": space.P,
        "buffers": space.Q,
        "remark": config.algorithm.remark(space),
        "version": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return BuiltRun(config, fed, module, space, task, shop.exams[exam], server, facts)


def elect(
    rule: EngineChoice,
    kept: EngineChoice | None,
    config: Config,
    space: Space,
    fed: Federation,
    width: float,
    make: Callable[[str], tuple[Engine, Task]],
    group: ProcessGroup,
) -> tuple[str, str]:
    """The engine and why: the kept one, else one found before for such runs, else by trial; of several ranks, the first decides."""
    if rule.others and kept and kept.name in (rule.name, *rule.others):
        rule = kept
    elif rule.others and group.leads:
        came, engine = config.participation.turnout(config.seed, 1, fed.eligible, fed.clients), make(rule.name)[0]
        server = Server(config.algorithm, space, fed, config.local, engine, config.seed, rounds=config.rounds)
        ask = next(server.moves(1, came.ids.tolist(), came.share.tolist()), None)
        if ask and worth(ask, config.rounds):
            like = (
                rule,
                round(width),
                config.model,
                config.local,
                config.engine,
                fed.shape,
                fed.classes,
                fed.criterion,
            )
            if like not in BuildCache.found:
                BuildCache.found[like] = tried(rule, ask, width, lambda name: make(name)[0])
            rule = BuildCache.found[like]
    name, reason = group.tell([rule.name, rule.reason])
    return name, reason


def matrix_units(module: nn.Module, device: torch.device, engine: EngineSettings) -> bool:
    """Will convolutions run faster channels-last? In bfloat16, with channels enough; group norm wants it only if compiled."""
    deep = isinstance(module, Chain) and any(
        isinstance(layer, nn.Conv2d) and layer.in_channels >= 16 for layer in module.modules()
    )
    grouped = any(isinstance(layer, nn.GroupNorm) for layer in module.modules())
    return deep and device.type == "cuda" and engine.dtype == "bf16" and (engine.compile or not grouped)


def fused_on(device: torch.device, module: nn.Module) -> nn.Module:
    """The module with its layers computed as suits the device."""
    if device.type == "cpu" or fused.available():
        module = copy.deepcopy(module)
        fuse(module)
    return module


def kernels_on(device: torch.device, dtype: torch.dtype) -> str:
    """Whose kernels a run uses where there is a choice: compiled ones round otherwise than torch's."""
    if device.type == "cuda":
        return "Triton" if fused.available() else "torch"
    return "C" if native.library(dense.SOURCE, dtype) else f"torch ({native.why_not(dense.SOURCE)})"


def engine_of(
    name: str, module: nn.Module, space: Space, fed: Federation, config: Config, half: bool
) -> tuple[Engine, Task]:
    """An engine, and a task to evaluate with."""
    if name == "vmapped":
        functional = Functional(
            module if space.device.type == "cpu" else fused_on(space.device, module), space, fed.criterion, half
        )
        if space.device.type in GRAPHS and not has_batch_norm(module):
            return Stacked(functional), functional
        return Vmapped(functional, has_batch_norm(module)), functional
    if name == "slots" or space.device.type == "cpu":
        module = fused_on(space.device, module)
    bound = partial(Bound, module, space, fed.criterion, half, config.engine.compile)
    task = bound()
    return Slots(bound, has_batch_norm(module), last=space.last_channels) if name == "slots" else Sequential(
        task, config.seed, stochastic(module)
    ), task


def divided(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Who holds what: samples of every client by class, [N, K] (K = 0 without classes), and in all, [N]."""
    fed = Federation(config.data, config.partition, config.seed)
    if fed.shares is not None:
        return fed.shares.histogram(fed.pool.y.numpy(), fed.classes) if fed.classes else np.zeros(
            (fed.clients, 0)
        ), fed.sizes
    counts = [np.bincount(fed.gather([i])[0].y, minlength=fed.classes) for i in range(fed.clients)]
    return np.array(counts), fed.sizes


def checked_module(module: nn.Module, fed: Federation, calls: list[str]) -> nn.Module:
    """The network, known to take the data's inputs, to give an output and features, and to offer what the algorithm calls."""
    example, module = fed.inputs(fed.test.x[:2]).cpu(), copy.deepcopy(module)  # a user's module stays as it is
    if example.is_floating_point():
        example = example.to(next(module.parameters(), example).dtype)
    try:
        module = with_features(module, example)
    except (RuntimeError, ValueError, TypeError, IndexError) as e:
        first = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise ModelError(
            f"the network cannot take inputs of shape {fed.shape}: {first}; change the network or the data."
        ) from None
    for call in calls:
        if not callable(getattr(module, call, None)):
            raise ModelError(
                f"this algorithm needs a network that offers {call}(x), which {type(module).__name__} does not; use mlp, cnn or resnet18."
            )
        with torch.no_grad():
            copy.deepcopy(module).eval()(example, call=call)
    return module
