"""Ranks on a CUDA device give the same run as one process.

NCCL needs a device for each rank; here they share one and exchange by gloo.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RUN = """
import sys, torch, torch.distributed as dist, askew
rank, size, method, engine, model, path = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
if size > 1:
    dist.init_process_group("cpu:gloo,cuda:gloo")
run = askew.run(method, model=model, clients=11, cohort=5, rounds=3, local={"epochs": 2, "batch": 16},
                engine={"name": engine, "device": "cuda", "dtype": "float64"})
assert run.facts["workers"] == size, run.facts
if rank == 0:
    torch.save((run.model, run.curve("loss")), path)
if size > 1:
    dist.destroy_process_group()
"""
BYTES = """
import torch, torch.distributed as dist
dist.init_process_group("cpu:gloo,cuda:nccl")
torch.cuda.set_device(0)
message = torch.arange(100, dtype=torch.uint8, device="cuda")
for a, b in ((0, 16), (16, 96)):
    dist.broadcast(message[a:b], 0)
number = torch.tensor([7])
dist.broadcast(number, 0)
assert message.tolist() == list(range(100)) and number.item() == 7
dist.destroy_process_group()
"""


def run_processes(code: str, size: int, *arguments: str) -> None:
    """Run a program in processes that form a group; all must end without an error."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    children = [
        subprocess.Popen([*command, str(rank), str(size), *arguments], env=os.environ | group | {"RANK": str(rank)})
        for rank in range(size)
    ]
    assert [process.wait(timeout=300) for process in children] == [0] * size


@pytest.mark.parametrize("model", ["mlp", "lenet"])
@pytest.mark.parametrize("engine", ["slots", "stacked", "sequential"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_two_ranks_give_the_run_of_one(method: str, engine: str, model: str, tmp_path: Path) -> None:
    for size in (1, 2):
        run_processes(RUN, size, method, engine, model, str(tmp_path / f"{size}.pt"))
    (one, one_losses), (two, two_losses) = (torch.load(tmp_path / f"{size}.pt") for size in (1, 2))
    for name, value in one.items():
        assert torch.allclose(two[name], value, rtol=0, atol=1e-11), name
    assert two_losses[1] == pytest.approx(one_losses[1], rel=1e-10)


def test_nccl_moves_the_bytes_of_a_message() -> None:
    run_processes(BYTES, 1)
