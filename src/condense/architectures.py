"""Names of architectures: a condensed model is saved under one of its own, which engines without `condense` refuse.

Trainers look up a model's class in transformers by its architecture, so it is read under the stock one; but not in an
engine with the plugin, which serves condensed models under the name that they were saved with.
"""

from __future__ import annotations

from typing import Any

_PREFIX = "Condensed"
_KEY = "architectures"
_reads_stock = True


def condensed_architecture(name: str) -> str:
    """The name of an architecture once it is condensed."""
    return name if name.startswith(_PREFIX) else _PREFIX + name


def as_written(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a condensed model's configuration with the names of condensed architectures."""
    return content | {_KEY: [condensed_architecture(name) for name in content[_KEY]]} if content.get(_KEY) else content


def as_read(content: dict[str, Any]) -> dict[str, Any]:
    """The content of any configuration with the names under which the process knows its architectures.

    Those of other libraries that begin alike are left as they are: a condensed model's content names `condense`.
    """
    if not _reads_stock or not content.get(_KEY) or not _is_condensed(content):
        return content
    return content | {_KEY: [name.removeprefix(_PREFIX) for name in content[_KEY]]}


def _is_condensed(content: dict[str, Any]) -> bool:
    parts = content.get("attn_implementation")
    return "condense" in content or (isinstance(parts, dict) and "condense" in parts.values())


def read_as_written() -> None:
    """From now on this process knows condensed architectures: for plugins of engines.

    A trainer in the same process, too, is then given those of models that it loads later.
    """
    global _reads_stock
    _reads_stock = False
