"""The two Flower apps, called as Flower calls them, with messages through the bytes that its processes exchange."""

from __future__ import annotations

import os
import select
import threading
import tomllib
from datetime import UTC, datetime
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from in_process import VARIANTS, assert_same_rounds, models_equal, simulate, slow_except, small_run, write_config
from safetensors.torch import load_file

from askew.errors import ConfigError, EngineError
from askew.experiment.store import load
from askew.flower import FLOWER, client_state, launch, require_flower
from askew.flower.app import PACKAGE, write_app
from askew.flower.rules import DeploymentRules

pytest.importorskip("flwr", reason="needs Flower: pip install -e '.[flower]'")

import httpx
from flower_grid import InProcessGrid, run_apps, task_identity  # noqa: F401 - the fixture is used by name
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import FLOWER_LOGGER
from flwr.supercore.inflatable import inflatable_utils

from askew.flower import server_app as server_side
from askew.flower.client_app import client_app
from askew.flower.launch import FIRST_WAIT_SECONDS, ask_again_soon, wait_for_news
from askew.flower.server_app import server_app

pytestmark = pytest.mark.usefixtures("task_identity")
STATEFUL = ("scaffold", "fedbn", "fedga", "moon")
STORES = ("context", "file", "large context")
METHODS = ("fedavg", "scaffold", "fedbn", "fedga", "moon", "fedpdc", "lossbias")
FAST = [
    ("scaffold", "context"),
    ("fedga", "context"),
    ("fedbn", "file"),
    ("fedga", "large context"),
    ("fedavg", "file"),
]


@pytest.mark.parametrize("case", slow_except(FAST, product(METHODS, STORES)), ids="-".join)
def test_the_apps_play_the_simulators_run(
    case: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's state is in Flower's context, or in a file if the node's configuration names one or it is large."""
    key, store = case
    if store == "large context":
        monkeypatch.setattr(client_state, "MAX_CONTEXT", 0)
    tables = small_run(VARIANTS[key])
    grid = run_apps(tables, tmp_path, **({"state": str(tmp_path / "home" / "askew")} if store == "file" else {}))
    deployed, simulated = load(next((tmp_path / "runs").iterdir())), simulate(tables)
    assert_same_rounds(deployed, simulated)
    assert deployed.folder is not None
    assert models_equal(load_file(deployed.folder / "model.safetensors"), simulated.model)
    in_context = any("askew" in context.state for context in grid.contexts.values())
    files = {path.name for path in tmp_path.glob("home/askew/*/*")}
    assert in_context == (store == "context" and key in STATEFUL)
    all_files = {f"client-{i}.safetensors" for i in range(5)}
    kept = {name for name in files if "answers" not in name}
    assert kept == (all_files if store != "context" and key in STATEFUL else set())
    messages = 2 * 3 if key == "fedga" else 3  # of a round
    for record in deployed.rounds:  # names, numbers and headers of arrays: less than a kilobyte a message
        assert 0 < record["wire_down"] - record["bytes_down"] < messages * 1024
        assert 0 < record["wire_up"] - record["bytes_up"] < messages * 1024


def test_a_clients_error_is_one_sentence_in_the_servers_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(server_side, "log", lambda level, text, *more: logged.append(text))
    path = write_config(small_run(VARIANTS["fedavg"]), tmp_path / "app")
    grid = InProcessGrid(client_app(path), 5, **{"partition-id": 9})
    with pytest.raises(EngineError, match="none of the 5 connected nodes can take part") as raised:
        server_app(path)(grid, Context(1, 0, {}, RecordDict(), {"out": str(tmp_path), "wait": 2.0}))
    assert "the node's partition-id must be its client number from 0 to 4, got 9" in logged[0]
    # what Flower logs about an app that failed: the sentence, and no traceback
    record = FLOWER_LOGGER.makeRecord("", 40, "", 0, "%s raised an exception", ("ServerApp",), raised._excinfo)
    assert FLOWER_LOGGER.filter(record) and record.getMessage() == str(raised.value) and record.exc_info is None


def test_a_message_that_flower_cannot_read_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does an error whose reason is a page long."""
    logged: list[str] = []
    monkeypatch.setattr(server_side, "log", lambda level, text, *more: logged.append(text % more))
    message = Message(RecordDict(), 7, "train")
    message.metadata.__dict__["_message_id"] = "one"
    reply = Message(Error(2, "a\nb" + "c" * 10**6), reply_to=message)

    class FailingGrid:
        def pull_messages(self, message_ids: list[str]) -> list[Message]:
            if message_ids == ["malformed"]:
                raise ValueError("no\nobject")
            return [reply]

    transport = server_side.GridTransport(cast(Any, FailingGrid()))
    transport.asked["one"] = 7
    assert transport.receive(["malformed"]) == {} and "Flower cannot read (no object)" in logged[0]
    answer = transport.receive(["one"])["one"]
    assert isinstance(answer, str) and answer.startswith("a bccc") and len(answer) == 1000


def test_an_answer_of_another_node_is_refused() -> None:
    """Nodes can be told apart by their keys alone, so a node must not answer for another."""
    message = Message(RecordDict(), 7, "train")
    message.metadata.__dict__["_message_id"] = "one"
    grid = SimpleNamespace(pull_messages=lambda message_ids: [Message(RecordDict(), reply_to=message)])
    transport = server_side.GridTransport(cast(Any, grid))
    transport.asked["one"] = 8
    answer = transport.receive(["one"])["one"]
    assert isinstance(answer, str) and answer.startswith("the answer came from node 7, and node 8 was asked; ")
    assert transport.receive(["another"]) == {}  # nobody asked for this reply


def test_a_part_that_is_still_on_its_way_is_asked_for_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower itself waits a second, three times in every phase."""
    functions = (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree)
    for function in functions:
        monkeypatch.setattr(function, "__kwdefaults__", dict(function.__kwdefaults__))
    ask_again_soon()
    waited: list[float] = []

    class RecordedEvent(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout or 0.0)
            return False

    monkeypatch.setattr(inflatable_utils, "threading", SimpleNamespace(Event=RecordedEvent, Lock=threading.Lock))
    asked: list[str] = []

    def pull(name: str) -> bytes:
        asked.append(name)
        if len(asked) < 4:
            raise inflatable_utils.ObjectUnavailableError(name)
        return b"part"

    assert inflatable_utils.pull_objects(["a"], pull) == {"a": b"part"}
    assert len(waited) == 3 and sum(waited) < 0.5
    assert {function.__kwdefaults__["initial_backoff"] for function in functions} == {FIRST_WAIT_SECONDS}


def test_a_task_is_looked_for_at_once_when_a_node_tells_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte in the pipe ends one wait; where the node has ended, the pipe says no more."""
    slept: list[float] = []
    monkeypatch.setattr(launch.time, "sleep", slept.append)
    news, tell = os.pipe()
    os.write(tell, b"..")
    for _ in range(2):
        wait_for_news(news, 600.0)
    assert select.select([news], [], [], 0)[0] == [] and slept == []
    wait_for_news(news, 0.001)
    os.close(tell)
    wait_for_news(news, 600.0)
    assert slept == [600.0]
    os.close(news)


def test_state_that_grows_too_large_for_the_context_is_found_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two phases a client stores more than between rounds."""
    monkeypatch.setattr(client_state, "MAX_CONTEXT", 100)
    store = client_state.ContextStore(RecordDict(), client_state.FileStore(tmp_path / "state"))
    history = client_state.StateHistory(store, {"c": torch.zeros(2)}, 0)
    history.save_round(0, 1, {"c": torch.full((2,), 1.0)})
    history.save_phase(1, 2, 1, {"x": torch.ones(99)})
    assert len(history.load_phase(2, 1)["x"]) == 99 and history.load_round(1)["c"][0] == 1
    history.save_round(1, 2, {"c": torch.full((2,), 2.0)})
    assert (history.load_round(1)["c"][0], history.load_round(2)["c"][0]) == (1, 2)


def test_wrong_rules_are_refused(tmp_path: Path) -> None:
    app = server_app(write_config(small_run(VARIANTS["fedavg"]), tmp_path / "app"))
    with pytest.raises(ConfigError, match="deployment: timeout must be > 0"):
        app(InProcessGrid(ClientApp(), 0), Context(1, 0, {}, RecordDict(), {"timeout": -1.0}))


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")
def test_a_written_app_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts import, its plugin and its data module are copied, and Flower accepts it."""
    from flwr.cli.build import build_fab_from_disk

    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "import askew\nfrom askew.algorithms import FedAvg\n\n@askew.register('mine')\nclass Mine(FedAvg):\n    pass\n"
    )
    data = tmp_path / "own.py"
    data.write_text(
        "import torch\n\ndef client(node):\n    return (torch.randn(9, 8), torch.arange(9) % 3), None, None\n"
    )
    tables = {"plugins": [str(plugin)]} | small_run({"name": "fedavg"}) | {"algorithm": {"name": "mine"}}
    rules = DeploymentRules(out=str(tmp_path / "runs"), wait=1.0)
    write_app(write_config(tables, tmp_path / "config"), tmp_path / "app", data, rules)
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert project["config"] == rules.table()
    assert build_fab_from_disk(tmp_path / "app")
    monkeypatch.syspath_prepend(str(tmp_path / "app"))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    plugin.unlink()
    client, server = (import_module(f"{PACKAGE}.{side}").app for side in ("client", "server"))
    server(InProcessGrid(client, 5), Context(1, 0, {}, RecordDict(), project["config"]))
    run = load(next((tmp_path / "runs").iterdir()))
    assert run.finished and run.algorithm == "mine" and run.config["data"]["name"] == "own"
    with pytest.raises(ConfigError, match="holds other files"):
        write_app(tmp_path / "config" / "run.toml", tmp_path)


def test_the_tested_versions_of_flower_are_those_of_the_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["flower"] == [FLOWER]
    require_flower()


def test_a_program_that_is_interrupted_while_it_starts_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(name: str, options: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "run_program", interrupt)
    monkeypatch.setattr(launch, "end_with_starter", lambda: None)
    monkeypatch.setattr("sys.argv", ["launch.py", "flower-superexec"])
    with pytest.raises(SystemExit) as ended:
        launch.main()
    assert ended.value.code == 130


def test_a_node_that_the_superlink_refuses_says_what_may_be_the_cause(capsys: pytest.CaptureFixture[str]) -> None:
    """Not so one whose request failed otherwise, or that never came so far."""
    answers = {412: "activate-node", 401: "activate-node", 503: "pull-messages"}
    for status, name in answers.items():
        request = httpx.Request("POST", f"http://127.0.0.1:8000/v1/fleet/{name}")
        response = httpx.Response(status, request=request)
        launch.explain_refusal(httpx.HTTPStatusError("", request=request, response=response))
        said = capsys.readouterr().out
        assert ("its key is not registered" in said and "was killed" in said) if status == 412 else not said
    launch.explain_refusal(httpx.ConnectError("refused"))
    launch.explain_refusal(None)
    assert not capsys.readouterr().out


def test_an_app_that_starts_slowly_is_not_started_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower would take it for dead after half a minute. One that runs may be silent no longer than in Flower."""
    from flwr.supercore.corestate import in_memory_corestate, sql_corestate
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

    for module in (in_memory_corestate, sql_corestate):
        for name in ("HEARTBEAT_DEFAULT_INTERVAL", "HEARTBEAT_PATIENCE"):
            monkeypatch.setattr(module, name, getattr(module, name))
        silence = module.HEARTBEAT_PATIENCE * module.HEARTBEAT_DEFAULT_INTERVAL
        launch.give_time_to_start(module.__name__)
        assert silence == module.HEARTBEAT_PATIENCE * module.HEARTBEAT_DEFAULT_INTERVAL
    state, begun = InMemoryNodeState(cast(Any, None)), datetime.now(UTC)
    task = state.create_task("flwr-clientapp", 1)
    assert task is not None and state.claim_task(task)
    assert (state.task_token_store[task].active_until - begun).total_seconds() >= launch.START_SECONDS
