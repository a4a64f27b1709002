"""`condense run`: somebody else's program, which then loads condensed models as such."""

from __future__ import annotations

import importlib.util
import runpy
import sys
import traceback
from typing import Annotated

import transformers
import typer

# everything but -m belongs to the program, --help too
SETTINGS = {
    "allow_interspersed_args": False,
    "allow_extra_args": True,
    "help_option_names": [],
    "ignore_unknown_options": True,
}


def run_command(
    context: typer.Context,
    module: Annotated[str | None, typer.Option("-m", help="The module; everything after it are its arguments.")] = None,
) -> None:
    """Run a module, as python -m does, with condense imported.

    Models that were saved condensed are so when it loads them. Processes that it starts are on their own.

    Raises ValueError if there is no such module.
    """
    if module is None:
        print(context.get_help())
        raise typer.Exit
    transformers.logging.set_verbosity_warning()
    transformers.logging.enable_progress_bar()
    sys.argv = [module, *context.args]
    sys.path.insert(0, "")
    package = module.partition(".")[0]
    if not package or importlib.util.find_spec(package) is None:
        raise ValueError(f"-m must name a module, as of python -m, got {module!r}: there is none of this name here")
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception:
        traceback.print_exc()  # the program's own failure, not one of the command line
        raise typer.Exit(1) from None
