"""Random faults against real processes: the model is the reference's, or one sentence says why there is none.

`ASKEW_LONG=all ASKEW_FAULT_COUNT=200 python -m pytest -s tests/flower/test_random_faults.py` prints a line for every
run. The reference of a run is the simulation with the participants that its record names.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from in_process import largest_difference, simulate, small_run, with_participants, write_config
from processes import FaultyProxy
from safetensors.torch import load_file

from askew.experiment.run_folder import is_finished
from askew.experiment.store import load
from askew.flower.app import write_app
from askew.flower.rules import DeploymentRules
from process_tree import process_tree

pytest.importorskip("flwr", reason="needs Flower: pip install -e '.[flower]'")

from askew.flower.keys import temporary_keys
from askew.flower.loopback import Loopback

pytestmark = pytest.mark.skipif(os.environ.get("ASKEW_LONG") != "all", reason="takes minutes; ASKEW_LONG=all runs it")
FAULT_COUNT = int(os.environ.get("ASKEW_FAULT_COUNT", "20"))
FAULTS = ("kill node", "kill answer", "kill server", "cut", "stall", "delay", "garbage")
NETWORK_FAULTS = [(fault, client, 4.0) for fault in ("delay", "stall", "cut", "garbage") for client in range(3)]
FAULTS_OF_RUN = int(os.environ.get("ASKEW_FAULTS_OF_RUN", "20"))
ROUNDS = 2 * FAULTS_OF_RUN  # of a run, so that it lasts about as long as its faults
RUN_SECONDS = 1800.0  # in which a run must end, with its faults
TOLERANCE = 1e-6  # of weights
# A line of the log that says why a run ended: a sentence of askew, which ends with what to do.
SENTENCE = re.compile(r"askew\.errors\.\w+: .+; .+\.$", re.MULTILINE)


class Network(NamedTuple):
    """A federation of three nodes, each behind a network with faults."""

    link: Loopback
    proxies: list[FaultyProxy]

    def start_missing_nodes(self) -> None:
        """What an operator does who sees that a node has ended."""
        for client, proxy in enumerate(self.proxies):
            process = self.link.running.get(f"node-{client}")
            if process is None or process.poll() is not None:
                self.link.start_node(client, proxy.port)

    def inject(self, fault: str, client: int, seconds: float) -> None:
        """Do one fault to a client's node or network, or to the server; networks recover after some seconds."""
        node = self.link.running.get(f"node-{client}")
        if fault == "kill node":
            self.link.stop_process(f"node-{client}", kill=True)
        elif fault == "kill answer" and node is not None:
            for process_id in process_tree(node.pid)[3:]:  # after the node, its SuperExec and the process that forks
                with suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
        elif fault == "kill server":
            for process_id in process_tree(self.link.running["superlink"].pid)[2:]:  # after it and its SuperExec
                with suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
            self.link.stop_process("run", kill=True)
        else:
            self.proxies[client].fault = fault
            time.sleep(seconds)
            self.proxies[client].fault = ""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    folder = tmp_path_factory.mktemp("network")
    with temporary_keys(3) as keys, Loopback(folder, 0, env={"OMP_NUM_THREADS": "1"}, keys=keys) as link:
        link.clients = 3
        one = Network(link, [FaultyProxy(link.port) for _ in range(3)])
        yield one
        for proxy in one.proxies:
            proxy.close()


def tables_of(seed: int) -> dict[str, Any]:
    """A run of three clients with state, so that a round that was counted twice would show."""
    partition = {"name": "natural", "clients": 3}
    return small_run(
        {"name": "scaffold"}, seed=seed, rounds=ROUNDS, partition=partition, participation={"name": "full"}
    )


def random_faults(seed: int) -> list[tuple[str, int, float]]:
    """Faults for a run: what, to which client, and for how many seconds."""
    rng = random.Random(seed)
    return [(rng.choice(FAULTS), rng.randrange(3), rng.uniform(0.5, 6)) for _ in range(FAULTS_OF_RUN)]


def run_with_faults(
    network: Network, seed: int, faults: list[tuple[str, int, float]], folder: Path
) -> tuple[str, Counter[str]]:
    """Play a run and do these faults to it, in their order; return how it ended and the faults by kind."""
    rng, tables, done, todo = random.Random(seed), tables_of(seed), Counter[str](), list(faults)
    rules = DeploymentRules(out=str(folder / "runs"), wait=300.0, hello=20.0, timeout=20.0)
    write_app(write_config(tables, folder / "config"), folder / "app", rules=rules)
    log, end = network.link.folder / "run.log", time.monotonic() + RUN_SECONDS
    begin = log.stat().st_size if log.exists() else 0
    network.start_missing_nodes()
    run, sentences = network.link.start_run(folder / "app"), 0
    next_fault = time.monotonic() + rng.uniform(2, 8)
    while time.monotonic() < end:
        finished = [path for path in folder.glob("runs/*") if is_finished(path)]
        if finished:
            break
        if todo and time.monotonic() > next_fault:
            fault, client, seconds = todo.pop(0)
            network.inject(fault, client, seconds)
            done[fault] += 1
            next_fault = time.monotonic() + rng.uniform(0.5, 6)
        network.start_missing_nodes()
        if run.poll() is not None or "run" not in network.link.running:
            new = log.read_bytes()[begin:].decode(errors="replace")
            found = len(SENTENCE.findall(re.sub(r"\x1b\[[0-9;]*m", "", new)))
            if "kill server" not in done and found <= sentences:
                return f"it ended without a sentence: {new[-1500:]}", done
            sentences = found
            run = network.link.start_run(folder / "app")  # an operator starts it again; it goes on
        time.sleep(0.3)
    else:
        return "it did not end", done
    deployed = load(finished[0])
    participants = [record["participants"] for record in deployed.rounds]
    reference = simulate(with_participants(tables, participants, folder))
    difference = largest_difference(load_file(finished[0] / "model.safetensors"), reference.model)
    missed = sum(3 - len(one) for one in participants)
    return (
        f"{'same' if difference <= TOLERANCE else f'another model, by {difference:g}'}; {missed} answers missed",
        done,
    )


def test_a_network_that_delays_stalls_and_cuts_changes_no_model(network: Network, tmp_path: Path) -> None:
    """Every fault of the network to every client, while the run goes on; each ends before an answer is due."""
    result, done = run_with_faults(network, 0, NETWORK_FAULTS, tmp_path)
    print(f"network: {result}; faults: {dict(done)}", flush=True)
    assert result.startswith("same"), result


def test_random_faults_change_no_model(network: Network, tmp_path: Path) -> None:
    total, seed = Counter[str](), int(os.environ.get("ASKEW_FAULT_SEED", "0"))
    while sum(total.values()) < FAULT_COUNT:
        seed += 1
        result, done = run_with_faults(network, seed, random_faults(seed), tmp_path / str(seed))
        total += done
        print(f"run {seed}: {result}; faults: {dict(done)}; {sum(total.values())} so far", flush=True)
        assert result.startswith("same"), result
        assert network.link.running["superlink"].poll() is None
