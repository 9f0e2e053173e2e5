"""A text that stands for the code of a class or function, also where its file cannot be read, as in a notebook.

The values that code was made with belong to it: those in a function's closure, its defaults, a class's attributes.
"""

from __future__ import annotations

import ast
import dataclasses
import dis
import inspect
import json
import linecache
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from tokenize import TokenError
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..core.method_checks import code_names
from .compiled_code import compiled, contains_code, function_in
from .own_modules import OwnModule, imported_names, imported_texts, module_text
from .value_text import Undescribed, ValueTexts, is_library, is_library_module, is_plain, qualified_name

# by function: values in its closure that may change, as they were when they were first seen. What a hook collects in a
# list does not make it another hook.
FIRST_TEXTS: WeakKeyDictionary[FunctionType, dict[str, tuple[object, str]]] = WeakKeyDictionary()
# by class: its lines, and the number of the first; empty where they cannot be read
CLASS_LINES: WeakKeyDictionary[type, tuple[list[str], int]] = WeakKeyDictionary()
# by function: its code, which is another one if it was loaded again, and its lines; empty where they cannot be read
FUNCTION_LINES: WeakKeyDictionary[FunctionType, tuple[CodeType, str]] = WeakKeyDictionary()


def source_text(thing: object, values: ValueTexts | None = None) -> str:
    """The source text of a function, class or module, and of what beside it it uses; or what else identifies it.

    A text stands for itself. `values` describes the values that the code was made with.
    """
    if isinstance(thing, str):
        return thing
    values = values or ValueTexts(code_of)
    if isinstance(thing, ModuleType):
        return module_text(thing)
    if not isinstance(thing, (type, FunctionType)):
        return values.text(thing)
    text = own_text(thing)
    return "\n".join([text, *used_texts(thing, values), *made_with(thing, values, text)])


def code_of(thing: type | FunctionType, values: ValueTexts) -> str:
    """The text of a function or class that is a value: of a library's the name, with what it was made with."""
    if is_library(thing):
        return "\n".join([qualified_name(thing), *made_with(thing, values, "")])
    return source_text(thing, values)


def own_text(thing: type | FunctionType) -> str:
    """The source text of a function or class alone; where it cannot be read, what else identifies it."""
    if isinstance(thing, FunctionType):
        return function_text(thing)
    lines, first = class_lines(thing)
    if not lines:
        return plain_class_text(thing)
    starts = [f.__code__.co_firstlineno for f in functions_in_file(thing)]
    # Python finds a class by its name, which a file may give to two classes
    is_another = any(not first <= start < first + len(lines) for start in starts)
    return plain_class_text(thing) if is_another else "".join(lines)


def functions_in_file(cls: type) -> list[FunctionType]:
    """The functions of a class that were written in it, and not put there by other code."""
    own = [f for f in vars(cls).values() if isinstance(f, FunctionType) and not hasattr(f, "__wrapped__")]
    return [
        f
        for f in own
        if f.__qualname__ == f"{cls.__qualname__}.{f.__name__}"
        and inspect.getsourcefile(f) == inspect.getsourcefile(cls)
    ]


def class_lines(cls: type) -> tuple[list[str], int]:
    """The lines of a class in its file, and the number of the first; none where they cannot be read, or where the file
    was edited after the class was made.

    They are looked up once: Python parses the whole file for them, and the user may edit it.
    """
    if cls not in CLASS_LINES:
        try:
            CLASS_LINES[cls] = inspect.getsourcelines(cls)
            text = "".join(linecache.getlines(inspect.getsourcefile(cls) or ""))
            if not (is_library(cls) or all(contains_code(text, f.__code__) for f in functions_in_file(cls))):
                CLASS_LINES[cls] = [], 0
        except (OSError, TypeError, SyntaxError, TokenError):
            CLASS_LINES[cls] = [], 0
    return CLASS_LINES[cls]


def class_text(cls: type) -> str:
    """The code of a class without its file, with what beside it it uses."""
    values = ValueTexts(code_of)
    text = plain_class_text(cls)
    return "\n".join([text, *used_texts(cls, values), *made_with(cls, values, text)])


def text_with_values(cls: type, text: str) -> str:
    """The text of a class's module, and the values that the class was made with where it does not say them."""
    return "\n".join([text, *made_with(cls, ValueTexts(code_of), text)])


def network_text(module: nn.Module) -> str:
    """The code of a network's class and of its layers' classes that are not torch's, and what the layers hold."""
    values = ValueTexts(code_of)
    values.within.append(module)  # a layer may hold the whole
    kinds = dict.fromkeys(type(layer) for layer in module.modules())
    own = [kind for kind in kinds if kind is not type(module) and not kind.__module__.startswith("torch.")]
    texts = [source_text(kind, values) for kind in [type(module), *own]]
    held = values.layers(module)
    return "\n".join([*texts, held] if held else texts)


def used_texts(thing: type | FunctionType, values: ValueTexts) -> list[str]:
    """The functions, classes and values of the same module that a class or function uses, and those that they use: to
    change one of them is to change it.
    """
    texts, seen, waiting = list[str](), {id(thing)}, [thing]
    while waiting:
        for function in functions_of(waiting.pop()):
            texts += imported_texts("", OwnModule("", imported_inside(function)))
            for name, value in used_globals(function):
                if id(value) in seen or name.rpartition(".")[2].startswith("__"):
                    continue
                if isinstance(value, (type, FunctionType)) and value.__module__ == thing.__module__:
                    seen.add(id(value))
                    waiting.append(value)
                    text = plain_class_text(value) if isinstance(value, type) else function_text(value)
                    texts += [text, *made_with(value, values, text)]
                else:
                    texts += used_value(function, name, value, values)
    return texts


def used_globals(function: FunctionType) -> Iterator[tuple[str, object]]:
    """What code uses by names of its module, and of a user's own modules among these what it uses by their names."""
    names, seen = set(code_names(function.__code__)), set[int]()
    waiting = [("", function.__globals__)]
    while waiting:
        prefix, space = waiting.pop()
        for name in sorted(names & space.keys()):
            value = space[name]
            yield f"{prefix}{name}", value
            if isinstance(value, ModuleType) and not is_library_module(value) and id(value) not in seen:
                seen.add(id(value))
                waiting.append((f"{prefix}{name}.", vars(value)))


def imported_inside(function: FunctionType) -> tuple[str, ...]:
    """The names of what a function imports when it is called."""
    return imported_names(import_statements(function.__code__), str(function.__globals__.get("__package__") or ""))


@lru_cache(maxsize=1000)
def import_statements(code: CodeType) -> str:
    """The imports in a piece of code, and in what is defined in it."""
    lines = [import_statements(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for level, members, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname == "IMPORT_NAME":
            name = "." * int(level.argval) + str(step.argval)
            lines.append(f"from {name} import {', '.join(members.argval)}" if members.argval else f"import {name}")
    return "\n".join(filter(None, lines))


def used_value(function: FunctionType, name: str, value: object, values: ValueTexts) -> list[str]:
    """A text of a value that code uses by a name of its module; none where the name alone says what it is."""
    try:
        return [f"{name} = {json.dumps(value)}"]
    except (TypeError, ValueError, RecursionError):
        pass
    if is_library(function) or isinstance(value, ModuleType):
        return []
    if getattr(value, "__name__", None) == name and is_library(value):  # imported from there
        return []
    try:
        return [f"{name} = {first_text(function, f'global {name}', value, values.strictly())}"]
    except Undescribed:  # a lock, a file: what code uses so seldom decides what it computes
        return []


def functions_of(thing: type | FunctionType) -> Iterator[FunctionType]:
    """The function, or those of a class and of the classes above it that are in the same module or the user's."""
    if isinstance(thing, FunctionType):
        yield thing
        return
    for each in thing.__mro__:
        for value in vars(each).values() if each.__module__ == thing.__module__ or not is_library(each) else ():
            function = function_in(value)
            if isinstance(function, FunctionType):
                yield function


def plain_class_text(cls: type) -> str:
    """The functions and plain attributes of a class and of those above it that are in the same place."""
    lines = [cls.__qualname__]
    for each in cls.__mro__:
        for name, value in vars(each).items() if each.__module__ == cls.__module__ else ():
            function = function_in(value)
            if isinstance(function, FunctionType):
                lines.append(f"{name}: {function_text(function)}")
            elif is_plain(value) and not name.startswith("__"):
                lines.append(f"{name} = {value!r}")
    return "\n".join(lines)


def function_text(function: FunctionType) -> str:
    """The source text of a function, or else its compiled code and plain defaults."""
    if text := source_lines(inspect.unwrap(function)):
        if function.__name__ != "<lambda>" or (text.count("lambda") == 1 and first_definition(text)):
            return text
        return f"{text} {compiled(function.__code__)}"  # the lines may hold others, or not the whole of it
    defaults, named = function.__defaults__, function.__kwdefaults__
    named = named and {name: value if is_plain(value) else ... for name, value in named.items()}
    defaults = defaults and tuple(value if is_plain(value) else ... for value in defaults)
    return f"{compiled(function.__code__)} {defaults!r} {named!r}"


def source_lines(function: object) -> str:
    """The lines of a function in its file, without what is around it, as they were when it was first seen; empty where
    they cannot be read, or where the file was edited after the function was made.
    """
    if not isinstance(function, FunctionType):
        return ""
    code, text = FUNCTION_LINES.get(function, (None, ""))
    if code is not function.__code__:
        try:
            lines, start = inspect.findsource(function.__code__)
            is_current = is_library(function) or contains_code("".join(lines), function.__code__)
            text = "".join(inspect.getblock(lines[start:])) if is_current else ""
        except (OSError, TypeError, SyntaxError, TokenError):
            text = ""
        FUNCTION_LINES[function] = function.__code__, text
    return text


# the values that code was made with -----------------------------------------------------------------------------------


def made_with(thing: type | FunctionType, values: ValueTexts, shown: str) -> list[str]:
    """Values of a function's or class's that its text, `shown`, does not say, and the code of a class's bases."""
    if is_library(thing) and "<" not in thing.__qualname__:
        return []
    if isinstance(thing, FunctionType):
        return [*function_values(thing, values), *wrapper_texts(thing, shown)]
    lines = class_values(thing, values)
    for function in functions_of(thing):
        lines += wrapper_texts(function, shown)
    for base in [base for base in thing.__mro__[1:] if not is_library(base)]:
        text = own_text(base)
        lines += [*([] if text in shown else [text]), *class_values(base, values)]
    return lines


def wrapper_texts(function: FunctionType, shown: str) -> Iterator[str]:
    """The texts of the user's own decorators around a function that are not shown: its lines name them alone."""
    while isinstance(function, FunctionType) and "__wrapped__" in vars(function):
        home = str(function.__globals__.get("__name__", ""))  # its __module__ is that of what it wraps
        text = source_lines(function) or compiled(function.__code__)
        if text not in shown and not is_library_module(sys.modules.get(home, home)):
            yield text
        function = vars(function)["__wrapped__"]


def class_values(cls: type, values: ValueTexts) -> list[str]:
    """The values of one class: of its functions, and attributes that its text does not say."""
    lines, literals = list[str](), class_literals(cls)
    fields = getattr(cls, "__dataclass_fields__", {})  # of which every object has its own
    for name, value in vars(cls).items():
        function = function_in(value)
        if name in fields or is_pythons_own(name, function, bool(fields)):
            continue
        if isinstance(function, FunctionType):
            lines += [f"{name}: {line}" for line in function_values(function, values)]
        elif not is_said(literals, name, function):
            lines.append(f"{name} = {values.text(function)}")
    return lines


def is_pythons_own(name: str, value: object, is_dataclass: bool) -> bool:
    """Is an attribute of a class what Python put there, as `dataclass` does with functions?"""
    if isinstance(value, FunctionType):
        made = value.__code__.co_filename == "<string>" or value.__globals__ is vars(dataclasses)
        return is_dataclass and name.startswith("__") and made
    slots = (types.MemberDescriptorType, types.GetSetDescriptorType, cached_property)
    return name.startswith(("__", "_abc_")) or isinstance(value, slots)


def is_typed_in(cls: type) -> bool:
    """Was a class typed into a session, or made by `exec`? The file of its module, if there is one, does not say it."""
    functions = {name: function_in(value) for name, value in vars(cls).items()}
    return any(
        isinstance(function, FunctionType)
        and function.__code__.co_filename.startswith("<")
        and not is_pythons_own(name, function, is_dataclass=True)
        for name, function in functions.items()
    )


def is_said(literals: Mapping[str, str], name: str, value: object) -> bool:
    """Does the text of a class or function give this value to a name, as a literal?"""
    return (is_plain(value) or type(value) in (list, dict, tuple)) and literals.get(name) == repr(value)


def function_values(function: FunctionType, values: ValueTexts) -> list[str]:
    """The defaults of a function that its text does not say, the values in its closure, and its attributes."""
    code, given = function.__code__, function.__defaults__ or ()
    named = dict(zip(code.co_varnames[code.co_argcount - len(given) : code.co_argcount], given, strict=True))
    named |= function.__kwdefaults__ or {}
    literals = default_literals(function)
    if literals is None:  # its text is its code, with plain defaults
        held = {name: value for name, value in named.items() if not is_plain(value)}
    else:
        held = {name: value for name, value in named.items() if not is_said(literals, name, value)}
    held |= {f".{name}": value for name, value in vars(function).items() if not name.startswith("_")}
    held |= dict(closure(function))
    return [f"{name} = {first_text(function, name, value, values)}" for name, value in held.items()]


def closure(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The values in a function's closure by name, but for names that it binds anew itself: these are results."""
    own = {"__class__", *rebound(function.__code__)}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            if name not in own:
                yield name, cell.cell_contents
        except ValueError:  # nothing was bound to it yet
            continue


@lru_cache(maxsize=1000)
def rebound(code: CodeType) -> frozenset[str]:
    """The names of the closure that a piece of code, or what is defined in it, binds anew."""
    names = {str(step.argval) for step in dis.get_instructions(code) if step.opname == "STORE_DEREF"}
    inner = [rebound(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(names).union(*inner)


def first_text(function: FunctionType, name: str, value: object, values: ValueTexts) -> str:
    """The text of a value; of an object that may change, as it was when it was first seen in this place."""
    if is_plain(value) or isinstance(value, (type, FunctionType)):
        return values.text(value)
    texts = FIRST_TEXTS.setdefault(function, {})
    if name not in texts or texts[name][0] is not value:
        texts[name] = value, values.text(value)
    return texts[name][1]


def class_literals(cls: type) -> dict[str, str]:
    """The attributes to which the text of a class gives a literal value, with its representation."""
    lines, _ = class_lines(cls)
    if not lines:
        return {name: repr(value) for name, value in vars(cls).items() if is_plain(value)}  # its text has them
    return literal_attributes("".join(lines))


@lru_cache(maxsize=1000)
def literal_attributes(text: str) -> dict[str, str]:
    """The attributes that the first class of a text binds to literals."""
    found: dict[str, str] = {}
    for node in getattr(first_definition(text), "body", ()):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(node, (ast.Assign, ast.AnnAssign)):
                found |= literal(target.id, node.value)
    return found


def default_literals(function: FunctionType) -> dict[str, str] | None:
    """The defaults that the text of a function gives as literals; None: it has no text, and its code shows them."""
    text = source_lines(inspect.unwrap(function))
    if not text:
        return None
    return {} if hasattr(function, "__wrapped__") else literal_arguments(text, function.__name__)


@lru_cache(maxsize=1000)
def literal_arguments(text: str, name: str) -> dict[str, str]:
    """The defaults of a function that are literals in its text."""
    node = first_definition(text)
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.name != name:
        return {}
    arguments, given, found = [*node.args.posonlyargs, *node.args.args], node.args.defaults, dict[str, str]()
    pairs = [*zip(arguments[len(arguments) - len(given) :], given, strict=True)]
    for argument, value in [*pairs, *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]:
        found |= literal(argument.arg, value)
    return found


def first_definition(text: str) -> ast.stmt | None:
    """The first statement of a text that may be indented; none where it is no whole statement, as a lambda's line."""
    try:
        return ast.parse(textwrap.dedent(text)).body[0]
    except (SyntaxError, ValueError, IndexError):
        return None


def literal(name: str, node: ast.expr | None) -> dict[str, str]:
    """The representation of a literal value by its name; empty where the node is none."""
    try:
        return {name: repr(ast.literal_eval(node))} if node is not None else {}
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return {}
