"""`condense train`: run a recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from transformers import AutoConfig

from condense.cli.options import METHOD_HELP, read_saved
from condense.methods import Method


def train_command(
    recipe: Annotated[
        str, typer.Argument(help="demo_model or tiny_mla (from scratch), adapt (a saved model) or smoke (a try-out).")
    ],
    data: Annotated[list[Path], typer.Option(help="Text file: .txt, .jsonl or .jsonl.zst. Repeatable.")],
    output: Annotated[Path, typer.Option(help="Folder for the finished model; must not exist.")],
    pretrained: Annotated[
        str | None, typer.Option(help="adapt: folder or hub name of the model to start from.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help=f"adapt: {METHOD_HELP} summary=prompt and selection=prompt need allow_future=true."),
    ] = None,
    mix: Annotated[
        str | None, typer.Option(help="adapt: alternate (dense and condensed steps) or condensed. Default: alternate.")
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(help="adapt: tokens. Default: 4096.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="adapt: sequences per step. Default: 16.")] = None,
    gradient_accumulation_steps: Annotated[
        int | None, typer.Option(help="adapt: parts that a batch is computed in. Default: 1.")
    ] = None,
    gradient_checkpointing: Annotated[
        bool | None, typer.Option("--gradient-checkpointing", help="adapt: less memory, more time.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="adapt: its peak. Default: 3e-4.")] = None,
    dtype: Annotated[str | None, typer.Option(help="adapt: bfloat16 or float32. Default: bfloat16.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of every phase. Default: the recipe's.")] = None,
    seed: Annotated[int, typer.Option(help="Decides first weights and sequences.")] = 0,
    workers: Annotated[int | None, typer.Option(help="Processes that build sequences. Default: the recipe's.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder for tokenizer and encoded text, to share.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
) -> None:
    """Train a model by a recipe, from scratch or from a saved model."""
    try:
        from condense.train import RECIPES, run_training
    except ImportError as error:
        raise ValueError(f"train needs the extra packages of 'condense-attention[train]': {error}") from error
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(sorted(RECIPES))}, got {recipe!r}")
    options: dict[str, Any] = {"seed": seed, "cache": cache}
    if workers is not None:
        options["workers"] = workers
    adapting = {
        "pretrained": pretrained,
        "method": method if method is None else Method.parse(method),
        "mix": mix,
        "sequence_length": sequence_length,
        "batch_size": batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "gradient_checkpointing": gradient_checkpointing,
        "learning_rate": learning_rate,
        "dtype": dtype,
    }
    given = {name: value for name, value in adapting.items() if value is not None}
    if recipe == "adapt":
        if pretrained is None or method is None:
            raise ValueError("adapt needs a model to start from and a method: add --pretrained and --method")
        read_saved(pretrained, AutoConfig.from_pretrained)
    elif given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"these options belong to adapt: {names}; got them for {recipe}")
    options |= given
    config = RECIPES[recipe](data, output, **options)
    if steps is not None:
        config = config.with_steps(steps)
    try:
        folder = run_training(config, resume=resume)
    except KeyboardInterrupt:
        if config.work.exists():
            print("condense: --resume goes on from the last checkpoint", file=sys.stderr)
        raise
    Console(stderr=True).print(f"Model, tokenizer and training.json are in {folder}", highlight=False)
