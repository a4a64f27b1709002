"""On a CUDA device (collected only there): replayed graphs and compiled decode give the growing cache's tokens."""

import pytest
import torch
from gpu.test_step import no_waiting
from models import tiny
from transformers import CompileConfig

import condense

METHODS = {
    "cca": condense.CCA(group_size=16, window=64),
    "streaming": condense.CCA(group_size=16, window=64, summary="streaming", key_pooling="select", rep_bias="log_size"),
    "entries-4": condense.CCA(group_size=16, window=64, summary="streaming", rep_bias="log_size", entry_bits=4),
    "streaming-llm": condense.StreamingLLM(sink=4, window=60),
    "dga": condense.DGA(rep_bias="log_size"),
}
SELECT = condense.DGA(selection="prompt", min_focal=40, rep_bias="log_size")
# llama on its own layers, and beside dense ones in the same static cache
CHOICES = {name: (method, None) for name, method in METHODS.items()} | {"one-layer": (METHODS["cca"], (1,))}
STEPS = 300


@pytest.fixture(params=CHOICES.values(), ids=CHOICES)
def model(request):
    """Float32 with greedy choices far apart: equal tokens for 300 steps mean equal attention."""
    method, layers = request.param
    model = tiny.model("llama", torch.float32, max_position_embeddings=1024).to("cuda")
    return condense.apply(model, method, layers=layers)


def _greedy(model, ids, mask, steps=STEPS):
    settings = {"max_new_tokens": steps, "do_sample": False, "pad_token_id": 1, "cache_implementation": "dynamic"}
    return model.generate(ids, attention_mask=mask, **settings)


def agree(got, want, model, mask):
    """Equal tokens; where they part, the growing cache must have seen a near tie there."""
    parted = (got != want).any(0).nonzero()
    if parted.numel() == 0:
        return
    at = int(parted[0])
    with torch.no_grad():
        whole = torch.cat([mask, mask.new_ones(mask.shape[0], at - mask.shape[1])], dim=1)
        positions = (whole.cumsum(1) - 1).clamp(min=0)
        logits = model(want[:, :at], attention_mask=whole, position_ids=positions, use_cache=False).logits[:, -1]
    rows = got[:, at] != want[:, at]
    gap = logits.gather(1, want[:, at, None]) - logits.gather(1, got[:, at, None])
    assert float(gap[rows].abs().max()) < 1e-3 * float(logits.abs().max()), f"parted at {at - mask.shape[1]}"


def test_graph_of_a_padded_batch_and_of_a_second_prompt(model):
    ids, mask = (x.cuda() for x in tiny.left_padded([tiny.tokens(1, n, seed=n)[0] for n in (150, 101)]))
    decoder = condense.GraphDecoder(model, batch_size=2, max_length=512)
    for chunk, prompt, real in ((None, ids, mask), (64, tiny.tokens(2, 130, seed=9).cuda(), None)):
        got = decoder.generate(prompt, real, max_new_tokens=STEPS, chunk=chunk)
        real = torch.ones_like(prompt) if real is None else real
        agree(got, _greedy(model, prompt, real), model, real)
    assert decoder._graph is not None


def test_graph_after_prompts_with_a_selection():
    """Captured before the first prompt, replayed after prompts of different lengths, a single token too."""
    model = condense.apply(tiny.model("llama", torch.float32, max_position_embeddings=1024).to("cuda"), SELECT)
    decoder = condense.GraphDecoder(model, batch_size=2, max_length=512)
    ids, mask = (x.cuda() for x in tiny.left_padded([tiny.tokens(1, n, seed=n)[0] for n in (150, 31)]))
    for prompt, real in ((ids, mask), (ids[:, -1:], mask[:, -1:]), (ids, mask)):
        got = decoder.generate(prompt, real, max_new_tokens=STEPS)
        want = _greedy(model, prompt, real)
        parted = (got != want).any(0)
        # what follows is read in steps, not as another prompt: a near tie cannot be looked up; the first 20 must agree
        assert not bool(parted[: prompt.shape[1] + 20].any())
    assert {layer.backend for layer in decoder.cache.layers} == {"triton"}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_prompt_is_read_without_a_wait(method):
    """Where all layers are condensed; a stock one asks the device how far its cache is."""
    model = condense.apply(tiny.model("llama", torch.float32, max_position_embeddings=1024).to("cuda"), method)
    decoder = condense.GraphDecoder(model, batch_size=1, max_length=512)
    ids = tiny.tokens(1, 130, seed=9).cuda()
    decoder.generate(ids, max_new_tokens=3)
    with no_waiting():
        got = decoder.prefill(ids)
    want = condense.GraphDecoder(model, batch_size=1, max_length=512).prefill(ids)
    assert torch.equal(got, want)


def test_graph_of_the_stock_model():
    model = tiny.model("llama", torch.float32, max_position_embeddings=1024).to("cuda")
    ids = tiny.tokens(2, 130, seed=9).cuda()
    got = condense.GraphDecoder(model, batch_size=2, max_length=512).generate(ids, max_new_tokens=100)
    agree(got, _greedy(model, ids, torch.ones_like(ids), 100), model, torch.ones_like(ids))


# advice of inductor, on TensorFloat32 for one
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled-and-captured"])
def test_logits_in_bfloat16(compiled):
    """300 given tokens: a graph's logits are as far from float32's as the growing cache's are."""
    exact = tiny.model("llama", torch.float32, max_position_embeddings=1024).to("cuda")
    low = tiny.model("llama", torch.bfloat16, max_position_embeddings=1024).to("cuda")
    ids = tiny.tokens(1, 430, seed=4).cuda()
    # last queries and weighted keys: no anchor, whose choice is a matter of rounding
    want, eager = (tiny.logits(condense.apply(m, METHODS["cca"]), ids)[:, 130:] for m in (exact, low))
    decoder = condense.GraphDecoder(low, batch_size=1, max_length=430, compile=compiled)
    decoder.prefill(ids[:, :130])
    got = torch.stack([decoder.step(ids[:, i]) for i in range(130, 430)], dim=1)
    assert (got - want).abs().mean() <= 1.5 * (eager - want).abs().mean()
    assert (got - want).abs().max() <= 2 * (eager - want).abs().max()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_generate_with_a_static_cache_compiled_by_transformers(model):
    ids, mask = (x.cuda() for x in tiny.left_padded([tiny.tokens(1, n, seed=n)[0] for n in (90, 61)]))
    settings = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 1, "attention_mask": mask}
    settings |= {"cache_implementation": "static", "compile_config": CompileConfig()}
    out = model.generate(ids, return_dict_in_generate=True, **settings)
    assert out.past_key_values.is_compileable
    assert hasattr(model, "_compiled_call")
    agree(out.sequences, _greedy(model, ids, mask, 60), model, mask)


def test_a_graph_leaves_the_state_where_the_prompt_left_it():
    """Warming up and capturing read tokens; none of them may be seen afterwards."""
    model = condense.apply(tiny.model("llama", torch.float32).to("cuda"), METHODS["cca"])
    decoder = condense.GraphDecoder(model, batch_size=1, max_length=200)
    ids = tiny.tokens(1, 90).cuda()
    decoder.prefill(ids)
    assert [int(layer.num_slots) for layer in decoder.cache.layers] == [90] * tiny.NUM_LAYERS
    decoder.step(ids[:, 0])
    assert [layer.buffers.seen.tolist() for layer in decoder.cache.layers] == [[91]] * tiny.NUM_LAYERS
    assert int(decoder._positions) == 91
