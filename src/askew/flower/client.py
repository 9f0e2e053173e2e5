"""A client of a deployment: it answers the server's messages with the simulator's own local training."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.types import State
from ..data.federation import RoundPlan
from ..engine.base import PhaseInputs, PhaseOutputs, PhaseRequest
from ..engine.evaluate import with_private
from ..engine.noise import SystemNoise
from ..engine.privacy_stage import add_noise, clip_upload
from ..errors import AskewError, DataError
from ..experiment.checkpoint import layout_digest
from ..version import __version__
from .client_state import AnswerLog, StateHistory, StateStore, request_hash
from .deployment_data import ClientSetup, DeploymentConfig, NodeConfig, client_number
from .wire import (
    MODEL,
    SAME_SETUP,
    InvalidMessage,
    Payload,
    RawPayload,
    SharedCoordinates,
    add_prefix,
    check_values,
    read_tensors,
    read_value,
    strip_prefix,
    to_one_line,
)

if TYPE_CHECKING:
    from .secure import Secrets

SERVER = "the server"  # how sentences call the sender of a message
SECURE_STAGES = ("keys", "shares", "unmask")  # of secure aggregation, beside the training itself
# Numbers of a training message, named as in PhaseInputs: those of all clients of a round, and those of one client.
COMMON_NUMBERS = ("lr", "lr0", "momentum", "decay", "clip")
CLIENT_NUMBERS = ("steps", "tau", "size", "coin")
MAX_SETTING = 1e9  # of the numbers above
MAX_MODELS = 16  # that a method has the clients evaluate
STATE_PREFIX = "mine."  # of the method's client state in stored files, which older versions wrote too


def describe_client(setup: ClientSetup) -> Payload:
    """The reply to a node's first message: which client it is and what kind of data it has. No sample is sent."""
    fed = setup.fed
    example = fed.inputs(fed.test.x[:1])
    numbers = {
        "client": setup.client,
        "samples": int(fed.sizes[setup.client]),
        "classes": fed.classes,
        "shape": [int(n) for n in fed.shape],
        "real": example.is_floating_point(),
        "digest": setup.config.digest(),
        "version": __version__,
    }
    return Payload(numbers, {})


def answer_query(config: DeploymentConfig, node: NodeConfig, make_setup: Callable[[], ClientSetup]) -> Payload:
    """The reply to a node's first message: `describe_client`, or why its client cannot take part."""
    try:
        return describe_client(make_setup())
    except AskewError as e:
        return Payload({"client": client_number(node, config.client_count), "fault": to_one_line(str(e))}, {})


class DeployedClient:
    """Answers training and evaluation messages, each once.

    `secrets` is what secure aggregation keeps between them, `answers` the file that lists what was answered.
    """

    def __init__(
        self, setup: ClientSetup, store: StateStore, secrets: Secrets | None = None, answers: Path | None = None
    ) -> None:
        self.setup, self.built, self.client, self.privacy = setup, setup.built, setup.client, setup.config.privacy
        self.secrets: Secrets = {} if secrets is None else secrets
        # The simulator's server: here only what the method declares, the engine and the plan of batches are used.
        self.server, self.space = self.built.server, self.built.space
        self.private = self.server.private
        self.shared = SharedCoordinates(self.space, self.private)
        initial = add_prefix(STATE_PREFIX, self.server.alg.client_state(self.space))
        if not self.private.empty:
            initial |= self._private_values(self.space.start, self.space.buffers)
        self.history = StateHistory(store, initial, self.client)
        self.answers = AnswerLog(answers, self.client, strict=self.privacy.on)

    def answer(self, kind: str, payload: RawPayload) -> Payload:
        """The reply to a message of training ("train", and its stages "train.…") or evaluation ("evaluate")."""
        check_values(payload, SERVER, mark=layout_digest(self.built.config.digest(), self.server), client=self.client)
        start, round = read_value(payload, "start", str, SERVER), self._read_round(payload, kind)
        name = kind if kind == "evaluate" else f"{kind}, phase {read_value(payload, 'phase', int, SERVER)}"
        request = request_hash(payload, ignored=("start",))
        reply = self.answers.find(start, round, name, request)
        if reply is None:
            reply = self._answer_new(kind, payload)
            self.answers.add(start, round, name, request, reply)
        return reply

    def _read_round(self, payload: RawPayload, kind: str) -> int:
        """The round of a message, which must be one of the configuration's."""
        round, last = read_value(payload, "round", int, SERVER), self.setup.config.rounds
        if round > last or (round == 0 and kind != "evaluate"):
            raise InvalidMessage(
                f"{SERVER}: this is of round {round}, and the run has {last} rounds; "
                f"client {self.client} answers no other, start a run with more rounds."
            )
        return round

    def _answer_new(self, kind: str, payload: RawPayload) -> Payload:
        """The reply to a message that was not answered before."""
        if kind.startswith("train."):
            return self.answer_secure_stage(kind.removeprefix("train."), payload)
        return self.train(payload) if kind == "train" else self.evaluate(payload)

    def train(self, payload: RawPayload) -> Payload:
        """Train for one phase of one round, store the client's new state, and return its upload."""
        round, n, last_used = (read_value(payload, name, int, SERVER) for name in ("round", "phase", "used"))
        count = len(self.server.phases)
        if n >= count:
            raise InvalidMessage(f"{SERVER}: this is of phase {n}, expected one of {count} from 0; start the run over.")
        phase = self.server.phases[n]
        received = self._read_received(payload, phase, first=n == 0)
        stored = self._to_device(self.history.load_round(last_used) if n == 0 else self.history.load_phase(round, n))
        w, buffers = self._assemble_model(received, stored)
        plan = self._plan_batches(payload, round)
        inputs = self._phase_inputs(payload, phase, (w, buffers), received, stored)
        (out,) = self.server.engine.run([PhaseRequest(phase, inputs, plan, ("theta", "carry"))])
        new_state = self._state_after(out)
        if n + 1 == count:
            self.history.save_round(last_used, round, new_state)
        else:
            carry = add_prefix("carry.", first_row(out.carry)) | {MODEL: w, "buffers": buffers}
            self.history.save_phase(last_used, round, n + 1, new_state | carry)
        tensors, loss = self._upload(payload, phase, out)
        numbers = {
            "client": self.client,
            "round": round,
            "phase": n,
            "loss": loss,
            "samples": int(self.setup.fed.sizes[self.client]),
        }
        return Payload(numbers, tensors)

    def evaluate(self, payload: RawPayload) -> Payload:
        """Scores of the server's models, with this client's private parts, on this client's test set."""
        round, last_used = (read_value(payload, name, int, SERVER) for name in ("round", "used"))
        names = read_value(payload, "models", str, SERVER).split(",")
        if len(names) > MAX_MODELS:
            raise InvalidMessage(
                f"{SERVER}: {len(names)} models came, at most {MAX_MODELS} are evaluated; {SAME_SETUP}."
            )
        models = {f"model.{name}": self.space.start for name in names}
        specs = self.shared.specs(models | self.shared.shared_buffers(self.space.buffers))
        tensors = self._to_device(read_tensors(payload, specs, SERVER))
        numbers: dict[str, int | list[float]] = {"client": self.client, "round": round, "samples": 0}
        if self.setup.has_test_set:
            numbers["samples"] = len(self.setup.fed.test.y)
            stored = self._to_device(self.history.load_round(last_used))
            for name in names:
                received = {MODEL: tensors[f"model.{name}"]} | {n: t for n, t in tensors.items() if n == "buffers"}
                numbers[f"scores.{name}"] = self.built.evaluator(*self._assemble_model(received, stored)).tolist()
        return Payload(numbers, {})

    def answer_secure_stage(self, stage: str, payload: RawPayload) -> Payload:
        """The reply to one of the stages of secure aggregation in which nobody trains."""
        from .secure import SecureClient  # needs Flower, which a plain client does not

        if not self.privacy.secure or stage not in SECURE_STAGES:
            raise InvalidMessage(
                f"{SERVER}: a stage {stage!r:.20} of secure aggregation was asked for, and this run has none; "
                "start the run over."
            )
        read_tensors(payload, {}, SERVER)
        secure = SecureClient(self.secrets, self.client, self.privacy.fewest, SERVER)
        answers = {"keys": secure.create_keys, "shares": secure.share_secrets, "unmask": secure.reveal_shares}
        reply = answers[stage](sum_name(payload), payload)
        round, n = (read_value(payload, name, int, SERVER) for name in ("round", "phase"))
        return Payload({"client": self.client, "round": round, "phase": n, **reply}, {})

    # what goes into training ------------------------------------------------------------------------------------

    def _declared_broadcast(self, phase: Algorithm) -> tuple[State, State]:
        """Server state and server memory that a phase broadcasts, with their initial values."""
        names, dtype = phase.broadcast, self.space.dtype
        state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in self.server.state.items() if k in names}
        return state, {k: v for k, v in self.server.memory.start.items() if k in names}

    def _read_received(self, payload: RawPayload, phase: Algorithm, first: bool) -> State:
        """The tensors of a training message; a phase after the first brings the model only if it has changed."""
        state, memory = self._declared_broadcast(phase)
        specs = self.shared.specs(state, "server.") | self.shared.specs(memory, "memory.")
        if MODEL in payload.arrays or first:
            specs |= self.shared.specs({MODEL: self.space.start} | self.shared.shared_buffers(self.space.buffers))
        return self._to_device(read_tensors(payload, specs, SERVER))

    def _assemble_model(self, received: State, stored: State) -> tuple[Tensor, Tensor]:
        """The model [P] and buffers [Q] to start from: as received, or as in the phase before; with private parts."""
        if MODEL in received:
            w = self.shared.restore_private({MODEL: received[MODEL]}, {MODEL: self.space.start})[MODEL]
            buffers = self.shared.restore_buffers(received, self.space.buffers)
        else:
            w, buffers = stored[MODEL], stored["buffers"]
        if self.private.empty:
            return w, buffers
        return with_private(w, buffers, self.private, strip_prefix("private.", stored))

    def _plan_batches(self, payload: RawPayload, round: int) -> RoundPlan:
        """This round's batches of this client, as many as the server counts on."""
        plan, steps = self.server.prepare(round, [self.client]), read_value(payload, "steps", float, SERVER)
        if not 1 <= steps <= plan.train[0].batches:
            raise DataError(
                f"client {self.client} has {plan.train[0].batches} batches, and the server counts on {steps:g}; "
                "its data have changed: "
                "start the run over."
            )
        return plan._replace(train=[plan.train[0].first(int(steps))])

    def _phase_inputs(
        self, payload: RawPayload, phase: Algorithm, model: tuple[Tensor, Tensor], received: State, stored: State
    ) -> PhaseInputs:
        """What the engine needs to train this client: a cohort of one, so every tensor of the client has one row."""
        state, memory = self._declared_broadcast(phase)
        lr, lr0, momentum, decay, clip = (read_setting(payload, name) for name in COMMON_NUMBERS)
        rows = [[read_setting(payload, name)] for name in CLIENT_NUMBERS]
        steps, tau, size, coin = torch.tensor(rows, dtype=self.space.dtype, device=self.space.device)
        return PhaseInputs(
            *model,
            self.shared.restore_private(strip_prefix("server.", received), state),
            as_one_row(self.shared.restore_private(strip_prefix("memory.", received), memory)),
            as_one_row(strip_prefix(STATE_PREFIX, stored)),
            self.server.first_carry([self.client]) | as_one_row(strip_prefix("carry.", stored)),
            self.server.parts,
            lr,
            lr0,
            momentum,
            decay,
            clip,
            read_value(payload, "round", int, SERVER),
            steps,
            tau,
            size,
            coin,
        )

    # what comes out of it ---------------------------------------------------------------------------------------

    def _state_after(self, out: PhaseOutputs) -> State:
        """The client's state and private parts after training, as they are stored."""
        assert out.theta is not None
        state = add_prefix(STATE_PREFIX, first_row(out.state))
        return state if self.private.empty else state | self._private_values(out.theta[0], out.buffers[0])

    def _private_values(self, w: Tensor, buffers: Tensor) -> State:
        """The private coordinates and buffers of a model, as they are stored."""
        return {"private.w": w[self.private.indices], "private.b": buffers[self.private.buffer_indices]}

    def _upload(self, payload: RawPayload, phase: Algorithm, out: PhaseOutputs) -> tuple[State, float]:
        """The tensors and the loss that the server may see."""
        upload, loss = self.shared.remove_private(first_row(out.up)), float(out.loss[0])
        clip = self.privacy.clip
        if clip:
            clip = read_value(payload, "max_length", float, SERVER) if self.privacy.quantile else clip
            upload, short = clip_upload(upload, clip)
            # The loss is measured on the samples that clipping protects; adaptive clipping counts short updates.
            loss = float(short) if self.privacy.quantile else 0.0
        if self.privacy.local:
            upload = add_noise(upload, clip, self.privacy.noise * clip, SystemNoise())
        tensors = add_prefix("up.", upload) | (self.shared.shared_buffers(out.buffers[0]) if phase.trains else {})
        if self.privacy.secure:
            return {"masked": self._mask(payload, tensors, loss)}, 0.0
        return tensors, loss

    def _mask(self, payload: RawPayload, tensors: State, loss: float) -> Tensor:
        """The upload as one masked vector for secure aggregation."""
        from .secure import SecureClient, pack_upload  # needs Flower, which a plain client does not

        weight = read_value(payload, "size", float, SERVER) if self.server.alg.by_samples else 1.0
        secure = SecureClient(self.secrets, self.client, self.privacy.fewest, SERVER)
        masked = secure.mask(sum_name(payload), payload, pack_upload(tensors, weight, loss))
        return torch.from_numpy(masked.view("int64"))

    def _to_device(self, state: State) -> State:
        return {name: t.to(self.space.device) for name, t in state.items()}


def read_setting(payload: RawPayload, name: str) -> float:
    """A setting of training that the server sends: from 0 to MAX_SETTING; the clipping limit may be infinite."""
    value = read_value(payload, name, float, SERVER)
    if not (0 <= value <= MAX_SETTING or (name == "clip" and value == math.inf)):
        raise InvalidMessage(
            f"{SERVER}: {name} must be a number from 0 to {MAX_SETTING:g}, got {value!r:.30}; {SAME_SETUP}."
        )
    return value


def sum_name(payload: RawPayload) -> str:
    """The name of the sum of secure aggregation that a message is about: every phase of every round has one."""
    return "round {}, phase {}".format(*(read_value(payload, name, int, SERVER) for name in ("round", "phase")))


def as_one_row(state: State) -> State:
    """Tensors as rows of a cohort of one."""
    return {name: t[None] for name, t in state.items()}


def first_row(rows: State) -> State:
    """The first row of every tensor, which is the only one of a cohort of one."""
    return {name: t[0] for name, t in rows.items()}
