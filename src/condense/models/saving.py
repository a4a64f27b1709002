"""Writing a condensed model's configuration so that no program silently loads it as a dense one."""

import os
from importlib import resources
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from condense.architectures import as_written
from condense.methods import Method
from condense.models.attention import IMPLEMENTATION
from condense.version import __version__

KEY = "condense"


def written(config: PreTrainedConfig, output: dict[str, Any]) -> dict[str, Any]:
    """The result ``output`` of ``config.to_dict()``, changed so that it says which attention runs.

    A condensed configuration is written with its methods, the version of this library and ``attn_implementation``,
    which transformers without `condense` refuse to load, and with the name of a condensed architecture, which engines
    without it refuse. A configuration that was set to another implementation is written as a stock one.
    """
    settings = output.pop(KEY, None)
    if isinstance(settings, dict) and _is_condensed(config):
        output = as_written(output) | {KEY: settings | {"version": __version__}, "attn_implementation": IMPLEMENTATION}
    # loading sets the implementation of a whole model in all its parts, so a condensed part is named by itself
    parts = {key: IMPLEMENTATION for key in config.sub_configs if _is_condensed(getattr(config, key, None))}
    return as_written(output) | {"attn_implementation": parts} if parts else output


def write_card(folder: str | os.PathLike[str], methods: dict[int, Method]) -> None:
    """Write a README that says how to load the model into its folder, unless there is one."""
    path = Path(folder) / "README.md"
    if path.parent.is_dir() and not path.exists():
        text = ", ".join(f"`{method}`" for method in dict.fromkeys(methods.values()))
        card = resources.files("condense").joinpath("assets/model_card.md").read_text(encoding="utf-8")
        path.write_text(card.format(methods=text, version=__version__), encoding="utf-8")


def _is_condensed(config: Any) -> bool:
    return bool(getattr(config, KEY, None)) and config._attn_implementation == IMPLEMENTATION
