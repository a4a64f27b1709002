"""`condense train`: run a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from condense.cli.options import METHOD_HELP, parse_method


def train_command(
    recipe: Annotated[
        str, typer.Argument(help="demo_model (from scratch), adapt (a saved model) or smoke (a try-out).")
    ],
    data: Annotated[list[Path], typer.Option(help="Text file: .txt, .jsonl or .jsonl.zst. Repeatable.")],
    output: Annotated[Path, typer.Option(help="Folder for the finished model; must not exist.")],
    pretrained: Annotated[
        str | None, typer.Option(help="adapt: folder or hub name of the model to start from.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="adapt: " + METHOD_HELP)] = None,
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
    if recipe == "adapt":
        if pretrained is None or method is None:
            raise ValueError("adapt needs a model to start from and a method: add --pretrained and --method")
        options |= {"pretrained": pretrained, "method": parse_method(method)}
    elif pretrained is not None or method is not None:
        raise ValueError(f"--pretrained and --method belong to adapt, got them for {recipe}")
    config = RECIPES[recipe](data, output, **options)
    if steps is not None:
        config = config.with_steps(steps)
    folder = run_training(config, resume=resume)
    Console(stderr=True).print(f"Model, tokenizer and training.json are in {folder}", highlight=False)
