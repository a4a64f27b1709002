"""Load the library for the command line, once a command's arguments are read, so that help needs no torch."""

from typing import Any

import typer
from typer.core import TyperCommand


def load_library(context: typer.Context) -> None:
    """Call what `condense.cli.main.main` got to load the library."""
    if context.obj is not None:
        context.obj()


class Command(TyperCommand):
    """A command that loads the library before its function runs, whose imports are inside of it."""

    def invoke(self, ctx: Any) -> Any:
        """Load the library, then run."""
        load_library(ctx)
        return super().invoke(ctx)
