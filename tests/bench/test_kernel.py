"""A whole kernel run on the CPU, and what happens to what is wrong or cannot run."""

import pytest
import torch

import condense
from condense.bench import HeadShape, KernelPlan, Setting, bench_kernel, gate, tasks
from condense.caches import StaticCondensedLayer

SETTING = Setting(HeadShape(4, 2, 16, 16), 1, torch.float32, torch.device("cpu"), 0)
METHODS = {"cca": condense.CCA(group_size=4, window=16), "window": condense.StreamingLLM(sink=2, window=16)}


def run(**changes):
    options = {"lengths": (64, 96), "methods": METHODS, "baselines": ("cudnn", "flex_mask", "sdpa"), "budget_s": 0.0}
    plan = KernelPlan(SETTING, **(options | changes))
    return plan, bench_kernel(plan)


@pytest.fixture(scope="module")
def results():
    return run()


def test_every_row_is_timed_and_compared(results):
    plan, content = results
    rows = content["rows"]
    assert len(rows) == plan.num_rows()
    for row in rows:
        if row["condensed"]:
            assert row["gate"]["passed"] is True
            assert 0 < row["times"]["p20_ms"] <= row["times"]["median_ms"] <= row["times"]["p80_ms"]
            assert row["op"] == "pooling" or row["speedup"].keys() == {"sdpa"}
            rate, share = (
                ("tbs", "share_of_copy") if row["op"] in ("pooling", "decode") else ("tflops", "share_of_matmul")
            )
            assert row[rate] > 0
            assert row[share] > 0
    # a method that keeps tokens has nothing to pool
    assert {row["runner"] for row in rows if row["op"] == "pooling"} == {"cca"}
    assert content["claims"] is False
    assert set(content["crossover"]) == {"forward", "backward", "layer", "decode"}


def test_methods_that_read_prompts_at_once_are_refused():
    with pytest.raises(ValueError, match=r"methods: mine reads prompts at once.*use selection='streaming' here"):
        run(methods={"mine": condense.DGA(selection="prompt")})


def test_what_needs_a_gpu_says_so(results):
    skipped = [row for row in results[1]["rows"] if row["runner"] in ("cudnn", "flex_mask")]
    assert skipped
    assert all(row["error"] == "skipped: needs a CUDA device" and "times" not in row for row in skipped)


@pytest.mark.parametrize("op", ["forward", "backward", "decode"])
def test_wrong_attention_is_not_timed(op, monkeypatch):
    def wrong(sources, q, **options):
        out, lse = condense.functional.attend_to(sources, q, **options)
        return out * 1.01, lse

    step = StaticCondensedLayer.step
    monkeypatch.setattr(tasks, "attend_to", wrong)
    monkeypatch.setattr(StaticCondensedLayer, "step", lambda *args, **options: step(*args, **options) * 1.01)
    _, content = run(ops=(op,), lengths=(64,), baselines=())
    for row in content["rows"]:
        assert row["error"].startswith("wrong: ")
        assert "times" not in row


def test_wrong_pooling_is_not_timed(monkeypatch):
    def wrong(*arguments, **options):
        sources = gate.pooled(*arguments, **options)
        return sources._replace(prefix_v=sources.prefix_v.roll(1, 2))

    monkeypatch.setattr(tasks, "pooled", wrong)
    _, content = run(ops=("pooling",), lengths=(64,), baselines=())
    (row,) = content["rows"]
    assert row["error"].startswith("wrong: ")


def test_an_end_that_is_wrong_fails_a_long_problem_only(monkeypatch):
    def wrong(sources, q, **options):
        out, lse = condense.functional.attend_to(sources, q, **options)
        if out.shape[2] > 64:
            out[:, :, -1] = 0
        return out, lse

    monkeypatch.setattr(tasks, "attend_to", wrong)
    _, content = run(ops=("forward",), baselines=(), methods={"cca": METHODS["cca"]})
    assert ["error" in row for row in content["rows"]] == [False, True]


def test_an_error_stands_in_its_rows(monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("out of luck\nsecond line")

    monkeypatch.setattr(tasks, "attention", broken)
    _, content = run(ops=("forward", "layer"), lengths=(64,), baselines=())
    assert [row.get("error") for row in content["rows"]] == [
        None,
        None,
        *["RuntimeError: on a short problem: RuntimeError: out of luck"] * 2,
    ]
