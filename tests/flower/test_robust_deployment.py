"""A robust rule on real clients gives the simulation's run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from in_process import assert_same_rounds, deploy, models_equal, simulate, small_run


@pytest.mark.parametrize("robust", [{"rule": "geometric", "bucket": 2}, {"rule": "krum", "bad": 0.1}])
def test_a_rule_is_the_same_on_real_clients(robust: dict[str, Any], tmp_path: Path) -> None:
    tables = small_run({"name": "scaffold" if "bucket" in robust else "fedvarp"}, robust=robust, rounds=2)
    tables["participation"] = {"name": "uniform", "cohort": 5}
    deployed, simulated = deploy(tables, tmp_path)[0], simulate(tables)
    assert models_equal(deployed.model, simulated.model)
    assert_same_rounds(deployed, simulated)
    assert ("incidents" in simulated.rounds[0]) == (robust["rule"] == "krum")
