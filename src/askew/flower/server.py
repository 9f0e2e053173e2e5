"""The server of a deployment: the simulator's rounds, with clients that are reached by post.

`RemoteEngine` is an engine: it sends each client its part of what the server hands out and gathers the rows that come back, so that phases,
guards, aggregation, buffers, private parts and byte counts are the simulator's own. `DeployedRun` is a run played on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..core import local
from ..core.algebra import norm
from ..core.algorithm import Algorithm
from ..core.bank import Bank
from ..core.rng import generator
from ..core.settings import Settings, setting
from ..core.types import Client, State
from ..data.federation import Federation, RoundPlan
from ..engine.base import PhaseInputs, PhaseOutputs, PhaseRequest
from ..engine.distributed import TensorSpec
from ..engine.server import Server
from ..errors import EngineError
from ..experiment.build import BuildCache, BuiltRun, device_of
from ..experiment.checkpoint import layout_digest
from ..experiment.process_state import explain_out_of_memory, torch_state
from ..experiment.run import ActiveRun, OnRound, TrainedRound, round_loop
from ..experiment.run_folder import check_same_config, clear_run, is_finished, run_folder
from ..experiment.store import Record, Run, load, lock_folder, read_json, write_json
from ..version import __version__
from .client import OWN, RATES
from .deployment_data import DataModule, DeploymentConfig, Remote, Site, house_of, server_data
from .privacy import check_fit, noisy
from .wire import ALIKE, Payload, RawPayload, Refused, Shared, expect, opened, over, told, under

Say = Callable[[str], None]
Answer = RawPayload | str  # a letter, or a sentence why there is none

FEDERATION = "federation.json"
TRIES = 3  # how often a node that does not say who it is, is asked
KEYS = ("mask", "letter")  # of a client in secure aggregation
LARGEST, DIMENSIONS = 10**8, 8  # of one input
ROUNDING = 1e-5  # by which a clipped update may be too long
PAUSE, POLL = 0.5, 0.2  # seconds between looks for nodes, and for answers


class Rules(Settings):
    """How a deployment waits for its clients."""

    title = "deployment"
    out: str = setting("folder of the run's folder, on the server's machine", default="runs")
    fresh: bool = setting("start over where the run's folder exists already", default=False)
    nodes: int = setting("clients to wait for before the first round; 0: all of them", default=0, least=0)
    wait: float = setting("seconds to wait for them", default=600.0, above=0)
    hello: float = setting("seconds in which a new node must say which client it is", default=60.0, above=0)
    timeout: float = setting("seconds in which a client must answer, each phase of a round", default=600.0, above=0)
    answers: int = setting("least number of answers; a round with fewer is thrown away", default=1, least=1)
    spare: float = setting(
        "share of the participants that is asked besides, as many as were wanted are waited for; 0.5: three for every two",
        default=0.0,
        least=0,
        most=10,
    )


class Transport(Protocol):
    """Carries letters to nodes and answers back; counts the bytes of both."""

    sent: int
    received: int

    def nodes(self) -> list[int]:
        """The nodes that are there."""

    def send(self, kind: str, letters: Mapping[int, Payload], group: str, timeout: float) -> dict[str, int]:
        """Send letters by node; they are good for so many seconds. Returns the nodes by the names of the letters."""

    def collect(self, names: Collection[str]) -> dict[str, Answer]:
        """The answers that came so far to letters of these names; each is handed out once."""


class Row(NamedTuple):
    """What a client's training brings."""

    up: State
    buffers: Tensor
    loss: float
    sound: bool  # are all of it numbers?


class Scores(NamedTuple):
    """What a client's evaluation brings: lists by model."""

    samples: int
    values: list[list[float]]
    sound: bool = True


class Told(NamedTuple):
    """What a stage of secure aggregation brings."""

    letter: RawPayload
    sound: bool = True


T = TypeVar("T", Row, Scores, Told)


class Hello(NamedTuple):
    """What a client says when it comes."""

    samples: int
    classes: int  # that it has seen
    shape: list[int]
    real: bool

    def kind(self) -> str:
        return f"{'real' if self.real else 'whole'} inputs of shape {self.shape} and {'class labels' if self.classes else 'real targets'}"


class ClientRegistry:
    """Which node is which client: learnt by asking, as node numbers mean nothing."""

    def __init__(self, post: Transport, rules: Rules, config: DeploymentConfig, say: Say) -> None:
        self.post, self.rules, self.config, self.say = post, rules, config, say
        self.clients = 1 if config.algorithm.pooled else config.partition.clients
        self.node_of: dict[int, int] = {}
        self.met: dict[int, Hello] = {}
        self.tries: dict[int, int] = {}  # of every node that is there, known or not
        self.asked: dict[
            str, tuple[int, float]
        ] = {}  # letters that are on their way, to whom and how long they are good
        self.fed: Federation | None = None

    def call(self) -> set[int]:
        """The clients that are there, as far as they have said so: new nodes are asked, and nobody is waited for."""
        there, now = self.post.nodes(), time.monotonic()
        self.tries = {node: self.tries.get(node, 0) for node in there}
        self.asked = {name: (node, end) for name, (node, end) in self.asked.items() if node in self.tries}
        self.node_of = {client: node for client, node in self.node_of.items() if node in self.tries}
        known = {*self.node_of.values(), *(node for node, _ in self.asked.values())}
        letters = {
            n: Payload({"digest": self.config.digest()}, {}) for n in there if n not in known and self.tries[n] < TRIES
        }
        sent = self.post.send("query", letters, "0", self.rules.hello) if letters else {}
        self.asked |= {name: (node, now + self.rules.hello) for name, node in sent.items()}
        answers = self.post.collect(list(self.asked)) if self.asked else {}
        late = {
            name: f"it did not say which client it is within {self.rules.hello:g} s"
            for name, (_, end) in self.asked.items()
            if end < now
        }
        for name, answer in (late | answers).items():
            node, _ = self.asked.pop(name)
            self.tries[node] += 1
            try:
                self._meet(node, answer)
            except Refused as e:
                self.say(f"node {node} is left out: {e}")
        return set(self.node_of)

    def _meet(self, node: int, answer: Answer) -> None:
        if isinstance(answer, str):
            raise Refused(answer)
        self.tries[node] = TRIES  # it has said all it has to say
        client = told(answer, "client", int, f"node {node}")
        who = f"client {client}"
        if client >= self.clients:
            raise Refused(
                f"it says it is {who}, and clients are numbered from 0 to {self.clients - 1}; start it with another partition-id."
            )
        opened(answer, {}, who)
        expect(answer, who, digest=self.config.digest(), version=__version__)
        if not isinstance(self.fed, Remote) and self.fed is not None:
            expect(answer, who, samples=int(self.fed.sizes[client]))
        samples, classes = told(answer, "samples", int, who), told(answer, "classes", int, who)
        new = Hello(samples, classes, told(answer, "shape", list, who), told(answer, "real", bool, who))
        if (
            len(new.shape) > DIMENSIONS
            or not all(type(n) is int and n > 0 for n in new.shape)
            or math.prod(new.shape) > LARGEST
        ):
            raise Refused(
                f"{who}: inputs of shape {new.shape!r:.60} came, at most {LARGEST:,} numbers are allowed; {ALIKE}."
            )
        if (kind := new.kind()) != (others := next(iter(self.met.values()), new).kind()):
            raise Refused(f"{who} has {kind}, the others have {others}; prepare the data alike on every node.")
        if isinstance(self.fed, Remote) and new.classes > self.fed.classes:
            few = f"{who} has {new.classes} classes, and the run was begun with {self.fed.classes}"
            raise Refused(f"{few}; let client(node) return an askew.Dataset that names all of them on every node.")
        if client in self.node_of:
            self.say(f"{who} is now node {node} and no longer node {self.node_of[client]}.")
        self.node_of[client], self.met[client] = node, new
        if isinstance(self.fed, Remote):
            self.fed.learn(client, new.samples)

    def wait(self, needed: int) -> set[int]:
        """The clients that are there, once there are so many."""
        end = time.monotonic() + self.rules.wait
        while len(there := self.call()) < min(needed, self.clients):
            if time.monotonic() > end:
                raise EngineError(
                    f"{len(there)} of {min(needed, self.clients)} clients came within {self.rules.wait:g} s; start the others, "
                    "or wait for fewer (nodes, answers); the run goes on from its last round."
                )
            time.sleep(PAUSE)
        return there


def uploads(server: Server) -> list[State]:
    """What a client sends up in each phase, all zeros: found out by one that does nothing."""
    alg, space, found = server.alg, server.space, list[State]()
    mine, carry = alg.client_state(space), State()
    rates = (
        server.local.lr,
        server.local.lr,
        server.local.momentum,
        server.local.weight_decay,
        server.local.clip_limit,
    )
    for phase in server.phases:
        sent = {n: v for n, v in (server.state | server.memory.start).items() if n in phase.broadcast}
        sent = {n: v.to(space.dtype) if v.is_floating_point() else v for n, v in sent.items()}
        me = Client(space.start, space.buffers, sent, mine, carry, server.parts, *rates, 1.0, 1.0, 1.0, 1, 0.5)
        result = local.finish(phase, me, local.begin(phase, me))
        mine, carry = result.mine, result.carry
        found.append({n: torch.zeros_like(v) for n, v in result.up.items()})
    return found


class RemoteEngine:
    """The engine of a deployment: clients are trained where they are."""

    name = "flower"

    def __init__(self, server: Server, roll: ClientRegistry, rules: Rules, classes: int, digest: str) -> None:
        self.server, self.roll, self.rules, self.post, self.say = server, roll, rules, roll.post, roll.say
        self.shared, self.blank = Shared(server.space, server.private), uploads(server)
        self.about: dict[str, int | str] = {"mark": layout_digest(digest, server), "classes": classes}
        self.privacy = roll.config.privacy
        check_fit(self.privacy, server, self.blank)
        self.enough = 0  # answers to wait for; 0: all
        self.sent: tuple[Tensor, Tensor] | None = None  # the model that the clients of this round have

    def map(self, asks: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        return [self._map(*ask) for ask in asks]

    def _map(self, phase: Algorithm, inbox: PhaseInputs, plan: RoundPlan, want: Collection[str]) -> PhaseOutputs:
        n = next(n for n, known in enumerate(self.server.phases) if known is phase)
        down = over("server.", self.shared.cut(inbox.server))
        if n == 0 or self.sent is None or not all(map(torch.equal, self.sent, (inbox.x, inbox.buffers))):
            down |= self.shared.cut({"x": inbox.x}) | self.shared.buffers(inbox.buffers)
            self.sent = (inbox.x, inbox.buffers)
        letters = {client: self._letter(n, inbox, i, down) for i, client in enumerate(plan.ids)}
        enough = min(self.enough or len(letters), len(letters)) if n == 0 else len(letters)
        if self.privacy.secure:
            found = self._summed(n, inbox, letters, enough)
        else:
            found = self._exchange(
                "train", letters, inbox.round, enough, lambda client, answer: self._row(n, client, inbox, answer)
            )
        if self.privacy.central and found:
            found = self._noised(found)
        return self._outbox(n, inbox, {i: found[client] for i, client in enumerate(plan.ids) if client in found})

    def _letter(self, n: int, inbox: PhaseInputs, i: int, down: State) -> Payload:
        rates = {name: float(getattr(inbox, name)) for name in RATES} | {
            name: float(getattr(inbox, name)[i]) for name in OWN
        }
        place = {"round": inbox.round, "phase": n, "used": int(inbox.mine["round"][i])}
        own = over("memory.", self.shared.cut({name: t[i] for name, t in inbox.memory.items()}))
        return Payload({**self.about, **place, **rates}, down | own)

    def _exchange(
        self, kind: str, letters: Mapping[int, Payload], round: int, enough: int, read: Callable[[int, RawPayload], T]
    ) -> dict[int, T]:
        """What the clients' answers bring, once enough of them are sound or the time is over; why others are left out is said.

        Answers are read as they come, so that one that is no good keeps nobody from standing in for its sender.
        """
        nodes = {node: i for i, node in self.roll.node_of.items() if i in letters}
        addressed = {
            node: letters[i]._replace(numbers={**letters[i].numbers, "client": i}) for node, i in nodes.items()
        }
        waiting = self.post.send(kind, addressed, str(round), self.rules.timeout) if nodes else {}
        end, found, refused = time.monotonic() + self.rules.timeout, dict[int, T](), dict[int, str]()
        while waiting and sum(one.sound for one in found.values()) < enough and time.monotonic() <= end:
            for name, answer in self.post.collect(list(waiting)).items():
                client = nodes[waiting.pop(name)]
                try:
                    if isinstance(answer, str):
                        raise Refused(f"client {client}: {answer}")
                    found[client] = read(client, answer)
                except Refused as e:
                    refused[client] = str(e)
            time.sleep(POLL if waiting else 0)
        when = f"round {round}" if kind.startswith("train") else f"evaluation after round {round}"
        silent = f"no answer within {self.rules.timeout:g} s, or enough others came before"
        for client in [i for i in letters if i not in found]:
            if client not in refused and kind == "train.unmask":
                continue  # the others are enough
            self.say(f"{when}: {refused.get(client, f'client {client}: {silent}')}")
        return found

    def _row(self, n: int, client: int, inbox: PhaseInputs, answer: RawPayload) -> Row:
        who = f"client {client}"
        expect(answer, who, client=client, round=inbox.round, phase=n, samples=int(self.server.fed.sizes[client]))
        tensors = {
            name: t.to(inbox.x.device)
            for name, t in opened(answer, self._forms(n, inbox), who, finite=self.privacy.on).items()
        }
        most = self.privacy.clip
        loss = 0.0 if most else told(answer, "loss", float, who)
        sound = all(bool(torch.isfinite(t).all()) for t in (*tensors.values(), torch.tensor(loss)))
        if not sound:
            self.say(
                f"round {inbox.round}: {who} sent numbers that are not finite, which the server leaves out; lower the learning rate."
            )
        if most and not self.privacy.local and (length := float(norm(tensors["up.delta"]))) > most * (1 + ROUNDING):
            raise Refused(f"{who}: an update of length {length:g} came, at most {most:g} is allowed; {ALIKE}.")
        return self._made(n, inbox, tensors, loss, sound)

    def _forms(self, n: int, inbox: PhaseInputs) -> dict[str, TensorSpec]:
        """The tensors of an upload."""
        buffers = self.shared.buffers(inbox.buffers) if self.server.phases[n].trains else {}
        return self.shared.forms(self.blank[n], "up.") | self.shared.forms(buffers)

    def _made(self, n: int, inbox: PhaseInputs, tensors: State, loss: float, sound: bool = True) -> Row:
        up = self.shared.whole(under("up.", tensors), self.blank[n])
        return Row(up, self.shared.whole_buffers(tensors, inbox.buffers), loss, sound)

    def _noised(self, rows: dict[int, Row]) -> dict[int, Row]:
        """Everybody's upload is the mean, with the noise that hides one of them."""
        std = self.privacy.noise * self.privacy.clip / len(rows)
        up = {
            n: noisy(torch.stack([row.up[n] for row in rows.values()]).mean(0), std)
            for n in next(iter(rows.values())).up
        }
        return {client: row._replace(up=up) for client, row in rows.items()}

    def _summed(self, n: int, inbox: PhaseInputs, letters: Mapping[int, Payload], enough: int) -> dict[int, Row]:
        """Everybody's upload is the mean, which is all that secure aggregation tells; nothing if too few are left."""
        from . import secure

        round, place = inbox.round, {**self.about, "round": inbox.round, "phase": n}

        def ask(
            stage: str, asked: Mapping[int, Payload], enough: int, check: Callable[[RawPayload, str], object]
        ) -> dict[int, Told]:
            def read(client: int, answer: RawPayload) -> Told:
                expect(answer, f"client {client}", client=client, round=round, phase=n)
                check(answer, f"client {client}")
                return Told(answer)

            return self._exchange(f"train{stage}", asked, round, enough, read)

        def listed(name: str, count: int) -> Callable[[RawPayload, str], object]:
            def check(letter: RawPayload, who: str) -> None:
                if len(came := secure.texts(letter, name, bytes, who)) != count:
                    raise Refused(f"{who}: {len(came)} {name} came, expected {count}; {ALIKE}.")

            return check

        try:
            keys = ask(
                ".keys",
                {i: Payload(place, {}) for i in letters},
                enough,
                lambda t, who: secure.check_keys(t, KEYS, who),
            )
            clients = sorted(keys)
            public = {name: [keys[i].letter.numbers[name] for i in clients] for name in KEYS}
            least = max(self.privacy.fewest, secure.majority(len(clients)))
            self._left(keys, least)
            told_keys = {i: Payload({**place, "clients": clients, **public}, {}) for i in clients}
            shares = ask(".shares", told_keys, len(clients), listed("sealed", len(clients)))
            self._left(shares, least)
            present = sorted(shares)
            sealed = {i: [shares[j].letter.numbers["sealed"][k] for j in present] for k, i in enumerate(clients)}
            given = {i: {**letters[i].numbers, "present": present, "sealed": sealed[i]} for i in present}
            forms = self._forms(n, inbox)
            count = sum(math.prod(form.shape) for form in forms.values()) + 1
            form = {"hidden": TensorSpec((count,), torch.int64)}
            trained = ask(
                "",
                {i: letters[i]._replace(numbers=given[i]) for i in present},
                len(present),
                lambda t, who: opened(t, form, who),
            )
            self._left(trained, least)
            hidden = {
                i: opened(t.letter, form, f"client {i}")["hidden"].numpy().view("uint64") for i, t in trained.items()
            }
            asked = {i: Payload({**place, "answered": sorted(hidden)}, {}) for i in hidden}
            parts = ask(".unmask", asked, secure.majority(len(clients)), listed("shares", len(present)))
            self._left(parts, secure.majority(len(clients)))
            of = {j: [part.letter.numbers["shares"][k] for part in parts.values()] for k, j in enumerate(present)}
            values = secure.unpressed(
                secure.unmasked(hidden, dict(zip(clients, public["mask"], strict=True)), of, count)
            )
            if bool((values.abs() > len(hidden) * secure.LARGEST).any()):
                raise Refused(
                    "a client gave false shares or false numbers to secure aggregation; the round is thrown away."
                )
        except Refused as e:
            self.say(f"round {round}: {e}")
            return {}
        weights = inbox.size.tolist() if self.server.alg.by_samples else [1.0] * len(letters)
        weight = sum(w for client, w in zip(letters, weights, strict=True) if client in hidden)
        pieces = (values[:-1].to(inbox.x.device) / weight).split(
            [math.prod(forms[name].shape) for name in sorted(forms)]
        )
        tensors = {
            name: piece.view(forms[name].shape).to(forms[name].dtype)
            for name, piece in zip(sorted(forms), pieces, strict=True)
        }
        row = self._made(n, inbox, tensors, float(values[-1]) / len(hidden))
        return dict.fromkeys(hidden, row)

    def _left(self, clients: Collection[int], least: int) -> None:
        if len(clients) < least:
            raise Refused(
                f"secure aggregation has {len(clients)} clients left, at least {least} are needed; the round is thrown away."
            )

    def _outbox(self, n: int, inbox: PhaseInputs, rows: dict[int, Row]) -> PhaseOutputs:
        """The rows that came. With too few of them none is used: their losses are no numbers."""
        came, last = sorted(rows), n + 1 == len(self.server.phases)
        up = {name: torch.stack([rows[i].up[name] for i in came]) for name in self.blank[n]} if came else {}
        buffers = (
            torch.stack([rows[i].buffers for i in came]) if came else inbox.buffers.new_zeros(0, len(inbox.buffers))
        )
        loss = torch.tensor([rows[i].loss for i in came], dtype=inbox.x.dtype, device=inbox.x.device)
        used = torch.full_like(inbox.mine["round"][came], inbox.round) if last else inbox.mine["round"][came]
        if len(came) < self.rules.answers:
            self.say(
                f"round {inbox.round} is thrown away: {len(came)} answers came, at least {self.rules.answers} are needed."
            )
            loss = torch.full_like(loss, torch.nan)
        return PhaseOutputs(up, {"round": used}, {}, buffers, loss, None, came)

    @property
    def asks_clients(self) -> bool:
        """Are models measured by the clients? So it is where they have parts of their own, and where the server has no test set."""
        own = self.server.alg.evaluates() == "clients" and not self.server.private.empty
        return own or (isinstance(self.server.fed, Remote) and not self.server.fed.tested)

    def examine(self, round: int) -> dict[str, Tensor]:
        """Scores of the models on the clients' test sets: of their own models the mean over clients, of a common one over samples."""
        server, present = self.server, sorted(self.roll.call())
        models = server.alg.models(server.w, server.state)
        tensors = over("model.", self.shared.cut(models)) | self.shared.buffers(server.buffers)
        used = server.clients.read(present)["round"].tolist()
        numbers = {**self.about, "round": round, "models": ",".join(models)}
        letters = {i: Payload({**numbers, "used": u}, tensors) for i, u in zip(present, used, strict=True)}
        read = lambda client, answer: self._scores(client, answer, round, list(models))
        came = [one for one in self._exchange("evaluate", letters, round, len(letters), read).values() if one.samples]
        if not came:
            return {}
        p = torch.tensor([one.samples if server.private.empty else 1 for one in came], dtype=torch.float64)
        mean = torch.einsum("c,cmk->mk", p / p.sum(), torch.tensor([one.values for one in came], dtype=torch.float64))
        return dict(zip(models, mean, strict=True))

    def _scores(self, client: int, answer: RawPayload, round: int, models: list[str]) -> Scores:
        who = f"client {client}"
        expect(answer, who, client=client, round=round)
        opened(answer, {}, who)
        count = told(answer, "samples", int, who)
        scores = [told(answer, f"scores.{name}", list, who) for name in models] if count else []
        numbers = 3 if self.roll.config.evaluation.halves else 2
        real = lambda v: (
            type(v) is float and (math.isfinite(v) or not self.about["classes"])
        )  # without classes there is no accuracy
        if not all(len(row) == numbers and all(map(real, row)) for row in scores):
            raise Refused(f"{who}: scores must be lists of {numbers} finite numbers, got {scores!r:.60}; {ALIKE}.")
        return Scores(count, scores)


class DeployedRun(ActiveRun):
    """A run on the field; a checkpoint follows every round, as clients remember one round back and no more."""

    def __init__(self, house: BuiltRun, field: RemoteEngine, folder: Path, watch: OnRound | None) -> None:
        self.field, self.folder, self.wire = field, folder, (0, 0)
        super().__init__(house, folder, watch, save_every=0.0)

    def prepare_round(self, t: int) -> None:
        """Who is there is known when the round begins."""

    def start_round(self) -> Generator[PhaseRequest, PhaseOutputs, Record]:
        """The next round: participants are drawn from the clients that are there."""
        t, fed, field = self.t + 1, self.built.fed, self.field
        there = field.roll.wait(field.rules.answers)
        present = np.array([i for i in fed.eligible.tolist() if i in there], dtype=np.int64)
        came = self.config.participation.turnout(self.config.seed, t, present, fed.clients)
        share = dict(zip(came.ids.tolist(), came.share.tolist(), strict=True))
        others = np.setdiff1d(present, [*came.ids, *came.absent])
        spare = (
            generator(self.config.seed, "spare", t)
            .permutation(others)[: round(field.rules.spare * len(share))]
            .tolist()
        )
        asked = sorted([*share, *spare])
        field.enough = len(share)
        self.before = (self.server.w, self.server.buffers)
        field.post.sent = field.post.received = 0
        return self.server.round_requests(t, asked, [share.get(i, 1.0) for i in asked], len(came.absent))

    def evaluate(self) -> dict[str, Tensor]:
        self.wire = self.field.post.sent, self.field.post.received
        if not self.field.asks_clients:
            return super().evaluate()
        return self.field.examine(self.t) if self.evaluation_due else {}

    def write_record(self, trained: TrainedRound) -> None:
        trained.record |= dict(zip(("wire_down", "wire_up"), self.wire, strict=True))
        if self.field.privacy.clip:
            trained.record["train_loss"] = None  # no client tells
        super().write_record(trained)
        if isinstance(self.built.fed, Remote) and self.run.federation != (
            known := self.built.fed.labels()
        ):  # somebody joined
            self.run.federation = known
            write_json(self.folder / FEDERATION, known)


def serve(
    config: DeploymentConfig,
    post: Transport,
    rules: Rules,
    data: DataModule | None = None,
    say: Say = print,
    watch: OnRound | None = None,
) -> Run:
    """Play a run on the clients that the post reaches. Its folder is that of a simulated one; it goes on from its last round."""
    folder = run_folder(config, rules.out)
    assert folder is not None
    with lock_folder(folder):
        if rules.fresh:
            clear_run(folder)
        check_same_config(folder, config)
        if is_finished(folder):
            say(f"{folder} holds this run already, finished; set fresh = true to play it again.")
            return load(folder)
        with torch_state(config), explain_out_of_memory():
            season = DeployedRun(
                *housed(config, ClientRegistry(post, rules, config, say), rules, data, read_json(folder / FEDERATION)),
                folder,
                watch,
            )
            try:
                round_loop([season], lambda: False)
            except BaseException:
                season.run.facts["state"] = "interrupted"
                write_json(folder / "run.json", season.run.facts)
                raise
    return season.run


def housed(
    config: DeploymentConfig, roll: ClientRegistry, rules: Rules, data: DataModule | None, known: Record
) -> tuple[BuiltRun, RemoteEngine]:
    """All that the run is made of. Client state and private parts are with the clients; the server keeps which round of each it used.

    `known` is what a run that goes on knew of its clients before.
    """
    if data is None:
        house = house_of(config, BuildCache())
        roll.fed = house.fed
        roll.wait(rules.nodes or roll.clients)
    else:
        kept = server_data(config, data)
        roll.wait(rules.nodes or roll.clients)
        first = next(iter(roll.met.values()))
        classes = max([known.get("classes", 0), *(hello.classes for hello in roll.met.values())])
        fed = Remote(config, first.shape, first.real, classes, kept, device_of(config.engine.device))
        before = {client: count for client, count in enumerate(known.get("sizes", ())) if count}
        for client, count in (before | {client: hello.samples for client, hello in roll.met.items()}).items():
            fed.learn(client, count)
        roll.fed = fed
        house = house_of(config, Site(fed))
    server = house.server
    server.clients = Bank({"round": torch.zeros((), dtype=torch.int64, device=house.space.device)})
    server.privates = Bank({})
    field = server.engine = RemoteEngine(server, roll, rules, house.fed.classes, config.digest())
    house.facts.update(engine=RemoteEngine.name, reason=f"{len(roll.node_of)} clients, each with its own data")
    if config.privacy.on:
        house.facts["privacy"] = config.privacy.remark(config.rounds)
    return house, field
