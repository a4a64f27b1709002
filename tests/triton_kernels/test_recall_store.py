"""Recall's decode step over stores in 8 and 4 bits.

Against the PyTorch step on the same state; interpreted in float32 on a CPU, compiled for every dtype on a GPU.
"""

import pytest
import torch
from packed_groups import Packed, check_packed
from speed.budget import judge
from step_states import RECALLS, check_slots, empty, own_by, step_settings, with_store
from step_states import token_at as new_token
from triton_kernels.test_recall_step import DEVICE, SCALE, check_choice, compare, random_qkv, scratch  # noqa: F401

from condense import Recall, attention
from condense.ops import Extras, unpack_store
from condense.ops.backends import BACKENDS
from condense.ops.recall import GroupIndex, StoreFormat, rotation, split_keys
from condense.ops.recall.index import QUERY_LEVELS
from condense.ops.step import StepCall
from condense.ops.step.pages import Places
from condense.ops.torch import step as torch_step
from condense.ops.triton import recall_store
from condense.ops.triton import step as triton_step
from condense.ops.triton.limits import DTYPES, step_obstacle

CUDA = DEVICE == "cuda"
# name of the case, bits of the store, widths
STORES = [("three-open", 8, (16, 24)), ("g-6", 4, (24, 16)), ("g-1-opened", 4, (16, 16)), ("a-third", 8, (40, 16))]
# read in words
STORES += [("three-open", 4, (64, 128)), ("g-6", 4, (128, 64)), ("g-1-opened", 4, (64, 64))]
if CUDA:
    STORES += [("three-open", bits, widths) for bits in (8, 4) for widths in ((128, 128), (80, 80), (192, 128))]


def with_bits(name, bits=16):
    return with_store(step_settings(RECALLS[name]), bits=bits)


@pytest.mark.parametrize(("name", "bits", "widths"), STORES, ids=str)
def test_stores_in_fewer_bits(name, bits, widths, scratch):  # noqa: F811
    """Bytes of the store, too: those of the definition."""
    compare(*random_qkv(1, 2, 1, 33, *widths), with_bits(name, bits), scratch)


GROUPS = [(4, 16, (64, 128)), (8, 6, (24, 40)), (4, 1, (16, 16)), (8, 16, (48, 0)), (4, 32, (160, 0))]
GROUPS += [(4, 16, (128, 128)), (8, 16, (128, 128)), (4, 16, (576, 0))] if CUDA else []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16] if CUDA else [torch.float32], ids=str)
@pytest.mark.parametrize(("bits", "g", "widths"), GROUPS, ids=str)
def test_groups_of_a_prompt(bits, g, widths, dtype):
    """Many groups at once, views of longer rows, are packed as the definition packs them."""
    form, tokens = StoreFormat(bits, g), torch.randn(2, 2, 3 * g + 1, 2 * sum(widths), device=DEVICE).to(dtype)
    k, v = (x[:, :, 1:].unflatten(2, (3, g)) for x in tokens[..., ::2].split(widths, dim=3))
    got, want = (BACKENDS[name].load().store_groups(form, k, v) for name in ("triton", "torch"))
    packed = (Packed(GroupIndex(*x[:2]), x[2]) for x in (got, want))
    check_packed(*packed, k.flatten(2, 3), v.flatten(2, 3), bits)
    nothing = BACKENDS["triton"].load().store_groups(form, k[:, :, :0], v[:, :, :0])
    assert all(torch.equal(x, y.narrow(2, 0, 0)) for x, y in zip(nothing, want, strict=True))


@pytest.mark.parametrize(("latent", "D"), [(32, 48), (512, 576), (256, 288)] if CUDA else [(32, 48)], ids=str)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_latents(latent, D, bits, scratch):  # noqa: F811
    """Values are columns of the keys, one KV head for all query heads, of which there are two tiles."""
    compare(*random_qkv(1, 20, 1, 30, D, 0), with_bits("three-open", bits), scratch, latent=latent)


@pytest.mark.parametrize(("bits", "message"), [(4, "latents of 48 of 64 columns and store_bits=4"), (16, None)])
def test_latents_that_end_within_a_block_of_the_rotation_are_refused(bits, message):
    """Their columns could not be turned back; with stores of 16 bits nothing is turned."""
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
def test_slots(settings, L, slots, last, scratch):  # noqa: F811
    """The same bits as without, and the slots of the definition; a row pauses."""
    (q, k, v), kinds = random_qkv(1, 2, 1, L, 16, 24), [with_store(settings, slots=n) for n in (0, slots)]
    made = {"rows": 1, "dtype": torch.float32, "device": DEVICE}
    *states, theirs = (empty(kind, L, 1, (16, 24), **made) for kind in (*kinds, kinds[1]))
    for t in range(L):
        counter = torch.tensor(t, device=DEVICE)
        new = new_token((q, k, v), t)._replace(real=torch.tensor([t % 7 != 5], device=DEVICE), counter=counter)
        calls = [StepCall(new, state, kind, scale=SCALE) for kind, state in zip(kinds, states, strict=True)]
        if t < L - last:
            for call in (*calls, StepCall(new, theirs, kinds[1], scale=SCALE)):
                torch_step.step(call, own_by(settings))
            continue
        outs = [triton_step.step(call) for call in calls]
        assert int(counter) == t + len(states)
        assert torch.equal(*outs)
        torch_step.step(StepCall(new, theirs, kinds[1], scale=SCALE), own_by(settings))
        for state in states:
            check_slots(state, settings.rule.chunk)
        # slots hold the bytes of the store, which are held to PyTorch's elsewhere
        for name in ("held", "order"):
            assert torch.equal(getattr(states[1], name), getattr(theirs, name))


def exactly(state, settings, D, Dv):
    """The state in float64, the store as the numbers that are read of it."""
    tokens = settings.store_format.unpack(state.store, D, Dv, torch.float64, state.group_index)
    state = state._replace(store=torch.cat(tokens, dim=3), slots=state.slots[:, :, :0], held=state.held[..., :0])
    return type(state)(*(x.double() if x.is_floating_point() else x.clone() for x in state))


# rows, tokens per group, open groups, heads, soft cap
BUDGETS = [(2, 4, 3, (8, 2), 0.0), (1, 16, 1, (3, 1), 0.5), (1, 32, 1, (2, 2), 1.0)]
if CUDA:
    BUDGETS += [(rows, g, r, (8, 2), 0.0) for rows in (2, 16) for g, r in ((16, 3), (16, 20), (32, 3))]


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("dtype", DTYPES if CUDA else [torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "g", "opened", "heads", "softcap"), BUDGETS, ids=str)
def test_outputs_are_within_the_error_budget(rows, g, opened, heads, softcap, bits, dtype, scratch):  # noqa: F811
    """On a GPU also with as many rows as are read by programs of another size."""
    w, L, widths = (40, 420, (128, 128)) if CUDA else (6, max(40, 5 * g), (16, 24))
    settings = step_settings(Recall(group_size=g, window=w, num_recall=opened, store_bits=bits))
    check_budget(settings, random_qkv(rows, *heads, L, *widths, dtype=dtype), scratch, softcap=softcap)


@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize(("heads", "softcap"), [((8, 2), 0.0), ((3, 1), 0.5), ((8, 1), 0.0)])
def test_lanes_are_within_the_error_budget(heads, softcap, scratch):  # noqa: F811
    settings = step_settings(Recall(group_size=16, window=40, num_recall=3, min_recall=0, store_bits=4))
    qkv = random_qkv(1, *heads, 330, 128, 128, dtype=torch.bfloat16)
    check_budget(settings, qkv, scratch, last=2, softcap=softcap)


def rounds_alike(q):
    """Query heads, bool ``[B, H]``, that are rounded to the same whole numbers in whatever order sums are added up: no
    turned number lies so near the middle of two. Weights of the one token come from these whole numbers.
    """
    x = q[:, :, 0].double() @ rotation(q.shape[3], q.device, torch.float64)
    steps = x / x.abs().amax(-1, keepdim=True) * QUERY_LEVELS
    error = QUERY_LEVELS * q.shape[3] * torch.finfo(torch.float32).eps
    return ((steps - steps.floor() - 0.5).abs() > error).all(-1)


def check_budget(settings, qkv, scratch, last=6, softcap=0.0):  # noqa: F811
    """Twice the error of the same step in PyTorch, all of them over one quantised store. Soft caps come with sinks."""
    exact, (q, k, v), results = with_store(settings, bits=16), qkv, []
    (rows, K, L, D), Dv, dtype = k.shape, v.shape[3], q.dtype
    sinks = torch.linspace(-3, 3, q.shape[1], device=DEVICE) if softcap else None
    given = {"scale": SCALE / 4, "extras": Extras(softcap, sinks)}
    state = empty(settings, L, K, (D, Dv), rows=rows, dtype=dtype, device=DEVICE)
    for t in range(L):
        new = new_token(qkv, t)
        before = type(state)(*(x.clone() for x in state))
        plain = torch_step.step(StepCall(new, state, settings, **given), own_by(settings))
        if t < L - last:
            continue
        wide = exactly(before, settings, D, Dv)
        got = triton_step.step(StepCall(new, before, settings, **given))
        # a group that closes now is rounded and quantised in one of the two only
        if settings.rule.closed(t + 1) == settings.rule.closed(t) and check_choice(
            scratch, new.q, before, settings, SCALE / 4
        ):
            double = type(new)(*(x.double() for x in new[:3]))
            want = torch_step.step(StepCall(double, wide, exact, **given), own_by(exact))
            sure = rounds_alike(new.q)
            results.append([x[sure] for x in (got, want, plain)])
    assert sum(len(got) for got, *_ in results) > 1
    verdict = judge(*(list(x) for x in zip(*results, strict=True)))
    assert verdict.passed, verdict


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("case", ["all-open", "two-open"])
def test_the_largest_numbers_of_float16_stay_finite(case, bits):
    """In tokens of open groups, and in sums; the query is 0, so only infinity changes weights."""
    settings = with_bits(case, bits)
    _, k, v = (x.sign() * (65504 - 2048 * x.abs()) for x in random_qkv(1, 2, 1, 20, 16, 24))
    qkv = [x.to(torch.float16) for x in (torch.zeros(1, 2, 20, 16, device=DEVICE), k, v)]
    made = {"rows": 1, "dtype": torch.float16, "device": DEVICE}
    states = [empty(settings, 20, 1, (16, 24), **made) for _ in range(2)]
    for t in range(20):
        calls = [StepCall(new_token(qkv, t), state, settings, scale=SCALE) for state in states]
        want = torch_step.step(calls[0], own_by(settings))
        got = triton_step.step(calls[1]) if t == 19 else torch_step.step(calls[1], own_by(settings))
    assert bool(got.isfinite().all())
    torch.testing.assert_close(got, want, rtol=2**-9, atol=0)


def test_what_a_piece_holds_begins_at_whole_numbers():
    """Groups of any size, so that steps and zeros are read at their alignment."""
    for g, D, Dv, size in ((1, 16, 24, 4), (3, 10, 6, 4), (5, 2, 2, 8), (6, 128, 64, 2)):
        for bits in (8, 4):
            assert g * StoreFormat(bits, g).width(D, Dv, size) % size == 0


# tokens per group, widths
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
    """Values to the bit; keys are turned back, whose sums are added in another order and then rounded."""
    assert torch.equal(got[1], want[1])
    (k, of_k), D = (got[0], want[0]), got[0].shape[3]
    rounded = 2 * D * torch.finfo(torch.float32).eps + torch.finfo(k.dtype).eps
    size = of_k.double().norm(dim=3, keepdim=True)
    assert bool(((k.double() - of_k.double()).abs() <= rounded * size).all())


# the interpreter cuts numbers off to bfloat16
@pytest.mark.parametrize("dtype", DTYPES if CUDA else [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("g", "widths"), PACKED, ids=str)
def test_a_store_is_unpacked(g, widths, bits, dtype):
    """In a longer buffer, at an odd address, in pages, and of no group."""
    form, pieces, index = packed(bits, g, widths, dtype)
    want = unpack_store(form, pieces, index, widths, dtype, backend="torch")
    longer = torch.full((2, 3, 9, pieces.shape[3]), 255, dtype=torch.uint8, device=DEVICE)[:, :, :5].copy_(pieces)
    odd = torch.empty(pieces.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].view(pieces.shape).copy_(pieces)
    for x in (longer, odd):
        got = unpack_store(form, x, index, widths, dtype, backend="triton")
        check_unpacked(got, want)
    got = unpack_store(form, longer[:, :, :0], index.narrow(0, 0), widths, dtype, backend="triton")
    assert [x.shape for x in got] == [(2, 3, 0, n) for n in widths]
    # slots between pieces, 4 to a page, some of which two rows share
    cache = torch.full((7, 3, 4, -(-pieces.shape[3] // 16) * 16 + 32), 255, dtype=torch.uint8, device=DEVICE)
    pages = cache[..., 16 : 16 + pieces.shape[3]]
    place = torch.randint(0, 28, (2, 1, 5), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    places = Places(place // 4, torch.arange(3, device=DEVICE)[:, None], place % 4)
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
    """Its schema, and what it says of its result before it runs."""
    _, pieces, index = packed(4, 4, (16, 0), torch.float32)
    torch.library.opcheck(recall_store._unpack, (pieces, *index, None, None, 4, 16, 0, torch.float32))
