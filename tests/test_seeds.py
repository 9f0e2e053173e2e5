"""Seeds of the partition, the weights and the participants: each fixes its part, and no name changes without them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import askew
from askew.errors import ConfigError
from askew.experiment.build import BuiltRun, build
from askew.experiment.config import Config
from askew.reproduction.digests import result_digest

TABLES: dict[str, Any] = {
    "rounds": 3,
    "model": {"name": "mlp", "hidden": [4]},
    "partition": {"clients": 6, "public": 30},
    "participation": {"cohort": 3},
}
PARTS = ("partition", "model", "participation")


def config(seed: int, **own_seeds: int) -> Config:
    """A configuration with this seed; some of its tables have a seed of their own."""
    own = {name: TABLES[name] | {"seed": own_seed} for name, own_seed in own_seeds.items()}
    return Config.build({**TABLES, "seed": seed} | own)


def participants(built: BuiltRun) -> list[list[int]]:
    """Who takes part in the first four rounds."""
    c, fed = built.config, built.fed
    return [c.participation.turnout(c.seed, t, fed.eligible, fed.clients).ids.tolist() for t in range(1, 5)]


def equal_parts(one: BuiltRun, other: BuiltRun) -> dict[str, bool]:
    """Which of the three parts agree; the public set goes with the partition."""
    assert (
        one.fed.assignment is not None
        and other.fed.assignment is not None
        and one.fed.public is not None
        and other.fed.public is not None
    )
    split = all(np.array_equal(a, b) for a, b in zip(one.fed.assignment, other.fed.assignment, strict=True))
    assert split == torch.equal(one.fed.public.x, other.fed.public.x)
    weights = torch.equal(one.space.start, other.space.start)
    return {"partition": split, "model": weights, "participation": participants(one) == participants(other)}


@pytest.mark.parametrize("fixed", PARTS)
def test_a_seed_of_its_own_fixes_one_part(fixed: str) -> None:
    first, other, mixed = (build(c) for c in (config(0), config(5), config(5, **{fixed: 0})))
    assert equal_parts(first, other) == dict.fromkeys(PARTS, False)
    assert equal_parts(first, mixed) == {part: part == fixed for part in PARTS}
    assert equal_parts(other, mixed) == {part: part != fixed for part in PARTS}


def test_batches_go_with_the_run_and_all_three_make_no_copy_of_it() -> None:
    runs = [askew.run(config(seed, partition=0, model=0, participation=0)) for seed in (0, 5)]
    one, other = ([r["participants"] for r in run.rounds] for run in runs)
    assert one == other
    assert runs[0].rounds[0]["train_loss"] != runs[1].rounds[0]["train_loss"]
    whole = askew.run(config(0))
    assert [r["train_loss"] for r in whole.rounds] == [r["train_loss"] for r in runs[0].rounds]


def test_names_change_only_where_one_is_set() -> None:
    """The names that this configuration has had before there were such settings."""
    plain, set_ = config(0), config(0, partition=0)
    assert (plain.digest(), result_digest(plain)) == ("59196753", "000e49b4da")
    assert set_.digest() != plain.digest() and result_digest(set_) != result_digest(plain)


def test_a_wrong_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"seed .*0"):
        config(0, model=-1)
