"""A round while it runs: who is left in it, what it has come to, and what is noted for its record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..core.records import NO_ANSWER, Record
from ..data.federation import RoundPlan
from .answers import MODEL_NOT_FINITE, NO_BATCH, NOT_FINITE
from .base import Incident, PhaseOutputs
from .finite import PhaseCheck
from .server_step import RoundState


@dataclass
class CurrentRound:
    """One round under way. The server's own model, state and banks stay as they are until it has ended."""

    number: int  # t, from 1
    participants: Sequence[int]  # those who are expected to answer
    absent: Mapping[int, str]  # the others that were asked, and why no answer comes
    plan: RoundPlan  # of the participants whose answers were used so far
    state: RoundState  # after the phases so far, with rows for the clients of the plan
    finite: bool = False  # is the state after the last phase finite?
    scalars: dict[str, float] = field(default_factory=dict)  # 0-d server state after the last phase
    losses: list[float] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)  # participants whose answers are not used
    bytes_up: int = 0
    bytes_down: int = 0

    def __post_init__(self) -> None:
        working = {*self.plan.ids}
        self._note_unused([client for client in self.participants if client not in working], NO_BATCH)

    def _note_unused(self, clients: Iterable[int], reason: str) -> None:
        """Note clients whose answers came and are not used."""
        self.incidents += [Incident(client, reason, True) for client in clients]

    def _keep(self, rows: list[int]) -> None:
        self.plan, self.state = self.plan.only(rows), self.state.only(rows)

    def leave_out_unanswered(self, outputs: PhaseOutputs) -> None:
        """Go on with those clients whose answers came and were not refused."""
        if outputs.answered is None:
            return
        ids = self.plan.ids
        explained = {ids[row] for row in outputs.answered} | {incident.client for incident in outputs.incidents}
        silent = [Incident(client, NO_ANSWER, False) for client in ids if client not in explained]
        self.incidents += [*outputs.incidents, *silent]
        self._keep(outputs.answered)

    def leave_out_not_finite(self, outputs: PhaseOutputs, finite: Sequence[bool]) -> PhaseOutputs:
        """Go on with those clients whose reports are finite; returns their outputs."""
        self._note_unused((client for client, fine in zip(self.plan.ids, finite, strict=True) if not fine), NOT_FINITE)
        rows = [row for row, fine in enumerate(finite) if fine]
        self._keep(rows)
        return outputs.rows(rows)

    def adopt(self, state: RoundState, check: PhaseCheck) -> None:
        """Take over the state after a phase, and what is known of it."""
        self.state, self.finite, self.scalars = state, check.whole, check.scalars

    def lose_all(self) -> None:
        """Count out all clients, as the new model is not finite."""
        self._note_unused(self.plan.ids, MODEL_NOT_FINITE)

    # its record ---------------------------------------------------------------------------------------------------

    def record(self, sizes: np.ndarray) -> Record:
        """The record's first entries; `sizes` are the sample counts of all clients."""
        finite = [v for v in self.losses if np.isfinite(v)]
        incidents = [*(Incident(client, reason, False) for client, reason in self.absent.items()), *self.incidents]
        missing = {incident.client for incident in incidents if not incident.arrived}
        record: Record = {
            "round": self.number,
            "participants": [int(i) for i in self.participants if i not in missing],
            "train_loss": float(np.mean(finite)) if finite else None,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "dropped": sum(incident.lost for incident in incidents) - len(missing),
        }
        if missing:
            record["absent"] = len(missing)
        if incidents:
            record["incidents"] = by_reason(incidents)
            lost = sizes[[incident.client for incident in incidents if incident.lost]].sum()
            record["lost_share"] = float(lost / max(1, sizes[[*self.participants, *self.absent]].sum()))
        return record


def by_reason(incidents: Sequence[Incident]) -> dict[str, list[int]]:
    """The clients of incidents, by reason."""
    clients: dict[str, list[int]] = {}
    for incident in incidents:
        clients.setdefault(incident.reason, []).append(int(incident.client))
    return clients


def with_reasons(absent: Sequence[int] | Mapping[int, str]) -> Mapping[int, str]:
    """Clients that do not answer, by client why; without a reason they just give no answer."""
    return absent if isinstance(absent, Mapping) else dict.fromkeys(absent, NO_ANSWER)
