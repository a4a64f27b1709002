"""Kernels and whole models, timed against named baselines on the same shapes.

    python benchmarks/speed kernel --quick                               # attention, layer, decode
    python benchmarks/speed kernel --method lca --backend triton,torch   # beside plain PyTorch operations
    python benchmarks/speed kernel --method recall --ops layer,decode    # a prompt and a step of Recall, index included
    python benchmarks/speed model --shape llama-3.1-8b                   # first token, per token, cache, peak memory

Each writes a result file. Exit codes: 0; 1 if a condensed row is wrong or cannot run; 2 for bad input.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, PreTrainedModel

from condense.cli import models, options
from condense.cli.main import main as run_command
from condense.config import check_int
from condense.methods import Method
from condense.models import choice_from_text, described, restore
from condense.models.shapes import MODEL_SHAPES, check_shape
from condense.ops import Problem, resolve_backend
from condense.results import write_results
from speed.baselines import BASELINES, GPU_BASELINES
from speed.kernel import KernelPlan, bench_kernel
from speed.model import ModelPlan, bench_model
from speed.model_shapes import random_model, ready
from speed.problems import HeadShape, Setting
from speed.rows import OPS, check_names, result_path
from speed.runners import DEFAULT_RUNNERS, RUNNERS
from speed.tables import print_results

RESULTS = Path("benchmarks/results")
LENGTHS = (4096, 8192, 32768, 131072)
QUICK_LENGTHS = (4096, 32768)
CPU_LENGTHS = (256, 1024)
DECODE_BATCHES = (4, 8, 32)
METHODS = ("cca", "lca")
MODEL_METHOD = "recall-device"
FAILED = 1
LOG_WIDTH = 160  # in a file or a pipe

app = typer.Typer(
    name="python benchmarks/speed",
    help="Measure kernels and whole models against named baselines.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

LengthsOption = Annotated[str | None, typer.Option(help="Tokens, such as 4096,32K,1M. Default: 4K to 128K.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="Two lengths, less time per figure.")]
ResultsOption = Annotated[Path, typer.Option(help="Folder that the result file is written to.")]


@app.command("kernel", cls=options.Command, short_help="Attention, the layer and a decode step.")
def kernel_command(
    shape: Annotated[str, typer.Option(help="Heads and widths, H/Hkv/D/Dv.")] = "32/8/128/128",
    lengths: LengthsOption = None,
    method: Annotated[
        list[str] | None, typer.Option(help=f"{options.METHOD_HELP} Repeatable. Default: {' and '.join(METHODS)}.")
    ] = None,
    ops: Annotated[str | None, typer.Option(help="Such as forward,backward,decode. Default: all.")] = None,
    baselines: Annotated[
        str | None, typer.Option(help="Such as cudnn,flash; or none. Default: all for the GPU.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows.")] = 1,
    decode_batches: Annotated[
        str | None, typer.Option(help="Rows of further decode steps; or none. Default: 4,8,32 on a GPU.")
    ] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: Annotated[str, typer.Option(help="Of condense: auto, torch, triton, hopper; or several.")] = "auto",
    budget: Annotated[float | None, typer.Option(help="Seconds of timing per figure. Default: 0.4.", min=0.0)] = None,
    quick: QuickOption = False,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    results: ResultsOption = RESULTS,
) -> None:
    """Attention forward and backward, the layer and a decode step, each held to float64 before it is timed."""
    heads = HeadShape.parse(shape)
    check_int("batch", batch, 1)
    backends = tuple(dict.fromkeys(_names(backend)))
    where = options.parse_device(device)
    torch_dtype = options.parse_dtype(dtype, where)
    if baselines is None:
        baselines = ",".join(GPU_BASELINES if where.type == "cuda" else BASELINES)
    plan = KernelPlan(
        Setting(heads, batch, torch_dtype, where, seed),
        _lengths(lengths, where, quick),
        {text: Method.parse(text) for text in method or METHODS},
        check_names("baselines", [] if baselines == "none" else _names(baselines), BASELINES),
        tuple(OPS) if ops is None else check_names("ops", _names(ops), OPS),
        backends,
        _batches(decode_batches, where),
        (0.1 if quick else 0.4) if budget is None else budget,
    )
    for name in backends:
        resolve_backend(name, Problem(where, torch_dtype, (heads.width, heads.value_width)))
    what = f"{heads.label}-b{batch}-{str(torch_dtype).removeprefix('torch.')}"
    path = result_path(results, "kernel", what, where)
    with options.progress() as bar:
        task = bar.add_task("measuring ceilings, checking", total=sum(1 for _ in plan.tasks()))

        def on_row(row: Mapping[str, Any]) -> None:
            bar.update(task, advance=1, description=f"{row['op']}, {row['length']:,} tokens")

        content = bench_kernel(plan, on_row=on_row)
    _finish(path, content, where, seed)


@app.command("model", cls=options.Command, short_help="First token, time per token, cache and peak memory.")
def model_command(
    shape: Annotated[
        str | None, typer.Option(help="Random weights, in the shape of such a model. Default: llama-3.1-8b.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub name of a causal LM instead.")] = None,
    layers: Annotated[int | None, typer.Option(help="Use only so many layers of the shape.")] = None,
    lengths: LengthsOption = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help=f"{options.CHOICES_HELP} Default: what the model was saved with, or {MODEL_METHOD}."),
    ] = None,
    runners: Annotated[
        str | None, typer.Option(help="Such as dense,condensed_graph. Default: all that are not compiled.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Further tokens that are timed. Default: 32.")] = None,
    repeats: Annotated[int, typer.Option(help="Readings of each prompt that are timed.")] = 5,
    prefill_chunk: Annotated[int | None, typer.Option(help="Read prompts in pieces of so many tokens.")] = None,
    compile_feed_forward: Annotated[
        bool, typer.Option("--compile-feed-forward", help="torch.compile the mlp of every layer, for all runners.")
    ] = False,
    dtype: options.Dtype = None,
    device: options.Device = None,
    quick: QuickOption = False,
    seed: Annotated[int, typer.Option(help="Of weights and prompts.")] = 0,
    results: ResultsOption = RESULTS,
) -> None:
    """Time to first token, time per token, peak memory and cache bytes, on prompts of random tokens."""
    if shape is not None and model is not None:
        raise ValueError("shape and model exclude each other, got both")
    if layers is not None and model is not None:
        raise ValueError("layers belongs to a shape of random weights, got it with model")
    for name, value in (("layers", layers), ("steps", steps), ("repeats", repeats), ("prefill_chunk", prefill_chunk)):
        if value is not None:
            check_int(name, value, 1)
    chosen = check_shape(shape or next(iter(MODEL_SHAPES)))
    chosen_runners = DEFAULT_RUNNERS if runners is None else check_names("runners", _names(runners), RUNNERS)
    where = options.parse_device(device)
    torch_dtype = options.parse_dtype(dtype, where)
    prompts = _lengths(lengths, where, quick)
    methods = {text: choice_from_text(text) for text in method or (MODEL_METHOD,)}
    saved = None if model is None else models.saved_choice(models.read_skeleton(model))
    plan = ModelPlan(
        prompts,
        methods if saved is None or method else {described(saved): saved},
        chosen_runners,
        steps or (8 if quick else 32),
        repeats,
        prefill_chunk,
        compile_feed_forward,
        seed,
    )
    name = chosen if model is None else Path(model).name
    what = "-".join(
        [
            "".join(x if x.isalnum() or x in "._" else "-" for x in name),
            *([] if layers is None else [f"{layers}layers"]),
            *([] if prefill_chunk is None else [f"chunk{prefill_chunk}"]),
            *(["compiled-mlp"] if compile_feed_forward else []),
            str(torch_dtype).removeprefix("torch."),
        ]
    )
    path = result_path(results, "model", what, where)
    with options.progress() as bar:
        task = bar.add_task("making the model, checking", total=len(plan.lengths) * len(plan.cases()))
        if model is None:
            loaded = random_model(chosen, num_layers=layers, dtype=torch_dtype, device=where, seed=seed)
        else:
            loaded = ready(_load(model, torch_dtype).to(where))

        def on_row(row: Mapping[str, Any]) -> None:
            bar.update(task, advance=1, description=f"{row['runner']}, {row['length']:,} tokens")

        content = {"kind": "model", "model": name, **bench_model(loaded, plan, on_row=on_row)}
    _finish(path, content, where, seed)


def _finish(path: Path, content: dict[str, Any], device: torch.device, seed: int) -> None:
    """Print, write, and fail if a condensed row did."""
    content["software"] = _software()
    console = options.plain_console()
    if not console.is_terminal:
        console.width = LOG_WIDTH
    print_results(console, content)
    console.print(f"results: {write_results(path, content, seed=seed, device=device)}", soft_wrap=True)
    failed = [row for row in content["rows"] if row["condensed"] and row.get("error")]
    if failed:
        console.print(f"{len(failed)} condensed rows failed", style="bold red")
        raise typer.Exit(FAILED)


def _software() -> dict[str, str | None]:
    """Versions beside those that every result file carries."""
    try:
        triton: str | None = version("triton")
    except PackageNotFoundError:
        triton = None
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {"triton": triton, "cuda": torch.version.cuda, "cudnn": None if cudnn is None else str(cudnn)}


def _load(model: str, dtype: torch.dtype) -> PreTrainedModel:
    return restore(models.read_saved(model, lambda name: AutoModelForCausalLM.from_pretrained(name, dtype=dtype)))


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _lengths(text: str | None, device: torch.device, quick: bool) -> tuple[int, ...]:
    if text is None:
        return CPU_LENGTHS if device.type == "cpu" else QUICK_LENGTHS if quick else LENGTHS
    return tuple(sorted({options.parse_tokens("lengths", part) for part in _names(text)}))


def _batches(text: str | None, device: torch.device) -> tuple[int, ...]:
    if text is None:
        return DECODE_BATCHES if device.type == "cuda" else ()
    numbers = [] if text == "none" else [int(part) if part.isdecimal() else 0 for part in _names(text)]
    if 0 in numbers:
        raise ValueError(f"decode_batches must be numbers of rows >= 1, such as 4,8,32, or none; got {text!r}")
    return tuple(sorted(set(numbers)))


def main() -> None:
    """Run the command line; errors as of `condense`."""
    run_command(command=app)
