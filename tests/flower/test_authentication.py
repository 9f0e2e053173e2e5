"""A federation with keys, in real processes: it plays the simulator's run, and refuses nodes without a known key."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from in_process import largest_difference, simulate, small_run, write_config
from processes import assert_none_left
from safetensors.torch import load_file

from askew.experiment.store import load
from askew.flower.app import write_app
from askew.flower.rules import DeploymentRules

pytest.importorskip("flwr", reason="needs Flower: pip install -e '.[flower]'")

from askew.flower.keys import make_keys
from askew.flower.loopback import HOST, Loopback, free_port

RUN_SECONDS = 300.0  # in which the run must end
TABLES = small_run(
    {"name": "scaffold"}, rounds=1, partition={"name": "natural", "clients": 2}, participation={"name": "full"}
)
# A node that shows the public key in its first argument, and signs with another private key.
IMPOSTOR = """
import sys
from importlib import import_module
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

cli = import_module("flwr.supernode.cli.flower_supernode")
with open(sys.argv.pop(1), "rb") as file:
    public = load_ssh_public_key(file.read())
keys = cli._try_setup_client_authentication
cli._try_setup_client_authentication = lambda args: (keys(args)[0], public)
cli.flower_supernode()
"""


class Intruder(NamedTuple):
    """A node that claims to be client 1."""

    command: list[str]
    own_log: str  # what its log says
    superlink_log: str = ""  # what the SuperLink's log says


@pytest.mark.slow
def test_nodes_without_a_registered_key_are_refused_and_the_run_is_the_simulators(tmp_path: Path) -> None:
    keys, other_keys = make_keys(tmp_path / "keys", 2), make_keys(tmp_path / "others", 1)
    trust, wrong_trust = (["--root-certificates", str(each.ca_certificate)] for each in (keys, other_keys))
    sign, wrong_sign = (
        ["--auth-supernode-private-key", str(key)] for key in (keys.private_key(1), other_keys.private_key(0))
    )
    node, impostor = ["flower-supernode"], [sys.executable, "-c", IMPOSTOR, str(keys.public_key(1))]
    refused, unknown = "SuperNode authentication is enabled", "the SuperLink refused this node: either its key"
    intruders = {
        "unencrypted": Intruder([*node, "--insecure"], "Failed to initialize the connection"),
        "keyless": Intruder([*node, *trust], refused, "register-node][ApiError:2001]"),
        "misled": Intruder([*node, *wrong_trust, *sign], "CERTIFICATE_VERIFY_FAILED"),
        "unknown": Intruder([*node, *trust, *wrong_sign], unknown, "activate-node][ApiError:2004]"),
        "impostor": Intruder(
            [*impostor, *trust, *wrong_sign], "SuperNode terminated", '/v1/fleet/activate-node HTTP/1.1" 401'
        ),
    }
    rules = DeploymentRules(out=str(tmp_path / "runs"), wait=120.0, timeout=120.0)
    write_app(write_config(TABLES, tmp_path / "config"), tmp_path / "app", rules=rules)
    with Loopback(tmp_path / "flower", 2, env={"OMP_NUM_THREADS": "1"}, keys=keys) as link:
        run = link.start_run(tmp_path / "app")
        for name, intruder in intruders.items():
            superlink = ["--superlink", f"{HOST}:{link.port}", "--max-retries", "1"]
            address = ["--host", HOST, "--port", str(free_port())]
            config = ["--node-config", "partition-id=1 num-partitions=2"]
            link.start_process(name, *intruder.command, *superlink, *address, *config)
        assert run.wait(RUN_SECONDS) == 0
        read_log = lambda name: (link.folder / f"{name}.log").read_text()
        end = time.monotonic() + 60
        while time.monotonic() < end and any(link.running[name].poll() is None for name in intruders):
            time.sleep(0.2)
        for name, intruder in intruders.items():
            assert link.running[name].poll() is not None, f"{name}: {read_log(name)}"
            assert intruder.own_log in read_log(name) and "SuperNode ID" not in read_log(name), (
                f"{name}: {read_log(name)}"
            )
            assert intruder.superlink_log in read_log("superlink"), name
        assert read_log("superlink").count("Activated node_id") == 2
        assert "is now node" not in read_log("run") and "left out" not in read_log("run")
    assert_none_left(Path(link.env["FLWR_HOME"]))
    [folder] = (tmp_path / "runs").iterdir()
    deployed, simulated = load(folder), simulate(TABLES)
    assert deployed.finished and [r["participants"] for r in deployed.rounds] == [[0, 1]]
    assert largest_difference(load_file(folder / "model.safetensors"), simulated.model) <= 1e-6
    assert deployed.rounds[-1]["loss"] == pytest.approx(simulated.rounds[-1]["loss"], rel=1e-5)
