"""`condense inspect`: what condensing would change, per layer, and how many requests fit, before anything runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from condense.cli import models, options

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from condense.models.choice import MethodChoice
    from condense.models.fit import CacheFit
    from condense.models.inspect import LayerReport

DEFAULT = "recall-host"


def inspect_command(
    model: options.Model = None,
    shape: Annotated[str | None, typer.Option(help="A known shape instead, such as qwen3-8b, without a hub.")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help=f"{options.CHOICE_HELP} Default: what the model was saved with, or {DEFAULT}."),
    ] = None,
    length: Annotated[str, typer.Option(help="Prompt length in tokens, such as 4096 or 128K.")] = "128K",
    memory: Annotated[str | None, typer.Option(help="Of all devices, such as 80GB: how many requests fit.")] = None,
    batch: Annotated[int | None, typer.Option(help="Whether so many requests fit.", min=1)] = None,
    host_memory: Annotated[str | None, typer.Option(help="For far tokens there, such as 512GB.")] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and cache: float32, bfloat16, ...")] = "bfloat16",
    to_json: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Entries, bytes and FLOPs per layer, and the requests that fit under each named setting. Reads no weights."""
    from condense.models import choice_from_text, described, restore
    from condense.models.fit import cache_fits, weight_bytes
    from condense.models.inspect import inspect
    from condense.named import NAMED_SETTINGS
    from condense.results import write_results

    if shape is not None and model is not None:
        raise ValueError("shape and model exclude each other, got both")
    if memory is None and (batch, host_memory) != (None, None):
        raise ValueError("batch and host_memory need a memory to fit into: add --memory 80GB")
    tokens = options.parse_tokens("length", length)
    itemsize = options.parse_dtype(dtype, options.parse_device("cpu")).itemsize
    texts = {"memory": memory, "host_memory": host_memory}
    room = {name: None if text is None else _parse_bytes(name, text) for name, text in texts.items()}
    options.check_targets(json=to_json, overwrite=overwrite)
    given = choice_from_text(*method) if method else None
    skeleton = models.read_skeleton(model, shape)
    saved = models.saved_choice(skeleton)
    chosen = given or saved or choice_from_text(DEFAULT)
    reports = inspect(restore(skeleton), chosen, tokens, itemsize)
    choices = {name: choice_from_text(name) for name in NAMED_SETTINGS}
    if chosen not in choices.values():
        choices |= {" ".join(method or [described(chosen)]): chosen}
    is_quantised = getattr(skeleton.config, "quantization_config", None) is not None
    # only files that transformers names so: others in the folder may hold the same weights for other programs
    files = Path(model).expanduser().glob("model*.safetensors") if is_quantised and model is not None else ()
    stored = sum(file.stat().st_size for file in files)
    weights = stored or weight_bytes(skeleton, itemsize)
    fits = cache_fits(skeleton, choices, tokens, itemsize, weights=weights, **room)
    name = model or shape or "bundled"
    methods = list(dict.fromkeys(str(report.method) for report in reports if report.method is not None))
    _print_layers(reports, f"{'; '.join(methods)} at {tokens} tokens, {dtype}")
    _print_fits(fits, f"{name}: one request of {tokens:,} tokens, {dtype}", batch)
    if memory is not None:
        _print_room(fits, memory, weights, host_memory)
    if is_quantised and not stored:
        print(f"Its weights are quantised, but counted in {dtype}: give a folder that holds them in safetensors.")
    for line in _lines_to_type(skeleton, model or "DIR", tokens, saved):
        print(line)
    if to_json is not None:
        content = {"model": name, "length": tokens, "dtype": dtype, "layers": reports}
        content |= {"weight_bytes": weights, **room, "batch": batch, "settings": fits}
        write_results(to_json, content, overwrite=overwrite)


def _parse_bytes(name: str, text: str) -> int:
    """Bytes, > 0, of text such as 80GB (billions) or 512GiB (of 2**30). Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MGT])(i?)B", text.strip())
    size = int(float(found[1]) * (1024 if found[3] else 1000) ** (2 + "MGT".index(found[2]))) if found else 0
    if size == 0:
        raise ValueError(f"{name}: wanted bytes, such as 80GB or 512GiB, got {text!r}")
    return size


def _print_fits(fits: Sequence[CacheFit], title: str, batch: int | None) -> None:
    counted = ["requests\nthat fit", "in\nvLLM"] if fits[0].requests is not None else []
    counted += [] if batch is None else [f"{batch} fit"]
    dense = fits[0].device_bytes
    unit, size = ("MiB", 2**20) if dense < 2**30 else ("GiB", 2**30)
    headings = [f"device\n{unit}", "of\ndense", "in\nvLLM", f"host\n{unit}", *counted]
    table = options.plain_table(title, left=["settings"], right=headings, is_whole=True)
    for fit in fits:
        host = f"{fit.host_bytes / size:,.2f}" if fit.host_bytes else ""
        in_vllm = "" if fit.served_bytes is None else f"{fit.served_bytes / dense:.1%}"
        cells = [f"{fit.device_bytes / size:,.2f}", f"{fit.device_bytes / dense:.1%}", in_vllm, host]
        if fit.requests is not None:
            cells += [f"{fit.requests:,}", "" if fit.served is None else f"{fit.served:,}"]
            cells += [] if batch is None else ["yes" if fit.requests >= batch else "no"]
        table.add_row(fit.name, *cells)
    options.plain_console().print(table)


def _print_room(fits: Sequence[CacheFit], memory: str, weights: int, host_memory: str | None) -> None:
    """Print how the numbers of requests were computed."""
    from condense.models.fit import USED

    print(
        f"Requests that fit: {USED:.0%} of {memory}, less {weights / 2**30:,.1f} GiB of weights, by the cache of one. "
        "Arithmetic: nothing was run, and the rest of the memory is for activations."
    )
    if weights > USED * _parse_bytes("memory", memory):
        print("The weights alone need more: give the memory of all devices (--memory).")
    for fit in fits:
        if fit.host_bytes and fit.requests and host_memory is None:
            needed = fit.requests * fit.host_bytes / 2**30
            print(f"{fit.name}: {fit.requests:,} requests need {needed:,.0f} GiB on the host (--host-memory)")


def _lines_to_type(model: PreTrainedModel, folder: str, tokens: int, saved: MethodChoice | None) -> list[str]:
    """Commands for the named settings, and the settings that a model with fewer positions needs.

    saved: the choice that the folder names, None without one.
    """
    from condense.models.families import max_learned_positions
    from condense.models.inspect import served_layers
    from condense.serving.vllm.register import ARCHITECTURES

    lines = ['transformers: condense.apply(model, "recall-host"), "recall-device" or, once adapted, "pooled"']
    served = type(model).__name__ in ARCHITECTURES
    if served:
        line = f"vLLM: condense serve {quote(folder)} --max-model-len {tokens}"
        try:
            if saved is not None:
                served_layers(model, saved, tokens)
        except ValueError as error:
            lines.append(f"{line} --method recall-device, or recall-host; not as saved: {error}")
        else:
            default = "recall-device" if saved is None else "as saved"
            lines.append(f"{line} ({default}); with --method recall-host or, once adapted, pooled")
    config: Any = model.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None or tokens <= positions:
        return lines
    fewer = f"The model has {positions:,} positions, fewer than {tokens:,} tokens need"
    rope = getattr(config, "rope_parameters", None) or {}
    if max_learned_positions(config) is not None or rope.get("rope_type") != "default":
        return [*lines, f"{fewer}: its card says whether and how it reads more."]
    # models are trained on powers of two; positions beyond, as Qwen3 has them, are room for answers
    original = 2 ** (positions.bit_length() - 1)
    yarn = rope | {"rope_type": "yarn", "factor": float(-(-tokens // original))}
    yarn |= {"original_max_position_embeddings": original}
    lines += [
        f"{fewer}. YaRN gives it more; its card says whether that was tried:",
        f'  from_pretrained("{folder}", rope_parameters={yarn}, max_position_embeddings={tokens})',
    ]
    return [*lines, f"  vLLM: --hf-overrides '{json.dumps({'rope_parameters': yarn})}'"] if served else lines


def _print_layers(reports: list[LayerReport], title: str) -> None:
    from condense.methods import layers_as_text

    share = "of\ndense"
    headings = ["layer", "method", "entries", share, "cache\nMiB", share, "GFLOP", share]
    table = options.plain_table(title, right=headings, is_whole=True)
    # neighbouring layers with the same figures together
    for _, run in itertools.groupby(reports, key=lambda report: dataclasses.replace(report, layer=0)):
        same = list(run)
        r = same[0]
        table.add_row(
            layers_as_text(report.layer for report in same),
            "stock" if r.method is None else r.method.name,
            f"{r.entries:,}",
            f"{r.entries / r.dense_entries:.1%}",
            f"{r.bytes / 2**20:,.1f}",
            f"{r.bytes / r.dense_bytes:.1%}",
            f"{r.flops / 1e9:,.1f}",
            f"{r.flops / r.dense_flops:.1%}",
        )
    options.plain_console().print(table)
    cache, dense = sum(r.bytes for r in reports), sum(r.dense_bytes for r in reports)
    flops, dense_flops = sum(r.flops for r in reports), sum(r.dense_flops for r in reports)
    print(
        f"all layers: cache {cache / 2**20:,.1f} of {dense / 2**20:,.1f} MiB ({cache / dense:.1%}), "
        f"attention {flops / 1e12:,.2f} of {dense_flops / 1e12:,.2f} TFLOP ({flops / dense_flops:.1%})"
    )
    host = sum(r.host_bytes for r in reports)
    if host > 0:
        print(f"in host memory: {host / 2**20:,.1f} MiB, pinned on CUDA")
    for remark, run in itertools.groupby(reports, key=lambda report: report.remark):
        layers = [report.layer for report in run]
        if remark is not None:
            print(f"layer{'s' if len(layers) > 1 else ''} {layers_as_text(layers)}: {remark}")
