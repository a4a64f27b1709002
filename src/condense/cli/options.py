"""Parts that commands share: the class that loads the library once arguments are read, so that help needs no torch;
options such as methods as text, texts and devices; tables and progress. Models are in `condense.cli.models`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

DTYPES = ("float32", "bfloat16", "float16", "float64")
METHODS_HELP = "`condense methods` lists and explains them."
METHOD_HELP = f"Such as recall-host or, with settings, 'cca:window=512'; {METHODS_HELP}"
CHOICE_HELP = METHOD_HELP + " By layer, repeated: recall@2,3 and cca@rest; or @FILE from condense calibrate."
CHOICES_HELP = METHOD_HELP + " Repeatable. By layer, as one: recall@2,3+cca@rest; or @FILE from condense calibrate."
MODEL_HELP = "Folder or hub name of a causal LM. Default: bundled."
TEXTS_HELP = "Text, .jsonl, .parquet or .zst file as for train, - for standard input; repeatable. Default: bundled."
CHAT_HELP = "Put the prompt into the tokenizer's chat template, as a user's message."
# the method that the bundled model was trained with
DEMO_METHOD = "cca:window=256,summary=streaming,key_pooling=select,rep_bias=log_size"

Model = Annotated[str | None, typer.Option(help=MODEL_HELP)]
Texts = Annotated[list[str] | None, typer.Option(help=TEXTS_HELP)]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, ...")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
DeviceMap = Annotated[str | None, typer.Option(help="Spread the model over devices by accelerate: auto, balanced, ...")]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Run the code that comes with the model.")]
Json = Annotated[Path | None, typer.Option(help="Write the results to this file.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the results into this .png or .svg file.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing result files.")]


def load_library(context: typer.Context) -> None:
    """Load the library by the function that `condense.cli.main.main` was given."""
    if context.obj is not None:
        context.obj()


class Command(TyperCommand):
    """A command that loads the library before its function runs, whose imports are inside of it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments. Raises ValueError for an option of one value given twice, since the first would be lost."""
        given = [*args]  # a copy, because parsing empties the list
        rest = super().parse_args(ctx, args)
        order: list[Any] = [] if ctx.resilient_parsing else self.make_parser(ctx).parse_args(args=given)[2]
        for option in order:
            if (
                option.param_type_name == "option"
                and not (option.multiple or option.is_flag)
                and order.count(option) > 1
            ):
                raise ValueError(f"{option.opts[0]} takes one value, got {order.count(option)}: give it once")
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Load the library, then run."""
        load_library(ctx)
        return super().invoke(ctx)


def parse_device(name: str | None) -> torch.device:
    """The device of that name, by default CUDA if there is one. Raises ValueError if it cannot be used."""
    import torch

    from condense.ops.checks import check_float64

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        check_float64(device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        usable = "cpu, cuda" if torch.cuda.is_available() else "cpu"
        raise ValueError(f"device must be one that can be used here ({usable}), got {name!r}") from error
    return device


def parse_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The dtype of that name, by default float32 on a CPU, else bfloat16. Raises ValueError for an unknown one."""
    import torch

    if name is not None and name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return getattr(torch, name or ("float32" if device.type == "cpu" else "bfloat16"))


def parse_tokens(name: str, text: str, least: int = 1) -> int:
    """A number of tokens such as 4096, 32K or 1M. Raises ValueError for anything else, and below ``least``."""
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in ("K", "M") else (text, "")
    number = int(digits) * {"": 1, "K": 2**10, "M": 2**20}[unit] if digits.isdecimal() else 0
    if number < least:
        raise ValueError(f"{name}: wanted a number of tokens >= {least}, such as 4096, 32K or 1M, got {text!r}")
    return number


def read_text(source: str) -> str:
    """The text in a file, or on standard input for ``-``. Raises ValueError if it is missing, empty or no UTF-8."""
    from condense.tasks.documents import plain_text

    name = "standard input" if source == "-" else source
    if source != "-" and (not Path(source).exists() or Path(source).is_dir()):
        raise ValueError(f"text: no such file: {source}")
    content = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    try:
        text = plain_text(content)
    except UnicodeDecodeError as error:
        raise ValueError(f"text: {name} is not UTF-8 text: {error}") from error
    if not text.strip():
        raise ValueError(f"text: {name} is empty")
    return text


def read_texts(sources: Sequence[str] | None) -> list[str]:
    """The texts to measure on, in files or on standard input (``-``), each once; without a source, the bundled one.

    JSON lines, Parquet and compressed files are read as `condense train` reads them: each record is a text. Raises
    ValueError as `read_text` and `condense.tasks.read_documents`, and if no source holds a text.
    """
    from condense.demo import demo_text
    from condense.tasks import read_documents

    if not sources:
        return [demo_text().text]
    texts: list[str] = []
    for source in dict.fromkeys(sources):
        has_records = source.lower().endswith((".jsonl", ".parquet", ".zst"))
        texts += read_documents([source]) if has_records else [read_text(source)]
    if not texts:
        raise ValueError(f"text: wanted files with texts, got {', '.join(sources)}")
    # a text in two files counts once: otherwise one copy could be measured and the other held out
    return list(dict.fromkeys(texts))


def check_targets(*, overwrite: bool, plot: Path | None = None, **files: Path | None) -> None:
    """Raise ValueError, before any work, if a result file exists (unless ``overwrite``) or cannot be written or drawn.

    files: by the name of their option; None for those that are not asked for.
    """
    from condense.results import refuse_existing

    seen: dict[Path, str] = {}
    for name, path in (*files.items(), ("plot", plot)):
        if path is not None:
            if (other := seen.setdefault(path.resolve(), name)) != name:
                raise ValueError(f"{name}: wanted another file than that of --{other}, got {path} for both")
            refuse_existing(path, name, overwrite=overwrite)
            if not path.absolute().parent.is_dir():
                raise ValueError(f"{name}: wanted a path in a folder that exists, got {path}")
    if plot is not None:
        from condense.plots import require_matplotlib

        require_matplotlib(plot)


def plain_console(*, stderr: bool = False) -> Console:
    """A console that shows questions, answers, settings and file names as they are: ``[b]`` and ``:smile:`` too."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def plain_table(
    title: str | None = None, *, left: Sequence[str] = (), right: Sequence[str] = (), is_whole: bool = False,
    rows: Iterable[Sequence[str]] = (),
) -> Table:  # fmt: skip
    """A table with one line, under its head. left, right: headings of columns aligned to that side; is_whole: in a
    narrow terminal the cells on the right are cut, not folded.
    """
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in left:
        table.add_column(heading, overflow="fold")
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=is_whole, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def progress() -> Progress:
    """A bar on stderr for a ``with`` block, which goes when it is done; lines where there is no terminal."""
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    from condense.cli.progress import Lines

    if not (console := plain_console(stderr=True)).is_terminal:
        return Lines(console)
    columns = (SpinnerColumn(), *Progress.get_default_columns(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)
