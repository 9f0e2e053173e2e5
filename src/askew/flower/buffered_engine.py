"""The engine of an asynchronous deployment: clients are at work all the time, and a round uses the next answers.

A round is a step of the server. It is made when so many answers have come as the rule `buffer` says. Whoever answered
is replaced by another client, which starts from the newest model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..core.algorithm import Algorithm
from ..core.records import CLIENT_ERROR, NO_ANSWER, Record
from ..core.rng import generator
from ..data.federation import RoundPlan
from ..engine.base import PhaseInputs, PhaseOutputs
from ..engine.expected_uploads import answer_bytes
from ..engine.server import Server, with_work
from ..errors import ConfigError
from ..experiment.config import Config
from ..participation import CohortParticipation, Turnout, takes_any
from .registry import ClientRegistry
from .remote_engine import POLL_SECONDS, ClientUpload, RemoteEngine
from .rules import DeploymentRules
from .transport import Reply
from .wire import InvalidMessage, add_prefix


class RemoteJob(NamedTuple):
    """The work of one client, from when it is asked until its answer is used or given up."""

    client: int
    round: int  # in which it was asked, from the newest model
    steps: int  # of the server before that
    share: float  # the fraction of its local steps that it does
    end: float  # time.monotonic() after which it is late
    inputs: PhaseInputs  # of those who were asked together, without models and states


class BufferedEngine(RemoteEngine):
    """An engine that keeps clients at work, and has the answers of a round before the server asks for them."""

    def __init__(self, server: Server, registry: ClientRegistry, classes: int, digest: str) -> None:
        super().__init__(server, registry, classes, digest)
        self.jobs: dict[str, RemoteJob] = {}  # by message without a reply
        self.replies: list[tuple[RemoteJob, Reply]] = []  # that came and belong to no round yet
        self.steps = 0  # of the server, since it was started
        self.bytes_down, _ = answer_bytes(server)
        # of the round under way: by client the work that ended, uploads, clients that drop out, messages sent
        self.ended: dict[int, RemoteJob] = {}
        self.uploads: dict[int, ClientUpload] = {}
        self.absent: list[int] = []
        self.sent = 0

    # clients ----------------------------------------------------------------------------------------------------

    def collect(self, round: int) -> Turnout:
        """Keep clients at work until the buffer is full; returns whose work ended, and who drops out.

        If nobody is at work and nobody else can be asked, the round ends with the answers that there are.
        """
        self.ended, self.uploads, self.absent, self.sent, self.missing = {}, {}, [], 0, {}
        draw = self.draws(round)
        while not self.is_full:
            drawn: Sequence[int] = ()
            if len(self.jobs) < self.at_work:
                connected = self.registry.refresh()
                free = [i for i in self.server.fed.eligible.tolist() if i in connected - self.busy]
                drawn = draw(np.array(free, dtype=np.int64)).tolist()
                self.start(round, drawn)
                if not (self.jobs or self.replies or drawn):
                    if self.ended or self.absent or connected:
                        break
                    self.registry.wait_for(self.rules.answers)
            self.receive(round)
            self.registry.receive()
            time.sleep(POLL_SECONDS if self.jobs and not self.is_full else 0)
        ended = [self.ended[client] for client in sorted(self.ended)]
        self.server.staleness = {job.client: self.steps - job.steps for job in ended}
        ids, share = np.array([job.client for job in ended], dtype=np.int64), np.array([job.share for job in ended])
        return Turnout(ids, share, np.array(sorted(self.absent), dtype=np.int64))

    @property
    def at_work(self) -> int:
        """How many clients work at the same time, if so many are there."""
        rule = self.registry.config.participation
        assert isinstance(rule, CohortParticipation)
        return rule.size(self.server.fed.clients)

    @property
    def is_full(self) -> bool:
        """Have enough answers come that can be used?"""
        return sum(upload.finite for upload in self.uploads.values()) >= self.rules.buffer

    @property
    def busy(self) -> set[int]:
        """Who cannot be asked: who is at work, whose answer waits, and who ended or dropped out in this round."""
        return {*(job.client for job in self.jobs.values()), *(job.client for job, _ in self.replies)} | {
            *self.ended,
            *self.absent,
        }

    def draws(self, round: int) -> Callable[[np.ndarray], np.ndarray]:
        """A function that draws from free clients those who begin; its first draw is the participation rule's own."""
        config, clients = self.registry.config, self.server.fed.clients
        rule: Any = config.participation
        seed = rule.drawn_by(config.seed)
        rng, first = generator(seed, "starts", round), True

        def draw(free: np.ndarray) -> np.ndarray:
            nonlocal first
            places = self.at_work - len(self.jobs)
            if first or not takes_any(rule):
                first = False
                return np.asarray(replace(rule, cohort=places).draw(seed, round, free, clients))
            pool = rule.present(seed, round, free, clients)
            return np.sort(rng.choice(pool, min(places, len(pool)), replace=False))

        return draw

    def start(self, round: int, drawn: Sequence[int]) -> None:
        """Send these clients the newest model, to train from it; those who drop out are sent nothing."""
        turnout = self.registry.config.participation.answering(
            self.registry.config.seed, round, np.array(drawn, dtype=np.int64), self.server.fed.clients
        )
        self.absent += turnout.absent.tolist()
        share = dict(zip(turnout.ids.tolist(), turnout.share.tolist(), strict=True))
        plan = with_work(self.server.prepare(round, [*share], [*share.values()]))
        inputs = self.server.first_request(round, plan).inputs
        about = inputs._replace(w=inputs.w[:0], server={}, memory={}, state={}, carry={})
        end = time.monotonic() + self.rules.timeout
        jobs = {client: RemoteJob(client, round, self.steps, share[client], end, about) for client in share}
        self.ended |= {client: job for client, job in jobs.items() if client not in {*plan.ids}}  # nothing to do
        down = add_prefix("server.", self.shared.remove_private(inputs.server)) | self.model_to_send(inputs)
        nodes, payloads = {}, {}
        for i, client in enumerate(plan.ids):
            payload, node = self._training_payload(0, inputs, i, down), self.registry.node_of[client]
            nodes[node], payloads[node] = client, payload._replace(numbers={**payload.numbers, "client": client})
        sent = self.transport.send("train", payloads, str(round), self.rules.timeout) if payloads else {}
        self.jobs |= {message: jobs[nodes[node]] for message, node in sent.items()}
        self.sent += len(sent)

    def receive(self, round: int) -> None:
        """Take the answers that came, up to a full buffer, and give up those whose time is over."""
        came = self.transport.receive(list(self.jobs)) if self.jobs else {}
        self.replies += [(self.jobs.pop(message), reply) for message, reply in came.items()]
        now = time.monotonic()
        for message in [message for message, job in self.jobs.items() if job.end < now]:
            job = self.jobs.pop(message)
            self.ended[job.client] = job
            self.registry.set_silent(job.client)
            self._report_missing("train", round, {job.client: NO_ANSWER})
        while self.replies and not self.is_full:
            job, reply = self.replies.pop(0)
            self.ended[job.client] = job
            try:
                if isinstance(reply, str):
                    raise InvalidMessage(f"client {job.client}: {reply}", CLIENT_ERROR)
                self.uploads[job.client] = self._read_upload(0, job.client, job.inputs, reply)
            except InvalidMessage as e:
                self._report_missing("train", round, {job.client: e})

    def clients_to_evaluate(self) -> set[int]:
        return self.registry.refresh() - {job.client for job in self.jobs.values()}

    # the server's step ------------------------------------------------------------------------------------------

    def _run_phase(self, phase: Algorithm, inputs: PhaseInputs, plan: RoundPlan, want: Collection[str]) -> PhaseOutputs:
        return self._used_outputs(0, inputs, plan.ids, self.uploads)

    def asked_in(self, client: int, round: int) -> int:
        return self.ended[client].round

    def complete(self, record: Record) -> None:
        """Note in a round's record what was sent in it and how old its answers are."""
        record["bytes_down"] = self.bytes_down * (self.sent + len(self.absent))
        record["staleness"] = [self.server.staleness.get(client, 0) for client in record["participants"]]
        self.steps += len(record["participants"]) > record["dropped"]


def check_buffer(config: Config, rules: DeploymentRules) -> None:
    """Refuse an asynchronous deployment of what needs rounds whose clients start together."""
    if not rules.buffer:
        return
    alg, rule, clients = config.algorithm, config.participation, config.partition.clients
    name, advice = alg.display_name(), "set buffer = 0"
    problem = ""
    if not isinstance(rule, CohortParticipation):
        advice = 'set participation.name = "uniform"'
        problem = f"a fixed number of clients is at work, and participation {rule.display_name()} has no cohort"
    elif rules.buffer > rule.size(clients):
        advice = "lower buffer, or raise participation.cohort"
        cohort = rule.size(clients)
        who = f"{cohort} clients" if cohort > 1 else "one client"
        problem = f"{rules.buffer} answers never come from the {who} of the cohort at work"
    elif rules.answers > rules.buffer:
        advice = "lower answers"
        problem = f"a round with fewer than answers = {rules.answers} answers is thrown away, and each has fewer"
    elif rules.spare:
        advice, problem = "set spare = 0", "nobody waits for others, so that spare clients have no use"
    elif len(alg.phases()) > 1:
        problem = f"{name} has {len(alg.phases())} exchanges in a round, and answers of several rounds would mix"
    elif alg.stale:
        problem = f"answers may start from an older model, which is wrong for {name}: {alg.stale}"
    elif "public" in alg.needs or config.evaluation.fit or config.evaluation.weights:
        what = f"{name} needs" if "public" in alg.needs else "evaluation.fit and evaluation.weights need"
        problem = f"{what} the models that the clients started from, which the server does not keep"
    elif config.privacy.on:
        problem = "[privacy] counts on rounds whose clients are drawn together"
    if problem:
        raise ConfigError(f"deployment: buffer = {rules.buffer}: {problem}; {advice}.")
    if config.robust.on:
        config.robust.check_cohort(rules.buffer)
