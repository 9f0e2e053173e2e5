"""engine.deterministic on a CUDA device: two runs, each in a process of its own, are the same bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Two runs in one process as well: the second one finds CUDA started, its memory used and its graphs captured.
RUN = """
import hashlib, json, sys
import askew
from askew.errors import EngineError

tables, prints = json.loads(sys.argv[1]), []
for _ in range(2):
    try:
        run = askew.run(tables)
    except EngineError as e:
        prints.append(f"refused: {e}")
        continue
    digest = hashlib.sha256()
    for name, tensor in sorted(run.model.items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    losses = [(r["train_loss"], r["loss"], r["accuracy"]) for r in run.rounds]
    prints.append(f"{run.facts['engine']} {digest.hexdigest()} {losses}")
print(json.dumps(prints))
"""
CASES = [
    ("auto", "mlp", "fedavg", "float32"),
    ("auto", "cnn", "scaffold", "float32"),
    ("slots", "cnn", "feddyn", "tf32"),
    ("slots", "lenet", "fedavg", "bf16"),
    ("sequential", "mlp", "fedprox", "float32"),
    ("sequential", "cnn", "fedavg", "float32"),
    ("vmapped", "mlp", "scaffold", "float32"),
]


def prints_of(tables: dict[str, object]) -> list[str]:
    done = subprocess.run([sys.executable, "-c", RUN, json.dumps(tables)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    prints: list[str] = json.loads(done.stdout)
    return prints


@pytest.mark.parametrize(("engine", "model", "method", "dtype"), CASES)
def test_two_runs_are_equal_bit_for_bit(engine: str, model: str, method: str, dtype: str) -> None:
    """Plain torch may lack a deterministic function, as of max-pooling's gradient: then it says so."""
    tables: dict[str, object] = {
        "rounds": 4,
        "algorithm": {"name": method},
        "model": {"name": model},
        "partition": {"clients": 12},
        "participation": {"cohort": 8},
        "local": {"epochs": 2, "batch": 16, "momentum": 0.5},
        "engine": {"name": engine, "device": "cuda", "dtype": dtype, "deterministic": True},
    }
    first, second = prints_of(tables), prints_of(tables)
    assert len({*first, *second}) == 1, (first, second)
    if (engine, model) == ("sequential", "cnn") and first[0].startswith("refused"):
        assert "torch has no deterministic" in first[0]
    else:
        assert not first[0].startswith("refused"), first[0]


def test_the_stacked_engine_is_refused_and_an_early_cuda_is_named() -> None:
    tables = {"engine": {"name": "stacked", "device": "cuda", "deterministic": True}, "rounds": 1}
    assert 'use engine.name = "slots"' in prints_of(tables)[0]
    early = "import torch; torch.zeros(1, device='cuda')\n" + RUN
    tables["engine"] = {"device": "cuda", "deterministic": True}
    done = subprocess.run(
        [sys.executable, "-c", early, json.dumps(tables)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "CUBLAS_WORKSPACE_CONFIG=:4096:8" in json.loads(done.stdout)[0]
