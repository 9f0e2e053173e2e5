"""The house's order, read off the imports: nobody knows the storeys above."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import askew

ROOT = Path(askew.__file__).parent
STOREY = {
    "errors": 0,
    "version": 0,
    "core": 1,
    "algorithms": 2,
    "data": 2,
    "models": 2,
    "participation": 2,
    "engine": 3,
    "experiment": 4,
    "report": 5,
    "flower": 5,
    "reproduction": 6,
    "bench": 6,
    "cli": 7,
    "__main__": 8,
}
LIGHT = {"core", "algorithms", "engine"}  # torch and numpy alone
SIDE_BY_SIDE = {("engine", "data"), ("data", "core")}


def storey_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path, inner: bool = True) -> set[tuple[str, str]]:
    """(kind, name) of every import: ("askew", storey) or ("other", package); without `inner`, of those that loading the file makes."""
    found = set()
    depth = len(path.relative_to(ROOT).parts)
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if inner else tree.body:
        if isinstance(node, ast.Import):
            found |= {("other", alias.name.split(".")[0]) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            inside = [] if node.level == depth else [storey_of(path)]
            names = [*inside, *(node.module.split(".") if node.module else [alias.name for alias in node.names])]
            found.add(("askew", names[0]))
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(("other", node.module.split(".")[0]))
    return found


def test_imports_go_down_only() -> None:
    for path in ROOT.rglob("*.py"):
        here = storey_of(path)
        if here == "__init__":
            continue
        for kind, name in imports(path):
            if kind == "askew" and name != here:
                assert STOREY[name] < STOREY[here], f"{path.relative_to(ROOT)} imports {name}"


def test_core_algorithms_and_engine_need_torch_and_numpy_alone() -> None:
    import sys

    for path in ROOT.rglob("*.py"):
        if storey_of(path) in LIGHT:
            foreign = {name for kind, name in imports(path, inner=False) if kind == "other"} - {
                *sys.stdlib_module_names,
                "torch",
                "numpy",
            }
            assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


def test_there_is_one_local_training_loop() -> None:
    pattern = re.compile(r"\.backward\(|torch\.optim|grad_and_value|autograd\.grad")
    owners = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if pattern.search(path.read_text())}
    assert owners == {"core/local.py", "bench/baselines.py"}  # the latter are the loops that ours is timed against


def test_public_names_are_listed_sorted_and_there() -> None:
    assert askew.__all__ == sorted(askew.__all__)
    assert all(hasattr(askew, name) for name in askew.__all__)


def test_importing_the_library_loads_no_plots_and_no_terminal() -> None:
    import subprocess
    import sys

    code = (
        "import sys, askew; print([m for m in ('matplotlib', 'sklearn', 'typer', 'rich', 'scipy') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
