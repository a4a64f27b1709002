"""Settings of methods, fields of frozen dataclasses: their ranges and checks, and methods from JSON and from text."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard, get_args, get_origin, get_type_hints

from condense.named import NAMED_SETTINGS, full_settings


class Range(NamedTuple):
    """The numbers that a setting may be, as part of its type: ``Annotated[int, Range(1)]``."""

    least: float
    most: float = math.inf


Positive = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Share = Annotated[float, Range(0, 1)]
Bits = Literal[16, 8, 4]

# method name -> class; subclasses of `condense.Method` add themselves
REGISTRY: dict[str, type[Any]] = {}


def method_from_dict(settings: dict[str, Any]) -> Any:
    """Make a method from the form of `condense.Method.to_dict`, or from a named setting with some fields changed.

    Raises ValueError for anything but a dict, and for an unknown name or field.
    """
    if not isinstance(settings, dict):
        raise ValueError(f"method settings must be a dict, got {settings!r}")
    fields = dict(full_settings(settings))
    cls = method_class(fields.pop("method", None))
    known = [f.name for f in dataclasses.fields(cls)]
    if unknown := set(fields) - set(known):
        raise ValueError(f"{cls.name}: unknown settings {sorted(unknown)}; known are {known}")
    return cls(**{name: _as_tuples(value) for name, value in fields.items()})


def _as_tuples(value: Any) -> Any:
    """Lists, which JSON makes of tuples, as tuples again, because settings must be hashable; else the value itself."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def method_from_text(text: str) -> Any:
    """A method from ``name`` or ``name:setting=value,...``, as on the command line.

    Raises ValueError for anything else, as `method_from_dict`.
    """
    if "@" in text:
        raise ValueError(f"method must be one for all layers here, got {text!r}: leave out @ and what follows")
    name, _, settings = text.partition(":")
    fields: dict[str, Any] = {"method": name.strip()}
    for part in filter(None, settings.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"method settings must look like name=value, got {part!r} in {text!r}")
        if key.strip() in fields:
            raise ValueError(f"method settings must name each setting once, got {key.strip()!r} again in {text!r}")
        fields[key.strip()] = _value(value.strip())
    return method_from_dict(fields)


def _value(text: str) -> bool | int | float | str:
    """A setting's value from text: ``true`` or ``false``, an int, a float, else the text itself."""
    named = {"true": True, "false": False}
    if text.lower() in named:
        return named[text.lower()]
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def method_class(name: object) -> type[Any]:
    """The registered class of that name. Raises ValueError naming the known methods."""
    if not isinstance(name, str) or name not in REGISTRY:
        known = [*sorted(REGISTRY), *NAMED_SETTINGS]
        close = close_names(str(name).lower(), known) or "; a class of your own must be imported first"
        raise ValueError(f"method must be one of {known}, got {name!r}{close}")
    return REGISTRY[name]


def close_names(name: str, known: Sequence[str]) -> str:
    """The end of a message that refuses a name: known names with almost the same spelling; empty without any."""
    close = difflib.get_close_matches(name, known, 2)
    return f"; close: {', '.join(close)}" if close else ""


def check_fields(settings: Any) -> None:
    """Raise ValueError for a field of a dataclass that is not what its type says: one of some choices, a bool, a number
    in its range, or a list or tuple (of anything).

    A number without a range must be finite. Fields of other types are not checked, nor are annotations as text that
    name something unknown to the class's module.
    """
    fields, kinds = dataclasses.fields(settings), {}
    if any(isinstance(field.type, str) for field in fields):  # from __future__ import annotations
        with suppress(NameError):
            kinds = get_type_hints(type(settings), include_extras=True)
    for field in fields:
        name, kind, value = field.name, kinds.get(field.name, field.type), getattr(settings, field.name)
        if type(None) in get_args(kind):
            if value is None:
                continue
            kind = get_args(kind)[0]
        if get_origin(kind) is Literal:
            check_choice(name, value, get_args(kind))
        elif kind is bool:
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        elif kind in (int, float):
            if not _is_finite(value) or not isinstance(value, int | kind):
                raise ValueError(f"{name} must be {'an integer' if kind is int else 'a finite number'}, got {value!r}")
        elif get_origin(kind) is tuple:
            check_list(name, value)
        elif get_origin(kind) is Annotated:
            number, (least, most) = get_args(kind)
            if number is int:
                check_int(name, value, least)
            elif not _is_finite(value) or not least <= value <= most:
                raise ValueError(f"{name} must be a finite number from {least} to {most}, got {value!r}")


def check_list(name: str, value: object) -> None:
    """Raise ValueError for a single value, and for text, which would be read letter by letter."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list or a tuple, got {value!r}")


def check_int(name: str, value: object, minimum: int) -> None:
    """Raise ValueError unless ``value`` is an int (not a bool) of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")


def check_positive(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is a finite number (not a bool) above 0."""
    if not _is_finite(value) or not value > 0:
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}")


def _is_finite(value: object) -> TypeGuard[float]:
    """True for a finite int or float; a bool, which is an int in Python, is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def check_choice(name: str, value: object, choices: Sequence[str | int]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``, texts or ints."""
    if value not in choices or isinstance(value, float):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
