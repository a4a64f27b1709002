"""`condense run`: somebody else's program, which then loads condensed models as such."""

import importlib
import importlib.util
import runpy
import sys
import traceback
from typing import Annotated

import typer

from condense.cli.options import load_library

# everything after -m MODULE belongs to the program, --help too
USAGE = "-m MODULE [ARGUMENTS]..."
SETTINGS = {
    "allow_interspersed_args": False,
    "allow_extra_args": True,
    "help_option_names": [],
    "ignore_unknown_options": True,
}


def run_command(
    context: typer.Context,
    module: Annotated[
        str | None, typer.Option("-m", metavar="MODULE", help="The module; all that follows is for it.")
    ] = None,
) -> None:
    """Run a module, as python -m does, with condense imported.

    Models that were saved condensed are condensed when it loads them. Processes that it starts are on their own. With
    lm_eval, --model condense --model_args pretrained=DIR,condense=recall-host condenses a stock model.
    """
    if module is None:
        if context.args not in ([], ["--help"]):
            raise ValueError(f"run needs -m before the module, as in condense run -m lm_eval, got {context.args[0]!r}")
        print(context.get_help())
        raise typer.Exit
    load_library(context)
    from transformers import logging

    logging.set_verbosity_warning()
    logging.enable_progress_bar()
    sys.argv = [module, *context.args]
    sys.path.insert(0, "")
    package = module.partition(".")[0]
    if not package or importlib.util.find_spec(package) is None:
        raise ValueError(f"-m must name a module, as of python -m, got {module!r}: there is none of this name here")
    if package == "lm_eval":
        importlib.import_module("lm_eval.models")  # registers the harness's own models
        from lm_eval.api.registry import model_registry

        model_registry.register("condense", target="condense.evaluate.harness.model:CondensedLM")
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception:
        traceback.print_exc()  # the program's own failure, not one of the command line
        raise typer.Exit(1) from None
