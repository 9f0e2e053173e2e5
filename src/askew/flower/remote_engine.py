"""The engine of a deployment: it has clients trained and models evaluated where the clients are, by messages.

To the simulator's server it is an engine like the others. It sends each client its part of a phase's inputs and returns
the rows that come back, so that phases, guards, aggregation, buffers, private parts and byte counts are the simulator's
own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..core.algebra import norm
from ..core.algorithm import Algorithm
from ..core.records import CLIENT_ERROR, NO_ANSWER, NOT_AWAITED, REPEATED
from ..core.text import count_text
from ..core.types import State
from ..data.federation import RoundPlan
from ..engine.answers import (
    NO_SECURE_SUM,
    TOO_FEW,
    TOO_LARGE,
    Answer,
    AskedPhase,
    answer_incident,
    judge,
)
from ..engine.base import Incident, PhaseInputs, PhaseOutputs, PhaseRequest
from ..engine.distributed import TensorSpec
from ..engine.expected_uploads import zero_uploads
from ..engine.privacy_stage import PrivacyStage
from ..engine.server import Server
from ..experiment.checkpoint import layout_digest
from .client import CLIENT_NUMBERS, COMMON_NUMBERS
from .deployment_data import RemoteFederation
from .registry import ClientRegistry
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
)

T = TypeVar("T")

LENGTH_TOLERANCE = 1e-5  # the part of its largest length by which a clipped update may be longer, from rounding
POLL_SECONDS = 0.2  # between two looks for replies


class ClientUpload(NamedTuple):
    """What a client's training gives the server."""

    up: State
    buffers: Tensor
    loss: float
    finite: bool  # are all of its numbers finite?


class ClientScores(NamedTuple):
    """What a client's evaluation gives the server."""

    samples: int
    scores: list[list[float]]  # by model, as `Evaluator` gives them


class RemoteEngine:
    """An engine whose clients are trained on their own machines."""

    name = "flower"

    def __init__(self, server: Server, registry: ClientRegistry, classes: int, digest: str) -> None:
        self.server, self.registry, self.rules = server, registry, registry.rules
        self.transport, self.warn, self.privacy = registry.transport, registry.warn, registry.config.privacy
        self.shared, self.zero_uploads = SharedCoordinates(server.space, server.private), zero_uploads(server)
        self.run_numbers: dict[str, int | str] = {
            "mark": layout_digest(digest, server),
            "classes": classes,
        }  # in all messages
        self.wanted = 0  # replies that end the wait in a round's first phase; 0: all
        self.sent_model: tuple[Tensor, Tensor] | None = None  # model and buffers that this round's clients have
        self.missing: dict[int, str] = {}  # of the phase under way, by client: why it gave no answer that can be read
        self.repeated: list[int] = []  # clients that answered again in it

    @property
    def max_length(self) -> float:
        """The largest length of an update in this round; 0: any."""
        return next((s.clip for s in self.server.stages if isinstance(s, PrivacyStage)), 0.0)

    # training ---------------------------------------------------------------------------------------------------

    def run(self, requests: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        return [self._run_phase(*request) for request in requests]

    def _run_phase(self, phase: Algorithm, inputs: PhaseInputs, plan: RoundPlan, want: Collection[str]) -> PhaseOutputs:
        """Have the clients of a plan train for one phase, and return the rows of those whose uploads came."""
        n = next(n for n, known in enumerate(self.server.phases) if known is phase)
        down = add_prefix("server.", self.shared.remove_private(inputs.server))
        if n == 0 or self.sent_model is None or not all(map(torch.equal, self.sent_model, (inputs.w, inputs.buffers))):
            down |= self.model_to_send(inputs)
            self.sent_model = (inputs.w, inputs.buffers)
        payloads = {client: self._training_payload(n, inputs, i, down) for i, client in enumerate(plan.ids)}
        self.missing, self.repeated = {}, []
        enough = min(self.wanted or len(payloads), len(payloads)) if n == 0 else len(payloads)
        if self.privacy.secure:
            uploads = self._secure_mean(n, inputs, payloads, enough)
        else:
            read = lambda client, reply: self._read_upload(n, client, inputs, reply)
            uploads = self._exchange("train", payloads, inputs.round, enough, read, lambda upload: upload.finite)
        return self._used_outputs(n, inputs, plan.ids, uploads)

    def model_to_send(self, inputs: PhaseInputs) -> State:
        """The model and its buffers as they travel."""
        return self.shared.remove_private({MODEL: inputs.w}) | self.shared.shared_buffers(inputs.buffers)

    def _used_outputs(
        self, n: int, inputs: PhaseInputs, ids: Sequence[int], uploads: dict[int, ClientUpload]
    ) -> PhaseOutputs:
        """The rows of those clients whose uploads are used, and why the others' are not."""
        uploads, incidents = self._judge(n, inputs, ids, uploads)
        by_row = {i: uploads[c] for i, c in enumerate(ids) if c in uploads}
        return self._phase_outputs(n, inputs, by_row, ids, incidents)

    def _training_payload(self, n: int, inputs: PhaseInputs, i: int, down: State) -> Payload:
        """The message for row i of the cohort; `down` are the tensors that all clients get."""
        numbers = {name: float(getattr(inputs, name)) for name in COMMON_NUMBERS}
        numbers |= {name: float(getattr(inputs, name)[i]) for name in CLIENT_NUMBERS}
        if self.privacy.quantile:
            numbers["max_length"] = self.max_length
        position = {"round": inputs.round, "phase": n, "used": int(inputs.state["round"][i])}
        memory = self.shared.remove_private({name: t[i] for name, t in inputs.memory.items()})
        return Payload({**self.run_numbers, **position, **numbers}, down | add_prefix("memory.", memory))

    def _exchange(
        self,
        kind: str,
        payloads: Mapping[int, Payload],
        round: int,
        enough: int,
        read: Callable[[int, RawPayload], T],
        counts: Callable[[T], bool] = lambda result: True,
    ) -> dict[int, T]:
        """Send payloads by client and return what `read` makes of the replies, by client.

        It waits until `enough` results count, or the time is over. Replies are read as they come, so that a spare
        client can replace one whose reply is refused. Why clients are left out is put into the log and `missing`.
        """
        nodes = {node: client for client, node in self.registry.node_of.items() if client in payloads}
        addressed = {
            node: payloads[client]._replace(numbers={**payloads[client].numbers, "client": client})
            for node, client in nodes.items()
        }
        sent = self.transport.send(kind, addressed, str(round), self.rules.timeout) if nodes else {}
        end, results, refused = time.monotonic() + self.rules.timeout, dict[int, T](), dict[int, InvalidMessage]()
        waiting, is_enough = dict(sent), False
        while waiting and not is_enough and time.monotonic() <= end:
            for message_id, reply in self.transport.receive(list(waiting)).items():
                client = nodes[sent[message_id]]
                if waiting.pop(message_id, None) is None:
                    self.repeated.append(client)
                    continue
                try:
                    if isinstance(reply, str):
                        raise InvalidMessage(f"client {client}: {reply}", CLIENT_ERROR)
                    results[client] = read(client, reply)
                except InvalidMessage as e:
                    refused[client] = e
            self.registry.receive()
            is_enough = sum(map(counts, results.values())) >= enough
            time.sleep(POLL_SECONDS if waiting and not is_enough else 0)
        if not is_enough:
            for node in waiting.values():
                self.registry.set_silent(nodes[node])
        silent = NOT_AWAITED if is_enough else NO_ANSWER
        missing = [client for client in payloads if client not in results]
        self._report_missing(kind, round, {client: refused.get(client, silent) for client in missing})
        return results

    def _report_missing(self, kind: str, round: int, missing: Mapping[int, InvalidMessage | str]) -> None:
        """Note why these clients gave no result, and put it into the log; a str is the reason why nothing came."""
        when = f"round {round}" if kind.startswith("train") else f"evaluation after round {round}"
        for client, why in missing.items():
            if isinstance(why, InvalidMessage):
                self.warn(f"{when}: {why}")
            elif kind != "train.unmask":  # for which a majority is enough
                silent = f"{why} within {self.rules.timeout:g} s" if why == NO_ANSWER else why
                self.warn(f"{when}: client {client}: {silent}")
            if kind.startswith("train") and kind != "train.unmask":
                self.missing.setdefault(client, why.reason if isinstance(why, InvalidMessage) else why)

    def _judge(
        self, n: int, inputs: PhaseInputs, ids: Sequence[int], uploads: dict[int, ClientUpload]
    ) -> tuple[dict[int, ClientUpload], list[Incident]]:
        """The uploads that are used, and why the others are not: by the check that simulations have too."""
        specs = {f"up.{name}": TensorSpec(tuple(t.shape), t.dtype) for name, t in self.zero_uploads[n].items()}
        specs |= {"buffers": TensorSpec(tuple(inputs.buffers.shape), inputs.buffers.dtype)}
        steps = dict(zip(ids, inputs.steps.tolist(), strict=True))
        # Where lengths are limited by [privacy], to compare them would reveal something of the others.
        compared = self.server.phases[n].alike and not self.privacy.on
        limit = self.registry.config.faults.scale_limit if compared else 0.0
        answers = [
            Answer(client, inputs.round, n, one.up, one.buffers, torch.tensor(one.loss), {})
            for client, one in uploads.items()
        ]
        used, incidents = judge(AskedPhase(inputs.round, n, steps, specs, inputs.w, limit), answers, self.missing)
        for incident in incidents:
            if incident.reason == TOO_LARGE and incident.client in uploads:
                self.warn(
                    f"round {inputs.round}: client {incident.client} sent an update more than {limit:g} times as long "
                    "as the median of this round and longer than the model, and is left out; if it is right, raise "
                    "faults.scale_limit."
                )
        incidents += [answer_incident(client, REPEATED) for client in self.repeated if client in steps]
        return {client: uploads[client] for client in used}, incidents

    def _read_upload(self, n: int, client: int, inputs: PhaseInputs, reply: RawPayload) -> ClientUpload:
        """The upload in a client's reply, checked; one that is not finite is left to the server's own guard."""
        sender, max_length = f"client {client}", self.max_length
        samples = int(self.server.fed.sizes[client])
        check_values(reply, sender, client=client, round=inputs.round, phase=n, samples=samples)
        tensors = read_tensors(reply, self._upload_specs(n, inputs), sender, require_finite=self.privacy.on)
        tensors = {name: t.to(inputs.w.device) for name, t in tensors.items()}
        loss = 0.0 if max_length and not self.privacy.quantile else read_value(reply, "loss", float, sender)
        if self.privacy.quantile and loss not in (0.0, 1.0):
            raise InvalidMessage(f"{sender}: whether its update was short came as {loss!r:.20}; {SAME_SETUP}.")
        finite = all(bool(torch.isfinite(t).all()) for t in (*tensors.values(), torch.tensor(loss)))
        if not finite:
            self.warn(
                f"round {inputs.round}: {sender} sent numbers that are not finite, which the server leaves out; "
                "lower the learning rate."
            )
        if max_length and not self.privacy.local:
            length = float(norm(tensors["up.delta"]))
            if length > max_length * (1 + LENGTH_TOLERANCE):
                raise InvalidMessage(
                    f"{sender}: an update of length {length:g} came, at most {max_length:g} is allowed; {SAME_SETUP}.",
                    TOO_LARGE,
                )
        return self._make_upload(n, inputs, tensors, loss, finite)

    def _upload_specs(self, n: int, inputs: PhaseInputs) -> dict[str, TensorSpec]:
        """Shapes and types of the tensors that clients upload in phase n."""
        buffers = self.shared.shared_buffers(inputs.buffers) if self.server.phases[n].trains else {}
        return self.shared.specs(self.zero_uploads[n], "up.") | self.shared.specs(buffers)

    def _make_upload(
        self, n: int, inputs: PhaseInputs, tensors: State, loss: float, finite: bool = True
    ) -> ClientUpload:
        """An upload from tensors as they travelled; private coordinates are zero."""
        up = self.shared.restore_private(strip_prefix("up.", tensors), self.zero_uploads[n])
        return ClientUpload(up, self.shared.restore_buffers(tensors, inputs.buffers), loss, finite)

    def _secure_mean(
        self, n: int, inputs: PhaseInputs, payloads: Mapping[int, Payload], enough: int
    ) -> dict[int, ClientUpload]:
        """The weighted mean by secure aggregation, in place of every upload; nothing if too few clients are left."""
        from .secure import SecureServer, unpack_mean, vector_length  # need Flower, which this module does not

        def exchange(
            kind: str, payloads: Mapping[int, Payload], enough: int, read: Callable[[RawPayload, str], T]
        ) -> dict[int, T]:
            def read_reply(client: int, reply: RawPayload) -> T:
                check_values(reply, f"client {client}", client=client, round=inputs.round, phase=n)
                return read(reply, f"client {client}")

            return self._exchange(kind, payloads, inputs.round, enough, read_reply)

        specs = self._upload_specs(n, inputs)
        header = {**self.run_numbers, "round": inputs.round, "phase": n}
        secure = SecureServer(exchange, header, self.privacy.fewest)
        try:
            clients, total = secure.sum_vectors(payloads, vector_length(specs), enough)
        except InvalidMessage as e:
            self.warn(f"round {inputs.round}: {e}")
            self.missing = dict.fromkeys(payloads, NO_SECURE_SUM) | self.missing
            return {}
        weights = inputs.size.tolist() if self.server.alg.by_samples else [1.0] * len(payloads)
        weight = sum(w for client, w in zip(payloads, weights, strict=True) if client in clients)
        tensors, loss = unpack_mean(total, specs, weight, len(clients), inputs.w.device)
        return dict.fromkeys(clients, self._make_upload(n, inputs, tensors, loss))

    def _phase_outputs(
        self,
        n: int,
        inputs: PhaseInputs,
        uploads: dict[int, ClientUpload],
        ids: Sequence[int],
        incidents: Sequence[Incident],
    ) -> PhaseOutputs:
        """The uploads by row of the cohort, stacked; with too few of them none is used."""
        came, is_last = sorted(uploads), n + 1 == len(self.server.phases)
        if len(came) < self.rules.answers:
            self.warn(
                f"round {inputs.round} is thrown away: {count_text(len(came), 'answer')} came, at least "
                f"{self.rules.answers} are needed."
            )
            incidents, came = [*incidents, *(answer_incident(ids[i], TOO_FEW) for i in came)], []
        no_rows = {name: t.new_zeros(0, *t.shape) for name, t in self.zero_uploads[n].items()}
        up = {name: torch.stack([uploads[i].up[name] for i in came]) if came else no_rows[name] for name in no_rows}
        no_buffers = inputs.buffers.new_zeros(0, len(inputs.buffers))
        buffers = torch.stack([uploads[i].buffers for i in came]) if came else no_buffers
        loss = torch.tensor([uploads[i].loss for i in came], dtype=inputs.w.dtype, device=inputs.w.device)
        last_used = inputs.state["round"][came]
        if is_last:
            last_used = last_used.new_tensor([self.asked_in(ids[i], inputs.round) for i in came])
        return PhaseOutputs(up, {"round": last_used}, {}, buffers, loss, None, came, tuple(incidents))

    def asked_in(self, client: int, round: int) -> int:
        """The round in which a client was asked whose answer a round uses: in this engine the same."""
        return round

    # evaluation -------------------------------------------------------------------------------------------------

    @property
    def clients_evaluate(self) -> bool:
        """Do clients evaluate the models? They do if they have private parts, or if the server has no test set."""
        private = self.server.alg.evaluates() == "clients" and not self.server.private.empty
        return private or (isinstance(self.server.fed, RemoteFederation) and not self.server.fed.has_test_set)

    def evaluate(self, round: int) -> dict[str, Tensor]:
        """Mean scores of the server's models on the clients' test sets, by model; none if no client has a test set.

        Models with private parts count once for each client, a common model once for each sample.
        """
        server, connected = self.server, sorted(self.clients_to_evaluate())
        if server.private.indices.numel() == server.space.P:  # as in simulations, who never trained is left out
            trained = {i for i, used in zip(connected, self._last_used(connected), strict=True) if used}
            connected = [i for i in connected if i in trained] or connected
        models = server.alg.models(server.w, server.state)
        tensors = add_prefix("model.", self.shared.remove_private(models)) | self.shared.shared_buffers(server.buffers)
        numbers = {**self.run_numbers, "round": round, "models": ",".join(models)}
        payloads = {
            i: Payload({**numbers, "used": used}, tensors)
            for i, used in zip(connected, self._last_used(connected), strict=True)
        }
        read = lambda client, reply: self._read_scores(client, reply, round, list(models))
        replies = self._exchange("evaluate", payloads, round, len(payloads), read).values()
        measured = [reply for reply in replies if reply.samples]
        if not measured:
            return {}
        p = torch.tensor([one.samples if server.private.empty else 1 for one in measured], dtype=torch.float64)
        scores = torch.tensor([one.scores for one in measured], dtype=torch.float64)  # [clients, models, scores]
        return dict(zip(models, torch.einsum("c,cmk->mk", p / p.sum(), scores), strict=True))

    def clients_to_evaluate(self) -> set[int]:
        """The clients that are connected and have nothing else to do."""
        return self.registry.refresh()

    def _last_used(self, clients: Sequence[int]) -> list[int]:
        """Of each client the last round that the server used of it; 0: none."""
        rounds: list[int] = self.server.clients.read(list(clients))["round"].tolist()
        return rounds

    def _read_scores(self, client: int, reply: RawPayload, round: int, models: list[str]) -> ClientScores:
        """The scores in a client's reply, checked."""
        sender = f"client {client}"
        check_values(reply, sender, client=client, round=round)
        read_tensors(reply, {}, sender)
        samples = read_value(reply, "samples", int, sender)
        scores = [read_value(reply, f"scores.{name}", list, sender) for name in models] if samples else []
        asked, classes = self.registry.config.evaluation, int(self.run_numbers["classes"])
        count = 2 + asked.halves + 2 * classes * asked.per_class
        may_be_nan = not classes  # without classes there is no accuracy
        is_score = lambda value: type(value) is float and (math.isfinite(value) or may_be_nan)
        if not all(len(row) == count and all(map(is_score, row)) for row in scores):
            raise InvalidMessage(
                f"{sender}: scores must be lists of {count} finite numbers, got {scores!r:.60}; {SAME_SETUP}."
            )
        return ClientScores(samples, scores)
