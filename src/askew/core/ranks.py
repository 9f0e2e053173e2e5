"""Which of several processes of one run this is."""

from __future__ import annotations

import os

STORE = "ASKEW_STORE"  # the environment variable with the file in which ranks of one machine find each other


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks, from the environment that torchrun or `workers` set; else (0, 1)."""
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    can_meet = all(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")) or bool(os.environ.get(STORE))
    return (int(rank), int(size)) if can_meet and rank.isdigit() and size.isdigit() else (0, 1)
