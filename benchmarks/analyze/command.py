"""Measure attention, dense and condensed, in a model on a text.

    python benchmarks/analyze recall --model DIR --text a.txt       # what the window and the open groups hold
    python benchmarks/analyze deviation --model DIR --text a.txt    # tokens from their entries: LCA's tables
    python benchmarks/analyze patterns --model DIR --text a.txt --output patterns.json  # MInference, for --method @FILE

Without --model and --text the bundled ones are measured. Exit codes: 0; 2 for bad input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from analyze.deviation import Deviation, measure_deviation
from analyze.patterns import save_patterns, search_patterns
from analyze.recall import measure_recall
from analyze.report import Outputs, load, show, steps
from condense.baselines import AShape
from condense.cli import models, options
from condense.cli.main import main as run_command
from condense.methods import LCA, Method, Recall
from condense.methods.grouped import GroupPooling
from condense.models import MethodChoice, described, methods_of
from condense.plots import Line, plot_lines

# the window that the bundled model was trained with, and lengths that fit the bundled text
DEMO_POOLING, DEMO_LENGTHS, DEMO_LENGTH = "lca:window=256", (512, 1024, 2048, 3584), 3584
DEMO_RECALL = "recall:window=256,num_recall=16"  # as many groups open as suit the bundled text
DEMO_BUDGET = {"sink": 128, "window": 512}
FAMILIES = {"a_shape": "A-shape", "vertical_slash": "vertical-slash", "block_sparse": "block-sparse"}

app = typer.Typer(
    name="python benchmarks/analyze", help="Look into a model.", add_completion=False, pretty_exceptions_enable=False,
    rich_markup_mode=None,
)  # fmt: skip


@app.command("recall", cls=options.Command, short_help="How much of dense attention the open groups hold.")
def recall_command(
    model: options.Model = None,
    text: options.Texts = None,
    method: Annotated[
        str | None, typer.Option(help="recall, also with settings, as in 'recall:num_recall=32'.")
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens. Default: the shortest text.")] = None,
    sequences: Annotated[int, typer.Option(help="Stretches cut from each text, where it is long enough.")] = 1,
    last: Annotated[
        int, typer.Option("--steps", help="Last tokens of each stretch, whose queries are measured.")
    ] = 128,
    slots: Annotated[
        list[int] | None,
        typer.Option(help="Opened groups kept per KV head; repeatable. Default: 1, 2 and 4 times num_recall."),
    ] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    json: options.Json = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Measure dense attention's weights in the window and the open groups, and how often groups stay open."""

    outputs = Outputs(model, json, None, overwrite).checked()
    chosen = Method.parse(method or (DEMO_RECALL if model is None else "recall"))
    if not isinstance(chosen, Recall):
        raise ValueError(f"--method must be recall, got {chosen}")
    loaded, _, texts = load(model, text, dtype, device)
    ids = list(texts.values())
    shortest = min(map(len, ids))
    tokens = length or (min(DEMO_LENGTH, shortest) if model is None and not text else shortest)
    with steps(sum(min(sequences, len(x) // tokens) for x in ids)) as on_step:
        layers = measure_recall(
            loaded, chosen, ids, tokens, sequences=sequences, steps=last, slots=slots, on_step=on_step
        )
    models.warn_of_length(loaded, tokens)
    headings = ("layer", "window", "opened", "pooled", "best", "lowest head", *(f"hits {n}" for n in layers[0].hits))
    shares = {x.layer: (x.window, x.opened, x.pooled, x.best, min(x.heads), *x.hits.values()) for x in layers}
    show(
        f"{chosen}: shares of dense attention's weights, last {last} of {tokens:,} tokens",
        headings,
        ([str(layer), *(f"{share:.1%}" for share in of_layer)] for layer, of_layer in shares.items()),
        "window + opened: seen exactly, in the lowest head at least so much. best: what could be opened at most. "
        "hits n: opened groups found among the n opened last.",
    )
    outputs.write({"method": chosen, "length": tokens, "steps": last, "layers": layers}, loaded)


@app.command("patterns", cls=options.Command, short_help="Which of MInference's patterns suits each head.")
def patterns_command(
    output: Annotated[Path, typer.Option(help="File for the patterns; --method @FILE reads it.")],
    model: options.Model = None,
    text: Annotated[str | None, typer.Option(help="Text file, or - for standard input. Default: bundled.")] = None,
    length: Annotated[int | None, typer.Option(help="First tokens of the text only.", min=1)] = None,
    sink: Annotated[int | None, typer.Option(help="First tokens that the A-shape sees. Default: 1024.")] = None,
    window: Annotated[int | None, typer.Option(help="Last tokens that it sees. Default: 4096.")] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Choose one of MInference's patterns for each head: the one that keeps most of dense attention's weights.

    None computes more than the A-shape of --sink and --window. Bundled model and text: 128 and 512, 3584 tokens.
    """

    options.check_targets(output=output, overwrite=overwrite)
    is_demo = model is None and text is None
    budget = AShape(**DEMO_BUDGET if is_demo else {})
    budget = AShape(sink=budget.sink if sink is None else sink, window=budget.window if window is None else window)
    loaded, _, texts = load(model, None if text is None else [text], dtype, device)
    (ids,) = texts.values()
    ids = ids[: length or (DEMO_LENGTH if is_demo else len(ids))]
    with steps(None) as on_step:
        heads = search_patterns(loaded, ids, budget, on_head=on_step)
    models.warn_of_length(loaded, len(ids))
    rows = []
    for layer in dict.fromkeys(each.layer for each in heads):
        of_layer = [each for each in heads if each.layer == layer]
        count = Counter(each.pattern.partition(":")[0] for each in of_layer)
        kept = [each.kept[each.pattern] for each in of_layer]
        alone = [next(iter(each.kept.values())) for each in of_layer]
        shares = (sum(kept) / len(kept), min(kept), sum(alone) / len(alone))
        rows.append([str(layer), *(str(count[name]) for name in FAMILIES), *(f"{share:.1%}" for share in shares)])
    title = f"heads by pattern, and the share of dense attention's weights that is kept; {len(ids):,} tokens"
    show(title, ("layer", *FAMILIES.values(), "kept", "lowest", "A-shape alone"), rows)
    save_patterns(heads, output, budget=budget, length=len(ids), device=loaded.device, overwrite=overwrite)
    options.plain_console().print(f"written: {output}; use it with --method @{output}", soft_wrap=True)


@app.command("deviation", cls=options.Command, short_help="How far tokens lie from the entries that stand for them.")
def deviation_command(
    model: options.Model = None,
    text: options.Texts = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="One that pools groups, such as pooled or, with settings, 'cca:window=512'; see `condense methods`. "
            "Default: what the model was saved with, or lca."
        ),
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
    models.warn_of_length(loaded, max(lengths))
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

    method, *others = methods_of(choice)
    if others or not isinstance(method, GroupPooling):
        raise ValueError(
            f"method: wanted one that pools groups, the model was saved with {described(choice)}: add --method"
        )
    return method


def plot_deviation(results: Sequence[Deviation], path: Path) -> None:
    """Mean distance of tokens from their entry, by length and by layer at the longest."""
    longest = max(result.length for result in results)
    by_length: dict[str, Line] = {}
    by_layer: dict[str, Line] = {}
    for text in dict.fromkeys(result.text for result in results):
        of_text = sorted((result for result in results if result.text == text), key=lambda result: result.length)
        for part in ("keys", "values"):
            label, layers = f"{text}, {part}", of_text[-1].layers
            by_length[label] = [x.length for x in of_text], [100 * getattr(x, part).relative for x in of_text]
            by_layer[label] = [x.layer for x in layers], [100 * getattr(x, part).relative for x in layers]
    panels = {"by tokens": by_length, f"by layer, at {longest} tokens": by_layer}
    plot_lines(panels, path, x_label="", y_label="distance from the entry, % of the norm")


def main() -> None:
    """Run the command line; errors as of `condense`."""
    run_command(command=app)
