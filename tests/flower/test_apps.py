"""The two apps, called as Flower calls them, with every message through the bytes that its processes exchange."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hands import VARIANTS, assert_same_rounds, page, same_model, simulated, written
from safetensors.torch import load_file

from askew.errors import ConfigError, EngineError
from askew.experiment.store import load
from askew.flower import FLOWER, require_flower
from askew.flower import client_state as keep
from askew.flower.app import PACKAGE, write_app
from askew.flower.server import Rules

flwr = pytest.importorskip("flwr", reason="needs the extra flower")

from flwr.app import Context, Message, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid  # noqa: E402
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects  # noqa: E402
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from askew.flower import server_app as server_side  # noqa: E402
from askew.flower.client_app import client_app  # noqa: E402
from askew.flower.server_app import server_app  # noqa: E402


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Flower sets in the process of an app."""
    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)


def sent(message: Message) -> Message:
    """What arrives."""
    contents = {name: thing.deflate() for name, thing in get_all_nested_objects(message).items()}
    arrived = inflate_object_from_contents(message.object_id, contents)
    assert isinstance(arrived, Message)
    arrived.metadata.__dict__["_message_id"] = message.object_id
    return arrived


class Within(Grid):
    """Flower's grid within this process: nodes with contexts that last."""

    def __init__(self, app: ClientApp, clients: int, **node: Any) -> None:
        self.app, self.replies = app, dict[str, Message]()
        self.contexts = {
            7 * i + 1: Context(1, 7 * i + 1, {"partition-id": i, **node}, RecordDict(), {}) for i in range(clients)
        }

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *told: Any, **more: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return self.contexts

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            arrived = sent(message)
            ids.append(arrived.metadata.message_id)
            self.replies[ids[-1]] = sent(self.app(arrived, self.contexts[arrived.metadata.dst_node_id]))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(id) for id in message_ids if id in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError


def play(tables: dict[str, Any], tmp_path: Path, **node: Any) -> Within:
    path = written(tables, tmp_path / "app")
    grid = Within(client_app(path), 5, **node)
    rules = {"out": str(tmp_path / "runs"), "wait": 1.0}
    server_app(path)(grid, Context(1, 0, {}, RecordDict(), rules))
    return grid


@pytest.mark.parametrize("key", ["fedavg", "scaffold", "fedbn", "fedga", "moon", "fedpdc", "lossbias"])
@pytest.mark.parametrize("where", ["context", "file", "large"])
def test_the_apps_play_the_simulators_run(
    key: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "large":
        monkeypatch.setattr(keep, "SMALL", 0)
        monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    tables = page(VARIANTS[key])
    grid = play(tables, tmp_path, **({"state": str(tmp_path / "home" / "askew")} if where == "file" else {}))
    ours, theirs = load(next((tmp_path / "runs").iterdir())), simulated(tables)
    assert_same_rounds(ours, theirs)
    assert ours.folder is not None and same_model(load_file(ours.folder / "model.safetensors"), theirs.model)
    stateful = key in ("scaffold", "fedbn", "fedga", "moon")
    assert any("askew" in context.state for context in grid.contexts.values()) == (where == "context" and stateful)
    kept = [path.name for path in tmp_path.glob("home/askew/*/*")]
    assert {*kept} == ({f"client-{i}.safetensors" for i in range(5)} if where != "context" and stateful else set())
    for record in ours.rounds:  # names, numbers and headers of arrays: less than a kilobyte a message
        messages = 2 * 3 if key == "fedga" else 3
        assert (
            0
            < record["wire_down"] - record["bytes_down"]
            < messages * 1024
            > record["wire_up"] - record["bytes_up"]
            > 0
        )


def test_a_clients_mistake_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(server_side, "log", lambda level, text, *more: said.append(text))
    path = written(page(VARIANTS["fedavg"]), tmp_path / "app")
    with pytest.raises(EngineError, match="0 of 5 clients came"):
        server_app(path)(
            Within(client_app(path), 5, **{"partition-id": 9}),
            Context(1, 0, {}, RecordDict(), {"out": str(tmp_path), "wait": 0.1}),
        )
    assert "the node's partition-id must be its client number from 0 to 4, got 9" in said[0]


def test_what_grows_too_large_for_the_context_is_found_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two phases a client keeps more than between rounds."""
    monkeypatch.setattr(keep, "SMALL", 100)
    place = keep.InContext(RecordDict(), keep.InFile(tmp_path / "state"))
    kept = keep.Kept(place, {"c": torch.zeros(2)}, 0)
    kept.keep(0, 1, {"c": torch.full((2,), 1.0)})
    kept.keep_between(1, 2, 1, {"x": torch.ones(99)})
    assert len(kept.between(2, 1)["x"]) == 99 and kept.after(1)["c"][0] == 1
    kept.keep(1, 2, {"c": torch.full((2,), 2.0)})
    assert (kept.after(1)["c"][0], kept.after(2)["c"][0]) == (1, 2)


def test_false_rules_are_refused(tmp_path: Path) -> None:
    app = server_app(written(page(VARIANTS["fedavg"]), tmp_path / "app"))
    with pytest.raises(ConfigError, match="deployment: timeout must be > 0"):
        app(Within(ClientApp(), 0), Context(1, 0, {}, RecordDict(), {"timeout": -1.0}))


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")
def test_a_written_app_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts import, its plugin and its data module go along, and Flower accepts it."""
    from flwr.cli.build import build_fab_from_disk

    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "import askew\nfrom askew.algorithms import FedAvg\n\n@askew.register('mine')\nclass Mine(FedAvg):\n    pass\n"
    )
    data = tmp_path / "own.py"
    data.write_text(
        "import torch\n\ndef client(node):\n    return (torch.randn(9, 8), torch.arange(9) % 3), None, None\n"
    )
    tables = {"plugins": [str(plugin)]} | page({"name": "fedavg"}) | {"algorithm": {"name": "mine"}}
    write_app(written(tables, tmp_path / "page"), tmp_path / "app", data, Rules(out=str(tmp_path / "runs"), wait=1.0))
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert project["config"] == Rules(out=str(tmp_path / "runs"), wait=1.0).table()
    assert build_fab_from_disk(tmp_path / "app")
    monkeypatch.syspath_prepend(str(tmp_path / "app"))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    from importlib import import_module

    plugin.unlink()
    client, server = (import_module(f"{PACKAGE}.{side}").app for side in ("client", "server"))
    grid = Within(client, 5)
    server(grid, Context(1, 0, {}, RecordDict(), project["config"]))
    run = load(next((tmp_path / "runs").iterdir()))
    assert run.finished and run.algorithm == "mine" and run.config["data"]["name"] == "own"
    with pytest.raises(Exception, match="holds other files"):
        write_app(tmp_path / "page" / "run.toml", tmp_path)


def test_the_tested_range_is_the_extras() -> None:
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["flower"] == [FLOWER]
    require_flower()
