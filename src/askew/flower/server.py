"""The server of a deployment: a run of the simulator's round loop whose clients are reached by messages."""

from __future__ import annotations

import secrets
from collections.abc import Generator
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from ..core.bank import Bank
from ..core.records import WIRE, Record
from ..core.rng import generator
from ..engine.base import PhaseOutputs, PhaseRequest
from ..engine.privacy_stage import PrivacyStage
from ..errors import ConfigError
from ..experiment.build import BuildCache, BuiltRun, device_of
from ..experiment.folder_lock import lock_folder
from ..experiment.process_state import explain_out_of_memory, torch_state
from ..experiment.run import ActiveRun, OnRound, TrainedRound, round_loop
from ..experiment.run_folder import check_same_config, clear_run, is_finished, read_finished, run_folder
from ..experiment.store import Run, read_json, write_json
from .buffered_engine import BufferedEngine, check_buffer
from .deployment_data import (
    DataKind,
    DataModule,
    DeploymentConfig,
    GivenFederationCache,
    RemoteFederation,
    build_run,
    read_server_data,
)
from .registry import ClientRegistry
from .remote_engine import RemoteEngine
from .rules import DeploymentRules, check_answers, check_same_buffer
from .transport import Transport, Warn

FEDERATION = "federation.json"  # file of a run's folder: how many samples each client has
START = "start.json"  # file of a run's folder: a random name of this start of the run, which its messages carry


class DeployedRun(ActiveRun):
    """A run on real clients. A checkpoint follows every round, as clients keep no state older than one round."""

    def __init__(self, built: BuiltRun, engine: RemoteEngine, folder: Path, on_round: OnRound | None) -> None:
        self.engine, self.folder = engine, folder
        self.wire_bytes = (0, 0)  # of the round's training messages, down and up
        self.unreachable: list[int] = []  # clients with data that could not be asked when the round began
        super().__init__(built, folder, on_round, save_every=0.0)

    def prepare_round(self, t: int) -> None:
        """Do nothing: which clients are connected is known only when the round begins."""

    def trains_next(self) -> bool:
        """No, as far as is known before the round begins, so that the round before is written first."""
        return False

    def start_round(self) -> Generator[PhaseRequest, PhaseOutputs, Record]:
        """The next round, whose participants are drawn from the connected clients."""
        t, fed, engine, seed = self.t + 1, self.built.fed, self.engine, self.config.seed
        self.before = (self.server.w, self.server.buffers)
        engine.transport.bytes_sent = engine.transport.bytes_received = 0
        engine.registry.ask_again()
        if isinstance(engine, BufferedEngine):
            turnout = engine.collect(t)
            self.unreachable = sorted({*fed.eligible.tolist()} - engine.registry.reachable())
            return self.server.turnout_requests(t, turnout)
        if engine.privacy.secret_sampling:  # every round anew, and never stored: a round that is repeated draws again
            seed = secrets.randbits(128)
        connected = engine.registry.wait_for(engine.rules.answers)
        self.unreachable = sorted({*fed.eligible.tolist()} - connected)
        present = np.array([i for i in fed.eligible.tolist() if i in connected], dtype=np.int64)
        turnout = self.config.participation.turnout(seed, t, present, fed.clients)
        share = dict(zip(turnout.ids.tolist(), turnout.share.tolist(), strict=True))
        others = np.setdiff1d(present, [*turnout.ids, *turnout.absent])
        spare_count = round(engine.rules.spare * len(share))
        spare = generator(seed, "spare", t).permutation(others)[:spare_count].tolist()
        asked = sorted([*share, *spare])
        engine.wanted = len(share)
        return self.server.round_requests(t, asked, [share.get(i, 1.0) for i in asked], turnout.absent.tolist())

    def end_round(self, record: Record) -> TrainedRound:
        """Note that the round is trained."""
        if isinstance(self.engine, BufferedEngine):
            self.engine.complete(record)
        return super().end_round(record)

    def evaluate(self) -> dict[str, Tensor]:
        """Scores of the round's model where they are due, measured by the server or by the clients."""
        self.wire_bytes = self.engine.transport.bytes_sent, self.engine.transport.bytes_received
        if not self.engine.clients_evaluate:
            return super().evaluate()
        return self.engine.evaluate(self.t) if self.evaluation_due else {}

    def write_record(self, trained: TrainedRound) -> None:
        """Complete and write the round's record; write the federation too if a client joined."""
        trained.record |= dict(zip(WIRE, self.wire_bytes, strict=True))
        if self.unreachable:
            trained.record["unreachable"] = self.unreachable
        if self.engine.privacy.clip:
            trained.record["train_loss"] = None  # clients do not send it
        super().write_record(trained)
        if isinstance(self.built.fed, RemoteFederation) and self.run.federation != self.built.fed.labels():
            self.run.federation = self.built.fed.labels()
            write_json(self.folder / FEDERATION, self.run.federation)


def serve(
    config: DeploymentConfig,
    transport: Transport,
    rules: DeploymentRules,
    data: DataModule | None = None,
    warn: Warn = print,
    on_round: OnRound | None = None,
    say: Warn = lambda text: None,
) -> Run:
    """Run a configuration on the clients that the transport reaches; an interrupted run is continued.

    `warn` is given what went wrong, `say` how many clients are ready.
    """
    check_buffer(config, rules)
    check_answers(config, rules)
    check_secret_sampling(config, rules)
    folder = run_folder(config, rules.out)
    assert folder is not None
    with lock_folder(folder):
        if rules.fresh:
            clear_run(folder)
            (folder / START).unlink(missing_ok=True)
        check_same_config(folder, config)
        check_same_buffer(folder, rules)
        if is_finished(folder, config.evaluation):
            warn(f"{folder} holds this run already, finished; set fresh = true to run it again.")
            return read_finished(folder)
        with torch_state(config), explain_out_of_memory():
            registry = ClientRegistry(transport, rules, config, warn, say)
            built, engine = build_on_clients(config, registry, data, read_json(folder / FEDERATION))
            engine.run_numbers["start"] = read_start(folder)
            active = DeployedRun(built, engine, folder, on_round)
            try:
                round_loop([active], lambda: False)
            except BaseException:
                active.run.facts["state"] = "interrupted"
                write_json(folder / "run.json", active.run.facts)
                raise
    return active.run


def check_secret_sampling(config: DeploymentConfig, rules: DeploymentRules) -> None:
    """Refuse rules by which one client's part in a round depends on the others', whose ε would be too small."""
    if config.privacy.secret_sampling and rules.spare:
        raise ConfigError(
            "deployment: spare clients stand in for others, so that the draw of participants is not independent, which "
            "privacy.secret_sampling counts on; set spare = 0."
        )
    if config.privacy.secret_sampling and rules.answers > 1:
        raise ConfigError(
            f"deployment: with answers = {rules.answers} one client's answer decides whether those of others are used, "
            "and ε would be larger than privacy.secret_sampling counts; set answers = 1."
        )


def read_start(folder: Path) -> str:
    """The name of this start of a run, the same after an interruption, by which clients see that a run starts over."""
    start = read_json(folder / START).get("name")
    if not isinstance(start, str):
        start = uuid4().hex
        write_json(folder / START, {"name": start})
    return start


def build_on_clients(
    config: DeploymentConfig, registry: ClientRegistry, data: DataModule | None, stored_federation: Record
) -> tuple[BuiltRun, RemoteEngine]:
    """Wait for the first clients, and build the run and its engine.

    Client state and private parts stay with the clients; the server keeps, for each, the last round of it that was
    used. `stored_federation` is what an interrupted run had written about its clients.
    """
    if data is None:
        built = build_run(config, BuildCache())
        registry.fed = built.fed
        registry.wait_for_first()
    else:
        registry.fed = wait_for_federation(config, registry, data, stored_federation)
        built = build_run(config, GivenFederationCache(registry.fed))
    server = built.server
    server.clients = Bank({"round": torch.zeros((), dtype=torch.int64, device=built.space.device)})
    server.privates = Bank({})
    server.stages = [s.on_real_clients() if isinstance(s, PrivacyStage) else s for s in server.stages]
    kind = BufferedEngine if registry.rules.buffer else RemoteEngine
    engine = server.engine = kind(server, registry, built.fed.classes, config.digest())
    how = f", asynchronous with a buffer of {registry.rules.buffer}" if registry.rules.buffer else ""
    count = int((built.fed.sizes > 0).sum())  # those of earlier starts too
    reason = f"{count:,} clients, each with its own data{how}" if count > 1 else f"1 client, with its own data{how}"
    built.facts.update(engine=RemoteEngine.name, reason=reason, **registry.rules.facts())
    return built, engine


def wait_for_federation(
    config: DeploymentConfig, registry: ClientRegistry, data: DataModule, stored_federation: Record
) -> RemoteFederation:
    """The federation of clients with their own data, once enough of them have joined."""
    server_data = read_server_data(config, data)
    registry.sizes = {client: count for client, count in enumerate(stored_federation.get("sizes", ())) if count}
    if "shape" in stored_federation:
        shape, real, classes = (stored_federation[name] for name in ("shape", "real", "classes"))
        kind = DataKind(tuple(shape), real, classes > 0)
        server_data.check_like(kind, classes)
        registry.fix_kind(kind, "the run was begun with", classes)
    elif server_data.parts:
        registry.fix_kind(DataKind.of(server_data.parts[0]), "the server's data are")
    registry.wait_for_first()
    assert registry.kind is not None
    classes = max(stored_federation.get("classes", 0), server_data.classes)
    classes = max([classes, *(info.classes for info in registry.info.values())])
    registry.fix_kind(registry.kind, registry.kind_source, classes)
    fed = RemoteFederation(config, registry.kind, classes, server_data, device_of(config.engine.device))
    registry.sizes |= {client: info.samples for client, info in registry.info.items()}
    for client, count in registry.sizes.items():
        fed.set_size(client, count)
    fed.fix_mean_size(stored_federation.get("mean_size"))
    return fed
