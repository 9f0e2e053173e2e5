"""The demonstration: seven methods on the same thirty clients, with the same seeds, starting model and local training.

Local training is that of FedDyn's and FedDC's papers (5 epochs, batches of 50, rate 0.1), the same for all and tuned
for none. A method's own strength is the value, out of those that papers use, with the highest accuracy (mean of the
last ten of 30 rounds on seeds 100–102, which the demonstration does not use); within 0.2% of each other values tie,
and askew's default is taken. FedProx: μ = 0.01 (0.001 ties; 0.1 and 1 are lower). FedDyn: α = 0.1 (against 0.001,
0.01). FedDC: α = 0.01 (0.005 and 0.1 tie). FedDPC keeps its paper's λ = 1; as that doubles the first step, FedAvg
with `server_scale` 2 is its control.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .config import Config
from .launch import run_all
from .run import OnRound
from .store import Run

LOCAL = {"epochs": 5, "batch": 50, "lr": 0.1}
METHODS: tuple[dict[str, Any], ...] = (
    {"name": "fedavg"},
    {"name": "fedavg", "server_scale": 2.0},
    {"name": "fedprox", "mu": 0.01},
    {"name": "scaffold"},
    {"name": "feddyn", "alpha": 0.1},
    {"name": "feddc", "alpha": 0.01},
    {"name": "feddpc", "lam": 1.0},
)
FEDERATION: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "clients": 30, "alpha": 0.2},
    "participation": {"name": "uniform", "fraction": 0.2},
    "model": {"name": "mlp"},
}


def configs(rounds: int, seeds: int) -> list[Config]:
    """All runs of the demonstration: every method once, then every method with the next seed."""
    if seeds < 1:
        raise ConfigError(f"demo: seeds must be ≥ 1, got {seeds}; the default is 3.")
    shared = FEDERATION | {"local": LOCAL, "rounds": rounds}
    return [Config.build(shared | {"algorithm": method, "seed": seed}) for seed in range(seeds) for method in METHODS]


def run_demo(configs: list[Config], out: Path, watch: OnRound | None = None) -> Iterator[Run]:
    """Run the configurations and yield each run when it ends; those that are stored already are read back."""
    return run_all(configs, out, watch=watch)
