"""The growing layer on the Triton step: what `extend` computes, in place; of Recall, the bits of single operations."""

import copy
import weakref
from functools import partial

import pytest
import torch
from grids import fixture_of
from lanes import DEVICE
from layers import CHANGES, Counting, draw, read
from models import tiny
from oracles import cases
from step_states import SELECT, check_slots
from torch.utils._python_dispatch import _disable_current_modes
from transformers import DynamicCache

import condense
from condense.caches import CondensedLayer, cache_nbytes, store
from condense.caches.ring import room_for
from condense.caches.store import finish_writes
from condense.ops import Extras, NewToken, StepState, decode_step
from condense.ops.tensors.per_row import as_rows
from condense.ops.triton.launch import Prepared
from condense.state import SLACK

NAMES = "cca lca lca-9-queries lca-1-query lca-4-bits lca-mean-max dga-all-focal dga-streaming-log_size streaming_llm"
METHODS = {name: cases.PLANS[name] for name in (*NAMES.split(), "dense")} | {
    "cca-window-0": condense.CCA(group_size=3, window=0, rep_bias="log_size"),
    "prompt-summary": condense.CCA(group_size=4, window=6, summary="prompt"),
    "dga-prompt": SELECT,
    "lm-infinite": condense.LMInfinite(n_global=20, window=5),
}
TAKING_BACK = ("cca", "lca", "lca-9-queries", "dga-streaming-log_size", "dga-prompt", "streaming_llm", "recall")
RECALL = condense.Recall(group_size=4, window=6, num_recall=2, min_recall=2)
RECALLS = {
    "recall": RECALL, "drop": RECALL.replace(unchosen="drop"), "a-share": RECALL.replace(num_recall=0.4),
    "store-4": RECALL.replace(store_bits=4), "host": RECALL.replace(store="host", slots=3),
    "exact-prompt": RECALL.replace(prompt="exact", store_bits=8),
}  # fmt: skip
EITHER = METHODS | RECALLS
B, H, K, D = 2, 2, 1, 16
SCALE = 0.3
draw_tokens = partial(draw, rows=B, heads=(H, K), widths=(D, D), dtype=torch.float32, device=DEVICE)
method = fixture_of(METHODS)


@pytest.fixture(autouse=True)
def stepping(monkeypatch):
    """As on a GPU: "auto" takes the kernels."""
    if DEVICE == "cpu":
        monkeypatch.setattr(store, "step_backend", lambda *args, **kwargs: "triton")


class Reading(CondensedLayer):
    def can_step(self, *args):
        return False


class Operating(CondensedLayer):
    def read(self, *args):
        context = super().read(*args)
        self._ring._decode = partial(decode_step, represent=None, backend="triton")
        return context


def read_by(layer, qkv, counts=None, extras=None):
    """Outputs of new tokens, of single ones by steps where the layer can."""
    q, k, v = qkv
    if extras is not None:
        return layer.step(NewToken(q, k, v, counts), scale=SCALE, extras=extras)
    out = read(layer, qkv, counts, scale=SCALE, backend="torch")
    if DEVICE == "cuda" and layer.method.layout.choice is not None:
        finish_writes(layer._ring.buffers)
    return out


def pair(method):
    """The layer, and what it is held to: the same past without steps; of Recall, steps by one operation each."""
    return CondensedLayer(method), (Reading if method.layout.choice is None else Operating)(method)


def agree(layers, L, seed, counts=None, rows=B, qkv=None, extras=None):
    """Both read the same, rows with fewer tokens from their first; operations give the bits of outputs and state."""
    qkv = draw_tokens(L, seed, rows=rows) if qkv is None else qkv
    # PyTorch's fused attention reads 16 bytes at once, wherever its tensors begin
    plain = [x.clone() for x in qkv]
    got, want = (read_by(layer, x, counts, extras) for layer, x in zip(layers, (qkv, plain), strict=True))
    if isinstance(layers[1], Operating):
        one, other = (layer._ring for layer in layers)
        if DEVICE == "cuda":
            torch.cuda.synchronize()  # kernels write to host memory too
        assert torch.equal(got, want)
        assert all(torch.equal(x, y) for x, y in zip(one.buffers, other.buffers, strict=True))
        assert other._prepared is None
        return
    for row, n in enumerate([L] * rows if counts is None else counts.tolist()):
        got_row, want_row = got[row, :, L - n :], want[row, :, L - n :]
        # entries, weights and sums in float32: a few units in the last place
        few = 32 * torch.finfo(torch.float32).eps * want_row.abs().max() if n else 0
        assert bool(((got_row - want_row).abs() <= few).all())


def read_in_turn(layers, *sizes, seed=0, rows=B):
    for i, L in enumerate(sizes):
        agree(layers, L, seed + i, rows=rows)


def _same_numbers(one, other, rows=B):
    assert one.get_seq_length() == other.get_seq_length()
    mine, theirs = one.state, other.state
    assert as_rows(mine.seen, rows).tolist() == as_rows(theirs.seen, rows).tolist()
    assert [as_rows(x, rows).tolist() for x in mine.first] == [as_rows(x, rows).tolist() for x in theirs.first]
    # without entries their width is that of tokens in one of the two
    assert [x.shape[:3] for x in mine.entries] == [x.shape[:3] for x in theirs.entries]


MANY = (9, *[1] * 18, 7, 1, 2, *[1] * 7)
SIZES = {"alike": (MANY, False), "ragged": (MANY, True), "from a first token": ([1] * 14, False)}


@pytest.mark.parametrize(("sizes", "ragged"), SIZES.values(), ids=SIZES)
def test_steps_and_chunks_equal_extend(method, sizes, ragged):
    layers, generator = pair(method), torch.Generator().manual_seed(3)
    assert not layers[0].can_step(*draw_tokens(1)[1:]), "a first token is a prompt"
    for seed, L in enumerate(sizes):
        counts = torch.randint(0, L + 1, (B,), generator=generator) if ragged else None
        agree(layers, L, seed, counts)
        _same_numbers(*layers)
    assert layers[0]._ring is not None
    assert layers[1]._ring is None


@pytest.mark.parametrize("name", TAKING_BACK)
def test_tokens_are_taken_back_in_the_middle_of_steps(name):
    layers = pair(EITHER[name])
    agree(layers, 31, 0)
    few = name == "recall" and DEVICE == "cpu"
    for count, L in ((1, 3), (SLACK, 5), (4, 5)) if few else ((1, 3), (SLACK, SLACK), (4, 9), (7, 7)):
        read_in_turn(layers, *[1] * L, seed=100)
        for layer in layers:
            layer.crop(-count)
        assert layers[0]._ring is not None
        _same_numbers(*layers)
    read_in_turn(layers, 1, 1, 1, 5, *[1] * (1 if few else 4), seed=200)
    _same_numbers(*layers)
    for layer in layers:
        layer.reset()
        assert layer.state is None
    read_in_turn(layers, 11, 1, 1, 1)


REFUSED = {
    "beyond the slack": (lambda layer: layer.crop(-39), "propose fewer tokens"),
    "more than seen": (lambda layer: layer.crop(-46), "more than the 45 seen"),
    "padding": (lambda layer: layer.crop(-4), "include padding"),
    "dtype": (lambda layer: read_by(layer, draw_tokens(1, dtype=torch.float64)), "got torch.float64; .* autocast"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_and_unchanged_among_steps(call, message):
    layers = pair(METHODS["lca"])
    counts = torch.tensor([1, 0]) if message == "include padding" else None
    for i, L in enumerate((40, 1, 1, 1, 1, 1)):
        agree(layers, L, i, counts if i == 2 else None)
    state = [x.clone() for x in layers[0]._ring.buffers]
    for layer in layers:
        tiny.refused(message, call, layer)
    assert all(map(torch.equal, state, layers[0]._ring.buffers))
    for layer in layers:
        layer.crop(-3)
    _same_numbers(*layers)
    read_in_turn(layers, 1, 1, 1, seed=9)


@pytest.mark.parametrize("name", ["lca", "dga-prompt", "recall"])
@pytest.mark.parametrize(("change", "rows"), CHANGES.values(), ids=CHANGES)
def test_rows_follow_in_the_middle_of_steps(change, rows, name):
    layers = pair(EITHER[name])
    agree(layers, 23, 0, torch.tensor([23, 14, 17]), rows=3)
    read_in_turn(layers, 1, rows=3)  # closes a group of the last row
    for layer in layers:
        change(layer)
    assert layers[0]._ring is not None
    read_in_turn(layers, 1, 1, 4, 1, rows=len(rows))  # the second closes one of the first row
    _same_numbers(*layers, rows=len(rows))


@pytest.mark.parametrize("name", ["cca", "recall"])
def test_rows_that_are_left_out_and_shorter_buffers_free_their_memory(name):
    """At once, before the next step: a prepared one does not keep the old buffers."""
    layer = CondensedLayer(EITHER[name])
    for L in (20, 1):
        read_by(layer, draw_tokens(L))
    old = [weakref.ref(x) for x in layer._ring.buffers]
    layer.batch_select_indices(torch.tensor([1], device=DEVICE))
    assert not any(x() is not None for x in old)
    store = weakref.ref(layer._ring.buffers.store)
    read_by(layer, draw_tokens(4 * room_for(20), rows=1))
    assert store() is None


@pytest.mark.parametrize("name", [*METHODS, "recall", "store-4", "host"])
def test_a_step_allocates_and_starts_kernels(name, monkeypatch):
    """But for the steps that make room, which pad; nothing is put together, looked at or made anew. What the
    interpreter does for kernels is not counted.
    """
    layer, made_room, recalls, started, start = CondensedLayer(EITHER[name]), 0, name in RECALLS, [], Prepared.__call__

    def note(prepared, tensors):
        started.append(prepared)
        with _disable_current_modes():
            start(prepared, tensors)

    monkeypatch.setattr(Prepared, "__call__", note)
    memory = ["aten.empty.memory_format", *["aten.split_with_sizes.default"] * recalls]
    memory += [*memory, memory[0]]
    for L in (50, 1):
        read_by(layer, draw_tokens(L))
    for i in range(20 if DEVICE == "cuda" else 4 if recalls else 8):
        started.clear()
        new, before = draw_tokens(1, i), layer._ring.buffers
        with Counting() as counting:
            read_by(layer, new)
        others = counting.names[: -len(memory)]
        assert counting.names[-len(memory) :] == memory
        assert len(started) == (5 if recalls else 1)
        if layer._ring.buffers is before:
            assert not others
        else:
            made_room += 1
            assert recalls or (set(others) == {"aten.constant_pad_nd.default"} and len(others) <= 4)
    assert made_room <= 2


def test_slots_grow_with_the_groups():
    """The bits of steps without slots; as many as groups, so a group that was open once stays in one."""
    layers = [CondensedLayer(RECALL.replace(store="host", slots=n)) for n in (0, 40)]
    held = {-1}
    for i, (L, S) in enumerate(((66, 16), *[(1, 16)] * 7, *[(1, 32)] * 2)):
        assert torch.equal(*(read_by(layer, draw_tokens(L, i)) for layer in layers))
        buffers = StepState._make(x.cpu() for x in layers[1].buffers)
        assert buffers.held.shape[2] == S
        check_slots(buffers, 4)
        before, held = held, set(buffers.held[0, 0].tolist())
        assert before <= held
    assert len(held) > 5


@pytest.mark.parametrize("name", ["cca-window-0", "lca-9-queries", "dga-prompt", "lm-infinite", "dense"])
def test_room_to_spare_is_bounded(name):
    """The buffers against what a past of its own takes: at most 16 slots and one in 32 more, and the slack."""
    method = METHODS[name]
    layer, plain = pair(method)
    cache = DynamicCache()
    cache.layers = [layer]
    read_in_turn((layer, plain), 3)
    for i in range(45 if DEVICE == "cuda" else 24):
        agree((layer, plain), 1, i)
        past, state, rule = plain.state, layer._ring.buffers, method.layout.rule
        entries, tokens = past.entries[0].shape[2], past.seen
        most = entries + rule.entries
        assert entries <= state.entries_k.shape[2] <= most + most // 32 + 16
        window = tokens if rule.window is None else rule.window
        assert state.ring_k.shape[2] <= min(tokens + tokens // 32 + 16, window + rule.chunk + SLACK + 16)
        assert state.ring_q.shape[2] <= method.layout.num_summary + SLACK - 1
        whole = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in state}
        assert cache_nbytes(cache) == sum(whole.values())


def test_a_past_is_its_own():
    layer = CondensedLayer(METHODS["cca"])
    for L in (30, 1, 1):
        read_by(layer, draw_tokens(L, L))
    before = layer.state.tensors
    kept = [x.clone() for x in before]
    layer.crop(-10)
    for i in range(10):
        read_by(layer, draw_tokens(1, 50 + i))
    assert all(map(torch.equal, before, kept))


@pytest.mark.parametrize("name", ["lca", "host"])
def test_a_copy_goes_its_own_way(name):
    layers = pair(EITHER[name])
    read_in_turn(layers, 20, 1)
    twins = copy.deepcopy(layers)
    assert twins[0]._ring._prepared is None
    read_in_turn(twins, 1, 1, 1)
    read_in_turn(layers, 1, 1, 1, seed=50)


@pytest.mark.parametrize("name", ["lca", "recall"])
def test_tokens_that_are_laid_out_in_turn_in_several_ways(name):
    """A step is prepared for one way; for another it is prepared anew."""
    layers, sink = pair(EITHER[name]), torch.ones(H + 1, device=DEVICE)
    read_in_turn(layers, 20, 1)
    for i in range(4 if name == "lca" else 1):
        q, k, v = plain = draw_tokens(1, i)
        wide = [torch.cat([x, x], dim=3)[..., :D] for x in plain]
        spread = [torch.stack([x, x], dim=4)[..., 0] for x in plain]
        shifted = [torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x) for x in plain]
        tokens = [wide, plain, spread, (shifted[0], k, v), (q, shifted[1], v), (q, k, shifted[2])]
        kinds = ((2.0, sink[:H]), (2.0, sink[1:]), (3.0, sink[1:])) if name == "recall" else ()
        steps = [*((new, {}) for new in tokens), *((plain, {"extras": Extras(*kind)}) for kind in kinds)]
        for new, options in (*steps, (plain, {"counts": torch.tensor([1, int(i == 3)])})):
            before = layers[0]._ring._prepared
            agree(layers, 1, 0, qkv=new, **options)
            assert layers[0]._ring._prepared is not before
    last = layers[0]._ring._prepared
    agree(layers, 1, 0, qkv=plain, **options)
    assert layers[0]._ring._prepared is last


def test_a_past_made_in_inference_mode_goes_on_outside():
    layers = pair(METHODS["lca"])
    with torch.inference_mode():
        read_in_turn(layers, 20, 1, 1)
    read_in_turn(layers, *[1] * 5, seed=3)
    assert layers[0]._ring is not None
    with torch.inference_mode():
        agree(layers, 1, 10)


@pytest.mark.parametrize("method", RECALLS.values(), ids=RECALLS)
def test_steps_are_the_bits_of_operations(method):
    layers, pauses = pair(method), {0: (69, 60), 2: (0, 1), 3: (1, 0), 6: (1, 0)}
    for seed, L in enumerate((69, 1, 1, 1, 1, 3, 1)):
        agree(layers, L, seed, torch.tensor(pauses[seed]) if seed in pauses else None)
    assert layers[0]._ring._prepared is not None
    assert layers[0]._ring.buffers.entries_k.shape[2] > room_for(layers[0].method.layout.rule.closed(69))


def test_a_trace_gets_one_operation():
    layer, seen = CondensedLayer(RECALL), []
    read_by(layer, draw_tokens(20))

    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(str(func))
            with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
                return func(*args, **(kwargs or {}))

    q, k, v = draw_tokens(1)
    read_by(layer, (q.as_subclass(Seen), k, v))
    assert "condense.step.default" in seen
    assert layer._ring._prepared is None


PAIRS = {"llama-dga": ("llama", "dga-streaming-log"), "deepseek_v3-lca": ("deepseek_v3", "lca")}
PAIRS |= {f"{name}-reread": (name, "reread") for name in ("llama", "deepseek_v3")}
OF_MODELS = tiny.METHODS | {"reread": condense.Reread(share=0.4, piece=8, sink=1, window=2)}
ROWS = [tiny.tokens(1, n, seed=n)[0] for n in (27, 18)]


def _condensed(name, method):
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1} if name == "llama" else {}
    model = tiny.model(name, torch.float32, num_hidden_layers=2, **heads)
    return condense.apply(model, OF_MODELS[method]).to(DEVICE)


def _generate(model, ids, mask=None):
    mask = None if mask is None else mask.to(DEVICE)
    return tiny.generate(model, ids.to(DEVICE), return_dict_in_generate=True, attention_mask=mask)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_tokens_are_those_of_extend(monkeypatch, pair):
    model, (ids, mask) = _condensed(*pair), tiny.left_padded(ROWS)
    out = _generate(model, ids, mask)
    assert all(type(x) is CondensedLayer and x._ring is not None for x in out.past_key_values.layers)
    monkeypatch.setattr("condense.models.layers.CondensedLayer", Reading)
    want = _generate(model, ids, mask)
    assert {type(x) for x in want.past_key_values.layers} == {Reading}
    assert torch.equal(out.sequences, want.sequences)


def test_tensor_parallel_latents_are_read(monkeypatch):
    """The step would average queries over its own heads only."""
    model, ids = _condensed("deepseek_v3", "lca"), ROWS[0][None]
    want = _generate(model, ids).sequences
    monkeypatch.setattr("condense.models.attention.head_mesh", lambda *args: "some ranks")
    out = _generate(model, ids)
    assert torch.equal(out.sequences, want)
    assert all(layer._ring is None for layer in out.past_key_values.layers)


def test_a_step_refuses_documents_and_short_masks_and_gradients_go_by_extend():
    model, ids = _condensed("llama", "cca"), ROWS[0][None].to(DEVICE)
    cache = tiny.filled(model, ids[:, :20])
    marks, short = torch.tensor([0, 1], device=DEVICE), torch.ones(1, 1, device=DEVICE).long()
    with torch.no_grad():
        model(ids[:, 20:21], past_key_values=cache)
        new = partial(model, ids[:, 21:22], past_key_values=cache)
        tiny.refused("cannot be cached", new, cu_seq_lens_q=marks)
        tiny.refused("cover all tokens so far", new, attention_mask=short)
    assert cache.get_seq_length() == 21
    assert cache.layers[0]._ring is not None
    new().logits.sum().backward()
    assert cache.layers[0]._ring is None
    assert all(x.grad is not None for x in model.parameters() if x.requires_grad)
