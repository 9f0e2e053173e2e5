"""The server's step: what the answers of a phase make of the model, the state and the banks' rows.

Nothing here changes the server: a step takes the state of a round and returns the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.types import Cohort, Part, State, select_rows
from . import server_hooks
from .base import PhaseOutputs
from .round_metrics import RoundUpdates


class RoundState(NamedTuple):
    """What a round changes, phase by phase; it replaces the server's own only if all of it is finite."""

    w: Tensor
    buffers: Tensor
    server: State
    rows: dict[str, State]  # the participants' rows of the banks: "clients", "memory", "private"
    updates: RoundUpdates

    def only(self, rows: list[int]) -> RoundState:
        """The state of a round with some of the participants."""
        return self._replace(rows={name: select_rows(state, rows) for name, state in self.rows.items()})


def take_step(
    phase: Algorithm,
    ids: Sequence[int],
    outputs: PhaseOutputs,
    cohort: Cohort,
    old: RoundState,
    private: Part,
    keep_updates: bool,
) -> RoundState:
    """The state after a phase of these clients; updates are kept where something is measured of them."""
    w, server, memory = server_hooks.aggregate(phase, old.w, outputs.up, cohort, old.server, old.rows["memory"])
    updates = old.updates
    if keep_updates and "delta" in outputs.up:
        updates = updates._replace(
            ids=ids,
            deltas=outputs.up["delta"],
            local_buffers=outputs.buffers,
            weights=server_hooks.weights(phase, outputs.up, cohort),
            public=cohort.public,
        )
    state = server_hooks.same_form(phase, "finish", "client state", old.rows["clients"], outputs.state)
    rows = {"clients": state, "memory": memory, "private": private_rows(outputs, old.rows["private"], private)}
    return RoundState(w, mean_buffers(phase, outputs, cohort, old.buffers, private), server, rows, updates)


def mean_buffers(phase: Algorithm, outputs: PhaseOutputs, cohort: Cohort, old: Tensor, private: Part) -> Tensor:
    """The global buffers after a phase: the clients' weighted mean; private ones stay as they began."""
    if not (phase.trains and old.numel()):
        return old
    mean = server_hooks.weights(phase, outputs.up, cohort) @ outputs.buffers
    places = private.buffer_indices
    return mean if private.empty else mean.index_copy(0, places, old[places])


def private_rows(outputs: PhaseOutputs, old: State, private: Part) -> State:
    """The clients' own coordinates and buffers after a phase."""
    if outputs.theta is None:
        return old
    return {"w": outputs.theta[:, private.indices], "b": outputs.buffers[:, private.buffer_indices]}
