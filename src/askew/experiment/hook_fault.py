"""What a user's hooks, network or criterion raise, as one sentence that names it and the line."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ..core.algorithm import Algorithm
from ..core.hooks import correct_hook, is_users
from ..core.task import Task
from ..errors import AlgorithmError, AskewError, ModelError
from .value_text import is_library_module

OURS = str(Path(__file__).parents[1])  # the folder of askew itself
GENERATED = ("<string>", "__setattr__")  # file and name of the function by which a dataclass refuses assignments
# what to do, by a part of the exception's text
ADVICE = {
    "calling .item()": "client hooks take no single numbers out of tensors, so that they run for many clients at once: "
    "leave out .item() and float(), or set engine.name = 'sequential'",
    "data-dependent control flow": "client hooks do not branch on a tensor, so that they run for many clients at once: "
    "use torch.where, or set engine.name = 'sequential'",
    "cannot assign to field": "all clients share the method, so keep numbers of your own in server_state(), "
    "client_state() or carry()",
    "single memory location": "hooks change nothing in place: write a + b instead of a.add_(b) or a += b",
}
CALLED_BY = {Task.run_forward.__code__: "network", Task.losses.__code__: "criterion"}
MISSING = (
    "a client finds in client.server what the class names in broadcast, in client.state what client_state() returns, "
    "and in client.carry what carry() returns"
)


@contextmanager
def explain_hooks() -> Iterator[None]:
    """Give what a user's code raises, inside, a sentence; the exception itself is its cause."""
    try:
        yield
    except (AskewError, OSError):
        raise
    except Exception as e:
        if fault := users_fault(e):
            raise fault from e
        raise


def users_fault(e: BaseException) -> AskewError | None:
    """The error for an exception in which a user's code had a part; None where none had."""
    if sentence := hook_fault(e):
        return AlgorithmError(sentence)
    if sentence := task_fault(e):
        return ModelError(sentence)
    return AlgorithmError(sentence) if (sentence := returned_fault(e)) else None


def hook_fault(e: BaseException) -> str | None:
    """The sentence for an exception that came up in a hook of a user's method; None where it came up elsewhere."""
    for frame, line in reversed(list(traceback.walk_tb(e.__traceback__))):
        code = frame.f_code
        method = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if not isinstance(method, Algorithm) or not is_users(method) or code.co_filename.startswith(OURS):
            continue
        if (code.co_filename, code.co_name) == GENERATED:
            continue
        names = {getattr(getattr(cls, n), "__code__", None): n for cls in type(method).__mro__ for n in vars(cls)}
        where = f"{names.get(code, code.co_name)}() failed in {place(frame, line)}"
        advice = next((text for part, text in ADVICE.items() if part in str(e)), "correct the hook")
        return f"{method.display_name()}: {where}: {in_short(e)}; {MISSING if isinstance(e, KeyError) else advice}."
    return None


def task_fault(e: BaseException) -> str | None:
    """The sentence for an exception that came up in a user's network or criterion; None where it came up elsewhere."""
    what = where = ""
    for frame, line in traceback.walk_tb(e.__traceback__):
        what = CALLED_BY.get(frame.f_code, what)
        module = str(frame.f_globals.get("__name__"))
        if what and not is_library_module(sys.modules.get(module, module)):
            where = place(frame, line)
    return f"the {what} failed in {where}: {in_short(e)}; correct the {what}." if where else None


def place(frame: FrameType, line: int) -> str:
    """A line in a user's code."""
    file = frame.f_code.co_filename
    in_cell = Path(file).parent.name.startswith("ipykernel_")  # of a notebook: there is no such file
    return f"line {line} of {'its cell' if in_cell else repr(file)}"


def in_short(e: BaseException) -> str:
    """An exception's type and the first line of its text."""
    text = next(iter(str(e).splitlines()), "").rstrip(" .")
    return f"{type(e).__name__}: {text}" if text else type(e).__name__


def returned_fault(e: BaseException) -> str | None:
    """The sentence for an exception that came up in askew while it used what a user's hooks had returned."""
    for frame, _ in traceback.walk_tb(e.__traceback__):
        for method in (frame.f_locals.get(name) for name in ("alg", "phase", "self")):
            if isinstance(method, Algorithm) and is_users(method):
                return (
                    f"{method.display_name()}: askew failed on what its hooks returned ({type(e).__name__}: {e}); "
                    f"check names, shapes and types of what they return. {correct_hook(method)}"
                )
    return None
