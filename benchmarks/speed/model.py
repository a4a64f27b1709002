"""`python benchmarks/speed model`: time to first token, further tokens, peak memory, cache bytes, by prompt length."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from condense.models import MethodChoice, use
from condense.results import plain
from speed.budget import Verdict
from speed.model_gate import ModelGate, random_tokens
from speed.rows import Row, first_line, speedups
from speed.runners import DEFAULT_RUNNERS, RUNNERS
from speed.timing import Quantiles

# the figures that are timed
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

    repeats: how often each prompt is read and timed, after a first time (compiling, allocating) that does not count.
    compile_feed_forward: `torch.compile` these modules first, for all runners.
    """

    lengths: Sequence[int]
    methods: Mapping[str, MethodChoice]
    runners: Sequence[str] = DEFAULT_RUNNERS
    steps: int = 32
    repeats: int = 5
    prefill_chunk: int | None = None
    compile_feed_forward: bool = False
    seed: int = 0

    def cases(self) -> list[Case]:
        """The cases that run at every length."""
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

    A condensed runner whose logits are wrong by `speed.model_gate`, or that cannot run, is not timed and its
    row has the error; so has that of a dense runner that cannot run.
    """
    if plan.compile_feed_forward:
        for module in (getattr(layer, "mlp", None) for layer in model.modules()):
            if isinstance(module, nn.Module):
                module.compile(dynamic=True)
    verdicts = {case.name: _verdict(model, case, plan) for case in plan.cases()}
    rows: list[dict[str, Any]] = []
    for length in plan.lengths:
        ids = random_tokens(model, length, plan.seed)
        for case in plan.cases():
            rows.append(_row(model, ids, case, verdicts[case.name], plan))
            on_row(rows[-1])
    for row in rows:
        if row["condensed"]:
            row["speedup"] = {figure: speedups(row, rows, figure) for figure in FIGURES}
    config = model.config.get_text_config(decoder=True)
    has_experts = any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())
    return {
        "kind": "model",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weight_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "layers": config.num_hidden_layers,
        "dtype": str(model.dtype).removeprefix("torch."),
        "experts": getattr(config, "_experts_implementation", None) if has_experts else None,
        "claims": model.device.type == "cuda",
        "steps": plan.steps,
        "prefill_chunk": plan.prefill_chunk,
        "compile_feed_forward": plan.compile_feed_forward,
        "runners": {name: RUNNERS[name].description for name in plan.runners},
        "methods": plain(plan.methods),
        "rows": rows,
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
            read = RUNNERS[case.runner].read
            _, *readings = (read(model, ids, plan.steps, plan.prefill_chunk) for _ in range(1 + plan.repeats))
        last = readings[-1]
        row |= {
            "first": Quantiles.of([reading.first_s for reading in readings]),
            "step": Quantiles.of([step for reading in readings for step in reading.steps_s]),
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


def _release(device: torch.device) -> None:
    """Free memory that an exception or a graph kept alive."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
