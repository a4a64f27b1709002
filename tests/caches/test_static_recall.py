"""Recall's static layer: what the growing layer and the whole prompt give, in place, and nothing left by what it
refuses.

Shapes: B rows, H query heads, K KV heads, L tokens, D and DV widths.
"""

import pytest
import torch
from torch.testing import assert_close

import condense
from condense.caches import RecallLayer, StaticRecallLayer, read_request
from condense.ops.tensors.per_row import as_rows
from condense.state import num_entries

METHODS = {
    "bounds": condense.Recall(group_size=4, window=6, num_recall=3),
    "bounds-16-drop": condense.Recall(group_size=4, window=5, num_recall=3, index_bits=16, unchosen="drop"),
    "bounds-4": condense.Recall(group_size=6, window=9, num_recall=2, index_bits=4, index_size=2),
    "means": condense.Recall(group_size=6, window=3, num_recall=1, index="sub_means", index_size=2, rep_bias="none"),
    "no-window": condense.Recall(group_size=3, window=0, num_recall=2, index_size=1),
    "g-1": condense.Recall(group_size=1, window=4, num_recall=5),
    "none-open": condense.Recall(group_size=4, window=6, num_recall=0),
    "matched": condense.Recall(group_size=4, window=6, num_recall=3, value_pooling="weighted", rep_bias="matched"),
    "store-8": condense.Recall(group_size=4, window=6, num_recall=3, store_bits=8),
    "entries-4": condense.Recall(group_size=4, window=6, num_recall=3, entry_bits=4),
    "a-fifth": condense.Recall(group_size=4, window=6, num_recall=0.2),
    "all-open": condense.Recall(group_size=4, window=6, num_recall=999),
}
FEW = {name: METHODS[name] for name in ("bounds", "bounds-4", "no-window")}
B, H, K, D, DV = 3, 4, 2, 6, 5
SCALE = 0.7
EXACT = {"rtol": 0, "atol": 1e-12}
LENGTH = 400


@pytest.fixture(params=METHODS.values(), ids=METHODS)
def method(request):
    return request.param


@pytest.fixture(params=FEW.values(), ids=FEW)
def few(request):
    return request.param


def _qkv(L, seed=0, rows=B):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((H, D), (K, D), (K, DV))
    return [torch.randn(rows, n, L, width, generator=generator, dtype=torch.float64) for n, width in sizes]


def _read(layer, qkv, counts=None):
    """Outputs of new tokens ``[B, H, L, DV]``; rows with fewer than L get garbage or 0 before their first."""
    q, k, v = qkv
    if q.shape[2] == 1 and (layer.is_compileable or layer.is_initialized):
        assert layer.can_step(k, v)
        real = None if counts is None else counts > 0
        return layer.step(q, k, v, scale=SCALE, real=real if real is None or layer.is_compileable else real.long())
    context = layer.read(k, v, read_request(q, scale=SCALE, counts=counts))
    return layer.method.attend(q, context, scale=SCALE)[0]


def _addresses(layer):
    return [x.data_ptr() for x in (*layer.buffers, layer.num_slots)]


@pytest.mark.parametrize("ragged", [False, True], ids=["alike", "ragged"])
def test_many_steps_and_chunks_equal_the_growing_layer_and_the_whole(method, ragged):
    check_steps_and_chunks(method, ragged, (9, *[1] * 40, 30, 1, 2, *[1] * 25, 17, *[1] * 15))


@pytest.mark.slow
@pytest.mark.parametrize("ragged", [False, True], ids=["alike", "ragged"])
def test_300_steps_and_chunks_equal_the_growing_layer_and_the_whole(ragged):
    check_steps_and_chunks(METHODS["bounds"], ragged, (9, *[1] * 60, 30, 1, 2, *[1] * 180, 17, *[1] * 60))


def check_steps_and_chunks(method, ragged, sizes):
    """Chunks in between, steps of which a row makes none, and all tokens of a row at once."""
    static, growing = StaticRecallLayer(method, LENGTH), RecallLayer(method)
    generator = torch.Generator().manual_seed(3)
    rows, outs = ([[[], [], []] for _ in range(B)] for _ in range(2))
    for seed, L in enumerate(sizes):
        counts = torch.randint(0, L + 1, (B,), generator=generator) if ragged else torch.full((B,), L)
        qkv = _qkv(L, seed)
        addresses = None if static.buffers is None else _addresses(static)
        got, want = (_read(layer, qkv, counts if ragged else None) for layer in (static, growing))
        for row, n in enumerate(counts.tolist()):
            assert_close(got[row, :, L - n :], want[row, :, L - n :], **EXACT)
            outs[row][0].append(got[row, :, L - n :])
            for parts, x in zip(rows[row], qkv, strict=True):
                parts.append(x[row, :, L - n :])
        assert static.buffers.seen.tolist() == as_rows(growing.state.seen, B).tolist()
        assert int(static.get_seq_length()) == static.count_slots() == growing.get_seq_length()
        assert addresses is None or _addresses(static) == addresses
    for parts, out in zip(rows, outs, strict=True):
        qkv = [torch.cat(x, dim=1)[None] for x in parts]
        want = condense.attention(*qkv, method=method, scale=SCALE, backend="reference")
        assert_close(torch.cat(out[0], dim=1)[None], want, **EXACT)


def test_what_is_kept_of_groups_is_what_the_growing_layer_keeps(method):
    static, growing = StaticRecallLayer(method, LENGTH), RecallLayer(method)
    counts = torch.tensor([20, 33, 27])
    for qkv, n in ((_qkv(33), counts), (_qkv(1, 1), None), (_qkv(12, 2), torch.tensor([12, 0, 5])), (_qkv(1, 3), None)):
        _read(static, qkv, n)
        _read(growing, qkv, n)
    for row, groups in enumerate(as_rows(num_entries(method, growing.state.seen), B).tolist()):
        kept = static.buffers.entries(static.settings)
        sizes = [1] * (len(kept) - 1) + [method.group_size]
        for mine, theirs, size in zip(kept, growing.state.entries, sizes, strict=True):
            assert mine.dtype == theirs.dtype
            n = groups * size
            assert_close(mine[row, :, :n], theirs[row, :, :n], rtol=0, atol=0 if mine.dtype == torch.uint8 else 1e-12)


def test_reorder_is_in_place(few):
    static, growing = StaticRecallLayer(few, LENGTH), RecallLayer(few)
    counts = torch.tensor([20, 33, 27])
    for layer in (static, growing):
        layer.reorder_cache(torch.tensor([2, 1, 0]))  # nothing there yet
        _read(layer, _qkv(33), counts)
    addresses = _addresses(static)
    for layer in (static, growing):
        layer.reorder_cache(torch.tensor([2, 0, 0]))
    for i in range(20):
        assert_close(_read(static, _qkv(1, i)), _read(growing, _qkv(1, i)), **EXACT)
    assert _addresses(static) == addresses


def test_reset_is_in_place(few):
    layer, fresh = StaticRecallLayer(few, LENGTH), StaticRecallLayer(few, LENGTH)
    layer.reset()
    _read(layer, _qkv(33))
    addresses = _addresses(layer)
    layer.reset()
    assert int(layer.get_seq_length()) == layer.count_slots() == 0
    assert not any(bool(x.any()) for x in layer.buffers)
    for L in (21, 1, 1, 5):
        assert torch.equal(_read(layer, _qkv(L, L)), _read(fresh, _qkv(L, L)))
    assert _addresses(layer) == addresses


def test_the_first_tokens_may_come_one_by_one(method):
    layer, qkv = StaticRecallLayer(method, 40), _qkv(40)
    layer.skip_prompt()
    got = torch.cat([_read(layer, [x[:, :, i : i + 1] for x in qkv]) for i in range(40)], dim=2)
    assert_close(got, condense.attention(*qkv, method=method, scale=SCALE, backend="reference"), **EXACT)


def test_compiled_steps_are_one_graph(few):
    static, growing = StaticRecallLayer(few, LENGTH), RecallLayer(few)
    torch._dynamo.reset()
    step = torch.compile(static.step, backend="eager", fullgraph=True, dynamic=False)
    for layer in (static, growing):
        _read(layer, _qkv(33))
    for i in range(9):
        q, k, v = _qkv(1, i)
        assert_close(step(q, k, v, scale=SCALE), _read(growing, (q, k, v)), **EXACT)
    assert static.count_slots() == int(static.num_slots) == 42
    assert_close(_read(static, _qkv(7)), _read(growing, _qkv(7)), **EXACT)
    # a replayed graph counts on the device alone, so its caller gives the length
    static.num_slots.add_(2)
    assert static.count_slots() == 51
    static.know_slots(50)
    assert static.count_slots() == 50


def test_latents(few):
    """One KV head whose values are the first columns of its keys: absorbed queries, steps and chunks."""
    static, width = StaticRecallLayer(few, 90), 4
    q, k, _ = (x[:, : H if i == 0 else 1] for i, x in enumerate(_qkv(90)))
    no_v = k[..., :0]
    request = read_request(q[:, :, :40], scale=SCALE, latent_width=width)
    static.read(k[:, :, :40], no_v[:, :, :40], request)
    steps = [
        static.step(*(x[:, :, i : i + 1] for x in (q, k, no_v)), scale=SCALE, latent_width=width) for i in range(40, 90)
    ]
    want = condense.attention(q, k, k[..., :width], method=few, scale=SCALE, backend="reference")
    assert_close(torch.cat(steps, dim=2), want[:, :, 40:], **EXACT)
    assert static.buffers.entries_v.numel() == 0
    assert static.buffers.store.shape[3] == D


@pytest.mark.parametrize("L", [1, 3])
def test_a_full_cache_refuses_and_stays(few, L):
    layer = StaticRecallLayer(few, 40)
    _read(layer, _qkv(40))
    before = [x.clone() for x in (*layer.buffers, layer.num_slots)]
    with pytest.raises(ValueError, match=f"got 40 and {L} more; make it longer"):
        _read(layer, _qkv(L))
    assert all(torch.equal(x, y) for x, y in zip((*layer.buffers, layer.num_slots), before, strict=True))


FIRST = {
    "too-long": (METHODS["bounds"], _qkv(41), "got 0 and 41 more; make it longer"),
    "odd-width": (METHODS["bounds-4"], [x[..., :5] for x in _qkv(3)], "index_bits=4 needs an even key width, got 5"),
    "odd-width-step": (METHODS["bounds-4"], [x[..., :5] for x in _qkv(1)], "needs an even key width, got 5"),
}


@pytest.mark.parametrize(("method", "qkv", "message"), FIRST.values(), ids=FIRST)
def test_a_first_call_that_is_refused_leaves_no_memory(method, qkv, message):
    layer = StaticRecallLayer(method, 40)
    with pytest.raises(ValueError, match=message):
        _read(layer, qkv)
    assert layer.buffers is None
    assert not layer.is_initialized
    assert layer.get_seq_length() == layer.count_slots() == 0
    out = _read(layer, _qkv(40))
    want = condense.attention(*_qkv(40), method=method, scale=SCALE, backend="reference")
    assert_close(out, want, **EXACT)


@pytest.mark.parametrize(
    ("length", "dtype", "wide"), [(100, torch.float32, 4), (100, torch.bfloat16, 4), (5, torch.float64, 8)]
)
def test_bytes(length, dtype, wide):
    """All closed groups of ``length`` tokens with entries, index and tokens, window and one group, and two counters."""
    method = condense.Recall(group_size=4, window=6, num_recall=2, index_bits=8)
    layer = StaticRecallLayer(method, length)
    layer.lazy_initialization(*[x.to(dtype) for x in _qkv(0)[1:]])
    groups, ring = max(0, length - 6) // 4, min(length, 10)
    numbers = (groups * (1 + 4) + ring) * (D + DV) * dtype.itemsize
    index = groups * (2 * 2 * D + 2 * wide)
    assert (
        sum(x.untyped_storage().nbytes() for x in (*layer.buffers, layer.num_slots))
        == B * (K * (numbers + index) + 8) + 8
    )
