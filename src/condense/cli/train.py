"""`condense train`: run a recipe; `condense recipes`: what there are, and the settings of one."""

import dataclasses
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from condense.cli.methods import paragraphs, shown
from condense.cli.models import read_saved, read_tokenizer
from condense.cli.options import METHODS_HELP, parse_tokens, plain_console, plain_table


def train_command(
    recipe: Annotated[
        str,
        typer.Argument(
            help="adapt (a saved model), cca-paper, lca-paper or dga-paper (the same with the papers' settings), a "
            "recipe file (.toml) with settings of adapt, demo_model or tiny_mla (from scratch), or smoke (a try-out); "
            "`condense recipes` shows their settings."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the finished model; must not exist.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text: .txt or .jsonl, both also .zst; .parquet; hf:OWNER/NAME/CONFIG:SPLIT, a Hugging Face dataset "
            "(config and split may be left out). Repeatable. Default: the recipe's; smoke: the bundled text."
        ),
    ] = None,
    pretrained: Annotated[str | None, typer.Option(help="adapt: folder or hub name of a model to start from.")] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help=f"adapt: such as pooled or, with settings, 'cca:window=512'; {METHODS_HELP} By layer as "
            "'recall-device@0-3+pooled@rest', or @FILE of an allocation (condense calibrate). summary=prompt and "
            "selection=prompt need allow_future=true."
        ),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(
            help="adapt: which weights: all, qkv or qkvo (projections of attention), or lora. Default: the recipe's, "
            "else all."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of every phase. Default: the recipe's.")] = None,
    sequence_length: Annotated[
        str | None, typer.Option(help="adapt: tokens of a sequence, as 4096 or 4K. Default: the recipe's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Decides first weights and sequences. Default: 0.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that build sequences. Default: the recipe's.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder for tokenizer and encoded text, to share.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
) -> None:
    """Train a model by a recipe, from scratch or from a saved model.

    Options override a recipe file, which has all other settings (batch_size, learning_rate, ...).
    """
    from transformers import AutoConfig

    from condense.demo import TEXT_FILE
    from condense.models.adapters import refuse_adapter

    with _packages_for("train"):
        from accelerate import PartialState

        from condense.train import PRESETS, RECIPES, read_recipe, run_training
    names = (*sorted(RECIPES), *PRESETS)
    if recipe not in names and not recipe.endswith(".toml"):
        raise ValueError(f"recipe must be one of {', '.join(names)} or a file .toml, got {recipe!r}")
    options: dict[str, Any] = {}
    if recipe not in RECIPES:
        options = read_recipe(PRESETS.get(recipe, Path(recipe)))
    given = {
        "data": data, "pretrained": pretrained, "method": method, "train": train, "seed": seed, "workers": workers,
        "cache": cache,
        "sequence_length": None if sequence_length is None else parse_tokens("sequence_length", sequence_length),
    }  # fmt: skip
    options |= {name: value for name, value in given.items() if value is not None}
    files = options.pop("data", None)
    if files is None and recipe == "smoke":
        files = [TEXT_FILE]
    if files is None:
        raise ValueError("train needs text: add --data")
    if recipe == "adapt" or recipe not in RECIPES:
        missing = [f"--{name}" for name in ("pretrained", "method") if name not in options]
        if missing:
            raise ValueError(f"adapt needs a model to start from and a method: add {' and '.join(missing)}")
        refuse_adapter(Path(options["pretrained"]).expanduser())
        read_saved(options["pretrained"], AutoConfig.from_pretrained)
        read_tokenizer(options["pretrained"], {})
        config = RECIPES["adapt"]([Path(file) for file in files], output, **options)
    else:
        for name in ("pretrained", "method", "train", "sequence_length"):
            if name in options:
                raise ValueError(f"these options belong to adapt: --{name.replace('_', '-')}; got them for {recipe}")
        config = RECIPES[recipe](files, output, **options)
    if steps is not None:
        config = config.with_steps(steps)
    try:
        folder = run_training(config, resume=resume)
    except KeyboardInterrupt:
        if config.work.exists():
            print("condense: --resume goes on from the last checkpoint", file=sys.stderr)
        raise
    if PartialState().is_main_process:
        print(f"Model, tokenizer and training.json are in {folder}", file=sys.stderr)


def recipes_command(
    name: Annotated[str | None, typer.Argument(help="A recipe, to see its settings. Default: list all.")] = None,
) -> None:
    """The recipes that train takes, or one recipe's settings."""
    with _packages_for("recipes"):
        from condense.train import PRESETS, RECIPES
    console = plain_console()
    if name is None:
        rows = [(each, paragraphs(RECIPES[each]).partition("\n")[0]) for each in sorted(RECIPES)]
        rows += [(each, "A recipe file with a paper's settings, for adapt.") for each in PRESETS]
        console.print(plain_table(left=["recipe", "what it is"], rows=rows))
    elif name in PRESETS:
        print(PRESETS[name].read_text(encoding="utf-8").rstrip())
    elif name in RECIPES:
        # the paragraphs after these are for callers of the function
        console.print(paragraphs(RECIPES[name]).partition("\n\nmethod:")[0].rstrip() + "\n")
        console.print(_settings_of_adapt() if name == "adapt" else _phases(RECIPES[name]([Path("TEXT")], Path("DIR"))))
    else:
        raise ValueError(f"recipe must be one of {', '.join((*sorted(RECIPES), *PRESETS))}, got {name!r}")


def _settings_of_adapt() -> Any:
    """A table of the settings of a recipe file, with their values for a method with groups of 16."""
    from condense.train import PhaseConfig, TrainConfig
    from condense.train.recipes import ADAPT_FIELDS, adapt

    config = adapt([Path("TEXT")], Path("DIR"), pretrained="DIR", method="cca")
    said: dict[str, str] = {}
    for cls in (TrainConfig, PhaseConfig):
        names = "|".join(field.name for field in dataclasses.fields(cls))
        _, *parts = re.split(rf"(?:^|\s)({names}): ", paragraphs(cls))
        said |= dict(zip(parts[::2], parts[1::2], strict=True))
    table = plain_table(left=["setting", "default", "in a file: condense train FILE.toml --output DIR"])
    for field in ADAPT_FIELDS:
        holder = config.phases[0] if hasattr(config.phases[0], field) else config
        table.add_row(field, shown(getattr(holder, field)), " ".join(said[field].split()))
    return table


def _phases(config: Any) -> Any:
    """The settings of a training from scratch, phase by phase."""
    _, *names = (field.name for field in dataclasses.fields(config.phases[0]))
    rows = [(name, *(shown(getattr(phase, name)) for phase in config.phases)) for name in names]
    return plain_table(left=["setting", *(phase.name for phase in config.phases)], rows=rows)


@contextmanager
def _packages_for(command: str) -> Iterator[None]:
    """Raise ValueError if something that is imported in the block is not installed."""
    try:
        yield
    except ImportError as error:
        packages = "accelerate peft pyarrow zstandard"
        raise ValueError(f"{command} needs more packages: pip install {packages} ({error})") from error
