"""The user's own modules that a module imports, and their texts as they were when the code was loaded.

Which modules count is read off the texts alone: what else a process has loaded, and in which order, differs from one
process to another.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import linecache
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import NamedTuple

from .compiled_code import compiled, contains_code, function_in
from .value_text import is_library_module

BY_NAME = ("import_module", "__import__")  # functions that import what a text names


class OwnModule(NamedTuple):
    """What is known of a module of a user's own."""

    text: str  # of its file, with the code that was loaded where that is another; empty without a file
    imports: tuple[str, ...]  # names, whether or not they are modules


# by name: modules as they were when they were first seen, each with what is another object once it is loaded again
FIRST_SEEN: dict[str, tuple[object, OwnModule]] = {}


def module_text(module: ModuleType) -> str:
    """The text of a module; its name where there is none."""
    return own_module(module).text or module.__name__


def whole_text(module: ModuleType) -> str:
    """The text of a module and those of the user's own modules that it imports; empty where it has no file."""
    own = own_module(module)
    return "\n".join([own.text, *imported_texts(module.__name__, own)]) if own.text else ""


def imported_texts(name: str, own: OwnModule) -> list[str]:
    """The texts of a user's own modules that a module imports, and of those that these import, each once."""
    found, waiting = {name: ""}, [own]
    while waiting:
        for other in waiting.pop().imports:
            if other not in found and (known := find_own(other)):
                found[other] = known.text or other
                waiting.append(known)
    return [text for text in found.values() if text]


def find_own(name: str) -> OwnModule | None:
    """A user's own module of this name, loaded or not; None if there is none, or only a folder of this name."""
    if name in sys.modules:
        module = sys.modules[name]
        is_own = getattr(module, "__file__", None) and isinstance(module, ModuleType) and not is_library_module(module)
        return own_module(module) if is_own else None
    spec = find_spec(name)
    if spec is None or spec.origin is None or is_library_module(name, spec.origin):
        return None
    text = file_text(spec.origin, {"__name__": name, "__loader__": spec.loader})
    return OwnModule(text, imported_names(text, spec.parent or ""))


def own_module(module: ModuleType) -> OwnModule:
    """What is known of a module that is loaded, as it was when it was first seen, or loaded again since."""
    loaded = getattr(module, "__spec__", None) or module
    before, own = FIRST_SEEN.get(module.__name__, (None, None))
    if own is None or before is not loaded:
        try:
            text = inspect.getsource(module)
        except (OSError, TypeError):
            text = ""
        own = note_module(module, text)
    return own


def note_module(module: ModuleType, text: str) -> OwnModule:
    """Note the text with which a module was loaded; one without an end of its last line gets it, as by `inspect`."""
    text += "\n" * bool(text and not text.endswith("\n"))
    whole = "\n".join(filter(None, [text, *edited_code(module, text)]))
    own = OwnModule(whole, imported_names(text, module.__package__ or ""))
    FIRST_SEEN[module.__name__] = getattr(module, "__spec__", None) or module, own
    return own


def edited_code(module: ModuleType, text: str) -> list[str]:
    """The functions of a module that its text does not contain: its file was edited after it was loaded."""
    file = str(getattr(module, "__file__", None) or "<")
    if file.startswith("<"):  # a notebook or standard input
        return []
    codes = [function.__code__ for function in own_functions(module)]
    return [
        f"{code.co_name} {compiled(code)}"
        for code in codes
        if code.co_filename == file and not contains_code(text, code)
    ]


def own_functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions of a module and of its classes, without the decorators around them."""
    for value in list(vars(module).values()):
        is_class = isinstance(value, type) and value.__module__ == module.__name__
        for function in map(function_in, list(vars(value).values())) if is_class else [value]:
            if isinstance(function, FunctionType) and isinstance(inner := inspect.unwrap(function), FunctionType):
                yield inner


def find_spec(name: str) -> ModuleSpec | None:
    """Where a module that is not loaded would be found. Nothing is imported for it, as `importlib` does."""
    first, package = name.partition(".")[0], name.rpartition(".")[0]
    with suppress(Exception):  # whatever a finder raises
        if is_library_module(sys.modules.get(first, first)):
            return None
        if not package:
            return importlib.util.find_spec(name)
        above = sys.modules[package].__spec__ if package in sys.modules else find_spec(package)
        if above is not None and above.submodule_search_locations is not None:
            return PathFinder.find_spec(name, above.submodule_search_locations)
    return None


def file_text(file: str, names: dict[str, object]) -> str:
    """The text of a source file, as `inspect` reads it; empty where it is none. `names` may give its loader."""
    linecache.checkcache(file)
    return "".join(linecache.getlines(file, names))


@lru_cache(maxsize=1000)
def imported_names(text: str, package: str) -> tuple[str, ...]:
    """What a module's text imports anywhere, whether or not it is a module, and the packages that it is in."""
    names = dict[str, None]()
    with suppress(SyntaxError, ValueError, RecursionError):
        for node in ast.walk(ast.parse(text)):
            for name in names_in(node, package):
                parts = name.split(".")
                names |= dict.fromkeys(".".join(parts[: n + 1]) for n in range(len(parts)))
    return tuple(names)


def names_in(node: ast.AST, package: str) -> Iterator[str]:
    """What one statement or call imports; a relative name is one of this package."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        with suppress(ImportError):  # a relative name where there is no package
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in BY_NAME:
        given = node.args[0] if node.args else None
        if isinstance(given, ast.Constant) and isinstance(given.value, str):
            with suppress(ImportError):
                yield importlib.util.resolve_name(given.value, package)
