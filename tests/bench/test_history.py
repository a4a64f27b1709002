"""Result files: names, the last one of the same kind, and pages made of them."""

import json

import pytest
import torch

import condense
from condense.bench import HeadShape, KernelPlan, Setting, bench_kernel, render
from condense.bench.history import last_result, read_result, result_path
from condense.results import write_results

CPU = torch.device("cpu")


def write(folder, name, kind="kernel"):
    return write_results(folder / name, {"kind": kind, "rows": []})


def test_the_last_result_is_of_the_same_kind_shape_and_device(tmp_path):
    path = result_path(tmp_path, "kernel", "h4-kv2", CPU)
    stem = path.stem.rpartition("-")[0]
    assert last_result(tmp_path, "kernel", "h4-kv2", CPU) is None
    write(tmp_path, f"{stem}-20250101T000000Z.json")
    newest = write(tmp_path, f"{stem}-20250301T000000Z.json")
    write(tmp_path, f"{stem}-b2-20250401T000000Z.json")
    write(tmp_path, f"{stem.replace('kernel', 'model')}-20250401T000000Z.json")
    found, document = last_result(tmp_path, "kernel", "h4-kv2", CPU)
    assert found == newest
    assert document["results"]["rows"] == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": {"kind": "else"}, "provenance": {}}', "\xff"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="no result file of condense bench"):
        read_result(path)


def test_a_page_has_every_figure(tmp_path):
    setting = Setting(HeadShape(4, 2, 16, 16), 1, torch.float32, CPU, 0)
    plan = KernelPlan(setting, (64, 96), {"cca": condense.CCA(group_size=4, window=16)}, ("sdpa", "flex"), budget_s=0.0)
    content = bench_kernel(plan)
    path = write_results(tmp_path / "kernel.json", content, device=CPU)
    page = render({path: read_result(path)}, {path: "kernel.png"})
    assert "no claims" in page
    assert "![times over length](kernel.png)" in page
    assert "| | 64 | 96 |" in page
    assert page.count("| **cca** |") == 5
    assert "skipped: needs a CUDA device" in page
    for row in content["rows"]:
        for name, ratio in row.get("speedup", {}).items():
            assert f"{ratio:.2f}x {name}" in page
    assert json.loads(path.read_text())["results"]["rows"] == content["rows"]
