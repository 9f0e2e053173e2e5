"""Waiting for clients that never come should be short."""

from __future__ import annotations

import pytest

from askew.flower import server as field


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(field, "PAUSE", 0.02)
    monkeypatch.setattr(field, "POLL", 0.02)
