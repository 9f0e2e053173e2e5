"""Real deployments on this machine: a SuperLink, two SuperNodes and every message in a process of its own.

All are slow. `ASKEW_LOOPBACK=all python -m pytest tests/flower/test_loopback.py` runs all methods, which takes a
quarter of an hour on two cores; otherwise two are run. Weights are compared up to 1e-6: they are the same numbers where
processes round alike.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from in_process import largest_difference, simulate, small_run, write_config
from processes import ByteCount, CountingProxy, assert_none_left, check_bytes, on_request, processes_of
from safetensors.torch import load_file

from askew.experiment.store import Run, load
from askew.flower.app import write_app
from askew.flower.rules import DeploymentRules

pytest.importorskip("flwr", reason="needs Flower: pip install -e '.[flower]'")

from askew.flower.loopback import Loopback

pytestmark = pytest.mark.slow
METHODS = ("scaffold", "fedbn")
OTHER_METHODS = (
    *("fedavg", "fedpdc", "feddyn", "feddc", "feddpc", "fedcm", "fedvarp", "moon", "mgda", "lossbias", "fedga", "solo"),
)
CLIENT_EVALUATED = ("fedbn", "solo")  # whose evaluation travels too
CLIENTS = 2  # test_faults.py has three: every message costs seconds
TOLERANCE = 1e-6  # of weights
RUN_SECONDS = 300.0  # in which a run must end


class MeasuredFederation(NamedTuple):
    """A federation whose two nodes reach the SuperLink through proxies that count bytes."""

    link: Loopback
    proxies: list[CountingProxy]

    def run(self, tables: dict[str, Any], folder: Path) -> Run:
        """Run a configuration to its end."""
        rules = DeploymentRules(out=str(folder / "runs"), wait=120.0, timeout=120.0)
        write_app(write_config(tables, folder / "config"), folder / "app", rules=rules)
        process, log = self.link.start_run(folder / "app"), self.link.folder / "run.log"
        assert process.wait(RUN_SECONDS) == 0, log.read_text()
        runs = list((folder / "runs").glob("*"))
        assert runs, log.read_text()
        return load(runs[0])


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeasuredFederation]:
    """A federation for all tests. When it ends, no process of it is left, even where one is killed."""
    with Loopback(tmp_path_factory.mktemp("loopback"), 0, env={"OMP_NUM_THREADS": "1"}) as link:
        link.clients, proxies = CLIENTS, [CountingProxy(link.port) for _ in range(CLIENTS)]
        for client, proxy in enumerate(proxies):
            link.start_node(client, proxy.port)
        yield MeasuredFederation(link, proxies)
        for proxy in proxies:
            proxy.close()
        link.stop_process("node-0", kill=True)
    assert_none_left(Path(link.env["FLWR_HOME"]))


def wide_full_run(key: str, rounds: int = 2) -> dict[str, Any]:
    """A run of all clients with a network so large that its bytes stand out."""
    partition = {"name": "natural", "clients": CLIENTS}
    tables = small_run({"name": key}, rounds=rounds, partition=partition, participation={"name": "full"})
    return tables | {"model": tables["model"] | {"hidden": [2048]}, "evaluation": {"every": rounds}}


@pytest.mark.parametrize("keys", [METHODS, pytest.param(OTHER_METHODS, marks=on_request)], ids=["two", "others"])
def test_a_deployment_is_the_simulators_run(
    keys: tuple[str, ...], federation: MeasuredFederation, tmp_path: Path
) -> None:
    """One test for many methods: a federation takes long to start, and each worker would start its own."""
    for key in keys:
        passed = ByteCount(federation.proxies)
        deployed, simulated = federation.run(wide_full_run(key), tmp_path / key), simulate(wide_full_run(key))
        assert deployed.finished and deployed.facts["engine"] == "flower" and deployed.folder is not None
        assert largest_difference(load_file(deployed.folder / "model.safetensors"), simulated.model) <= TOLERANCE, key
        for one, other in zip(deployed.rounds, simulated.rounds, strict=True):
            for name in ("participants", "bytes_up", "bytes_down"):
                assert one[name] == other[name], (key, name)
            for name in ("train_loss", "accuracy", "loss"):
                assert one[name] == (None if other[name] is None else pytest.approx(other[name], rel=1e-5)), (key, name)
        if key not in CLIENT_EVALUATED:
            counted = deployed.bytes_down, deployed.bytes_up
            check_bytes(counted, passed.since(), messages=CLIENTS * (len(deployed.rounds) + 1))
    if keys == METHODS:
        check_secure_sum(federation, tmp_path / "secure")


def check_secure_sum(federation: MeasuredFederation, folder: Path) -> None:
    """Real clients sum their uploads securely, to the simulator's model."""
    tables = wide_full_run("fedavg", rounds=1)
    deployed = federation.run(tables | {"privacy": {"secure": True, "fewest": CLIENTS}}, folder)
    assert deployed.folder is not None and deployed.rounds[0]["participants"] == [*range(CLIENTS)]
    assert largest_difference(load_file(deployed.folder / "model.safetensors"), simulate(tables).model) < TOLERANCE


@on_request
def test_flowers_own_simulation_plays_the_same_app(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'flwr[simulation]'")
    tables = wide_full_run("moon", rounds=3)
    with Loopback(tmp_path / "flower", 0, env={"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"}) as link:
        (tmp_path / "flower" / "flwr" / "config.toml").write_text(
            '[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = ":local:"\n'
        )
        rules = DeploymentRules(out=str(tmp_path / "runs"), wait=120.0)
        write_app(write_config(tables, tmp_path / "config"), tmp_path / "app", rules=rules)
        options = ["--stream", "--federation-config", "num-supernodes=3 client-resources-num-cpus=1"]
        try:
            process = link.start_process("run", "flwr", "run", str(tmp_path / "app"), "local", *options)
            assert process.wait(RUN_SECONDS) == 0
        finally:  # end what `flwr run` leaves behind
            for process_id in processes_of(Path(link.env["FLWR_HOME"])):
                with suppress(OSError):
                    os.kill(process_id, signal.SIGTERM)
    deployed, simulated = load(next((tmp_path / "runs").iterdir())), simulate(tables)
    assert deployed.finished
    assert deployed.rounds[-1]["loss"] == pytest.approx(simulated.rounds[-1]["loss"], rel=1e-5)
