"""`condense recipes`: the recipes of `condense train`, and the settings of one."""

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from condense.cli.methods import paragraphs
from condense.cli.options import plain_console


def recipes_command(
    name: Annotated[str | None, typer.Argument(help="A recipe, to see its settings. Default: list all.")] = None,
) -> None:
    """The recipes that train takes, or one recipe's settings."""
    from rich.table import Table

    try:
        from condense.train import PRESETS, RECIPES
    except ImportError as error:
        packages = "accelerate peft pyarrow zstandard"
        raise ValueError(f"recipes needs more packages: pip install {packages} ({error})") from error
    console = plain_console()
    if name is None:
        table = Table("recipe", "what it is", box=None)
        for each in sorted(RECIPES):
            table.add_row(each, paragraphs(RECIPES[each]).partition("\n")[0])
        for each in PRESETS:
            table.add_row(each, "A recipe file with a paper's settings, for adapt.")
        console.print(table)
    elif name in PRESETS:
        console.print(PRESETS[name].read_text(encoding="utf-8").rstrip(), soft_wrap=True)
    elif name in RECIPES:
        # what follows the first paragraphs is for who calls the function
        console.print(paragraphs(RECIPES[name]).partition("\n\nmethod:")[0].rstrip() + "\n")
        console.print(_settings_of_adapt() if name == "adapt" else _phases(RECIPES[name]([Path("TEXT")], Path("DIR"))))
    else:
        raise ValueError(f"recipe must be one of {', '.join((*sorted(RECIPES), *PRESETS))}, got {name!r}")


def _settings_of_adapt() -> Any:
    """A table of the settings of a recipe file, with their values for a method with groups of 16."""
    from rich.table import Table

    from condense.train import PhaseConfig, TrainConfig
    from condense.train.recipes import ADAPT_FIELDS, adapt

    config = adapt([Path("TEXT")], Path("DIR"), pretrained="DIR", method="cca")
    said: dict[str, str] = {}
    for cls in (TrainConfig, PhaseConfig):
        names = "|".join(field.name for field in dataclasses.fields(cls))
        _, *parts = re.split(rf"(?:^|\s)({names}): ", paragraphs(cls))
        said |= dict(zip(parts[::2], parts[1::2], strict=True))
    table = Table("setting", "default", "in a file: condense train FILE.toml --output DIR", box=None)
    for field in ADAPT_FIELDS:
        holder = config.phases[0] if hasattr(config.phases[0], field) else config
        table.add_row(field, _shown(getattr(holder, field)), " ".join(said[field].split()))
    return table


def _phases(config: Any) -> Any:
    """The settings of a training from scratch, phase by phase."""
    from rich.table import Table

    table = Table("setting", *(phase.name for phase in config.phases), box=None)
    for field in dataclasses.fields(config.phases[0]):
        if field.name != "name":
            table.add_row(field.name, *(_shown(getattr(phase, field.name)) for phase in config.phases))
    return table


def _shown(value: Any) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)
