"""One run from its configuration to its folder: the round loop, readable top to bottom."""

from __future__ import annotations

import copy
import ctypes
import os
import platform
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..core.rng import torch_seed
from ..core.space import Space
from ..core.task import Bound, Functional, Task, WithFeatures, with_features
from ..data.federation import Federation
from ..data.partition import Iid
from ..engine.base import Engine
from ..engine.choose import choose, has_batch_norm, stochastic
from ..engine.evaluate import Exam, dressed, examine_clients, mean_private, spread
from ..engine.sequential import Sequential
from ..engine.server import Server
from ..engine.slots import Slots
from ..engine.vmapped import Vmapped
from ..errors import EngineError, ModelError, StoreError
from ..participation import Turnout
from ..version import __version__
from . import checkpoint
from .config import Config
from .store import Record, Run, append_lines, load, locked, read_rounds, to_json, write_json, write_text
from .toml import read_toml

Watch = Callable[[Run, Record | None], None]  # called once before the first round and after every round


class House(NamedTuple):
    """Everything a run is made of."""

    config: Config
    fed: Federation
    module: nn.Module
    space: Space
    task: Task
    exam: Exam
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
        raise EngineError(f"engine: there is no device {name!r} here ({torch.cuda.device_count()} CUDA devices); use auto or cpu.")
    return torch.device(name)


@cache
def steady_heap() -> None:
    """Let glibc keep what a step frees for the next step, up to 256 MB.

    By default it returns the top of the heap to the system after every step and asks for fresh pages in the next one;
    on a virtual machine those page faults were a sixth of LeNet5's time. Elsewhere than on glibc nothing is done.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-1, 256 * 2**20)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD; 32 MB is the most it takes
    except (OSError, AttributeError):
        pass


def build(config: Config) -> House:
    """Data, network, engine and server, as configured."""
    steady_heap()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # read when CUDA starts: 8 queues would make slots wait for each other
    device, dtype, half = device_of(config.engine.device), config.engine.storage, config.engine.dtype == "bf16"
    alg = config.algorithm
    partition = Iid(clients=1, public=config.partition.public) if alg.pooled else config.partition
    fed = Federation(config.data, partition, config.seed, device, dtype, alg.needs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(config.seed, "model"))
        module = config.model.build_module(fed.shape, fed.classes)
    module = checked_module(module, fed, [need for need in alg.needs if need not in ("public", "validation")])
    space = Space(module, dtype, device)
    first = fed.sizes[config.participation.sample(config.seed, 1, fed.eligible, fed.clients)]
    name, reason = choose(config.engine.name, module, space, float(first.sum() / first.max()) if len(first) else 1.0, config.engine.compile)
    batch_norm = has_batch_norm(module)
    bound = partial(Bound, module, space, fed.criterion, half, config.engine.compile)
    task: Task = Functional(module, space, fed.criterion, half) if name == "vmapped" else bound()
    engine: Engine
    if name == "slots":
        engine = Slots(bound, batch_norm)
    else:
        engine = Vmapped(task, batch_norm) if name == "vmapped" else Sequential(task, config.seed, stochastic(module))
    examine = Exam(task, fed, fed.public) if fed.public is not None and "public" in alg.needs else None
    least = 2 if batch_norm else 1
    server = Server(alg, space, fed, config.local, engine, config.seed, least, rounds=config.rounds, examine=examine)
    facts = {
        "name": config.name(),
        "state": "running",
        "engine": name,
        "reason": reason,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "parameters": space.P,
        "buffers": space.Q,
        "remark": config.algorithm.remark(space),
        "version": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return House(config, fed, module, space, task, Exam(task, fed, fed.test), server, facts)


def divided(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Who holds what: samples of every client by class, [N, K] (K = 0 without classes), and in all, [N]."""
    fed = Federation(config.data, config.partition, config.seed)
    if fed.shares is not None:
        return fed.shares.histogram(fed.pool.y.numpy(), fed.classes) if fed.classes else np.zeros((fed.clients, 0)), fed.sizes
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
        raise ModelError(f"the network cannot take inputs of shape {fed.shape}: {first}; change the network or the data.") from None
    for call in calls:
        if not callable(getattr(module, call, None)):
            raise ModelError(
                f"this algorithm needs a network that offers {call}(x), which {type(module).__name__} does not; use mlp, cnn or resnet18."
            )
        with torch.no_grad():
            copy.deepcopy(module).eval()(example, call=call)
    return module


def play(config: Config, out: str | Path | None = None, *, fresh: bool = False, watch: Watch | None = None, save_every: float = 5.0) -> Run:
    """Run a configuration. With `out` it lives in a folder there: finished runs are read back, interrupted ones resumed.

    `fresh` starts over; `watch` sees every record; `save_every` is the least number of seconds between checkpoints.
    """
    folder = Path(out) / config.name() if out is not None else None
    with locked(folder) if folder else nullcontext():
        if folder:
            if fresh:
                clear(folder)
            check_same(folder, config)
            done = load(folder) if (folder / "run.toml").exists() else None
            if done and done.finished and (folder / "model.safetensors").exists():
                return done
        with torch_state(config), enough_memory(), stop_requests() as stopping:
            house = build(config)
            run = Run(read_back(config), facts=house.facts, federation=house.fed.labels(), folder=folder)
            first = 1 + (resume(run, house) if folder else 0)
            if watch:
                watch(run, None)
            loop(house, run, first, watch, save_every, stopping)
    return run


def loop(house: House, run: Run, first: int, watch: Watch | None, save_every: float, stopping: Callable[[], bool]) -> None:
    """Round after round: who comes, one round, how good it is, what is written."""
    config, server, t = house.config, house.server, first - 1
    due = time.monotonic() + save_every
    coming: dict[int, Turnout] = {}

    def look_ahead(t: int) -> None:
        """Who comes next and with which batches does not depend on this round: found out while the device is busy."""
        coming[t] = config.participation.turnout(config.seed, t, house.fed.eligible, house.fed.clients)
        server.prepare(t, coming[t].ids.tolist(), coming[t].share.tolist())

    for t in range(first, config.rounds + 1):
        began = time.perf_counter()
        if t not in coming:
            look_ahead(t)
        came = coming.pop(t)
        ahead = partial(look_ahead, t + 1) if t < config.rounds else None
        record = server.play(t, came.ids.tolist(), came.share.tolist(), len(came.absent), ahead)
        if house.space.device.type == "cuda":
            torch.cuda.synchronize()
        record["seconds"] = time.perf_counter() - began
        record |= measure(house) if t % config.evaluation.every == 0 or t == config.rounds else {"accuracy": None, "loss": None}
        run.rounds.append(record)
        if run.folder:
            append_lines(run.folder / "rounds.jsonl", [record])
            if (now := time.monotonic()) >= due and t < config.rounds:
                checkpoint.save(run.folder, server, t, config.digest())
                cost = time.monotonic() - now
                due = now + (max(save_every, 20 * cost) if save_every else 0)  # at most a twentieth of the time; 0: every round
        if watch:
            watch(run, record)
        if stopping():
            break
    run.facts["state"] = "finished" if run.finished else "interrupted"
    run.model = {n: v.cpu() for n, v in model_of(house).items()}
    if run.folder:
        checkpoint.save_tensors(run.folder / "model.safetensors", run.model, {"round": str(t), "run": run.name})
        if run.finished:
            (run.folder / checkpoint.FILE).unlink(missing_ok=True)
        else:
            checkpoint.save(run.folder, server, t, config.digest())
        write_json(run.folder / "run.json", run.facts)


def measure(house: House) -> Record:
    """Accuracy and loss of what the algorithm calls its models; the first is the headline."""
    server, fed, exam = house.server, house.fed, house.exam
    how, part = server.alg.evaluates(), server.private
    scores: dict[str, Tensor] = {}
    for name, w in server.alg.models(server.x, server.state).items():
        buffers = server.buffers
        if how == "clients" and not part.empty:
            scores[name] = examine_clients(exam, w, buffers, part, server.privates)
        else:
            if how == "mean" and not part.empty:
                w, buffers = dressed(w, buffers, part, mean_private(server.privates, len(fed.eligible)))
            scores[name] = exam(w, buffers)
    record: Record = {}
    for name, (accuracy, loss) in zip(scores, torch.stack(list(scores.values())).tolist(), strict=True):
        tail = f"_{name}" if record else ""
        record |= {f"accuracy{tail}": accuracy if fed.classes else None, f"loss{tail}": loss}
    if house.config.evaluation.spread and fed.classes:
        record |= spread(house.task, server.x, server.buffers, fed)
    return record


def model_of(house: House) -> dict[str, Tensor]:
    """The global model by the network's own names; of one client's training, that client's."""
    server, x, buffers = house.server, house.server.x, house.server.buffers
    if server.alg.pooled and len(server.privates):
        x, buffers = dressed(x, buffers, server.private, {n: v[0] for n, v in server.privates.read([0]).items()})
    prefix = "module." if isinstance(house.module, WithFeatures) else ""
    return {n.removeprefix(prefix): v for n, v in {**house.space.split(x), **house.space.split_buffers(buffers)}.items()}


# the folder -----------------------------------------------------------------------------------------------------


def check_same(folder: Path, config: Config) -> None:
    """A folder holds one configuration for ever."""
    page, movable = folder / "run.toml", {"plugins": None}  # where a method's file lies changes nothing
    if page.exists() and read_toml(page) | movable != read_back(config) | movable:
        raise StoreError(f"{folder} holds a run of another configuration; use another --out, or --fresh to replace it.")


def read_back(config: Config) -> dict[str, Any]:
    """The page as a reader of the stored file sees it."""
    import tomllib

    return tomllib.loads(config.toml())


def clear(folder: Path) -> None:
    """Remove what a run stored, and nothing else."""
    for name in ("run.toml", "rounds.jsonl", "run.json", "federation.json", "model.safetensors", checkpoint.FILE):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "figures", ignore_errors=True)


def resume(run: Run, house: House) -> int:
    """Begin a folder, or go on from its checkpoint; returns the last round played."""
    assert run.folder is not None
    folder, log = run.folder, run.folder / "rounds.jsonl"
    known = read_rounds(log)
    last = checkpoint.restore(folder, house.server, house.config.digest())
    if last > len(known):
        raise StoreError(f"{log} ends before the checkpoint's round {last}; restore the file, or use --fresh to start over.")
    run.rounds = known[:last]
    write_text(folder / "run.toml", house.config.toml())
    write_text(log, "".join(to_json(r) + "\n" for r in run.rounds))
    write_json(folder / "federation.json", run.federation)
    write_json(folder / "run.json", run.facts)
    return last


# the process ----------------------------------------------------------------------------------------------------


@contextmanager
def torch_state(config: Config) -> Iterator[None]:
    """One thread on the CPU: small batches gain nothing from more, and on a busy machine more are slower. Full float32 on CUDA.

    What a run changes in torch (threads, TF32, random state) is as it was when the run ends.
    """
    before, tf32 = torch.get_num_threads(), (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)
    cuda = list(range(torch.cuda.device_count())) if config.engine.device != "cpu" and torch.cuda.is_available() else []
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = config.engine.dtype == "tf32"
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        torch.set_num_threads(before)
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = tf32


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turn a failed allocation into a sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        if not isinstance(e, (MemoryError, torch.OutOfMemoryError)) and "allocate memory" not in str(e):
            raise
        raise EngineError(
            "there is not enough memory for this run; take a smaller network, smaller batches or fewer participants, or another device."
        ) from None


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C (or SIGTERM) lets the round end, so that what is stored is whole; the second stops at once."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def ask(number: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
