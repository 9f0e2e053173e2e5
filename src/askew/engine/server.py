"""The server: what lasts from round to round, and how a round leads from its participants to the new model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.bank import Bank
from ..core.method_checks import check_declared, check_method
from ..core.records import TIMES, Record, is_record_key
from ..core.space import Space
from ..core.types import ALL_NEW, Cohort, State
from ..data.federation import Federation, LocalSettings, RoundPlan
from ..errors import AlgorithmError, ConfigError
from ..participation import Turnout
from . import drift as drift_metrics
from . import server_hooks
from .base import (
    Engine,
    OutputStage,
    PhaseInputs,
    PhaseOutputs,
    PhaseRequest,
    RecordingStage,
    finished_time,
    parts_key,
    prepare_next,
)
from .client_numbers import ClientNumbers
from .current_round import CurrentRound, with_reasons
from .finite import check_phase
from .messages import Messages
from .round_metrics import EvaluateModel, RoundMetric, RoundUpdates
from .sample_buffer import send
from .server_step import RoundState, take_step


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
        self.looks = sorted({name for phase in self.phases for name in (*phase.before, *phase.each, *phase.after)})
        # what the method declares
        self.parts, self.private = alg.parts(space), alg.private(space)
        self.state = server_hooks.declared_state(alg, "server_state", space)
        self.memory = Bank(server_hooks.declared_state(alg, "memory", space))
        check_declared(alg, self.state | self.memory.start, self.parts, self.private)
        self._check_method()
        self.parts_key = parts_key(self.parts)
        self.messages, self.numbers = Messages(space, self.private), ClientNumbers(fed, space, local.momentum, seed)
        # what lasts from round to round
        self.w, self.buffers = space.start.clone(), space.buffers.clone()
        self.clients = Bank(server_hooks.declared_state(alg, "client_state", space), owns=owns)
        own = {"w": space.start[self.private.indices], "b": space.buffers[self.private.buffer_indices]}
        self.privates = Bank({} if self.private.empty else own)
        self.drift_history = drift_metrics.history(space) if drift else None  # None: drift is not recorded
        # of the round under way, or the next one
        self.prepared: tuple[Any, RoundPlan] | None = None  # its plan, with what the plan was made for
        self.times = dict.fromkeys(TIMES if times else (), 0.0)
        # by client, the server's steps since the model that it started from; none: all are 0
        self.staleness: dict[int, int] = {}
        self.no_updates = RoundUpdates.none(0, self.w, self.buffers)

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
        if clash := sorted(filter(is_record_key, self.state)):
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

    # before a round ---------------------------------------------------------------------------------------------------

    def prepare(self, round: int, ids: Sequence[int], share: Sequence[float] = ()) -> RoundPlan:
        """The plan of a round, stored for `round_requests`; it may be made while the device trains the round before."""
        key = (round, tuple(ids), tuple(share))
        if self.prepared is None or self.prepared[0] != key:
            self.prepared = (key, self.fed.plan(ids, round, self.local, self.looks, self.smallest_batch, share))
            self.numbers.of(with_work(self.prepared[1]), round)
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

    # one round --------------------------------------------------------------------------------------------------------

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
        plan = with_work(self.prepare(round, ids, share))
        current = self.begin_round(round, ids, absent, plan)
        if not plan.ids:
            current.bytes_down = len(current.absent) * self.first_message_bytes()
        carry, model_at_clients = self.first_carry(plan.ids), None
        for n, phase in enumerate(self.phases):
            if not current.plan.ids:
                break
            request = self.phase_request(n, current, carry)
            outputs = self.through_stages(request, (yield request))
            model = current.state.w, current.state.buffers
            brings_model = model_at_clients is None or not all(map(same_values, model_at_clients, model))
            one = self.messages.bytes_of_phase(request, outputs, brings_model)
            current.bytes_down += one.down * (len(request.plan.ids) + (len(current.absent) if n == 0 else 0))
            current.bytes_up += one.up * answers_sent(outputs)
            model_at_clients = model
            carry = self.receive(current, phase, outputs)
        return self.end_round(current)

    def begin_round(
        self, round: int, ids: Sequence[int], absent: Sequence[int] | Mapping[int, str], plan: RoundPlan
    ) -> CurrentRound:
        """A round of these participants, whose plan is of those with anything to do."""
        return CurrentRound(round, ids, with_reasons(absent), plan, self.round_state(round, plan.ids))

    def round_state(self, round: int, ids: Sequence[int]) -> RoundState:
        """The state before a round's step, with the rows of these clients."""
        rows = {name: bank.read(ids) for name, bank in self.banks.items()}
        updates = self.no_updates._replace(round=round, old=self.w, new=self.w, buffers=self.buffers)
        return RoundState(self.w, self.buffers, self.state, rows, updates)

    def through_stages(self, request: PhaseRequest, outputs: PhaseOutputs) -> PhaseOutputs:
        """A phase's outputs as they arrive at the server's step. Stages see what travels: private buffers as sent."""
        without_private, places = self.messages.without_private, self.private.buffer_indices
        outputs, own, rows = without_private(outputs), outputs.buffers, outputs.cohort_rows()
        if self.stages and places.numel():
            outputs = outputs._replace(buffers=own.index_copy(1, places, request.sent_buffers(rows)[:, places]))
        for stage in self.stages:
            outputs = without_private(stage(request, outputs))
        if self.stages and places.numel():
            left = own[[rows.index(row) for row in outputs.cohort_rows()]][:, places]
            outputs = outputs._replace(buffers=outputs.buffers.index_copy(1, places, left))
        return outputs

    def receive(self, current: CurrentRound, phase: Algorithm, outputs: PhaseOutputs) -> State:
        """Make a phase's step of a round with the answers that can be used; returns these clients' carry."""
        current.leave_out_unanswered(outputs)
        if not current.plan.ids:
            return {}
        with measure_time([self], "server"):
            new = self._try_step(current, phase, outputs)
            check = check_phase(outputs, new.w, new.buffers, new.server)
        if phase.trains or not current.losses:
            current.losses = check.losses
        if not all(check.finite):
            outputs = current.leave_out_not_finite(outputs, check.finite)
            if not current.plan.ids:
                return outputs.carry
            new = self._step(current, phase, outputs)
            check = check_phase(outputs, new.w, new.buffers, new.server)
        current.adopt(new, check)
        return outputs.carry

    def _try_step(self, current: CurrentRound, phase: Algorithm, outputs: PhaseOutputs) -> RoundState:
        """The state after a phase, before it is known whether all reports are finite: so the host need not wait for the
        device in between.
        """
        try:
            return self._step(current, phase, outputs)
        except (RuntimeError, ValueError, ArithmeticError):  # which a report that is not finite may cause
            old = current.state
            if all(check_phase(outputs, old.w, old.buffers, old.server).finite):
                raise
            return old

    def _step(self, current: CurrentRound, phase: Algorithm, outputs: PhaseOutputs) -> RoundState:
        cohort = self._cohort(current, phase, outputs)
        server_hooks.check_weights(phase, outputs.up, cohort)  # aggregate() would fail on wrong ones, and not say why
        keep_updates = self.drift_history is not None or bool(self.metrics)
        return take_step(phase, current.plan.ids, outputs, cohort, current.state, self.private, keep_updates)

    def end_round(self, current: CurrentRound) -> Record:
        """Replace the server's state by that of the round if it is sound; returns the round's record."""
        if not current.plan.ids:
            self._step_without_clients(current)
        if current.finite:
            metrics, scalars = self._adopt(current), current.scalars
        else:
            current.lose_all()
            metrics, scalars = {}, zero_dim(self.state)
        record = current.record(self.fed.sizes) | self.times | metrics | scalars
        self.times = dict.fromkeys(self.times, 0.0)
        for stage in self.recording:
            record |= stage.note(record)
        return record

    def _step_without_clients(self, current: CurrentRound) -> None:
        """Make the step of a round without answers: none, unless a stage has an upload for such rounds."""
        current.finite, old = False, current.state
        ups = [stage.without_clients(current.number, old.w) for stage in self.recording]
        up = next((up for up in ups if up is not None), None)
        if up is None:
            return
        one = old.w.new_ones(1)
        up = self.messages.without_private(PhaseOutputs(up, {}, {}, old.buffers.new_zeros(1, 0), one, None)).up
        lr, lr0 = self._rates(current.number)
        cohort = Cohort(one, one, one, one, one, None, lr, lr0, current.number, len(self.fed.eligible))
        w, server, _ = server_hooks.aggregate(self.phases[-1], old.w, up, cohort, old.server, {})
        current.state = old._replace(
            w=w, server=server, rows={name: bank.read([]) for name, bank in self.banks.items()}
        )
        current.finite = all(bool(torch.isfinite(v).all()) for v in (w, *server.values()))
        current.scalars = zero_dim(server)

    def _adopt(self, current: CurrentRound) -> Record:
        """Replace the server's state by that of a round; returns what is measured of the change."""
        new, metrics = current.state, Record()
        updates = new.updates
        if self.drift_history is not None:
            own = new.rows["clients"].get(self.alg.drift_state) if self.clients.owns is None else None
            metrics, self.drift_history = drift_metrics.measure_round(
                self.space, self.drift_history, current.number, self.w, new.w, updates.deltas, updates.weights, own
            )
        for metric in self.metrics if len(updates.deltas) else ():
            metrics |= metric(updates._replace(new=new.w, buffers=new.buffers))
        self.w, self.buffers, self.state = new.w, new.buffers, new.server
        for name, bank in self.banks.items():
            bank.write(current.plan.ids, new.rows[name])
        return metrics

    # what clients and the step are given ------------------------------------------------------------------------------

    def first_request(self, round: int, plan: RoundPlan) -> PhaseRequest:
        """What clients that begin in a round are asked to do first, from the newest model."""
        current = CurrentRound(round, plan.ids, {}, plan, self.round_state(round, plan.ids))
        return self.phase_request(0, current, self.first_carry(plan.ids))

    def phase_request(self, n: int, current: CurrentRound, carry: State) -> PhaseRequest:
        """What the clients of the n-th phase are asked to do."""
        wanted = [
            *(["theta"] if current.state.rows["private"] else []),
            *(["carry"] if n + 1 < len(self.phases) else []),
        ]
        phase = self.phases[n]
        return PhaseRequest(phase, self._inputs(current, phase, carry), current.plan, wanted)

    def first_carry(self, ids: Sequence[int]) -> State:
        """The rows of the carry before the first phase: the clients' label counts, where the method needs them."""
        return {"labels": self.fed.label_counts(ids)} if "labels" in self.alg.needs else {}

    def broadcast_state(self, phase: Algorithm, state: State) -> State:
        """What a phase's clients are sent of the server's state, in the model's precision."""
        down = {n: v for n, v in state.items() if n in phase.broadcast}
        return {n: v.to(self.space.dtype) if v.is_floating_point() else v for n, v in down.items()}

    def first_message_bytes(self) -> int:
        """Bytes of the first message of a round to one client."""
        first = self.phases[0]
        received = self.messages.declared_sizes(first, self.state, self.memory.start)
        return self.messages.bytes_of(first, received, (), brings_model=True).down

    def _inputs(self, current: CurrentRound, phase: Algorithm, carry: State) -> PhaseInputs:
        plan, state, local = current.plan, current.state, self.local
        w, buffers = state.w, state.buffers
        if private := state.rows["private"]:
            count = len(plan.ids)
            w = w.expand(count, -1).index_copy(1, self.private.indices, private["w"])
            buffers = buffers.expand(count, -1).index_copy(1, self.private.buffer_indices, private["b"])
        lr, lr0 = self._rates(current.number)
        steps, tau, size, coin = self.numbers.of(plan, current.number)
        return PhaseInputs(
            w=w,
            buffers=buffers,
            server=self.broadcast_state(phase, state.server),
            memory={n: v for n, v in state.rows["memory"].items() if n in phase.broadcast},
            state=state.rows["clients"],
            carry=carry,
            parts=self.parts,
            lr=lr,
            lr0=lr0,
            momentum=local.momentum,
            decay=local.weight_decay,
            clip=local.clip_limit,
            round=current.number,
            steps=steps,
            tau=tau,
            size=size,
            coin=coin,
            parts_key=self.parts_key,
        )

    def _cohort(self, current: CurrentRound, phase: Algorithm, outputs: PhaseOutputs) -> Cohort:
        steps, tau, size = self.numbers.without_coins(current.plan)
        lr, lr0 = self._rates(current.number)
        return Cohort(
            p=size / size.sum() if self.alg.by_samples else torch.full_like(size, 1 / len(size)),
            steps=steps,
            tau=tau,
            size=size,
            loss=outputs.loss,
            public=self._public_scores(current, phase, outputs),
            lr=lr,
            lr0=lr0,
            round=current.number,
            clients=len(self.fed.eligible),
            staleness=self._staleness_of(current.plan.ids),
        )

    def _public_scores(self, current: CurrentRound, phase: Algorithm, outputs: PhaseOutputs) -> State | None:
        """Accuracy and loss of the received models on the public set; None where nobody asks for them."""
        if self.evaluate is None or not phase.trains or "delta" not in outputs.up:
            return None
        models = zip(outputs.up["delta"], outputs.buffers, strict=True)
        scores = [self.evaluate(current.state.w + delta, buffers) for delta, buffers in models]
        accuracy, loss = torch.stack(scores, 1).to(self.space.dtype)
        return {"accuracy": accuracy, "loss": loss}

    def _staleness_of(self, ids: Sequence[int]) -> Tensor:
        if not self.staleness:
            return ALL_NEW
        steps = torch.from_numpy(np.array([self.staleness[client] for client in ids]))
        return send(steps.to(self.space.dtype), self.space.device)

    def _rates(self, round: int) -> tuple[float, float]:
        """The learning rates of this round and of the first."""
        return self.local.rate(round, self.rounds), self.local.rate(1, self.rounds)


def same_values(one: Tensor, other: Tensor) -> bool:
    return one is other or torch.equal(one, other)


def answers_sent(outputs: PhaseOutputs) -> int:
    """How many answers of a phase came, whether they are used or not."""
    return len(outputs.loss) + sum(incident.arrived for incident in outputs.incidents)


def zero_dim(state: State) -> dict[str, float]:
    """The numbers among the entries of a state, for the record."""
    return {n: float(v) for n, v in state.items() if v.dim() == 0}


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
