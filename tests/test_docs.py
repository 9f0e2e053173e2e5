"""What the README and the documentation show is true: code runs, configurations load, commands exist, links lead somewhere."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from askew.cli.main import app
from askew.core.algorithm import Algorithm
from askew.core.types import Client, Cohort
from askew.data import files
from askew.experiment.config import CHOICES
from askew.experiment.sweep import flatten_spans, grid

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
FENCE = re.compile(r"^```(?P<kind>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A fenced block. Kinds: python runs, py is shown only; a title is the name of the file it stands for."""

    kind: str
    title: str | None
    text: str
    line: int


def blocks(page: Path, kind: str = "") -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = [Block(m["kind"], m["title"], m["text"], text.count("\n", 0, m.start()) + 2) for m in FENCE.finditer(text)]
    return [block for block in found if kind in ("", block.kind)]


def having(kind: str) -> list[Any]:
    return [pytest.param(page, id=page.name) for page in PAGES if blocks(page, kind)]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to work in, and registries that forget what a page registers."""
    monkeypatch.chdir(tmp_path)
    for registry in CHOICES.values():
        monkeypatch.setattr(registry, "members", dict(registry.members))
    yield tmp_path


def lay_out(page: Path, desk: Path) -> None:
    """The files that a page names."""
    for block in blocks(page):
        if block.title:
            (desk / block.title).write_text(block.text, encoding="utf-8")


@pytest.mark.parametrize("page", having("python"))
def test_python_runs(page: Path, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(page, desk)
    module = types.ModuleType(f"page_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(page, "python"):
        source = "\n" * (block.line - 1) + block.text  # so that a traceback names the page's line
        exec(compile(source, str(page), "exec", dont_inherit=True), module.__dict__)


@pytest.mark.parametrize("page", having("toml"))
def test_configurations_load(page: Path, desk: Path) -> None:
    lay_out(page, desk)
    for block in blocks(page, "toml"):
        tables = tomllib.loads(block.text)
        assert grid(tables, flatten_spans(tables.pop("sweep", {})))


@pytest.mark.parametrize("page", having("console"))
def test_commands_and_their_options_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "chosen_folder", None)  # --data-dir takes effect as it is parsed
    verbs: Any = typer.main.get_command(app)
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    lines = [line[2:] for block in blocks(page, "console") for line in block.text.splitlines() if line.startswith("$ ")]
    assert lines
    for line in lines:
        program, *words = shlex.split(line, comments=True)
        if program == "make":
            assert words[0] in targets, line
        if program == "askew":
            command = verbs
            while commands := getattr(command, "commands", None):
                assert words and words[0] in commands, line
                command, words = commands[words[0]], words[1:]
            command.make_context(command.name, words)  # parses, and refuses what it does not know
        if program == "python":
            assert (ROOT / words[0]).is_file(), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_are_there(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in LINK.findall(text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.is_file(), f"{page.name} links to {target}"
        if anchor:
            heads = re.findall(r"^#+ (.+)$", FENCE.sub("", there.read_text(encoding="utf-8")), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads], target


def test_generated_pages_follow_from_the_code() -> None:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for path, text in generate.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is out of date: run python docs/generate.py"
        assert generate.overview() in text or path.name == "configuration.md"


def test_every_hook_declaration_and_field_is_explained() -> None:
    told = set(re.findall(r"`(\w+)[`(]", (DOCS / "add-algorithm.md").read_text(encoding="utf-8")))
    hooks = {name for name, value in vars(Algorithm).items() if not name.startswith("_") and callable(value)}
    names = hooks | set(Algorithm.__annotations__) | {field.name for field in dataclasses.fields(Algorithm)}
    assert names | {*Client._fields, *Cohort._fields} <= told


def test_pictures_are_small_and_need_nothing_from_elsewhere() -> None:
    for picture in (DOCS / "img").iterdir():
        assert picture.stat().st_size < 200_000, picture.name
        if picture.suffix == ".svg":
            text = picture.read_text(encoding="utf-8")
            assert set(re.findall(r"https?://[^\"\s]+", text)) == {"http://www.w3.org/2000/svg"}
