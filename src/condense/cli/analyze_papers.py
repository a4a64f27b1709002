"""`condense analyze` sparsity, noise, conditioning and cost: what the papers claim of attention, measured."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from condense.cli.analyze_report import Outputs, load, show, steps
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
)

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
    """Count texts where a weight of the last query is above 1 / (tokens * rho) (DGA paper, Figures 2, 6 and 7)."""
    from condense.analysis import EDGES, measure_sparsity
    from condense.plots import plot_lines

    outputs = Outputs(model, json, plot, overwrite).checked()
    loaded, _, texts = load(model, text, dtype, device)
    lengths, rhos = length or [100, 200, 400, 700, 1000], rho or [0.05, 0.02, 0.01]
    ids = list(texts.values())
    counts = [min(sequences, sum(min(sequences, len(x) // n) for x in ids)) for n in lengths if n > 0]
    with steps(sum(counts)) as on_step:
        layers = measure_sparsity(loaded, ids, lengths, rhos=rhos, sequences=sequences, on_step=on_step)
    rows = [[str(x.layer), f"{r:g}", *(f"{x.sparse[r][n]:.2f}" for n in lengths)] for x in layers for r in rhos]
    show("P_sparse by tokens, mean of heads", ["layer", "rho", *map(str, lengths)], rows)
    outputs.write({"edges": EDGES, "sequences": min(counts), "layers": layers}, loaded)
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
    length: Annotated[int, typer.Option(help="Tokens of every stretch.", min=1)] = 1024,
    sequences: Annotated[int, typer.Option(help="Stretches.")] = 2,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    json: JsonOption = None,
    plot: PlotOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Measure the change of predictions by Gaussian noise on the keys, method by method (DGA paper, Figure 3b)."""
    from condense.analysis import VARIANCES, noise_effect, stretches
    from condense.methods import Method
    from condense.plots import method_labels, plot_lines

    outputs = Outputs(model, json, plot, overwrite).checked()
    methods = [Method.parse(each) for each in method or ["dense", DEMO_METHOD, "dga"]]
    loaded, _, texts = load(model, text, dtype, device)
    parts = [part for ids in texts.values() for part in stretches(ids, length, sequences)][:sequences]
    if not parts:
        raise ValueError(
            f"length must be at most that of the longest text, {max(map(len, texts.values()))}, got {length}"
        )
    with steps(len(parts) * len(methods)) as on_step:
        found = {
            label: noise_effect(loaded, each, parts, on_step=on_step)
            for label, each in zip(method_labels(methods), methods, strict=True)
        }
    rows = [[label, *(f"{kl:.4f}" for kl in effect)] for label, effect in found.items()]
    title = "KL in nats by variance of the noise, relative to the keys'"
    show(title, ["method", *(f"{v:g}" for v in VARIANCES)], rows)
    content = {"length": length, "sequences": len(parts), "methods": methods, "variances": VARIANCES, "kl": found}
    outputs.write(content, loaded)
    if plot is not None:
        lines = {label: (VARIANCES, effect) for label, effect in found.items()}
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
    from condense.analysis import conditioning, counterexample, measure_conditioning
    from condense.plots import plot_lines

    outputs = Outputs(model, json, plot, overwrite).checked()
    loaded, _, texts = load(model, text, dtype, device)
    layers = measure_conditioning(loaded, max(texts.values(), key=len), group_size)
    found = {**{str(layer): c for layer, c in layers.items()}, "counter-example": conditioning(*counterexample())}
    show(
        f"Condition numbers, groups of {group_size}; V Vt is the form that holds",
        ["layer", "V Vt", "grouped", "Vt V", "grouped"],
        [[label, *(f"{x:.3g}" for x in vars(c).values())] for label, c in found.items()],
    )
    outputs.write({"group_size": group_size, "layers": found}, loaded)
    if plot is not None:
        forms = {"weights: V Vt (holds)": ("weights", "weights_grouped"), "values: Vt V": ("values", "values_grouped")}
        panels = {
            title: {
                label: (list(layers), [math.log10(getattr(c, name)) for c in layers.values()])
                for label, name in zip(("tokens", "groups"), names, strict=True)
            }
            for title, names in forms.items()
        }
        plot_lines(panels, plot, x_label="layer", y_label="log10 of the condition number")


def cost_command(
    method: Methods = None,
    length: Annotated[list[int] | None, typer.Option(help="Tokens; repeatable. Default: 1024 to 131072.")] = None,
    json: JsonOption = None,
    plot: PlotOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Keys that a query reads, by length (DGA paper, Figure 5; LCA, Table 1). `condense bench kernel` times them."""
    from condense.analysis import measure_cost
    from condense.methods import Method
    from condense.plots import method_labels, plot_lines

    outputs = Outputs(None, json, plot, overwrite).checked()
    methods = [Method.parse(each) for each in method or ["dense", "cca", "dga", "streaming_llm:window=1024"]]
    lengths = length or [2**n for n in range(10, 18)]
    costs = {label: measure_cost(each, lengths) for label, each in zip(method_labels(methods), methods, strict=True)}
    rows = [[label, f"{c.length:,}", f"{c.keys:,}", f"{c.mean_keys:,.0f}"] for label, of in costs.items() for c in of]
    show("Keys that a query reads", ["method", "tokens", "last", "mean"], rows)
    outputs.write({"methods": methods, "costs": costs})
    if plot is not None:
        panels = {
            title: {label: ([c.length for c in of], [getattr(c, name) for c in of]) for label, of in costs.items()}
            for title, name in (("keys of the last query", "keys"), ("keys, mean over queries", "mean_keys"))
        }
        plot_lines(panels, plot, x_label="tokens", y_label="", log=True)
