"""`condense analyze` sparsity, noise, conditioning and cost: what the papers claim of attention, measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from condense.cli.options import (
    DEMO_METHOD,
    METHOD_HELP,
    DeviceOption,
    DtypeOption,
    JsonOption,
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
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from condense.analysis import Conditioning

Methods = Annotated[list[str] | None, typer.Option(help=METHOD_HELP + " Repeatable.")]


def sparsity_command(
    model: ModelOption = None,
    text: TextsOption = None,
    length: Annotated[list[int] | None, typer.Option(help="Tokens; repeatable. Default: 100 to 1000.")] = None,
    rho: Annotated[list[float] | None, typer.Option(help="Sparse rates. Default: 0.05, 0.02, 0.01.")] = None,
    sequences: Annotated[int, typer.Option(help="Stretches of each length.")] = 16,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    json: JsonOption = None,
    plot: PlotOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """How often a weight of the last query is above 1 / (tokens * rho), by length (DGA paper, Figures 2, 6 and 7)."""
    from condense.analysis import measure_sparsity
    from condense.analysis.sparsity import EDGES
    from condense.plots import plot_lines

    check_targets(json=json, plot=plot, overwrite=overwrite)
    loaded, texts = _load(model, text, dtype, device)
    lengths, rhos = length or [100, 200, 400, 700, 1000], rho or [0.05, 0.02, 0.01]
    with progress() as bar:
        steps = [min(sequences, sum(min(sequences, len(ids) // n) for ids in texts)) for n in lengths if n > 0]
        task = bar.add_task("reading", total=sum(steps))
        layers = measure_sparsity(
            loaded, texts, lengths, rhos=rhos, sequences=sequences, on_step=lambda: bar.advance(task)
        )
    rows = [[str(x.layer), f"{r:g}", *(f"{x.sparse[r][n]:.2f}" for n in lengths)] for x in layers for r in rhos]
    _print(["layer", "rho", *map(str, lengths)], rows, "P_sparse by tokens, mean of heads")
    _write(json, model, loaded, overwrite, {"edges": EDGES, "sequences": min(steps), "layers": layers})
    if plot is not None:
        mean = {r: [sum(x.sparse[r][n] for x in layers) / len(layers) for n in lengths] for r in rhos}
        panels: dict[str, Any] = {
            "P_sparse, mean of layers": {f"rho {r:g}": (lengths, mean[r]) for r in rhos},
            f"weights times tokens, at {max(lengths)}": {
                f"layer {x.layer}": (range(-10, 12), x.histogram) for x in layers[:: max(1, len(layers) // 4)]
            },
        }
        plot_lines(panels, plot, x_label="tokens; log2 of a weight's upper edge", y_label="share")


def noise_command(
    model: ModelOption = None,
    text: TextsOption = None,
    method: Methods = None,
    length: Annotated[int, typer.Option(help="Tokens of every stretch.")] = 1024,
    sequences: Annotated[int, typer.Option(help="Stretches.")] = 2,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    json: JsonOption = None,
    plot: PlotOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """How far predictions move when Gaussian noise is put on the keys, method by method (DGA paper, Figure 3b)."""
    from condense.analysis import noise_effect
    from condense.methods import Method
    from condense.plots import method_labels, plot_lines

    check_targets(json=json, plot=plot, overwrite=overwrite)
    methods = [Method.parse(each) for each in method or ["dense", DEMO_METHOD, "dga"]]
    loaded, texts = _load(model, text, dtype, device)
    parts = _parts(texts, length, sequences)
    found = {}
    with progress() as bar:
        task = bar.add_task("reading", total=len(parts) * len(methods))
        for label, each in zip(method_labels(methods), methods, strict=True):
            found[label] = noise_effect(loaded, each, parts, on_step=lambda: bar.advance(task))
    variances = [row["variance"] for row in next(iter(found.values()))]
    rows = [[label, *(f"{row['kl']:.4f}" for row in effects)] for label, effects in found.items()]
    _print(
        ["method", *(f"{v:g}" for v in variances)], rows, "KL in nats by variance of the noise, relative to the keys'"
    )
    content = {"length": length, "sequences": len(parts), "methods": methods, "kl": found}
    _write(json, model, loaded, overwrite, content)
    if plot is not None:
        lines = {label: (variances, [row["kl"] for row in effects]) for label, effects in found.items()}
        plot_lines({"predictions with noisy keys": lines}, plot, x_label="variance", y_label="KL, nats", log=True)


def conditioning_command(
    model: ModelOption = None,
    text: TextsOption = None,
    group_size: Annotated[int, typer.Option(help="Tokens of a group.", min=2)] = 16,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    json: JsonOption = None,
    plot: PlotOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Condition numbers before and after grouping: DGA's Theorem 3 where it holds, and where it does not."""
    from condense.analysis import conditioning, counterexample
    from condense.plots import plot_lines

    check_targets(json=json, plot=plot, overwrite=overwrite)
    loaded, texts = _load(model, text, dtype, device)
    values = _values(loaded, max(texts, key=len))
    few = min(
        max(x.shape[1] for x in values.values()) * group_size,
        *(len(x) // group_size * group_size for x in values.values()),
    )
    found = {layer: conditioning(v[:few], group_size) for layer, v in values.items()}
    v, m = counterexample()
    found_all: dict[str, Conditioning] = {
        **{str(layer): c for layer, c in found.items()},
        "counter-example": conditioning(v, m),
    }
    rows = [[label, *(f"{x:.3g}" for x in vars(c).values())] for label, c in found_all.items()]
    _print(
        ["layer", "V Vt", "grouped", "Vt V", "grouped"],
        rows,
        f"Condition numbers, groups of {group_size}; V Vt is the form that holds",
    )
    _write(json, model, loaded, overwrite, {"group_size": group_size, "layers": found_all})
    if plot is not None:
        forms = {"weights: V Vt (holds)": ("weights", "weights_grouped"), "values: Vt V": ("values", "values_grouped")}
        panels = {
            title: {
                label: (list(found), [math.log10(getattr(c, name)) for c in found.values()])
                for label, name in zip(("tokens", "groups"), names, strict=True)
            }
            for title, names in forms.items()
        }
        plot_lines(panels, plot, x_label="layer", y_label="log10 of the condition number")


def cost_command(
    model: ModelOption = None,
    method: Methods = None,
    length: Annotated[list[int] | None, typer.Option(help="Tokens; repeatable. Default: 1024 to 131072.")] = None,
    longest: Annotated[int, typer.Option(help="Tokens up to which attention is timed too.")] = 8192,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    json: JsonOption = None,
    plot: PlotOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Keys that a query reads, by length, beside measured times of one layer (DGA paper, Figure 5; LCA, Table 1)."""
    from condense.analysis import Heads, measure_cost
    from condense.methods import Method
    from condense.plots import method_labels, plot_lines

    check_targets(json=json, plot=plot, overwrite=overwrite)
    methods = [Method.parse(each) for each in method or ["dense", "cca", "dga", "streaming_llm:window=1024"]]
    loaded, _ = load_model(model, dtype, device)
    config = loaded.config.get_text_config(decoder=True)
    H = config.num_attention_heads
    heads = Heads(
        H,
        getattr(config, "num_key_value_heads", None) or H,
        getattr(config, "head_dim", None) or config.hidden_size // H,
    )
    lengths = length or [2**n for n in range(10, 18)]
    with progress() as bar:
        task = bar.add_task("measuring", total=len(lengths) * len(methods))
        costs = measure_cost(
            heads, methods, lengths, longest=longest, device=loaded.device, on_step=lambda: bar.advance(task)
        )
    labels = dict(zip(methods, method_labels(methods), strict=True))
    rows = [
        [
            labels[c.method],
            f"{c.length:,}",
            f"{c.keys:,}",
            f"{c.mean_keys:,.0f}",
            "" if c.seconds is None else f"{c.seconds:.4f}",
        ]
        for c in costs
    ]
    _print(["method", "tokens", "keys, last", "keys, mean", "seconds"], rows, f"One layer's attention, {heads}")
    _write(json, model, loaded, overwrite, {"heads": heads._asdict(), "costs": costs})
    if plot is not None:
        of = {label: [c for c in costs if labels[c.method] == label] for label in labels.values()}
        panels: dict[str, Any] = {
            "keys of the last query": {label: ([c.length for c in x], [c.keys for c in x]) for label, x in of.items()},
            "seconds, whole text": {
                label: ([c.length for c in x if c.seconds], [c.seconds for c in x if c.seconds])
                for label, x in of.items()
            },
        }
        plot_lines(panels, plot, x_label="tokens", y_label="", log=True)


def _load(
    model: str | None, text: list[str] | None, dtype: str | None, device: str | None
) -> tuple[PreTrainedModel, list[Tensor]]:
    """The model with stock attention, and the texts' token ids."""
    from condense.demo import demo_text
    from condense.evaluate.compare import encode
    from condense.models import restore

    contents = [read_text(source) for source in dict.fromkeys(text or ())] or [demo_text().text]
    loaded, tokenizer = load_model(model, dtype, device)
    restore(loaded)
    return loaded, [encode(tokenizer, content, loaded)[0] for content in contents]


def _parts(texts: list[Tensor], length: int, sequences: int) -> list[Tensor]:
    from condense.analysis.deviation import stretches

    parts = [part for ids in texts for part in stretches(ids, length, sequences)][:sequences] if length > 0 else []
    if not parts:
        raise ValueError(f"length must be 1 to that of the longest text, {max(map(len, texts))}, got {length}")
    return parts


def _values(model: PreTrainedModel, ids: Tensor) -> dict[int, Tensor]:
    """Value vectors of one KV head of every layer that caches them, ``[L, Dv]``."""
    import torch
    from transformers import DynamicCache

    with torch.no_grad():
        cache = model(ids[None].to(model.device), use_cache=True, logits_to_keep=1).past_key_values
    assert isinstance(cache, DynamicCache)
    return {
        i: layer.values[0, 0].cpu()
        for i, layer in enumerate(cache.layers)
        if getattr(layer, "values", None) is not None
    }


def _print(headings: list[str], rows: list[list[str]], title: str) -> None:
    table = plain_table(title)
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    plain_console().print(table)


def _write(
    json: Path | None, model: str | None, loaded: PreTrainedModel, overwrite: bool, content: dict[str, Any]
) -> None:
    from condense.results import write_results

    if json is not None:
        write_results(json, {"model": model or "bundled", **content}, device=loaded.device, overwrite=overwrite)
