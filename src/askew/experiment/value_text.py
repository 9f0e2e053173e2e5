"""A text that stands for a value of a user's: the same in every process, and never with an address in it."""

from __future__ import annotations

import copyreg
import hashlib
import inspect
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import Remark

# types of values whose representation says all
PLAIN: set[type] = {str, bytes, int, float, complex, bool, type(None), type(...), range}
PLAIN |= {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
DEEPEST = 100  # levels of values that hold values; what is deeper is not described
LONGEST = 2000  # letters of a text; of a longer one, its hash stands for it
# of their functions and classes, the names are enough
LIBRARIES = {"torch", "numpy", "askew"}
STANDARD_LIBRARY = Path(inspect.__file__).parent
INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages; the second is Debian's
OF_TORCH = set(vars(nn.Module()))  # attributes that every layer has
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# by type: the values that could not be described so far, in their order
UNKNOWN: dict[str, list[Callable[[], object]]] = {}


class Undescribed(Exception):
    """No text can stand for a value."""


def is_plain(value: object) -> bool:
    """Does the representation of this value say all, the same in every process?"""
    if type(value) is tuple:
        return all(map(is_plain, value))
    return type(value) in PLAIN


def is_library(thing: object) -> bool:
    """Is a function or class of an installed package, and not of a user's own files?"""
    name = str(getattr(thing, "__module__", None) or "builtins")
    return is_library_module(sys.modules.get(name, name))


def is_library_module(module: ModuleType | str, file: str | None = None) -> bool:
    """Is a module of an installed package? A name, and its file, stand for one that is not loaded."""
    name = module if isinstance(module, str) else module.__name__
    first, path = name.partition(".")[0], Path(getattr(module, "__file__", file) or "")
    if not INSTALLED.isdisjoint(path.parts) or path.is_relative_to(STANDARD_LIBRARY):
        return True
    # a user's own file may be called code.py; what has no file is Python's
    return first in LIBRARIES or (first in sys.stdlib_module_names and path.suffix != ".py")


def qualified_name(thing: object) -> str:
    """The name of a function or class with its module's."""
    return f"{getattr(thing, '__module__', None)}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def fingerprint(*tensors: Tensor, about: str = "") -> str:
    """Twelve letters that stand for the values, shapes and types of tensors, and for a text."""
    digest = hashlib.sha256(about.encode())
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]


class ValueTexts:
    """Texts of values, and of what these hold; `code` gives the text of a user's function or class.

    `strict`: what cannot be described raises Undescribed. Otherwise it gets a number, so that it differs from others.
    """

    def __init__(self, code: Callable[[type | FunctionType, ValueTexts], str], strict: bool = False) -> None:
        self.code, self.strict = code, strict
        self.within: list[object] = []  # what is being described: a value may hold itself
        self.done: dict[int, tuple[object, str]] = {}  # by id; the value is kept, so that its id stays its own

    def strictly(self) -> ValueTexts:
        """The same, where what cannot be described raises Undescribed."""
        other = ValueTexts(self.code, strict=True)
        other.within, other.done = self.within, self.done
        return other

    def text(self, value: Any) -> str:
        """The text of any value."""
        if is_plain(value):
            return repr(value)
        for level, outer in enumerate(reversed(self.within)):
            if outer is value:
                return f"<what holds it, {level}>"
        if id(value) not in self.done:
            self.within.append(value)
            try:
                text = self.describe(value) if len(self.within) <= DEEPEST else self.number(value)
            except RecursionError:
                text = self.number(value)
            finally:
                self.within.pop()
            if len(text) > LONGEST:
                text = hashlib.sha256(text.encode()).hexdigest()
            self.done[id(value)] = value, text
        return self.done[id(value)][1]

    def describe(self, value: Any) -> str:
        """The text of a value that is not plain."""
        if isinstance(value, nn.Module):
            kinds = map(self.text, dict.fromkeys(map(type, value.modules())))
            return " ".join([module_shape(value), *kinds, self.layers(value), fingerprint(*tensors_of(value))])
        if isinstance(value, Tensor):
            return f"tensor {fingerprint(value)}" if value.layout == torch.strided else self.number(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            content = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
            return f"array {value.dtype} {value.shape} {content}"
        if isinstance(value, np.generic):
            return f"{value.dtype} {value.item()!r}"
        if isinstance(value, ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, CodeType):
            return self.number(value)
        if isinstance(value, (type, FunctionType)):
            is_local = "<" in value.__qualname__  # such a name may stand for several
            return qualified_name(value) if is_library(value) and not is_local else self.code(value, self)
        return self.collection(value) or self.restorable(value)

    def collection(self, value: Any) -> str:
        """The text of a list, tuple, dictionary or set; empty for others, and for subclasses, which may hold more."""
        if type(value) in (list, tuple):
            return f"{type(value).__name__}({', '.join(map(self.text, value))})"
        if type(value) is dict:
            return f"dict({', '.join(f'{self.text(key)}: {self.text(item)}' for key, item in value.items())})"
        if isinstance(value, (set, frozenset)):  # without an order that is the same in every process
            return f"{self.text(type(value))}({', '.join(sorted(map(self.text, value)))})"
        return ""

    def restorable(self, value: Any) -> str:
        """The text of any other object: of what it would be restored from, as `pickle` and `copy` ask for it."""
        if isinstance(value, MethodType):
            return f"{self.text(value.__func__)} of {self.text(value.__self__)}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reduce = copyreg.dispatch_table.get(type(value))
                parts = reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception:  # whatever a user's class raises
            return self.number(value)
        if isinstance(parts, str):
            return f"{getattr(value, '__module__', None) or qualified_name(type(value))}.{parts}"
        made, arguments, state, items, pairs = (*parts, None, None, None)[:5]
        held = [made, arguments, state, [*(items or ())], [*(pairs or ())]]
        return f"{qualified_name(type(value))}({', '.join(map(self.text, held))})"

    def number(self, value: object) -> str:
        """The number of a value that cannot be described: different objects never have one text in this process."""
        if self.strict:
            raise Undescribed
        kind = qualified_name(type(value))
        known = UNKNOWN.setdefault(kind, [])
        for k, get in enumerate(known):
            if get() is value:
                return f"{kind} {k}"
        try:
            known.append(weakref.ref(value))
        except TypeError:
            known.append(lambda: value)
        warnings.warn(
            f"what was handed in from Python holds a value of type {kind}, of which no description can be stored: a "
            "stored run is found again if the script hands over such values in the same order, and may be that of "
            "another value if the script was changed; give the class a __reduce__ method, or store into a new folder.",
            Remark,
            stacklevel=2,
        )
        return f"{kind} {len(known) - 1}"

    # networks -------------------------------------------------------------------------------------------------------

    def layers(self, module: nn.Module) -> str:
        """What the layers of a network hold beside weights that the state dictionary has; empty where that is nothing.

        It decides what they compute: numbers, functions, hooks, which weights are frozen and which are one.
        """
        lines = list[str]()
        for place, layer in module.named_modules():
            if isinstance(layer, torch.jit.ScriptModule):
                lines.append(f"{place}: {getattr(layer, 'code', '')}")
                continue
            held = dict(own_attributes(layer))
            held |= {name: [*vars(layer)[name].values()] for name in HOOKS if vars(layer).get(name)}
            held |= {name: vars(layer)["_buffers"][name] for name in layer._non_persistent_buffers_set}
            lines += [f"{place}.{name} = {self.text(held[name])}" for name in sorted(held)]
        lines += [f"frozen: {name}" for name, p in module.named_parameters() if not p.requires_grad]
        first = dict[int, str]()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if first.setdefault(id(parameter), name) != name:
                lines.append(f"{name} is {first[id(parameter)]}")
        return "\n".join(lines)


def tensors_of(module: nn.Module) -> list[Tensor]:
    """The tensors of a module's state dictionary."""
    return [value for value in module.state_dict().values() if isinstance(value, Tensor)]


def module_shape(module: nn.Module) -> str:
    """A module's layers as it prints them, without the addresses that a user's class may print."""
    return ADDRESS.sub("", str(module))


def own_attributes(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of a layer; of torch's layers those that are no defaults and that it does not print."""
    kind = type(layer)
    named = {name: value for name, value in vars(layer).items() if name not in OF_TORCH}
    if not kind.__module__.startswith("torch."):
        yield from named.items()
        return
    code = kind.extra_repr.__code__
    printed = {*code.co_names, *re.findall(r"\{(\w+)\}", " ".join(c for c in code.co_consts if isinstance(c, str)))}
    taken = inspect.signature(kind.__init__).parameters
    annotated = {name for each in kind.__mro__ for name in inspect.get_annotations(each)}
    for name, value in named.items():
        derived = name.startswith("_") or (name in annotated and name not in taken)  # from its arguments, by torch
        usual = name in taken and is_plain(value) and taken[name].default == value
        if not (derived or usual or name in printed or (name in taken and taken[name].default is value)):
            yield name, value
