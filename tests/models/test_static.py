"""Static caches in generate and in direct calls: the tokens of the growing cache, one graph, nothing looked at."""

import copy

import pytest
import torch
from grids import grid
from models import tiny
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import CompileConfig, StaticCache
from transformers.cache_utils import StaticLayer

import condense
from condense.caches import StaticCondensedLayer

PAIRS = {
    **{f"llama-{name}": ("llama", name, None) for name in tiny.METHODS},
    **{f"{name}-streaming-6": (name, "streaming-6", None) for name in tiny.OTHERS},
    "deepseek_v3-dga": ("deepseek_v3", "dga", None),
    "minicpm3-dga-streaming-log": ("minicpm3", "dga-streaming-log", None),
    "llama-one-layer": ("llama", "cca", (1,)),
    "gpt2-one-layer": ("gpt2", "streaming-select-log", (1,)),
    "qwen2-two-layers": ("qwen2", "lca", (0, 2)),
}
FEW = {
    name: PAIRS[name] for name in ("llama-cca", "llama-streaming-6", "llama-dga", "llama-one-layer", "gpt2-one-layer")
}
MODES = {
    "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "three-beams": {"num_beams": 3, "num_return_sequences": 2},
    "three-samples": {"do_sample": True, "num_return_sequences": 3},
    "chunked-prefill": {"prefill_chunk_size": 7},
    "chunks-of-padding": {"prefill_chunk_size": 4},
    "token-by-token": {"prefill_chunk_size": 1},
}
ROWS = [tiny.tokens(1, n, seed=n)[0] for n in (39, 26, 32)]
IDS, MASK = tiny.left_padded(ROWS)


def _condensed(name, method, layers):
    return condense.apply(tiny.model(name), tiny.METHODS[method], layers=layers)


@pytest.fixture(params=PAIRS.values(), ids=PAIRS)
def model(request):
    return _condensed(*request.param)


@pytest.fixture(params=FEW.values(), ids=FEW)
def few(request):
    return _condensed(*request.param)


def _generate(model, ids=IDS, **kwargs):
    torch.manual_seed(3)
    kwargs = {"attention_mask": MASK if ids is IDS else torch.ones_like(ids)} | kwargs
    return tiny.generate(model, ids, **kwargs)


def _layer_types(model):
    condensed = condense.models.condensed_layers(model)
    return [StaticCondensedLayer if i in condensed else StaticLayer for i in range(tiny.NUM_LAYERS)]


@grid(8, "model", model=PAIRS)
def test_a_padded_batch(model):
    out = _generate(model, cache_implementation="static", return_dict_in_generate=True)
    assert torch.equal(out.sequences, _generate(model))
    cache = out.past_key_values
    assert type(cache) is StaticCache
    assert [type(layer) for layer in cache.layers] == _layer_types(model)
    assert int(cache.get_seq_length()) == 39 + tiny.NEW - 1 == cache.get_max_length()


@grid(5, "few", few=FEW, mode=MODES)
def test_modes(few, mode):
    assert torch.equal(_generate(few, cache_implementation="static", **mode), _generate(few, **mode))


def test_a_batch_without_padding(few):
    ids = torch.stack([row[:26] for row in ROWS])
    assert torch.equal(_generate(few, ids, cache_implementation="static"), _generate(few, ids))


def test_a_conversation_on_the_returned_cache(few):
    """Padding inside the rows, in a cache made long enough for both turns."""
    cache = StaticCache(few.config, max_cache_len=90)
    first = _generate(few, past_key_values=cache)
    more, more_mask = tiny.left_padded([tiny.tokens(1, n, seed=n)[0] for n in (5, 11, 2)])
    turn = torch.cat([first, more], dim=1)
    mask = torch.cat([MASK, torch.ones(3, tiny.NEW, dtype=torch.long), more_mask], dim=1)
    want = _generate(few, turn, attention_mask=mask, use_cache=False)
    assert torch.equal(_generate(few, turn, attention_mask=mask, past_key_values=cache), want)
    cache.reset()
    assert torch.equal(_generate(few, past_key_values=cache), first)


def test_a_copied_prefix(few):
    prefix = StaticCache(few.config, max_cache_len=60)
    tiny.in_chunks(few, ROWS[0][None, :30], (30,), prefix)
    for seed in (1, 2):
        ids = torch.cat([ROWS[0][:30], tiny.tokens(1, 8, seed=seed)[0]])[None]
        assert torch.equal(_generate(few, ids, past_key_values=copy.deepcopy(prefix)), _generate(few, ids))
    assert int(prefix.get_seq_length()) == 30


@grid(3, "few", few=FEW)
def test_right_padding_and_holes_in_direct_calls(few):
    ids = tiny.tokens(2, 50)
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[0, 9:13] = mask[0, 30:33] = mask[1, :6] = mask[1, 17:20] = mask[1, 40] = 0
    sizes = (17, 1, 1, 1, 12, *[1] * 18)
    want = tiny.in_chunks(few, ids, sizes, mask=mask)
    got = tiny.in_chunks(few, ids, sizes, StaticCache(few.config, max_cache_len=64), mask=mask)
    real = mask.bool()
    torch.testing.assert_close(got[real], want[real], **tiny.EXACT)


def test_gradients_of_a_last_token(few):
    """As in the growing cache: gradients reach what is new."""
    grads = []
    for cache in (None, StaticCache(few.config, max_cache_len=64)):
        with torch.no_grad():
            cache = few(IDS[:1, :20], past_key_values=cache, use_cache=True).past_key_values
        few.zero_grad()
        few(IDS[:1, 20:21], past_key_values=cache).logits.sum().backward()
        grads.append([p.grad.clone() for p in few.parameters() if p.grad is not None])
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


@grid(1, "few", few=FEW, padded={"whole": False, "padded": True})
def test_compiled_decode_is_one_graph(few, padded):
    """28 steps across group boundaries, without a break."""
    torch._dynamo.reset()
    ids, mask = tiny.tokens(2, 45), torch.ones(2, 45, dtype=torch.long)
    mask[1, :5] = 0 if padded else 1
    want = tiny.in_chunks(few, ids, (17, *[1] * 28), mask=mask)[:, 17:]
    cache = StaticCache(few.config, max_cache_len=64)
    tiny.in_chunks(few, ids[:, :17], (17,), cache, mask=mask[:, :17])
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(few, fullgraph=True, backend=counter, dynamic=False)
    slots = torch.nn.functional.pad(mask, (0, 64 - 45)) if padded else None
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    parts = []
    for i in range(17, 45):
        settings = {"attention_mask": slots, "position_ids": positions[:, i : i + 1], "past_key_values": cache}
        parts.append(tiny.logits(compiled, ids[:, i : i + 1], use_cache=True, **settings))
    torch.testing.assert_close(torch.cat(parts, dim=1), want, **tiny.EXACT)
    assert counter.frame_count == 1


@grid(1, name=[*FEW])
def test_generate_compiles_its_decode(name):
    """Transformers does so on CUDA by itself; on a CPU it has to be told to."""
    torch._dynamo.reset()
    model = _condensed(*FEW[name])
    want = _generate(model)
    graphs = []

    def backend(graph, inputs):  # a function, as the settings are copied deeply
        graphs.append(graph)
        return graph.forward

    settings = CompileConfig(fullgraph=True, dynamic=False, backend=backend, mode=None)
    settings._compile_all_devices = True
    out = _generate(model, cache_implementation="static", compile_config=settings)
    assert torch.equal(out, want)
    assert len(graphs) == 1


def test_generate_asks_for_room_before_it_starts(few):
    cache = StaticCache(few.config, max_cache_len=45)
    with pytest.raises(ValueError, match=r"has room for 45 tokens .* need 46: make it longer"):
        _generate(few, past_key_values=cache)
    assert {type(layer) for layer in cache.layers} == {StaticLayer}
    cache = StaticCache(few.config, max_cache_len=46)
    assert torch.equal(_generate(few, past_key_values=cache), _generate(few))


@pytest.fixture
def whole():
    return _condensed(*FEW["llama-cca"])


@pytest.mark.parametrize("L", [1, 2])
def test_a_full_cache_in_a_direct_call(whole, L):
    cache = StaticCache(whole.config, max_cache_len=40)
    tiny.in_chunks(whole, ROWS[0][None], (39,), cache)
    tiny.in_chunks(whole, ROWS[0][None, :1], (1,), cache)
    before = [x.clone() for layer in cache.layers for x in layer.buffers]
    with pytest.raises(ValueError, match=f"wanted at most 40 tokens .* got 40 and {L} more; make it longer"):
        tiny.logits(whole, ROWS[0][None, :L], past_key_values=cache, use_cache=True)
    assert all(torch.equal(x, y) for x, y in zip((x for la in cache.layers for x in la.buffers), before, strict=True))


def test_another_batch_in_a_used_cache(whole):
    cache = StaticCache(whole.config, max_cache_len=60)
    tiny.in_chunks(whole, IDS, (39,), cache, mask=MASK)
    with pytest.raises(ValueError, match="wanted 3 rows, for which it was made, got 6; make a new cache"):
        tiny.logits(whole, torch.cat([IDS, IDS])[:, :4], past_key_values=cache, use_cache=True)
    assert int(cache.get_seq_length()) == 39


@pytest.mark.parametrize("L", [1, 3])
def test_a_mask_of_the_new_tokens_alone(whole, L):
    cache = StaticCache(whole.config, max_cache_len=60)
    tiny.in_chunks(whole, ROWS[0][None, :30], (30,), cache)
    with pytest.raises(ValueError, match=r"attention_mask must .*cover all tokens so far, the cached ones included"):
        tiny.logits(whole, ROWS[0][None, 30 : 30 + L], past_key_values=cache, attention_mask=torch.ones(1, L).long())
    assert int(cache.get_seq_length()) == 30


def test_assistants_and_prompt_lookup_are_refused(few):
    ids = torch.cat([ROWS[0][:13]] * 3)[None]
    with pytest.raises(ValueError, match=r"assisted generation|not supported|static"):
        _generate(few, ids, cache_implementation="static", prompt_lookup_num_tokens=3)
