"""Several processes share a run's work, through torch.distributed.

All ranks run the same rounds from the same configuration. Each trains some of the participants with an engine of its
own; then rows are exchanged, so that every rank has the whole cohort's in the cohort's order and goes on alike. Sums
are thus taken in one order, whatever the number of ranks: with the sequential engine on the CPU results are the same
bit for bit, with the others up to rounding, as rows that are trained side by side then differ.

Client state is kept by the rank that owns the client and is not sent. Server memory and private parts are kept by
all.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.task import Task
from ..core.types import State
from ..data.dataset import Samples
from ..data.federation import Federation, RoundPlan
from ..errors import AlgorithmError, EngineError
from .base import Engine, PhaseInputs, PhaseOutputs, PhaseRequest, uploads_in
from .evaluate import SAMPLES_AT_A_TIME, Evaluator, per_sample
from .finite import finite_rows
from .process_group import ProcessGroup

ALIGNED = 16  # bytes; where every entry of a message starts, so that it can be seen as numbers of any type


class TensorSpec(NamedTuple):
    """An entry of the exchanged rows: the shape and type of one row."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, rows: Tensor) -> TensorSpec:
        return cls(tuple(rows.shape[1:]), rows.dtype)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def to_json(self) -> list[Any]:
        return [self.shape, str(self.dtype).removeprefix("torch.")]

    @classmethod
    def from_json(cls, value: list[Any]) -> TensorSpec:
        return cls(tuple(value[0]), getattr(torch, value[1]))


def specs_of(state: State) -> dict[str, TensorSpec]:
    return {n: TensorSpec.of(t) for n, t in state.items()}


class DistributedEngine:
    """The engine of a run that several ranks share: each trains some rows, all get all.

    Without client state the work is divided, the longest first, each to the rank with the least so far; with it, a
    client is trained by its owner. A client stays with its rank for all phases of a round, so its carry does not
    travel.
    """

    def __init__(self, inner: Engine, group: ProcessGroup) -> None:
        self.inner, self.group, self.name = inner, group, inner.name
        self.round = 0
        self.rank_of: dict[int, int] = {}  # this round's clients, and who trains them
        self.specs: dict[int, dict[str, TensorSpec]] = {}  # of each phase's rows

    def run(self, requests: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        (request,) = requests  # one run: its clients have one rank
        return [self._run(request)]

    def _run(self, request: PhaseRequest) -> PhaseOutputs:
        phase, inputs, plan, _ = request
        ranks = self._rows_of_ranks(inputs, plan)
        own = ranks[self.group.rank]
        outputs: PhaseOutputs | None = None
        if own:
            (outputs,) = self.inner.run([request.only(own)])
        rows = self._exchange(phase, ranks, entries_of(outputs) if outputs else {}, inputs, plan)
        count, local_carry = len(plan.ids), outputs.carry if outputs else {}
        carry = {n: put_rows(t.new_zeros(count, *t.shape[1:]), own, t) for n, t in local_carry.items()}
        state = self._client_state(inputs, own, outputs, rows.get("finite"))
        return PhaseOutputs(uploads_in(rows), state, carry, rows["buffers"], rows["loss"], rows.get("theta"))

    def _client_state(
        self, inputs: PhaseInputs, own: list[int], outputs: PhaseOutputs | None, finite: Tensor | None
    ) -> State:
        """New client state of the own rows; the others stay as they were, or are NaN where their owner's are not
        finite.
        """
        state = inputs.state
        if outputs:
            if specs_of(outputs.state) != specs_of(state):
                return outputs.state  # which the server refuses
            state = {n: put_rows(state[n].clone(), own, t) for n, t in outputs.state.items()}
        if finite is None or bool(finite.all()):
            return state
        mark: dict[str, Tensor] = {}
        for n, t in state.items():
            mark[n] = torch.where(expand_like(finite, t), t, torch.nan) if t.is_floating_point() else t
        return mark

    def _synchronise(self, inputs: PhaseInputs, plan: RoundPlan) -> None:
        """Wait for all ranks, and refuse to go on where they differ: other data, code or processors would change
        results.
        """
        bits = inputs.w.contiguous().view(torch.int32 if inputs.w.element_size() == 4 else torch.int64)
        samples = sum((i + 1) * len(work.places) for i, work in zip(plan.ids, plan.train, strict=True))
        checksum = int(bits.sum(dtype=torch.int64))
        table = self.group.gather_numbers([inputs.round, len(plan.ids), samples, checksum])
        if bool((table != table[0]).any()):
            raise EngineError(
                "the processes that share this run came to different rounds, batches or models before round "
                f"{inputs.round}; give all of them the same files, folders, versions and kind of machine."
            )

    def _rows_of_ranks(self, inputs: PhaseInputs, plan: RoundPlan) -> list[list[int]]:
        """The rows that each rank trains."""
        if inputs.round != self.round or not self.rank_of.keys() >= {*plan.ids}:
            looks = [sum(len(look[i].places) for look in plan.looks.values()) for i in range(len(plan.ids))]
            loads = [len(work.places) + more for work, more in zip(plan.train, looks, strict=True)]
            size = self.group.size
            ranks = [i % size for i in plan.ids] if inputs.state else balance_load(loads, size)
            self.round, self.rank_of = inputs.round, dict(zip(plan.ids, ranks, strict=True))
        ranked = [self.rank_of[client] for client in plan.ids]
        return [[i for i, rank in enumerate(ranked) if rank == r] for r in range(self.group.size)]

    def _known_specs(
        self, phase: Algorithm, ranks: list[list[int]], sent: State, inputs: PhaseInputs, plan: RoundPlan
    ) -> dict[str, TensorSpec]:
        """What the rows of a phase are made of: in every round the same."""
        if id(phase) not in self.specs:
            self._synchronise(inputs, plan)  # before anything is sent that only those expect who came to the same point
            source = next(r for r, rows in enumerate(ranks) if rows)
            values = self.group.broadcast({n: spec.to_json() for n, spec in specs_of(sent).items()}, source)
            self.specs[id(phase)] = {n: TensorSpec.from_json(value) for n, value in values.items()}
        known = self.specs[id(phase)]
        if sent and specs_of(sent) != known:
            raise AlgorithmError(
                f"{phase.display_name()}: finish() must upload the same names, shapes and types in every round. "
                "Correct the hook."
            )
        return known

    def _exchange(
        self, phase: Algorithm, ranks: list[list[int]], sent: State, inputs: PhaseInputs, plan: RoundPlan
    ) -> State:
        """All rows, in the cohort's order, from those that each rank sends."""
        known, device = self._known_specs(phase, ranks, sent, inputs, plan), inputs.w.device
        lengths = [[-(-len(rows) * spec.bytes // ALIGNED) * ALIGNED for spec in known.values()] for rows in ranks]
        cuts = [0, *accumulate(sum(each) for each in lengths)]
        if device.type == "cpu" and self.group.needs_memory(cuts[-1]):
            self._synchronise(inputs, plan)
        shared = self.group.shared_memory(cuts[-1]) if device.type == "cpu" else None
        message = torch.empty(cuts[-1], dtype=torch.uint8, device=device) if shared is None else shared

        def entries(rank: int) -> Iterator[tuple[str, Tensor]]:
            """A rank's rows of every entry, as views of the message."""
            at, count = cuts[rank], len(ranks[rank])
            for (name, spec), length in zip(known.items(), lengths[rank], strict=True):
                yield name, message[at : at + count * spec.bytes].view(spec.dtype).view(count, *spec.shape)
                at += length

        if ranks[self.group.rank]:
            for name, room in entries(self.group.rank):
                room.copy_(sent[name])
        self._synchronise(inputs, plan)  # all have written
        if shared is None:
            self.group.share_rows(message, cuts)
        total = sum(map(len, ranks))
        whole = {n: torch.empty(total, *spec.shape, dtype=spec.dtype, device=device) for n, spec in known.items()}
        for rank, rows in enumerate(ranks):
            for name, room in entries(rank) if rows else ():
                put_rows(whole[name], rows, room)
        return whole


def entries_of(outputs: PhaseOutputs) -> State:
    """What the others need of a rank's rows; of client state, whether it is finite."""
    entries = outputs.entries()
    if outputs.state:
        entries["finite"] = finite_rows(outputs.state.values())
    return entries


def put_rows(whole: Tensor, rows: list[int], new: Tensor) -> Tensor:
    """The tensor with these rows new; on a CPU one by one, three times as fast as all by their indices."""
    if whole.is_cuda:
        whole[rows] = new
    else:
        for i, row in enumerate(rows):
            whole[row].copy_(new[i])
    return whole


def expand_like(row: Tensor, like: Tensor) -> Tensor:
    """[C] with as many dimensions as another tensor."""
    return row.view(-1, *[1] * (like.dim() - 1))


def balance_load(loads: Sequence[int], ranks: int) -> list[int]:
    """The rank of each piece of work: the longest first, each to the rank that has least to do so far."""
    totals, rank_of = [(0, r) for r in range(ranks)], [0] * len(loads)
    for i in sorted(range(len(loads)), key=lambda i: -loads[i]):
        total, rank_of[i] = heapq.heappop(totals)
        heapq.heappush(totals, (total + loads[i], rank_of[i]))
    return rank_of


class SharedEvaluator(Evaluator):
    """An evaluator whose chunks of samples are divided among the ranks; on CUDA, where it is one captured graph, each
    does it all.
    """

    def __init__(self, task: Task, fed: Federation, samples: Samples, group: ProcessGroup, *measured: bool) -> None:
        super().__init__(task, fed, samples, *measured)
        count, self.group = len(samples.y), group
        chunks = -(-count // SAMPLES_AT_A_TIME)
        self.cuts = [*(r * chunks // group.size * SAMPLES_AT_A_TIME for r in range(group.size)), count]

    def _score(self, w: Tensor, buffers: Tensor) -> Tensor:
        if w.is_cuda or len(self.samples.y) <= SAMPLES_AT_A_TIME:
            return super()._score(w, buffers)
        results = torch.empty(len(self.samples.y), 2, dtype=torch.float64)
        own = slice(*self.cuts[self.group.rank : self.group.rank + 2])
        if own.start < own.stop:
            part = Samples(self.samples.x[own], self.samples.y[own])
            results[own] = torch.stack(per_sample(self.task, w, buffers, part, self.fed), 1).double()
        self.group.share_rows(results, self.cuts)
        return self.score_of(*results.T.contiguous())
