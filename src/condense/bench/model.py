"""`condense bench model`: time to first token, time per token, peak memory and cache bytes, per prompt length."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from condense.bench.budget import Verdict
from condense.bench.feed_forward import experts_implementation, feed_forward_modules, first_ms, step_ms
from condense.bench.model_gate import ModelGate, random_tokens
from condense.bench.rows import Row, crossovers, first_line, speedups
from condense.bench.runners import DEFAULT_RUNNERS, RUNNERS, Reading
from condense.bench.timing import Times
from condense.models import MethodChoice, use
from condense.results import plain

# prompts that take longer than the first number of seconds are read twice, longer than the second once
_LONG_S, _VERY_LONG_S = 3.0, 20.0
# what is timed of a row
FIGURES = ("first", "step")


class Case(NamedTuple):
    """Name of the row, runner, and method; None: stock attention."""

    name: str
    runner: str
    method: MethodChoice | None

    def on(self, model: PreTrainedModel) -> contextlib.AbstractContextManager[Any]:
        """The model with this method, as long as the context lasts."""
        return contextlib.nullcontext() if self.method is None else use(model, self.method)


@dataclass(frozen=True)
class ModelPlan:
    """Settings of a model benchmark. ``methods``: label to method, or to a choice of methods by layer; ``steps``:
    tokens after the first, timed one by one.

    compile_feed_forward: `torch.compile` these modules first, for all runners.
    """

    lengths: Sequence[int]
    methods: Mapping[str, MethodChoice]
    runners: Sequence[str] = DEFAULT_RUNNERS
    steps: int = 32
    prefill_chunk: int | None = None
    compile_feed_forward: bool = False
    seed: int = 0

    def cases(self) -> list[Case]:
        """What runs at every length."""
        cases = []
        for runner in self.runners:
            if runner.startswith("dense"):
                cases.append(Case(runner, runner, None))
            else:
                cases += [Case(f"{runner} {label}", runner, method) for label, method in self.methods.items()]
        return cases


@torch.no_grad()
def bench_model(
    model: PreTrainedModel, plan: ModelPlan, *, on_row: Callable[[Row], None] = lambda row: None
) -> dict[str, Any]:
    """All rows, as a result file holds them. ``model`` has stock attention and keeps it; compiled modules stay so.

    A condensed runner whose logits are wrong by `condense.bench.model_gate`, or that cannot run, is not timed and its
    row has the error; so has that of a dense runner that cannot run.
    """
    if plan.compile_feed_forward:
        for module in feed_forward_modules(model):
            module.compile(dynamic=True)
    verdicts = {case.name: _verdict(model, case, plan) for case in plan.cases()}
    rows, feed_forward = [], []
    for length in plan.lengths:
        ids = random_tokens(model, length, plan.seed)
        for case in plan.cases():
            row = _row(model, ids, case, verdicts[case.name], plan)
            on_row(row)
            rows.append(row)
        if feed_forward_modules(model):
            feed_forward.append(_feed_forward(model, length, plan.prefill_chunk))
    rows = _with_ratios(rows)
    dense = [row["runner"] for row in rows if not row["condensed"]]
    config = model.config.get_text_config(decoder=True)
    return {
        "kind": "model",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weight_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "layers": config.num_hidden_layers,
        "dtype": str(model.dtype).removeprefix("torch."),
        "experts": experts_implementation(model),
        "claims": model.device.type == "cuda",
        "steps": plan.steps,
        "prefill_chunk": plan.prefill_chunk,
        "compile_feed_forward": plan.compile_feed_forward,
        "runners": {name: RUNNERS[name].description for name in plan.runners},
        "methods": plain(plan.methods),
        "rows": rows,
        "feed_forward": feed_forward,
        "crossover": {time: crossovers(rows, dense, time=time) for time in FIGURES},
    }


def _verdict(model: PreTrainedModel, case: Case, plan: ModelPlan) -> Verdict | str | None:
    """The gate's verdict, or the error in one line; None where there is nothing to check."""
    compile, condensed = RUNNERS[case.runner].compile, case.method is not None
    if compile is None and not condensed:
        return None
    try:
        # the stock model reads a text that is long enough for the first method
        gate = ModelGate(model, next(iter(plan.methods.values())) if case.method is None else case.method, plan.seed)
        return gate.check(compile, condensed=condensed)
    except Exception as error:
        return first_line(error)
    finally:
        _release(model.device)


def _row(
    model: PreTrainedModel, ids: Tensor, case: Case, verdict: Verdict | str | None, plan: ModelPlan
) -> dict[str, Any]:
    """One row in JSON's types. An exception becomes the row's ``error``."""
    row: dict[str, Any] = {"runner": case.name, "condensed": case.method is not None, "method": case.method}
    row["length"] = ids.shape[1]
    if isinstance(verdict, str):
        return plain(row | {"error": verdict})
    if verdict is not None:
        row["gate"] = verdict
        if not verdict.passed:
            return plain(row | {"error": f"wrong: logits {verdict.share:.3g} times the bound apart, not timed"})
    is_cuda = ids.device.type == "cuda"
    try:
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(ids.device)
        with case.on(model):
            readings = _readings(model, ids, case.runner, plan)
        last = readings[-1]
        row |= {
            "first": Times.of([reading.first_s for reading in readings]),
            "step": Times.of([step for reading in readings for step in reading.steps_s]),
            "cache_bytes": last.cache_bytes,
            "host_bytes": last.host_bytes,
            "setup_s": last.setup_s,
        }
    except Exception as error:
        row["error"] = first_line(error)
    if is_cuda:
        row["peak_bytes"] = torch.cuda.max_memory_allocated(ids.device)
    _release(ids.device)
    return plain(row)


def _feed_forward(model: PreTrainedModel, length: int, chunk: int | None) -> dict[str, Any]:
    """Milliseconds of the feed-forward modules alone, of a prompt and of a step."""
    figures: dict[str, Any] = {"length": length}
    try:
        figures |= {"first_ms": first_ms(model, length, chunk), "step_ms": step_ms(model)}
    except Exception as error:
        figures["error"] = first_line(error)
    _release(model.device)
    return figures


def _readings(model: PreTrainedModel, ids: Tensor, runner: str, plan: ModelPlan) -> list[Reading]:
    """The timed readings of a prompt. The first one (compiling, allocating) counts only if it took very long."""
    read = RUNNERS[runner].read
    first = read(model, ids, plan.steps, plan.prefill_chunk)
    if first.first_s > _VERY_LONG_S:
        return [first]
    runs = 1 if first.first_s > _LONG_S else 3
    return [read(model, ids, plan.steps, plan.prefill_chunk) for _ in range(runs)]


def _with_ratios(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows, each condensed one with ``speedup`` per figure and dense runner."""
    result = []
    for row in rows:
        dense = [other for other in rows if not other["condensed"] and other["length"] == row["length"]]
        ratios = {"speedup": {time: speedups(row, dense, time) for time in FIGURES}} if row["condensed"] else {}
        result.append({**row, **ratios})
    return result


def _release(device: torch.device) -> None:
    """Free memory that an exception or a graph kept alive."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
