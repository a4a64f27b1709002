"""`condense analyze patterns`: MInference's pattern of sparse prefill for each head, found beforehand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from condense.cli import options
from condense.cli.analyze_report import load, show, steps

DEMO_BUDGET, DEMO_LENGTH = {"sink": 128, "window": 512}, 3584
FAMILIES = {"a_shape": "A-shape", "vertical_slash": "vertical-slash", "block_sparse": "block-sparse"}


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
    """Which of MInference's patterns suits each head: the one that keeps most of dense attention's weights.

    None computes more than the A-shape of --sink and --window. Bundled model and text: 128 and 512, 3584 tokens.
    """
    from condense.analysis import save_patterns, search_patterns
    from condense.baselines import AShape

    options.check_targets(output=output, overwrite=overwrite)
    is_demo = model is None and text is None
    budget = AShape(**DEMO_BUDGET if is_demo else {})
    budget = AShape(sink=budget.sink if sink is None else sink, window=budget.window if window is None else window)
    loaded, _, texts = load(model, None if text is None else [text], dtype, device)
    (ids,) = texts.values()
    ids = ids[: length or (DEMO_LENGTH if is_demo else len(ids))]
    with steps(None) as on_step:
        heads = search_patterns(loaded, ids, budget, on_head=on_step)
    options.warn_of_length(loaded, len(ids))
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
