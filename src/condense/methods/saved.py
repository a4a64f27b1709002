"""The form in which a choice of methods stands in a model's configuration, as ``config.condense``.

``{"methods": [{"method": {"method": "cca", ...}, "layers": [0, 1, ...]}, ...]}``; once saved, with a version.
"""

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from condense.methods.base import Method
from condense.version import __version__


def settings_of(assignment: Mapping[int, Method]) -> dict[str, Any]:
    """The value of ``config.condense``: each method once, with its layers, in JSON types."""
    return {
        "methods": [
            {"method": method.to_dict(), "layers": [i for i in sorted(assignment) if assignment[i] == method]}
            for method in dict.fromkeys(assignment.values())
        ]
    }


def check_names(methods: Iterable[Method]) -> None:
    """Raise ValueError for a method whose class has no name of its own: once saved, it would be loaded as its base."""
    for method in methods:
        cls = type(method)
        if not vars(cls).get("name"):
            inherited = f", and inherits {method.name!r}" if method.name else ""
            raise ValueError(
                f"{cls.__name__} must have a name of its own, by which a saved model finds it{inherited}: give the "
                f"class name: ClassVar[str] = {cls.__name__.lower()!r}"
            )


def methods_in(settings: Any, where: str = "config.condense") -> dict[int, Method]:
    """The method of each layer, from ``config.condense`` or the content of a file; ``where`` names it in errors.

    Raises ValueError for settings of another form than `settings_of` makes, for layers that are not a list of integers
    >= 0, for a layer that is named twice, and if none is named; the message says if another version wrote them.
    """
    methods: dict[int, Method] = {}
    try:
        for part in settings["methods"]:
            method, layers = Method.parse(part["method"]), part["layers"]
            if not isinstance(layers, list) or not all(type(i) is int and i >= 0 for i in layers):
                raise ValueError(f"layers must be a list of integers >= 0, got {layers!r}")
            for i in layers:
                if i in methods:
                    raise ValueError(f"layer {i} is named twice, for {methods[i]} and {method}")
                methods[i] = method
        if not methods:
            raise ValueError("methods must name a layer, got none: leave the settings out for dense attention")
        return methods
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f'{where} must be {{"methods": [{{"method": {{...}}, "layers": [...]}}, ...]}}, as condense.apply writes '
            f"it, got {textwrap.shorten(repr(settings), width=200, placeholder=' ...')}"
        ) from error
    except ValueError as error:
        version = settings.get("version", __version__)
        if version == __version__:
            raise ValueError(f"{where}: {error}") from error
        raise ValueError(f"{where} was written by condense {version}, this is {__version__}: {error}") from error


def layers_as_text(keys: Iterable[Any]) -> str:
    """Layers as text, indices that follow one another as ranges: ``0, 2-5, rest``."""
    runs: list[list[Any]] = []
    for key in keys:
        if runs and isinstance(key, int) and isinstance(runs[-1][-1], int) and key == runs[-1][-1] + 1:
            runs[-1].append(key)
        else:
            runs.append([key])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
