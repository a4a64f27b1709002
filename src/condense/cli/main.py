"""The command line: parse, call one function, print. Bad input is one line on stderr and exit code 2."""

from __future__ import annotations

import sys
from typing import NoReturn

import torch
import transformers
import typer

from condense.cli.analyze import analyze_app
from condense.cli.bench import bench_app
from condense.cli.compare import compare_command
from condense.cli.generate import generate_command
from condense.cli.inspect import inspect_command
from condense.cli.train import train_command

INTERRUPTED = 130  # what shells expect after Ctrl-C

app = typer.Typer(
    name="condense",
    help="Condensed attention for Hugging Face causal language models.",
    pretty_exceptions_enable=False,
)
app.add_typer(analyze_app, name="analyze")
app.add_typer(bench_app)
app.command("compare")(compare_command)
app.command("generate")(generate_command)
app.command("inspect")(inspect_command)
app.command("train")(train_command)


def main() -> None:
    """Entry point of ``condense``."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        code = app(args=sys.argv[1:] or ["--help"], standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        _fail(str(error).strip().partition("\n")[0] or type(error).__name__)
    except Exception as error:
        # a usage error of typer, recognised by this method, as its class differs between typer's versions
        if not hasattr(error, "format_message"):
            raise
        _fail(" ".join(error.format_message().split()))
    if code == INTERRUPTED:
        print("condense: interrupted", file=sys.stderr)
    sys.exit(code)


def _fail(message: str) -> NoReturn:
    print(f"condense: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
