"""Plugins: Python files of a user that register methods, datasets, partitions, participation models or networks."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import decode_source
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from ..algorithms import algorithms
from ..core.algorithm import Algorithm
from ..core.files import is_file
from ..core.settings import Registry, Settings
from ..data import partitions, sources
from ..data.dataset import Source
from ..data.partition import Partition
from ..errors import ConfigError, StoreError, StoreWarning
from ..models import Network, networks
from ..participation import Participation, participations
from .code_text import class_text, is_typed_in, text_with_values
from .file_hash import file_hash
from .hook_fault import returned_fault
from .own_modules import note_module, whole_text
from .store import read_json

C = TypeVar("C", bound=type)

PLUGIN_PREFIX = "askew_plugin_"  # of the names under which plugins are imported
# of a plugin's module: its file's content when it was loaded, and the text with those of the user's files it imports
TEXT, SOURCE = "__askew_text__", "__askew_source__"
PLUGINS = "plugins"  # the folder in a run folder that keeps its plugins
# by class of a plugin: the SOURCE of its module, whose place in sys.modules a later one may take
SOURCES: WeakKeyDictionary[type, str] = WeakKeyDictionary()
LOADED: dict[Path, str] = {}  # plugin files that this process has loaded, and the names of their modules
# by base class: where `register` adds a class
REGISTRIES: dict[type[Settings], Registry[Any]] = {
    Algorithm: algorithms,
    Source: sources,
    Partition: partitions,
    Participation: participations,
    Network: networks,
}


def register(name: str, *, replace: bool = False) -> Callable[[C], C]:
    """A decorator that registers an algorithm, dataset, partition, participation model or network of your own."""

    if not isinstance(name, str):  # @askew.register without its brackets
        raise ConfigError(f'register takes a name first, got {name!r}; write @askew.register("mine") above the class.')

    def add(cls: C) -> C:
        for base, registry in REGISTRIES.items():
            if isinstance(cls, type) and issubclass(cls, base):
                registry.register(name, cls, replace=replace)
                return cls
        raise ConfigError(
            f"register: {cls!r} is none of {', '.join(base.__name__ for base in REGISTRIES)}; "
            "derive it from one of them."
        )

    return add


def plugin_module(path: str) -> str:
    """The name under which a plugin is imported; that of a loaded plugin with the same text, such as a run's copy."""
    text = Path(path).read_bytes() if is_file(Path(path)) else None
    for name, module in list(sys.modules.items()):
        if text is not None and name.startswith(PLUGIN_PREFIX) and module.__dict__.get(TEXT) == text:
            return name
    return f"{PLUGIN_PREFIX}{hashlib.sha256(str(Path(path).resolve()).encode()).hexdigest()[:12]}"


def plugin_fault(e: BaseException) -> str | None:
    """The sentence for an exception that a plugin raised; None where no plugin had a part in it."""
    plugins = {module.__file__ for name, module in list(sys.modules.items()) if name.startswith(PLUGIN_PREFIX)}
    for frame in reversed(traceback.extract_tb(e.__traceback__)):
        if frame.filename in plugins:
            what = f"{type(e).__name__}: {e}"
            return (
                f"the plugin {frame.filename!r} failed in line {frame.lineno}: {what}; correct the file and try again."
            )
    return returned_fault(e)


def load_plugin(path: str) -> None:
    """Import a Python file that registers things; a file that is loaded again replaces what it registered."""
    file = Path(path)
    if not is_file(file):
        raise ConfigError(f"there is no plugin file {path!r}; name a Python file that calls askew.register.")
    name = plugin_module(path)
    text = file.read_bytes()
    if is_loaded(name, text):
        LOADED[file.resolve()] = name
        return
    for other in {name, *(module for path, module in LOADED.items() if replaces(file.resolve(), path))}:
        for registry in REGISTRIES.values():
            for member in [key for key in registry if registry.members[key].__module__ == other]:
                del registry.members[member]
    LOADED[file.resolve()] = name
    before = {id(cls) for registry in REGISTRIES.values() for cls in registry.members.values()}
    module = import_plugin(path, name, text)
    if not registers(name):
        new = [c for registry in REGISTRIES.values() for c in registry.members.values() if id(c) not in before]
        raise no_class_of_its_own(path, new)
    note_module(module, decode_source(text))
    module.__dict__[TEXT], module.__dict__[SOURCE] = text, whole_text(module)
    members = [cls for registry in REGISTRIES.values() for cls in registry.members.values()]
    own = [cls for cls in (*vars(module).values(), *members) if isinstance(cls, type) and cls.__module__ == name]
    SOURCES.update(dict.fromkeys(own, module.__dict__[SOURCE]))


def is_loaded(name: str, text: bytes) -> bool:
    """Is a plugin of this text loaded and registered, and no file of the user's that it imports loaded anew since?"""
    module = sys.modules.get(name)
    if module is None or module.__dict__.get(TEXT) != text or not registers(name):
        return False
    return whole_text(module) == str(module.__dict__[SOURCE])


def no_class_of_its_own(path: str, others: Sequence[type]) -> ConfigError:
    """The sentence for a plugin that registers nothing, or only classes that it imports."""
    if not others:
        return ConfigError(f'the plugin {path!r} registers nothing; put @askew.register("name") above a class in it.')
    name, module = others[0].__name__, others[0].__module__
    return ConfigError(
        f"the plugin {path!r} registers {name} of {module}, whose text a run folder would not keep; derive a class in "
        f'the plugin, @askew.register("name") above class Own({name}): pass, and register no other.'
    )


def replaces(new: Path, old: Path) -> bool:
    """Does a plugin file replace one that was loaded before? If it is the same, or one is a run's copy of the other."""
    return new == old or (new.name == old.name and PLUGINS in (new.parent.name, old.parent.name))


def registers(module: str) -> bool:
    """Is a class of this module registered?"""
    return any(member.__module__ == module for registry in REGISTRIES.values() for member in registry.members.values())


def import_plugin(path: str, name: str, text: bytes) -> ModuleType:
    """Import a file of this text under a module name; what the file raises becomes a sentence with its line."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
        raise ConfigError(f"the plugin {path!r} is not a Python file; name one that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # not as Python imports it, which may take an older text's code for one of the same size and time
        exec(spec.loader.source_to_code(text, spec.origin), module.__dict__)
    except ConfigError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as e:
        del sys.modules[name]
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == spec.origin]
        lines += [e.lineno] if isinstance(e, SyntaxError) else []
        where = f"in line {lines[-1]}: " if lines else ""
        is_absent = isinstance(e, ModuleNotFoundError)
        advice = "name its folder in the environment variable PYTHONPATH" if is_absent else "correct the file"
        raise ConfigError(
            f"the plugin {path!r} failed {where}{type(e).__name__}: {e}; {advice} and try again."
        ) from None
    return module


def source_text(cls: type) -> str:
    """The text of the file that a class is from, with those of the user's files that it imports, as they were when it
    was loaded or first seen; and what they do not say of the class, such as the values in a closure.
    """
    if cls in SOURCES:
        return SOURCES[cls]
    module = sys.modules.get(cls.__module__)
    text = whole_text(module) if module and not is_typed_in(cls) else ""
    return text_with_values(cls, text) if text else class_text(cls)  # of a notebook's class, which has no file


def check_kept_plugins(folder: Path) -> None:
    """Refuse a run folder whose copies of plugins were changed; warn where the files they were taken from were."""
    for kept in read_json(folder / "run.json").get("plugins", ()):
        copy, origin = folder / PLUGINS / kept["name"], Path(kept["file"])
        if file_hash(copy) != kept["sha256"]:
            raise StoreError(f"{copy} is missing or not as askew wrote it; restore it, or start over from {origin}.")
        if file_hash(origin) not in ("", kept["sha256"]):
            warnings.warn(
                f"{origin} has changed since this run was begun; the run's own copy of it is used. "
                f"To train with the new text, use --plugin {origin} without the run's run.toml.",
                StoreWarning,
                stacklevel=3,
            )
