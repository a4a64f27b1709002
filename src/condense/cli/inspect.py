"""`condense inspect`: what condensing would change, per layer, before anything runs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from condense.cli.options import (
    CHOICE_HELP,
    JsonOption,
    LayersOption,
    ModelOption,
    choose,
    parse_dtype,
    plain_console,
    plain_table,
    read_skeleton,
    saved_choice,
)

if TYPE_CHECKING:
    from condense.models.inspect import LayerReport


def inspect_command(
    model: ModelOption = None,
    method: Annotated[
        list[str] | None, typer.Option(help=CHOICE_HELP + " Default: what the model was saved with, or cca.")
    ] = None,
    layers: LayersOption = None,
    length: Annotated[int, typer.Option(help="Prompt length in tokens.")] = 131072,
    dtype: Annotated[str, typer.Option(help="Of the cache: float32, bfloat16, ...")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Where it is to run: cpu or cuda.")] = "cpu",
    json: JsonOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing result file.")] = False,
) -> None:
    """Entries, bytes and FLOPs per layer, dense and condensed, and the length from which it pays. Reads no weights."""
    import torch

    from condense.methods import CCA
    from condense.models import choice_from_text, restore
    from condense.models.inspect import inspect
    from condense.ops import Problem, resolve_backend
    from condense.results import refuse_existing, write_results

    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    where = torch.device(device)
    torch_dtype = parse_dtype(dtype, where)
    if json is not None:
        refuse_existing(json, "json", overwrite=overwrite)
    given = None if not method and layers is None else choose(choice_from_text(*(method or ["cca"])), layers)
    skeleton = read_skeleton(model)
    chosen = given or saved_choice(skeleton) or CCA()
    reports = inspect(restore(skeleton), chosen, length, torch_dtype.itemsize)
    config = skeleton.config.get_text_config()
    heads = config.num_attention_heads
    problem = Problem(
        where,
        torch_dtype,
        (reports[0].width, reports[0].value_width),
        num_queries=length,
        rows=1,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
    )
    backend = resolve_backend("auto", problem)
    methods = list(dict.fromkeys(str(report.method) for report in reports if report.method is not None))
    _print(reports, f"{'; '.join(methods)} at {length} tokens, {dtype}, backend {backend}")
    if json is not None:
        content = {"model": model or "bundled", "length": length, "dtype": dtype, "backend": backend, "layers": reports}
        write_results(json, content, overwrite=overwrite)


def _print(reports: list[LayerReport], title: str) -> None:
    table = plain_table(title)
    share = "of\ndense"
    for heading in ("layer", "method", "entries", share, "cache\nMiB", share, "GFLOP", share, "pays\nfrom"):
        table.add_column(heading, justify="right", no_wrap=True)
    for same in _runs(reports):
        r = same[0]
        table.add_row(
            str(r.layer) if len(same) == 1 else f"{r.layer}-{same[-1].layer}",
            "stock" if r.method is None else r.method.name,
            f"{r.entries:,}",
            f"{r.entries / r.dense_entries:.1%}",
            f"{r.bytes / 2**20:,.1f}",
            f"{r.bytes / r.dense_bytes:.1%}",
            f"{r.flops / 1e9:,.1f}",
            f"{r.flops / r.dense_flops:.1%}",
            "-" if r.pays_from is None else f"{r.pays_from:,}",
        )
    console = plain_console()
    console.print(table)
    cache, dense = sum(r.bytes for r in reports), sum(r.dense_bytes for r in reports)
    flops, dense_flops = sum(r.flops for r in reports), sum(r.dense_flops for r in reports)
    console.print(
        f"all layers: cache {cache / 2**20:,.1f} of {dense / 2**20:,.1f} MiB ({cache / dense:.1%}), "
        f"attention {flops / 1e12:,.2f} of {dense_flops / 1e12:,.2f} TFLOP ({flops / dense_flops:.1%})"
    )
    host = sum(r.host_bytes for r in reports)
    if host > 0:
        console.print(f"in host memory: {host / 2**20:,.1f} MiB, pinned on CUDA")
    for remark in dict.fromkeys(report.remark for report in reports if report.remark is not None):
        console.print(remark)


def _runs(reports: list[LayerReport]) -> list[list[LayerReport]]:
    """Neighbouring layers with the same figures together."""
    runs: list[list[LayerReport]] = []
    for report in reports:
        if runs and dataclasses.replace(report, layer=runs[-1][0].layer) == runs[-1][0]:
            runs[-1].append(report)
        else:
            runs.append([report])
    return runs
