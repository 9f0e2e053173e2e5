"""The roll-call of a run: whose answers were used, whose were lost and why, and how much data that was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..core.records import REPEATED
from ..core.text import count_text

MOST_NAMED = 8  # clients that a sentence names


class RoundCall(NamedTuple):
    """Who was asked in one round, and whose answers were used."""

    asked: list[int]
    used: list[int]
    incidents: dict[str, list[int]]  # clients by reason
    lost_share: float  # of the samples of those who were asked


class RollCall(NamedTuple):
    """What was lost in a run."""

    rounds: int  # rounds with an incident
    reasons: dict[str, Counter[int]]  # by reason, how often each client
    lost: int  # answers that were asked for and not used
    largest_share: float  # lost of the data of a round
    largest_round: int  # in which that was
    unused: list[int]  # clients that were asked and of which no answer was used
    unasked: list[int]  # clients that were never asked
    deserted: bool = False  # did nobody take part in any round?
    played: int = 0  # all rounds
    unreachable: Mapping[int, int] = {}  # in a deployment: by client that was asked, rounds in which it could not be

    @property
    def empty(self) -> bool:
        """Is every answer there?"""
        return not self.reasons


def call_round(record: Mapping[str, Any]) -> RoundCall:
    """The roll-call of a round's record."""
    incidents: dict[str, list[int]] = record.get("incidents") or {}
    named = {client for clients in incidents.values() for client in clients}
    lost = {client for reason, clients in incidents.items() for client in clients if reason != REPEATED}
    asked = sorted({*(record.get("participants") or ()), *named})
    used = [client for client in asked if client not in lost]
    return RoundCall(asked, used, incidents, float(record.get("lost_share") or 0.0))


def call_run(rounds: Sequence[Mapping[str, Any]], federation: Mapping[str, Any], deployed: bool = False) -> RollCall:
    """The roll-call of a run: `federation` is what its folder says of the clients.

    Clients without samples are not missed; in a deployment, those of unknown size are. Who was never asked is known
    only where the sizes of all clients are stored.
    """
    reasons, asked, used, away = dict[str, Counter[int]](), set[int](), set[int](), Counter[int]()
    count = at = lost = 0
    share = 0.0
    for record in rounds:
        one = call_round(record)
        asked.update(one.asked)
        used.update(one.used)
        away.update(record.get("unreachable") or ())
        lost, count = lost + len(one.asked) - len(one.used), count + bool(one.incidents)
        for reason, clients in one.incidents.items():
            reasons.setdefault(reason, Counter()).update(clients)
        if one.lost_share > share:
            share, at = one.lost_share, int(record["round"])
    sizes = federation.get("sizes") or []
    complete = len(sizes) == federation.get("clients")
    known = {client for client, size in enumerate(sizes if complete else ()) if size or deployed}
    deserted = bool(rounds) and not reasons and all(record.get("participants") == [] for record in rounds)
    unreachable = {client: away[client] for client in sorted(away) if client in asked}
    unused, unasked = sorted(asked - used), sorted(known - asked)
    return RollCall(count, reasons, lost, share, at, unused, unasked, deserted, len(rounds), unreachable)


# in words -------------------------------------------------------------------------------------------------------


def percent(share: float) -> str:
    """A share in percent, without decimals where it is not small."""
    return f"{100 * share:.0f}%" if share >= 0.0995 or not share else f"{100 * share:.1f}%"


def name_clients(clients: Sequence[int]) -> str:
    """Clients by their numbers: "client 3", "clients 3, 9", "clients 0, 1, … and 12 more"."""
    shown = ", ".join(map(str, clients[:MOST_NAMED]))
    more = f" and {len(clients) - MOST_NAMED} more" if len(clients) > MOST_NAMED else ""
    return f"client{'s' * (len(clients) != 1)} {shown}{more}"


def round_sentence(record: Mapping[str, Any]) -> str:
    """A round's roll-call: "8 of 10 answers used; no answer: clients 3, 9; 31% of the data of this round lost"."""
    one = call_round(record)
    parts = [f"{len(one.used)} of {count_text(len(one.asked), 'answer')} used"]
    parts += [f"{reason}: {name_clients(clients)}" for reason, clients in one.incidents.items()]
    parts += [f"{percent(one.lost_share)} of the data of this round lost"] if len(one.used) < len(one.asked) else []
    return "; ".join(parts)


def reason_text(reason: str, clients: Counter[int]) -> str:
    """How often a reason occurred and for whom most often: "no answer, 6 times: client 3 (4 times), client 9"."""
    most = sorted(clients.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(
        f"client {client}" + (f" ({count_times(often)})" if often > 1 else "") for client, often in most[:4]
    )
    return f"{reason}, {count_times(clients.total())}: {shown}" + (f", {len(most) - 4} more" if len(most) > 4 else "")


def count_times(count: int) -> str:
    """A number of times: "once", "4 times"."""
    return "once" if count == 1 else f"{count} times"


def data_share(clients: Sequence[int], federation: Mapping[str, Any]) -> str:
    """The share that clients hold of all data, in words; empty where it is not known."""
    sizes, samples = federation.get("sizes") or [], int(federation.get("samples") or 0)
    if not samples or any(client >= len(sizes) for client in clients):
        return ""
    unknown = [client for client in clients if not sizes[client]]
    if len(unknown) == len(clients):
        return ""
    text = f"{percent(sum(sizes[client] for client in clients) / samples)} of all data"
    return f"{text}, without the data of {name_clients(unknown)}, of unknown size" if unknown else text


def never_sentences(call: RollCall, federation: Mapping[str, Any], deployed: bool = False) -> list[str]:
    """Warnings about clients of which nothing is in the model, with their share of all data, or not that of all rounds.

    That some were never asked is said of a deployment, and of a simulation in which answers were lost or nobody took
    part.
    """
    if call.deserted and not deployed:
        return ["In no round did a client take part: the model is the one that the run started with."]
    sentences = []
    whys = [(call.unused, "asked, but no answer was ever used")]
    whys += [(call.unasked, "never asked")] if deployed or not call.empty else []
    for clients, why in whys:
        if clients:
            share = data_share(clients, federation)
            verb = "was" if len(clients) == 1 else "were"
            sentences.append(f"{name_clients(clients)} {verb} {why}" + (f" ({share})" if share else "") + ".")
    if call.unreachable:
        most = sorted(call.unreachable.items(), key=lambda item: (-item[1], item[0]))
        played = count_text(call.played, "round")
        each = ", ".join(f"client {client} in {count} of {played}" for client, count in most[:MOST_NAMED])
        more = f", and {count_text(len(most) - MOST_NAMED, 'other')}" if len(most) > MOST_NAMED else ""
        sentences.append(f"not connected or silent when a round began: {each}{more}.")
    return [sentence[0].upper() + sentence[1:] for sentence in sentences]


def loss_sentence(call: RollCall, rounds: int) -> str:
    """What was lost, in a sentence without its end: "17 answers lost in 7 of 30 rounds, at most 31% …"."""
    answers = f"{count_text(call.lost, 'answer')} lost" if call.lost else "no answer lost"
    text = f"{answers}, incidents in {call.rounds} of {count_text(rounds, 'round')}"
    most = f"; at most {percent(call.largest_share)} of a round's data, in round {call.largest_round}"
    return text + (most if call.largest_round else "")
