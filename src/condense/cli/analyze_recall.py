"""`condense analyze recall`: how much of dense attention Recall sees exactly."""

from __future__ import annotations

from typing import Annotated

import typer

from condense.cli import options
from condense.cli.analyze_report import Outputs, load, show, steps

DEMO_LENGTH = 3584


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
    from condense.analysis import measure_recall
    from condense.methods import Method, Recall

    outputs = Outputs(model, json, None, overwrite).checked()
    chosen = Method.parse(method or (options.DEMO_RECALL if model is None else "recall"))
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
    options.warn_of_length(loaded, tokens)
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
