"""A federation with keys, in real processes: it plays the simulator's run, and whoever has no key of it stays outside."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from hands import page, simulated, written
from processes import assert_none_left
from safetensors.torch import load_file

from askew.experiment.store import load
from askew.flower.app import write_app
from askew.flower.server import Rules

pytest.importorskip("flwr", reason="needs the extra flower")

from askew.flower.keys import make_keys
from askew.flower.loopback import HOST, Loopback, free_port

PATIENCE = 300.0  # seconds for a run
TABLES = page(
    {"name": "scaffold"}, rounds=2, partition={"name": "natural", "clients": 2}, participation={"name": "full"}
)
LIAR = """
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


def test_strangers_stay_outside_and_the_run_is_the_simulators(tmp_path: Path) -> None:
    keys, others = make_keys(tmp_path / "keys", 2), make_keys(tmp_path / "others", 1)
    trust, wrong = (["--root-certificates", str(each.ca)] for each in (keys, others))
    own, foreign = (["--auth-supernode-private-key", str(key)] for key in (keys.private(1), others.private(0)))
    node, liar = ["flower-supernode"], [sys.executable, "-c", LIAR, str(keys.public(1))]
    strangers = {  # each says it is client 1; what its log says, and what the SuperLink's does
        "plain": ([*node, "--insecure"], "Failed to initialize the connection", ""),
        "keyless": ([*node, *trust], "SuperNode authentication is enabled", "register-node][ApiError:2001]"),
        "misled": ([*node, *wrong, *own], "CERTIFICATE_VERIFY_FAILED", ""),
        "unknown": ([*node, *trust, *foreign], "Failed to activate SuperNode", "activate-node][ApiError:2004]"),
        "liar": ([*liar, *trust, *foreign], "SuperNode terminated", '/v1/fleet/activate-node HTTP/1.1" 401'),
    }
    rules = Rules(out=str(tmp_path / "runs"), wait=120.0, timeout=120.0)
    write_app(written(TABLES, tmp_path / "page"), tmp_path / "app", rules=rules)
    with Loopback(tmp_path / "flower", 2, env={"OMP_NUM_THREADS": "1"}, keys=keys) as link:
        run = link.run(tmp_path / "app")
        for name, (command, _, _) in strangers.items():
            where = [
                "--superlink",
                f"{HOST}:{link.port}",
                "--host",
                HOST,
                "--port",
                str(free_port()),
                "--max-retries",
                "1",
            ]
            link.start(name, *command, *where, "--node-config", "partition-id=1 num-partitions=2")
        assert run.wait(PATIENCE) == 0
        log = lambda name: (link.folder / f"{name}.log").read_text()
        end = time.monotonic() + 60
        while time.monotonic() < end and any(link.running[name].poll() is None for name in strangers):
            time.sleep(0.2)
        for name, (_, words, seen) in strangers.items():
            assert link.running[name].poll() is not None, f"{name}: {log(name)}"
            assert words in log(name) and "SuperNode ID" not in log(name), f"{name}: {log(name)}"
            assert seen in log("superlink"), name
        assert log("superlink").count("Activated node_id") == 2
        assert "is now node" not in log("run") and "left out" not in log("run")
    assert_none_left(Path(link.env["FLWR_HOME"]))
    [folder] = (tmp_path / "runs").iterdir()
    ours, theirs, model = load(folder), simulated(TABLES), load_file(folder / "model.safetensors")
    assert ours.finished and [r["participants"] for r in ours.rounds] == [[0, 1], [0, 1]]
    assert max((model[n] - v).abs().max().item() for n, v in theirs.model.items()) <= 1e-6
    assert ours.rounds[-1]["loss"] == pytest.approx(theirs.rounds[-1]["loss"], rel=1e-5)
