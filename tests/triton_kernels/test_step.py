"""The decode step against the oracle."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from lanes import DEVICE
from layers import columns, extend
from oracles import cases, latent_oracle, oracle
from speed.budget import judge
from step_states import RECALLS, SELECT, empty
from two_scales import METHODS as TWO_SCALES
from two_sources import attend_to

import condense
from condense.methods import step_settings
from condense.ops import NewToken, StepCall, StepState, UniformRule
from condense.ops.step import StateSizes
from condense.ops.torch import step as torch_step
from condense.ops.triton import recall_step, ring_step, step_plan
from condense.ops.triton import step as triton_step
from condense.plan import ForwardPlan
from condense.state import first_entries, most_entries, num_entries

# H, latent, rope
LATENTS = [(4, 32, 16), (4, 48, 8), (20, 64, 32)]
if DEVICE == "cuda":
    LATENTS = [(16, 512, 64), (40, 256, 32), (128, 512, 64)]
SELECTIONS = {
    "select": SELECT,
    "select-no-bias": SELECT.replace(rep_bias="none"),
    "select-no-focal": SELECT.replace(gamma=0),  # but a prompt keeps five even so
    "select-window0": SELECT.replace(window=0, gamma=0.8, summary="streaming"),
    "select-all": SELECT.replace(min_focal=99),
}


def empty_state(method, B, K, D, Dv, tokens, *, dtype=torch.float32, spare=0):
    """Room for ``tokens`` per row, NaN in every slot; bytes of entries are 0."""
    M = method.layout.rule.visible_entries(tokens // method.layout.rule.chunk) + spare
    made = {"rows": B, "dtype": dtype, "spare": spare, "entries": M, "device": DEVICE}
    state = empty(step_settings(method), tokens, K, (D, Dv), **made)
    return StepState(*(x.fill_(torch.nan) if x.is_floating_point() else x for x in state))


def drawn(B, H, K, L, D=16, Dv=16, dtype=torch.float32):
    return [x.to(DEVICE) for x in oracle.random_qkv(B, H, K, L, D, Dv, dtype=dtype)]


def one_step(plan, now, state, real=None, *, scale=0.25, counter=None, latent=0):
    return triton_step.step(StepCall(NewToken(*now, real, counter), state, plan, scale=scale, latent=latent))


def decode(method, q, k, v, state, *, arrivals=None, scale=None, latent=0):
    """Every token one step; ``arrivals`` bool ``[steps, B]`` says who has one in a step. Outputs ``[B, H, L, Dv]``."""
    (q, k, v), (B, H, L, D) = (x.to(DEVICE) for x in (q, k, v)), q.shape
    scale = D**-0.5 if scale is None else scale
    out = q.new_full((B, H, L, latent or v.shape[3]), torch.nan)
    steps, counter = L if arrivals is None else len(arrivals), torch.zeros((), dtype=torch.int64, device=DEVICE)
    for step in range(steps):
        real = torch.ones(B, dtype=torch.bool, device=DEVICE) if arrivals is None else arrivals[step].to(DEVICE)
        at, rows = state.seen.clamp(max=L - 1), torch.arange(B, device=DEVICE)
        now = [x[rows, :, at][:, :, None].clone() for x in (q, k, v)]
        for x in now:
            x[~real] = torch.nan
        given = None if arrivals is None else real
        result = one_step(step_settings(method), now, state, given, scale=scale, counter=counter, latent=latent)
        assert bool((result[~real] == 0).all())
        out[rows[real], :, at[real]] = result[real][:, :, 0]
    assert int(counter) == steps
    return out


@pytest.fixture(autouse=True)
def poisoned_scratch(poison):
    poison(ring_step, "split_scratch")
    poison(recall_step, "scratch_of")


# lots are drawn by PyTorch, entries in fewer bits have tests of their own
CASES = {name: method for name, method in cases.PLANS.items() if name not in ("dga-random", "lca-4-bits")} | {
    "cca-g20": condense.CCA(group_size=20, window=5),
    "lca-20-queries": condense.LCA(group_size=4, window=3, num_summary_queries=20),
    "max-select": condense.CCA(group_size=18, window=2, key_pooling="max", value_pooling="select"),
    "matched-mean-g18": condense.CCA(group_size=18, window=0, key_pooling="mean", rep_bias="matched"),
    "dga-defaults": condense.DGA(),  # 18 tokens: a tile of 16 and 2 more
    "dga-window0-log_size": condense.DGA(group_size=3, window=0, gamma=1, rep_bias="log_size"),
    "dga-18-focal": condense.DGA(group_size=18, window=0, gamma=1, rep_bias="log_size"),  # tiles that are all focal
    "dga-g1": condense.DGA(group_size=1, gamma=1),
}
# on a GPU every width and dtype, interpreted a whole tile, one with a rest and one split in two
WIDTHS = (64, 80, 96, 128, 256, (192, 128), (96, 64)) if DEVICE == "cuda" else ((16, 40), (96, 24))
DTYPES = (torch.bfloat16, torch.float16, torch.float32) if DEVICE == "cuda" else (torch.float32,)
# by the newest query alone: what is chosen is the same in every precision
BUDGETED = CASES | {"dga-log_size": condense.DGA(group_size=4, gamma=0.5, window=0, rep_bias="log_size")}
ENDLESS = {"pooled": condense.CCA(group_size=4, window=20)}
ENDLESS["recall"] = RECALLS["two-open"].replace(window=20, num_recall=1e-9, min_recall=1)
PADDED_LCA = condense.LCA(group_size=4, window=5, rep_bias="log_size")


def exact_to_rounding(out, want, largest, width=128):
    """A few units in the last place of the largest value; more where a score is the sum of more products."""
    units = 16 * max(1.0, width / 128)
    return float((out.cpu().double() - want).abs().max()) <= units * torch.finfo(torch.float32).eps * float(largest)


@pytest.mark.parametrize("name", CASES)
def test_every_step_against_the_definition(name):
    method, rule = CASES[name], CASES[name].layout.rule
    # until two chunks are closed and seen; interpreted, which is slow, of large chunks one
    L = 64 if DEVICE == "cuda" else min(40, (rule.window or 0) + 2 * rule.chunk + 2)
    q, k, v = oracle.random_qkv(1, 1, 1, L, 16, 24, dtype=torch.float32)
    state = empty_state(method, 1, 1, 16, 24, L)
    out = decode(method, q, k, v, state)
    assert exact_to_rounding(out, oracle.attention(q, k, v, method=method)[0], v.abs().max())
    assert state.seen.tolist() == [L]


@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (7, 1)], ids=str)
def test_rows_that_come_and_go(heads):
    (H, K), L, arrivals = heads, 21, torch.ones(26, 2, dtype=torch.bool)
    q, k, v = oracle.random_qkv(2, H, K, L, 16, 16, dtype=torch.float32)
    arrivals[[0, 1, 2, 9, 17], 0] = False
    arrivals[[3, 14, 15, 16, 25], 1] = False
    state = empty_state(PADDED_LCA, 2, K, 16, 16, L, spare=3)
    before = copy_of(state)
    out = decode(PADDED_LCA, q, k, v, state, arrivals=arrivals[:3])
    assert same([x[0] for x in before], [x[0] for x in state])
    assert state.seen.tolist() == [0, 3]
    rest = decode(PADDED_LCA, q, k, v, state, arrivals=arrivals[3:])
    assert state.seen.tolist() == [L, L]
    want = oracle.attention(q, k, v, method=PADDED_LCA)[0]
    assert exact_to_rounding(torch.where(rest.isnan(), out, rest), want, v.abs().max())


@pytest.mark.parametrize("method", [method for method in TWO_SCALES.values() if not method.own], ids=str)
@pytest.mark.parametrize(("heads", "widths", "latent"), [((4, 2), (16, 40), 0), ((3, 1), (24, 0), 16)], ids=str)
def test_entries_on_two_scales(heads, widths, latent, method):
    """Until two coarse entries are seen, for which there is room; values of latents are columns of keys."""
    (H, K), (D, Dv), L = heads, widths, method.near + 3 * method.n * method.chunk - method.chunk
    q, k, v = drawn(2, H, K, L, D, Dv)
    state, arrivals = empty_state(method, 2, K, D, Dv, L - 1), torch.ones(L + 4, 2, dtype=torch.bool)
    arrivals[[0, 1, 9, 17], 0] = False
    arrivals[[3, 14, 15, -1], 1] = False
    assert state.entries_k.shape[2] == 2
    out = decode(method, q, k, v, state, arrivals=arrivals, latent=latent)
    tokens = (x.cpu().double() for x in (q, k, k[..., :latent] if latent else v))
    want = condense.attention(*tokens, method=method, backend="reference")
    assert exact_to_rounding(out, want, k.abs().max() if latent else v.abs().max())


def filled_state(method, past, tokens):
    (B, K, M, D), seen = past.entries[0].shape, past.seen
    state = empty_state(method, B, K, D, past.entries[1].shape[3], tokens, dtype=past.entries[0].dtype)
    state.entries_k[:, :, :M], state.entries_v[:, :, :M] = past.entries[0], past.entries[1]
    for ring, new in ((state.ring_k, past.window_k), (state.ring_v, past.window_v), (state.ring_q, past.mean_q)):
        for back in range(1, min(ring.shape[2], new.shape[2], seen) + 1):
            ring[:, :, (seen - back) % ring.shape[2]] = new[:, :, -back]
    state.seen.fill_(seen)
    return state


def follow_the_reference(method, past, state, qkv, start, stop):
    largest = qkv[2].abs().max()
    for t in range(start, stop):
        now = columns(qkv, t, t + 1)
        sources, past = extend(method, past, *now, scale=0.3, backend="reference")
        want = attend_to(sources, now[0], scale=0.3, backend="reference")[0]
        out = one_step(step_settings(method), now, state, scale=0.3)
        assert exact_to_rounding(out, want.cpu(), largest, now[0].shape[3])
    return past


def same_entries(state, past, row, num):
    for made, entries in ((state.entries_k, past.entries[0]), (state.entries_v, past.entries[1])):
        largest = max(entries.abs().flatten().tolist(), default=0.0)
        assert num == 0 or exact_to_rounding(made[row, :, :num], entries[row, :, :num].cpu(), largest)
        assert bool(made[row, :, num:].isnan().all())


LARGE = condense.DGA(group_size=64, gamma=1, window=0, rep_bias="log_size")  # the largest that are ranked in registers
PREFILLS = {
    "streaming_llm": (CASES["streaming_llm"], 2, (4, 2), 45, 5),
    "cca": (CASES["cca"], 2, (4, 2), 45, 5),
    "lca-log_size": (CASES["lca-log_size"], 1, (70, 1), 45, 5),  # more query heads than one tile holds
    "lca-9-queries": (CASES["lca-9-queries"], 2, (4, 2), 45, 5),
    "dga": (CASES["dga"], 2, (70, 1), 45, 5),
    "large": (LARGE, 1, (4, 2), 126, 4),
    "large-many-heads": (LARGE, 1, (70, 1), 126, 4),
}


@pytest.mark.parametrize(("method", "B", "heads", "start", "steps"), PREFILLS.values(), ids=PREFILLS)
def test_goes_on_from_a_prefill_as_the_reference_does(method, B, heads, start, steps):
    qkv = drawn(B, *heads, start + steps)
    _, past = extend(method, None, *columns(qkv, 0, start), scale=0.3, backend="reference")
    state = filled_state(method, past, start + steps)
    for t in range(start, start + steps):
        past = follow_the_reference(method, past, state, qkv, t, t + 1)
        for row in range(B):
            same_entries(state, past, row, past.entries[0].shape[2])
        slot = t % state.ring_k.shape[2]
        assert torch.equal(state.ring_k[:, :, slot], qkv[1][:, :, t])
        assert torch.equal(state.ring_v[:, :, slot], qkv[2][:, :, t])


def after_prompts(method, q, k, v, lengths, tokens):
    """Past and buffers after prompts of so many tokens, read at once; NaN where nothing was written."""
    counts, L = torch.tensor(lengths), max(lengths)
    now, plan = columns((q, k, v), 0, L), ForwardPlan(L, counts)
    _, past = extend(method, None, *now, scale=0.3, plan=plan, backend="reference")
    B, K, _, D = past.entries[0].shape
    spare = most_entries(method, L + tokens) - method.layout.rule.visible_entries(tokens // method.layout.rule.chunk)
    state = empty_state(method, B, K, D, past.entries[1].shape[3], tokens, dtype=k.dtype, spare=spare)
    made = [method.num_entries(n) for n in lengths]
    for b, n in enumerate(made):
        state.entries_k[b, :, :n], state.entries_v[b, :, :n] = past.entries[0][b, :, :n], past.entries[1][b, :, :n]
    state.first.copy_(torch.tensor([[m, method.prompt_focal(n)] for n, m in zip(lengths, made, strict=True)]))
    return past, state


@pytest.mark.parametrize("name", SELECTIONS)
def test_goes_on_from_prompts_of_different_lengths_as_the_reference_does(name):
    method, lengths, (K, steps) = SELECTIONS[name], (31, 22, 1), (2, 26) if DEVICE == "cuda" else (1, 10)
    qkv = drawn(3, 2 * K, K, 31 + steps, Dv=24)
    past, state = after_prompts(method, *qkv, lengths, steps)
    past = follow_the_reference(method, past, state, qkv, 31, 31 + steps)
    assert state.seen.tolist() == [steps] * 3
    for row, n in enumerate(lengths):
        same_entries(state, past, row, num_entries(method, steps, first_entries(method, n)))


def test_focal_tokens_are_the_best_as_they_are_and_ties_go_to_the_earlier():
    """Equal keys but for one; the new token is among the focal ones at once."""
    method, L = condense.DGA(group_size=17, gamma=0.2, window=0), 21
    q, k, v = oracle.random_qkv(1, 1, 1, L, 16, 16, dtype=torch.float32)
    k = k[:, :, :1].repeat(1, 1, L, 1)
    k[:, :, 18] += q[:, :, -1]
    k[:, :, 20] += 2 * q[:, :, -1]
    state = empty_state(method, 1, 1, 16, 16, L)
    decode(method, q, k, v, state)
    focal = [0, 1, 18, 20]
    assert torch.equal(state.entries_k[:, :, :4].cpu(), k[:, :, focal])
    assert torch.equal(state.entries_v[:, :, :4].cpu(), v[:, :, focal])
    rest = v[:, :, [i for i in range(L) if i not in focal]].double().mean(2)
    assert exact_to_rounding(state.entries_v[:, :, 4], rest, v.abs().max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS, ids=str)
@pytest.mark.parametrize("name", ["cca", "lca-log_size", "dga-log_size"])
def test_output_within_budget(name, width, dtype):
    D, Dv = width if isinstance(width, tuple) else (width, width)
    method, (B, H, K, L) = BUDGETED[name], (1, 3, 1, 150) if DEVICE == "cuda" else (1, 2, 1, 18)
    if name != "cca":  # anchors and focal tokens are discontinuous choices, see budget
        H = K
    low = oracle.random_qkv(B, H, K, L, D, Dv, dtype=dtype)
    want = condense.attention(*(x.double() for x in low), method=method, backend="reference")
    on_device = [x.to(DEVICE) for x in low]
    yardstick = condense.attention(*on_device, method=method, backend="torch")
    out = decode(method, *on_device, empty_state(method, B, K, D, Dv, L, dtype=dtype))
    assert judge([out.cpu()], [want], [yardstick.cpu()]).passed


def test_entries_beyond_the_capacity_are_dropped():
    method, (q, k, v) = condense.CCA(group_size=3, window=0, rep_bias="log_size"), drawn(1, 2, 1, 12)
    whole = empty_state(method, 1, 1, 16, 16, 12)
    small = copy_of(whole)
    small = small._replace(entries_k=small.entries_k[:, :, :2], entries_v=small.entries_v[:, :, :2])
    want, out = decode(method, q, k, v, whole), decode(method, q, k, v, small)
    assert torch.equal(out[:, :, :8], want[:, :, :8])
    assert bool(out.isfinite().all())
    assert torch.equal(small.entries_k, whole.entries_k[:, :, :2])
    assert bool(small.entries_k._base[:, :, 2:].isnan().all())
    # the third group closes and is not seen: two entries are left
    entries = small.entries_k[0, 0] @ q[0, :, 8, :, None] * 0.25 + math.log(3)
    seen = entries.softmax(1).mT @ small.entries_v[0, 0]
    assert exact_to_rounding(out[0, :, 8], seen[:, 0].cpu(), v.abs().max())


@pytest.mark.parametrize("method", ENDLESS.values(), ids=ENDLESS)
def test_more_steps_than_there_is_room_for_stay_inside_the_ring(method):
    """As where somebody's own graph is replayed too often: what lies behind the ring is NaN, and nobody reads it."""
    L, W = 24, 8
    q, k, v = oracle.random_qkv(1, 2, 1, L, 16, 16, dtype=torch.float32)
    state = empty_state(method, 1, 1, 16, 16, L)
    sizes = {"ring_k": W, "ring_v": W} | ({"sums": 2} if state.sums.numel() else {})
    longer = {name: getattr(state, name).new_full((1, 1, 4 * W, 16), torch.nan) for name in sizes}
    out = decode(method, q, k, v, state._replace(**{name: longer[name][:, :, :n] for name, n in sizes.items()}))
    assert bool(out.isfinite().all())
    assert all(bool(longer[name][:, :, n:].isnan().all()) for name, n in sizes.items())
    assert exact_to_rounding(out[:, :, :W], oracle.attention(q, k, v, method=method)[0][:, :, :W], v.abs().max())


ANCHORS = condense.LCA(group_size=4, window=6, num_summary_queries=1, rep_bias="log_size")
FOCAL = condense.DGA(group_size=4, gamma=0.5, window=0, rep_bias="log_size")
ABSORBED = [
    (shape, ANCHORS.replace(key_pooling=key, value_pooling=value))
    for shape in LATENTS
    for key, value in (("select", "weighted"), ("weighted", "select"))
]
# whole entries are kept and pooled by one set of weights
ABSORBED += [(shape, FOCAL.replace(window=n)) for shape in ((4, 48, 16), LATENTS[-1]) for n in (0, 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "method"), ABSORBED, ids=str)
def test_absorbed_latents_against_the_definition(shape, method, dtype):
    """As heads that expand a latent to itself. Their mean is the first one to the bit: all precisions choose alike."""
    (H, latent, rope), L = shape, 64 if DEVICE == "cuda" else 20
    q, k, _ = oracle.random_qkv(1, 1, 1, L, latent + rope, 1, dtype=dtype)
    q = q * torch.tensor([1.0, 2.0, 0.5, 0.5], dtype=dtype).repeat(H // 4)[None, :, None, None]
    parts = q[..., :latent], q[..., latent:], k[:, 0, :, :latent], k[:, 0, :, latent:]
    itself = torch.eye(latent).expand(H, -1, -1)
    want, _ = latent_oracle.attention((*parts, itself, itself), method=method, scale=0.1)
    q, k, own = q.to(DEVICE), k.to(DEVICE), method.for_latents(latent).represent
    state = empty_state(method, 1, 1, latent + rope, 0, L, dtype=dtype)
    plain = StepState._make(x.nan_to_num(0.0) for x in state)  # PyTorch's step reads empty slots, and masks them
    out = decode(method, q, k, k[..., :0], state, scale=0.1, latent=latent)
    tokens = (NewToken(*columns((q, k, k[..., :0]), t, t + 1)) for t in range(L))
    calls = (StepCall(token, plain, step_settings(method), scale=0.1, latent=latent) for token in tokens)
    yardstick = torch.cat([torch_step.step(call, own) for call in calls], 2)
    assert judge([out.cpu()], [want], [yardstick.cpu()]).passed


def some_step(dtype=torch.float32, seen=24):
    q, k, v = drawn(2, 4, 2, 60, dtype=dtype)
    _, past = extend(PADDED_LCA, None, *columns((q, k, v), 0, seen), scale=0.25)
    return columns((q, k, v), seen, seen + 1), filled_state(PADDED_LCA, past, 60), step_settings(PADDED_LCA)


def copy_of(state):
    return StepState(*(x.clone() for x in state))


def same(one, other):
    return all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(one, other, strict=True))


def test_repeats_and_layouts_change_no_bit():
    now, state, plan = some_step()
    out = one_step(plan, now, first := copy_of(state))
    heads_last = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in state[:5])
    strided = StepState(*heads_last, *(x.clone() for x in state[5:]))
    wide = [torch.cat([x, x], -1).transpose(1, 2).contiguous().transpose(1, 2)[..., : x.shape[-1]] for x in now]
    columns = [x.mT.contiguous().mT for x in now]
    repeats = [(now, copy_of(state)) for _ in range(50 if DEVICE == "cuda" else 2)]
    for new, held in (*repeats, (wide, strided), (columns, copy_of(state))):
        assert torch.equal(one_step(plan, new, held), out)
        assert same(first, held)


def column_of(x):
    """The same numbers, one every three of them in memory; what lies between is wrong."""
    wrong = ~x if x.dtype == torch.bool else 1 - x
    return torch.stack([x, wrong, wrong], -1)[..., 0]


def test_counts_with_gaps_between_them():
    """seen, arrived, ``real``, and of a prompt first, are read by their strides: a column, one value for all rows."""
    now, state, plan = some_step()
    state.seen[1] -= 3
    for real in (torch.tensor([True, False]), torch.tensor([False, True]), torch.tensor([True]).expand(2)):
        real = real.to(DEVICE)
        out = one_step(plan, now, tight := copy_of(state), real.contiguous())
        for strided in (real,) if real.stride() == (0,) else (column_of(real.int()), column_of(real)):
            gaps = copy_of(state)._replace(seen=column_of(state.seen), arrived=column_of(state.arrived))
            assert torch.equal(one_step(plan, now, gaps, strided), out)
            assert same(tight, gaps)
    qkv, plan = drawn(2, 4, 2, 40), step_settings(SELECT)
    _, state = after_prompts(SELECT, *qkv, (31, 22), 9)
    now, tight, gaps = columns(qkv, 31, 32), copy_of(state), copy_of(state)._replace(first=column_of(state.first))
    assert torch.equal(one_step(plan, now, gaps), one_step(plan, now, tight))
    assert same(tight, gaps)


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, sys.maxsize])
def test_a_window_longer_than_any_text(window):
    q, k, v = drawn(1, 2, 1, 12)
    outs = []
    for method in (condense.CCA(group_size=8, window=window), condense.CCA(group_size=8, window=20)):
        # buffers of one size, so that both are read in the same splits
        state = empty_state(condense.CCA(group_size=8, window=20), 1, 1, 16, 16, 20, dtype=torch.float32)
        outs.append(decode(method, q, k, v, state))
    assert torch.equal(*outs)
    settings, sizes = step_settings(condense.CCA(group_size=8, window=window)), StateSizes(1, 1, (16, 16), 0, 20, 1)
    shape = step_plan.StepShape(q.device, q.dtype, 2, sizes, 0, (1.0, 0.0), settings.number)
    assert max(step_plan.launch_of(shape).step[1]) < 2**31


def test_a_tie_goes_to_the_lowest_position():
    method = condense.CCA(group_size=20, window=0, value_pooling="select")
    q, k, v = oracle.random_qkv(1, 1, 1, 40, 16, 16, dtype=torch.float32)
    state = empty_state(method, 1, 1, 16, 16, 40)
    decode(method, q, k[:, :, :1].expand_as(k), v, state)
    assert torch.equal(state.entries_v.cpu(), v[:, :, ::20])


def test_compiles_as_one_operation():
    now, state, plan = some_step()
    real = torch.tensor([True, False], device=DEVICE)

    def one(q, k, v, *state):
        return triton_step.step(StepCall(NewToken(2 * q, k, v, real), StepState(*state), plan, scale=0.25)) + 1

    eager, compiled = copy_of(state), copy_of(state)
    want = one(*now, *eager)
    torch._dynamo.reset()
    out = torch.compile(one, fullgraph=True, backend="aot_eager")(*now, *compiled)
    assert torch.equal(out, want)
    assert same(eager, compiled)


@pytest.mark.parametrize("real", [None, torch.tensor([True, False], device=DEVICE)], ids=["all", "some"])
def test_is_a_well_behaved_operation(real):
    now, state, plan = some_step()
    state = [x.nan_to_num(0.0) for x in state]  # opcheck compares with ==
    counter, sink = (None, None) if real is None else (torch.tensor(24, device=DEVICE), now[0][0, :, 0, 0].contiguous())
    arguments = (*now, *state, counter, real, sink, plan.number, 0.25, 0, 0.0)
    torch.library.opcheck(torch.ops.condense.step.default, arguments)


def test_refuses_what_it_has_no_kernel_for():
    (q, k, v), state, plan = some_step()
    before, two = copy_of(state), UniformRule(chunk=4, window=5, entries=2)
    wide = StepState(*(x.double() for x in state[:5]), *state[5:])
    columns = state._replace(entries_k=state.entries_k.mT.contiguous().mT)
    for match, args in {
        "takes torch.bfloat16, .*, got torch.float64": (q.double(), k.double(), v.double(), wide, plan),
        "num_focal . 1 = 1 entries per chunk, got 2": (q, k, v, state, replace(plan, rule=two)),
        "chunks of up to 128 .*, got 129": (q, k, v, state, replace(plan, rule=replace(two, chunk=129), num_focal=1)),
        "ring_v must be": (q, k, v, state._replace(ring_v=state.ring_v[:, :, 1:]), plan),
        "k must be": (q, k[:, :1], v, state, plan),
        "seen must be": (q, k, v, state._replace(seen=state.seen.int()), plan),
        "makes its entries itself": (q, k, v, state, replace(plan, key_pooling=None)),
        "contiguous": (q, k, v, columns, plan),
        "values of width 0": (q, k, v, state, plan, 8),
        "entries_k must be": (q, k, v, state, replace(plan, entry_bits=8)),
        "single tokens among entries": (q, k, v, state, replace(plan, entry_bits=8, has_first=True)),
        "latents of 8": (q, k, v[..., :0], state, replace(plan, entry_bits=4), 8),
        "widths up to 256": (q, k.expand(2, 2, 1, 16).repeat(1, 1, 1, 17), v, state, plan),
    }.items():
        with pytest.raises(ValueError, match=match):
            triton_step.step(StepCall(NewToken(*args[:3]), *args[3:5], scale=0.25, latent=sum(args[5:])))
    with pytest.raises(ValueError, match="real must be"):
        one_step(plan, (q, k, v), state, torch.ones(1, dtype=torch.bool))
    assert same(before, state)
