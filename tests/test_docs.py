"""What the README and the documentation show is true: code runs and prints what is shown, configurations load, commands
exist, links lead somewhere.
"""

from __future__ import annotations

import ast
import dataclasses
import html
import importlib.util
import inspect
import io
import json
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
import types
from collections.abc import Collection, Iterator
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

import askew
from askew.cli.main import COMMANDS, load_command, main
from askew.cli.training import DEMO_ROUNDS, DEMO_SEEDS
from askew.core.algorithm import Algorithm
from askew.core.types import Client, Cohort
from askew.data import files
from askew.experiment import demo
from askew.experiment.config import CHOICES
from askew.experiment.launch import run_all
from askew.experiment.sweep import flatten_spans, grid

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(?P<kind>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?%?(?!\w)")
# Processors sum in different orders, so that training differs in the last digits: a few of the 360 test images of the
# digits may be classified otherwise, each of which is 0.28 points, and the best round may be another one.
PERCENT_POINTS = 0.5  # that a printed percentage may differ from the shown one
RELATIVE = 0.1  # of the shown number, that a number of rounds or another measured one may differ
FRACTION = 0.02  # that a number with decimals may differ in any case
ROUNDING = 1e-9  # below, a number is an error of rounding, of which only the size is comparable


class Block(NamedTuple):
    """A fenced block. Kinds: python runs, py is shown only; a title is the name of the file it stands for."""

    kind: str
    title: str | None
    text: str
    line: int
    output: str | None  # the text block that follows at once: what the code prints


def blocks(page: Path, kind: str = "") -> list[Block]:
    """The fenced blocks of a page, all or those of one kind."""
    text = page.read_text(encoding="utf-8")
    result = []
    for block in FENCE.finditer(text):
        after = FENCE.match(text, block.end() + 2)  # after one empty line
        output = after["text"] if after and after["kind"] == "text" else None
        line = text.count("\n", 0, block.start()) + 2
        result.append(Block(block["kind"], block["title"], block["text"], line, output))
    return [block for block in result if kind in ("", block.kind)]


def pages_with(kind: str, slow: Collection[str] = ()) -> list[Any]:
    """The pages that have a block of this kind, as parameters of a test; those named `slow` are left to test-all."""
    marks = {page: [pytest.mark.slow] if page.name in slow else [] for page in PAGES}
    return [pytest.param(page, id=page.name, marks=marks[page]) for page in PAGES if blocks(page, kind)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder, and registries that forget what a page registers."""
    monkeypatch.chdir(tmp_path)
    for registry in CHOICES.values():
        monkeypatch.setattr(registry, "members", dict(registry.members))
    yield tmp_path


def write_named_files(page: Path, folder: Path) -> None:
    """Write the blocks with a title into files of that name."""
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")


def agrees(shown: str, printed: str) -> bool:
    """Is a printed number the shown one, as nearly as another processor computes it? Numbers with thousands separators,
    such as bytes, must be equal.
    """
    if "," in shown + printed:
        return printed == shown
    one, other = (float(number.rstrip("%")) for number in (shown, printed))
    if shown.endswith("%"):
        return printed.endswith("%") and abs(one - other) <= PERCENT_POINTS + 1e-9
    if abs(one) < ROUNDING:
        return abs(other) < ROUNDING
    return abs(one - other) <= max(RELATIVE * abs(one), FRACTION if "." in shown else 0)


def check_output(shown: str, printed: str, where: str) -> None:
    """Compare what a page shows with what was printed: words one by one, numbers as nearly as processors agree."""
    without_numbers = [NUMBER.sub("#", text).split() for text in (shown, printed)]
    report = f"{where} shows\n{shown}but this was printed:\n{printed}"
    assert without_numbers[0] == without_numbers[1], report
    assert all(agrees(*pair) for pair in zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)), report


@pytest.mark.parametrize(
    "page",
    pages_with(
        "python",
        slow=["concepts.md", "first-run.md", "metrics.md", "add-algorithm.md", "howto-images.md", "howto-networks.md"],
    ),
)
def test_python_runs_and_prints_what_is_shown(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_named_files(page, folder)
    module = types.ModuleType(f"page_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(page, "python"):
        source = "\n" * (block.line - 1) + block.text  # so that a traceback names the page's line
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(source, str(page), "exec", dont_inherit=True), module.__dict__)
        if block.output is not None:
            check_output(block.output, printed.getvalue(), f"{page.name}, line {block.line}")


# Without Jupyter: cells are executed in one module and an empty folder, as their kernel would do it, and of what the
# last line shows only the text and the HTML are made. `notebooks/execute.py` stores what Jupyter shows.
@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run_and_show_what_is_stored(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    shown = 0
    for number, cell in enumerate(cells, 1):
        lines = ast.parse("".join(cell["source"]))
        last = lines.body.pop().value if isinstance(lines.body[-1], ast.Expr) else None
        name = f"/tmp/ipykernel_0/{number}.py"
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(lines, name, "exec"), module.__dict__)
            value = eval(compile(ast.Expression(last), name, "eval"), module.__dict__) if last else None
            if value is not None:
                print(repr(value))
        outputs, where = cell["outputs"], f"{path.name}, code cell {number}"
        assert not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs), where
        text = "\n".join("".join(output.get("data", {}).get("text/plain") or output["text"]) for output in outputs)
        shown += bool(text)
        check_output(without_varying(text), without_varying(printed.getvalue()), where)
        for page in [
            "".join(output["data"]["text/html"]) for output in outputs if "text/html" in output.get("data", {})
        ]:
            words = (html.unescape(re.sub("<[^>]+>", "", part)) for part in (page, value._repr_html_()))
            check_output(*map(without_varying, words), where)
    assert shown >= 5 and all(cell["execution_count"] for cell in cells)


def test_the_readme_shows_an_output_with_accuracies() -> None:
    outputs = [block.output for block in blocks(ROOT / "README.md", "python") if block.output]
    assert any(len(re.findall(r"\d+\.\d%", output)) >= 3 for output in outputs)


@pytest.mark.parametrize(
    ("printed", "right"),
    [
        ("fedavg   87.9% in round 28, 3,463,200 bytes, gap 5e-16\n", True),
        ("fedavg   88.2% in round 29, 3,463,200 bytes, gap 2e-17\n", False),  # another accuracy
        ("fedavg   87.5% in round 20, 3,463,200 bytes, gap 2e-17\n", False),  # another round
        ("fedavg   87.5% in round 29, 3,463,201 bytes, gap 2e-17\n", False),  # other bytes
        ("fedavg   87.5% in round 29, 3,463,200 bytes, gap 2e-07\n", False),  # more than rounding
        ("scaffold 87.5% in round 29, 3,463,200 bytes, gap 2e-17\n", False),  # another word
        ("fedavg   87.5% in round 29, 3,463,200 bytes\n", False),  # a number is missing
    ],
)
def test_a_wrong_figure_is_found(printed: str, right: bool) -> None:
    shown = "fedavg   87.5% in round 29, 3,463,200 bytes, gap 2e-17\n"
    with nullcontext() if right else pytest.raises(AssertionError, match="but this was printed"):
        check_output(shown, printed, "a page")


@pytest.mark.slow
def test_the_caption_of_the_demonstration() -> None:
    """Mean and standard deviation over the seeds of the best accuracies that the README prints below its picture."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    shown = re.search(
        r"FedAvg's best accuracy is ([\d.]+) ± ([\d.]+) %, ([\d.]+) ± ([\d.]+) % with a doubled server step; "
        r"FedDC's is ([\d.]+) ± ([\d.]+) %",
        text,
    )
    assert shown, "README.md has no caption of this form"
    figures = [float(figure) for figure in shown.groups()]
    table = " ".join((DOCS / "first-run.md").read_text(encoding="utf-8").split())
    for label, best, spread in zip(
        ("server_scale=1", "server_scale=2", "feddc"), figures[::2], figures[1::2], strict=True
    ):
        assert f"{label} {best} ± {spread}" in table, "first-run.md shows another table"
    methods = ({"name": "fedavg"}, {"name": "fedavg", "server_scale": 2.0}, {"name": "feddc", "alpha": 0.01})
    for method, figure, spread in zip(methods, figures[::2], figures[1::2], strict=True):
        configs = demo.configs(DEMO_ROUNDS, DEMO_SEEDS)[demo.METHODS.index(method) :: len(demo.METHODS)]  # of all seeds
        best = [100 * run.best_accuracy for run in run_all(configs)]
        assert mean(best) == pytest.approx(figure, abs=PERCENT_POINTS)
        assert stdev(best) == pytest.approx(spread, abs=PERCENT_POINTS)


@pytest.mark.parametrize("page", pages_with("toml"))
def test_configurations_load(page: Path, folder: Path) -> None:
    write_named_files(page, folder)
    for block in blocks(page, "toml"):
        tables = tomllib.loads(block.text)
        assert grid(tables, flatten_spans(tables.pop("sweep", {})))


class Step(NamedTuple):
    """A command of a page, and what the page shows that it prints; parts that are left out are "…"."""

    command: str
    shown: str


# What differs from one execution or machine to the next: times, versions, checksums over them, pictures of characters.
VARYING = re.compile(
    r"[\d.]+ (?:ms|s|min)\b|\"seconds(?:_per_round)?\": [\d.e-]+"
    r"|\"(?:checksum|torch|python|kernels)\": \"[^\"]*\"|[▁▂▃▄▅▆▇█│]+"
    # how many seeds would decide a difference follows from three: on another processor it may be one more
    r"|(?<=stay as they are\): ).*"
)
LAST_COLUMN = re.compile(r"(?<=\d)(\s+)[\d.]+$", re.MULTILINE)  # of a table with "ms a round"
# commands that the test leaves out: they download, take minutes, or another test compares what they print
NOT_EXECUTED = re.compile(r"(make|git|python|pip|askew (data|bench|deploy|demo|reproduce|ledger))\b")


def console_steps(page: Path) -> list[Step]:
    """The commands of a page that are executed: those that show an output, and those that are --quiet."""
    parts = (part for block in blocks(page, "console") for part in re.split(r"^\$ ", block.text, flags=re.M)[1:])
    steps = [Step(*part.partition("\n")[::2]) for part in parts]
    wanted = [step for step in steps if step.shown.strip() or "--quiet" in step.command]
    return [step for step in wanted if not NOT_EXECUTED.match(step.command)]


def execute(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints, errors and progress first; commands of askew run in this process."""
    program, *words = shlex.split(command, comments=True)
    if program != "askew":
        return subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout
    capsys.readouterr()
    main(words)
    printed = capsys.readouterr()
    return printed.err + printed.out


def without_varying(text: str) -> str:
    """A text without times and versions."""
    return VARYING.sub("∗", LAST_COLUMN.sub(r"\1∗", text) if "ms a" in text else text)


def check_console(step: Step, printed: str, where: str) -> None:
    """Compare what a page shows with what a command printed; parts that the page leaves out may be anything."""
    shown = [part for part in re.split(r"^…$", without_varying(step.shown), flags=re.M) if part.strip()]
    rest = without_varying(printed).split()
    for n, part in enumerate(shown):
        words, last = part.split(), n == len(shown) - 1 and not step.shown.rstrip().endswith("…")
        first = not n and not step.shown.startswith("…")
        alike = [NUMBER.sub("#", word) for word in words]
        starts = [0] if first else [len(rest) - len(words)] if last else range(len(rest) - len(words) + 1)
        at = [k for k in starts if [NUMBER.sub("#", word) for word in rest[k : k + len(words)]] == alike]
        assert at, f"{where} shows\n{step.shown}\nbut this was printed:\n{printed}"
        check_output(" ".join(words), " ".join(rest[at[0] : at[0] + len(words)]), where)
        rest = rest[at[0] + len(words) :]
    assert "…" in step.shown or not rest, f"{where}: more was printed:\n{printed}"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["first-run.md", "cli.md", "add-algorithm.md"])
def test_commands_print_what_is_shown(
    page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    write_named_files(DOCS / page, folder)
    for name in ("papers", "results"):
        (folder / name).symlink_to(ROOT / name)
    for step in console_steps(DOCS / page):
        printed = execute(step.command, capsys)
        if step.shown.strip():
            check_console(step, printed, f"{page}: $ {step.command}")


def test_how_long_the_demonstration_takes_is_said_once() -> None:
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")]
    pages += [*DOCS.glob("*.md"), *(ROOT / "src" / "askew" / "cli").glob("*.py")]
    parts = [part for page in pages for part in re.split(r"\n\s*\n", page.read_text(encoding="utf-8"))]
    sentences = [sentence for part in parts for sentence in re.split(r"(?<=[.:!?])\s", " ".join(part.split()))]
    times = [s for s in sentences if re.search(r"\bdemo", s) and re.search(r"\b(minutes?|seconds?)\b", s)]
    assert len(times) == 1, times


def test_the_ledger_that_is_shown_is_the_stored_one() -> None:
    (block,) = [block for block in blocks(DOCS / "cli.md", "console") if block.text.startswith("$ askew ledger\n")]
    shown = re.findall(r"^(\w+) +((?:\d+ *){7})$", block.text, re.MULTILINE)
    page = (DOCS / "reproduction.md").read_text(encoding="utf-8")
    assert len(shown) == 5
    for paper, numbers in shown:
        found = re.search(rf"^\| \[{paper}\]\([^)]*\) \| (\d.*) \|$", page, re.MULTILINE)
        cells = found[1].split(" | ") if found else []
        assert [*cells[:2], *cells[4:9]] == numbers.split(), paper  # between them the gaps


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("best 60.6% in round 20\n…\nruns/a-1f\n", "best 60.7% in round 21\nthis\nand that\nruns/a-1f\n"),
        ("fedavg  1.92  19\nms a\n", "fedavg  1.92  44\nms a\n"),
    ],
)
def test_what_a_command_prints_is_compared(shown: str, printed: str) -> None:
    check_console(Step("askew run", shown), printed, "here")
    for wrong in (printed.replace("a-1f", "a-2f").replace("1.92", "3.92"), printed + "more\n"):
        if wrong != printed:
            with pytest.raises(AssertionError):
                check_console(Step("askew run", shown), wrong, "here")


@pytest.mark.parametrize("page", pages_with("console"))
def test_commands_and_their_options_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "chosen_folder", None)  # --data-dir takes effect as it is parsed
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    lines = [line[2:] for block in blocks(page, "console") for line in block.text.splitlines() if line.startswith("$ ")]
    assert lines
    for line in lines:
        program, *words = shlex.split(line, comments=True)
        if program == "make":
            assert words[0] in targets, line
        if program == "askew":
            assert words and words[0] in COMMANDS, line
            command, words = load_command(words[0]), words[1:]
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
        linked = page.parent / path if path else page
        assert linked.is_file(), f"{page.name} links to {target}"
        if anchor:
            heads = re.findall(r"^#+ (.+)$", FENCE.sub("", linked.read_text(encoding="utf-8")), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads], target


@pytest.mark.parametrize("page", [ROOT / "SECURITY.md", DOCS / "faults.md"], ids=lambda page: page.name)
def test_tests_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(r"`(?:tests/)?((?:\w+/)?test_\w+\.py)(?:::(\w+))?`", page.read_text(encoding="utf-8"))
    assert named
    for file, name in named:
        assert re.search(rf"^def {name}\(" if name else "", (ROOT / "tests" / file).read_text(), re.MULTILINE), name


def load_file(path: Path) -> Any:
    """A Python file that is no part of a package, as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_follow_from_the_code() -> None:
    generate = load_file(DOCS / "generate.py")
    for path, text in generate.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is out of date: run python docs/generate.py"
        place = "docs/algorithms.md" if path.name == "README.md" else ""
        assert generate.overview(place) in text or path.name in ("configuration.md", "catalogue.json", "speeds.csv")


def test_every_hook_declaration_and_field_is_explained() -> None:
    explained = set(re.findall(r"`(\w+)[`(]", (DOCS / "add-algorithm.md").read_text(encoding="utf-8")))
    hooks = {name for name, value in vars(Algorithm).items() if not name.startswith("_") and callable(value)}
    names = hooks | set(Algorithm.__annotations__) | {field.name for field in dataclasses.fields(Algorithm)}
    assert names | {*Client._fields, *Cohort._fields} <= explained


def test_the_reference_describes_every_field_of_a_public_class() -> None:
    pytest.importorskip("griffe")
    describe, missing = load_file(DOCS / "field_comments.py").field_descriptions, []
    for name in sorted(set(askew.__all__) - {"Config"}):  # whose fields another page explains
        kind = getattr(askew, name)
        if isinstance(kind, type):
            path = Path(inspect.getfile(kind))
            node = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
            ast.increment_lineno(node, inspect.getsourcelines(kind)[1] - 1)
            missing += [f"{name}.{field}" for field, text in describe(node, path).items() if not text]
    assert not missing


def test_pictures_are_small_and_need_nothing_from_elsewhere() -> None:
    for picture in (*(DOCS / "img").iterdir(), *DOCS.glob("reproduction/*.svg")):
        assert picture.stat().st_size < 200_000, picture.name
        if picture.suffix == ".svg":
            text = picture.read_text(encoding="utf-8")
            loaded = re.findall(r"(?:href|src)=\"([^\"]+)\"|url\(([^)]+)\)", text)
            assert all((one or other).startswith("#") for one, other in loaded) and "<script" not in text, picture.name


def test_equations_are_typeset_and_lose_nothing() -> None:
    """The site's MathML is well formed, and its letters are those of the text, but for signs that it replaces."""
    equations = load_file(DOCS / "equations.py")
    replaced = str.maketrans({"²": "2", "⁺": "+", "⁰": "0", "ᵀ": "T", "'": "′", "₁": "1", "₂": "2", "\u0304": "¯"})
    dropped = str.maketrans("", "", "_^{}√ \n")
    found = re.findall(r"^```equation\n(.*?)^```$", (DOCS / "algorithms.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) > 20
    for text in found:
        shown = "".join(ElementTree.fromstring(equations.equation_block(text)).itertext())
        both = [each.translate(replaced).translate(dropped) for each in (text, shown)]
        assert both[0] == both[1], text
    step = equations.to_mathml("h_i ← h_i + α δ²")
    assert step.startswith("<msub><mi>h</mi><mrow><mi>i</mi></mrow></msub>") and step.endswith(
        "<msup><mi>δ</mi><mo>2</mo></msup>"
    )
    assert "<mtext>a miner</mtext>" in equations.to_mathml("p a miner") and "<mi>a</mi>" in equations.to_mathml("a g'")
    assert "equation" not in equations.on_page_markdown("```text\nw = 1\n```\n")


def test_methods_link_to_their_sections() -> None:
    for page, target in ((ROOT / "README.md", "docs/algorithms.md"), (DOCS / "algorithms.md", "")):
        assert f"| [`feddyn`]({target}#feddyn) |" in page.read_text(encoding="utf-8")
