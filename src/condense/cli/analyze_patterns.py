"""`condense analyze patterns`: MInference's pattern of sparse prefill for each head, found beforehand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from condense.cli.options import (
    DeviceOption,
    DtypeOption,
    ModelOption,
    load_model,
    plain_console,
    plain_table,
    progress,
    read_text,
    warn_of_length,
)

if TYPE_CHECKING:
    from condense.analysis import HeadPattern

DEMO_BUDGET, DEMO_LENGTH = {"sink": 128, "window": 512}, 3584


def patterns_command(
    output: Annotated[Path, typer.Option(help="File for the patterns; --method @FILE reads it.")],
    model: ModelOption = None,
    text: Annotated[str | None, typer.Option(help="Text file, or - for standard input. Default: bundled.")] = None,
    length: Annotated[int | None, typer.Option(help="First tokens of the text only.", min=1)] = None,
    sink: Annotated[int | None, typer.Option(help="First tokens that the A-shape sees. Default: 1024.")] = None,
    window: Annotated[int | None, typer.Option(help="Last tokens that it sees. Default: 4096.")] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Which of MInference's patterns suits each head: the one that keeps most of dense attention's weights.

    None computes more than the A-shape of --sink and --window. Bundled model and text: 128 and 512, 3584 tokens.
    """
    from condense.analysis import save_patterns, search_patterns
    from condense.baselines import AShape
    from condense.demo import demo_text
    from condense.evaluate.compare import encode
    from condense.models import restore
    from condense.results import refuse_existing

    refuse_existing(output, "output", overwrite=overwrite)
    budget = AShape(**DEMO_BUDGET) if model is None and text is None else AShape()
    budget = AShape(sink=budget.sink if sink is None else sink, window=budget.window if window is None else window)
    content = demo_text().text if text is None else read_text(text)
    loaded, tokenizer = load_model(model, dtype, device)
    restore(loaded)
    ids = encode(tokenizer, content, loaded)[0]
    ids = ids[: length or (DEMO_LENGTH if model is None and text is None else len(ids))]
    with progress() as bar:
        task = bar.add_task("heads", total=None)
        heads = search_patterns(loaded, ids, budget, on_head=lambda: bar.advance(task))
    warn_of_length(loaded, len(ids))
    _print(heads, f"heads by pattern, and the share of dense attention's weights that is kept; {len(ids):,} tokens")
    save_patterns(heads, output, budget=budget, length=len(ids), device=loaded.device, overwrite=overwrite)
    plain_console().print(f"written: {output}; use it with --method @{output}", soft_wrap=True)


def _print(heads: list[HeadPattern], title: str) -> None:
    from condense.baselines.minference import pattern_of

    table = plain_table(title)
    names = {"a_shape": "A-shape", "vertical_slash": "vertical-slash", "block_sparse": "block-sparse"}
    for heading in ("layer", *names.values(), "kept", "lowest", "A-shape alone"):
        table.add_column(heading, justify="right")
    for layer in dict.fromkeys(each.layer for each in heads):
        of_layer = [each for each in heads if each.layer == layer]
        count = Counter(pattern_of(each.pattern).name for each in of_layer)
        kept = [each.kept[each.pattern] for each in of_layer]
        alone = [next(iter(each.kept.values())) for each in of_layer]
        shares = (sum(kept) / len(kept), min(kept), sum(alone) / len(alone))
        table.add_row(str(layer), *(str(count[name]) for name in names), *(f"{share:.1%}" for share in shares))
    plain_console().print(table)
