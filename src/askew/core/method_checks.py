"""What is checked of a method that is not askew's own before its first round: names, arguments and declarations."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from difflib import get_close_matches
from types import CodeType, FunctionType
from typing import Any

from ..errors import AlgorithmError
from .algorithm import Algorithm
from .hooks import correct_hook, is_users, watch_anew, wrong_return
from .settings import arguments_fault, is_askews
from .types import Part, State

INTERFACE = {name: value for name, value in vars(Algorithm).items() if not name.startswith("_")}
HOOKS = {name for name, value in INTERFACE.items() if isinstance(value, FunctionType)}
TUPLES = ("broadcast", "before", "each", "after", "needs")  # class attributes that are tuples of names
TEXTS = ("title", "paper", "idea", "drift_state", "own_weights", "stale")  # that are texts
SWITCHES = ("trains", "pooled", "exact", "alike")  # that are True or False
COMBINED = ("mean", "rows", "directions", "models", "reports", "nothing")  # what `combines` may be
LOOKS = ("gradient", "validation")
KEPT = ("server_state", "client_state", "memory", "parts", "private")  # hooks that the method has for all its phases
MODELS = ("global", "clients", "mean")  # what `evaluates` may return


def check_method(alg: Algorithm) -> None:
    """Refuse a method with a misspelt hook, a hook that takes other arguments, or a declaration of another type."""
    watch_anew()
    phases = alg.phases()
    if not (isinstance(phases, tuple) and phases and all(isinstance(phase, Algorithm) for phase in phases)):
        raise wrong_return(alg, "phases", "a tuple of algorithms", phases)
    for phase in (alg, *(p for p in phases if p is not alg)):
        if on_object := sorted(HOOKS & vars(phase).keys()):
            raise AlgorithmError(
                f"{phase.display_name()}: {on_object[0]}() was set on the object, where engines do not look for it; "
                "write a class of your own that defines it."
            )
        if is_users(phase):
            check_names(phase)
            check_arguments(phase)
            check_attributes(phase)
    for phase in phases:
        if type(phase).aggregate is Algorithm.aggregate:
            raise AlgorithmError(
                f"{phase.display_name()} has no aggregate(w, up, cohort, server), which makes the new model of the "
                f"uploads; write it, or derive the class from askew.algorithms.FedAvg, whose average it then has. "
                f"{correct_hook(phase)}"
            )
        if is_users(alg):
            refuse_undeclared(alg, phase)
    if alg.evaluates() not in MODELS:
        raise AlgorithmError(
            f"{alg.display_name()}: evaluates() must return one of {', '.join(MODELS)}, and returned "
            f"{alg.evaluates()!r}. {correct_hook(alg)}"
        )
    if alg.evaluates() != "global" and type(alg).private is Algorithm.private:
        raise AlgorithmError(
            f"{alg.display_name()}: evaluates() returned {alg.evaluates()!r}, and the class has no private(): only "
            "private parts make models of the clients' own that are measured, and a model in client_state() is not; "
            f"write private(), or measure such a model by a look, as docs/add-algorithm.md shows. {correct_hook(alg)}"
        )


def refuse_undeclared(alg: Algorithm, phase: Algorithm) -> None:
    """Refuse a phase, perhaps the method itself, that needs or keeps what the method does not declare."""
    name, looks = alg.display_name(), {*phase.before, *phase.each, *phase.after}
    wanted = dict.fromkeys((*phase.needs, *(["validation"] if "validation" in looks else [])))
    if undeclared := [need for need in wanted if need not in alg.needs]:
        raise AlgorithmError(
            f"{phase.display_name()} needs {undeclared[0]!r}, which {name} does not declare; write "
            f"needs = {(*alg.needs, *undeclared)} in {name}. {correct_hook(alg)}"
        )
    for hook in KEPT:
        if getattr(type(alg), hook) is getattr(Algorithm, hook) is not getattr(type(phase), hook):
            raise AlgorithmError(
                f"{phase.display_name()} has {hook}(), and as a phase of {name} it has what {name} declares, which is "
                f"nothing; write {hook}() in {name}. {correct_hook(alg)}"
            )


def own_classes(alg: Algorithm) -> list[type]:
    """The classes of a method that are not askew's."""
    return [cls for cls in type(alg).__mro__ if issubclass(cls, Algorithm) and not is_askews(cls)]


def check_names(alg: Algorithm) -> None:
    """Refuse a name that nothing uses and that is nearly one of the interface: it was meant to be that one."""
    settings = {field.name for field in fields(alg)}
    classes = own_classes(alg)
    used = {name for cls in classes for name in names_used(vars(cls).values())}
    for cls in classes:
        for name in vars(cls):
            if name.startswith("_") or name in INTERFACE or name in settings or name in used or inherited(cls, name):
                continue
            near = get_close_matches(name, INTERFACE, n=1, cutoff=0.8)
            if near and name not in module_names(cls):
                raise AlgorithmError(
                    f"{alg.display_name()}: {name!r} is no hook and nothing uses it; did you mean {near[0]!r}? "
                    f"A helper of your own that is called from elsewhere begins with an underscore. {correct_hook(alg)}"
                )


def inherited(cls: type, name: str) -> bool:
    """Has a class above this one the same name? It is then no slip of the pen."""
    return any(name in vars(above) for above in cls.__mro__[1:])


def names_used(values: Iterable[Any]) -> Iterator[str]:
    """All names that functions, and functions inside of them, look up."""
    for value in values:
        for function in (getattr(value, "fget", None), getattr(value, "__func__", None), value):
            if isinstance(function, FunctionType):
                yield from code_names(function.__code__)


def module_names(cls: type) -> set[str]:
    """All names that the functions and classes beside a class look up."""
    beside = [*vars(sys.modules.get(cls.__module__, cls)).values()]
    inside = [value for each in beside if isinstance(each, type) for value in vars(each).values()]
    return {*names_used(beside), *names_used(inside)}


def code_names(code: CodeType) -> Iterator[str]:
    """All names that a piece of code, and what is defined in it, looks up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_names(constant)


def check_arguments(alg: Algorithm) -> None:
    """Refuse a hook that cannot be called with the arguments of the interface."""
    for cls in own_classes(alg):
        for name, value in vars(cls).items():
            hook = INTERFACE.get(name)
            if not isinstance(hook, FunctionType):
                continue
            is_function = isinstance(value, (FunctionType, staticmethod, classmethod))
            if fault := arguments_fault(alg, name, hook, is_function):
                raise AlgorithmError(f"{alg.display_name()}: {fault}. {correct_hook(alg)}")


def check_attributes(alg: Algorithm) -> None:
    """Refuse class attributes of another type than the interface's, and names that there are not."""
    check_simple_attributes(alg)
    for name in TUPLES:
        value = getattr(alg, name)
        if not isinstance(value, tuple) or not all(isinstance(entry, str) for entry in value):
            raise AlgorithmError(
                f'{alg.display_name()}: {name} must be a tuple of names, such as ("g",), got {value!r}. '
                f"{correct_hook(alg)}"
            )
    for name in ("before", "each", "after"):
        for look in getattr(alg, name):
            if look not in LOOKS:
                raise AlgorithmError(
                    f"{alg.display_name()}: {name} names the look {look!r}; there are {' and '.join(LOOKS)}. "
                    f"{correct_hook(alg)}"
                )


def check_simple_attributes(alg: Algorithm) -> None:
    """Refuse class attributes that are not the text, the switch or the name that they must be."""
    name = alg.display_name() if isinstance(alg.title, str) else alg.settings_class().__name__
    wanted = [(text, "a text", isinstance(getattr(alg, text), str)) for text in TEXTS]
    wanted += [(switch, "True or False", isinstance(getattr(alg, switch), bool)) for switch in SWITCHES]
    wanted += [("combines", f"one of {', '.join(COMBINED)}", alg.combines in COMBINED)]
    for attribute, what, right in wanted:
        if not right:
            raise AlgorithmError(
                f"{name}: {attribute} must be {what}, got {getattr(alg, attribute)!r}. {correct_hook(alg)}"
            )


def check_declared(alg: Algorithm, kept: State, parts: object, private: object) -> None:
    """Refuse parts that are none, and broadcasts of what neither server state nor memory, `kept`, holds."""
    if not isinstance(parts, dict) or not all(isinstance(part, Part) for part in parts.values()):
        raise wrong_return(alg, "parts", "a dictionary of parts by name, as space.last_layers(1) gives one", parts)
    if not isinstance(private, Part):
        raise wrong_return(alg, "private", "a part, as space.last_layers(1) gives one", private)
    for phase in (alg, *alg.phases()):
        unknown = [name for name in phase.broadcast if name not in kept] if is_users(phase) else []
        if unknown:
            raise AlgorithmError(
                f"{phase.display_name()}: broadcast names {unknown[0]!r}, and server_state() and memory() declare "
                f"{', '.join(map(repr, kept)) or 'nothing'}; declare it there. {correct_hook(phase)}"
            )
