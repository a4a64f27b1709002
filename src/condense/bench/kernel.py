"""`condense bench kernel`: attention, pooling, the layer and decode against named baselines on the same shapes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from condense.bench import steps, tasks
from condense.bench.baselines import BASELINES, DENSE_BASELINES, obstacle
from condense.bench.gate import WHOLE
from condense.bench.problems import Setting
from condense.bench.rows import (
    OPS,
    Row,
    condensed_runners,
    crossover,
    decode_op,
    first_line,
    medians,
    reference_op,
    with_ratios,
)
from condense.bench.tasks import Task, Work, has_op
from condense.bench.timing import Ceilings, Clock
from condense.methods import Method, Recall
from condense.ops import UniformRule, resolve_backend
from condense.results import plain
from condense.testing.budget import Verdict


@dataclass(frozen=True)
class KernelPlan:
    """Settings of a kernel benchmark. ``methods``: label to method; ``budget_s``: seconds of timing per row.

    backends: of condensed attention; with several, every method has rows of each, named after it. batches: further
    batch sizes of the decode step, each an operation of its own.
    Raises ValueError if there would be no row.
    """

    setting: Setting
    lengths: Sequence[int]
    methods: Mapping[str, Method]
    baselines: Sequence[str] = ()
    ops: Sequence[str] = OPS
    backends: Sequence[str] = ("auto",)
    batches: Sequence[int] = ()
    budget_s: float = 0.4

    def __post_init__(self) -> None:
        for label, method in self.methods.items():
            if isinstance(method, Recall):
                raise ValueError(f"methods: {label} chooses per query what it reads: no row times that, leave it out")
        if self.num_rows() == 0:
            raise ValueError(f"ops: none of {', '.join(self.ops)} is there to time of {', '.join(self.methods)}")

    def num_rows(self) -> int:
        """How many rows there will be."""
        ops = [op for op in self.ops for _ in (self.steps() if op == "decode" else (op,))]
        condensed = sum(len(list(self.condensed(op, length))) for op in ops for length in self.lengths)
        masks = len(_with_own_mask(self.methods))
        per_baseline = sum(
            (masks if name == "flex_mask" else 1) * (op in BASELINES[name].ops) for name in self.baselines for op in ops
        )
        return condensed + len(self.lengths) * per_baseline

    def steps(self) -> dict[str, Setting]:
        """Operations of the decode step, one per batch size, each with its setting."""
        others = [batch for batch in self.batches if batch != self.setting.batch]
        return {"decode": self.setting} | {decode_op(n): replace(self.setting, batch=n) for n in others}

    def condensed(self, op: str, length: int) -> Iterator[tuple[str, Method, str]]:
        """Name, method and backend of the condensed rows; a decode step chooses its backend itself."""
        for label, method in self.methods.items():
            if has_op(op, method, length):
                if op == "decode" or len(self.backends) == 1:
                    yield label, method, self.backends[0]
                else:
                    yield from ((f"{label} ({backend})", method, backend) for backend in self.backends)


@torch.no_grad()
def bench_kernel(plan: KernelPlan, *, on_row: Callable[[Row], None] = lambda row: None) -> dict[str, Any]:
    """All rows with the ceilings of this run, as a result file holds them.

    A condensed row that is wrong by the budget of `condense.bench.gate`, or cannot run, is not timed and says why;
    so does a baseline that cannot run.
    """
    setting = plan.setting
    clock = Clock(setting.device, plan.budget_s)
    ceilings = clock.ceilings(setting.dtype)
    short = _short_verdicts(plan)
    rows = []
    for task in _tasks(plan):
        row = _row(task, clock, ceilings, short)
        on_row(row)
        rows.append(row)
    rows = with_ratios(rows)
    widths = (setting.shape.width, setting.shape.value_width)
    return {
        "kind": "kernel",
        "shape": plain(setting.shape),
        "batch": setting.batch,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "backends": [
            resolve_backend(
                name,
                setting.device,
                setting.dtype,
                widths,
                num_queries=max(plan.lengths),
                heads=(setting.batch, setting.shape.num_q, setting.shape.num_kv),
            )
            for name in plan.backends
        ],
        "claims": clock.is_cuda,
        "ceilings": plain(ceilings),
        "baselines": {name: BASELINES[name].about for name in plan.baselines},
        "methods": plain(plan.methods),
        "rows": rows,
        "crossover": crossovers(rows),
    }


def crossovers(rows: Sequence[Row]) -> dict[str, dict[str, float | None]]:
    """Per operation and method the length from which it is faster than the fastest dense baseline."""
    return {
        op: {
            runner: crossover(medians(rows, [runner], op=op), dense)
            for runner in condensed_runners(rows)
            if medians(rows, [runner], op=op).keys() & dense.keys()
        }
        for op in dict.fromkeys(row["op"] for row in rows)
        if (reference := reference_op(op)) and (dense := medians(rows, DENSE_BASELINES, op=reference))
    }


def _tasks(plan: KernelPlan) -> Iterator[Task]:
    whole = [op for op in plan.ops if op != "decode"]
    for length in plan.lengths:
        if whole:
            yield from _whole_sequences(plan, length, whole)
        for op, own in plan.steps().items() if "decode" in plan.ops else ():
            for name in plan.baselines:
                if "decode" in BASELINES[name].ops:
                    yield replace(steps.baseline_step_task(own, length, name), op=op)
            for label, method, _ in plan.condensed("decode", length):
                yield replace(steps.step_task(own, length, label, method), op=op)


def _whole_sequences(plan: KernelPlan, length: int, ops: Sequence[str]) -> Iterator[Task]:
    setting = plan.setting
    inputs = setting.inputs(length)
    for op in ops:
        for name in plan.baselines:
            if op in BASELINES[name].ops and name in DENSE_BASELINES:
                yield tasks.baseline_task(setting, inputs, op, name)
        if "flex_mask" in plan.baselines and op in BASELINES["flex_mask"].ops:
            for method in _with_own_mask(plan.methods):
                yield tasks.flex_mask_task(setting, inputs, op, method)
        for label, method, backend in plan.condensed(op, length):
            yield tasks.method_task(setting, inputs, op, label, method, backend)


def _with_own_mask(methods: Mapping[str, Method]) -> list[Method]:
    """One method per `UniformRule`, as methods with the same rule have the same mask.

    Without methods that choose tokens by a prompt's content: their masks differ between heads.
    """
    first: dict[UniformRule, Method] = {}
    for method in methods.values():
        if method.prompt is None:
            first.setdefault(method.layout.rule, method)
    return list(first.values())


def _short_verdicts(plan: KernelPlan) -> dict[tuple[str, str], Verdict | str]:
    """Every query of a short problem, for each condensed operation: a verdict, or the error in one line."""
    length = min(WHOLE, *plan.lengths)
    inputs = plan.setting.inputs(length)
    verdicts: dict[tuple[str, str], Verdict | str] = {}
    for op in plan.ops:
        if op == "decode":
            continue
        for label, method, backend in plan.condensed(op, length):
            try:
                work = tasks.method_task(plan.setting, inputs, op, label, method, backend).prepare()
                assert work.check is not None
                verdicts[op, label] = work.check()
            except Exception as error:
                verdicts[op, label] = first_line(error)
    return verdicts


def _row(
    task: Task, clock: Clock, ceilings: Ceilings, short: Mapping[tuple[str, str], Verdict | str]
) -> dict[str, Any]:
    """One row in JSON's types. An exception becomes the row's ``error``."""
    row: dict[str, Any] = {
        "op": task.op,
        "runner": task.runner,
        "condensed": task.condensed,
        "method": task.method,
        "mask": None if task.method is None else _mask(task.method),
        "backend": task.backend,
        "length": task.length,
    }
    reason = None if task.condensed else obstacle(task.runner, clock.device)
    if reason is not None:
        return plain(row | {"error": reason})
    try:
        with _quiet(task):
            work = task.prepare()
            verdict = _verdict(task, work, short)
            if verdict is not None:
                row["gate"] = verdict
            if verdict is not None and not verdict.passed:
                row["error"] = f"wrong: error {verdict.share:.3g} times the budget, not timed"
            else:
                row |= _measured(work, clock, ceilings)
    except Exception as error:
        row["error"] = first_line(error)
    if clock.is_cuda:
        torch.cuda.empty_cache()
    return plain(row)


def _mask(method: Method) -> str:
    """A name of the method's mask: the same for methods whose queries see the same columns."""
    return str(method) if method.prompt is not None else str(method.layout.rule)


def _verdict(task: Task, work: Work, short: Mapping[tuple[str, str], Verdict | str]) -> Verdict | None:
    """The worse of the short problem's verdict and this one's."""
    before = short.get((task.op, task.runner)) if task.condensed else None
    if isinstance(before, str):
        raise RuntimeError(f"on a short problem: {before}")
    if work.check is None or (before is not None and not before.passed):
        return before
    verdict = work.check()
    return verdict if before is None or not verdict.passed else Verdict(max(before.share, verdict.share))


def _measured(work: Work, clock: Clock, ceilings: Ceilings) -> dict[str, Any]:
    times = clock.time(work.calls[0]) if len(work.calls) == 1 else clock.time_rotating(work.calls)
    row: dict[str, Any] = {"times": times, "peak_bytes": clock.peak_bytes(work.calls[0])}
    if work.pairs is not None:
        row["pairs"] = work.pairs
    if work.flops is not None:
        row["tflops"] = work.flops / times.median_ms / 1e9
        row["share_of_matmul"] = row["tflops"] / ceilings.matmul_tflops
    if work.nbytes is not None:
        row["tbs"] = work.nbytes / times.median_ms / 1e9
        row["share_of_copy"] = row["tbs"] / ceilings.copy_tbs
    return row


@contextlib.contextmanager
def _quiet(task: Task) -> Iterator[None]:
    """Suppress PyTorch's warnings on why a baseline has no kernel; the row has the error."""
    with warnings.catch_warnings():
        if not task.condensed:
            warnings.simplefilter("ignore")
        yield
