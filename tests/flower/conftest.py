"""What all tests of deployments share: short pauses between two looks, and a home of their own for Flower."""

from __future__ import annotations

from pathlib import Path

import pytest

from askew.flower import buffered_engine, registry, remote_engine


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (registry, remote_engine, buffered_engine):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.02)


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Clients without a folder of their own note in Flower's what they have answered."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
