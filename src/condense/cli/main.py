"""The command line: parse, call one function, print. Bad input is one line on stderr and exit code 2."""

from __future__ import annotations

import sys

import transformers
import typer

from condense.cli.compare import compare_command
from condense.cli.generate import generate_command
from condense.cli.inspect import inspect_command
from condense.cli.train import train_command

app = typer.Typer(
    name="condense",
    help="Condensed attention for Hugging Face causal language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("compare")(compare_command)
app.command("generate")(generate_command)
app.command("inspect")(inspect_command)
app.command("train")(train_command)


def main() -> None:
    """Entry point of ``condense``."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        app()
    except (ValueError, OSError) as error:
        lines = str(error).strip().splitlines()
        print(f"condense: {lines[0] if lines else type(error).__name__}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
