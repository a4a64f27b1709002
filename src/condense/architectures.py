"""Names of architectures: a condensed model is saved under a name of its own, which engines without `condense` refuse.

Trainers look up a model's class in transformers by its architecture, so a saved model is read with the stock name. An
engine with the plugin reads the saved name, because it serves condensed models under that one.
"""

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
    """The content of any configuration with stock names of architectures, unless `read_as_written` was called.

    Only a condensed model's names change: another library's name may begin with the same word.
    """
    if not _reads_stock or not content.get(_KEY) or not _is_condensed(content):
        return content
    return content | {_KEY: [name.removeprefix(_PREFIX) for name in content[_KEY]]}


def _is_condensed(content: dict[str, Any]) -> bool:
    parts = content.get("attn_implementation")
    return "condense" in content or (isinstance(parts, dict) and "condense" in parts.values())


def read_as_written() -> None:
    """Leave the names of condensed architectures as they are saved from now on, for plugins of engines.

    This holds for the whole process: a trainer in it would get the saved names too.
    """
    global _reads_stock
    _reads_stock = False
