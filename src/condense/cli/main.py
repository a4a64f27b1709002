"""The command line: parse, call one function, print. Bad input is one line on stderr and exit code 2.

The modules of commands import torch, transformers and the library inside their functions, so that help needs none.
"""

import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

from condense.cli.calibrate import calibrate_command
from condense.cli.compare import compare_command
from condense.cli.eval import eval_command
from condense.cli.generate import generate_command
from condense.cli.inspect import inspect_command
from condense.cli.methods import methods_command
from condense.cli.options import Command
from condense.cli.run import SETTINGS, USAGE, run_command
from condense.cli.serve import serve_command
from condense.cli.train import recipes_command, train_command
from condense.cli.verify import verify_command
from condense.version import __version__

INTERRUPTED = 130  # what shells expect after Ctrl-C

app = typer.Typer(
    name="condense",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # whole words at 80 columns, where boxes cut long options off
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"condense {__version__} (torch {version('torch')}, transformers {version('transformers')})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the versions and exit.")
    ] = False,
) -> None:
    """Condensed attention for Hugging Face causal language models."""


app.command("calibrate", cls=Command, short_help="Find the cheapest good method for every layer.")(calibrate_command)
app.command("compare", cls=Command, short_help="Ask the same questions under several methods.")(compare_command)
app.command("eval", cls=Command, short_help="Score on lm-evaluation-harness's tasks, method by method.")(eval_command)
app.command("generate", cls=Command)(generate_command)
app.command("inspect", cls=Command, short_help="Entries, bytes and FLOPs per layer; reads no weights.")(inspect_command)
app.command("methods", cls=Command, short_help="List the methods, or one method's settings.")(methods_command)
app.command("recipes", cls=Command, short_help="List the recipes of train, or one recipe's settings.")(recipes_command)
app.command("run", context_settings=SETTINGS, options_metavar=USAGE)(run_command)
app.command(
    "serve",
    cls=Command,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    short_help="Serve a model with vLLM, condensed.",
)(serve_command)
app.command("train", cls=Command, short_help="Train a model by a recipe, from scratch or further.")(train_command)
app.command("verify", cls=Command, short_help="What settings lose of your model, on your text.")(verify_command)


def main(load: Callable[[], None] = lambda: None, command: typer.Typer = app) -> None:
    """Entry point of ``condense``. load: called before the function of a command runs, not for help.

    command: a program with commands of its own, such as ``benchmarks/speed``, that fails in the same ways.
    """

    def load_quietly() -> None:
        load()
        from transformers import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()

    shown = sys.argv[1:] or ["--help"]
    try:
        code = command(args=shown, standalone_mode=False, obj=load_quietly)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        # a usage error of typer, recognised by this method, as its class differs between typer's versions
        if hasattr(error, "format_message"):
            _fail(" ".join(error.format_message().split()))
        # torch's error by its name, as torch may not be imported
        if not isinstance(error, ValueError | OSError) and type(error).__name__ != "OutOfMemoryError":
            raise
        _fail(str(error).strip().partition("\n")[0] or type(error).__name__)
    if code == INTERRUPTED:
        print("condense: interrupted", file=sys.stderr)
    sys.exit(code)


def _fail(message: str) -> NoReturn:
    print(f"condense: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
