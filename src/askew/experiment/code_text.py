"""A text that stands for the code of a class or function, also where its file cannot be read, as in a notebook."""

from __future__ import annotations

import inspect
from types import CodeType, FunctionType

PLAIN = (str, int, float, bool, tuple, type(None))  # attributes of which the text shows the value


def source_text(thing: object) -> str:
    """The source text of a function, class or module, or what else tells it from others; a text stands for itself."""
    if isinstance(thing, str):
        return thing
    try:
        return inspect.getsource(thing)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return class_text(thing) if isinstance(thing, type) else function_text(thing)


def class_text(cls: type) -> str:
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
