"""`condense analyze recall`: how much of dense attention Recall sees exactly."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from condense.cli.options import (
    DEMO_RECALL,
    DeviceOption,
    DtypeOption,
    ModelOption,
    TextsOption,
    load_model,
    plain_console,
    plain_table,
    progress,
    read_text,
    warn_of_length,
)

if TYPE_CHECKING:
    from condense.analysis import LayerRecall

DEMO_LENGTH = 3584


def recall_command(
    model: ModelOption = None,
    text: TextsOption = None,
    method: Annotated[
        str | None, typer.Option(help="recall, also with settings, as in 'recall:num_recall=32'.")
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens. Default: the shortest text.")] = None,
    sequences: Annotated[int, typer.Option(help="Stretches cut from each text, where it is long enough.")] = 1,
    steps: Annotated[int, typer.Option(help="Last tokens of each stretch, whose queries are measured.")] = 128,
    slots: Annotated[
        list[int] | None,
        typer.Option(help="Opened groups kept per KV head; repeatable. Default: 1, 2 and 4 times num_recall."),
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    json: Annotated[Path | None, typer.Option(help="Write the results, head by head, to this file.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing result file.")] = False,
) -> None:
    """How much of dense attention's weights the window and the open groups hold, and how often groups stay open."""
    from condense.analysis import measure_recall
    from condense.demo import demo_text
    from condense.evaluate.compare import encode
    from condense.methods import Method, Recall
    from condense.models import restore
    from condense.results import refuse_existing, write_results

    if json is not None:
        refuse_existing(json, "json", overwrite=overwrite)
    chosen = Method.parse(method or (DEMO_RECALL if model is None else "recall"))
    contents = [read_text(source) for source in dict.fromkeys(text or ())] or [demo_text().text]
    loaded, tokenizer = load_model(model, dtype, device)
    restore(loaded)
    ids = [encode(tokenizer, content, loaded)[0] for content in contents]
    shortest = min(map(len, ids))
    tokens = length or (min(DEMO_LENGTH, shortest) if model is None and not text else shortest)
    if not isinstance(chosen, Recall):
        raise ValueError(f"--method must be recall, got {chosen}")
    with progress() as bar:
        task = bar.add_task("reading", total=sum(min(sequences, len(x) // tokens) for x in ids))
        layers = measure_recall(
            loaded,
            chosen,
            ids,
            tokens,
            sequences=sequences,
            steps=steps,
            slots=slots,
            on_step=lambda: bar.advance(task),
        )
    warn_of_length(loaded, tokens)
    _print(layers, f"{chosen}: shares of dense attention's weights, last {steps} of {tokens:,} tokens")
    if json is not None:
        content = {"model": model or "bundled", "method": chosen, "length": tokens, "steps": steps, "layers": layers}
        write_results(json, content, device=loaded.device, overwrite=overwrite)


def _print(layers: list[LayerRecall], title: str) -> None:
    table = plain_table(title)
    hits = [f"hits {size}" for size in layers[0].hits]
    for heading in ("layer", "window", "opened", "pooled", "best", "lowest head", *hits):
        table.add_column(heading, justify="right")
    for each in layers:
        shares = (each.window, each.opened, each.pooled, each.best, min(each.heads), *each.hits.values())
        table.add_row(str(each.layer), *(f"{share:.1%}" for share in shares))
    console = plain_console()
    console.print(table)
    console.print(
        "window + opened: seen exactly, in the lowest head at least so much. best: what could be opened at most. "
        "hits n: opened groups found among the n opened last.",
    )
