"""Centralised training: one client holds all data. The upper reference that MLDL24 and others compare with.

SOLO with one client: the same local loop, one optimiser for the whole training. The partition and the participation
of the configuration are not used.
"""

from __future__ import annotations

from .solo import Solo


class Centralised(Solo):
    title = "centralised"
    paper = "reference"
    idea = "one client holds all data"
    pooled = True
