"""`condense analyze`: measurements on a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from condense.cli import options
from condense.cli.analyze_patterns import patterns_command
from condense.cli.analyze_recall import recall_command
from condense.cli.analyze_report import Outputs, load, show, steps
from condense.cli.loading import Command

if TYPE_CHECKING:
    from condense.methods import Method
    from condense.models import MethodChoice

analyze_app = typer.Typer(help="Look into a model.")
# the window that the bundled model was trained with, and lengths that fit the bundled text
DEMO_POOLING, DEMO_LENGTHS = "lca:window=256", (512, 1024, 2048, 3584)


@analyze_app.callback()
def analyze() -> None:
    """Look into a model."""


for name, command, short_help in (
    ("recall", recall_command, "How much of dense attention the open groups hold."),
    ("patterns", patterns_command, "Which of MInference's patterns suits each head."),
):
    analyze_app.command(name, cls=Command, short_help=short_help)(command)


@analyze_app.command("deviation", cls=Command, short_help="How far tokens lie from the entries that stand for them.")
def deviation_command(
    model: options.Model = None,
    text: options.Texts = None,
    method: Annotated[
        str | None, typer.Option(help=options.POOLING_HELP + " Default: what the model was saved with, or lca.")
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens; repeatable. Default: the shortest text; of the bundled model and text, 512 to 3584."
        ),
    ] = None,
    sequences: Annotated[int, typer.Option(help="Stretches cut from each text, where it is long enough.")] = 8,
    dtype: options.Dtype = None,
    device: options.Device = None,
    json: options.Json = None,
    plot: options.Plot = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Measure distances of keys and values from the entries that stand for them (LCA paper, Tables 9 and 10)."""
    from condense.analysis import measure_deviation
    from condense.methods import LCA, Method
    from condense.models import described
    from condense.plots import plot_deviation

    outputs = Outputs(model, json, plot, overwrite).checked()
    given = Method.parse(method or DEMO_POOLING) if method is not None or model is None else None
    loaded, saved, ids = load(model, text, dtype, device)
    choice = given or saved or LCA()
    chosen = given or _saved_pooling(choice)
    shortest = min(map(len, ids.values()))
    lengths = length or ([n for n in DEMO_LENGTHS if n <= shortest] if model is None and not text else [shortest])
    total = sum(min(sequences, len(x) // n) for x in ids.values() for n in lengths if n > 0)
    with steps(total) as on_step:
        layers = choice if isinstance(choice, Mapping) else None
        results = measure_deviation(loaded, chosen, ids, lengths, layers=layers, sequences=sequences, on_step=on_step)
    options.warn_of_length(loaded, max(lengths))
    rows = []
    for r in results:
        parts = [(name, value) for part in (r.keys, r.values) for name, value in vars(part).items()]
        figures = [f"{value:.1%}" if name == "relative" else f"{value:.2f}" for name, value in parts]
        rows.append([r.text, f"{r.length:,}", str(r.sequences), *figures])
    headings = ("text", "tokens", "n", "|k|", "δk", "δk/|k|", "max δk", "|v|", "δv", "δv/|v|", "max δv")
    show(
        f"{described(choice)}: distance of tokens from their entries, mean over layers, heads and tokens",
        headings,
        rows,
    )
    outputs.write({"method": choice, "deviations": results}, loaded)
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
