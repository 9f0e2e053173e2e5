"""What a run is made of: data, network, engine and server, built from its configuration."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn

from ..core.memory import require_memory
from ..core.rng import torch_seed
from ..core.settings import is_askews
from ..core.space import Space
from ..core.task import Bound, Functional, Task
from ..data.dataset import Dataset, NaturalSource, Samples, Source
from ..data.federation import Federation
from ..data.partition import Iid, Natural, Partition
from ..data.user import load_checked
from ..engine.attacks import AttackStage
from ..engine.base import Engine, OutputStage
from ..engine.check import CheckedEngine
from ..engine.choose import (
    AS_CONFIGURED,
    DRAWS,
    FORBIDS_PADDING,
    NEEDS_SETTINGS,
    EngineChoice,
    ask,
    choose,
    fastest,
    forbids_padding,
    has_batch_norm,
    stochastic,
    worth_a_trial,
)
from ..engine.clock import VirtualClock
from ..engine.distributed import DistributedEngine, SharedEvaluator
from ..engine.evaluate import Evaluator
from ..engine.expected_uploads import zero_uploads
from ..engine.faults import FaultStage
from ..engine.overlapping_clock import OverlappingClock
from ..engine.overlapping_server import OverlappingServer
from ..engine.privacy_stage import PrivacyStage
from ..engine.privacy_support import check_supported
from ..engine.process_group import SINGLE, ProcessGroup
from ..engine.robust import RobustStage
from ..engine.round_metrics import ClientWeights, LocalFit, RoundMetric
from ..engine.sequential import Sequential
from ..engine.server import Server
from ..engine.settings import ROW_ENGINES, EngineSettings
from ..engine.slots import Slots
from ..engine.stacked import Stacked
from ..engine.vmapped import Vmapped
from ..errors import EngineError
from ..kernels.cuda import available
from ..kernels.interface import Kernels
from ..kernels.steps import prefers_client_steps
from ..models.network import Chain, use_kernels
from ..participation import Uniform
from ..version import __version__
from .config import Config
from .method_check import ask_when_needed, method_traits, own_hooks
from .network_check import check_module, check_rows, is_own

NO_CALLS = ("labels", "public", "validation")  # needs of a method that are no calls of the network
OWNERS_PASSED_OVER = (
    "the data say to which client every sample belongs, and the partition divides them anew; leave the partition out, "
    'or set partition.name = "natural", to keep them where they are.'
)
CHECKED_DEVICES = ("cuda",)  # on which an engine's first results are compared: no two GPUs choose the same kernels
HELD_MODELS = 4  # copies of a model that a run holds at least, beside those of the participants


class BuiltEngine(NamedTuple):
    """An engine, a task to evaluate with, and the kernels that both may use."""

    engine: Engine
    task: Task
    kernels: Kernels


class BuiltRun(NamedTuple):
    """Everything a run is made of."""

    config: Config
    fed: Federation
    module: nn.Module
    space: Space
    task: Task
    evaluator: Evaluator
    server: Server
    kernels: Kernels
    facts: dict[str, Any]
    validator: Evaluator | None = None  # what measures on the samples that clients hold out, where that is asked for
    clock: VirtualClock | None = None  # None: rounds have no duration

    @property
    def users_code(self) -> bool:
        """Does code of a user's run in the rounds?"""
        config, fed = self.config, self.fed
        parts = [config.algorithm, config.data, config.partition, config.participation, config.model, fed.transform]
        own = all(part is None or is_askews(type(part)) for part in parts)
        return not own or callable(fed.criterion) or not is_own(self.module)


class BuildCache:
    """What runs that are trained together share: samples on the device, engines with their buffers, evaluators."""

    trials: ClassVar[dict[Hashable, EngineChoice]] = {}  # for the whole process: the runs of a sweep get one engine

    def __init__(self) -> None:
        self.data: dict[Hashable, Dataset] = {}
        self.federations: dict[Hashable, Federation] = {}
        self.engines: dict[Hashable, BuiltEngine] = {}
        self.evaluators: dict[Hashable, Evaluator] = {}

    def samples(
        self, source: Source, partition: Partition, clients: int, seed: int, device: torch.device, dtype: torch.dtype
    ) -> Source | Dataset:
        """The source's samples, on the device once for all runs; a source of natural clients stays itself."""
        if isinstance(source, NaturalSource) and isinstance(partition, Natural):
            return source
        key = (source, seed if source.seeded else 0, clients, device, dtype)
        if key not in self.data:
            self.data[key] = load_checked(source, seed, clients).to(device, dtype)
        return self.data[key]

    def federation(self, config: Config, device: torch.device) -> Federation:
        """Who holds what, once for all runs that divide the same samples alike."""
        source, seed, dtype, needs = config.data, config.seed, config.engine.storage, config.algorithm.needs
        pooled = config.algorithm.pooled
        partition = Iid(clients=1, public=config.partition.public) if pooled else config.partition
        clients = config.partition.clients
        flips = config.attack if config.attack.flips_labels else None
        key = (source, partition, clients, seed, device, dtype, "public" in needs, "validation" in needs, flips)
        if key not in self.federations:
            samples = self.samples(source, partition, clients, seed, device, dtype)
            self.federations[key] = fed = Federation(samples, partition, seed, device, dtype, needs)
            if flips:
                fed.flip_labels(flips.attackers(seed, fed))
        return self.federations[key]


def build(
    config: Config, shared: BuildCache | None = None, group: ProcessGroup = SINGLE, kept: EngineChoice | None = None
) -> BuiltRun:
    """Data, network, engine and server, as configured; for a rank of a group, its part of them.

    `kept` is the engine that earlier rounds were trained with, which auto then takes again.
    """
    shared = shared or BuildCache()
    device = run_device(config.engine, group)
    fed = shared.federation(config, device)
    config = with_informed_rule(config, fed)
    module = build_module(config, fed)
    channels_last = prefers_channels_last(module, device, config.engine)
    space = Space(module, config.engine.storage, device, channels_last=channels_last)
    make = cache(lambda name: make_engine(name, module, space, fed, config))
    choice = choose_engine(config, module, space, fed, kept, make, group)
    key = engine_key(choice.name, config, fed, module)
    if key not in shared.engines:
        shared.engines[key] = make(choice.name)
    engine, task, kernels = shared.engines[key]
    measured = (config.evaluation.halves, config.evaluation.per_class)
    evaluator_key = (key, id(fed.test.x), *measured)
    if evaluator_key not in shared.evaluators:
        shared.evaluators[evaluator_key] = make_evaluator(task, fed, fed.test, group, *measured)
    validator = None
    if config.evaluation.validation:
        if (held_key := (key, id(fed), "held out")) not in shared.evaluators:
            shared.evaluators[held_key] = make_evaluator(task, fed, fed.held_out(), group)
        validator = shared.evaluators[held_key]
    server = make_server(config, space, fed, module, engine, task, group)
    if config.privacy.on:
        check_supported(config.privacy, server, zero_uploads(server))
    facts = run_facts(config, choice, space, kernels, group) | config.attack.facts(config.seed, fed)
    facts["remark"] = " ".join(filter(None, [facts["remark"], staleness_remark(config), *data_remarks(config, fed)]))
    evaluator = shared.evaluators[evaluator_key]
    clock = make_clock(config, server)
    return BuiltRun(config, fed, module, space, task, evaluator, server, kernels, facts, validator, clock)


def with_informed_rule(config: Config, fed: Federation) -> Config:
    """The configuration, whose participation rule knows the clients' labels if it asks for them."""
    rule = config.participation.with_labels(lambda: fed.label_counts(range(fed.clients)).cpu().numpy())
    return config if rule is config.participation else replace(config, participation=rule)


# the device -----------------------------------------------------------------------------------------------------------


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


def run_device(settings: EngineSettings, group: ProcessGroup) -> torch.device:
    """The device of a run; each rank of a group has a CUDA device to itself."""
    device = device_of(settings.device)
    if settings.compile and device.type == "cpu":  # torch 2.13 compiles some convolutions' gradients to zero there
        raise EngineError("engine: compile = true needs a CUDA device, and this run is on the CPU; leave compile out.")
    if group.size == 1 or device.type == "cpu":
        return device
    count, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", group.rank))
    if device.index is not None or local_rank >= count:
        raise EngineError(
            f"engine: {group.size} processes need a CUDA device each, and there are {count} here; use as many, "
            "and device cuda or auto."
        )
    return torch.device("cuda", local_rank)


# the network ----------------------------------------------------------------------------------------------------------


def build_module(config: Config, fed: Federation) -> nn.Module:
    """The configured network, checked against the data and the method."""
    check_model_memory(config, fed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(config.seed if config.model.seed is None else config.model.seed, "model"))
        module = config.model.build_module(fed.shape, fed.classes)
    calls = [need for need in config.algorithm.needs if need not in NO_CALLS]
    module = check_module(module, fed, calls, config.local.batch)
    traits = method_traits(config.algorithm, module, fed, config.local)
    for name, value in {FORBIDS_PADDING: traits.counts_padding, DRAWS: traits.draws}.items():
        if value:
            setattr(module, name, True)
    if own_hooks(config.algorithm):
        ask_when_needed(config.algorithm, module, fed, config.local)
    return module


def check_model_memory(config: Config, fed: Federation) -> None:
    """Refuse a network of askew's own of which a round's models do not fit in memory."""
    model = config.model
    if not is_askews(type(model), "askew.models"):
        return
    with torch.device("meta"):  # without its numbers
        module = model.module(fed.shape, fed.classes)
    count = sum(p.numel() for p in module.parameters())
    on_cpu, draw = fed.device.type == "cpu", config.participation.drawn_by(config.seed)
    participants = len(config.participation.draw(draw, 1, fed.eligible, fed.clients)) if on_cpu else 0
    require_memory(
        count * (HELD_MODELS + participants) * config.engine.storage.itemsize,
        f"a network with {count:,} parameters, of which each of {participants:,} participants has its own,",
        "take a smaller network or fewer participants",
    )


def prefers_channels_last(module: nn.Module, device: torch.device, engine: EngineSettings) -> bool:
    """Will convolutions run faster channels-last? In bfloat16, with channels enough; torch's group norm does not."""
    deep = any(isinstance(layer, nn.Conv2d) and layer.in_channels >= 16 for layer in module.modules())
    grouped = any(isinstance(layer, nn.GroupNorm) for layer in module.modules())
    suited = isinstance(module, Chain) and deep and device.type == "cuda" and engine.dtype == "bf16"
    return suited and (engine.compile or not grouped or available())


# the engine -----------------------------------------------------------------------------------------------------------


def make_engine(name: str, module: nn.Module, space: Space, fed: Federation, config: Config) -> BuiltEngine:
    """An engine by its name; on a GPU one that compares its first results with the sequential engine's."""
    built = make_plain_engine(name, module, space, fed, config)
    if name == "sequential" or space.device.type not in CHECKED_DEVICES:
        return built
    plain = replace(config, engine=replace(config.engine, compile=False))
    reference = lambda: make_plain_engine("sequential", module, space, fed, plain).engine
    return built._replace(engine=CheckedEngine(built.engine, reference, config.engine.dtype))


def make_plain_engine(name: str, module: nn.Module, space: Space, fed: Federation, config: Config) -> BuiltEngine:
    """An engine by its name."""
    bf16, kernels, never_pad = (
        config.engine.dtype == "bf16",
        Kernels(space.device, space.dtype),
        forbids_padding(module),
    )
    draws = stochastic(module)
    reference = name == "sequential" and space.device.type == "cuda"  # plain torch, which the others are held to
    if not reference:
        module = use_kernels(module, kernels)
    if name in ("stacked", "vmapped"):
        functional = Functional(module, space, fed.criterion, bf16, kernels)
        check_rows(name, functional, fed)
        if name == "stacked":
            return BuiltEngine(Stacked(functional, longest=longest_batches(config, fed)), functional, kernels)
        return BuiltEngine(Vmapped(functional, never_pad, kernels.steps(functional)), functional, kernels)
    loss_kernel = None if reference else kernels
    bind = partial(Bound, module, space, fed.criterion, bf16, loss_kernel, config.engine.compile)
    task = bind()
    if name == "slots":
        longest = longest_batches(config, fed)
        return BuiltEngine(Slots(bind, never_pad, channels_last=space.channels_last, longest=longest), task, kernels)
    steps = None if reference else kernels.steps(task)
    return BuiltEngine(Sequential(task, config.seed, draws, steps), task, kernels)


def longest_batches(config: Config, fed: Federation) -> dict[str, int]:
    """By name the samples that batches are padded to; none where engines may pad to the longest that they have had.

    In deterministic runs all settings decide it, and not which rounds this process has trained: a resumed run is then
    the same run.
    """
    return fed.longest_batches(config.local) if config.engine.deterministic else {}


def engine_key(name: str, config: Config, fed: Federation, module: nn.Module) -> Hashable:
    """Runs with one key share an engine: it holds nothing of a run but its network's structure.

    A network of which part is never trained is a run's own, and so is the sequential engine's. A method that must not
    be given its settings as tensors, as where several runs share rows, has an engine of its own.
    """
    trained = all(p.requires_grad for p in module.parameters()) and all(b.is_floating_point() for b in module.buffers())
    if name == "sequential" or not trained or (name == "stacked" and ask(module, NEEDS_SETTINGS)):
        return object()
    own = (forbids_padding(module), own_values(module), *longest_batches(config, fed).values())
    return name, config.model, fed.shape, fed.classes, fed.criterion, config.engine, own


def own_values(module: nn.Module) -> Hashable:
    """What the layers of a user's network hold beside weights: numbers, functions; of tensors and lists, none is equal.

    They may be drawn by the seed, as the weights are.
    """
    layers = [m for m in module.modules() if not type(m).__module__.startswith(("askew.", "torch."))]
    values = tuple((name, value) for m in layers for name, value in vars(m).items() if not name.startswith("_"))
    try:
        hash(values)
    except TypeError:
        return object()
    return values


def choose_engine(
    config: Config,
    module: nn.Module,
    space: Space,
    fed: Federation,
    kept: EngineChoice | None,
    make: Callable[[str], BuiltEngine],
    group: ProcessGroup,
) -> EngineChoice:
    """The engine and why: the stored one, else one found before for such runs, else by trial. Rank 0 decides."""
    draw = config.participation.drawn_by(config.seed)
    ids = config.participation.draw(draw, 1, fed.eligible, fed.clients)
    first = fed.sizes[ids]
    width = float(first.sum() / first.max()) if len(first) else 1.0
    steps = float(fed.planned_work(ids, config.local)[0].mean()) if len(ids) else 0.0
    classes = fed.criterion == "cross_entropy"
    client_steps = classes and prefers_client_steps(config.algorithm, module, space, width, steps)
    choice = choose(
        config.engine.name,
        module,
        space,
        width,
        compiled=config.engine.compile,
        bf16=config.engine.dtype == "bf16",
        client_steps=client_steps,
    )
    if callable(fed.criterion) and config.engine.name == "auto":
        choice = without_failing_rows(choice, make, space)
    if config.engine.deterministic:
        choice = deterministic_choice(choice, space)
    elif choice.others and kept and kept.name in (choice.name, *choice.others):
        choice = kept
    elif choice.others and group.is_leader:
        choice = try_engines(choice, config, space, fed, width / group.size, make)
    name, reason = group.broadcast([choice.name, choice.reason])
    return EngineChoice(name, reason)


def without_failing_rows(choice: EngineChoice, make: Callable[[str], BuiltEngine], space: Space) -> EngineChoice:
    """The choice without engines that cannot compute a user's criterion for many clients at once."""
    failing = list[str]()
    for name in {choice.name, *choice.others} & {*ROW_ENGINES}:
        try:
            make(name)
        except EngineError:
            failing.append(name)
    others = tuple(name for name in choice.others if name not in failing)
    if choice.name not in failing:
        return choice._replace(others=others)
    name = "slots" if space.device.type == "cuda" else "sequential"
    return EngineChoice(name, "torch cannot compute the criterion for many clients at once")


def deterministic_choice(choice: EngineChoice, space: Space) -> EngineChoice:
    """The engine by the rule alone; on CUDA not the stacked one, whose rows at a time depend on the free memory."""
    if space.device.type != "cuda" or choice.name != "stacked":
        return choice._replace(others=())
    if choice.reason == AS_CONFIGURED:
        raise EngineError(
            "engine: the stacked engine trains as many rows at a time as memory is free, which changes the last bits; "
            'with deterministic = true use engine.name = "slots" or "sequential".'
        )
    return EngineChoice("slots", "deterministic: what one client computes does not depend on the free memory")


def try_engines(
    choice: EngineChoice,
    config: Config,
    space: Space,
    fed: Federation,
    width: float,
    make: Callable[[str], BuiltEngine],
) -> EngineChoice:
    """The fastest engine of those that apply, where there is so much to do that a trial pays."""
    turnout = config.participation.turnout(config.seed, 1, fed.eligible, fed.clients)
    engine = make(choice.name).engine
    server = Server(config.algorithm, space, fed, config.local, engine, config.seed, rounds=config.rounds)
    request = next(server.round_requests(1, turnout.ids.tolist(), turnout.share.tolist()), None)
    if request is None or not worth_a_trial(request, config.rounds):
        return choice
    # not the model itself, which may hold a user's module
    network = type(config.model), str(config.model.table())
    data = (fed.shape, fed.classes, fed.criterion)
    key = (choice, round(width), network, config.local, config.engine, *data)
    if key not in BuildCache.trials:
        BuildCache.trials[key] = fastest(choice, request, width, lambda name: make(name).engine)
    return BuildCache.trials[key]


# the server -----------------------------------------------------------------------------------------------------------


def make_evaluator(task: Task, fed: Federation, samples: Samples, group: ProcessGroup, *measured: bool) -> Evaluator:
    """What measures a model on these samples, with halves, by class; several ranks share the work."""
    if group.size > 1:
        return SharedEvaluator(task, fed, samples, group, *measured)
    return Evaluator(task, fed, samples, *measured)


def make_server(
    config: Config,
    space: Space,
    fed: Federation,
    module: nn.Module,
    engine: Engine,
    task: Task,
    group: ProcessGroup,
) -> Server:
    """The server at its first round."""
    alg, evaluation = config.algorithm, config.evaluation
    wanted = "public" in alg.needs or evaluation.weights
    evaluate = Evaluator(task, fed, fed.public) if fed.public is not None and wanted else None
    metrics: list[RoundMetric] = [LocalFit(task, fed)] if evaluation.fit else []
    metrics += [ClientWeights(fed, evaluate)] if evaluation.weights else []
    several = group.size > 1
    kind = OverlappingServer if config.time.overlapping else Server
    return kind(
        alg,
        space,
        fed,
        config.local,
        DistributedEngine(engine, group) if several else engine,
        config.seed,
        2 if has_batch_norm(module) else 1,
        rounds=config.rounds,
        evaluate=evaluate,
        owns=group.owns if several else None,
        drift=evaluation.drift,
        times=evaluation.times,
        metrics=metrics,
        stages=output_stages(config, fed),
    )


def make_clock(config: Config, server: Server) -> VirtualClock | None:
    """The virtual clock at 0; None where rounds have no duration."""
    if isinstance(server, OverlappingServer):
        return OverlappingClock(config.time, config.participation, server, config.seed)
    return VirtualClock(config.time, config.participation, server, config.seed) if config.time.on else None


def output_stages(config: Config, fed: Federation) -> list[OutputStage]:
    """What clients' outputs go through before the server's step, in this order: attacks, faults, then what guards."""
    stages: list[OutputStage] = []
    if config.attack.on:
        stages.append(AttackStage(config.attack, config.attack.attackers(config.seed, fed), config.seed))
    if config.faults.on:
        stages.append(FaultStage(config.faults, config.seed))
    if config.privacy.clip:
        stages.append(PrivacyStage.simulated(config.privacy, config.participation, fed.clients, config.seed))
    if config.robust.on:
        draw = config.participation.drawn_by(config.seed)
        cohort = len(config.participation.draw(draw, 1, fed.eligible, fed.clients))
        config.robust.check_cohort(config.time.buffer if config.time.wait == "buffer" else cohort)
        stages.append(RobustStage(config.robust, config.algorithm, config.seed))
    return stages


def run_facts(
    config: Config, choice: EngineChoice, space: Space, kernels: Kernels, group: ProcessGroup
) -> dict[str, Any]:
    """What run.json says of how a run is computed."""
    alg, privacy = config.algorithm, config.privacy
    about = privacy.describe(config.rounds, config.participation, config.simulated) if privacy.on else ""
    return {
        "name": config.name(),
        "state": "running",
        "engine": choice.name,
        "reason": choice.reason,
        "device": torch.cuda.get_device_name(space.device) if space.device.type == "cuda" else "cpu",
        "kernels": kernels.summary(),
        "workers": group.size,
        "parameters": space.P,
        "buffers": space.Q,
        "remark": alg.remark(space),
        **({"origins": origins} if (origins := config.origins()) else {}),
        **({"privacy": about} if about else {}),
        "version": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def staleness_remark(config: Config) -> str:
    """Where every answer starts from the newest model, a method that counts stale answers less has none to count."""
    if not hasattr(config.algorithm, "staleness") or config.time.overlapping or not config.simulated:
        return ""
    return (
        "every answer starts from the newest model here, so that the method's staleness has no effect; "
        'set time.wait = "buffer".'
    )


def data_remarks(config: Config, fed: Federation) -> list[str]:
    """What whoever runs this should know of its data, each a sentence."""
    remarks, partition = list(fed.remarks), config.partition
    if fed.divided and passes_over_owners(config):
        remarks.append(OWNERS_PASSED_OVER)
    if fed.divided and isinstance(partition, Natural) and config.participation == Uniform():
        count = len(config.participation.draw(config.seed, 1, fed.eligible, fed.clients))
        if count == 1 < fed.clients:
            remarks.append(
                f"1 of the {fed.clients} clients takes part in a round; "
                'set participation.name = "full" to train all of them.'
            )
    return remarks


def passes_over_owners(config: Config) -> bool:
    """Does the partition divide samples anew, whoever they belong to?"""
    return not isinstance(config.partition, Natural) and not config.algorithm.pooled


def client_label_counts(config: Config) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Who trains on what: samples of every client by class, [N, K] (K = 0 without classes), and in all, [N]."""
    fed = Federation(config.data, config.partition, config.seed)
    one_by_one = [[i] for i in range(fed.clients)]  # where clients draw their samples, not those of all at once
    groups = [range(fed.clients)] if fed.assignment is not None else one_by_one
    return np.concatenate([fed.label_counts(ids).numpy() for ids in groups]).astype(np.int64), fed.sizes
