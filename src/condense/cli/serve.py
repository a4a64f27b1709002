"""`condense serve`: a condensed model behind vLLM's OpenAI server."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from condense.cli import options


def serve_command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder or hub name of a causal LM, before any option of vLLM.")],
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=options.POOLING_HELP
            + " By layer, repeated: cca@2,3 and lca@rest. Default: what the model was saved with."
        ),
    ] = None,
    layers: options.Layers = None,
) -> None:
    """Serve a condensed model with vLLM; all other options are vLLM's: condense serve DIR --port 8000."""
    from condense.models import apply, choice_from_text, restore
    from condense.models.adapters import read_record
    from condense.serving.vllm.command import adapters_in, server_command

    if model.startswith("-"):
        raise ValueError(f"the model must come first, as in condense serve DIR --port 8000, got {model}")
    if not method and layers is not None:
        raise ValueError("layers belong to a method: add --method")
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("serve needs vLLM, which is not installed: pip install 'vllm>=0.29,<0.33'")
    skeleton = options.read_skeleton(model)
    config: Any = skeleton.config
    if getattr(config, "condense", None) is None and not method:
        raise ValueError(
            f"model must be saved condensed, got {model}, which is not: name a method with --method, such as pooled"
        )
    if method:
        apply(restore(skeleton), options.choose(choice_from_text(*method), layers))
    for adapter in adapters_in(context.args):
        place = Path(adapter).expanduser()
        if place.is_dir() or not adapter.startswith(("/", ".", "~")):  # vLLM says which folders are missing
            read_record(skeleton, str(place), {})  # refuses one that was trained with other methods
    folder = str(Path(model).expanduser()) if model.startswith("~") else model
    command = server_command(folder, config.architectures[0], config.condense, context.args)
    os.execv(command[0], command)
