"""Generation beside the laws of `test_laws`: conversations, prefixes, assistants, room in caches of a fixed length."""

import copy

import pytest
import torch
import transformers
from grids import grid
from models import tiny
from models.tiny import IDS, MASK, ROWS
from transformers import CompileConfig, DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

import condense
from condense.caches import CondensedLayer

NAMES = (
    "llama-cca", "llama-streaming-select-log", "llama-dga", "llama-lca", "opt-streaming-6", "one-layer",
    "one-layer-of-latents",
)  # fmt: skip
FEW = {name: tiny.CASES[name] for name in NAMES}
ONE, SHORT = ROWS[0][None], torch.stack([row[:26] for row in ROWS])
NEW_TOKENS = torch.ones(1, 3, dtype=torch.long)
# tokens that the cache has room for and holds; then new tokens and their mask
CALLS = {
    "full": (40, ONE, 40, ONE[:, :1], None, "wanted at most 40 tokens .* got 40 and 1 more; make it longer"),
    "another batch": (60, IDS, 39, torch.cat([IDS, IDS])[:, :4], None, "wanted 3 rows, .* got 6; make a new cache"),
    "mask of one": (60, ONE, 30, ONE[:, :1], NEW_TOKENS[:, :1], "cover all tokens so far, the cached ones included"),
    "mask of three": (60, ONE, 30, ONE[:, :3], NEW_TOKENS, "cover all tokens so far, the cached ones included"),
}  # fmt: skip


@pytest.fixture(params=FEW.values(), ids=FEW)
def few(request):
    name, choice = request.param
    return condense.apply(tiny.model(name), choice)


def new_cache(model, kind, length=90):
    made = {"static": lambda: StaticCache(model.config, max_cache_len=length), "bare": DynamicCache}
    return made.get(kind, lambda: DynamicCache(config=model.config))()


def test_guidance_keeps_a_second_cache(few):
    settings = {"guidance_scale": 1.5, "negative_prompt_ids": ROWS[1][None]}
    settings["negative_prompt_attention_mask"] = torch.ones(1, 26, dtype=torch.long)
    assert torch.equal(tiny.generate(few, ONE, **settings), tiny.generate(few, ONE, use_cache=False, **settings))


@pytest.mark.parametrize("kind", ["config", "bare"])
def test_a_cache_from_the_user_is_condensed_and_starts_anew_when_reset(few, kind):
    cache = new_cache(few, kind)
    tiny.generate(few, SHORT, past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(tiny.generate(few, ONE, past_key_values=cache), tiny.generate(few, ONE))
    assert {type(layer) for layer in cache.layers} == {CondensedLayer}
    assert cache.get_seq_length() == 39 + tiny.NEW - 1


@pytest.mark.parametrize("kind", ["growing", "static"])
def test_a_conversation_of_a_batch_with_ragged_second_turns(few, kind):
    """Padding stands inside the rows; a static cache is made long enough for both turns."""
    cache = new_cache(few, kind)
    first = tiny.generate(few, IDS, attention_mask=MASK, past_key_values=cache)
    seconds = [tiny.tokens(1, n, seed=n)[0] for n in (5, 11, 2)]
    more, more_mask = tiny.left_padded(seconds)
    turn, mask = torch.cat([first, more], dim=1), torch.cat([MASK, torch.ones(3, tiny.NEW).long(), more_mask], dim=1)
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


def test_generation_in_inference_mode(few):
    expected = tiny.generate(few, ONE)
    with torch.inference_mode():
        assert torch.equal(tiny.generate(few, ONE), expected)
        cached = tiny.generate(few, ONE, return_dict_in_generate=True)
    turn = torch.cat([cached.sequences, ROWS[1][None]], dim=1)
    assert torch.equal(tiny.generate(few, turn, past_key_values=cached.past_key_values), tiny.generate(few, turn))


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
    with pytest.raises(ValueError, match=r"has room for 45 tokens .* need 46: make it longer"):
        tiny.generate(few, IDS, attention_mask=MASK, past_key_values=cache)
    assert {type(layer) for layer in cache.layers} == {StaticLayer}
    want = tiny.generate(few, IDS, attention_mask=MASK)
    assert torch.equal(tiny.generate(few, IDS, attention_mask=MASK, past_key_values=new_cache(few, "static", 46)), want)


@pytest.mark.parametrize(("room", "ids", "seen", "new", "mask", "message"), CALLS.values(), ids=CALLS)
def test_calls_that_a_static_cache_refuses(room, ids, seen, new, mask, message):
    model = condense.apply(tiny.model("llama"), tiny.CCA)
    cache, ids = new_cache(model, "static", room), torch.cat([ids, ids], dim=1)
    tiny.in_chunks(model, ids[:, :seen], (seen - 1, 1), cache)
    before = [x.clone() for layer in cache.layers for x in layer.buffers]
    with pytest.raises(ValueError, match=message):
        tiny.logits(model, new, past_key_values=cache, use_cache=True, attention_mask=mask)
    assert all(torch.equal(x, y) for x, y in zip((x for la in cache.layers for x in la.buffers), before, strict=True))
    assert int(cache.get_seq_length()) == seen
