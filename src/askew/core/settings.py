"""Settings: frozen dataclasses whose fields say what they mean and refuse what they cannot be.

Algorithms, datasets, partitions, participation models, networks and the tables of a configuration are all
`Settings`; so one function builds any of them from a TOML table and one function lists any of them.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
import re
import types
import typing
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar, dataclass_transform

from ..errors import ConfigError, Remark, UnknownName, did_you_mean

T = TypeVar("T")
S = TypeVar("S", bound="Settings")
LARGEST = 10**12  # no count of anything here is larger
COMPARE = {"above": operator.gt, "least": operator.ge, "below": operator.lt, "most": operator.le}  # by name of a limit


def setting(
    doc: str = "",
    *,
    default: T,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    hint: str = "",
    tries: tuple[T, ...] = (),
    infinite: bool = False,
) -> T:
    """Declare one field: what it means, its default, its range (open: above, below), what to try instead, and whether
    it may be infinite.

    `tries` are the values among which `askew tune` chooses; none: it stays as it is configured.
    """
    limits = {"above": above, "least": least, "below": below, "most": most}
    metadata = {
        "doc": doc,
        "hint": hint,
        "choices": choices,
        "tries": tries,
        "infinite": infinite,
        "limits": {k: v for k, v in limits.items() if v is not None},
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(setting,))
class Settings:
    """Every subclass is a frozen, keyword-only dataclass; a plain override of an inherited field is a new default."""

    title: ClassVar[str] = ""  # how error sentences call it; the class name if empty
    digested: ClassVar[tuple[str, ...]] = ()  # fields of which a configuration's digest depends even at their defaults

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        bases = [base for base in reversed(cls.__mro__[1:]) if dataclasses.is_dataclass(base)]
        inherited = {f.name: (f, field_types(base)[f.name]) for base in bases for f in dataclasses.fields(base)}
        own = inspect.get_annotations(cls)
        for name in [n for n in cls.__dict__ if n in inherited and n not in own]:
            old, kind = inherited[name]
            own = own | {name: kind}
            setattr(cls, name, dataclasses.field(default=cls.__dict__[name], metadata=old.metadata))
        cls.__annotations__ = own
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        cls = type(self)
        defaults = checked_defaults.setdefault(cls, {})
        for name, (field, kind) in checked_fields(cls).items():
            value = getattr(self, name)
            if value is field.default and name in defaults:  # most values; checked when the first of them came
                checked = defaults[name]
            else:
                checked = check_value(value, kind, field, self.display_name())
                if value is field.default:
                    defaults[name] = checked
            if checked is not value:
                object.__setattr__(self, name, checked)
        self.check()

    def check(self) -> None:
        """Refuse combinations that no single field can refuse; raise ConfigError."""

    def reads(self) -> tuple[Path, ...]:
        """Files whose contents belong to the settings: a run of another content is another run."""
        return ()

    @classmethod
    def settings_class(cls) -> type[Self]:
        """The class that a configuration names, where an instance's own class was made from it."""
        return cls

    @classmethod
    def display_name(cls) -> str:
        return cls.title or cls.__name__

    @classmethod
    def build(cls, table: Mapping[str, object], where: str = "") -> Self:
        """An instance from a table of plain values; `where` is the table's path in the configuration."""
        known = checked_fields(cls)
        for key in table:
            if key not in known:
                raise ConfigError(
                    f"{cls.display_name()}: unknown setting {where + '.' if where else ''}{key}; "
                    f"{did_you_mean(key, known)}"
                )
        return cls(**table)

    def table(self) -> dict[str, object]:
        """All fields as plain values, in order of declaration."""
        return {name: getattr(self, name) for name in checked_fields(type(self))}


# What all instances of a class share is kept by class: the papers' experiments are thousands of configurations.
known_types: dict[type, Mapping[str, Any]] = {}
known_fields: dict[type, Mapping[str, tuple[dataclasses.Field[Any], Any]]] = {}
checked_defaults: dict[type, dict[str, object]] = {}
unset_instances: dict[type, Settings] = {}


def field_types(cls: type) -> Mapping[str, Any]:
    """The resolved annotations of a class's fields."""
    if cls not in known_types:
        known_types[cls] = typing.get_type_hints(cls)
    return known_types[cls]


def checked_fields(cls: type) -> Mapping[str, tuple[dataclasses.Field[Any], Any]]:
    """The fields of a class with their types, by name."""
    if cls not in known_fields:
        kinds = field_types(cls)
        known_fields[cls] = {f.name: (f, kinds[f.name]) for f in dataclasses.fields(typing.cast(Any, cls))}
    return known_fields[cls]


def with_defaults(cls: type[S]) -> S:
    """The settings of a class with nothing set; one frozen instance serves all."""
    if cls not in unset_instances:
        unset_instances[cls] = cls()
    return typing.cast(S, unset_instances[cls])


def is_off(value: object) -> bool:
    """Is this number switched off for good? A tensor never is: it may hold another value at the next replay."""
    return isinstance(value, (int, float)) and value == 0


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def matches_type(value: object, kind: Any) -> bool:
    """Does a plain value match an annotation?"""
    if kind is float:
        return is_number(value) and not math.isnan(float(typing.cast(float, value)))
    if kind is int:
        return is_number(value) and float(typing.cast(float, value)).is_integer()
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(matches_type(value, arg) for arg in args)
    if origin is tuple:
        return isinstance(value, (list, tuple)) and all(matches_type(v, args[0]) for v in value)
    return value is None if kind is type(None) else isinstance(value, kind)


def type_in_words(kind: Any) -> str:
    """An annotation in words."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_in_words(arg) for arg in args)
    if origin is tuple:
        return f"a list, each item {type_in_words(args[0])}"
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text in quotes",
        type(None): "left out",
    }
    return words.get(kind, getattr(kind, "__name__", str(kind)))


def allowed_values(field: dataclasses.Field[Any], kind: Any) -> str:
    """What a field may be, in words: its choices, its range or its type."""
    if field.metadata.get("choices"):
        return "one of " + ", ".join(field.metadata["choices"])
    signs = {"above": ">", "least": "≥", "below": "<", "most": "≤"}
    limits = " and ".join(f"{signs[k]} {v:g}" for k, v in field.metadata.get("limits", {}).items())
    if not limits or kind in (int, float):
        return limits or type_in_words(kind)
    words = " or ".join(type_in_words(arg) for arg in typing.get_args(kind) if arg is not type(None))
    return f"{words} {limits}{', or left out' if type(None) in typing.get_args(kind) else ''}"


def check_value(value: object, kind: Any, field: dataclasses.Field[Any], owner: str) -> object:
    """The value, made canonical (2 → 2.0, list → tuple), or a sentence."""
    meta = field.metadata
    if hasattr(value, "dtype") and getattr(value, "ndim", None) == 0:
        value = typing.cast(Any, value).item()  # a number of numpy or torch

    def refuse(rule: str) -> ConfigError:
        usual = (
            f"the default is {toml_text(field.default)}."
            if field.default is not None
            else "leave it out for the default."
        )
        tail = meta.get("hint") or (usual if field.default is not dataclasses.MISSING else "")
        return ConfigError(f"{owner}: {field.name} must be {rule}, got {toml_text(value)}; {tail}".rstrip("; "))

    if not matches_type(value, kind):
        if isinstance(value, str) and meta.get("choices"):
            raise refuse(allowed_values(field, kind))
        raise refuse(type_in_words(kind) if kind is not str or not meta.get("choices") else allowed_values(field, kind))
    if meta.get("choices") and isinstance(value, str) and value not in meta["choices"]:
        sentence = f"{owner}: unknown {field.name} {value!r}; {did_you_mean(value, meta['choices'])}"
        raise UnknownName(f"{sentence.rstrip('.')}; {meta['hint']}" if meta["hint"] else sentence)
    if is_number(value):
        got = float(typing.cast(float, value))
        if not all(COMPARE[name](got, limit) for name, limit in meta.get("limits", {}).items()):
            raise refuse(allowed_values(field, kind))
        if math.isinf(got) and not meta.get("infinite", False):
            raise refuse("finite")
        whole = kind is int or int in typing.get_args(kind)
        if whole and abs(got) > LARGEST:
            raise refuse(f"at most {LARGEST:,}")
        return int(got) if whole else got + 0.0  # −0 becomes 0
    return tuple(value) if isinstance(value, list) else value


def toml_text(value: object) -> str:
    """A value as a TOML file would show it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_text(v) for v in value) + "]"
    return "none" if value is None else repr(value) if isinstance(value, str) else f"{value}"


def require_arguments(settings: Settings, name: str) -> None:
    """Refuse a method of a user's class that cannot be called with the arguments that askew's class has for it."""
    method = getattr(settings, name)
    if is_askews(method):
        return
    ours = next(vars(cls)[name] for cls in type(settings).__mro__ if is_askews(cls) and name in vars(cls))
    if fault := arguments_fault(settings, name, ours, callable(method)):
        raise ConfigError(f"{settings.display_name()}: {fault}; correct it.")


def arguments_fault(owner: object, name: str, ours: Any, is_function: bool) -> str:
    """What is wrong with an object's own method, which is called with the arguments of askew's; empty if nothing is."""
    method, wanted = getattr(owner, name), [*inspect.signature(ours).parameters][1:]
    call = f"({', '.join(('self', *wanted))})"
    if not is_function:
        return f"{name} must be a function {name}{call}, and is {method!r}"
    taken = inspect.signature(method)
    try:
        taken.bind(*wanted)
    except TypeError:
        parameters = [p.replace(annotation=p.empty) for p in taken.parameters.values()]
        taken = taken.replace(parameters=parameters, return_annotation=taken.empty)
        return f"{name}() is called with {call}, and takes ({', '.join(filter(None, ('self', str(taken)[1:-1])))})"
    return ""


def is_askews(defined: Any, package: str = "askew") -> bool:
    """Is a class, the class of an object, or a function one of askew's, or of a package of it, and not a user's?

    Of a function it is asked where its code was written: functools.wraps copies the name of another's module.
    """
    if isinstance(defined, types.MethodType):
        defined = defined.__func__
    if isinstance(defined, types.FunctionType):
        home = defined.__globals__.get("__name__", "")
    else:
        home = (defined if isinstance(defined, type) else type(defined)).__module__
    return str(home).startswith(f"{package}.")


def is_edited(old: type, new: type) -> bool:
    """Is a class the next version of another: of the same name from the same file, or from the same session?"""
    if old.__module__ != new.__module__ or is_askews(old):
        return False
    return old.__module__ == "__main__" or old.__qualname__ == new.__qualname__


class Registry(Generic[T]):
    """Names to classes; a new member is one line, a user's own one call."""

    def __init__(self, kind: str, members: Mapping[str, type[T]]) -> None:
        self.kind, self.members = kind, dict(members)

    def __getitem__(self, name: str) -> type[T]:
        if name not in self.members:
            raise UnknownName(f"unknown {self.kind} {name!r}; {did_you_mean(name, self.members)}")
        return self.members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.members)

    def __contains__(self, name: object) -> bool:
        return name in self.members

    def name_of(self, member: object) -> str:
        """The registered name of an instance or class; its own class name, in small letters, if there is none."""
        cls = member if isinstance(member, type) else type(member)
        cls = cls.settings_class() if issubclass(cls, Settings) else cls
        return next((name for name, known in self.members.items() if known is cls), cls.__name__.lower())

    def register(self, name: str, member: type[T], *, replace: bool = False) -> type[T]:
        """Add a class under a name of its own; replacing another one than its own earlier version must be said."""
        if not re.fullmatch(r"\w[\w.-]*", name):  # folders of runs have it, options take it, and commas separate names
            raise ConfigError(
                f'the {self.kind} cannot have the name {name!r}; use letters, digits, "_", "-" and ".", and begin with '
                "none of the last two."
            )
        old = self.members.get(name, member)
        if old is not member and not replace:
            if not is_edited(old, member):
                raise ConfigError(
                    f"the {self.kind} {name!r} exists already; choose another name, or pass replace=True."
                )
            sentence = f"the {self.kind} {name!r} was registered again; runs from now on use the new class."
            warnings.warn(sentence, Remark, stacklevel=3)
        self.members[name] = member
        return member
