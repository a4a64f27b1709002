"""The form in which a choice of methods stands in a model's configuration, as ``config.condense``.

``{"methods": [{"method": {"method": "cca", ...}, "layers": [0, 1, ...]}, ...]}``, in JSON types; a saved configuration
also names the version that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from condense.methods.base import Method
from condense.version import __version__


def settings_of(assignment: Mapping[int, Method]) -> dict[str, Any]:
    """``config.condense``: each method once, with its layers, in JSON types."""
    methods = dict.fromkeys(assignment.values())
    return {
        "methods": [
            {"method": method.to_dict(), "layers": [i for i in sorted(assignment) if assignment[i] == method]}
            for method in methods
        ]
    }


def methods_in(settings: Any) -> dict[int, Method]:
    """Layer to method from ``config.condense``.

    Raises ValueError for anything but what `settings_of` makes, and names the version that wrote it where it is not
    this one.
    """
    try:
        return {int(i): Method.parse(part["method"]) for part in settings["methods"] for i in part["layers"]}
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            'config.condense must be {"methods": [{"method": {...}, "layers": [...]}, ...]}, as condense.apply writes '
            f"it, got {settings!r}"
        ) from error
    except ValueError as error:
        version = settings.get("version", __version__)
        if version == __version__:
            raise
        raise ValueError(
            f"config.condense was written by condense {version}, this is {__version__}: {error}"
        ) from error
