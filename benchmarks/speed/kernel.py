"""`python benchmarks/speed kernel`: attention, the layer and decode against named baselines on the same shapes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from condense import ops
from condense.methods import Method, Recall
from condense.results import plain
from speed import gate
from speed.baselines import BASELINES, DENSE_BASELINES
from speed.budget import Verdict
from speed.problems import Setting, sees_by_position
from speed.rows import OPS, Row, first_line, op_kind, speedups
from speed.tasks import Task, Work, has_op
from speed.timing import Ceilings, Clock


@dataclass(frozen=True)
class KernelPlan:
    """Settings of a kernel benchmark. ``methods``: label to method; ``budget_s``: seconds of timing per row.

    backends: of condensed attention; with several, every method has rows of each, named after it. batches: further
    batch sizes of the decode step, each an operation of its own, such as ``decode_b8``.
    Raises ValueError if there would be no row, and for a method whose attention no gate knows.
    """

    setting: Setting
    lengths: Sequence[int]
    methods: Mapping[str, Method]
    baselines: Sequence[str] = ()
    ops: Sequence[str] = tuple(OPS)
    backends: Sequence[str] = ("auto",)
    batches: Sequence[int] = ()
    budget_s: float = 0.4

    def __post_init__(self) -> None:
        for label, method in self.methods.items():
            if type(method).attend not in (Method.attend, Recall.attend):
                raise ValueError(
                    f"method: {label} attends in a way of its own, which this benchmark cannot check: "
                    "use `python benchmarks/speed model`"
                )
        if not any(self.tasks()):
            raise ValueError(f"ops: none of {', '.join(self.ops)} is there to time of {', '.join(self.methods)}")

    def tasks(self) -> Iterator[Task]:
        """All rows, length by length."""
        batches = dict.fromkeys(self.ops, self.setting.batch)
        if "decode" in self.ops:
            batches |= {f"decode_b{batch}": batch for batch in self.batches if batch != self.setting.batch}
        for length in self.lengths:
            for op, batch in batches.items():
                setting = replace(self.setting, batch=batch)
                for runner, method in self._baselines(op):
                    yield Task(op, runner, setting, length, method)
                # a decode step chooses its backend itself
                backends = (None,) if op_kind(op) == "decode" else self.backends
                for label, method in self.methods.items():
                    for backend in backends if has_op(op, method) else ():
                        name = label if len(backends) == 1 else f"{label} ({backend})"
                        yield Task(op, name, setting, length, method, condensed=True, backend=backend)

    def _baselines(self, op: str) -> Iterator[tuple[str, Method | None]]:
        """The dense ones, then FlexAttention with our mask, once per mask."""
        known = [name for name in self.baselines if op_kind(op) in BASELINES[name].ops]
        yield from ((name, None) for name in known if name in DENSE_BASELINES)
        masks = {_mask(method): method for method in self.methods.values() if sees_by_position(method)}
        yield from (("flex_mask", method) for method in masks.values() if "flex_mask" in known)


@torch.no_grad()
def bench_kernel(plan: KernelPlan, *, on_row: Callable[[Row], None] = lambda row: None) -> dict[str, Any]:
    """All rows with the ceilings of this run, as a result file holds them.

    A condensed row that is wrong by the budget of `speed.gate`, or cannot run, is not timed and says why;
    so does a baseline that cannot run.
    """
    setting, heads, clock = plan.setting, plan.setting.shape, Clock(plan.setting.device, plan.budget_s)
    ceilings = clock.ceilings(setting.dtype)
    short: dict[tuple[str, str], Verdict] = {}
    rows: list[dict[str, Any]] = []
    for task in plan.tasks():
        rows.append(_row(task, clock, ceilings, short))
        on_row(rows[-1])
    for row in rows:
        if row["condensed"]:
            row["speedup"] = speedups(row, rows, "times")
    call = ops.Problem(
        setting.device, setting.dtype, (heads.width, heads.value_width), num_queries=max(plan.lengths),
        rows=setting.batch, heads=heads.num_q, kv_heads=heads.num_kv,
    )  # fmt: skip
    return {
        "kind": "kernel",
        "shape": plain(heads),
        "batch": setting.batch,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "backends": [ops.resolve_backend(name, call) for name in plan.backends],
        "claims": clock.is_cuda,
        "ceilings": plain(ceilings),
        "baselines": {name: BASELINES[name].about for name in plan.baselines},
        "methods": plain(plan.methods),
        "rows": rows,
    }


def _row(task: Task, clock: Clock, ceilings: Ceilings, short: dict[tuple[str, str], Verdict]) -> dict[str, Any]:
    """One row in JSON's types. An exception becomes the row's ``error``. short: verdicts of `_verdict`, to reuse."""
    row: dict[str, Any] = {
        "op": task.op,
        "runner": task.runner,
        "condensed": task.condensed,
        "method": task.method,
        "mask": None if task.method is None else _mask(task.method),
        "backend": task.backend,
        "length": task.length,
    }
    if not task.condensed and BASELINES[task.runner].needs_cuda and not clock.is_cuda:
        return plain(row | {"error": "skipped: needs a CUDA device"})
    try:
        with warnings.catch_warnings():
            if not task.condensed:  # PyTorch's, on why a baseline has no kernel: the row has the error
                warnings.simplefilter("ignore")
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
    return str(method.layout.rule if sees_by_position(method) else method)


def _verdict(task: Task, work: Work, short: dict[tuple[str, str], Verdict]) -> Verdict | None:
    """The gate's verdict; of a problem that is too long to check every query, also that of the longest one that is not,
    which comes first and is kept in ``short``.
    """
    if work.check is None or task.length <= gate.WHOLE:
        return work.check and work.check()
    if (task.op, task.runner) not in short:
        check = replace(task, length=gate.WHOLE).prepare().check
        assert check is not None
        short[task.op, task.runner] = check()
    verdict = short[task.op, task.runner]
    return verdict.and_also(work.check()) if verdict.passed else verdict


def _measured(work: Work, clock: Clock, ceilings: Ceilings) -> dict[str, Any]:
    times = clock.time(work.calls[0]) if len(work.calls) == 1 else clock.time_rotating(work.calls)
    row: dict[str, Any] = {"times": times, "pairs": work.pairs}
    if work.flops is not None:
        row["tflops"] = work.flops / times.median_ms / 1e9
        row["share_of_matmul"] = row["tflops"] / ceilings.matmul_tflops
    if work.nbytes is not None:
        row["tbs"] = work.nbytes / times.median_ms / 1e9
        row["share_of_copy"] = row["tbs"] / ceilings.copy_tbs
    return row
