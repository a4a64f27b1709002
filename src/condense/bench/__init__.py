"""Benchmarks of speed and memory beside named baselines; results are checked before they are timed."""

from condense.bench.baselines import BASELINES, GPU_BASELINES
from condense.bench.kernel import KernelPlan, bench_kernel
from condense.bench.model import ModelPlan, bench_model
from condense.bench.model_shapes import random_model, ready
from condense.bench.problems import HeadShape, Setting
from condense.bench.rows import OPS, check_names, crossover, milliseconds, op_title, result_path
from condense.bench.runners import DEFAULT_RUNNERS, RUNNERS

__all__ = [
    "BASELINES",
    "DEFAULT_RUNNERS",
    "GPU_BASELINES",
    "OPS",
    "RUNNERS",
    "HeadShape",
    "KernelPlan",
    "ModelPlan",
    "Setting",
    "bench_kernel",
    "bench_model",
    "check_names",
    "crossover",
    "milliseconds",
    "op_title",
    "random_model",
    "ready",
    "result_path",
]
