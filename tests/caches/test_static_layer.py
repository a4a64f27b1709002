"""The static layer: what the growing layer computes, in place, within its size, and unchanged by what it refuses."""

import math
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from grids import fixture_of
from layers import Counting, draw, read
from models import tiny
from oracles import cases
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

import condense
from condense.caches import CondensedLayer, Expected, StaticCondensedLayer
from condense.caches.buffers import room_of
from condense.ops import NewToken
from condense.ops.tensors.per_row import as_rows
from condense.state import first_entries, most_entries, num_entries

NAMES = "cca-streaming-window0 lca-4-bits matched-cca matched-dga-streaming"
METHODS = tiny.METHODS | cases.RECALLS | {name: cases.PLANS[name] for name in NAMES.split()}
METHODS["wide-groups"] = condense.CCA(group_size=7, window=5, summary="streaming", num_summary_queries=9)
METHODS["g-1"] = condense.LCA(group_size=1, window=3)
METHODS["select-no-focal"] = tiny.SELECT.replace(gamma=0, min_focal=0, rep_bias="none")
METHODS |= {name: method for name, (model, method) in tiny.WHOLE.items() if model == "llama"}
B, K, D = 3, 2, 6
SCALE = 0.7
EXACT = {"rtol": 0, "atol": 1e-12}
LENGTH = 400
_qkv = partial(draw, rows=B)
MANY = (9, *[1] * 40, 30, 1, 2, *[1] * 25, 17, *[1] * 15)
SIZES = {"alike": (MANY, False), "ragged": (MANY, True), "from a first token": ([1] * 40, False)}
method = fixture_of(METHODS)


@pytest.mark.parametrize(("sizes", "ragged"), SIZES.values(), ids=SIZES)
def test_many_steps_and_chunks_equal_the_growing_layer(method, sizes, ragged):
    static, growing = StaticCondensedLayer(method, LENGTH), CondensedLayer(method)
    generator = torch.Generator().manual_seed(3)
    for seed, L in enumerate(sizes):
        counts = torch.randint(0, L + 1, (B,), generator=generator) if ragged else None
        qkv = _qkv(L, seed)
        addresses = None if static.buffers is None else [x.data_ptr() for x in static.buffers]
        got, want = read(static, qkv, counts), read(growing, qkv, counts)
        for row, n in enumerate([L] * B if counts is None else counts.tolist()):
            assert_close(got[row, :, L - n :], want[row, :, L - n :], **EXACT)
        assert static.buffers.seen.tolist() == as_rows(growing.state.seen, B).tolist()
        if method.layout.choice is None:
            assert static.buffers.first.T.tolist() == [as_rows(x, B).tolist() for x in growing.state.first]
        assert int(static.get_seq_length()) == static.count_slots() == growing.get_seq_length()
        assert addresses is None or [x.data_ptr() for x in static.buffers] == addresses


def test_reorder_is_in_place(method):
    static, growing = StaticCondensedLayer(method, LENGTH), CondensedLayer(method)
    for layer in (static, growing):
        layer.reorder_cache(torch.tensor([2, 1, 0]))  # an empty cache
        read(layer, _qkv(33), torch.tensor([20, 33, 27]))
    addresses = [x.data_ptr() for x in static.buffers]
    for layer in (static, growing):
        layer.reorder_cache(torch.tensor([2, 0, 0]))
    assert [x.data_ptr() for x in static.buffers] == addresses
    for i in range(20):
        assert_close(read(static, _qkv(1, i)), read(growing, _qkv(1, i)), **EXACT)


def test_reset_is_in_place(method):
    layer = StaticCondensedLayer(method, LENGTH)
    layer.reset()
    read(layer, _qkv(33))
    addresses = [x.data_ptr() for x in (*layer.buffers, layer.num_slots)]
    layer.reset()
    assert int(layer.get_seq_length()) == 0
    assert not any(bool(x.any()) for x in layer.buffers)
    assert layer.can_step(*_qkv(1)[1:]) == (not method.reads_prompt)
    fresh = StaticCondensedLayer(method, LENGTH)
    fresh.lazy_initialization(*_qkv(0)[1:], room=(layer.buffers.entries_k.shape[2], layer.buffers.ring_k.shape[2]))
    for L in (21, 1, 1, 5):
        assert torch.equal(read(layer, _qkv(L, L)), read(fresh, _qkv(L, L)))
    assert [x.data_ptr() for x in (*layer.buffers, layer.num_slots)] == addresses


# all methods but those that choose: tokens of a prompt, or groups, for which the host must know how many
UNCHOOSING = [x for x in METHODS.values() if not x.reads_prompt and x.layout.choice is None]


@pytest.mark.parametrize("method", UNCHOOSING, ids=str)
def test_the_host_looks_at_nothing_for_a_prompt_and_eager_steps(method):
    layer = StaticCondensedLayer(method, LENGTH)
    for _ in range(2):
        with Counting() as counting:
            for L in (33, 1, 1):
                read(layer, _qkv(L, L))
            layer.reset()
        # on a GPU to look at a number in a tensor is to wait for it
        assert "aten._local_scalar_dense.default" not in counting.names


def test_steps_are_one_graph_and_the_host_does_not_trust_its_count_once_they_are_recorded(method):
    static, growing = StaticCondensedLayer(method, LENGTH), CondensedLayer(method)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    step = torch.compile(static.step, backend=counter, fullgraph=True, dynamic=False)
    for layer in (static, growing):
        read(layer, _qkv(33))
    for i in range(12):
        (q, k, v), real = _qkv(1, i), torch.tensor([i % 5 != 1, True, i % 3 != 1])
        want = read(growing, (q, k, v), real.long())
        assert_close(step(NewToken(q, k, v, real), scale=SCALE)[real], want[real], **EXACT)
    assert static.count_slots() == int(static.num_slots) == 45
    assert counter.frame_count == 1
    assert_close(read(static, _qkv(7)), read(growing, _qkv(7)), **EXACT)
    static.reset()
    static.num_slots.add_(2)  # as a replayed graph does, unseen by the host
    assert static.count_slots() == 2
    # a caller that knows the count gives it, and the device is not asked again
    static.know_slots(2)
    static.num_slots.add_(1)
    assert static.count_slots() == 2


SELECTIONS = {name: method for name, method in METHODS.items() if method.reads_prompt}


@pytest.mark.parametrize("method", SELECTIONS.values(), ids=SELECTIONS)
def test_prompts_of_any_length_follow_one_another_at_the_same_addresses(method):
    layer = StaticCondensedLayer(method, 90)
    layer.skip_prompt()
    read(layer, _qkv(1))
    addresses = [x.data_ptr() for x in (*layer.buffers, layer.num_slots)]
    ragged = [(counts[0], torch.tensor(counts)) for counts in ((3, 0, 1), (70, 11, 5), (25, 24, 2))]
    for L, counts in ((90, None), (1, None), *ragged):
        layer.reset()
        growing = CondensedLayer(method)
        for qkv, n in [(_qkv(L, L), counts), *((_qkv(1, i), None) for i in range(90 - L))]:
            got, want = read(layer, qkv, n), read(growing, qkv, n)
        if L < 90:
            assert_close(got, want, **EXACT)
        assert [x.data_ptr() for x in (*layer.buffers, layer.num_slots)] == addresses


@pytest.mark.parametrize("method", SELECTIONS.values(), ids=SELECTIONS)
def test_a_prompt_takes_what_it_and_later_tokens_need(method):
    layer = StaticCondensedLayer(method, 90)
    read(layer, _qkv(40), torch.tensor([40, 33, 27]))
    rooms = {n: num_entries(method, 50, first_entries(method, n)) for n in (40, 33, 27)}
    assert layer.buffers.entries_k.shape[2] == max(rooms.values())
    for i in range(50):
        read(layer, _qkv(1, i))
    growing = CondensedLayer(method)
    layer.reset()
    for qkv in (_qkv(80), *(_qkv(1, i) for i in range(10))):  # a prompt that leaves more
        assert_close(read(layer, qkv), read(growing, qkv), **EXACT)
    assert layer.buffers.entries_k.shape[2] == max(num_entries(method, 10, first_entries(method, 80)), *rooms.values())


def test_a_prompt_that_is_refused_leaves_rows_dtype_and_room_as_they_were():
    layer, fresh = (StaticCondensedLayer(tiny.SELECT, 90) for _ in range(2))
    for first, later in ((_qkv(20, dtype=torch.float32), _qkv(10, rows=2)), (_qkv(80, rows=2), _qkv(5, rows=2))):
        buffers = layer.buffers
        tiny.refused("allow_future", read, layer, (first[0].requires_grad_(), *first[1:]))
        assert layer.buffers is buffers
        assert torch.equal(read(layer, later), read(fresh, later))
        layer.reset()
        fresh = StaticCondensedLayer(tiny.SELECT, 90)


def test_tokens_that_are_expected(method):
    first, told = Expected.ANY, Expected.PLAIN_PROMPT
    if method.reads_prompt:
        first = told = Expected.FIRST_ENTRIES
    layer = StaticCondensedLayer(method, LENGTH)
    for _ in range(2):  # the next prompt may have padding
        assert layer.expected is first
        layer.expect_prompt(plain=True)
        assert layer.expected is told
        layer.reset()
    read(layer, _qkv(2))
    layer.expect_prompt(plain=True)  # ignored: the layer holds tokens already
    assert layer.expected is Expected.ANY
    layer.reset()
    layer.skip_prompt()
    assert layer.expected is Expected.ANY


def test_contract():
    layer = StaticCondensedLayer(tiny.CCA, 50)
    flags = layer.is_compileable, layer.is_croppable, layer.is_sliding, layer.is_initialized
    assert flags == (True, False, False, False)
    assert (layer.get_seq_length(), layer.get_max_length(), layer.get_max_cache_shape()) == (0, 50, 50)
    assert layer.buffers is None
    layer.lazy_initialization(*_qkv(0)[1:])  # as transformers' early_initialization does
    assert (layer.is_initialized, layer.batch_size) == (True, B)
    read(layer, _qkv(20))
    assert layer.get_seq_length() == 20
    assert layer.get_mask_sizes(1) == layer.get_mask_sizes(7) == (50, 0)
    assert layer.buffers.ring_k.shape == layer.buffers.ring_v.shape == (B, K, tiny.G + tiny.W, D)


REFUSED = {
    "crop": (lambda layer: layer.crop(-1), "cannot take tokens back"),
    "repeat": (lambda layer: layer.batch_repeat_interleave(2), "keeps its number of rows"),
    "offload": (lambda layer: layer.offload(), "stays where it is"),
    "stock": (lambda layer: layer.update(*_qkv(3)[1:]), "fill: call condense.apply"),
    "more-rows": (lambda layer: read(layer, _qkv(2, rows=4)), "wanted 3 rows, for which it was made, got 4"),
    "dtype": (lambda layer: read(layer, _qkv(1, dtype=torch.float32)), "float64, .*, got torch.float32; .* autocast"),
    "too-many": (lambda layer: read(layer, _qkv(7)), r"at most 40 tokens .*, got 34 and 7 more; .* a cache that grows"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_and_unchanged(call, message):
    layer = StaticCondensedLayer(tiny.STREAMING_6, 40)
    read(layer, _qkv(34))
    before = [x.clone() for x in (*layer.buffers, layer.num_slots)]
    tiny.refused(message, call, layer)
    assert all(torch.equal(x, y) for x, y in zip((*layer.buffers, layer.num_slots), before, strict=True))
    joined = [torch.cat(xs, dim=2) for xs in zip(_qkv(34), _qkv(6, 5), strict=True)]
    want = condense.attention(*joined, method=tiny.STREAMING_6, scale=SCALE)[:, :, 34:]
    assert_close(read(layer, _qkv(6, 5)), want, **EXACT)


@dataclass(frozen=True, kw_only=True)
class _Listed(condense.CCA):  # a method of somebody's own, which has no hash
    numbers: list[int] = field(default_factory=list)


def test_a_method_with_a_list_among_its_settings():
    read(StaticCondensedLayer(_Listed(), 40), _qkv(30))


@pytest.mark.parametrize(("prompt", "length"), [(1500, 1600), (4096, 4352), (8192, 8448), (130072, 131072)])
def test_entries_after_a_prompts_selection(prompt, length):
    """Focal tokens, groups, the chunks that can follow and the ring; whatever prompt comes, a little more."""
    method, focal = condense.DGA(selection="prompt"), max(math.ceil(prompt / 10), 1024)
    wanted = focal + (prompt - focal) / 16 + 3 * (length - prompt) / 18 + 18 + 1
    layer = StaticCondensedLayer(method, length)
    needed = num_entries(method, length - prompt, first_entries(method, prompt))
    layer.lazy_initialization(*[torch.zeros(1, 1, prompt, 1)] * 2, room=room_of(method, needed, length - prompt))
    assert sum(x.shape[2] for x in (layer.buffers.entries_k, layer.buffers.ring_k)) <= 1.02 * wanted
    streaming = num_entries(method.replace(selection="streaming"), length)
    assert needed <= most_entries(method, length) <= streaming + (1024 + 16) * (1 - 3 / 18) + 3
