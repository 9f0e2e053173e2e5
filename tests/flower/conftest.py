"""What all tests of deployments share: short pauses between two looks for nodes and replies."""

from __future__ import annotations

import pytest

from askew.flower import registry, remote_engine


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(remote_engine, "POLL_SECONDS", 0.02)
