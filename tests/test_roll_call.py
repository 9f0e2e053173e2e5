"""The roll-call: whose answers were lost, in sentences, in `askew show`, at the end of a run and on the page."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from askew.core.records import NO_ANSWER, REPEATED
from askew.engine.answers import NOT_FINITE
from askew.experiment.config import Config
from askew.experiment.roll_call import (
    call_round,
    call_run,
    data_share,
    loss_sentence,
    name_clients,
    never_sentences,
    round_sentence,
)
from askew.experiment.store import Run
from askew.report import page, terminal, write_report

SIZES = [10, 20, 30, 25, 15, 0]
FEDERATION = {"clients": 6, "classes": 3, "shown": 6, "sizes": SIZES, "samples": 100}


def record(t: int, participants: list[int], **incidents: list[int]) -> dict[str, Any]:
    """The record of a round; incidents by a reason whose blanks are underscores."""
    by_reason = {reason.replace("_", " "): clients for reason, clients in incidents.items()}
    lost = {client for reason, clients in by_reason.items() if reason != REPEATED for client in clients}
    share = sum(SIZES[client] for client in lost) / max(1, sum(SIZES[client] for client in {*participants, *lost}))
    more = {"incidents": by_reason, "lost_share": share} if incidents else {}
    numbers = {"train_loss": 1.0, "accuracy": 0.5, "loss": 1.0, "bytes_up": 1, "bytes_down": 1, "seconds": 0.1}
    return {"round": t, "participants": participants, "dropped": len(by_reason.get(NOT_FINITE, [])), **numbers, **more}


LOSSY = [
    record(1, [0, 1]),
    record(2, [0, 3], no_answer=[2], not_finite=[3]),  # 55 of 65 samples
    record(3, [0, 1], no_answer=[2], second_answer=[1]),  # 30 of 60
]


def make_run(rounds: list[dict[str, Any]], engine: str = "sequential") -> Run:
    tables = Config.build({"rounds": len(rounds), "partition": {"clients": 6}}).tables()
    return Run(tables, rounds, {"engine": engine, "device": "cpu", "name": "trial"}, FEDERATION)


def printed(part: RenderableType) -> str:
    console = Console(file=StringIO(), width=100)
    console.print(part)
    assert isinstance(console.file, StringIO)
    return " ".join(console.file.getvalue().split())


def test_a_round_is_called() -> None:
    call = call_round(LOSSY[1])
    assert (call.asked, call.used) == ([0, 2, 3], [0])
    assert round_sentence(LOSSY[0]) == "2 of 2 answers used"
    text = "1 of 3 answers used; no answer: client 2; not finite: client 3; 85% of the data of this round lost"
    assert round_sentence(LOSSY[1]) == text
    assert round_sentence(record(1, [0, 1], second_answer=[1])) == "2 of 2 answers used; second answer: client 1"


def test_one_answer_of_one_round_is_in_the_singular() -> None:
    only = record(1, [0]) | {"unreachable": [0]}
    assert round_sentence(only) == "1 of 1 answer used"
    call = call_run([only], FEDERATION, deployed=True)
    assert never_sentences(call, FEDERATION, deployed=True)[-1].endswith("began: client 0 in 1 of 1 round.")
    assert loss_sentence(call, 1) == "no answer lost, incidents in 0 of 1 round"


def test_a_run_is_called() -> None:
    """Client 5 holds no samples, and is missed only where nobody knows what clients hold."""
    call = call_run(LOSSY, FEDERATION)
    assert (call.rounds, call.lost, call.largest_round, call.unused, call.unasked) == (2, 3, 2, [2, 3], [4])
    assert call.largest_share == 55 / 65 and call.reasons[NO_ANSWER] == {2: 2} and call.reasons[REPEATED] == {1: 1}
    assert call_run(LOSSY, FEDERATION, deployed=True).unasked == [4, 5]
    assert never_sentences(call, FEDERATION) == [
        "Clients 2, 3 were asked, but no answer was ever used (55% of all data).",
        "Client 4 was never asked (15% of all data).",
    ]


def test_clients_without_an_answer_are_missed_in_a_deployment_even_if_nothing_was_lost() -> None:
    call = call_run(LOSSY[:1], FEDERATION)
    assert call.empty and never_sentences(call, FEDERATION) == []
    deployed = call_run(LOSSY[:1], FEDERATION, deployed=True)
    assert never_sentences(deployed, FEDERATION, deployed=True) == [
        "Clients 2, 3, 4, 5 were never asked (70% of all data, without the data of client 5, of unknown size)."
    ]
    assert data_share([5], FEDERATION) == ""
    assert (
        data_share([700], FEDERATION) == "" and name_clients(range(12)) == "clients 0, 1, 2, 3, 4, 5, 6, 7 and 4 more"
    )


def test_clients_that_were_gone_are_named_with_their_rounds() -> None:
    """Nothing is lost then, as only who is connected is asked; client 4 never was, which is said of it anyway."""
    rounds = [record(t, [0, 1, 2, 3, 5][: 5 if t == 1 else 3]) for t in (1, 2, 3)]
    rounds[1]["unreachable"], rounds[2]["unreachable"] = [3, 4], [1, 3, 4]
    text = "Not connected or silent when a round began: client 3 in 2 of 3 rounds, client 1 in 1 of 3 rounds."
    call = call_run(rounds, FEDERATION, deployed=True)
    assert never_sentences(call, FEDERATION, deployed=True) == ["Client 4 was never asked (15% of all data).", text]
    assert text in printed(terminal.summary(make_run(rounds, "flower")))


def test_a_run_in_which_nobody_took_part_is_warned_of() -> None:
    nobody = make_run([record(1, []), record(2, [])])
    warning = "In no round did a client take part: the model is the one that the run started with."
    assert warning in printed(terminal.summary(nobody))
    for rounds in ([nobody.rounds[0], record(2, [0])], [record(1, [0])]):
        assert "take part:" not in printed(terminal.summary(make_run(rounds)))


WARNING = "Clients 2, 3 were asked, but no answer was ever used (55% of all data)."


def test_a_run_with_lost_answers_never_looks_like_a_plain_success() -> None:
    lossy, plain = make_run(LOSSY), make_run([record(1, [0, 1])])
    for text in (printed(terminal.summary(lossy)), printed(terminal.run_details(lossy))):
        assert "3 answers lost, incidents in 2 of 3 rounds; at most 85% of a round's data, in round 2" in text
        assert "no answer, 2 times: client 2 (2 times)" in text and WARNING in text
    assert not re.search(
        "lost|roll-call|never", printed(terminal.summary(plain)) + printed(terminal.run_details(plain))
    )
    figures = lossy.summary()
    assert (figures["lost_answers"], figures["largest_lost_share"], figures["never_used"]) == (3, 55 / 65, [2, 3])
    assert "Answers of clients were lost in 1 of 1 row: askew show RUN" in printed(terminal.comparison([lossy]))


def test_the_page_calls_the_roll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {}
    for name, run in (("lossy", make_run(LOSSY)), ("plain", make_run([record(1, [0, 1])]))):
        monkeypatch.setattr(page, "draw_pictures", lambda groups: [])
        pages[name] = write_report([run], tmp_path / name).read_text(encoding="utf-8").partition("<script")[0]
    assert "Answers of clients are missing in 1 of 1 run, up to 85% of the data of a round" in pages["lossy"]
    assert WARNING in pages["lossy"] and "no answer, 2 times: client 2 (2 times)" in pages["lossy"]
    assert "Lost answers" in pages["lossy"] and "oll-call" not in pages["plain"] and "Lost" not in pages["plain"]
