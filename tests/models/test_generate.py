"""Generation beside the laws of `test_laws`, and `GraphDecoder` without a GPU."""

import copy
import itertools
import weakref
from functools import partial

import pytest
import torch
import transformers
from grids import grid
from models import tiny
from models.tiny import IDS, MASK, ROWS
from transformers import CompileConfig, DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

import condense
from condense.caches import CACHE

NAMES = "llama-cca llama-streaming-select-log llama-dga llama-lca opt-streaming-6 one-layer one-layer-of-latents"
FEW = {name: tiny.CASES[name] for name in NAMES.split()}
ONE = ROWS[0][None]
NEW_TOKENS = torch.ones(1, 3, dtype=torch.long)
# tokens that the cache has room for and holds; then new tokens and their mask
STATIC_CALLS = {
    "full": (40, ONE, 40, ONE[:, :1], None, "wanted at most 40 tokens .* got 40 and 1 more; make it longer"),
    "another batch": (60, IDS, 39, torch.cat([IDS, IDS])[:, :4], None, "wanted 3 rows, .* got 6; make a new cache"),
    "mask of one": (60, ONE, 30, ONE[:, :1], NEW_TOKENS[:, :1], "cover all tokens so far, the cached ones included"),
    "mask of three": (60, ONE, 30, ONE[:, :3], NEW_TOKENS, "cover all tokens so far, the cached ones included"),
}  # fmt: skip
EXACT_PROMPT = tiny.RECALL.replace(prompt="exact", store_bits=4)
TURNS = {"stock": {}, "cca": tiny.CCA, "exact": EXACT_PROMPT, "exact-host": EXACT_PROMPT.replace(store="host", slots=3)}
SIZES = (39, 1, 1, 17, 1, 5, 1)  # a prompt, single tokens and turns
MODES = torch.no_grad, torch.inference_mode, torch.inference_mode, torch.enable_grad, torch.no_grad
NEW, ROPE = 20, {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
CASES = {name: case for name, case in tiny.CASES.items() if "sliding" not in name} | tiny.WHOLE
CALLS = {
    "rows": (lambda d: d.prefill(IDS[:2]), r"input_ids must have shape \(3, tokens\), got \(2, 39\); make another"),
    "long": (lambda d: d.prefill(IDS.repeat(1, 3)), "at most max_length=80 tokens, got 0 and 117 more; make a longer"),
    "mask": (lambda d: d.prefill(IDS, MASK[:, 1:]), r"attention_mask must have the shape of input_ids, \(3, 39\), got"),
    "right": (lambda d: d.prefill(IDS, MASK.flip(1)), "padding must stand on the left"),
    "chunk": (lambda d: d.prefill(IDS, chunk=0), "chunk must be an integer >= 1, got 0"),
    "tokens": (lambda d: d.step(IDS[:2, 0]), r"tokens must have shape \(3,\), got \(2,\)"),
    "turn": (lambda d: d.extend(IDS[:, :0]), r"input_ids must have shape \(3, tokens\), got \(3, 0\)"),
    "long-turn": (lambda d: d.extend(IDS.repeat(1, 2)), r"at most max_length=80 tokens, got \d+ and 78 more"),
}
MODELS = {
    "linear": (lambda: torch.nn.Linear(2, 2), {}, "must be a decoder-only transformers model .* got Linear"),
    "headless": (lambda: tiny.model("llama").model, {}, "that can generate, got LlamaModel"),
    "training": (lambda: tiny.model("llama").train(), {}, "call model.eval"),
    "sliding": (lambda: tiny.model("mistral-sliding"), {}, "sliding window .* use model.generate"),
    "positions": (lambda: tiny.model("gpt2"), {"max_length": 129}, "fit the model's 128 learned positions, got 129"),
    "rope": (lambda: tiny.model("llama", rope_parameters=ROPE), {}, r"the length \(dynamic\) .* use model.generate"),
    "batch": (lambda: tiny.model("llama"), {"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
    "length": (lambda: tiny.model("llama"), {"max_length": 1}, "max_length must be an integer >= 2, got 1"),
}


@pytest.fixture(params=FEW)
def few(request):
    return tiny.condensed(*FEW[request.param])


def new_cache(model, kind, length=90):
    return DynamicCache(config=model.config) if kind == "growing" else StaticCache(model.config, max_cache_len=length)


def test_guidance_keeps_a_second_cache(few):
    settings = {"guidance_scale": 1.5, "negative_prompt_ids": ROWS[1][None]}
    settings["negative_prompt_attention_mask"] = torch.ones(1, 26, dtype=torch.long)
    assert torch.equal(tiny.generate(few, ONE, **settings), tiny.generate(few, ONE, use_cache=False, **settings))


@pytest.mark.parametrize("kind", ["growing", "static"])
def test_a_conversation_of_a_batch_with_ragged_second_turns(few, kind):
    cache = new_cache(few, kind)
    first = tiny.generate(few, IDS, attention_mask=MASK, past_key_values=cache)
    seconds = [tiny.tokens(1, n, seed=n)[0] for n in (5, 11, 2)]
    more, more_mask = tiny.left_padded(seconds)
    turn, mask = torch.cat([first, more], dim=1), torch.cat([MASK, torch.ones(3, tiny.NEW).long(), more_mask], dim=1)
    ended = mask.index_fill(1, torch.tensor([43, 44]), 0)  # the cache holds them as tokens
    message = r"attention_mask must have the cached tokens .* wanted \(46, 33, 39\) .* 46 slots, got \(44, 31, 37\)"
    tiny.refused(message, tiny.generate, few, turn, attention_mask=ended, past_key_values=cache)
    batch = tiny.generate(few, turn, attention_mask=mask, past_key_values=cache)
    assert torch.equal(batch, tiny.generate(few, turn, attention_mask=mask, use_cache=False))
    for row, second, answer, out in zip(ROWS, seconds, first[:, 39:], batch, strict=True):
        single = torch.cat([row, answer, second])
        assert torch.equal(out[turn.shape[1] :], tiny.generate(few, single[None])[0, len(single) :])
    cache.reset()
    # transformers 5.17 overwrites what a stock layer that grows has kept, and leaves it as long as it was
    emptied = all(cache.get_seq_length(i) == 0 for i in range(len(cache.layers)))
    assert emptied or transformers.__version__.startswith("5.17.")
    if emptied:
        assert torch.equal(tiny.generate(few, IDS, attention_mask=MASK, past_key_values=cache), first)


def test_only_the_new_ids_with_the_whole_mask(few):
    cache = tiny.filled(few, ONE[:, :30])
    out = tiny.generate(few, ONE[:, 30:], past_key_values=cache, attention_mask=torch.ones(1, 39).long())
    assert torch.equal(out[:, 9:], tiny.generate(few, ONE)[:, 39:])


@grid(10, "model", model=FEW | tiny.RECALLS, assistant=["dense", "condensed", "itself"])
def test_assistants_equal_greedy(model, assistant):
    helper = copy.deepcopy(model)
    if assistant == "dense":
        condense.restore(helper)
    elif assistant == "condensed":
        condense.apply(helper, tiny.CCA.replace(group_size=2))
    helper.generation_config.num_assistant_tokens = 7
    assert torch.equal(tiny.generate(model, ONE, assistant_model=helper), tiny.generate(model, ONE))


@pytest.mark.parametrize("method", [tiny.CCA, tiny.STREAMING_6], ids=["cca", "streaming-6"])
def test_early_exit_equals_greedy(method):
    # llama alone: OPT and GPT-2 run all their layers over the shorter cache, which fails in the stock model too
    model = condense.apply(tiny.model("llama"), method)
    assert torch.equal(tiny.generate(model, ONE, assistant_early_exit=2), tiny.generate(model, ONE))


WINDOW = "deepseek_v3", condense.StreamingLLM(sink=2, window=8)


@pytest.mark.parametrize("model", [*FEW.values(), ("llama", tiny.RECALL), WINDOW], ids=str, indirect=True)
def test_a_cache_that_grew_in_inference_mode_goes_on_outside(model):
    """Its newer tensors are such as autograd cannot keep, and such as cannot be changed in place."""
    ids, got, cache = tiny.tokens(1, 120, seed=3), [], None
    for mode, part in zip(MODES, ids.split((30, 62, 1, 2, 25), dim=1), strict=True):
        with mode():
            out = model(part, **{CACHE: cache}, use_cache=True)
        cache = out[CACHE]
        got.append(out.logits.detach())
    torch.testing.assert_close(torch.cat(got, dim=1), tiny.logits(model, ids), **tiny.EXACT)


def test_gradients_of_a_last_token_reach_what_is_new_in_either_cache(few):
    grads = []
    for kind in ("growing", "static"):
        cache = new_cache(few, kind)
        with torch.no_grad():
            few(IDS[:1, :20], past_key_values=cache, use_cache=True)
        few.zero_grad()
        few(IDS[:1, 20:21], past_key_values=cache).logits.sum().backward()
        grads.append([p.grad.clone() for p in few.parameters() if p.grad is not None])
    assert all(bool(layer.any()) for layer in grads[0][-8:])
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


@grid(1, "model", model=FEW)
def test_generate_compiles_its_decode(model):
    """Transformers does so on CUDA by itself; on a CPU it has to be told to."""
    torch._dynamo.reset()
    want, graphs = tiny.generate(model, IDS, attention_mask=MASK), []

    def backend(graph, inputs):  # a function, as the settings are copied deeply
        graphs.append(graph)
        return graph.forward

    settings = CompileConfig(fullgraph=True, dynamic=False, backend=backend, mode=None)
    settings._compile_all_devices = True
    out = tiny.generate(model, IDS, attention_mask=MASK, cache_implementation="static", compile_config=settings)
    assert torch.equal(out, want)
    assert len(graphs) == 1


def test_generate_asks_for_room_before_it_starts(few):
    cache = new_cache(few, "static", 45)
    read = partial(tiny.generate, few, IDS, attention_mask=MASK)
    tiny.refused(r"has room for 45 tokens .* need 46: make it longer", read, past_key_values=cache)
    assert {type(layer) for layer in cache.layers} == {StaticLayer}
    assert torch.equal(read(past_key_values=new_cache(few, "static", 46)), read())


def test_a_stock_model_that_names_the_arguments_of_its_cache():
    sizes = {"vocab_size": 16, "hidden_size": 8, "ffn_dim": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MusicgenDecoderConfig(**sizes, num_codebooks=1, pad_token_id=0, bos_token_id=1)
    model = transformers.MusicgenForCausalLM(config).eval()
    settings = {"decoder_start_token_id": 0, "num_return_sequences": 1, "guidance_scale": 1}
    assert model.generate(ONE[:, :1] % 16, max_new_tokens=3, **settings).shape[0] == 1


@pytest.mark.parametrize(("room", "ids", "seen", "new", "mask", "message"), STATIC_CALLS.values(), ids=STATIC_CALLS)
def test_calls_that_a_static_cache_refuses(room, ids, seen, new, mask, message):
    model = condense.apply(tiny.model("llama"), tiny.CCA)
    cache, ids = new_cache(model, "static", room), torch.cat([ids, ids], dim=1)
    tiny.in_chunks(model, ids[:, :seen], (seen - 1, 1), cache)
    before = [x.clone() for layer in cache.layers for x in layer.buffers]
    tiny.refused(message, tiny.logits, model, new, past_key_values=cache, use_cache=True, attention_mask=mask)
    assert all(torch.equal(x, y) for x, y in zip((x for la in cache.layers for x in la.buffers), before, strict=True))
    assert int(cache.get_seq_length()) == seen


@pytest.fixture
def decoder():
    return condense.GraphDecoder(condense.apply(tiny.model("llama"), tiny.CCA), batch_size=3, max_length=80)


def _wanted(model, ids=IDS, mask=MASK, **kwargs):
    return tiny.generate(model, ids, attention_mask=mask, max_new_tokens=NEW, **kwargs)


@grid(6, "model", model=CASES)
def test_a_decoder_gives_the_tokens_of_generate_prompt_after_prompt(model, request):
    decoder, addresses = condense.GraphDecoder(model, batch_size=3, max_length=80), set()
    ones = torch.ones(3, 50, dtype=torch.long)
    whole = request.node.callspec.params["model"] in tiny.WHOLE.values()
    prompts = (IDS, MASK), (IDS[:, :1], None), (tiny.tokens(3, 50, seed=8), None), (IDS, MASK)
    for chunk in (None,) if whole else (None, 7):
        for ids, mask in prompts if chunk is None else prompts[:1]:
            want = _wanted(model, ids, ones[:, : ids.shape[1]] if mask is None else mask)
            assert torch.equal(tiny.decoded(decoder, ids, mask, max_new_tokens=NEW, chunk=chunk), want)
            states = (getattr(layer, "state", None) or (layer.buffers.ring_k,) for layer in decoder.cache.layers)
            addresses.add(tuple(x.data_ptr() for state in states for x in state))
    assert len(addresses) == 1


@pytest.mark.parametrize("method", TURNS.values(), ids=TURNS)
def test_a_decoders_turns_between_steps_equal_a_growing_cache(method):
    model = tiny.model("llama")
    model = condense.apply(model, method) if method else model
    ids, ones = torch.cat([IDS, tiny.tokens(3, 26, seed=5)], dim=1), torch.ones(3, 65, dtype=torch.long)
    decoder, addresses = condense.GraphDecoder(model, batch_size=3, max_length=65), set()
    for mask in (torch.cat([MASK, ones[:, 39:]], dim=1), ones):
        want = tiny.in_chunks(model, ids, SIZES, mask=mask)
        prompt, *turns = ids.split(SIZES, dim=1)
        got = [decoder.prefill(prompt, mask[:, :39]), *map(decoder.extend, turns)]
        for logits, stop in zip(got, itertools.accumulate(SIZES), strict=True):
            torch.testing.assert_close(logits, want[:, stop - 1], **tiny.EXACT)
        tiny.refused("at most max_length=65 tokens, got 65 and 1 more; make", decoder.step, ids[:, 0])
        torch.testing.assert_close(decoder.prefill(ids), tiny.logits(model, ids)[:, -1], **tiny.EXACT)  # and fills it
        states = (getattr(layer, "buffers", None) or (layer.keys, layer.values) for layer in decoder.cache.layers)
        addresses.add(tuple(x.data_ptr() for state in states for x in state))
    assert len(addresses) == 1
    layer = weakref.ref(decoder.cache.layers[0])
    del decoder
    assert layer() is None  # the memory goes at once


def test_a_decoder_under_inference_mode_and_without_gradients(decoder):
    with torch.inference_mode():
        first = tiny.decoded(decoder, IDS, MASK, max_new_tokens=4)
    assert torch.equal(tiny.decoded(decoder, IDS, MASK, max_new_tokens=4), first)
    assert not decoder.prefill(IDS, MASK).requires_grad
    assert not decoder.step(IDS[:, 0]).requires_grad


@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_calls_that_a_decoder_refuses(decoder, call, message):
    for name, new in (("step", IDS[:, 0]), ("extend", IDS)):
        tiny.refused(f"{name} continues a prompt: call prefill first", getattr(decoder, name), new)
    logits = decoder.prefill(IDS, MASK)
    for _ in range(6):
        tiny.refused(message, call, decoder)
        logits = decoder.step(logits.argmax(-1))
    wanted = _wanted(decoder.model)
    assert torch.equal(logits.argmax(-1), wanted[:, 45])


@pytest.mark.parametrize(("make", "sizes", "message"), MODELS.values(), ids=MODELS)
def test_models_that_a_decoder_refuses(make, sizes, message):
    tiny.refused(message, condense.GraphDecoder, make(), **({"batch_size": 1, "max_length": 60} | sizes))


def test_a_decoder_refuses_a_model_with_other_methods_and_parts_of_a_prompt_that_is_read_at_once(decoder):
    decoder.prefill(IDS)
    condense.apply(condense.restore(decoder.model), tiny.STREAMING_6.replace(window=3))
    for call in (lambda: decoder.prefill(IDS), lambda: decoder.extend(IDS), lambda: decoder.step(IDS[:, 0])):
        tiny.refused("methods must be those that this decoder was made for: make another decoder", call)
    condense.apply(decoder.model, tiny.CCA.replace(summary="prompt"))
    decoder = condense.GraphDecoder(decoder.model, batch_size=3, max_length=80)
    tiny.refused("needs the whole prompt in one forward: leave chunk out", decoder.prefill, IDS, MASK, chunk=20)
