"""`condense methods`: the methods, named settings, and the settings of one."""

import dataclasses
import inspect
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from condense.cli.options import plain_console, plain_table


def methods_command(
    name: Annotated[
        str | None, typer.Argument(help="A method, or a named setting, to see all its settings. Default: list all.")
    ] = None,
) -> None:
    """The methods and the named settings, or one's settings, explained, with their types and defaults."""
    from condense.config import REGISTRY, method_class
    from condense.named import NAMED_SETTINGS, full_settings

    console = plain_console()
    if name is None:
        named = [(each, named.use) for each, named in NAMED_SETTINGS.items()]
        console.print(plain_table(left=["named setting", "what they are for"], rows=named))
        methods = [(each, paragraphs(REGISTRY[each]).partition("\n")[0]) for each in sorted(REGISTRY)]
        console.print(plain_table(left=["method", "what it does"], rows=methods))
        return
    name, _, changes = name.partition(":")
    if changes:
        raise ValueError(f"name must be that of a method or of settings, without settings of its own, got :{changes}")
    settings = full_settings({"method": name})
    cls = method_class(settings["method"])
    if name in NAMED_SETTINGS:
        changed = ",".join(f"{key}={value}" for key, value in settings.items() if key != "method")
        print(f"{name}: {NAMED_SETTINGS[name].use}\nIn full: --method {cls.name}:{changed}\n")
    console.print(paragraphs(cls))
    for base in cls.__mro__[1:]:
        if dataclasses.is_dataclass(base) and dataclasses.fields(base):
            console.print(f"{base.__name__}: {paragraphs(base)}")
    fields, types = dataclasses.fields(cls), get_type_hints(cls)
    if not fields:
        return
    own = [name] if name in NAMED_SETTINGS else []
    table = plain_table(left=["setting", "values", "default", *own])
    for field in fields:
        default = shown(field.default)
        table.add_row(
            field.name, _values(types[field.name]), default, *(str(settings.get(field.name, default)) for _ in own)
        )
    console.print(table)
    print(f"As an option: --method {name}:{fields[0].name}={shown(fields[0].default)}")


def paragraphs(documented: Any) -> str:
    """The docstring of a class or function, each paragraph on one line, without its end, which says what is raised."""
    text = (inspect.getdoc(documented) or "").partition("Raises ValueError")[0].replace("``", "")
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n")) + "\n"


def shown(value: Any) -> str:
    """A setting's value as text; several values stand between commas."""
    return (", ".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)


def _values(kind: Any) -> str:
    """A setting's type in words: ``a`` or ``b`` for choices."""
    if get_origin(kind) is tuple:
        return f"{_values(get_args(kind)[0])}, or several in a file"
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if get_args(kind):
        return " or ".join(_values(part) for part in get_args(kind))
    return "None" if kind is type(None) else str(kind.__name__)
