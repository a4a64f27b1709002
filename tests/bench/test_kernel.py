"""A whole kernel run on a CPU, and what happens to what is wrong or cannot run; the gate lets what is right through."""

from functools import partial
from unittest.mock import Mock

import pytest
import torch
from speed import gate, tasks
from speed.budget import judge
from speed.kernel import KernelPlan, bench_kernel
from speed.problems import HeadShape, Setting, pooled
from two_sources import attend_to

import condense
from condense.caches import StaticCondensedLayer
from condense.methods import Context, Method
from condense.ops import Source
from condense.ops.recall import choice

SETTING = Setting(HeadShape(4, 2, 16, 16), 1, torch.float32, torch.device("cpu"), 0)
METHODS = {"cca": condense.CCA(group_size=4, window=16), "window": condense.StreamingLLM(sink=2, window=16)}
ALL = {"forward", "backward", "layer"}
PARTS = {"index": {"layer"}, "store": {"layer"}, "choice": ALL, "mean": ALL}
PROMPT = condense.DGA(group_size=4, window=8, gamma=0.2, min_focal=10, selection="prompt", num_recent=8, num_random=8)
GATED = {
    "cca": condense.CCA(group_size=4, window=20),
    "lca": condense.LCA(group_size=4, window=20),
    "log_size": condense.CCA(group_size=4, window=20, summary="streaming", rep_bias="log_size"),
}


def run(**changes):
    options = {"lengths": (64, 96), "methods": METHODS, "baselines": ("cudnn", "flex_mask", "sdpa"), "budget_s": 0.0}
    plan = KernelPlan(SETTING, **(options | changes))
    return plan, bench_kernel(plan)


def test_every_row_is_timed_and_compared_or_says_that_it_needs_a_gpu():
    plan, content = run()
    rows = content["rows"]
    assert len(rows) == len([*plan.tasks()])
    for row in rows:
        if row["condensed"]:
            assert row["gate"]["passed"] is True
            assert 0 < row["times"]["p20_ms"] <= row["times"]["median_ms"] <= row["times"]["p80_ms"]
            assert row["speedup"].keys() == {"sdpa"}
            rate, share = ("tbs", "share_of_copy") if row["op"] == "decode" else ("tflops", "share_of_matmul")
            assert row[rate] > 0
            assert row[share] > 0
        elif row["runner"] != "sdpa":
            assert row["error"] == "skipped: needs a CUDA device"
            assert "times" not in row
    assert {row["runner"] for row in rows} == {*METHODS, "sdpa", "cudnn", "flex_mask"}
    assert content["claims"] is False


def test_every_method_is_right_in_every_row(monkeypatch):
    monkeypatch.setattr(choice, "OWN_CHOICES", 5)
    methods = {
        "dense": condense.Dense(),
        "lca": condense.LCA(group_size=4, window=16, rep_bias="log_size"),
        "lm_infinite": condense.LMInfinite(n_global=2, window=16),
        "dga": condense.DGA(group_size=4, window=8),
        "log_size": PROMPT.replace(rep_bias="log_size", complementary=False),
        "recall": condense.Recall(group_size=4, window=8, num_recall=3),
        "drop": condense.Recall(group_size=4, window=8, num_recall=3, unchosen="drop"),
        "exact": condense.Recall(group_size=4, window=8, num_recall=3, prompt="exact", store_bits=4),
        "shared": condense.Recall(group_size=4, window=8, num_recall=0.1, min_recall=5, prompt="shared", store_bits=4),
    }
    plan, content = run(methods=methods, lengths=(64,), baselines=())
    assert len(content["rows"]) == len([*plan.tasks()])
    assert all(row["gate"]["passed"] and row["times"] for row in content["rows"])
    rows = {name: {row["op"] for row in content["rows"] if row["runner"] == name} for name in methods}
    some = {"log_size": {"forward", "layer"}} | {name: {"forward", "layer", "decode"} for name in ("exact", "shared")}
    assert rows == {name: {"forward", "backward", "layer", "decode"} for name in methods} | some
    with pytest.raises(ValueError, match="method: lines attends in a way of its own"):
        run(methods={"lines": condense.VerticalSlash(vertical=3, slash=1)})


def test_a_step_of_several_rows_is_an_operation_of_its_own():
    plan, content = run(ops=("decode",), lengths=(64, 96), batches=(1, 3), baselines=("sdpa",))
    assert len(content["rows"]) == len([*plan.tasks()]) == 2 * 2 * (1 + len(METHODS))
    assert {row["op"] for row in content["rows"]} == {"decode", "decode_b3"}
    rows = {(row["op"], row["length"], row["runner"]): row for row in content["rows"]}
    assert all(row["gate"]["passed"] for row in content["rows"] if row["condensed"])
    for length in (64, 96):
        single, three = (rows[op, length, "cca"] for op in ("decode", "decode_b3"))
        read, of_three = (row["tbs"] * row["times"]["median_ms"] for row in (single, three))
        assert of_three == pytest.approx(3 * read)


@pytest.mark.parametrize("op", ["forward", "backward", "decode"])
def test_wrong_attention_is_not_timed(op, monkeypatch):
    attend = Method.attend

    def wrong(*args, **options):
        out, lse = attend(*args, **options)
        return out * 1.01, lse

    step = StaticCondensedLayer.step
    monkeypatch.setattr(Method, "attend", wrong)
    monkeypatch.setattr(StaticCondensedLayer, "step", lambda *args, **options: step(*args, **options) * 1.01)
    rows = run(ops=(op,), lengths=(64,), baselines=())[1]["rows"]
    assert all(row["error"].startswith("wrong: ") and "times" not in row for row in rows)


@pytest.mark.parametrize("longest", [64, 48])
def test_a_long_problem_is_checked_at_its_end_and_a_short_one_before_it(longest, monkeypatch):
    """Wrong at the end of problems longer than ``longest``: of 64 and 96 tokens, and of the first 64 of 96."""
    attend = Method.attend

    def wrong(*args, **options):
        out, lse = attend(*args, **options)
        if out.shape[2] > longest:
            out[:, :, -1] = 0
        return out, lse

    monkeypatch.setattr(Method, "attend", wrong)
    monkeypatch.setattr(gate, "WHOLE", 64)
    monkeypatch.setattr(gate, "PART", 8)
    _, content = run(ops=("forward",), lengths=(32, 64, 96), baselines=(), methods={"cca": METHODS["cca"]})
    assert ["error" in row for row in content["rows"]] == [False, longest < 64, True]


def test_an_error_stands_in_its_rows(monkeypatch):
    monkeypatch.setattr(tasks, "attention", Mock(side_effect=RuntimeError("out of luck\nsecond line")))
    _, content = run(ops=("forward", "layer"), lengths=(64,), baselines=())
    assert [row.get("error") for row in content["rows"]] == [None, None, *["RuntimeError: out of luck"] * 2]


@pytest.mark.parametrize(("part", "ops"), PARTS.items())
def test_a_recall_that_is_wrong_is_not_timed(part, ops, monkeypatch):
    represent, attend = condense.Recall.represent, condense.Recall.attend

    def wrong(self, *arguments, **options):
        made = list(represent(self, *arguments, **options))
        place = {"index": 2, "store": -1}.get(part)
        if place is not None and options["backend"] != "reference":
            made[place] = made[place].roll(1, 2)
        return tuple(made)

    def other_groups(self, q, context, **options):
        if part == "choice" and context.extra:
            signs, *others = context.extra
            context = context._replace(extra=(signs.roll(1, 2), *others))
        if part == "mean":
            context = context._replace(means=context.means._replace(means=context.means.means.roll(1, 2)))
        return attend(self, q, context, **options)

    monkeypatch.setattr(condense.Recall, "represent", wrong)
    monkeypatch.setattr(condense.Recall, "attend", other_groups)
    method = condense.Recall(group_size=4, window=8, num_recall=3)
    _, content = run(methods={"recall": method}, lengths=(64,), baselines=(), ops=("forward", "backward", "layer"))
    assert {row["op"] for row in content["rows"] if row.get("error", "").startswith("wrong: ")} == ops


def inputs_of(dtype):
    return Setting(HeadShape(4, 2, 32, 32), 2, dtype, torch.device("cpu"), 0).inputs(150)


def wronged(x):
    x = x.clone()
    x.view(-1)[-1] += x.abs().mean() + 0.5
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("longest", [gate.WHOLE, 64])
@pytest.mark.parametrize("method", GATED.values(), ids=GATED)
def test_the_gate_of_outputs_gradients_and_entries(method, longest, dtype, monkeypatch):
    """longest: tokens of a problem that is checked at every query; of longer ones, some are."""
    monkeypatch.setattr(gate, "WHOLE", longest)
    monkeypatch.setattr(gate, "PART", 16)
    inputs = inputs_of(dtype)
    sources = pooled(method, inputs)
    of = {"q": inputs.q, "context": sources, "scale": inputs.scale, "method": method}
    out = attend_to(sources, inputs.q, scale=inputs.scale)[0]
    rolled = sources.entries._replace(k=sources.entries.k.roll(1, 2))
    wrong = attend_to(Context((rolled, sources.window), sources.spans), inputs.q, scale=inputs.scale)[0]
    assert [gate.check_output(x, **of).passed for x in (out, wronged(out), wrong)] == [True, False, False]

    def gradients(upstream, wrong=None):
        leaves = [x.detach().requires_grad_() for x in (inputs.q, *sources.entries[:2], *sources.window[:2])]
        parts = Source(leaves[1], leaves[2], sources.entries.bias), Source(*leaves[3:])
        out = attend_to(Context(parts, sources.spans), leaves[0], scale=inputs.scale)[0]
        return [x * 1.5 if i == wrong else x for i, x in enumerate(torch.autograd.grad(out, leaves, upstream))]

    for wrong in (None, *range(5)):
        assert gate.check_gradients(partial(gradients, wrong=wrong), **of).passed is (wrong is None)
    assert gate.check_entries(method, inputs, sources).passed
    for name in ("k", "v"):
        entries = sources.entries._replace(**{name: wronged(getattr(sources.entries, name))})
        wrong = sources._replace(sources=(entries, sources.window))
        assert not gate.check_entries(method, inputs, wrong).passed


def test_the_gate_counts_near_ties_and_what_is_not_finite_is_wrong():
    want = torch.ones(4, dtype=torch.float64)
    got = torch.tensor([1.0, 1.0, float("nan"), 1.0])
    assert judge([got], [want], [want.float()]).to_dict()["passed"] is False
    assert judge([want.float()], [want], [want.float()]).passed
    inputs = inputs_of(torch.float32)
    method = condense.Recall(group_size=4, window=20, num_recall=5)
    context = pooled(method, inputs)
    out = method.attend(inputs.q, context, scale=inputs.scale)[0]
    check = partial(gate.check_output, q=inputs.q, scale=inputs.scale, method=method)
    # of each head and row, the queries that choose from more than 5 groups
    choosing = 2 * 4 * (150 - 20 - 6 * 4 + 1)
    assert check(out, context=context).to_dict().get("near_ties", 0) < choosing / 50
    signs, steps, *store = context.extra
    signs[:, :, 1:], steps[:, :, 1:] = signs[:, :, :1], steps[:, :, :1]
    assert check(out, context=context._replace(extra=(signs, steps, *store))).to_dict()["near_ties"] == choosing
