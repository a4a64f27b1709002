"""Recall's decode step, over stores in few bits too, against the PyTorch step; of other choices scores are compared."""

from types import SimpleNamespace

import pytest
import torch
from lanes import CUDA, DEVICE, DTYPES
from ops.test_packed_groups import Packed, check_packed
from speed.budget import judge
from step_states import RECALLS, check_slots, empty, given_away, own_by, step_settings, with_store
from step_states import token_at as new_token
from triton_kernels.test_step import drawn as random_qkv
from two_sources import others_are_near_ties

from condense import Dense, Recall, attention
from condense.caches import StaticCondensedLayer
from condense.ops import Extras, NewToken, StepCall, unpack_store
from condense.ops.backends import BACKENDS
from condense.ops.recall import GroupIndex, StoreFormat, choose_groups, index_scores, rotation, split_keys
from condense.ops.recall.choice import centre_scores
from condense.ops.recall.index import QUERY_LEVELS, block_width
from condense.ops.step.pages import Places
from condense.ops.torch import step as torch_step
from condense.ops.triton import recall_step, recall_step_plan, recall_step_tiles, recall_store
from condense.ops.triton import step as triton_step
from condense.ops.triton.host import LOG2E, power_of_2
from condense.ops.triton.limits import step_obstacle
from condense.ops.triton.recall_step_choice_kernels import Ranking, recall_choose_kernel

WIDTHS = (64, 80, 96, 128, 256, (192, 128)) if CUDA else ((16, 40), (24, 16))
SCALE = 0.4
# query and KV heads, key widths, tokens per group: bytes of signs of all kinds, several columns of tiles, odd groups
INDICES = [((2, 2), 24, 1), ((6, 2), 40, 4), ((20, 1), 144, 3), ((9, 1), 33, 20)]
# latents of 256, whose signs are read in pieces: with rests of 4 bytes, 8 and 16
INDICES += [((3, 1), D, g) for D, g in ((288, 3), (320, 16), (384, 2))]
if CUDA:
    INDICES += [((16, 1), 576, 16), ((40, 1), 288, 16)]
    INDICES += [((6, 1), 128, 16), ((6, 2), 128, 16)]
    INDICES += [((8, 2), D, g) for D, g in ((64, 16), (80, 16), (96, 6), (128, 16), (192, 16), (256, 128), (128, 1))]
# of so many steps kernels take one, compared by itself; interpreted, at every place within a group of 4 tokens and of 6
EVERY = 1 if CUDA else 5


@pytest.fixture(autouse=True)
def scratch(poison):
    return poison(recall_step, "scratch_of")


def check_choice(scratch, q, state, settings, scale):
    """True if the kernel's list of groups has those that the definition opens; near ties are looked at one by one."""
    (B, K, G, _), quota = state.signs.shape, settings.choice.quota
    closed, most = settings.rule.closed(state.seen).clamp(max=G), quota.at(G)
    lists = scratch[0].groups[: B * K * most].view(B, K, most)
    chosen = torch.zeros(B, K, G, dtype=torch.bool, device=lists.device)
    for row, n in enumerate(closed.tolist()):
        groups = lists[row, :, : quota.at(n)].long()
        assert bool((groups.diff(dim=-1) > 0).all())
        chosen[row].scatter_(1, groups, True)
    # queries in float32, in which kernels round them to whole numbers
    of = quota, q, state.group_index, scale
    return not others_are_near_ties(chosen[:, :, None], closed[:, None, None], *of).any()


def check_buffers(states, settings, t, k, v):
    """Index and store of the kernels' buffers pass `check_packed`, the others have PyTorch's bytes; True if all codes
    are the same: products of a rotation are rounded as each machine sums them up.
    """
    alike, (before, closed) = True, (settings.rule.pooled(n, settings.summary_delay) for n in (t, t + 1))
    if before < closed <= states[0].steps.shape[2]:
        tokens = slice(before * settings.rule.chunk, closed * settings.rule.chunk)
        mine, theirs = (Packed.of(state, before, closed) for state in states)
        alike = check_packed(mine, theirs, k[:, :, tokens], v[:, :, tokens], settings.choice.store.bits)
        for x, y in zip((*mine.index, mine.store), (*theirs.index, theirs.store), strict=True):
            x.copy_(y)
    for name, x, y in zip(states[0]._fields, *states, strict=True):
        tolerance = 0 if x.dtype == torch.uint8 else 1e-6
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=name)
    return alike


def compare(q, k, v, settings, scratch, *, groups=None, latent=0):
    """Every token one step of the PyTorch backend, every so many one of the kernels on the same state.

    Wide keys take a wider tolerance: partial sums of a score of D normal products grow like sqrt(D), so that two
    orders of summation give scores some ``scale * D * eps`` apart, and outputs up to 4 times as much.
    """
    (B, _, L, D), K, Dv = q.shape, k.shape[1], v.shape[3]
    tolerance = max(2e-5, 4 * SCALE * D * torch.finfo(torch.float32).eps)
    # tokens that can be taken back: more sums than two
    made = {"rows": B, "dtype": q.dtype, "entries": groups, "device": DEVICE, "spare": 9}
    state, all_same = empty(settings, L, K, (D, Dv), **made), []
    for t in range(L):
        new, mine = new_token((q, k, v), t), type(state)(*(x.clone() for x in state))
        want = torch_step.step(StepCall(new, state, settings, scale=SCALE, latent=latent), own_by(settings))
        if (L - 1 - t) % EVERY != 0:
            continue
        got = triton_step.step(StepCall(new, mine, settings, scale=SCALE, latent=latent))
        all_same.append(mine.signs.shape[2] == 0 or check_choice(scratch, new.q, mine, settings, SCALE))
        # a group may be opened in the step that closes it: both then read what they packed themselves
        if check_buffers((mine, state), settings, t, k, v) and all_same[-1]:
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert sum(all_same) >= 0.98 * len(all_same)


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
COMPARED["before a group is closed"] = RECALLS["two-open"], (2, 1, 6, 16, 16), None


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


@pytest.fixture
def split_into(monkeypatch):
    """Sets how many splits there are, how many of them read open groups alone, and ``mean_tiles``."""

    def split(*numbers):
        monkeypatch.setattr(recall_step_plan, "splits_of", lambda *args: recall_step_tiles.Splits(0, *numbers))
        recall_step_plan.plan_of.cache_clear()

    yield split
    recall_step_plan.plan_of.cache_clear()


SPLITS = {
    "mean": [(1, 0, 1), (2, 0, 1), (3, 0, 5), (5, 0, 2), (4, 0, 40), (2, 0, 0), (9, 0, 0), (3, 1, 0), (6, 3, 0)],
    "drop": [(1, 0, 0), (4, 0, 0), (9, 0, 0), (2, 1, 0), (5, 3, 0)],
}


@pytest.mark.parametrize("unchosen", SPLITS)
def test_splits_read_every_key_once(unchosen, split_into):
    """However many they are; after 84 tokens all groups are open, after 140 all but seven."""
    settings = step_settings(Recall(group_size=4, window=40, num_recall=18, unchosen=unchosen))
    qkv = random_qkv(1, 2, 1, 140, 16, 24)
    state = empty(settings, 140, 1, (16, 24), rows=1, dtype=torch.float32, device=DEVICE)
    for t in range(140):
        before = [x.clone() for x in state]
        want = torch_step.step(StepCall(new_token(qkv, t), state, settings, scale=SCALE), own_by(settings))
        for splits in SPLITS[unchosen] if t in (83, 139) else ():
            split_into(*splits)
            mine = type(state)(*(x.clone() for x in before))
            got = triton_step.step(StepCall(new_token(qkv, t), mine, settings, scale=SCALE))
            # each of so many keys is added once, in another order
            rounding = 140 * torch.finfo(torch.float32).eps
            torch.testing.assert_close(got, want, rtol=rounding, atol=rounding, msg=lambda x, n=splits: f"{n}: {x}")


@pytest.mark.parametrize(("heads", "D", "g"), INDICES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_index_is_the_definition_to_the_bit(heads, D, g, dtype, scratch):
    """Of tokens of small whole numbers, whose sums are exact in any order; steps differ from a rounded centre."""
    L, (H, K), settings = 3 * g + 2, heads, step_settings(Recall(group_size=g, window=1, num_recall=1e-9, min_recall=1))
    Dv, latent = (0, 512 if D > 512 else 256) if D > 256 else (16, 0)
    qkv = [(4 * x).round().clamp(-9, 9) for x in random_qkv(2, H, K, L, D, Dv, dtype)]
    state = empty(settings, L, K, (D, Dv), dtype=dtype, device=DEVICE)
    for t in range(L):
        new, mine, closed = new_token(qkv, t), type(state)(*(x.clone() for x in state)), t // g
        torch_step.step(StepCall(new, state, settings, scale=SCALE, latent=latent), own_by(settings))
        if t % g:  # no group closes
            continue
        triton_step.step(StepCall(new, mine, settings, scale=SCALE, latent=latent))
        assert torch.equal(mine.signs, state.signs)
        of_sums = 2 * D * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps
        torch.testing.assert_close(mine.steps, state.steps, rtol=of_sums, atol=0.0)
        if closed < 2:  # the one group is open, whatever its score
            continue
        GROUPS, index = power_of_2(mine.signs.shape[2]), mine.group_index.narrow(0, closed)
        for name, of in (("score", index_scores), ("centre", centre_scores)):
            got = getattr(scratch[0], name)[: 2 * H * GROUPS].view(2, H, GROUPS)[..., :closed]
            assert torch.equal(got, of(new.q, index, SCALE * LOG2E)[:, :, 0])


def test_an_index_in_float32_is_read_by_lanes(hopper, scratch):
    """Of its steps two do not fit into a word."""
    test_the_index_is_the_definition_to_the_bit((8, 2), 128, 16, torch.float32, scratch)
    assert hopper is None or {"mma", "shfl"} <= hopper


def test_rows_that_come_and_go():
    L, K = (60, 2) if CUDA else (22, 1)
    q, k, v = random_qkv(3, 2 * K, K, L, 16, 16)
    real = torch.rand(3, L, generator=torch.Generator().manual_seed(5)) < torch.tensor([0.9, 0.5, 0.0])[:, None]
    for x in (q, k, v):
        x.masked_fill_(~real[:, None, :, None].to(DEVICE), torch.nan)
    settings, made = step_settings(RECALLS["three-open"]), {"dtype": torch.float32, "device": DEVICE}
    state = empty(settings, L, K, (16, 16), rows=3, **made)
    for t in range(L):
        dead, before = ~real[:, t], [x.clone() for x in state]
        out = triton_step.step(StepCall(new_token((q, k, v), t, real), state, settings, scale=SCALE))
        assert all(torch.equal(x[dead], y[dead]) for x, y in zip(state, before, strict=True))
        assert not out[dead].any()
        assert bool(out.isfinite().all())
    for row in range(2):
        mine = [x[row : row + 1][:, :, real[row]] for x in (q, k, v)]
        alone = empty(settings, L, K, (16, 16), rows=1, **made)
        for t in range(mine[0].shape[2]):
            triton_step.step(StepCall(new_token(mine, t), alone, settings, scale=SCALE))
        assert all(torch.equal(x[row : row + 1], y) for x, y in zip(state, alone, strict=True))


@pytest.mark.parametrize(("g", "widths"), [(4, (16, 80)), (20, (16, 24)), (6, (96, 0))], ids=str)
def test_sums_of_16_bits_are_those_of_pytorch_to_the_bit(g, widths):
    """As float64 rounds none of them; of latents whole keys. Rows without a token keep theirs."""
    L, settings = 5 * g, step_settings(Recall(group_size=g, window=g, num_recall=1e-9, min_recall=1))
    qkv = random_qkv(2, 2, 1, L, *widths, dtype=torch.float16)
    states = [empty(settings, L, 1, widths, dtype=torch.float16, device=DEVICE) for _ in range(2)]
    real, latent = torch.ones(2, L, dtype=torch.bool), 64 if widths[1] == 0 else 0
    real[1, 1] = False
    for t in range(L):
        mine, theirs = (StepCall(new_token(qkv, t, real), x, settings, scale=SCALE, latent=latent) for x in states)
        torch_step.step(theirs, own_by(settings))
        if t % g in (0, g - 1):  # the last token of a group in either row
            triton_step.step(mine)
        else:
            torch_step.step(mine, own_by(settings))
        assert torch.equal(states[0].sums, states[1].sums)


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
    ranking = Ranking(groups, max(0, (groups // 1024).bit_length() - 1), 0, 1, 2, 2)
    recall_choose_kernel[(K,)](
        score, top, total, seen, none, chosen, none, none, none, none, none, none, None, None, None, None, None, 1, 0,
        K, R, groups, 2, 0, groups, wanted, 0, 1, 1, groups, ranking, False, False, None, num_warps=8,
    )  # fmt: skip
    order = score.amax(1)[:, :closed].sort(dim=1, descending=True, stable=True).indices
    best = order[:, :wanted].sort(1).values
    assert torch.equal(chosen[:, :wanted].long(), best)


def test_a_ring_with_gaps_is_refused():
    settings, token = step_settings(RECALLS["three-open"]), NewToken(*random_qkv(1, 2, 1, 1, 16, 16))
    state = empty(settings, 40, 1, (16, 16), rows=1, dtype=torch.float32, device=DEVICE)
    state = state._replace(ring_k=torch.zeros(1, 1, 16, 13, device=DEVICE).mT)
    with pytest.raises(ValueError, match="ring_k must be contiguous"):
        triton_step.step(StepCall(token, state, settings, scale=1.0))


# name of the case, bits of the store, widths
STORES = [("three-open", 8, (16, 24)), ("g-6", 4, (24, 16)), ("g-1-opened", 4, (16, 16)), ("a-third", 8, (40, 16))]
STORES += [("three-open", 4, (64, 128)), ("g-6", 4, (128, 64)), ("g-1-opened", 4, (64, 64))]
if CUDA:
    STORES += [("three-open", bits, widths) for bits in (8, 4) for widths in ((128, 128), (80, 80), (192, 128))]


def with_bits(name, bits=16):
    return with_store(step_settings(RECALLS[name]), bits=bits)


@pytest.mark.parametrize(("name", "bits", "widths"), STORES, ids=str)
def test_stores_in_fewer_bits(name, bits, widths, scratch):
    compare(*random_qkv(1, 2, 1, 33, *widths), with_bits(name, bits), scratch)


GROUPS = [(4, 16, (64, 128)), (8, 6, (24, 40)), (4, 1, (16, 16)), (8, 16, (48, 0)), (4, 32, (160, 0))]
# whose bytes of the centre have other columns than those of the store; whose codes go to bytes in many short runs
GROUPS += [(4, 3, (36, 16)), (8, 2, (132, 16))]
GROUPS += [(4, 16, (128, 128)), (8, 16, (128, 128)), (4, 16, (576, 0)), (4, 16, (72, 16))] if CUDA else []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "g", "widths"), GROUPS, ids=str)
def test_groups_of_a_prompt(bits, g, widths, dtype):
    form, tokens = StoreFormat(bits, g), torch.randn(2, 2, 3 * g + 1, 2 * sum(widths), device=DEVICE).to(dtype)
    k, v = (x[:, :, 1:].unflatten(2, (3, g)) for x in tokens[..., ::2].split(widths, dim=3))
    got, want = (BACKENDS[name].load().store_groups(form, k, v) for name in ("triton", "torch"))
    check_packed(*(Packed(GroupIndex(*x[:2]), x[2]) for x in (got, want)), k.flatten(2, 3), v.flatten(2, 3), bits)
    nothing = BACKENDS["triton"].load().store_groups(form, k[:, :, :0], v[:, :, :0])
    assert all(torch.equal(x, y.narrow(2, 0, 0)) for x, y in zip(nothing, want, strict=True))


LATENTS = [(32, 48), (64, 96)] + ([(512, 576), (256, 288)] if CUDA else [])


@pytest.mark.parametrize(("latent", "D"), LATENTS, ids=str)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_latents(latent, D, bits, scratch):
    """Values are columns of the keys, one KV head for all query heads, of which there are two tiles."""
    compare(*random_qkv(1, 20, 1, 30, D, 0), with_bits("three-open", bits), scratch, latent=latent)


@pytest.mark.parametrize(("bits", "message"), [(4, "latents of 48 of 64 columns and store_bits=4"), (16, None)])
def test_latents_that_end_within_a_block_of_the_rotation_are_refused(bits, message):
    """Their columns could not be rotated back; with stores of 16 bits nothing is rotated."""
    settings = with_bits("three-open", bits)
    found = step_obstacle(torch.device(DEVICE), torch.float32, (64, 0), settings, latent=48, entries=9)
    assert message in found if message else found is None


# settings, tokens, slots, and how many of the last tokens the kernels take: the interpreter is slow
SLOTS = {
    "tokens": (with_bits("g-1-opened"), 14, 6, 14),
    "8 bits": (with_bits("two-open", 8), 30, 3, 10),
    "4 bits": (with_bits("two-open", 4), 30, 3, 10),
}
if CUDA:
    many = step_settings(RECALLS["g-1-opened"].replace(num_recall=1030))
    SLOTS |= {"many": (many, 1200, 300, 14), "8 bits": (*SLOTS["8 bits"][:3], 30), "4 bits": (*SLOTS["4 bits"][:3], 30)}


@pytest.mark.parametrize(("settings", "L", "slots", "last"), SLOTS.values(), ids=SLOTS)
def test_slots(settings, L, slots, last, scratch):
    """The same bits as without, and the slots of the definition; a row pauses."""
    qkv, kinds = random_qkv(1, 2, 1, L, 16, 24), [with_store(settings, slots=n) for n in (0, slots)]
    made = {"rows": 1, "dtype": torch.float32, "device": DEVICE}
    states, held = [empty(kind, L, 1, (16, 24), **made) for kind in kinds], [(slot, -1) for slot in range(slots)]
    for t in range(L):
        counter = torch.tensor(t, device=DEVICE)
        new = new_token(qkv, t)._replace(real=torch.tensor([t % 7 != 5], device=DEVICE), counter=counter)
        calls = [StepCall(new, state, kind, scale=SCALE) for kind, state in zip(kinds, states, strict=True)]
        if t < L - last:
            for call in calls:
                torch_step.step(call, own_by(settings))
            continue
        counter.fill_(t)
        assert torch.equal(*map(triton_step.step, calls))
        assert int(counter) == t + len(states)
        for state in states:
            check_slots(state, settings.rule.chunk)
        # slots hold the bytes of the store, which are held to PyTorch's elsewhere
        if bool(new.real):
            scores, closed = index_scores(new.q, states[1].group_index, SCALE), settings.rule.closed(states[1].seen)
            chosen = choose_groups(scores, closed[:, None, None], settings.choice.quota, 1)
            held = given_away(held, chosen[0, 0, 0].nonzero()[:, 0].tolist())
        assert [(slot, int(states[1].held[0, 0, slot])) for slot in states[1].order[0, 0].tolist()] == held


def exactly(state, settings, D, Dv):
    tokens = settings.store_format.unpack(state.store, D, Dv, torch.float64, state.group_index)
    state = state._replace(store=torch.cat(tokens, dim=3), slots=state.slots[:, :, :0], held=state.held[..., :0])
    return type(state)(*(x.double() if x.is_floating_point() else x.clone() for x in state))


# rows, tokens per group, open groups, heads, soft cap
BUDGETS = [(2, 4, 3, (8, 2), 0.0), (1, 16, 2, (3, 1), 0.5), (1, 32, 2, (2, 2), 1.0)]
if CUDA:
    BUDGETS += [(rows, g, r, (8, 2), 0.0) for rows in (2, 16) for g, r in ((16, 3), (16, 20), (32, 3))]


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "g", "opened", "heads", "softcap"), BUDGETS, ids=str)
def test_outputs_are_within_the_error_budget(rows, g, opened, heads, softcap, bits, dtype, scratch):
    w, L, widths = (40, 420, (128, 128)) if CUDA else (6, max(40, 5 * g), (16, 24))
    settings = step_settings(Recall(group_size=g, window=w, num_recall=opened, store_bits=bits))
    qkv = random_qkv(rows, *heads, L, *widths, dtype=dtype)
    check_budget(settings, qkv, scratch, last=6 if CUDA else 3, softcap=softcap)


@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize(
    ("heads", "softcap", "splits"),
    [((8, 2), 0.0, (3, 0, 0)), ((3, 1), 0.5, (6, 0, 0)), ((8, 1), 0.0, (2, 0, 1)), ((3, 1), 0.5, (1, 0, 1))],
)
def test_lanes_are_within_the_error_budget(heads, softcap, splits, scratch, split_into):
    split_into(*splits)
    settings = step_settings(Recall(group_size=16, window=40, num_recall=3, min_recall=0, store_bits=4))
    qkv = random_qkv(1, *heads, 330, 128, 128, dtype=torch.bfloat16)
    check_budget(settings, qkv, scratch, last=2, softcap=softcap)


@pytest.mark.usefixtures("lanes")
def test_lanes_of_a_cache_too_short_for_a_group(scratch):
    """Such a cache is that of every short `generate`."""
    q, k, v = random_qkv(1, 8, 2, 18, 128, 128, dtype=torch.bfloat16)
    for tokens, taken in ((8, {7}), (18, {7, 15, 16, 17})):  # the second has room for a group, and closes it
        layer, outs = StaticCondensedLayer(Recall(group_size=16, window=1, store_bits=4), tokens), []
        layer.lazy_initialization(k, v)
        for t in range(tokens):
            layer.backend = "triton" if t in taken else "torch"
            outs.append(layer.step(new_token((q, k, v), t), scale=SCALE))
        want = attention(q[:, :, :8], k[:, :, :8], v[:, :, :8], method=Dense(), scale=SCALE)[:, :, -1:]
        # weights and results are rounded to 8 bits, of values of up to 4
        torch.testing.assert_close(outs[7], want, rtol=0, atol=2 * 4 * 2**-8)


# rows, heads, widths, tokens per group, open groups, tokens, splits, slots: two tiles of heads; more than one tile of
# centres; splits without a group; groups that move to slots
APART = [
    (1, 17, (512, 576), 16, 7, 224, 1, 0),
    pytest.param(1, 3, (512, 576), 16, 70, 1250, 1, 0, marks=pytest.mark.slow),
    (1, 16, (512, 576), 16, 9, 190, 5, 7),
    (1, 17, (256, 288), 16, 5, 150, 1, 5),
    (2, 3, (256, 288), 8, 9, 140, 2, 0),
]
if CUDA:
    APART += [(1, 16, (512, 576), 16, 40, 2000, 3, 50), (2, 40, (256, 288), 8, 20, 2000, 2, 0)]


@pytest.mark.parametrize(("rows", "heads", "widths", "g", "opened", "tokens", "splits", "slots"), APART, ids=str)
def test_open_groups_that_another_kernel_reads(
    rows, heads, widths, g, opened, tokens, splits, slots, scratch, hopper, monkeypatch
):
    """On Hopper, of latents as DeepSeek's and MiniCPM3's models have; within the same budget."""
    monkeypatch.setattr(recall_step_tiles, "num_splits", lambda *args: (splits, splits, 0))
    recall_step_plan.plan_of.cache_clear()
    started, start = [], recall_step.OPENED.start
    monkeypatch.setattr(recall_step, "OPENED", SimpleNamespace(start=lambda *x: started.append(start(*x))))
    settings = step_settings(Recall(group_size=g, window=40, num_recall=opened, min_recall=0, store_bits=4))
    qkv = random_qkv(rows, heads, 1, tokens, widths[1], 0, dtype=torch.bfloat16)
    check_budget(with_store(settings, slots=slots), qkv, scratch, last=3, latent=widths[0])
    recall_step_plan.plan_of.cache_clear()
    assert started or (CUDA and torch.cuda.get_device_capability()[0] != 9)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("splits", [(7, 0, 0), (2, 0, 1)], ids=str)
def test_latents_that_no_other_kernel_reads(splits, scratch, split_into):
    """On Hopper: groups of another size, soft caps."""
    split_into(*splits)
    settings = step_settings(Recall(group_size=6, window=40, num_recall=9, min_recall=0, store_bits=4))
    qkv = random_qkv(1, 16, 1, 200, 96, 0, dtype=torch.bfloat16)
    check_budget(settings, qkv, scratch, last=4, softcap=0.5, latent=64)


def rounds_alike(q):
    """Query heads, bool ``[B, H]``, of which no rotated number lies so near the middle of two that sums may decide."""
    x = q[:, :, 0].double() @ rotation(q.shape[3], q.device, torch.float64)
    steps = x / x.abs().amax(-1, keepdim=True) * QUERY_LEVELS
    error = QUERY_LEVELS * block_width(q.shape[3]) * torch.finfo(torch.float32).eps
    return ((steps - steps.floor() - 0.5).abs() > error).all(-1)


def check_budget(settings, qkv, scratch, last=6, softcap=0.0, latent=0):
    """Twice the error of the same step in PyTorch, all of them over one quantised store. Soft caps come with sinks."""
    exact, (q, k, v), results = with_store(settings, bits=16, slots=0), qkv, []
    (rows, K, L, D), Dv = k.shape, v.shape[3]
    sinks = torch.linspace(-3, 3, q.shape[1], device=DEVICE) if softcap else None
    given = {"scale": SCALE / 4, "extras": Extras(softcap, sinks), "latent": latent}
    state = empty(settings, L, K, (D, Dv), rows=rows, dtype=q.dtype, device=DEVICE)
    for t in range(L):
        new = new_token(qkv, t)
        before = type(state)(*(x.clone() for x in state)) if t >= L - last else None
        plain = torch_step.step(StepCall(new, state, settings, **given), own_by(settings))
        if before is None:
            continue
        wide = exactly(before, settings, D, Dv)
        got = triton_step.step(StepCall(new, before, settings, **given))
        same = check_choice(scratch, new.q, before, settings, SCALE / 4)
        check_slots(before, settings.rule.chunk)
        # a group that closes now is rounded and quantised in one of the two only
        if same and settings.rule.closed(t + 1) == settings.rule.closed(t):
            double = type(new)(*(x.double() for x in new[:3]))
            want = torch_step.step(StepCall(double, wide, exact, **given), own_by(exact))
            results.append([x[rounds_alike(new.q)] for x in (got, want, plain)])
    assert sum(len(got) for got, *_ in results) > 1
    verdict = judge(*(list(x) for x in zip(*results, strict=True)))
    assert verdict.passed, verdict


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("case", ["all-open", "two-open"])
def test_the_largest_numbers_of_float16_stay_finite(case, bits):
    """In tokens of open groups, and in sums; the query is 0, so only infinity changes weights."""
    settings, (q, k, v) = with_bits(case, bits), random_qkv(1, 2, 1, 20, 16, 24)
    qkv = [x.to(torch.float16) for x in (0 * q, *(x.sign() * (65504 - 2048 * x.abs()) for x in (k, v)))]
    state = empty(settings, 20, 1, (16, 24), rows=1, dtype=torch.float16, device=DEVICE)
    for t in range(20):
        before = type(state)(*(x.clone() for x in state))
        want = torch_step.step(StepCall(new_token(qkv, t), state, settings, scale=SCALE), own_by(settings))
    got = triton_step.step(StepCall(new_token(qkv, 19), before, settings, scale=SCALE))
    assert bool(got.isfinite().all())
    torch.testing.assert_close(got, want, rtol=2**-9, atol=0)


PACKED = [(16, (64, 64)), (6, (24, 16)), (1, (40, 0)), (4, (80, 96))]
if CUDA:
    PACKED += [(g, widths) for g in (16, 32) for widths in ((128, 128), (192, 128), (256, 256), (576, 0), (288, 0))]


def packed(bits, g, widths, dtype, groups=5):
    """Pieces ``[2, 3, groups, g * C]``; the first group has numbers up to the largest of float16."""
    generator = torch.Generator().manual_seed(g)
    k, v = (torch.randn(2, 3, groups, g, n, generator=generator) for n in widths)
    for x in (k, v):
        x[:, :, :1] = 65504 - 1024 * x[:, :, :1].abs()
    (k, v), form = (x.to(DEVICE, dtype) for x in (k, v)), StoreFormat(bits, g)
    index, rest = split_keys(k)
    return form, form.pack(k, v, rest).unflatten(2, (groups, g)).flatten(3), index


def check_unpacked(got, want):
    """Values to the bit; keys are rotated back, whose sums are added in another order and then rounded."""
    assert torch.equal(got[1], want[1])
    (k, of_k), D = (got[0], want[0]), got[0].shape[3]
    rounded = 2 * D * torch.finfo(torch.float32).eps + torch.finfo(k.dtype).eps
    size = of_k.double().norm(dim=3, keepdim=True)
    assert bool(((k.double() - of_k.double()).abs() <= rounded * size).all())


# the interpreter cuts numbers off to bfloat16
@pytest.mark.parametrize("dtype", DTYPES if CUDA else [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize(("g", "widths"), PACKED, ids=str)
def test_a_store_is_unpacked(g, widths, bits, dtype):
    form, pieces, index = packed(bits, g, widths, dtype)
    want = unpack_store(form, pieces, index, widths, dtype, backend="torch")
    longer = torch.nn.functional.pad(pieces, (0, 0, 0, 4), value=255)[:, :, :5]
    odd = torch.nn.functional.pad(pieces.flatten(), (1, 0))[1:].view(pieces.shape)
    for x in (longer, odd):
        check_unpacked(unpack_store(form, x, index, widths, dtype, backend="triton"), want)
    got = unpack_store(form, longer[:, :, :0], index.narrow(0, 0), widths, dtype, backend="triton")
    assert [x.shape for x in got] == [(2, 3, 0, n) for n in widths]
    # slots between pieces, 4 to a page, some of which two rows share
    cache = torch.full((7, 3, 4, -(-pieces.shape[3] // 16) * 16 + 32), 255, dtype=pieces.dtype, device=DEVICE)
    pages = cache[..., 16 : 16 + pieces.shape[3]]
    place = torch.randint(0, 28, (2, 5), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    places = Places.of(place // 4, place % 4, 3)
    pages[tuple(places)] = pieces
    got, want = (unpack_store(form, pages, index, widths, dtype, places=places, backend=x) for x in ("triton", "torch"))
    check_unpacked(got, want)


@pytest.mark.parametrize("prompt", ["recall", "exact"])
def test_a_prompt_reads_what_the_kernel_unpacks(prompt, monkeypatch):
    method = Recall(group_size=4, window=4, num_recall=2, store_bits=4, prompt=prompt)
    qkv, outs = random_qkv(1, 2, 1, 30, 64, 64), []
    for backend in ("torch", "triton"):
        outs.append(attention(*qkv, method=method, backend=backend))
        monkeypatch.setattr(StoreFormat, "unpack", None)
    torch.testing.assert_close(*outs, rtol=2e-5, atol=2e-5)  # sums of float32 in another order


def test_unpacking_is_a_whole_operation():
    _, pieces, index = packed(4, 4, (16, 0), torch.float32)
    torch.library.opcheck(recall_store._unpack, (pieces, *index, None, None, 4, 16, 0, torch.float32))
