"""`condense analyze`: measurements on a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from condense.cli.analyze_papers import conditioning_command, cost_command, noise_command, sparsity_command
from condense.cli.analyze_patterns import patterns_command
from condense.cli.analyze_recall import recall_command
from condense.cli.loading import Command
from condense.cli.options import (
    POOLING_HELP,
    DeviceOption,
    DtypeOption,
    ModelOption,
    OverwriteOption,
    PlotOption,
    TextsOption,
    check_targets,
    load_model,
    plain_console,
    plain_table,
    progress,
    read_text,
    saved_choice,
    warn_of_length,
)

if TYPE_CHECKING:
    from condense.analysis import Deviation
    from condense.methods import Method
    from condense.models import MethodChoice

analyze_app = typer.Typer(help="Look into a model.")
# the window that the bundled model was trained with, and lengths that fit the bundled text
DEMO_POOLING, DEMO_LENGTHS = "lca:window=256", (512, 1024, 2048, 3584)


@analyze_app.callback()
def analyze() -> None:
    """Look into a model."""


analyze_app.command("recall", cls=Command, short_help="How much of dense attention the open groups hold.")(
    recall_command
)
analyze_app.command("patterns", cls=Command, short_help="Which of MInference's patterns suits each head.")(
    patterns_command
)
analyze_app.command("sparsity", cls=Command, short_help="How often a weight of the last query is a large one.")(
    sparsity_command
)
analyze_app.command("noise", cls=Command, short_help="How far noise on the keys moves predictions.")(noise_command)
analyze_app.command("conditioning", cls=Command, short_help="Condition numbers before and after grouping.")(
    conditioning_command
)
analyze_app.command("cost", cls=Command, short_help="Keys that a query reads, beside measured times.")(cost_command)


@analyze_app.command("deviation", cls=Command, short_help="How far tokens lie from the entries that stand for them.")
def deviation_command(
    model: ModelOption = None,
    text: TextsOption = None,
    method: Annotated[
        str | None, typer.Option(help=POOLING_HELP + " Default: what the model was saved with, or lca.")
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens; repeatable. Default: the shortest text; of the bundled model and text, 512 to 3584."
        ),
    ] = None,
    sequences: Annotated[int, typer.Option(help="Stretches cut from each text, where it is long enough.")] = 8,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    json: Annotated[Path | None, typer.Option(help="Write the results, layer by layer, to this file.")] = None,
    plot: PlotOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """How far keys and values lie from the entries that stand for them (LCA paper, Tables 9 and 10)."""
    from condense.analysis import measure_deviation
    from condense.demo import demo_text
    from condense.evaluate.compare import encode
    from condense.methods import LCA, Method
    from condense.models import described, restore
    from condense.plots import plot_deviation
    from condense.results import write_results

    check_targets(json=json, plot=plot, overwrite=overwrite)
    given = Method.parse(method or DEMO_POOLING) if method is not None or model is None else None
    sources = list(dict.fromkeys(text or ()))
    contents = {name: read_text(source) for name, source in zip(_names(sources), sources, strict=True)}
    loaded, tokenizer = load_model(model, dtype, device)
    choice = given or saved_choice(loaded) or LCA()
    chosen = given or _saved_pooling(choice)
    restore(loaded)
    ids = {name: encode(tokenizer, x, loaded)[0] for name, x in (contents or {"bundled": demo_text().text}).items()}
    shortest = min(map(len, ids.values()))
    lengths = length or ([n for n in DEMO_LENGTHS if n <= shortest] if model is None and not contents else [shortest])
    steps = sum(min(sequences, len(x) // n) for x in ids.values() for n in lengths if n > 0)
    with progress() as bar:
        task = bar.add_task("reading", total=steps)
        results = measure_deviation(
            loaded,
            chosen,
            ids,
            lengths,
            layers=choice if isinstance(choice, Mapping) else None,
            sequences=sequences,
            on_step=lambda: bar.advance(task),
        )
    warn_of_length(loaded, max(lengths))
    _print(
        results,
        f"{described(choice)}: distance of tokens from their entries, mean over layers, heads and tokens",
    )
    if json is not None:
        content = {"model": model or "bundled", "method": choice, "deviations": results}
        write_results(json, content, device=loaded.device, overwrite=overwrite)
    if plot is not None:
        plot_deviation(results, plot)


def _saved_pooling(choice: MethodChoice) -> Method:
    """The method that a model was saved with. Raises ValueError for several, and for one that pools no groups."""
    from condense.methods.grouped import GroupPooling
    from condense.models import described, methods_of

    method, *others = methods_of(choice)
    if others or not isinstance(method, GroupPooling):
        raise ValueError(
            f"method: wanted one that pools groups, the model was saved with {described(choice)}: add --method"
        )
    return method


def _names(sources: list[str]) -> list[str]:
    """Stems of the files, or as much of their paths as tells them apart; ``text`` for standard input."""
    paths = [Path("text" if source == "-" else source) for source in sources]
    longest = max((len(path.parts) for path in paths), default=0)
    tails = ([str(Path(*path.parts[-n:])) for path in paths] for n in range(1, longest + 1))
    ways = ([path.stem for path in paths], *tails)
    return next((names for names in ways if len(set(names)) == len(names)), sources)


def _print(results: list[Deviation], title: str) -> None:
    table = plain_table(title)
    table.add_column("text", justify="right", overflow="fold")
    for heading in ("tokens", "n", "|k|", "δk", "δk/|k|", "max δk", "|v|", "δv", "δv/|v|", "max δv"):
        table.add_column(heading, justify="right", no_wrap=True)
    for r in results:
        figures = [
            f"{value:.1%}" if name == "relative" else f"{value:.2f}"
            for part in (r.keys, r.values)
            for name, value in vars(part).items()
        ]
        table.add_row(r.text, f"{r.length:,}", str(r.sequences), *figures)
    plain_console().print(table)
