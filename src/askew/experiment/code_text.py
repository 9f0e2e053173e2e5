"""A text that stands for the code of a class or function, also where its file cannot be read, as in a notebook."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from types import CodeType, FunctionType

from ..core.method_checks import code_names

PLAIN = (str, int, float, bool, tuple, type(None))  # attributes of which the text shows the value


def source_text(thing: object) -> str:
    """The source text of a function, class or module, and of what beside it it uses; or what else identifies it.

    A text stands for itself.
    """
    if isinstance(thing, str):
        return thing
    try:
        text = inspect.getsource(thing)  # type: ignore[arg-type]
    except (OSError, TypeError):
        text = plain_class_text(thing) if isinstance(thing, type) else function_text(thing)
    return "\n".join([text, *used_texts(thing)]) if isinstance(thing, (type, FunctionType)) else text


def class_text(cls: type) -> str:
    """The code of a class without its file, with what beside it it uses."""
    return "\n".join([plain_class_text(cls), *used_texts(cls)])


def used_texts(thing: type | FunctionType) -> list[str]:
    """The functions, classes and plain values of the same module that a class or function uses, and those that they
    use: to change one of them is to change it.
    """
    texts, seen, waiting = list[str](), {id(thing)}, [thing]
    while waiting:
        for function in functions_of(waiting.pop()):
            for name in sorted(set(code_names(function.__code__)) & function.__globals__.keys()):
                value = function.__globals__[name]
                if id(value) in seen or name.startswith("__"):
                    continue
                if isinstance(value, (type, FunctionType)):
                    if value.__module__ == thing.__module__:
                        seen.add(id(value))
                        waiting.append(value)
                        texts.append(plain_class_text(value) if isinstance(value, type) else function_text(value))
                else:
                    texts += plain_value(name, value)
    return texts


def plain_value(name: str, value: object) -> list[str]:
    """A text of a value that consists of numbers and texts; none of others."""
    try:
        return [f"{name} = {json.dumps(value)}"]
    except (TypeError, ValueError, RecursionError):
        return []


def functions_of(thing: type | FunctionType) -> Iterator[FunctionType]:
    """The function, or those of a class and of the classes above it in the same module."""
    if isinstance(thing, FunctionType):
        yield thing
        return
    for each in thing.__mro__:
        for value in vars(each).values() if each.__module__ == thing.__module__ else ():
            function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
            if isinstance(function, FunctionType):
                yield function


def plain_class_text(cls: type) -> str:
    """The functions and plain attributes of a class and of those above it that are in the same place."""
    lines = [cls.__qualname__]
    for each in cls.__mro__:
        for name, value in vars(each).items() if each.__module__ == cls.__module__ else ():
            function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
            if isinstance(function, FunctionType):
                lines.append(f"{name}: {function_text(function)}")
            elif isinstance(value, PLAIN) and not name.startswith("__"):
                lines.append(f"{name} = {value!r}")
    return "\n".join(lines)


def function_text(function: object) -> str:
    """The source text of a function, or else its compiled code and defaults; of anything else, its representation."""
    if not isinstance(function, FunctionType):
        return repr(function)
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return f"{compiled(function.__code__)} {function.__defaults__!r} {function.__kwdefaults__!r}"


def compiled(code: CodeType) -> str:
    """What a piece of compiled code does, without where it stands."""
    inner = [compiled(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {inner} {code.co_names} {code.co_varnames} {code.co_freevars}"
