"""What a program around a run has set in torch, and other threads, do not change the run's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import askew
from askew.errors import ConfigError, EngineError
from askew.experiment import build as building


def small(seed: int = 0, **more: Any) -> askew.Run:
    return askew.run("fedavg", data="digits", clients=5, cohort=2, rounds=2, seed=seed, progress=False, **more)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


AROUND = {
    "float64 by default": lambda: default_dtype(torch.float64),
    "bfloat16 by default": lambda: default_dtype(torch.bfloat16),
    "another device by default": lambda: default_device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("name", AROUND)
def test_the_modes_of_a_program_do_not_reach_a_run(name: str) -> None:
    alone = small()
    around: AbstractContextManager[Any] = AROUND[name]()
    with around:
        before = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
        inside = small()
        assert before == (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled())
    assert [r["loss"] for r in inside.rounds] == [r["loss"] for r in alone.rounds]
    assert all(torch.equal(inside.model[n], v) and v.dtype == torch.float32 for n, v in alone.model.items())


def test_a_device_that_a_block_sets_is_refused() -> None:
    with torch.device("meta"), pytest.raises(EngineError, match=r"inside `with torch.device\('meta'\)`"):
        small()


def test_runs_of_several_threads_are_what_each_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread seeds and draws between the seed of a network and its weights: here at every network."""
    alone = [small(seed).rounds[0]["loss"] for seed in range(3)]
    original = building.torch_seed

    def seed_slowly(*arguments: Any) -> int:
        seed = original(*arguments)
        torch.manual_seed(seed)
        torch.rand(1000).sum()
        return seed

    monkeypatch.setattr(building, "torch_seed", seed_slowly)
    with ThreadPoolExecutor(3) as threads:
        together = [run.rounds[0]["loss"] for run in threads.map(small, list(range(3)) * 3)]
    assert together == alone * 3


def test_a_run_holds_the_lock_that_other_threads_wait_for() -> None:
    from askew.experiment.process_state import torch_lock

    seen = list[bool]()

    def try_to_take(*_: Any) -> None:
        with ThreadPoolExecutor(1) as other:
            taken = other.submit(torch_lock.acquire, blocking=False).result()
        seen.append(taken)

    small(watch=try_to_take)
    assert seen == [False] * 3  # before the first round, and after each


def test_numbers_of_numpy_are_numbers() -> None:
    config = {"clients": np.int64(5), "cohort": np.int32(2), "rounds": np.int64(2), "local": {"batch": np.int64(16)}}
    run = askew.run("fedavg", data="digits", progress=False, **config)  # type: ignore[arg-type]
    assert len(run.rounds) == 2 and run.config["local"]["batch"] == 16


def test_a_wrong_save_every_is_refused_in_a_sentence() -> None:
    for wrong in ("x", -1, None, True):
        with pytest.raises(ConfigError, match="save_every must be a number of seconds"):
            small(save_every=wrong)


def test_what_a_watch_does_with_a_record_stays_with_it() -> None:
    run = small(watch=lambda _, record: record.clear() if record else None)
    assert all("seconds" in record and "loss" in record for record in run.rounds)
