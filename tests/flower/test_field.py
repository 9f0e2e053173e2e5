"""What can happen in the field, tried by hand: lost, late and false answers, killed servers, clients that come and go."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hands import VARIANTS, Hands, assert_same_rounds, deployed, page, same_model, simulated, written
from safetensors.torch import load_file

from askew.errors import ConfigError, EngineError, StoreError
from askew.experiment.config import Config
from askew.experiment.launch import run_config
from askew.experiment.store import load
from askew.flower.client_state import InFile, InMemory, Kept
from askew.flower.deployment_data import read_page
from askew.flower.server import Rules, serve
from askew.flower.wire import Payload

STATEFUL = ["scaffold", "fedbn", "moon", "feddc"]
Change = Callable[[str, int, Payload, Payload], Any]


def traced(key: str, rounds: list[list[int]], tmp_path: Path) -> dict[str, Any]:
    """A run in which those come whom a list names."""
    path = tmp_path / f"trace-{len(list(tmp_path.glob('trace-*')))}.json"
    path.write_text(json.dumps(rounds))
    return page(VARIANTS[key], rounds=len(rounds), participation={"name": "trace", "path": str(path)})


EVERYBODY = [[0, 1, 2], [1, 2, 3], [0, 1, 4], [1, 2, 3]]
WITHOUT = [[0, 1, 2], [2, 3], [0, 1, 4], [1, 2, 3]]  # client 1 is missing in round 2


def in_round_2(change: Callable[[Payload], Any]) -> Change:
    """Client 1's answer of round 2 is changed."""
    return lambda kind, client, letter, told: (
        change(told) if (kind, client, letter.numbers.get("round")) == ("train", 1, 2) else told
    )


def spoiled(told: Payload, **numbers: Any) -> Payload:
    return told._replace(numbers={**told.numbers, **numbers})


@pytest.mark.parametrize("key", STATEFUL)
def test_a_client_whose_answer_is_lost_goes_on_from_its_state_before(key: str, tmp_path: Path) -> None:
    """It has trained, and must forget that it has."""
    ours, _, said = deployed(traced(key, EVERYBODY, tmp_path), tmp_path, change=in_round_2(lambda told: None))
    theirs = simulated(traced(key, WITHOUT, tmp_path))
    assert same_model(ours.model, theirs.model)
    assert [r["participants"] for r in ours.rounds] == WITHOUT
    assert [r.get("absent", 0) for r in ours.rounds] == [0, 1, 0, 0] and not any(r["dropped"] for r in ours.rounds)
    assert said == ["round 2: client 1: no answer within 0.2 s, or enough others came before"]
    assert [r["bytes_up"] for r in ours.rounds] == [r["bytes_up"] for r in theirs.rounds]
    assert ours.rounds[1]["bytes_down"] == theirs.rounds[1]["bytes_down"] * 3 / 2


@pytest.mark.parametrize("key", ["scaffold", "fedbn"])
def test_an_answer_that_is_not_finite_is_dropped_by_the_servers_own_guard(key: str, tmp_path: Path) -> None:
    broken = lambda told: told._replace(tensors={n: torch.full_like(t, torch.nan) for n, t in told.tensors.items()})
    ours, _, said = deployed(traced(key, EVERYBODY, tmp_path), tmp_path, change=in_round_2(broken))
    assert same_model(ours.model, simulated(traced(key, WITHOUT, tmp_path)).model)
    assert [r["dropped"] for r in ours.rounds] == [0, 1, 0, 0] and "absent" not in ours.rounds[1]
    assert len(said) == 1 and "round 2: client 1 sent numbers that are not finite" in said[0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda told: "it broke", "client 1: it broke"),
        (lambda told: spoiled(told, round=1), "client 1: this is of round 1, expected round 2"),
        (lambda told: spoiled(told, client=2), "client 1: this is of client 2, expected client 1"),
        (lambda told: spoiled(told, phase=1), "client 1: this is of phase 1, expected phase 0"),
        (lambda told: spoiled(told, samples=10**9), "client 1: this is of samples 1000000000, expected samples"),
        (lambda told: spoiled(told, loss="small"), "client 1: loss must be of type float"),
        (lambda told: told._replace(numbers={}), "client 1: client must be of type int"),
        (
            lambda told: told._replace(tensors={}),
            "client 1 sent tensors named none at all, expected 'buffers', 'up.dc', 'up.delta'",
        ),
        (lambda told: told._replace(tensors=told.tensors | {"more": torch.ones(1)}), "'more'"),
        (lambda told: told._replace(tensors={n: t.double() for n, t in told.tensors.items()}), "came, expected <f4"),
        (lambda told: told._replace(tensors={n: t[:-1] for n, t in told.tensors.items()}), "came, expected <f4"),
        (lambda told: told._replace(tensors={n: torch.zeros(10**5) for n in told.tensors}), "bytes came, at most"),
    ],
)
def test_garbage_is_left_out_with_a_sentence(change: Callable[[Payload], Any], sentence: str, tmp_path: Path) -> None:
    ours, _, said = deployed(traced("scaffold", EVERYBODY, tmp_path), tmp_path, change=in_round_2(change))
    assert same_model(ours.model, simulated(traced("scaffold", WITHOUT, tmp_path)).model)
    assert len(said) == 1 and sentence in said[0], said


def test_a_round_that_nobody_answers_changes_nothing(tmp_path: Path) -> None:
    silence: Change = lambda kind, client, letter, told: (
        None if letter.numbers.get("round") == 2 and kind == "train" else told
    )
    ours, _, _ = deployed(traced("scaffold", EVERYBODY, tmp_path), tmp_path, change=silence)
    assert (ours.rounds[1]["participants"], ours.rounds[1]["absent"], ours.rounds[1]["train_loss"]) == ([], 3, None)
    assert ours.rounds[1]["bytes_up"] == 0 < ours.rounds[1]["bytes_down"]
    assert ours.finished and same_model(
        ours.model, simulated(traced("scaffold", [EVERYBODY[0], [], *EVERYBODY[2:]], tmp_path)).model
    )


def test_too_few_answers_throw_a_round_away(tmp_path: Path) -> None:
    ours, _, said = deployed(
        traced("scaffold", EVERYBODY, tmp_path), tmp_path, {"answers": 3}, change=in_round_2(lambda told: None)
    )
    assert (ours.rounds[1]["dropped"], ours.rounds[1]["absent"]) == (2, 1)
    assert "round 2 is thrown away: 2 answers came, at least 3 are needed." in said
    assert same_model(ours.model, simulated(traced("scaffold", [EVERYBODY[0], [], *EVERYBODY[2:]], tmp_path)).model)


def test_spare_clients_stand_in(tmp_path: Path) -> None:
    """As many as were wanted are waited for: here the first three of five, in the order of the post."""

    class OneByOne(Hands):
        def collect(self, names: Any) -> Any:
            return super().collect(list(names)[:1])

    config = read_page(written(page(VARIANTS["scaffold"]), tmp_path / "app"))
    run = serve(
        config, OneByOne(config, tmp_path / "c"), Rules(out=str(tmp_path / "runs"), spare=1.0), None, lambda text: None
    )
    assert [(r["participants"], r["absent"]) for r in run.rounds] == [([0, 1, 2], 2)] * 4  # all five are asked
    theirs = simulated(traced("scaffold", [[0, 1, 2]] * 4, tmp_path))
    assert same_model(run.model, theirs.model)


# servers and clients that end and come again --------------------------------------------------------------------


@pytest.mark.parametrize("key", [*STATEFUL, "fedga", "fedvarp", "fedpdc"])
@pytest.mark.parametrize("when", ["asking", "answering"])
def test_a_killed_server_goes_on_from_its_last_round(key: str, when: str, tmp_path: Path) -> None:
    tables = traced(key, EVERYBODY, tmp_path)

    def cut(kind: str, client: int, letter: Payload, told: Payload) -> Payload:
        if kind == "train" and letter.numbers["round"] == 3 and client == (0 if when == "asking" else 4):
            raise KeyboardInterrupt
        return told

    with pytest.raises(KeyboardInterrupt):
        deployed(tables, tmp_path, change=cut)
    folder = next((tmp_path / "runs").iterdir())
    assert load(folder).facts["state"] == "interrupted" and len(load(folder).rounds) == 2
    ours, post, said = deployed(tables, tmp_path)
    theirs = simulated(tables)
    assert said == [] and not any(
        letter.numbers.get("round") in (1, 2) for kind, _, letter in post.log if kind == "train"
    )
    assert_same_rounds(ours, theirs)
    assert same_model(load_file(folder / "model.safetensors"), theirs.model)


def test_a_finished_run_is_not_played_again_unless_it_is_asked_for(tmp_path: Path) -> None:
    tables = page(VARIANTS["moon"])
    first, _, _ = deployed(tables, tmp_path)
    again, post, said = deployed(tables, tmp_path)
    assert post.log == [] and "holds this run already" in said[0] and len(again.rounds) == len(first.rounds)
    fresh, post, _ = deployed(tables, tmp_path, {"fresh": True})  # what clients still have of the first run is not used
    assert post.log and same_model(fresh.model, first.model)


def test_a_client_that_lost_its_state_says_so_and_is_left_out(tmp_path: Path) -> None:
    def lose(kind: str, client: int, letter: Payload, told: Payload) -> Payload:
        (tmp_path / "clients" / "client-1.safetensors").unlink(missing_ok=True)
        return told

    ours, _, said = deployed(traced("scaffold", EVERYBODY, tmp_path), tmp_path, change=lose)
    assert [r.get("absent", 0) for r in ours.rounds] == [0, 1, 1, 1]
    assert "client 1 has no state of round 1, which the server has used" in said[0] and 'state="FOLDER"' in said[0]


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    def damage(kind: str, client: int, letter: Payload, told: Payload) -> Payload:
        if kind == "train" and client == 1:
            (tmp_path / "clients" / "client-1.safetensors").write_bytes(b"nothing")
        return told

    _, _, said = deployed(traced("moon", EVERYBODY, tmp_path), tmp_path, change=damage)
    assert "client-1.safetensors cannot be read" in said[0]


class Crowd(Hands):
    """Nodes that come and go, by the number of the exchange; what a node says of itself may be false."""

    plan: Callable[[int], list[int]]
    claims: dict[int, dict[str, Any]]
    calls = 0

    def nodes(self) -> list[int]:
        self.calls += 1
        return self.plan(self.calls)

    def node(self, number: int) -> dict[str, Any]:
        return self.claims.get(number, {"partition-id": number % 100})


def crowd(
    tables: dict[str, Any], tmp_path: Path, plan: Callable[[int], list[int]], claims: Any = None, **rules: Any
) -> Any:
    config = read_page(written(tables, tmp_path / "app"))
    post, said = Crowd(config, tmp_path / "clients"), list[str]()
    post.plan, post.claims = plan, claims or {}
    run = serve(
        config,
        post,
        Rules.build({"out": str(tmp_path / "runs"), "wait": 0.5, "timeout": 0.2, **rules}),
        None,
        said.append,
    )
    return run, post, said


def test_a_client_may_join_later_and_come_again_as_another_node(tmp_path: Path) -> None:
    """Client 4 is there from round 3 on, client 1 is another node by then."""
    tables = traced("scaffold", EVERYBODY, tmp_path)
    early, late = [100, 101, 102, 103], [100, 201, 102, 103, 104]
    ours, post, said = crowd(tables, tmp_path, lambda call: early if call <= 3 else late, nodes=4)
    theirs = simulated(tables)
    assert said == [] and same_model(ours.model, theirs.model)
    assert_same_rounds(ours, theirs)
    assert [client for kind, client, _ in post.log if kind == "query"] == [0, 1, 2, 3, 101, 4]


def test_participants_are_drawn_from_the_clients_that_are_there(tmp_path: Path) -> None:
    ours, _, _ = crowd(
        page(VARIANTS["fedavg"]), tmp_path, lambda call: [100, 103, 104] if call <= 3 else [100, 102], nodes=2
    )
    assert [r["participants"] for r in ours.rounds] == [[0, 3, 4], [0, 3, 4], [0, 2], [0, 2]]
    assert not any("absent" in r for r in ours.rounds)


def test_without_clients_no_round_is_played(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"2 of 5 clients came within 0\.5 s; start the others"):
        crowd(page(VARIANTS["fedavg"]), tmp_path, lambda call: [100, 101])
    with pytest.raises(EngineError, match="0 of 1 clients came"):
        crowd(page(VARIANTS["fedavg"]), tmp_path, lambda call: [100, 101] if call <= 2 else [], nodes=2)
    assert len(load(next((tmp_path / "runs").iterdir())).rounds) == 1


@pytest.mark.parametrize(
    ("claim", "sentence"),
    [
        ({}, "partition-id must be its client number from 0 to 4, got None"),
        ({"partition-id": 5}, "partition-id must be its client number from 0 to 4, got 5"),
        ({"partition-id": "0"}, "got '0'"),
        ({"partition-id": 4, "num-partitions": 7}, "num-partitions is 7, and partition.clients is 5"),
    ],
)
def test_a_node_that_does_not_say_who_it_is_is_left_out(claim: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    ours, post, said = crowd(
        page(VARIANTS["fedavg"]), tmp_path, lambda call: [100, 101, 102, 103, 110], {110: claim}, nodes=4
    )
    assert (
        ours.finished and len(said) == 3 and all(sentence in text and "node 110 is left out" in text for text in said)
    )
    assert sum(kind == "query" for kind, _, _ in post.log) == 4 + 3


def test_two_nodes_of_one_number(tmp_path: Path) -> None:
    """The one that came last is asked."""
    ours, post, said = crowd(page(VARIANTS["fedavg"]), tmp_path, lambda call: [100, 101, 102, 103, 104, 201])
    assert said == ["client 1 is now node 201 and no longer node 101."]
    assert {client for kind, client, _ in post.log if kind == "train"} <= {0, 2, 3, 4, 101} and ours.finished


# what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        (page({"name": "fedbn", "eval": "server_mean"}), 'set algorithm.eval = "clients"'),
        (page(VARIANTS["fedbn"], evaluation={"spread": True}), "evaluation.spread needs the clients' samples"),
    ],
)
def test_what_real_clients_cannot_do_is_refused(tables: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_page(written(tables, tmp_path))


def test_a_letter_of_another_run_is_refused_by_the_client(tmp_path: Path) -> None:
    config = read_page(written(page(VARIANTS["fedavg"]), tmp_path))
    told = Hands(config, tmp_path).answer(
        "train", 101, Hands(config, tmp_path).carry(Payload({"mark": "other", "client": 1, "classes": 3}, {}))
    )
    assert isinstance(told, str) and "the server: this is of mark other, expected mark" in told


def test_the_folder_of_a_deployment_is_none_of_a_simulations(tmp_path: Path) -> None:
    config = read_page(written(page(VARIANTS["fedavg"]), tmp_path))
    assert config.name().endswith("-flower")


# what a client keeps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [False, True])
def test_a_client_keeps_the_state_used_last_and_the_latest(file: bool, tmp_path: Path) -> None:
    place = InFile(tmp_path / "deep" / "state.safetensors") if file else InMemory()
    kept = Kept(place, {"c": torch.zeros(2)}, 1)
    assert torch.equal(kept.after(0)["c"], torch.zeros(2))
    kept.keep(0, 3, {"c": torch.full((2,), 3.0)})
    kept.keep(3, 5, {"c": torch.full((2,), 5.0)})
    assert [kept.after(t)["c"][0].item() for t in (3, 5)] == [3, 5]
    kept.keep(3, 7, {"c": torch.full((2,), 7.0)})  # round 5 was not used
    assert [kept.after(t)["c"][0].item() for t in (3, 7)] == [3, 7]
    with pytest.raises(StoreError, match="client 1 has no state of round 5"):
        kept.after(5)
    kept.keep_between(7, 8, 1, {"x": torch.ones(1)})
    assert kept.between(8, 1)["x"] == 1 and kept.after(7)["c"][0] == 7
    with pytest.raises(StoreError, match="has not done phase 0 of round 9"):
        kept.between(9, 1)


def test_the_command_line_reads_a_deployed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from askew.cli.main import main

    tables = page(VARIANTS["scaffold"])
    run, _, _ = deployed(tables, tmp_path)
    theirs = run_config(Config.build(tables), tmp_path / "runs")
    for words in (["show", str(run.folder)], ["compare", str(run.folder), str(theirs.folder)]):
        assert main(words) == 0
    told = capsys.readouterr().out
    assert "flower" in told and "5 clients, each with its own data" in told
