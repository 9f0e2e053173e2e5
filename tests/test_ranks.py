"""Several processes share a run: whatever their number, it is the same run; and none of them ends unnoticed.

What ranks exchange is tested with threads, which are cheap; that processes find each other, stop, fail and go on, with
processes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

import askew
from askew.algorithms import FedAvg, Scaffold, algorithms
from askew.cli.main import main
from askew.core.algorithm import Algorithm
from askew.core.bank import Bank
from askew.core.types import State
from askew.data.dataset import Samples
from askew.data.federation import LocalSettings
from askew.engine import distributed as ranks
from askew.engine.distributed import DistributedEngine, Lost, ProcessGroup, SharedEvaluator, dealt, hang_up
from askew.engine.evaluate import CHUNK, Evaluator
from askew.engine.server import Server
from askew.errors import AlgorithmError, ConfigError, EngineError
from askew.experiment import checkpoint, launch
from askew.experiment.api import OwnData
from askew.experiment.config import CHOICES, Config, stored_tables
from askew.experiment.launch import run_all, run_config, run_shared
from askew.experiment.store import lock_folder
from askew.experiment.workers import WorkerGroup
from problems import Problem, Record, Spoiled, apart, everything, labelled, same, serve, tastes
from problems import play as play_rounds

T = TypeVar("T")

SIZES = [5, 8, 3, 6, 3, 9, 1]
# Everybody; one, so that others have nothing to do; the even ones, who have one owner among two; a client without a batch.
COHORTS = [[0, 1, 2, 3, 4, 5], [3], [4, 0, 2], [5, 1, 6], [2, 3]]
LOCAL = LocalSettings(epochs=2, batch=4, lr=0.2, momentum=0.5, weight_decay=0.05, clip=0.8, decay=0.9)
MORE = [{"name": "scaffold", "option": "I"}, {"name": "fedga", "form": "memory"}, {"name": "fedpdc", "adaptive": True}]
METHODS = [algorithms[key]() for key in algorithms] + [
    algorithms[m["name"]].build({k: v for k, v in m.items() if k != "name"}) for m in MORE
]


def looks(alg: Algorithm) -> bool:
    return any("gradient" in (*phase.before, *phase.each, *phase.after) for phase in alg.phases())


def problem(alg: Algorithm) -> Problem:
    """Batch norm where the method allows it."""
    return labelled(tastes(SIZES), "none" if looks(alg) else "batch")


# ranks as threads -----------------------------------------------------------------------------------------------


class Threads(ProcessGroup):
    """A rank in a thread: what others need is read off a common board."""

    def __init__(self, rank: int, size: int, board: dict[int, Tensor], barrier: threading.Barrier) -> None:
        super().__init__(rank, size)
        self.board, self.barrier = board, barrier

    def fill(self, rows: Tensor, cuts: Sequence[int]) -> None:
        self.board[self.rank] = rows
        self.barrier.wait()
        assert {r: t.shape for r, t in self.board.items()} == dict.fromkeys(range(self.size), rows.shape)
        for r in range(self.size):
            if r != self.rank:
                rows[cuts[r] : cuts[r + 1]] = self.board[r][cuts[r] : cuts[r + 1]]
        self.barrier.wait()

    def collect(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        self.board[self.rank] = rows
        self.barrier.wait()
        assert [len(self.board[r]) for r in range(self.size)] == list(counts)
        whole = torch.cat([self.board[r] for r in range(self.size)]) if self.leads else rows
        self.barrier.wait()
        return whole


def on_ranks(size: int, make: Callable[[Threads], T], do: Callable[[T], Any]) -> list[tuple[T, Any]]:
    """Make something for every rank, then do something with all of them at a time."""
    board, barrier = dict[int, Tensor](), threading.Barrier(size, timeout=20)
    groups = [Threads(rank, size, board, barrier) for rank in range(size)]
    made = [make(group) for group in groups]

    def guarded(one: T) -> Any:
        try:
            return do(one)
        except threading.BrokenBarrierError:
            raise
        except BaseException:
            barrier.abort()
            for line in (line for group in groups for line in group.lines or []):
                line.shutdown(socket.SHUT_RDWR)  # as if the process had ended
            raise

    with ThreadPoolExecutor(size) as pool:
        done = [pool.submit(guarded, one) for one in made]
    failed = [
        error
        for each in done
        if (error := each.exception()) and not isinstance(error, threading.BrokenBarrierError | Lost)
    ]
    if failed:
        raise failed[0]
    return [(one, each.result()) for one, each in zip(made, done, strict=True)]


def ranked(
    alg: Algorithm, group: ProcessGroup, engine: str = "sequential", spoil: dict[str, Any] | None = None
) -> Server:
    server = serve(alg, problem(alg), LOCAL, engine, rounds=len(COHORTS))
    server.engine = DistributedEngine(Spoiled(server.engine, **spoil) if spoil else server.engine, group)
    server.clients = Bank(server.clients.start, owns=group.owns)
    return server


def whole(servers: Sequence[Server]) -> State:
    """What the ranks hold together: each client's state is its owner's; of all else each has all."""
    kept = [everything(server) for server in servers]
    for other in kept[1:]:
        assert same(*({n: t for n, t in each.items() if not n.startswith("clients.")} for each in (kept[0], other)))
    state = {n: t.clone() for n, t in kept[0].items() if n.startswith("clients.")}
    for n, rows in state.items():
        for client in range(len(rows)):
            rows[client] = kept[client % len(servers)][n][client]
            others = [each[n][client] for r, each in enumerate(kept) if r != client % len(servers)]
            assert all(torch.equal(row, servers[0].clients.start[n.removeprefix("clients.")]) for row in others)
    return kept[0] | state


def shared(
    alg: Algorithm, size: int, engine: str = "sequential", spoil: dict[str, Any] | None = None
) -> tuple[State, list[Record]]:
    """What is kept and recorded after the rounds, by ranks that must agree."""
    done = on_ranks(size, lambda group: ranked(alg, group, engine, spoil), lambda server: play_rounds(server, COHORTS))
    assert all(records == done[0][1] for _, records in done)
    return whole([server for server, _ in done]), done[0][1]


def alone(
    alg: Algorithm, engine: str = "sequential", spoil: dict[str, Any] | None = None
) -> tuple[State, list[Record]]:
    server = serve(alg, problem(alg), LOCAL, engine, rounds=len(COHORTS))
    server.engine = Spoiled(server.engine, **spoil) if spoil else server.engine
    records = play_rounds(server, COHORTS)
    return everything(server), records


@pytest.mark.parametrize("alg", METHODS, ids=lambda alg: algorithms.name_of(alg))
def test_any_number_of_ranks_gives_the_same_bits(alg: Algorithm) -> None:
    state, records = alone(alg)
    assert looks(alg) or records[3]["dropped"] == 1  # a single sample is no batch under batch norm
    for size in (1, 2, 3):
        other, told = shared(alg, size)
        assert same(other, state) and told == records, size


@pytest.mark.parametrize("engine", ["vmapped", "slots"])
@pytest.mark.parametrize("key", ["fedavg", "feddc", "fedvarp", "moon"])
def test_other_engines_agree_up_to_rounding(key: str, engine: str) -> None:
    alg = algorithms[key]()
    assert apart(shared(alg, 2, engine)[0], alone(alg)[0]) < 1e-12


@pytest.mark.parametrize(
    ("key", "where"), [*(("scaffold", where) for where in ("up", "mine", "buffers", "loss")), ("fedga", "up")]
)
def test_a_client_without_numbers_is_left_out_by_all(key: str, where: str) -> None:
    """Its state above all: it does not travel, and yet everybody has to know. And those that are left stay where they were."""
    alg, spoil = algorithms[key](), {"bad": [2, 5], "where": where}
    (state, records), (other, told) = alone(alg, spoil=spoil), shared(alg, 2, spoil=spoil)
    assert [r["dropped"] for r in records] == [2, 0, 1, 2 if key == "scaffold" else 1, 1]
    assert same(other, state) and told == records


@pytest.mark.parametrize("key", ["scaffold", "fedvarp", "fedamd"])
def test_without_common_memory_rows_are_sent_and_the_bits_are_the_same(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, records = alone(algorithms[key]())
    monkeypatch.setattr(ranks, "shared_file", lambda count: "")
    other, told = shared(algorithms[key](), 2)
    assert same(other, state) and told == records


def test_common_memory_grows_and_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(group: Threads) -> tuple[list[int], list[int]]:
        seen = []
        for count in (4, 2, 6):
            area = group.common(count)
            assert area is not None and len(area) == count
            area[group.rank] = 10 * count + group.rank
            group.gather([0])
            seen.append(area[:2].tolist())
            group.gather([0])
        return seen[0], seen[2]

    before = {*Path("/dev/shm").glob("askew-*")}
    for _, seen in on_ranks(2, lambda group: group, fill):
        assert seen == ([40, 41], [60, 61])
    assert {*Path("/dev/shm").glob("askew-*")} == before
    monkeypatch.setattr(
        ranks, "shared_file", lambda count: str(tmp_path / "elsewhere")
    )  # as another machine would see it
    assert [area for _, area in on_ranks(2, lambda group: group, lambda group: group.common(4))] == [None, None]
    assert not (tmp_path / "elsewhere").exists()


def test_ranks_on_one_machine_talk_over_lines_until_one_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def talk(group: Threads) -> list[list[int]]:
        assert group.lines is None and group.common(8) is not None and group.lines
        monkeypatch.setattr(group, "fill", None)  # gloo is not asked any more
        told = [group.gather([group.rank, -5 * group.rank]).tolist() for _ in range(3)][-1]
        if group.rank != 1:
            with pytest.raises(Lost, match=r"lost each other \(.*\); start the run again"):
                group.gather([0])
        hang_up(group.lines)  # first the one who does not wait for the others
        return told

    assert [told for _, told in on_ranks(3, lambda group: group, talk)] == [[[0, 0], [1, -5], [2, -10]]] * 3


def test_without_lines_ranks_talk_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    state, records = alone(Scaffold())
    monkeypatch.setattr(socket.socket, "bind", lambda *_: (_ for _ in ()).throw(OSError("path too long")))
    other, told = shared(Scaffold(), 3)
    assert same(other, state) and told == records


def test_work_is_dealt_out_longest_first() -> None:
    assert dealt([1, 9, 2, 8, 3], 2) == [0, 0, 0, 1, 1]  # 9 + 2 + 1 and 8 + 3
    assert dealt([5], 3) == [0] and dealt([1, 1, 1], 3) == [0, 1, 2]
    assert len(set(dealt([3, 1, 1, 7, 2, 2], 4))) == 4  # nobody idles while there is work


def test_ranks_with_other_data_or_another_model_are_found_out() -> None:
    def other_model(group: Threads) -> Server:
        server = ranked(FedAvg(), group)
        server.x[0] += group.rank * 1e-12
        return server

    def other_data(group: Threads) -> Server:
        server = ranked(FedAvg(), group)
        server.local = LocalSettings(epochs=1 + group.rank)
        return server

    for make in (other_model, other_data):
        with pytest.raises(EngineError, match=r"different rounds, batches or models before round 1; give all"):
            on_ranks(2, make, lambda server: server.play(1, [0, 1]))


def test_uploads_that_change_their_shape_are_refused() -> None:
    class Odd(FedAvg):
        """Sends one number more in the second round."""

        def finish(self, w: Tensor, me: askew.Client) -> tuple[State, State]:
            return {"delta": w - me.x, "more": w.new_zeros(int(me.round))}, me.mine

    with pytest.raises(AlgorithmError, match="the same names, shapes and types"):
        on_ranks(2, lambda group: ranked(Odd(), group), lambda server: play_rounds(server, COHORTS))


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 1), (1, 3)])
def test_a_checkpoint_does_not_know_how_many_wrote_it(before: int, after: int, tmp_path: Path) -> None:
    alg = Scaffold()
    state, records = alone(alg)

    def begin(server: Server) -> None:
        play_rounds(server, COHORTS[:3])
        checkpoint.save(tmp_path, server, 3, "abc", server.engine.group)

    def go_on(server: Server) -> list[Record]:
        assert checkpoint.restore(tmp_path, server, "abc") == 3
        return play_rounds(server, COHORTS[3:], first=4)

    on_ranks(before, lambda group: ranked(alg, group), begin)
    done = on_ranks(after, lambda group: ranked(alg, group), go_on)
    assert same(whole([server for server, _ in done]), state) and done[0][1] == records[3:]


@pytest.mark.parametrize("count", [10, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 5 * CHUNK - 3])
def test_an_exam_taken_together_gives_the_same_bits(count: int) -> None:
    server = serve(FedAvg(), problem(FedAvg()), LOCAL)
    task, fed, rng = server.engine.task, server.fed, torch.Generator().manual_seed(0)
    samples = Samples(torch.randn(count, 4, generator=rng, dtype=torch.float64), torch.arange(count) % 3)
    expected = Evaluator(task, fed, samples)(server.x, server.buffers)
    for size in (2, 3):
        exams = on_ranks(
            size,
            lambda group: (serve(FedAvg(), problem(FedAvg()), LOCAL), group),
            lambda pair: SharedEvaluator(pair[0].engine.task, pair[0].fed, samples, pair[1])(
                pair[0].x, pair[0].buffers
            ),
        )
        assert all(torch.equal(score, expected) for _, score in exams)


@pytest.mark.parametrize(
    ("count", "parts"),
    [
        (CHUNK, [[], [], []]),  # everybody does it alone, and says nothing
        (CHUNK + 1, [[], [CHUNK], [1]]),
        (5 * CHUNK - 3, [[CHUNK], [2 * CHUNK], [2 * CHUNK - 3]]),
    ],
)
def test_an_exam_is_divided_by_whole_chunks(
    count: int, parts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, real = dict[int, list[int]](), ranks.per_sample

    def counted(task: Any, w: Tensor, buffers: Tensor, part: Samples, *rest: Any) -> Any:
        seen.setdefault(threading.get_ident(), []).append(len(part.y))
        return real(task, w, buffers, part, *rest)

    monkeypatch.setattr(ranks, "per_sample", counted)
    samples = Samples(torch.randn(count, 4, dtype=torch.float64), torch.arange(count) % 3)

    def take(pair: tuple[Server, Threads]) -> list[int]:
        server, group = pair
        SharedEvaluator(server.engine.task, server.fed, samples, group)(server.x, server.buffers)
        return seen.pop(threading.get_ident(), [])

    done = on_ranks(3, lambda group: (serve(FedAvg(), problem(FedAvg()), LOCAL), group), take)
    assert [told for _, told in done] == parts
    assert all(bool(group.board) == (count > CHUNK) for (_, group), _ in done)


# processes ------------------------------------------------------------------------------------------------------

PLUGIN = """
import torch
from torch import nn
import askew
from askew.algorithms import Scaffold

@askew.register("fragile")
class Fragile(Scaffold):
    \"\"\"SCAFFOLD whose clients now and then keep what is no number.\"\"\"

    def finish(self, w, me):
        up, mine = super().finish(w, me)
        return up, {"c": torch.where(torch.as_tensor(me.coin) < 0.3, torch.nan, mine["c"])}

@askew.register("dropout")
class Dropout(askew.Network):
    \"\"\"A network that draws while it trains.\"\"\"

    def module(self, shape, classes):
        return nn.Sequential(nn.Linear(*shape, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.Linear(12, classes))

@askew.register("broken")
class Broken(Scaffold):
    \"\"\"Fails in the first round.\"\"\"

    def direction(self, w, grad, me):
        return me.nothing
"""
BASE: dict[str, Any] = {
    "rounds": 4,
    "data": {"name": "synthetic", "test_clients": 5},
    "partition": {"clients": 7},
    "participation": {"cohort": 4},
    "model": {"name": "mlp", "hidden": [6], "norm": "batch"},
    "local": {"epochs": 1, "batch": 32, "lr": 0.1},
}


TAKE_OVER: dict[str, Any] = {"free_cores": lambda: 2, "LEAST_ROUND_SECONDS": 0.0, "LEAST_SAVED_SECONDS": 0.0}


def configured(workers: int, **tables: Any) -> Config:
    return Config.build(BASE | tables | {"engine": {"name": "sequential", "workers": workers}})


def records(run: askew.Run) -> list[Record]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in run.rounds]


def workers_alive() -> dict[int, int]:
    """The ids of the worker processes that this one started, by rank."""
    found: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
            environment = (process / "environ").read_text().split("\0")
        except OSError:
            continue
        variables = dict(line.split("=", 1) for line in environment if "=" in line)
        if parent == os.getpid() and "RANK" in variables:
            found[int(variables["RANK"])] = int(process.name)
    return found


def wait_for_a_round(out: Path, alive: Callable[[], bool] = lambda: True) -> None:
    until = time.monotonic() + 60
    while not any(log.read_text().count("\n") for log in out.glob("*/rounds.jsonl")):
        assert alive() and time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a plugin; afterwards its methods are not registered any more."""
    for registry in CHOICES.values():
        monkeypatch.setattr(registry, "members", dict(registry.members))
    (tmp_path / "own.py").write_text(PLUGIN)
    return str(tmp_path / "own.py")


@pytest.mark.slow
def test_a_sweep_stopped_on_two_processes_goes_on_with_three_to_the_same_bits(plugin: str, tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [
        {"algorithm": {"name": "fedavg"}, "participation": {"cohort": 1}},
        {"algorithm": {"name": "fedbn"}},
        {"algorithm": {"name": "fragile"}, "model": {"name": "dropout"}, "rounds": 40, "evaluation": {"every": 40}},
        {"algorithm": {"name": "fedvarp"}, "evaluation": {"every": 3}},
        {"algorithm": {"name": "fedga"}, "model": {"name": "softmax"}},
        {"algorithm": {"name": "lossbias"}},
    ]
    one, two, three = ([configured(workers, plugins=[plugin], **kind) for kind in kinds] for workers in (1, 2, 3))
    assert [c.name() for c in one] == [c.name() for c in two] == [c.name() for c in three]
    expected = list(run_all(one))
    assert any(r["dropped"] for r in expected[2].rounds)

    def stop(run: askew.Run, record: Record | None) -> None:
        if record and record["round"] == 2 and run.algorithm == "fragile":
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    first = list(run_all(two, tmp_path / "runs", watch=stop))
    assert [run.finished for run in first] == [True, True, False] and 2 <= len(first[2].rounds) < 40
    assert first[2].facts["state"] == "interrupted" and first[2].facts["workers"] == 2
    assert signal.getsignal(signal.SIGINT) is before and not workers_alive()
    watched: list[tuple[str, int]] = []
    broken = configured(3, plugins=[plugin], algorithm={"name": "broken"}, rounds=1)
    going = run_all(
        [*three, broken], tmp_path / "runs", watch=lambda run, record: watched.append((run.algorithm, len(run.rounds)))
    )
    again = [next(going) for _ in three]
    with pytest.raises(
        EngineError, match=r"own.py' failed in line 27: AttributeError: .* correct the file and try again"
    ):
        next(going)
    assert (
        watched[0] == ("fragile", len(first[2].rounds)) and not workers_alive()
    )  # what was finished is not trained again
    for run, other, first_time in zip(again, expected, [*first[:2], *again[2:]], strict=True):
        assert records(run) == records(other)
        assert first_time.model.keys() == other.model.keys() and all(
            torch.equal(first_time.model[n], t) for n, t in other.model.items()
        )
        assert run.folder is not None and not (run.folder / checkpoint.FILE).exists()
        assert records(askew.load(run.folder)) == records(other)
    assert [run.facts["workers"] for run in again] == [2, 2, 3, 3, 3, 3]


def test_without_a_folder_the_model_comes_back_and_a_killed_rank_0_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    killed: list[float] = []

    def kill(run: askew.Run, record: Record | None) -> None:
        if record and record["round"] == 5:
            os.kill(workers_alive()[0], signal.SIGKILL)
            killed.append(time.monotonic())

    short, long = (configured(2, algorithm={"name": "scaffold"}, rounds=rounds) for rounds in (2, 100_000))
    going = run_all([short, long], watch=kill)
    run, alone = next(going), run_config(configured(1, algorithm={"name": "scaffold"}, rounds=2))
    assert run.folder is None and run.finished and records(run) == records(alone) and run.name == alone.name
    assert all(torch.equal(run.model[n], t) for n, t in alone.model.items())
    with pytest.raises(
        EngineError, match=r"^process 0 of the 2 that shared the work was ended by SIGKILL; .* goes on from"
    ):
        next(going)
    assert time.monotonic() - killed[0] < 10 and not workers_alive()
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_killed_rank_ends_the_command_with_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def kill() -> None:
        wait_for_a_round(tmp_path)
        os.kill(workers_alive()[1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    (tmp_path / "long.toml").write_text(configured(1, algorithm={"name": "scaffold"}, rounds=100_000).toml())
    code = main(["run", str(tmp_path / "long.toml"), "--workers", "2", "--out", str(tmp_path), "--quiet"])
    killer.join()
    out, err = capfd.readouterr()
    assert code == 2 and out == "" and err.count("\n") == 1 and not workers_alive()
    assert err.startswith("error: process 1 of the 2 that shared the work was ended by SIGKILL; ")
    [log] = tmp_path.glob("*/rounds.jsonl")
    assert len(askew.load(log.parent).rounds) >= 1
    with lock_folder(log.parent):  # nobody holds it any more
        pass


@pytest.mark.slow
def test_ranks_started_as_torchrun_does_are_one_run_and_one_prints(tmp_path: Path) -> None:
    config = configured(1, algorithm={"name": "scaffold"}, rounds=3)
    (tmp_path / "a.toml").write_text(config.toml())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "askew", "run", str(tmp_path / "a.toml"), "--json", "--out", str(tmp_path)]
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            command, env=environment | {"RANK": rank}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]
    (out, err), silent = (rank.communicate(timeout=100) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], err
    assert silent == ("", "") and err.count("round 3/3") == 1
    run = askew.load(json.loads(out)["run"])
    assert run.facts["workers"] == 2 and records(run) == records(run_config(config))


def test_workers_take_over_only_long_runs_that_they_would_end_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where rounds are short, few are left, the machine is busy, one process is asked for, or nothing is stored."""
    monkeypatch.setattr(launch, "free_cores", lambda: 3)
    records = [{"seconds": seconds, "participants": [0, 1, 2, 3]} for seconds in (9.0, 1.0, 1.2)]

    def workers(config: Config, rounds: int = 3, folder: Path | None = Path("runs"), t: int = 3) -> int:
        run = askew.Run({}, records[:rounds], folder=folder)
        built = SimpleNamespace(space=SimpleNamespace(device=torch.device("cpu")))
        takeover = launch.Takeover()
        active: Any = SimpleNamespace(run=run, config=config, group=ProcessGroup(), built=built, t=t)
        assert takeover(active) == (takeover.workers > 1)
        return takeover.workers

    long = configured(0, rounds=100)
    assert workers(long) == 3 and workers(long, rounds=1) == 1 and workers(long, folder=None) == 1
    assert workers(configured(1, rounds=100)) == 1 and workers(configured(2, rounds=100)) == 1
    assert workers(long, t=69) == 3 and workers(long, t=71) == 1  # 31 or 29 rounds of a second, two thirds saved
    assert workers(replace(long, data=OwnData.of((torch.randn(9, 2), torch.arange(9) % 3), None))) == 1
    monkeypatch.setattr(launch, "free_cores", lambda: 1)
    assert workers(long) == 1
    monkeypatch.setattr(launch, "free_cores", lambda: 8)
    assert workers(long) == 4  # as many as take part in a round
    records[1]["seconds"] = 0.04
    assert workers(configured(0, rounds=100_000)) == 1


@pytest.mark.slow
def test_a_long_run_goes_on_with_more_processes_where_cores_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same bits."""
    config = configured(0, algorithm={"name": "scaffold"}, rounds=5)
    alone = run_config(configured(1, algorithm={"name": "scaffold"}, rounds=5))
    for key, limit in TAKE_OVER.items():
        monkeypatch.setattr(launch, key, limit)
    lengths: list[int] = []
    run = run_config(config, tmp_path, watch=lambda run, record: lengths.append(len(run.rounds)))
    assert run.finished and run.facts["workers"] == 2 and lengths == [0, 1, 2, 2, 3, 4, 5] and not workers_alive()
    assert records(run) == records(alone) and all(torch.equal(run.model[n], t) for n, t in alone.model.items())
    assert records(run_config(config, tmp_path)) == records(alone)  # read back


@pytest.mark.slow
def test_a_run_that_more_processes_took_over_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, limit in TAKE_OVER.items():
        monkeypatch.setattr(launch, key, limit)

    def stop(run: askew.Run, record: Record | None) -> None:
        if record and record["round"] == 4:
            os.kill(os.getpid(), signal.SIGINT)

    run = run_config(configured(0, rounds=100_000), tmp_path, watch=stop)
    assert not run.finished and run.facts["state"] == "interrupted" and len(run.rounds) >= 4 and not workers_alive()


@pytest.mark.slow
def test_ranks_end_when_their_parent_is_gone(tmp_path: Path) -> None:
    tables = stored_tables(configured(2, algorithm={"name": "scaffold"}, rounds=100_000))
    job = {"configs": [tables], "out": str(tmp_path), "fresh": False, "save_every": 5.0}
    with WorkerGroup(2, run_shared, job) as group:
        wait_for_a_round(tmp_path)
        for connection in group.connections:
            connection.close()
        assert [process.wait(20) for process in group.processes] == [0, 0]
    [log] = tmp_path.glob("*/rounds.jsonl")
    with lock_folder(log.parent):
        pass


# what cannot be -------------------------------------------------------------------------------------------------


def test_objects_from_python_are_refused_with_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "members", dict(algorithms.members))

    @askew.register("mine")
    class Mine(FedAvg):
        """A method of this file."""

    x, y = torch.randn(60, 2), torch.arange(60) % 3
    two = {"workers": 2}
    for name, given in (
        ("data", {"data": (x, y)}),
        ("model", {"model": nn.Linear(64, 10)}),
        ("algorithm", {"what": "mine"}),
    ):
        with pytest.raises(
            ConfigError, match=rf"engine.workers = 2: new processes cannot see the {name} .* set engine.workers = 1"
        ):
            askew.run(**given, engine=two)


def test_workers_are_a_number_within_limits() -> None:
    for wrong in (-1, 129, 1.5, "two"):
        with pytest.raises(ConfigError, match=r"engine: workers must be"):
            Config.build({"engine": {"workers": wrong}})
