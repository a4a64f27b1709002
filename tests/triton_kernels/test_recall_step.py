"""Recall's decode step against the PyTorch step: interpreted in float32 on a CPU, compiled for every dtype on a GPU.

A choice may differ where two groups' scores differ by less than the scores' own error. No test hides that: wherever the
kernel opened other groups, the scores are compared.
"""

import pytest
import torch
from packed_groups import Packed, check_packed
from step_states import RECALLS, empty, own_by, step_settings
from step_states import token_at as new_token
from triton_kernels.test_step import drawn as random_qkv
from two_sources import others_are_near_ties

from condense import Recall
from condense.ops.recall import index_scores
from condense.ops.recall.choice import centre_scores
from condense.ops.step import NewToken, StepCall
from condense.ops.torch import step as torch_step
from condense.ops.triton import recall_step, recall_step_plan
from condense.ops.triton import step as triton_step
from condense.ops.triton.host import LOG2E, power_of_2
from condense.ops.triton.limits import DTYPES
from condense.ops.triton.recall_step_choice_kernels import Ranking, recall_choose_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = (64, 80, 96, 128, 256, (192, 128)) if DEVICE == "cuda" else ((16, 40), (24, 16))
SCALE = 0.4
# query and KV heads, key widths, tokens per group: bytes of signs of all kinds, several columns of tiles, odd groups
INDICES = [((2, 2), 24, 1), ((6, 2), 40, 4), ((20, 1), 144, 3), ((9, 1), 33, 20)]
if DEVICE == "cuda":
    INDICES += [((6, 1), 128, 16), ((6, 2), 128, 16)]
    INDICES += [((8, 2), D, g) for D, g in ((64, 16), (80, 16), (96, 6), (128, 16), (192, 16), (256, 128), (128, 1))]
# steps from one that the kernels take to the next, where each is compared by itself: none left out on a GPU;
# interpreted, which is slow, few, at every place within a group of 4 tokens and of 6
EVERY = 1 if DEVICE == "cuda" else 5


@pytest.fixture(autouse=True)
def scratch(poison):
    return poison(recall_step, "scratch_of")


def opened(scratch, state, settings):
    """What the kernel opened, bool ``[B, K, G]``, from its list of groups."""
    (B, K, G, _), most = state.signs.shape, settings.choice.quota.at(state.signs.shape[2])
    closed = settings.rule.closed(state.seen).clamp(max=G)
    lists = scratch[0].groups[: B * K * most].view(B, K, most)
    chosen = torch.zeros(B, K, G, dtype=torch.bool, device=lists.device)
    for row, n in enumerate(closed.tolist()):
        groups = lists[row, :, : settings.choice.quota.at(n)].long()
        assert bool((groups.diff(dim=-1) > 0).all())
        chosen[row].scatter_(1, groups, True)
    return chosen, closed


def check_choice(scratch, q, state, settings, scale):
    """True if the kernel opened the groups that the definition opens; near ties are looked at one by one."""
    chosen, closed = opened(scratch, state, settings)
    # queries in float32, in which kernels round them to whole numbers
    of = settings.choice.quota, q, state.group_index, scale
    return not others_are_near_ties(chosen[:, :, None], closed[:, None, None], *of).any()


def check_buffers(states, settings, t, k, v):
    """The kernels' buffers after the step of token t have the bytes of PyTorch's, which were the same before. On a GPU
    those of the group that closes now need not, as its keys are turned by sums in another order, see `packed_groups`;
    True if its codes are the same.
    """
    alike, (before, closed) = True, (settings.rule.pooled(n, settings.summary_delay) for n in (t, t + 1))
    if before < closed <= states[0].steps.shape[2]:
        tokens = slice(before * settings.rule.chunk, closed * settings.rule.chunk)
        mine, theirs = (Packed.of(state, before, closed) for state in states)
        alike = check_packed(mine, theirs, k[:, :, tokens], v[:, :, tokens], settings.choice.store.bits)
        if k.is_cuda:
            for x, y in zip((*mine.index, mine.store), (*theirs.index, theirs.store), strict=True):
                x.copy_(y)
    for name, x, y in zip(states[0]._fields, *states, strict=True):
        tolerance = 0 if x.dtype == torch.uint8 else 1e-6
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=name)
    return alike


def compare(q, k, v, settings, scratch, *, groups=None, latent=0):
    """Every token one step of the PyTorch backend, every so many one of the kernels on the same state.

    Compared are index, store, sums and outputs. Wide keys take a wider tolerance: the partial sums of a score of D
    normal products grow like sqrt(D), so that two orders of summation in float32 give scores some ``scale * D * eps``
    apart; weights differ by as large a share, and values lie within 4 of the output.
    """
    (B, _, L, D), K, Dv = q.shape, k.shape[1], v.shape[3]
    tolerance = max(2e-5, 4 * SCALE * D * torch.finfo(torch.float32).eps)
    made = {"rows": B, "dtype": q.dtype, "entries": groups, "device": DEVICE}
    states = [empty(settings, L, K, (D, Dv), **made) for _ in range(2)]
    num_same = num_steps = 0
    for t in range(L):
        new = new_token((q, k, v), t)
        want = torch_step.step(StepCall(new, states[1], settings, scale=SCALE, latent=latent), own_by(settings))
        if (L - 1 - t) % EVERY != 0:
            for x, y in zip(*states, strict=True):
                x.copy_(y)
            continue
        num_steps += 1
        got = triton_step.step(StepCall(new, states[0], settings, scale=SCALE, latent=latent))
        same = states[0].signs.shape[2] == 0 or check_choice(scratch, new.q, states[0], settings, SCALE)
        num_same += same
        # a group may be opened in the step that closes it: both then read what they packed themselves
        if check_buffers(states, settings, t, k, v) and same:
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        for x, y in zip(*states, strict=True):
            x.copy_(y)
    assert num_same >= 0.98 * num_steps


# settings; query and KV heads, tokens and widths; groups that there is room for
COMPARED = {name: (method, (2, 1, 45, 16, 24), None) for name, method in RECALLS.items()}
COMPARED |= {
    f"{heads}-{unchosen}": (RECALLS["three-open"].replace(unchosen=unchosen), (*heads, 33, 16, 16), None)
    for heads in ((2, 2), (6, 2), (7, 1))
    for unchosen in ("mean", "drop")
}
COMPARED |= {
    f"{width}-{name}": (RECALLS[name], (2, 1, 30, *(width if isinstance(width, tuple) else (width, width))), None)
    for width in WIDTHS
    for name in ("two-open", "three-open", "g-6")
}
COMPARED["more groups than there is room for"] = RECALLS["two-open"], (2, 1, 40, 16, 16), 3
# whose scores fill several tiles and splits, and ties are rare and looked up
COMPARED["many groups"] = Recall(group_size=1, window=2, num_recall=17), (3, 1, 90, 16, 16), None
COMPARED["before there is room for a group"] = RECALLS["two-open"], (2, 1, 6, 16, 16), 0


@pytest.mark.parametrize(("method", "sizes", "groups"), COMPARED.values(), ids=COMPARED)
def test_every_step_against_the_definition(method, sizes, groups, scratch):
    compare(*random_qkv(1, *sizes), step_settings(method), scratch, groups=groups)


@pytest.fixture
def ranks_few(monkeypatch):
    """Rows with few groups take a shorter way than those with many."""
    monkeypatch.setattr(recall_step_plan, "_FEW_RANKED", 4)
    # and what is not open is read in several tiles
    monkeypatch.setattr(recall_step_plan, "_GATHERED", 4)
    recall_step_plan.plan_of.cache_clear()
    yield
    recall_step_plan.plan_of.cache_clear()


@pytest.mark.usefixtures("ranks_few")
@pytest.mark.parametrize("name", ["three-open", "a-third"])
def test_few_groups_where_there_is_room_for_many(name, scratch):
    compare(*random_qkv(1, 2, 1, 45, 16, 24), step_settings(RECALLS[name]), scratch, groups=40)


@pytest.mark.parametrize(("heads", "D", "g"), INDICES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES if DEVICE == "cuda" else [torch.float32], ids=str)
def test_the_index_is_the_definition_to_the_bit(heads, D, g, dtype, scratch):
    """Tokens of small whole numbers, whose turned numbers and sums are exact in any order: equal signs and scores.

    Steps are sums of what keys differ by from the centre, which is rounded.
    """
    L, (H, K) = 3 * g + 2, heads
    q, k, v = (
        torch.randint(-9, 10, (2, n, L, d), generator=torch.Generator().manual_seed(d)).to(DEVICE, dtype)
        for n, d in ((H, D), (K, D), (K, 16))
    )
    settings = step_settings(Recall(group_size=g, window=1, num_recall=1))
    states = [empty(settings, L, K, (D, 16), dtype=dtype, device=DEVICE) for _ in range(2)]
    for t in range(L):
        new = new_token((q, k, v), t)
        want = StepCall(new, states[1], settings, scale=SCALE)
        if t % g:  # no group closes
            torch_step.step(want, own_by(settings))
            continue
        for x, y in zip(*states, strict=True):
            x.copy_(y)
        triton_step.step(StepCall(new, states[0], settings, scale=SCALE))
        torch_step.step(want, own_by(settings))
        assert torch.equal(states[0].signs, states[1].signs)
        of_sums = 2 * D * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps
        torch.testing.assert_close(states[0].steps, states[1].steps, rtol=of_sums, atol=0.0)
        G, closed = states[0].signs.shape[2], t // g
        if closed < 2:  # the one group is open, whatever its score
            continue
        GROUPS = power_of_2(G)
        index = states[0].group_index.narrow(0, closed)
        for name, of in (("score", index_scores), ("centre", centre_scores)):
            got = getattr(scratch[0], name)[: 2 * H * GROUPS].view(2, H, GROUPS)[..., :closed]
            # kernels' scores are base 2
            assert torch.equal(got, of(new.q, index, SCALE * LOG2E)[:, :, 0])


def test_rows_that_come_and_go():
    """Each row at its own position, some without a token in a step, given NaN: they stay as they are."""
    L, K = (60, 2) if DEVICE == "cuda" else (22, 1)
    q, k, v = random_qkv(3, 2 * K, K, L, 16, 16)
    real = torch.rand(3, L, generator=torch.Generator().manual_seed(5)) < torch.tensor([0.9, 0.5, 0.0])[:, None]
    for x in (q, k, v):
        x.masked_fill_(~real[:, None, :, None].to(DEVICE), torch.nan)
    settings = step_settings(RECALLS["three-open"])
    state = empty(settings, L, K, (16, 16), rows=3, dtype=torch.float32, device=DEVICE)
    for t in range(L):
        dead, before = ~real[:, t], [x.clone() for x in state]
        out = triton_step.step(StepCall(new_token((q, k, v), t, real), state, settings, scale=SCALE))
        assert all(torch.equal(x[dead], y[dead]) for x, y in zip(state, before, strict=True))
        assert not out[dead].any()
        assert bool(out.isfinite().all())
    for row in range(2):
        mine = [x[row : row + 1][:, :, real[row]] for x in (q, k, v)]
        alone = empty(settings, L, K, (16, 16), rows=1, dtype=torch.float32, device=DEVICE)
        for t in range(mine[0].shape[2]):
            triton_step.step(StepCall(new_token(mine, t), alone, settings, scale=SCALE))
        assert all(torch.equal(x[row : row + 1], y) for x, y in zip(state, alone, strict=True))


def test_more_steps_than_there_is_room_for_stay_inside_the_ring():
    """As where somebody's own graph is replayed too often: what lies behind the ring is NaN, and nobody reads it."""
    L, W = 24, 8
    settings = step_settings(RECALLS["two-open"].replace(window=20, num_recall=1))
    q, k, v = random_qkv(1, 2, 1, L, 16, 16)
    state = empty(settings, L, 1, (16, 16), rows=1, dtype=torch.float32, device=DEVICE)
    rings = [torch.full((1, 1, 4 * W, 16), torch.nan, device=DEVICE) for _ in range(2)]
    sums = torch.full((1, 1, W, 16), torch.nan, dtype=torch.float64, device=DEVICE)
    state = state._replace(ring_k=rings[0][:, :, :W], ring_v=rings[1][:, :, :W], sums=sums[:, :, :2])
    for t in range(L):
        out = triton_step.step(StepCall(new_token((q, k, v), t), state, settings, scale=SCALE))
        assert bool(out.isfinite().all())
    assert all(bool(x[:, :, W:].isnan().all()) for x in rings)
    assert bool(sums[:, :, 2:].isnan().all())


@pytest.mark.parametrize(("g", "widths"), [(4, (16, 80)), (20, (16, 24)), (6, (96, 0))], ids=str)
def test_sums_of_16_bits_are_those_of_pytorch_to_the_bit(g, widths):
    """As float64 rounds none of them; of latents whole keys. Rows without a token keep theirs."""
    L, settings = 5 * g, step_settings(Recall(group_size=g, window=g, num_recall=1))
    qkv = random_qkv(2, 2, 1, L, *widths, dtype=torch.float16)
    states = [empty(settings, L, 1, widths, dtype=torch.float16, device=DEVICE) for _ in range(2)]
    real, latent = torch.ones(2, L, dtype=torch.bool), 64 if widths[1] == 0 else 0
    real[1, 1] = False
    for t in range(L):
        calls = [StepCall(new_token(qkv, t, real), x, settings, scale=SCALE, latent=latent) for x in states]
        # the last token of a group in either row
        step = triton_step.step if t % g in (0, g - 1) else lambda call: torch_step.step(call, own_by(settings))
        step(calls[0])
        torch_step.step(calls[1], own_by(settings))
        assert torch.equal(states[0].sums, states[1].sums)


def test_nothing_is_added_where_all_closed_groups_are_open():
    """The bits of the output without a mean."""
    L, settings = 13, [step_settings(RECALLS["two-open"].replace(unchosen=x)) for x in ("mean", "drop")]
    qkv = random_qkv(1, 2, 1, L, 16, 24)
    made = {"rows": 1, "dtype": torch.float32, "entries": 6, "device": DEVICE}
    states = [empty(x, L, 1, (16, 24), **made) for x in settings]
    for t in range(L):
        calls = [StepCall(new_token(qkv, t), *x, scale=SCALE) for x in zip(states, settings, strict=True)]
        assert torch.equal(*map(triton_step.step, calls))


@pytest.mark.parametrize(
    ("levels", "apart", "first"), [(1, 1, 0), (3, 1, -1), (40, 1, -20), (40, 2**-21, 4), (40, 2**-21, -6)]
)
@pytest.mark.parametrize(("closed", "wanted"), [(5, 1), (63, 62), (64, 17), (1000, 125), (2047, 256), (3001, 1500)])
def test_the_best_groups_are_chosen_and_of_equals_the_first(closed, wanted, levels, apart, first):
    """Scores above and below 0, of which many are equal or neighbours; there are others where no group is closed."""
    K, R, groups, generator = 2, 3, power_of_2(closed + 1000), torch.Generator().manual_seed(closed)
    score = first + apart * (torch.rand(K, R, groups, generator=generator) * levels).round().to(DEVICE)
    # two splits, the sum of which is 1
    top, total = torch.zeros(K, R, 2, device=DEVICE), torch.full((K, R, 2), 0.5, device=DEVICE)
    chosen = torch.full((K, groups), -1, dtype=torch.int32, device=DEVICE)
    seen, none = torch.tensor([[closed - 1], [0]], dtype=torch.int32, device=DEVICE)
    ranking = Ranking(groups, max(0, (groups // 1024).bit_length() - 1), 0, 1, 1, 2, 2)
    recall_choose_kernel[(K,)](
        score, top, total, seen, none, chosen, none, none, none, none, none, none, None,
        K, R, groups, 2, 0, groups, wanted, 0, 1, 1, groups, ranking, False, False, False, num_warps=8,
    )  # fmt: skip
    order = score.amax(1)[:, :closed].sort(dim=1, descending=True, stable=True).indices
    best = order[:, :wanted].sort(1).values
    assert torch.equal(chosen[:, :wanted].long(), best)


def test_refusals():
    """Beside what every step refuses."""
    settings = step_settings(RECALLS["three-open"])
    state = empty(settings, 40, 1, (16, 16), rows=1, dtype=torch.float32, device=DEVICE)
    for of, message in (
        (state._replace(signs=state.signs.int()), "signs must be"),
        (state._replace(ring_k=torch.zeros(1, 1, 16, 13, device=DEVICE).mT), "ring_k must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            triton_step.step(StepCall(NewToken(*random_qkv(1, 2, 1, 1, 16, 16)), of, settings, scale=1.0))
