"""`condense methods`: the methods, and the settings of one."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from condense.cli.options import plain_console


def methods_command(
    name: Annotated[str | None, typer.Argument(help="A method, to see its settings. Default: list all.")] = None,
) -> None:
    """The methods, or one method's settings, explained, with their types and defaults."""
    from rich.table import Table

    from condense.config import method_class, method_names

    console = plain_console()
    if name is None:
        table = Table("method", "what it does", box=None)
        for each in method_names():
            table.add_row(each, paragraphs(method_class(each)).partition("\n")[0])
        console.print(table)
        return
    cls = method_class(name)
    console.print(paragraphs(cls))
    for base in cls.__mro__[1:]:
        if dataclasses.is_dataclass(base) and dataclasses.fields(base):
            console.print(f"{base.__name__}: {paragraphs(base)}")
    fields, types = dataclasses.fields(cls), get_type_hints(cls)
    if not fields:
        return
    table = Table("setting", "values", "default", box=None)
    for field in fields:
        table.add_row(field.name, _values(types[field.name]), _default(field))
    console.print(table)
    example = f"--method {cls.name}:{fields[0].name}={_default(fields[0])}"
    console.print(f"As an option: {example}")


def paragraphs(documented: Any) -> str:
    """The docstring of a class or function, each paragraph on one line, without its end, which says what is raised."""
    text = (inspect.getdoc(documented) or "").partition("Raises ValueError")[0].replace("``", "")
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n")) + "\n"


def _default(field: dataclasses.Field[Any]) -> str:
    return ", ".join(field.default) if isinstance(field.default, tuple) else str(field.default)


def _values(kind: Any) -> str:
    """A setting's type in words: ``a`` or ``b`` for choices."""
    if get_origin(kind) is tuple:
        return f"{_values(get_args(kind)[0])}, or several in a file"
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if get_args(kind):
        return " or ".join(_values(part) for part in get_args(kind))
    return "None" if kind is type(None) else str(kind.__name__)
