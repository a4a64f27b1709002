"""Models that cannot work are refused with a ValueError that names the way out, and nothing has changed afterwards."""

import copy
from functools import lru_cache, partial

import pytest
import torch
import transformers.masking_utils as masks
from models import small, tiny
from transformers import DynamicCache, LlamaForCausalLM, StaticCache, T5Config, T5ForConditionalGeneration
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache
from transformers.models.llama import modeling_llama

import condense
from condense.models import attention_layers, condensed_layers
from condense.models.inspect import inspect

IDS = tiny.tokens(2, 40)
PROMPT = tiny.CCA.replace(summary="prompt")
ONE = IDS[:1]
PARTS = {
    "chunked-prefill": ({"prefill_chunk_size": 7}, "unset prefill_chunk_size"),
    "no-cache": ({"use_cache": False}, "leave use_cache on"),
    "prompt-lookup": ({"prompt_lookup_num_tokens": 3}, "generate without assistant or prompt lookup"),
}
# the last layer refuses, after dense ones that could take back all tokens; or all but the first, which could move rows
CROP, BEAMS = r"crop: 36 tokens lie beyond .* propose fewer tokens", "beams"
HALFWAY = {"all": (tiny.CCA, CROP), "last": ({2: tiny.CCA}, CROP)}
HALFWAY["last-of-dense"] = {2: tiny.CCA, "rest": condense.Dense()}, CROP
# the first layer opens all groups, from the device
HALFWAY["but-the-first"] = tiny.RECALL.replace(store="host", slots=3), BEAMS
OVERLAYS = {
    "or": {"or_mask_function": masks.blockwise_overlay(torch.zeros(2, 40, dtype=torch.long))},
    "and": {"and_mask_function": lambda row, head, query, key: key != query - 1},
    "blocks": {"block_sequence_ids": torch.arange(40).expand(2, 40) // 5}, "bidirectional": None, "chunked": None,
}  # fmt: skip


@lru_cache
def computed():
    model = condense.apply(tiny.model("llama"), tiny.CCA)
    return tiny.logits(model, IDS), tiny.generate(model, IDS)


@pytest.fixture
def model():
    """A condensed model that must compute the same after the test as before."""
    model = condense.apply(tiny.model("llama"), tiny.CCA)
    config, (expected, tokens) = copy.deepcopy(model.config.to_dict()), computed()
    yield model
    assert model.config.to_dict() == config
    assert condensed_layers(model) == dict.fromkeys(range(3), tiny.CCA)
    assert torch.equal(tiny.logits(model, IDS), expected)
    assert torch.equal(tiny.generate(model, IDS), tokens)


def _of_layers(make):
    cache = DynamicCache()
    cache.layers, cache.layer_class_to_replicate = [make() for _ in range(3)], None
    return cache


def _offloaded(model):
    cache = StaticCache(model.config, max_cache_len=128)
    cache.offloading = True  # what the constructor's `offloading=True` sets, which needs a GPU
    return cache


def _dense_static(model):
    cache = StaticCache(model.config, max_cache_len=128)
    tiny.in_chunks(tiny.model("llama"), IDS, (40,), cache)
    return cache


def _other_method(model, layers=None, num_empty=0, method=tiny.STREAMING):
    """Another method in some layers; the first ones empty, so that they would be condensed."""
    with condense.use(model, method, layers):
        cache = tiny.filled(model, IDS)
    cache.layers[:num_empty] = [DynamicLayer() for _ in range(num_empty)]
    return cache


SLIDING = partial(DynamicSlidingWindowLayer, sliding_window=8)
NOT_CONDENSED, SLIDES = "cannot be condensed: use a plain DynamicCache", tiny.config("mistral-sliding")
DENSE_ENTRIES = r"already holds dense entries .* give the model a new cache: none, or DynamicCache\("
OTHER = "already holds tokens condensed by CCA, with other settings; give the model a new cache$"
CACHES = {
    "offloaded-static": (_offloaded, "offloaded static caches cannot be condensed: leave offloading out"),
    "sliding-static": (lambda m: StaticCache(SLIDES, 128), f"a StaticSlidingWindowLayer {NOT_CONDENSED}"),
    "dense-static": (_dense_static, DENSE_ENTRIES),
    # quantised ones need packages that are not here
    "quantized": (lambda m: _of_layers(type("Quantized", (DynamicLayer,), {})), f"a Quantized {NOT_CONDENSED}"),
    "sliding": (lambda m: _of_layers(SLIDING), f"a DynamicSlidingWindowLayer {NOT_CONDENSED}"),
    "pair": (lambda m: EncoderDecoderCache(DynamicCache(), DynamicCache()), "encoder-decoder.*: call condense.restore"),
    "of-a-dense-model": (lambda m: tiny.filled(tiny.model("llama"), IDS), DENSE_ENTRIES),
    "of-another-method": (_other_method, OTHER),
    "of-another-class": (partial(_other_method, method=tiny.RECALL), "condensed by Recall, not CCA; give the model a"),
    "last-of-another-method": (partial(_other_method, layers=[2]), OTHER),
    "behind-empty-layers": (partial(_other_method, layers=[2], num_empty=2), OTHER),
}


@pytest.mark.parametrize("how", ["forward", "generate"])
@pytest.mark.parametrize(("make", "message"), CACHES.values(), ids=CACHES.keys())
def test_caches(model, make, message, how):
    cache = make(model)
    layers = [] if isinstance(cache, EncoderDecoderCache) else list(cache.layers)
    seen = [layer.get_seq_length() for layer in layers]
    read, ids = {"forward": (tiny.logits, IDS), "generate": (tiny.generate, torch.cat([IDS, IDS], dim=1))}[how]
    tiny.refused(message, read, model, ids, past_key_values=cache, use_cache=True)
    assert [layer.get_seq_length() for layer in layers] == seen
    assert not layers or all(a is b for a, b in zip(cache.layers, layers, strict=True))


@pytest.mark.parametrize("name", ["gemma3_text", "llama4_text"])
def test_a_dense_cache_for_a_model_whose_first_layer_is_not_condensed(name):
    """The message does not name the method that stands in for the stock layer, which nobody chose."""
    stock = small.model(name)
    cache = tiny.filled(stock, IDS)
    with pytest.raises(ValueError, match=DENSE_ENTRIES) as refused:
        tiny.logits(condense.apply(stock, tiny.CCA), IDS, past_key_values=cache, use_cache=True)
    assert not any(method in str(refused.value) for method in ("StreamingLLM", "LocalChunks"))


@pytest.mark.parametrize("where", ["call", "generation_config"])
@pytest.mark.parametrize("kind", ["quantized", "offloaded_static", "sliding_window"])
def test_cache_implementations(model, kind, where):
    if where == "generation_config":
        model.generation_config.cache_implementation = kind
    settings = {"cache_implementation": kind} if where == "call" else {}
    said = f"cache_implementation='{kind}' cannot be condensed: leave it unset"
    tiny.refused(said, tiny.generate, model, IDS, **settings)
    model.generation_config.cache_implementation = None


def test_paged_and_continuous_batching(model):
    batch = partial(model.generate_batch, IDS.tolist(), max_new_tokens=3)
    for call in (batch, model.init_continuous_batching, partial(model.generate, IDS, cache_implementation="paged")):
        tiny.refused("batching and paged caches cannot be condensed: use model", call)
    for implementation in ("condense", "sdpa"):  # continuous batching switches to flash attention
        model.set_attn_implementation(implementation)
        layer = attention_layers(model)[0]
        tiny.refused("paged caches and continuous batching cannot be condensed", layer, cache=object())
    model.set_attn_implementation("condense")


def test_a_condensed_cache_in_a_stock_model(model):
    cache, said = tiny.filled(model, IDS[:, :30]), "holds condensed layers, which only a condensed model can fill"
    tiny.refused(said, tiny.logits, tiny.model("llama"), IDS[:, 30:], past_key_values=cache, use_cache=True)
    rest = tiny.in_chunks(model, IDS[:, 30:], (10,), cache)
    torch.testing.assert_close(rest, tiny.logits(model, IDS)[:, 30:], **tiny.EXACT)


@pytest.mark.parametrize("read", [list, lambda cache: cache.layers[1].keys, lambda cache: cache.layers[1].values])
def test_keys_and_values_that_are_taken_out_of_a_cache(model, read):
    """As for a cache by hand: those of the window alone would pass for those of all tokens."""
    cache = tiny.filled(model, IDS)
    tiny.refused("no keys and values of all tokens .* give the cache itself to the model", read, cache)
    assert cache.get_seq_length() == 40


CAUSAL = torch.ones(40, 40, dtype=torch.bool).tril().expand(2, 1, 40, 40)
NO_PADDING = "attention_mask must be a padding mask"
MASKS = {
    "causal": (CAUSAL, NO_PADDING),
    "float": (torch.zeros(2, 1, 1, 40, dtype=torch.float64), NO_PADDING),
    "too-short": (torch.ones(2, 39, dtype=torch.long), "must .* cover all tokens so far.* 1 tokens too few"),
    "wrong-rows": (torch.ones(3, 40, dtype=torch.long), "must have a row per sequence.* wanted 2 rows, got 3"),
}
TWO = torch.tensor([0, 10, 40])
RESTARTING = torch.cat([torch.arange(10), torch.arange(30)]).expand(2, 40)
ARGUMENTS = {name: (2, {"attention_mask": mask}, said) for name, (mask, said) in MASKS.items()}
ARGUMENTS |= {
    "marks-too-few": (1, {"cu_seq_lens_q": torch.tensor([0, 10, 30])}, r"rise from 0 to .*, 40, got .* 10, 30\]"),
    "marks-cached": (1, {"cu_seq_lens_q": TWO, "use_cache": True}, "cannot be cached: pass use_cache=False"),
    "marks-rows": (2, {"cu_seq_lens_q": TWO}, "cu_seq_lens_q needs a batch of 1, got 2"),
    "positions-rows": (2, {"position_ids": RESTARTING}, r"packed documents .* must be one row, got 2 rows"),
    "bidirectional": (2, {"is_causal": False}, "condensed attention is causal"),
}


@pytest.mark.parametrize("layers", [None, [1]], ids=["all-layers", "one-layer"])
@pytest.mark.parametrize(("B", "arguments", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_of_a_forward(B, arguments, message, layers):
    model = condense.apply(tiny.model("llama"), tiny.CCA, layers=layers)
    expected = tiny.logits(model, IDS)
    tiny.refused(message, tiny.logits, model, IDS[:B], **arguments)
    assert torch.equal(tiny.logits(model, IDS), expected)


@pytest.mark.parametrize("method", [tiny.CCA, {"rest": tiny.RECALL}], ids=["cca", "recall"])
def test_a_cache_after_a_forward_that_was_interrupted(monkeypatch, method):
    model = condense.apply(tiny.model("llama"), method)
    cache = tiny.filled(model, IDS[:, :30])
    more = partial(tiny.logits, model, IDS[:, 30:35], past_key_values=cache, use_cache=True)
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].mlp, "forward", None)
        with pytest.raises(TypeError):
            more()
    tiny.refused("must have the same tokens in all layers, got 35 and 30: a forward was interrupted", more)


def test_the_implementation_without_apply():
    model = tiny.model("llama")
    stock = tiny.logits(model, IDS)
    model.set_attn_implementation("condense")
    tiny.refused(r"works through condense.apply\(model, method\): call that instead", tiny.logits, model, IDS)
    tiny.refused(r"no layer says how: call model.set_attn_implementation\('sdpa'\)", condense.apply, model, tiny.CCA)
    model.set_attn_implementation("sdpa")
    assert torch.equal(tiny.logits(model, IDS), stock)


def _two_stacks():
    """A text model with a second one beside it, as models that act have for their actions."""
    model = tiny.model("llama")
    model.expert = tiny.model("llama").model
    return model


def _two_reasons():
    model = tiny.model("gemma", use_bidirectional_attention=True)
    model.model.layers[1].self_attn.is_kv_shared_layer = True
    return model


_T5 = T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=64)
BIDIRECTIONAL = "GemmaForCausalLM has bidirectional attention"
UNSUPPORTED = {
    "bloom": (partial(small.outline, "bloom"), "BloomForCausalLM cannot be condensed: its attention is written out"),
    "t5": (partial(T5ForConditionalGeneration, _T5), "T5ForConditionalGeneration has cross-attention"),
    "gpt2": (lambda: tiny.model("gpt2", add_cross_attention=True), "GPT2LMHeadModel has cross-attention: only decoder"),
    "gemma-bidirectional": (lambda: tiny.model("gemma", use_bidirectional_attention=True), BIDIRECTIONAL),
    "two-reasons": (_two_reasons, f"cannot be condensed: later layers read the keys of earlier ones; {BIDIRECTIONAL}"),
    "two-stacks": (_two_stacks, "must have one stack of decoder layers, got two attentions of layer 0: pass"),
    "name": (lambda: "meta-llama/Llama-3.1-8B", "model must be a transformers PreTrainedModel, got str"),
}


@pytest.mark.parametrize("call", ["apply", "use", "restore"])
@pytest.mark.parametrize(("make", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_models(make, message, call):
    model = make()
    modules = getattr(model, "modules", list)
    classes = [type(module) for module in modules()]
    calls = {"apply": condense.apply, "use": tiny.enter, "restore": lambda model, _: condense.restore(model)}
    tiny.refused(message, calls[call], model, tiny.CCA)
    assert [type(module) for module in modules()] == classes
    assert not hasattr(getattr(model, "config", None), "condense")


@pytest.mark.parametrize("enter", [condense.apply, tiny.enter], ids=["apply", "use"])
def test_one_configuration_of_two_models(enter):
    """One that names methods when the second is made is refused to both: each changes what the other is saved with."""
    config = tiny.config("llama")
    one, other = LlamaForCausalLM(config).double(), LlamaForCausalLM(config).double()
    condense.apply(one, tiny.CCA)
    want = tiny.logits(one, IDS)
    tiny.refused(r"build one of them from copy.deepcopy\(config\)", enter, other, tiny.STREAMING)
    tiny.refused(r"give it a copy: copy.deepcopy\(config\)", tiny.logits, other, IDS)
    assert torch.equal(tiny.logits(one, IDS), want)
    second = LlamaForCausalLM(config)
    for change in (condense.restore, partial(condense.apply, method=tiny.STREAMING_6)):
        for each in (one, second):
            tiny.refused(r"config must be the model's own, .*copy.deepcopy\(config\)", change, each)
    del second, each
    assert not condensed_layers(condense.restore(one))
    tiny.logits(one, IDS)
    tiny.logits(other, IDS)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_attention_weights(name):
    asked = tiny.model(name, attn_implementation="eager", output_attentions=True)
    for call in (condense.apply, partial(inspect, length=100)):
        tiny.refused(r"config.output_attentions must be False, got True", call, asked, tiny.CCA)
    model = condense.apply(tiny.model(name), tiny.CCA)
    for call in (model, partial(model.generate, max_new_tokens=2, return_dict_in_generate=True)):
        tiny.refused("output_attentions must be False, got True", call, IDS, output_attentions=True)
    tiny.refused("return_shared_kv_states must be False, got True", model, IDS, return_shared_kv_states=True)
    model.set_attn_implementation("eager")
    assert model(IDS, output_attentions=True).attentions[0].shape[-1] == IDS.shape[1]
    model.set_attn_implementation("condense")
    tiny.logits(model, IDS)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_more_tokens_than_learned_positions(name):
    model, ids = condense.apply(tiny.model(name), tiny.CCA), tiny.tokens(1, 128)
    tiny.refused("must fit the model's 128 learned positions, got 136", tiny.generate, model, ids)
    assert tiny.generate(model, ids[:, : 128 - tiny.NEW]).shape == (1, 128)


@pytest.mark.parametrize("method", [PROMPT, tiny.SELECT], ids=["summary", "selection"])
@pytest.mark.parametrize(("settings", "way_out"), PARTS.values(), ids=PARTS)
def test_a_prompt_in_parts_to_a_method_that_reads_it_whole(method, settings, way_out):
    model, setting = condense.apply(tiny.model("llama"), method), "summary" if method is PROMPT else "selection"
    expected = tiny.generate(model, ONE)
    said = f"whole prompt, alone, in .* forward: {way_out}, or use {setting}='streaming'"
    tiny.refused(said, tiny.generate, model, ONE, **settings)
    assert torch.equal(tiny.generate(model, ONE), expected)


@pytest.mark.parametrize("prompt", ["exact", "shared"])
def test_proposed_tokens_where_several_are_read_in_another_way_than_one(prompt):
    model = condense.apply(tiny.model("llama"), {0: condense.Dense(), "rest": tiny.RECALL.replace(prompt=prompt)})
    said = "tokens that are proposed would not be judged by its own answers: use prompt='recall'"
    tiny.refused(said, tiny.generate, model, ONE, prompt_lookup_num_tokens=3)
    # every answer would be a call of several tokens, and a piece of a prompt one of a single token
    tiny.refused("without a cache none is read alone: leave use_cache on", tiny.generate, model, ONE, use_cache=False)
    for size in (1, 13):
        tiny.refused("leaves a piece of one token of 40, ", tiny.generate, model, ONE, prefill_chunk_size=size)
    assert tiny.generate(model, ONE, prefill_chunk_size=8).equal(tiny.generate(model, ONE))
    decoder = condense.GraphDecoder(model, batch_size=1, max_length=60)
    tiny.refused("chunk must be at least 2", decoder.prefill, ONE, chunk=1)
    torch.testing.assert_close(decoder.prefill(ONE, chunk=13), decoder.prefill(ONE), **tiny.EXACT)


def test_a_forward_that_was_put_there_from_outside():
    for change in (partial(condense.apply, method=tiny.CCA), condense.restore):
        model = tiny.model("llama")
        model = condense.apply(model, tiny.CCA) if change is condense.restore else model
        model.model.layers[1].self_attn.forward = lambda *args, **kwargs: None
        tiny.refused("attention in layers 1 has a forward of its own", change, model)


@pytest.mark.parametrize(("choice", "message"), HALFWAY.values(), ids=HALFWAY)
def test_what_a_layer_refuses_leaves_all_layers_as_they_were(choice, message):
    model = condense.apply(tiny.model("llama"), choice)
    cache = tiny.filled(model, IDS)
    change = partial(cache.crop, -36) if message == CROP else partial(cache.reorder_cache, torch.tensor([1, 1]))
    tiny.refused(message, change)
    assert [layer.get_seq_length() for layer in cache.layers] == [40] * tiny.NUM_LAYERS
    more = tiny.tokens(2, 5, seed=3)
    full = tiny.logits(model, torch.cat([IDS, more], dim=1))[:, 40:]
    torch.testing.assert_close(tiny.in_chunks(model, more, (5,), cache), full, **tiny.EXACT)


def test_a_crop_that_a_convolution_refuses_leaves_condensed_layers_as_they_were():
    model = condense.apply(small.model("lfm2", layer_types=["full_attention", "conv"]), tiny.CCA)
    caches, more = [tiny.filled(model, IDS) for _ in range(2)], tiny.tokens(2, 5, seed=3)
    with pytest.raises(RuntimeError, match="does not track past states"):
        caches[0].crop(-2)
    outs = []
    for cache, count in zip(caches, (2, 0), strict=True):
        cache.activate_past_recording()
        tiny.in_chunks(model, more[:, : 3 + count], (3 + count,), cache)
        cache.crop(-count)
        outs.append(tiny.in_chunks(model, more[:, 3:], (2,), cache))
    assert torch.equal(*outs)


@pytest.mark.parametrize("layers", [None, [1]], ids=["all-layers", "one-layer"])
@pytest.mark.parametrize("overlay", OVERLAYS.items(), ids=OVERLAYS.keys())
def test_mask_functions(overlay, layers, monkeypatch):
    (name, settings), model = overlay, condense.apply(tiny.model("llama"), tiny.CCA, layers=layers)
    expected = tiny.logits(model, IDS)
    with monkeypatch.context() as patch:
        if name == "bidirectional":
            patch.setattr(model.config, "is_causal", False, raising=False)
        elif name == "chunked":
            patch.setattr(model.config, "attention_chunk_size", 16, raising=False)
            patch.setattr(modeling_llama, "create_causal_mask", masks.create_chunked_causal_mask)
        else:
            patch.setattr(modeling_llama, "create_causal_mask", partial(masks.create_causal_mask, **settings))
        for mask in (None, (torch.arange(40) > 2).expand(2, 40).long()):
            said = r"mask_function must be the plain causal mask.*, got .*restore"
            tiny.refused(said, tiny.logits, model, IDS, attention_mask=mask)
    assert torch.equal(tiny.logits(model, IDS), expected)


def test_pictures_whose_tokens_see_each_other_and_texts_without_any():
    # its processor gives `token_type_ids` with every prompt, 1 at tokens of pictures
    model = condense.apply(small.model("gemma3"), tiny.CCA)
    kinds = torch.zeros_like(IDS)
    for settings in ({}, {"attention_mask": torch.ones_like(IDS)}):
        expected = tiny.logits(model, IDS, **settings)
        assert torch.equal(tiny.logits(model, IDS, token_type_ids=kinds, **settings), expected)
        tokens = tiny.generate(model, IDS, token_type_ids=kinds, **settings)
        assert torch.equal(tokens, tiny.generate(model, IDS, **settings))
    kinds[1, 3:7] = 1
    said = r"mask_function must be the plain causal mask.*, got .*restore"
    tiny.refused(said, tiny.logits, model, IDS, token_type_ids=kinds)


def test_mask_functions_that_are_taken():
    model = condense.apply(tiny.model("llama"), tiny.CCA)
    embedded, documents = torch.zeros(2, 40, 32), torch.tensor([[*range(15), *range(25)], [*range(30), *range(10)]])
    for create in (masks.create_causal_mask, masks.create_sliding_window_causal_mask):
        model.config.sliding_window = 12
        for positions in (None, torch.arange(40)[None], documents):
            mask = torch.ones(2, 40, dtype=torch.long)
            assert create(model.config, embedded, None, None, position_ids=positions) is None or positions is documents
            got = create(model.config, embedded, mask, None, position_ids=positions)
            assert torch.equal(got, mask.bool()[:, None, None])
