"""The order of the house, read off its sources: who may import whom, how long a function is, which formula is where."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

import askew

ROOT = Path(askew.__file__).parent
TESTS = Path(__file__).parent
LEVEL = {  # nobody knows the levels above
    **dict.fromkeys(("errors", "version"), 0),
    "core": 1,
    "kernels": 2,
    **dict.fromkeys(("algorithms", "data", "models", "participation", "timeline"), 3),
    "engine": 4,
    "experiment": 5,
    **dict.fromkeys(("report", "flower"), 6),
    **dict.fromkeys(("reproduction", "bench", "watch"), 7),
    "cli": 8,
    "__main__": 9,
}
LIGHT = {"core", "kernels", "algorithms", "engine"}  # load torch and numpy alone
LONGEST = 59  # lines of a function
SOURCES = [path for path in sorted(ROOT.rglob("*.py")) if "papers" not in path.relative_to(ROOT).parts[:1]]


@cache
def trees() -> dict[Path, ast.Module]:
    """The syntax of every source; read when the first test asks, since every process collects all tests."""
    return {path: ast.parse(path.read_text()) for path in SOURCES}


def module_of(path: Path) -> str:
    """The dotted name below askew; of a package's __init__ the package's."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path) for path in SOURCES}


def room_of(module: str) -> str:
    return module.split(".")[0]


@cache
def own_imports(path: Path) -> list[str]:
    """The modules of askew that a file imports, inside functions and by `import_module` too."""
    return list(find_imports(path))


def find_imports(path: Path) -> Iterator[str]:
    package = list(path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[2] for alias in node.names if alias.name.split(".")[0] == "askew")
        elif isinstance(node, ast.ImportFrom):
            first, *rest = (node.module or "").split(".")
            if node.level:
                base = package[: len(package) - node.level + 1] + [first, *rest] * bool(first)
            elif first == "askew":
                base = rest
            else:
                continue
            for alias in node.names:
                inner = ".".join([*base, alias.name])
                yield inner if inner in MODULES else ".".join(base)
    if "import_module" in (text := path.read_text()) or "__import__" in text:
        yield from imports_by_name(trees()[path], package)


def imports_by_name(tree: ast.Module, package: list[str]) -> Iterator[str]:
    """The modules of askew that texts of a file name; where a name is put together, all that begin as it does."""
    for node in ast.walk(tree):
        text = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
        if isinstance(text, ast.Constant) and str(text.value).startswith((".", "askew.")):
            name = str(text.value).removeprefix("askew")[1:]
            full = ".".join([*package, name]) if str(text.value).startswith(".") else name
            yield from (m for m in MODULES if m == full or (text is not node and m.startswith(full)))


def test_imports_in_functions_and_by_name_are_seen() -> None:
    imports = {module_of(path): set(own_imports(path)) for path in SOURCES}
    assert "report.runs" in imports[""]  # by name
    assert {"kernels.cuda.triton_wide_conv", "kernels.cuda.triton_group_norm"} <= imports["kernels.cuda"]  # in part
    assert "report.verdicts" in imports["report.runs"]  # in a function


def test_imports_go_down_only() -> None:
    for path in SOURCES:
        here = room_of(module_of(path))
        for module in own_imports(path) if here else ():
            there = room_of(module)
            if there and there != here:
                assert LEVEL[there] < LEVEL[here], f"{path.relative_to(ROOT)} imports {module}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {module_of(path): {m for m in own_imports(path) if m != module_of(path)} for path in SOURCES}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " → ".join((*way[way.index(module) :], module))
        if module not in done:
            for other in sorted(graph.get(module, ())):
                visit(other, (*way, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def libraries(nodes: Collection[ast.AST]) -> set[str]:
    """Which libraries but torch and numpy these statements import."""
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.split(".")[0] for name in names} - {*sys.stdlib_module_names, "torch", "numpy"}


def test_core_kernels_algorithms_and_engine_load_torch_and_numpy_alone() -> None:
    by_functions = {}
    for path in SOURCES:
        if room_of(module_of(path)) not in LIGHT or path.name.startswith("triton_"):  # loaded where a GPU needs them
            continue
        name, tree = str(path.relative_to(ROOT)), trees()[path]
        assert not libraries(tree.body), f"{name} imports {libraries(tree.body)}"
        if more := libraries([*ast.walk(tree)]):
            by_functions[name] = more
    assert by_functions == {
        "core/files.py": {"safetensors"},
        "kernels/cuda/__init__.py": {"triton"},
        "algorithms/_simplex.py": {"scipy"},
        "engine/accounting.py": {"scipy", "dp_accounting"},
    }


def test_gradients_are_taken_in_few_places() -> None:
    pattern = re.compile(r"\.backward\(|torch\.optim|grad_and_value|autograd\.grad")
    owners = {str(path.relative_to(ROOT)) for path in SOURCES if pattern.search(path.read_text())}
    assert owners == {"core/differentiate.py", "bench/baselines.py"}  # the last: the loops ours is timed against


def test_the_local_loop_and_the_methods_do_not_know_kernels() -> None:
    for path in SOURCES:
        if room_of(module_of(path)) in ("core", "algorithms"):
            assert not any(room_of(module) == "kernels" for module in own_imports(path))
    assert len((ROOT / "core" / "local.py").read_text().splitlines()) <= 160


def test_no_function_is_longer_than_a_screen() -> None:
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= LONGEST, f"{path.relative_to(ROOT)}: {node.name} has {length} lines"


def test_a_class_has_a_name_of_its_own() -> None:
    owners: dict[str, Path] = {}
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                assert node.name not in owners, f"{node.name} is in {path} and in {owners[node.name]}"
                owners[node.name] = path


# C --------------------------------------------------------------------------------------------------------------------

FUNCTION = re.compile(r"^(?:INLINE|NOINLINE|static|int)\b[^;{]*?(\w+)\([^;{]*\)\s*\{", re.M)
REPEATED = {  # formulas that stand in Python as well, and the test that holds the two together
    "cross_entropy": "kernels/test_dense.py::test_steps_in_a_row_are_torchs",  # core/task.py
    "batch": "kernels/test_dense.py::test_gradients_of_many_networks_are_each_ones_own",  # what autograd does
    "descend": "kernels/test_dense.py::test_momentum_decay_and_clipping_in_c_are_torchs",  # core/algebra.py
    "train": "kernels/test_dense.py::test_an_affine_direction_in_c_is_the_formula",  # core/types.py
    "forward": "kernels/test_conv.py::test_a_convolution_is_torchs",  # torch's
    "backward": "kernels/test_conv.py::test_a_convolution_is_torchs",
}
ARITHMETIC = {  # products and sums that those are made of
    *("last", "valid_lanes", "dots", "dots_of", "outputs", "sums", "combine", "convolve", "take", "pool", "interleave"),
    *("load", "store", "allocate", "totals"),
}


def c_functions() -> Iterator[tuple[str, str, int]]:
    """File, name and lines of every function in C."""
    for path in sorted((ROOT / "kernels" / "cpu").glob("*.[ch]")):
        text = path.read_text()
        for found in FUNCTION.finditer(text):
            depth, end = 1, found.end()
            while depth:
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                end += 1
            yield path.name, found.group(1), text[found.start() : end].count("\n") + 1


def test_every_formula_in_c_is_held_by_a_test() -> None:
    names = {name for _, name, _ in c_functions()}
    assert names == REPEATED.keys() | ARITHMETIC
    for place in REPEATED.values():
        file, _, test = place.partition("::")
        assert f"def {test}(" in (TESTS / file).read_text(), place


def test_no_function_in_c_is_longer_than_a_screen_and_no_line_wider() -> None:
    assert max(lines for *_, lines in c_functions()) <= LONGEST
    for path in (ROOT / "kernels" / "cpu").glob("*.[ch]"):
        assert max(map(len, path.read_text().splitlines())) <= 120, path.name


# the surface ----------------------------------------------------------------------------------------------------------


def test_public_names_are_listed_sorted_and_there() -> None:
    assert askew.__all__ == sorted(askew.__all__)
    assert all(hasattr(askew, name) for name in askew.__all__)


@pytest.mark.slow
def test_importing_the_library_loads_no_plots_and_no_terminal() -> None:
    code = (
        "import sys, askew; askew.run; print(*{'matplotlib', 'sklearn', 'typer', 'rich', 'scipy'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
