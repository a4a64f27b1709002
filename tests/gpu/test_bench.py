"""On a CUDA device (collected only there): every row of the kernel benchmark, and a small model."""

import pytest
import torch
from speed.baselines import GPU_BASELINES
from speed.kernel import KernelPlan, bench_kernel
from speed.model import ModelPlan, bench_model
from speed.model_shapes import random_model
from speed.problems import HeadShape, Setting

import condense

METHODS = {
    "cca": condense.CCA(group_size=16, window=256), "lca": condense.LCA(group_size=16, window=256, rep_bias="log_size"),
    "dga": condense.DGA(), "dga_prompt": condense.DGA(min_focal=256, selection="prompt"),
}  # fmt: skip
SETTING = Setting(HeadShape(8, 2, 128, 128), 1, torch.bfloat16, torch.device("cuda"), 0)
RECALL = {"recall": condense.Recall(group_size=16, window=256, num_recall=16)}


@pytest.mark.parametrize(("name", "baselines"), [("cca", GPU_BASELINES), *((x, ("cudnn",)) for x in [*METHODS][1:])])
def test_kernel_rows_are_right_and_every_baseline_runs(name, baselines):
    methods = {name: METHODS[name]}
    plan = KernelPlan(SETTING, (1024, 4096), methods, baselines, backends=("triton", "torch"), budget_s=0.02)
    content = bench_kernel(plan)
    assert [row for row in content["rows"] if "error" in row] == []
    assert content["claims"] is True
    assert all(0 < row["share_of_copy"] < 1.5 for row in content["rows"] if row["op"] == "decode")


def test_recalls_rows_are_right():
    content = bench_kernel(KernelPlan(SETTING, (1024, 4096), RECALL, ("cudnn",), batches=(4,), budget_s=0.02))
    rows = [row for row in content["rows"] if row["condensed"]]
    assert {row["op"] for row in rows} == {"forward", "backward", "layer", "decode", "decode_b4"}
    assert [row for row in rows if "error" in row] == []


def test_model_rows_are_right():
    model = random_model("llama-3.1-8b", num_layers=2, dtype=torch.bfloat16, device=torch.device("cuda"))
    rows = bench_model(model, ModelPlan((2048,), METHODS | RECALL, ("dense", "condensed"), steps=4))["rows"]
    assert [row for row in rows if "error" in row] == []
    dense, *condensed = rows
    assert all(row["cache_bytes"] < dense["cache_bytes"] / 2 for row in condensed if "recall" not in row["runner"])
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert all(row["peak_bytes"] > weights for row in rows)
