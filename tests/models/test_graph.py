"""GraphDecoder without a GPU: the tokens of generate, prompts one after another, and what it refuses."""

import itertools
import weakref

import pytest
import torch
from grids import grid
from models import tiny
from models.tiny import IDS, MASK

import condense

EXACT_PROMPT = tiny.RECALL.replace(prompt="exact", store_bits=4)
TURNS = {"stock": {}, "cca": tiny.CCA, "exact": EXACT_PROMPT, "exact-host": EXACT_PROMPT.replace(store="host", slots=3)}
SIZES = (39, 1, 1, 17, 1, 5, 1)  # a prompt, single tokens and turns
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
    "long-turn": (
        lambda d: d.extend(IDS.repeat(1, 2)),
        r"at most max_length=80 tokens, got \d+ and 78 more",
    ),
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


@pytest.fixture
def decoder():
    return condense.GraphDecoder(condense.apply(tiny.model("llama"), tiny.CCA), batch_size=3, max_length=80)


def _wanted(model, ids=IDS, mask=MASK, **kwargs):
    return tiny.generate(model, ids, attention_mask=mask, max_new_tokens=NEW, **kwargs)


@grid(6, "model", model=CASES)
def test_tokens_of_generate_prompt_after_prompt(model, request):
    """One cache at the same addresses for prompts of any length, a single token too, in one piece or several."""
    decoder, addresses = condense.GraphDecoder(model, batch_size=3, max_length=80), set()
    ones = torch.ones(3, 50, dtype=torch.long)
    whole = request.node.callspec.params["model"] in tiny.WHOLE.values()
    prompts = (IDS, MASK), (IDS[:, :1], None), (tiny.tokens(3, 50, seed=8), None), (IDS, MASK)
    for chunk in (None,) if whole else (None, 7):
        for ids, mask in prompts if chunk is None else prompts[:1]:
            want = _wanted(model, ids, ones[:, : ids.shape[1]] if mask is None else mask)
            assert torch.equal(tiny.decoded(decoder, ids, mask, max_new_tokens=NEW, chunk=chunk), want)
            states = (getattr(layer, "state", None) or (layer.keys,) for layer in decoder.cache.layers)
            addresses.add(tuple(x.data_ptr() for state in states for x in state))
    assert len(addresses) == 1


def test_a_stock_model_decodes_too():
    model = tiny.model("llama")
    decoder = condense.GraphDecoder(model, batch_size=3, max_length=80)
    assert torch.equal(tiny.decoded(decoder, IDS, MASK, max_new_tokens=NEW), _wanted(model))


@grid(4, "model", model={name: CASES[name] for name in CASES if name not in tiny.WHOLE})
def test_logits_of_prefill_and_steps(model):
    decoder = condense.GraphDecoder(model, batch_size=2, max_length=61)
    ids = tiny.tokens()
    want = tiny.logits(model, ids)
    torch.testing.assert_close(decoder.prefill(ids[:, :20]), want[:, 19], **tiny.EXACT)
    for i in range(20, 61):
        torch.testing.assert_close(decoder.step(ids[:, i]), want[:, i], **tiny.EXACT)
    with pytest.raises(ValueError, match="at most max_length=61 tokens, got 61 and 1 more; make"):
        decoder.step(ids[:, 0])
    torch.testing.assert_close(decoder.prefill(ids), want[:, -1], **tiny.EXACT)


@pytest.mark.parametrize("method", TURNS.values(), ids=TURNS)
def test_turns_between_steps_equal_a_growing_cache(method):
    """Over padded rows, in place, and then over those of another prompt."""
    model = tiny.model("llama")
    model = condense.apply(model, method) if method else model
    ids, ones = torch.cat([IDS, tiny.tokens(3, 26, seed=5)], dim=1), torch.ones(3, 65, dtype=torch.long)
    decoder, addresses = condense.GraphDecoder(model, batch_size=3, max_length=80), set()
    for mask in (torch.cat([MASK, ones[:, 39:]], dim=1), ones):
        want = tiny.in_chunks(model, ids, SIZES, mask=mask)
        prompt, *turns = ids.split(SIZES, dim=1)
        got = [decoder.prefill(prompt, mask[:, :39]), *map(decoder.extend, turns)]
        for logits, stop in zip(got, itertools.accumulate(SIZES), strict=True):
            torch.testing.assert_close(logits, want[:, stop - 1], **tiny.EXACT)
        states = (getattr(layer, "buffers", None) or (layer.keys, layer.values) for layer in decoder.cache.layers)
        addresses.add(tuple(x.data_ptr() for state in states for x in state))
    assert len(addresses) == 1
    layer = weakref.ref(decoder.cache.layers[0])
    del decoder
    assert layer() is None  # the memory goes at once


def test_under_inference_mode_and_without_gradients(decoder):
    with torch.inference_mode():
        first = tiny.decoded(decoder, IDS, MASK, max_new_tokens=4)
    assert torch.equal(tiny.decoded(decoder, IDS, MASK, max_new_tokens=4), first)
    assert not decoder.prefill(IDS, MASK).requires_grad
    assert not decoder.step(IDS[:, 0]).requires_grad


@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_calls_refused_and_unchanged(decoder, call, message):
    for name, new in (("step", IDS[:, 0]), ("extend", IDS)):
        with pytest.raises(ValueError, match=f"{name} continues a prompt: call prefill first"):
            getattr(decoder, name)(new)
    logits = decoder.prefill(IDS, MASK)
    for _ in range(6):
        with pytest.raises(ValueError, match=message):
            call(decoder)
        logits = decoder.step(logits.argmax(-1))
    wanted = _wanted(decoder.model)
    out = torch.cat([wanted[:, :45], logits.argmax(-1)[:, None]], dim=1)
    assert torch.equal(out, wanted[:, :46])


@pytest.mark.parametrize(("make", "sizes", "message"), MODELS.values(), ids=MODELS)
def test_models_refused(make, sizes, message):
    with pytest.raises(ValueError, match=message):
        condense.GraphDecoder(make(), **({"batch_size": 1, "max_length": 60} | sizes))


def test_a_prompt_summary_reads_the_prompt_at_once():
    model = condense.apply(tiny.model("llama"), tiny.CCA.replace(summary="prompt"))
    decoder = condense.GraphDecoder(model, batch_size=3, max_length=80)
    with pytest.raises(ValueError, match="needs the whole prompt in one forward: leave chunk out"):
        decoder.prefill(IDS, MASK, chunk=20)
