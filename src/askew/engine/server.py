"""The server: one round from its participants to the new model, with the guards that all methods share."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.bank import Bank
from ..core.method_checks import check_declared, check_method
from ..core.records import NO_ANSWER, TIMES, Record, is_record_key
from ..core.rng import coin
from ..core.space import Space
from ..core.types import ALL_NEW, Cohort, State, momentum_length, select_rows
from ..data.federation import Federation, LocalSettings, RoundPlan
from ..errors import AlgorithmError, ConfigError
from ..participation import Turnout
from . import drift as drift_metrics
from . import server_hooks
from .answers import MODEL_NOT_FINITE, NO_BATCH, NOT_FINITE
from .base import (
    Engine,
    Incident,
    OutputStage,
    PhaseInputs,
    PhaseOutputs,
    PhaseRequest,
    RecordingStage,
    finished_time,
    parts_key,
    prepare_next,
)
from .finite import check_phase
from .round_metrics import EvaluateModel, RoundMetric, RoundUpdates
from .sample_buffer import send

TensorSize = tuple[torch.Size, int]  # a tensor's shape and the bytes of one of its numbers


class RoundState(NamedTuple):
    """What a round changes, phase by phase; it replaces the old state only if all of it is finite."""

    w: Tensor
    buffers: Tensor
    server: State
    rows: dict[str, State]  # the participants' rows of the banks: "clients", "memory", "private"
    updates: RoundUpdates

    def only(self, rows: list[int]) -> RoundState:
        """The state of a round with some of the participants."""
        return self._replace(rows={name: select_rows(state, rows) for name, state in self.rows.items()})


@dataclass
class RoundLog:
    """What is noted of a round while it runs."""

    bytes_up: int = 0
    bytes_down: int = 0
    losses: list[float] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)  # participants whose answers are not used
    whole: bool = False
    scalars: dict[str, float] = field(default_factory=dict)


class Server:
    """The global model, the method's state, and three banks: client state, server memory, private parts."""

    def __init__(
        self,
        alg: Algorithm,
        space: Space,
        fed: Federation,
        local: LocalSettings,
        engine: Engine,
        seed: int,
        smallest_batch: int = 1,
        *,
        rounds: int = 0,
        evaluate: EvaluateModel | None = None,
        owns: Callable[[int], bool] | None = None,
        drift: bool = False,
        times: bool = False,
        metrics: Sequence[RoundMetric] = (),
        stages: Sequence[OutputStage] = (),
    ) -> None:
        """`smallest_batch` 2: batches of one sample are skipped, which batch norm cannot take; `rounds` is T, which
        schedules need; `evaluate` gives accuracy and loss of a model on the public set; `owns` says which clients'
        state this process keeps, None: all; `stages` are what every phase's outputs go through, in this order.
        """
        self.alg, self.space, self.fed, self.local, self.engine, self.seed = alg, space, fed, local, engine, seed
        self.rounds, self.evaluate, self.smallest_batch = rounds, evaluate, smallest_batch
        self.metrics, self.stages = metrics, stages
        check_method(alg)
        self.phases = alg.phases()
        # by client of the round under way, the server's steps since the model that it started from; none: all are 0
        self.staleness: dict[int, int] = {}
        self.prepared: tuple[Any, RoundPlan] | None = None  # the next round's plan, by its key
        self.numbers: list[tuple[Any, Tensor]] = []  # the clients' numbers of the last two plans
        self.w, self.buffers = space.start.clone(), space.buffers.clone()
        self.no_updates = RoundUpdates.none(0, self.w, self.buffers)
        self.drift_history = drift_metrics.history(space) if drift else None  # None: drift is not recorded
        self.times = dict.fromkeys(TIMES if times else (), 0.0)  # of the round under way
        self.state = server_hooks.declared_state(alg, "server_state", space)
        self.parts, self.private = alg.parts(space), alg.private(space)
        self.clients = Bank(server_hooks.declared_state(alg, "client_state", space), owns=owns)
        self.memory = Bank(server_hooks.declared_state(alg, "memory", space))
        check_declared(alg, self.state | self.memory.start, self.parts, self.private)
        self.parts_key = parts_key(self.parts)
        self.unchecked = {id(phase) for phase in self.phases}  # whose weights were not checked yet
        own = {"w": space.start[self.private.indices], "b": space.buffers[self.private.buffer_indices]}
        self.privates = Bank({} if self.private.empty else own)
        self.looks = sorted({name for phase in self.phases for name in (*phase.before, *phase.each, *phase.after)})
        self._check_method()

    def _check_method(self) -> None:
        name = self.alg.display_name()
        if "gradient" in self.looks and self.smallest_batch > 1:
            raise ConfigError(
                f"{name}: full gradients of a batch-norm network are not defined (chunks differ); use another norm."
            )
        if 0 < self.local.batch < self.smallest_batch and any(phase.trains for phase in self.phases):
            raise ConfigError(
                f"local.batch = {self.local.batch} leaves nothing to train on, as batch norm takes batches of two "
                "samples or more; set local.batch to 2 or more, or use another norm."
            )
        if "labels" in self.alg.needs and not self.fed.classes:
            raise ConfigError(f"{name} needs label counts, and a regression has no classes; use another method.")
        if clash := sorted(filter(is_record_key, (*self.state, *self.memory.start))):
            raise AlgorithmError(f"{name}: {clash[0]!r} is a name of the round's record; rename that server state.")
        if both := sorted({*self.state} & {*self.memory.start}):
            raise AlgorithmError(
                f"{name}: server_state() and memory() both declare {both[0]!r}, and hooks would find only one of them; "
                "rename one."
            )

    @property
    def recording(self) -> list[RecordingStage]:
        """The stages that add to the record."""
        return [stage for stage in self.stages if isinstance(stage, RecordingStage)]

    @property
    def banks(self) -> dict[str, Bank]:
        return {"clients": self.clients, "memory": self.memory, "private": self.privates}

    @property
    def stored_banks(self) -> dict[str, Bank]:
        """The banks that a checkpoint holds."""
        return self.banks

    # one round --------------------------------------------------------------------------------------------------------

    def prepare(self, round: int, ids: Sequence[int], share: Sequence[float] = ()) -> RoundPlan:
        """The plan of a round, stored for `round_requests`; it may be made while the device trains the round before."""
        key = (round, tuple(ids), tuple(share))
        if self.prepared is None or self.prepared[0] != key:
            self.prepared = (key, self.fed.plan(ids, round, self.local, self.looks, self.smallest_batch, share))
            self._client_numbers(with_work(self.prepared[1]), round)
        return self.prepared[1]

    def next_request(self, request: PhaseRequest) -> PhaseRequest | None:
        """The request after this one, but for models and states, if its plan is prepared.

        Of a round with several phases it is not known. Where times are recorded, a round's samples count for that
        round.
        """
        if self.prepared is None or self.prepared[0][0] == request.inputs.round or len(self.phases) > 1 or self.times:
            return None
        plan = with_work(self.prepared[1])
        return request._replace(plan=plan) if plan.ids else None

    def run_round(
        self,
        round: int,
        ids: Sequence[int],
        share: Sequence[float] = (),
        absent: Sequence[int] | Mapping[int, str] = (),
        meanwhile: Callable[[], None] | None = None,
    ) -> Record:
        """One round with this server's own engine; `meanwhile` is called before the first phase's results are read."""
        requests = self.round_requests(round, ids, share, absent)
        try:
            request = next(requests)
            while True:
                with measure_time([self], "clients"):
                    (outputs,) = self.engine.run([request])
                if meanwhile is not None:
                    meanwhile()
                    meanwhile = None
                    prepare_next(self.engine, [each for each in (self.next_request(request),) if each])
                request = requests.send(outputs)
        except StopIteration as end:
            record: Record = end.value
            return record

    def turnout_requests(self, round: int, turnout: Turnout) -> Generator[PhaseRequest, PhaseOutputs, Record]:
        """One round with who takes part in it, as `round_requests`."""
        absent = turnout.reasons or turnout.absent.tolist()
        return self.round_requests(round, turnout.ids.tolist(), turnout.share.tolist(), absent)

    def round_requests(
        self,
        round: int,
        ids: Sequence[int],
        share: Sequence[float] = (),
        absent: Sequence[int] | Mapping[int, str] = (),
    ) -> Generator[PhaseRequest, PhaseOutputs, Record]:
        """One round, which requests each phase from an engine and is sent its outputs; it returns the round's record.

        The model, all state and all banks change together or, if nobody is left, not at all. `share` is how much of its
        work each participant does; `absent` are those who were asked and do not answer, with the reasons if known.
        """
        plan, log = with_work(self.prepare(round, ids, share)), RoundLog()
        working = {*plan.ids}
        log.incidents += [Incident(client, NO_BATCH, True) for client in ids if client not in working]
        at, carry = self.round_state(round, plan.ids), self.first_carry(plan.ids)
        self.times = dict.fromkeys(self.times, 0.0)
        if not plan.ids:
            first = self.phases[0]
            log.bytes_down = len(absent) * self.message_bytes(first, self.received_sizes(first), (), True)[0]
        known = None
        for n, phase in enumerate(self.phases):
            if not plan.ids:
                break
            request = self._request(n, round, plan, at, carry)
            outputs = self._through_stages(request, (yield request))
            brings_model = known is None or not all(map(same_values, known, (at.w, at.buffers)))
            self._count_bytes(log, phase, request.inputs, outputs, brings_model, len(absent) if n == 0 else 0)
            known = at.w, at.buffers
            plan, at, carry = self._receive(phase, round, plan, outputs, at, log)
        return self._end_round(round, ids, absent, plan, at, log)

    def round_state(self, round: int, ids: Sequence[int]) -> RoundState:
        """The state before a round's step, with the rows of these clients."""
        rows = {name: bank.read(ids) for name, bank in self.banks.items()}
        updates = self.no_updates._replace(round=round, old=self.w, new=self.w, buffers=self.buffers)
        return RoundState(self.w, self.buffers, self.state, rows, updates)

    def first_request(self, round: int, plan: RoundPlan) -> PhaseRequest:
        """What clients that begin in a round are asked to do first, from the newest model."""
        return self._request(0, round, plan, self.round_state(round, plan.ids), self.first_carry(plan.ids))

    def _request(self, n: int, round: int, plan: RoundPlan, at: RoundState, carry: State) -> PhaseRequest:
        """What the clients of the n-th phase are asked to do."""
        wanted = [*(["theta"] if at.rows["private"] else []), *(["carry"] if n + 1 < len(self.phases) else [])]
        phase = self.phases[n]
        return PhaseRequest(phase, self._inputs(phase, round, plan, at, carry), plan, wanted)

    def _through_stages(self, request: PhaseRequest, outputs: PhaseOutputs) -> PhaseOutputs:
        """A phase's outputs as they arrive at the server's step. Stages see what travels: private buffers as sent."""
        outputs, own, places = self._without_private(outputs), outputs.buffers, self.private.buffer_indices
        rows = outputs.cohort_rows()
        if self.stages and places.numel():
            outputs = outputs._replace(buffers=own.index_copy(1, places, request.sent_buffers(rows)[:, places]))
        for stage in self.stages:
            outputs = self._without_private(stage(request, outputs))
        if self.stages and places.numel():
            left = own[[rows.index(row) for row in outputs.cohort_rows()]][:, places]
            outputs = outputs._replace(buffers=outputs.buffers.index_copy(1, places, left))
        return outputs

    def _receive(
        self, phase: Algorithm, round: int, plan: RoundPlan, outputs: PhaseOutputs, at: RoundState, log: RoundLog
    ) -> tuple[RoundPlan, RoundState, State]:
        """The plan, state and carry after a phase, of those whose answers are used."""
        if outputs.answered is not None:
            log.incidents += explained_incidents(plan.ids, outputs)
            plan, at = plan.only(outputs.answered), at.only(outputs.answered)
        return self._finish_phase(phase, round, plan, outputs, at, log) if plan.ids else (plan, at, {})

    def _end_round(
        self,
        round: int,
        ids: Sequence[int],
        absent: Sequence[int] | Mapping[int, str],
        plan: RoundPlan,
        at: RoundState,
        log: RoundLog,
    ) -> Record:
        """Adopt the state after a round if it is sound; returns the round's record."""
        at = at if plan.ids else self._without_clients(round, at, log)
        healthy = log.whole
        if not healthy:
            log.incidents += [Incident(client, MODEL_NOT_FINITE, True) for client in plan.ids]
        metrics = self._adopt(round, plan, at) if healthy else {}
        return self._record(round, ids, absent, log, metrics, healthy)

    def _without_clients(self, round: int, at: RoundState, log: RoundLog) -> RoundState:
        """The state after a round without answers: the old one, unless a stage has an upload for such rounds."""
        ups = [stage.without_clients(round, at.w) for stage in self.recording]
        up, log.whole = next((up for up in ups if up is not None), None), False
        if up is None:
            return at
        one, (lr, lr0) = at.w.new_ones(1), (self.local.rate(t, self.rounds) for t in (round, 1))
        no_rows = at.buffers.new_zeros(1, 0)
        up = self._without_private(PhaseOutputs(up, {}, {}, no_rows, one, None)).up
        cohort = Cohort(one, one, one, one, one, None, lr, lr0, round, len(self.fed.eligible))
        w, server, _ = server_hooks.aggregate(self.phases[-1], at.w, up, cohort, at.server, {})
        log.whole = all(bool(torch.isfinite(v).all()) for v in (w, *server.values()))
        log.scalars = {n: float(v) for n, v in server.items() if v.dim() == 0}
        rows = {name: bank.read([]) for name, bank in self.banks.items()}
        return at._replace(w=w, server=server, rows=rows)

    def _finish_phase(
        self, phase: Algorithm, round: int, plan: RoundPlan, outputs: PhaseOutputs, at: RoundState, log: RoundLog
    ) -> tuple[RoundPlan, RoundState, State]:
        """The plan, state and carry after a phase; clients whose reports are not finite are left out."""
        with measure_time([self], "server"):
            new = self._try_phase(phase, round, plan, outputs, at)
            check = check_phase(outputs, new.w, new.buffers, new.server)
        if phase.trains or not log.losses:
            log.losses = check.losses
        if not all(check.finite):
            left = [i for i, finite in enumerate(check.finite) if finite]
            log.incidents += [Incident(c, NOT_FINITE, True) for c in plan.ids if c not in {plan.ids[i] for i in left}]
            outputs, plan, at = outputs.rows(left), plan.only(left), at.only(left)
            if not plan.ids:
                return plan, at, outputs.carry
            new = self._phase_state(phase, round, plan, outputs, at)
            check = check_phase(outputs, new.w, new.buffers, new.server)
        log.whole, log.scalars = check.whole, check.scalars
        return plan, new, outputs.carry

    def _try_phase(
        self, phase: Algorithm, round: int, plan: RoundPlan, outputs: PhaseOutputs, at: RoundState
    ) -> RoundState:
        """The state after a phase, before it is known whether all reports are finite: so the host need not wait for the
        device in between.
        """
        try:
            return self._phase_state(phase, round, plan, outputs, at)
        except (RuntimeError, ValueError, ArithmeticError):  # which a report that is not finite may cause
            if all(check_phase(outputs, at.w, at.buffers, at.server).finite):
                raise
            return at

    def _phase_state(
        self, phase: Algorithm, round: int, plan: RoundPlan, outputs: PhaseOutputs, at: RoundState
    ) -> RoundState:
        """What a phase's reports make of model, buffers, state and rows."""
        cohort, updates, buffers = self._cohort(round, plan, outputs, at.w, phase), at.updates, at.buffers
        # aggregate() would fail on wrong weights, and not say why
        if id(phase) in self.unchecked and server_hooks.check_weights(phase, outputs.up, cohort):
            self.unchecked.discard(id(phase))
        w, server, memory = server_hooks.aggregate(phase, at.w, outputs.up, cohort, at.server, at.rows["memory"])
        if "delta" in outputs.up and (self.drift_history is not None or self.metrics):
            weights = server_hooks.weights(phase, outputs.up, cohort)
            updates = updates._replace(ids=plan.ids, deltas=outputs.up["delta"], local_buffers=outputs.buffers)
            updates = updates._replace(weights=weights, public=cohort.public)
        if phase.trains and buffers.numel():
            mean = server_hooks.weights(phase, outputs.up, cohort) @ outputs.buffers
            private = self.private.buffer_indices
            buffers = mean if self.private.empty else mean.index_copy(0, private, buffers[private])
        private_rows = at.rows["private"]
        if outputs.theta is not None:
            own = outputs.theta[:, self.private.indices], outputs.buffers[:, self.private.buffer_indices]
            private_rows = dict(zip(("w", "b"), own, strict=True))
        state = server_hooks.same_form(phase, "finish", "client state", at.rows["clients"], outputs.state)
        rows = {"clients": state, "memory": memory, "private": private_rows}
        return RoundState(w, buffers, server, rows, updates)

    def _adopt(self, round: int, plan: RoundPlan, at: RoundState) -> Record:
        """Replace the server's state by that of a round; returns what is measured of the change."""
        metrics, updates = Record(), at.updates
        if self.drift_history is not None:
            own = at.rows["clients"].get(self.alg.drift_state) if self.clients.owns is None else None
            metrics, self.drift_history = drift_metrics.measure_round(
                self.space, self.drift_history, round, self.w, at.w, updates.deltas, updates.weights, own
            )
        for metric in self.metrics if len(updates.deltas) else ():
            metrics |= metric(updates._replace(new=at.w, buffers=at.buffers))
        self.w, self.buffers, self.state = at.w, at.buffers, at.server
        for name, bank in self.banks.items():
            bank.write(plan.ids, at.rows[name])
        return metrics

    def _record(
        self,
        round: int,
        ids: Sequence[int],
        absent: Sequence[int] | Mapping[int, str],
        log: RoundLog,
        metrics: Record,
        healthy: bool,
    ) -> Record:
        finite = [v for v in log.losses if np.isfinite(v)]
        why = absent if isinstance(absent, Mapping) else dict.fromkeys(absent, NO_ANSWER)
        incidents = [*(Incident(client, reason, False) for client, reason in why.items()), *log.incidents]
        missing = {incident.client for incident in incidents if not incident.arrived}
        scalars = log.scalars if healthy else {n: float(v) for n, v in self.state.items() if v.dim() == 0}
        record: Record = {
            "round": round,
            "participants": [int(i) for i in ids if i not in missing],
            "train_loss": float(np.mean(finite)) if finite else None,
            "bytes_up": log.bytes_up,
            "bytes_down": log.bytes_down,
            "dropped": sum(incident.lost for incident in incidents) - len(missing),
            **({"absent": len(missing)} if missing else {}),
            **(self._roll_call([*ids, *absent], incidents) if incidents else {}),
            **self.times,
            **metrics,
            **scalars,
        }
        for stage in self.recording:
            record |= stage.note(record)
        return record

    def _roll_call(self, asked: Sequence[int], incidents: Sequence[Incident]) -> Record:
        """Whose answers are not used, by reason, and the lost share of the samples of all that were asked."""
        by_reason: dict[str, list[int]] = {}
        for incident in incidents:
            by_reason.setdefault(incident.reason, []).append(int(incident.client))
        lost = self.fed.sizes[[incident.client for incident in incidents if incident.lost]].sum()
        return {"incidents": by_reason, "lost_share": float(lost / max(1, self.fed.sizes[list(asked)].sum()))}

    def first_carry(self, ids: Sequence[int]) -> State:
        """The rows of the carry before the first phase: the clients' label counts, where the method needs them."""
        return {"labels": self.fed.label_counts(ids)} if "labels" in self.alg.needs else {}

    # one phase --------------------------------------------------------------------------------------------------------

    def _inputs(self, phase: Algorithm, round: int, plan: RoundPlan, at: RoundState, carry: State) -> PhaseInputs:
        w, buffers, private = at.w, at.buffers, at.rows["private"]
        down = {n: v for n, v in at.server.items() if n in phase.broadcast}
        down = {n: v.to(self.space.dtype) if v.is_floating_point() else v for n, v in down.items()}
        memory = {n: v for n, v in at.rows["memory"].items() if n in phase.broadcast}
        if private:
            count = len(plan.ids)
            w = w.expand(count, -1).index_copy(1, self.private.indices, private["w"])
            buffers = buffers.expand(count, -1).index_copy(1, self.private.buffer_indices, private["b"])
        local = self.local
        lr, lr0 = (local.rate(t, self.rounds) for t in (round, 1))
        rates = (lr, lr0, local.momentum, local.weight_decay, local.clip_limit)
        numbers = self._client_numbers(plan, round)
        fixed = (self.parts, *rates, round, *numbers, self.parts_key)
        return PhaseInputs(w, buffers, down, memory, at.rows["clients"], carry, *fixed)

    def _client_numbers(self, plan: RoundPlan, round: int, with_coins: bool = True) -> Tensor:
        """Of the participants their steps, the length of these under momentum, relative sizes, and coins [4, C].

        For the server's step, which needs no coins, they need not be drawn.
        """
        for works, numbers in self.numbers:
            if len(works) == len(plan.train) and all(a is b for a, b in zip(works, plan.train, strict=True)):
                return numbers
        steps, size = [work.batches for work in plan.train], self.fed.sizes[plan.ids] / self.fed.mean_size
        coins = [coin(self.seed, round, i) for i in plan.ids] if with_coins else [0.0] * len(steps)
        columns = torch.from_numpy(np.array([steps, steps, size, coins], dtype=np.float64)).to(self.space.dtype)
        if self.local.momentum:
            columns[1] = momentum_length(columns[0], self.local.momentum)
        numbers = send(columns, self.space.device)
        if with_coins:
            self.numbers = [*self.numbers[-1:], (plan.train, numbers)]
        return numbers

    def _cohort(self, round: int, plan: RoundPlan, outputs: PhaseOutputs, w: Tensor, phase: Algorithm) -> Cohort:
        steps, tau, size, _ = self._client_numbers(plan, round, with_coins=False)
        p = size / size.sum() if self.alg.by_samples else torch.full_like(size, 1 / len(size))
        public: State | None = None
        if self.evaluate is not None and phase.trains and "delta" in outputs.up:
            models = zip(outputs.up["delta"], outputs.buffers, strict=True)
            scores = [self.evaluate(w + delta, buffers) for delta, buffers in models]
            accuracy, loss = torch.stack(scores, 1).to(self.space.dtype)
            public = {"accuracy": accuracy, "loss": loss}
        lr, lr0 = (self.local.rate(t, self.rounds) for t in (round, 1))
        staleness = ALL_NEW
        if self.staleness:
            each = torch.from_numpy(np.array([self.staleness[client] for client in plan.ids]))
            staleness = send(each.to(self.space.dtype), self.space.device)
        return Cohort(p, steps, tau, size, outputs.loss, public, lr, lr0, round, len(self.fed.eligible), staleness)

    # what travels -----------------------------------------------------------------------------------------------------

    def _without_private(self, outputs: PhaseOutputs) -> PhaseOutputs:
        """Private coordinates never go up: every upload of length P arrives with zeros there."""
        private = self.private.indices
        if not private.numel():
            return outputs
        whole = {n for n, t in outputs.up.items() if t.dim() == 2 and t.shape[1] == self.space.P}
        up = {n: t.index_fill(1, private, 0) if n in whole else t for n, t in outputs.up.items()}
        return outputs._replace(up=up)

    def received_sizes(self, phase: Algorithm) -> list[TensorSize]:
        """What a client receives for a phase beside a model: of the server's state and of its own memory there."""
        state = [v for n, v in self.state.items() if n in phase.broadcast]
        memory = [v for n, v in self.memory.start.items() if n in phase.broadcast]
        one = self.space.start.element_size()  # the state is sent in the model's precision
        sizes = [(v.shape, one if v.is_floating_point() else v.element_size()) for v in state]
        return sizes + [(v.shape, v.element_size()) for v in memory]

    def message_bytes(
        self, phase: Algorithm, received: Iterable[TensorSize], sent: Iterable[TensorSize], brings_model: bool
    ) -> tuple[int, int]:
        """Bytes of a phase's messages to and from one client that receives and sends these tensors beside a model."""
        hidden, one = self.private.indices.numel(), torch.empty((), dtype=self.space.dtype).element_size()
        buffers = self.space.Q - self.private.buffer_indices.numel()

        def size(tensors: Iterable[TensorSize]) -> int:
            return sum(
                (shape.numel() - (hidden if shape.numel() == self.space.P else 0)) * item for shape, item in tensors
            )

        model = (self.space.P - hidden + buffers) * one if brings_model else 0
        return size(received) + model, size(sent) + (buffers * one if phase.trains else 0)

    def _count_bytes(
        self,
        log: RoundLog,
        phase: Algorithm,
        inputs: PhaseInputs,
        outputs: PhaseOutputs,
        brings_model: bool,
        absent: int,
    ) -> None:
        """Count the bytes that travel to and from all asked clients."""
        asked, answers_sent = len(inputs.steps), len(outputs.loss) + sum(i.arrived for i in outputs.incidents)
        received = [(t.shape, t.element_size()) for t in inputs.server.values()]
        received += [(t.shape[1:], t.element_size()) for t in inputs.memory.values()]
        sent = [(t.shape[1:], t.element_size()) for t in outputs.up.values()]
        down, up = self.message_bytes(phase, received, sent, brings_model)
        log.bytes_down += down * (asked + absent)
        log.bytes_up += up * answers_sent


def same_values(one: Tensor, other: Tensor) -> bool:
    return one is other or torch.equal(one, other)


def explained_incidents(ids: Sequence[int], outputs: PhaseOutputs) -> list[Incident]:
    """The incidents of a phase; a client without an answer and without a reason gave no answer."""
    answered = {ids[row] for row in outputs.answered or ()} | {incident.client for incident in outputs.incidents}
    return [*outputs.incidents, *(Incident(client, NO_ANSWER, False) for client in ids if client not in answered)]


@contextmanager
def measure_time(servers: Sequence[Server], part: str) -> Iterator[None]:
    """Add the seconds of a part of their round, in equal shares, for servers that record times."""
    recording = [server for server in servers if server.times]
    if not recording:
        yield
        return
    began = finished_time(recording[0].space.device)
    yield
    for server in recording:
        server.times[f"seconds_{part}"] += (finished_time(server.space.device) - began) / len(servers)


def with_work(plan: RoundPlan) -> RoundPlan:
    """The plan of those who have anything to do."""
    rows = [i for i, work in enumerate(plan.train) if work.batches]
    return plan if len(rows) == len(plan.train) else plan.only(rows)
