"""Several processes share a run: whatever their number, it is the same run; and none of them ends unnoticed.

What ranks exchange is tried with threads, which are cheap; that processes find each other, stop, fail and go on, with processes.
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
from askew.engine import distributed as ranks
from askew.engine.distributed import DistributedEngine, Group, PeerLost, SharedEvaluator, dealt, hang_up
from askew.engine.evaluate import CHUNK, Evaluator
from askew.engine.server import Server
from askew.errors import AlgorithmError, EngineError
from askew.experiment import checkpoint
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


class Threads(Group):
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
        whole = torch.cat([self.board[r] for r in range(self.size)]) if self.is_leader else rows
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
        if (error := each.exception()) and not isinstance(error, threading.BrokenBarrierError | PeerLost)
    ]
    if failed:
        raise failed[0]
    return [(one, each.result()) for one, each in zip(made, done, strict=True)]


def ranked(alg: Algorithm, group: Group, engine: str = "sequential", spoil: dict[str, Any] | None = None) -> Server:
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
            group.gather_numbers([0])
            seen.append(area[:2].tolist())
            group.gather_numbers([0])
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
        told = [group.gather_numbers([group.rank, -5 * group.rank]).tolist() for _ in range(3)][-1]
        if group.rank != 1:
            with pytest.raises(PeerLost, match=r"lost each other \(.*\); start the run again"):
                group.gather_numbers([0])
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
        server.w[0] += group.rank * 1e-12
        return server

    def other_data(group: Threads) -> Server:
        server = ranked(FedAvg(), group)
        server.local = LocalSettings(epochs=1 + group.rank)
        return server

    for make in (other_model, other_data):
        with pytest.raises(EngineError, match=r"different rounds, batches or models before round 1; give all"):
            on_ranks(2, make, lambda server: server.run_round(1, [0, 1]))


def test_uploads_that_change_their_shape_are_refused() -> None:
    class Odd(FedAvg):
        """Sends one number more in the second round."""

        def finish(self, theta: Tensor, client: askew.Client) -> tuple[State, State]:
            return {"delta": theta - client.w, "more": theta.new_zeros(int(client.round))}, client.state

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
    expected = Evaluator(task, fed, samples)(server.w, server.buffers)
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
        SharedEvaluator(server.engine.task, server.fed, samples, group)(server.w, server.buffers)
        return seen.pop(threading.get_ident(), [])

    done = on_ranks(3, lambda group: (serve(FedAvg(), problem(FedAvg()), LOCAL), group), take)
    assert [told for _, told in done] == parts
    assert all(bool(group.board) == (count > CHUNK) for (_, group), _ in done)
