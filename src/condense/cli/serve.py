"""`condense serve`: a condensed model behind vLLM's OpenAI server."""

import importlib.util
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from condense.cli import models, options
from condense.named import NAMED_SETTINGS

DEFAULT = "recall-device"


def serve_command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder or hub name of a causal LM, before any option of vLLM.")],
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Such as recall-device, pooled or, with settings, 'cca:window=512'. By layer, repeated: recall@2,3 "
            f"and cca@rest; or @FILE from condense calibrate. Default: what the model was saved with, or {DEFAULT}."
        ),
    ] = None,
) -> None:
    """Serve a model with vLLM, condensed; all other options are vLLM's: condense serve DIR --port 8000."""
    from condense.methods import methods_in
    from condense.models import apply, choice_from_text, restore
    from condense.models.adapters import read_record
    from condense.models.inspect import served_layers
    from condense.serving.blocks import page_sizes
    from condense.serving.engine import REQUIREMENT
    from condense.serving.vllm.command import server_command

    if model.startswith("-"):
        raise ValueError(f"the model must come first, as in condense serve DIR --port 8000, got {model}")
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(f"serve needs vLLM, which is not installed: pip install '{REQUIREMENT}'")
    skeleton = models.read_skeleton(model)
    config: Any = skeleton.config
    config.architectures = config.architectures or [type(skeleton).__name__]  # some files name none
    is_default = getattr(config, "condense", None) is None and not method
    if method or is_default:
        apply(restore(skeleton), choice_from_text(*(method or [DEFAULT])))
    folder = str(Path(model).expanduser()) if model.startswith("~") else model

    def check_adapter(adapter: str) -> None:
        place = Path(adapter).expanduser()
        if place.is_dir() or not adapter.startswith(("/", ".", "~")):  # vLLM says which folders are missing
            read_record(skeleton, str(place), {})  # refuses one that was trained with other methods

    def page_of(itemsize: int) -> int:
        return page_sizes(served_layers(skeleton, methods_in(config.condense), None, itemsize)).far

    command = server_command(folder, config, context.args, check_adapter=check_adapter, page_of=page_of)
    if is_default:
        named = NAMED_SETTINGS[DEFAULT]
        options.plain_console(stderr=True).print(
            f"condense: {model} is served with {DEFAULT}. {named.use} Measured to lose {named.loses}; what this model "
            f"loses, condense verify {model} --text FILE says.",
            soft_wrap=True,
        )
    os.execv(command[0], command)
