"""`condense bench kernel`: attention, pooling, the layer and decode against named baselines on the same shapes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from condense import ops
from condense.bench.baselines import BASELINES, DENSE_BASELINES, obstacle
from condense.bench.budget import Verdict
from condense.bench.gate import WHOLE
from condense.bench.problems import Setting, sees_by_position
from condense.bench.rows import OPS, Row, crossovers, decode_op, first_line, op_kind, with_ratios
from condense.bench.tasks import Problem, Task, Work, has_op
from condense.bench.timing import Ceilings, Clock
from condense.methods import Method, Recall
from condense.results import plain


@dataclass(frozen=True)
class KernelPlan:
    """Settings of a kernel benchmark. ``methods``: label to method; ``budget_s``: seconds of timing per row.

    backends: of condensed attention; with several, every method has rows of each, named after it. batches: further
    batch sizes of the decode step, each an operation of its own.
    Raises ValueError if there would be no row, and for a method whose attention no gate knows.
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
            if type(method).attend not in (Method.attend, Recall.attend):
                raise ValueError(
                    f"method: {label} attends in a way of its own, which this benchmark cannot check: "
                    "use `condense bench model`"
                )
        if self.num_rows() == 0:
            raise ValueError(f"ops: none of {', '.join(self.ops)} is there to time of {', '.join(self.methods)}")

    def num_rows(self) -> int:
        """How many rows there will be."""
        return sum(1 for _ in self.tasks())

    def tasks(self) -> Iterator[Task]:
        """All rows, length by length."""
        for length in self.lengths:
            problem = Problem(self.setting, length)
            for op in self.ops:
                if op != "decode":
                    yield from self._baselines(op, problem)
                    yield from self.condensed(op, problem)
            if "decode" in self.ops:
                others = [batch for batch in self.batches if batch != self.setting.batch]
                for op, batch in {"decode": self.setting.batch, **{decode_op(n): n for n in others}}.items():
                    own = Problem(replace(self.setting, batch=batch), length)
                    yield from self._baselines(op, own)
                    yield from self.condensed(op, own)

    def condensed(self, op: str, problem: Problem) -> Iterator[Task]:
        """The condensed rows of an operation; a decode step chooses its backend itself."""
        is_step = op_kind(op) == "decode"
        for label, method in self.methods.items():
            for backend in (None,) if is_step else self.backends:
                name = label if is_step or len(self.backends) == 1 else f"{label} ({backend})"
                if has_op(op, method, problem.length):
                    yield Task(op, name, problem, method, condensed=True, backend=backend)

    def _baselines(self, op: str, problem: Problem) -> Iterator[Task]:
        """The dense ones, then FlexAttention with our mask, once per mask."""
        for name in self.baselines:
            if name in DENSE_BASELINES and op_kind(op) in BASELINES[name].ops:
                yield Task(op, name, problem)
        if "flex_mask" in self.baselines and op_kind(op) in BASELINES["flex_mask"].ops:
            methods = [method for method in self.methods.values() if sees_by_position(method)]
            masks = {method.layout.rule: method for method in reversed(methods)}
            for method in masks.values():
                yield Task(op, "flex_mask", problem, method)


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
    for task in plan.tasks():
        row = _row(task, clock, ceilings, short)
        on_row(row)
        rows.append(row)
    rows = with_ratios(rows)
    heads = setting.shape
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
        "crossover": {
            op: found
            for op in dict.fromkeys(row["op"] for row in rows)
            if (found := crossovers(rows, DENSE_BASELINES, op=op))
        },
    }


def _short_verdicts(plan: KernelPlan) -> dict[tuple[str, str], Verdict | str]:
    """Every query of a short problem, for each condensed operation: a verdict, or the error in one line."""
    problem = Problem(plan.setting, min(WHOLE, *plan.lengths))
    verdicts: dict[tuple[str, str], Verdict | str] = {}
    for op in plan.ops:
        for task in plan.condensed(op, problem) if op != "decode" else ():
            try:
                check = task.prepare().check
                assert check is not None
                verdicts[op, task.runner] = check()
            except Exception as error:
                verdicts[op, task.runner] = first_line(error)
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
        "length": task.problem.length,
    }
    reason = None if task.condensed else obstacle(task.runner, clock.device)
    if reason is not None:
        return plain(row | {"error": reason})
    try:
        with warnings.catch_warnings():
            if not task.condensed:  # PyTorch's, on why a baseline has no kernel: the row has the error
                warnings.simplefilter("ignore")
            work = task.prepare()
            verdict = _verdict(work, short.get((task.op, task.runner)) if task.condensed else None)
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


def _verdict(work: Work, short: Verdict | str | None) -> Verdict | None:
    """The worse of the short problem's verdict and this one's."""
    if isinstance(short, str):
        raise RuntimeError(f"on a short problem: {short}")
    if work.check is None or (short is not None and not short.passed):
        return short
    verdict = work.check()
    return verdict if short is None or not verdict.passed else verdict.and_also(short)


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
