"""Ranks that share a run: whatever their number, results are the same, and a rank that fails is noticed.

Ranks are threads here, which start faster than processes; worker processes are tested in test_workers.py.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

import askew
from askew.algorithms import FedAvg, Scaffold, algorithms
from askew.core.algorithm import Algorithm
from askew.core.bank import Bank
from askew.core.types import State
from askew.data.dataset import Samples
from askew.data.federation import LocalSettings
from askew.engine import distributed, process_group
from askew.engine.distributed import DistributedEngine, SharedEvaluator, balance_load
from askew.engine.evaluate import SAMPLES_AT_A_TIME, Evaluator
from askew.engine.privacy import Privacy
from askew.engine.privacy_stage import PrivacyStage
from askew.engine.process_group import PeerLost, ProcessGroup, close_sockets
from askew.engine.server import Server
from askew.errors import AlgorithmError, EngineError
from askew.experiment import checkpoint
from askew.participation import Uniform
from problems import (
    FaultyReports,
    Problem,
    Record,
    classification,
    full_state,
    identical,
    largest_gap,
    make_server,
    run_rounds,
    skewed_samples,
)

T = TypeVar("T")

SIZES = [5, 8, 3, 6, 3, 9, 1]  # samples of each client
# all; one, so that the other ranks have nothing to do; the even ones, who have one owner among two; one without a batch
COHORTS = [[0, 1, 2, 3, 4, 5], [3], [4, 0, 2], [5, 1, 6], [2, 3]]
LOCAL = LocalSettings(epochs=2, batch=4, lr=0.2, momentum=0.5, weight_decay=0.05, clip=0.8, decay=0.9)
VARIANTS = [("scaffold", "option", "I"), ("fedga", "form", "memory"), ("fedpdc", "adaptive", True)]
# one each with client state, server memory, private parts, two phases, and public data; the other methods are slow
SELECTED = ("fedavg", "scaffold", "fedvarp", "fedbn", "fedga", "fedpdc")
METHODS = [
    *(pytest.param(key, {}, id=key, marks=[] if key in SELECTED else [pytest.mark.slow]) for key in algorithms),
    *(pytest.param(key, {k: v}, id=f"{key}-{k}", marks=pytest.mark.slow) for key, k, v in VARIANTS),
]


def looks(alg: Algorithm) -> bool:
    """Does the method take a gradient outside of its local steps? Then it refuses batch norm."""
    return any("gradient" in (*phase.before, *phase.each, *phase.after) for phase in alg.phases())


def problem(alg: Algorithm) -> Problem:
    """Seven clients; with batch norm where the method allows it."""
    return classification(skewed_samples(SIZES), "none" if looks(alg) else "batch")


# ranks as threads -----------------------------------------------------------------------------------------------------


class ThreadGroup(ProcessGroup):
    """A rank in a thread, which reads the other ranks' rows from a table that all threads have."""

    def __init__(self, rank: int, size: int, table: dict[int, Tensor], barrier: threading.Barrier) -> None:
        super().__init__(rank, size)
        self.table, self.barrier = table, barrier

    def share_rows(self, rows: Tensor, cuts: Sequence[int]) -> None:
        self.table[self.rank] = rows
        self.barrier.wait()
        assert {r: t.shape for r, t in self.table.items()} == dict.fromkeys(range(self.size), rows.shape)
        for r in range(self.size):
            if r != self.rank:
                rows[cuts[r] : cuts[r + 1]] = self.table[r][cuts[r] : cuts[r + 1]]
        self.barrier.wait()

    def collect_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        self.table[self.rank] = rows
        self.barrier.wait()
        assert [len(self.table[r]) for r in range(self.size)] == list(counts)
        whole = torch.cat([self.table[r] for r in range(self.size)]) if self.is_leader else rows
        self.barrier.wait()
        return whole


def on_ranks(size: int, make: Callable[[ThreadGroup], T], call: Callable[[T], Any]) -> list[tuple[T, Any]]:
    """Make an object for every rank, then call a function with each, all at a time; returns objects and results.

    Where ranks fail, the first error is raised that is not the loss of another rank.
    """
    table, barrier = dict[int, Tensor](), threading.Barrier(size, timeout=20)
    groups = [ThreadGroup(rank, size, table, barrier) for rank in range(size)]
    objects = [make(group) for group in groups]

    def call_or_abort(argument: T) -> Any:
        try:
            return call(argument)
        except threading.BrokenBarrierError:
            raise
        except BaseException:
            barrier.abort()
            for line in (line for group in groups for line in group.sockets or []):
                line.shutdown(socket.SHUT_RDWR)  # as if the process had ended
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(call_or_abort, argument) for argument in objects]
    for future in futures:
        error = future.exception()
        if error and not isinstance(error, threading.BrokenBarrierError | PeerLost):
            raise error
    return [(argument, future.result()) for argument, future in zip(objects, futures, strict=True)]


def rank_server(
    alg: Algorithm, group: ProcessGroup, engine: str = "sequential", fault: dict[str, Any] | None = None
) -> Server:
    """The server of a rank; `fault` are arguments of FaultyReports."""
    server = make_server(alg, problem(alg), LOCAL, engine, rounds=len(COHORTS))
    server.engine = DistributedEngine(FaultyReports(server.engine, **fault) if fault else server.engine, group)
    server.clients = Bank(server.clients.start, owns=group.owns)
    return server


def joint_state(servers: Sequence[Server]) -> State:
    """What the ranks hold together: each client's state is its owner's; of all else each has all."""
    states = [full_state(server) for server in servers]
    for other in states[1:]:
        common = ({n: t for n, t in each.items() if not n.startswith("clients.")} for each in (states[0], other))
        assert identical(*common)
    client_state = {n: t.clone() for n, t in states[0].items() if n.startswith("clients.")}
    for n, rows in client_state.items():
        for client in range(len(rows)):
            owner = client % len(servers)
            rows[client] = states[owner][n][client]
            others = [each[n][client] for r, each in enumerate(states) if r != owner]
            assert all(torch.equal(row, servers[0].clients.start[n.removeprefix("clients.")]) for row in others)
    return states[0] | client_state


def run_on_ranks(
    alg: Algorithm, size: int, engine: str = "sequential", fault: dict[str, Any] | None = None
) -> tuple[State, list[Record]]:
    """State and records after all rounds on ranks, which must agree."""
    make = lambda group: rank_server(alg, group, engine, fault)
    ranks = on_ranks(size, make, lambda server: run_rounds(server, COHORTS))
    assert all(records == ranks[0][1] for _, records in ranks)
    return joint_state([server for server, _ in ranks]), ranks[0][1]


def run_alone(alg: Algorithm, fault: dict[str, Any] | None = None) -> tuple[State, list[Record]]:
    """State and records after all rounds in a single process."""
    server = make_server(alg, problem(alg), LOCAL, rounds=len(COHORTS))
    server.engine = FaultyReports(server.engine, **fault) if fault else server.engine
    records = run_rounds(server, COHORTS)
    return full_state(server), records


@pytest.mark.parametrize(("key", "settings"), METHODS)
def test_any_number_of_ranks_gives_the_same_bits(key: str, settings: dict[str, Any]) -> None:
    alg = algorithms[key].build(settings)
    state, records = run_alone(alg)
    assert looks(alg) or records[3]["dropped"] == 1  # a single sample is no batch under batch norm
    for size in (1, 2, 3):
        other_state, other_records = run_on_ranks(alg, size)
        assert identical(other_state, state) and other_records == records, size


@pytest.mark.parametrize(
    "settings",
    [{}, {"noise": 1.0}, {"noise": 1.0, "where": "client"}, {"noise": 1.0, "quantile": 0.5, "count_noise": 2.0}],
    ids=str,
)
def test_private_runs_are_the_same_on_any_number_of_ranks(settings: dict[str, Any]) -> None:
    """A simulation's noise comes from the seed, so that all ranks draw the same; deployments have no ranks."""

    def private_server(group: ProcessGroup) -> Server:
        server = rank_server(FedAvg(), group)
        server.stages = [PrivacyStage.simulated(Privacy(clip=0.3, **settings), Uniform(), server.fed.clients, 0)]
        return server

    run = lambda server: run_rounds(server, COHORTS)
    (alone, records), *_ = on_ranks(1, private_server, run)
    assert not settings.get("noise") or all(record["epsilon"] > 0 for record in records)
    plain, _ = run_alone(FedAvg())
    assert not torch.equal(full_state(alone)["w"], plain["w"])
    for size in (2, 3):
        ranks = on_ranks(size, private_server, run)
        assert all(found == records for _, found in ranks)
        assert identical(joint_state([server for server, _ in ranks]), full_state(alone))


@pytest.mark.parametrize("engine", ["vmapped", "slots"])
@pytest.mark.parametrize(
    "key", ["feddc", *(pytest.param(k, marks=pytest.mark.slow) for k in ("fedavg", "fedvarp", "moon"))]
)
def test_other_engines_agree_up_to_rounding(key: str, engine: str) -> None:
    alg = algorithms[key]()
    assert largest_gap(run_on_ranks(alg, 2, engine)[0], run_alone(alg)[0]) < 1e-12


@pytest.mark.parametrize(
    ("key", "field"), [*(("scaffold", field) for field in ("up", "state", "buffers", "loss")), ("fedga", "up")]
)
def test_a_client_whose_report_is_not_finite_is_left_out_by_all_ranks(key: str, field: str) -> None:
    """Client state does not travel, and yet all ranks must know that it is not finite; the other clients stay where
    they were trained.
    """
    alg, fault = algorithms[key](), {"clients": [2, 5], "field": field}
    (state, records), (other_state, other_records) = run_alone(alg, fault), run_on_ranks(alg, 2, fault=fault)
    assert [r["dropped"] for r in records] == [2, 0, 1, 2 if key == "scaffold" else 1, 1]
    assert identical(other_state, state) and other_records == records


@pytest.mark.parametrize("key", ["scaffold", "fedvarp", "fedamd"])
def test_without_shared_memory_rows_are_sent_and_the_bits_are_the_same(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, records = run_alone(algorithms[key]())
    monkeypatch.setattr(process_group, "create_shared_file", lambda count: None)
    other_state, other_records = run_on_ranks(algorithms[key](), 2)
    assert identical(other_state, state) and other_records == records


def test_shared_memory_grows_and_no_other_process_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_and_read(group: ThreadGroup) -> tuple[list[int], list[int]]:
        values = []
        for count in (4, 2, 6):
            area = group.shared_memory(count)
            assert area is not None and len(area) == count
            area[group.rank] = 10 * count + group.rank
            group.gather_numbers([0])
            values.append(area[:2].tolist())
            group.gather_numbers([0])
        return values[0], values[2]

    before = {*Path("/dev/shm").iterdir()}
    for _, values in on_ranks(2, lambda group: group, write_and_read):
        assert values == ([40, 41], [60, 61])
    assert not {path for path in {*Path("/dev/shm").iterdir()} - before if "tmp" in path.name or "askew" in path.name}
    other_machine = str(tmp_path / "elsewhere")  # a path that exists on another machine alone
    monkeypatch.setattr(process_group, "path_of_file", lambda file: (other_machine, 1))
    assert [area for _, area in on_ranks(2, lambda group: group, lambda group: group.shared_memory(4))] == [None, None]
    assert not Path(other_machine).exists()


def test_ranks_on_one_machine_use_sockets_until_one_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(group: ThreadGroup) -> list[list[int]]:
        assert group.sockets is None and group.shared_memory(8) is not None and group.sockets
        monkeypatch.setattr(group, "share_rows", None)  # gloo is not used any more
        table = [group.gather_numbers([group.rank, -5 * group.rank]).tolist() for _ in range(3)][-1]
        if group.rank != 1:
            with pytest.raises(PeerLost, match=r"lost each other \(.*\); start the run again"):
                group.gather_numbers([0])
        close_sockets(group.sockets)  # first that of rank 1, which waits for nobody
        return table

    assert [table for _, table in on_ranks(3, lambda group: group, exchange)] == [[[0, 0], [1, -5], [2, -10]]] * 3


def test_without_sockets_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    state, records = run_alone(Scaffold())
    monkeypatch.setattr(socket.socket, "bind", lambda *_: (_ for _ in ()).throw(OSError("path too long")))
    other_state, other_records = run_on_ranks(Scaffold(), 3)
    assert identical(other_state, state) and other_records == records


def test_work_is_divided_longest_first() -> None:
    assert balance_load([1, 9, 2, 8, 3], 2) == [0, 0, 0, 1, 1]  # 9 + 2 + 1 and 8 + 3
    assert balance_load([5], 3) == [0] and balance_load([1, 1, 1], 3) == [0, 1, 2]
    assert len(set(balance_load([3, 1, 1, 7, 2, 2], 4))) == 4  # no rank idles while there is work


def test_ranks_with_other_data_or_another_model_are_found_out() -> None:
    def other_model(group: ThreadGroup) -> Server:
        server = rank_server(FedAvg(), group)
        server.w[0] += group.rank * 1e-12
        return server

    def other_data(group: ThreadGroup) -> Server:
        server = rank_server(FedAvg(), group)
        server.local = LocalSettings(epochs=1 + group.rank)
        return server

    for make in (other_model, other_data):
        with pytest.raises(EngineError, match=r"different rounds, batches or models before round 1; give all"):
            on_ranks(2, make, lambda server: server.run_round(1, [0, 1]))


def test_uploads_that_change_their_shape_are_refused() -> None:
    class ChangingUpload(FedAvg):
        """Sends one number more in the second round."""

        def finish(self, theta: Tensor, client: askew.Client) -> tuple[State, State]:
            return {"delta": theta - client.w, "more": theta.new_zeros(int(client.round))}, client.state

    with pytest.raises(AlgorithmError, match="the same names, shapes and types"):
        on_ranks(2, lambda group: rank_server(ChangingUpload(), group), lambda server: run_rounds(server, COHORTS))


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 1), (1, 3)])
def test_a_checkpoint_is_the_same_whatever_the_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    alg = Scaffold()
    state, records = run_alone(alg)

    def begin(server: Server) -> None:
        run_rounds(server, COHORTS[:3])
        checkpoint.save(tmp_path, server, 3, "abc", server.engine.group)

    def go_on(server: Server) -> list[Record]:
        assert checkpoint.restore(tmp_path, server, "abc") == 3
        return run_rounds(server, COHORTS[3:], first=4)

    on_ranks(before, lambda group: rank_server(alg, group), begin)
    ranks = on_ranks(after, lambda group: rank_server(alg, group), go_on)
    assert identical(joint_state([server for server, _ in ranks]), state) and ranks[0][1] == records[3:]


@pytest.mark.parametrize(
    "count", [10, SAMPLES_AT_A_TIME, SAMPLES_AT_A_TIME + 1, 2 * SAMPLES_AT_A_TIME + 1, 5 * SAMPLES_AT_A_TIME - 3]
)
def test_an_evaluation_on_ranks_gives_the_same_bits(count: int) -> None:
    server = make_server(FedAvg(), problem(FedAvg()), LOCAL)
    task, fed, rng = server.engine.task, server.fed, torch.Generator().manual_seed(0)
    samples = Samples(torch.randn(count, 4, generator=rng, dtype=torch.float64), torch.arange(count) % 3)
    expected = Evaluator(task, fed, samples, True, True)(server.w, server.buffers)

    def evaluate(pair: tuple[Server, ThreadGroup]) -> Tensor:
        own, group = pair
        return SharedEvaluator(own.engine.task, own.fed, samples, group, True, True)(own.w, own.buffers)

    for size in (2, 3):
        ranks = on_ranks(size, lambda group: (make_server(FedAvg(), problem(FedAvg()), LOCAL), group), evaluate)
        assert all(torch.equal(score, expected) for _, score in ranks)


@pytest.mark.parametrize(
    ("count", "parts"),
    [
        (SAMPLES_AT_A_TIME, [[], [], []]),  # each rank evaluates all, and nothing is exchanged
        (SAMPLES_AT_A_TIME + 1, [[], [SAMPLES_AT_A_TIME], [1]]),
        (5 * SAMPLES_AT_A_TIME - 3, [[SAMPLES_AT_A_TIME], [2 * SAMPLES_AT_A_TIME], [2 * SAMPLES_AT_A_TIME - 3]]),
    ],
)
def test_an_evaluation_is_divided_by_whole_chunks(
    count: int, parts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, per_sample = dict[int, list[int]](), distributed.per_sample

    def count_samples(task: Any, w: Tensor, buffers: Tensor, part: Samples, fed: Any) -> Any:
        counts.setdefault(threading.get_ident(), []).append(len(part.y))
        return per_sample(task, w, buffers, part, fed)

    monkeypatch.setattr(distributed, "per_sample", count_samples)
    samples = Samples(torch.randn(count, 4, dtype=torch.float64), torch.arange(count) % 3)

    def evaluate(pair: tuple[Server, ThreadGroup]) -> list[int]:
        server, group = pair
        SharedEvaluator(server.engine.task, server.fed, samples, group)(server.w, server.buffers)
        return counts.pop(threading.get_ident(), [])

    ranks = on_ranks(3, lambda group: (make_server(FedAvg(), problem(FedAvg()), LOCAL), group), evaluate)
    assert [part_sizes for _, part_sizes in ranks] == parts
    assert all(bool(group.table) == (count > SAMPLES_AT_A_TIME) for (_, group), _ in ranks)
