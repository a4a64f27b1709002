"""Reread in models: its scores and what it keeps by definition, caches of all kinds, later turns, padding, refusals."""

import copy
import pickle
import weakref

import pytest
import torch
from grids import fixture_of
from models import small, tiny
from models import test_laws as laws
from oracles import oracle_reread
from torch.utils._pytree import register_pytree_node
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import condense
from condense import Reread, functional
from condense.caches import CACHE, base
from condense.caches.store import Store
from condense.models import reread
from condense.models.fit import cache_fits, weight_bytes
from condense.models.inspect import inspect

# caches are given by the name of the installed transformers
pytestmark = pytest.mark.filterwarnings("error:.past_key_values. is deprecated:FutureWarning")
# the second opens all groups, the third two; of a prompt of three tokens it keeps all
METHOD, KEPT = tiny.REREAD, tiny.KEPT
FEW = KEPT.replace(num_recall=2, store="host", slots=1, store_bits=8)
# GQA, learned positions, latents
NAMES = {"llama": 2, "gpt2": 4, "deepseek_v3": 1}
# soft caps; sinks; queries that are scaled by their position
ADDING = {"gemma2": (tiny, 3, {"attn_logit_softcapping": 2.0}), "gpt_oss": (small, 2, {})}
_CHUNKED = {"layer_types": ["full_attention", "chunked_attention"], "no_rope_layers": [0, 1]}
ADDING["llama4_text"] = small, 1, {**_CHUNKED, "floor_scale": 4, "attn_scale": 0.5}
ROWS = [tiny.tokens(1, n, seed=n)[0] for n in (39, 26)]
name = fixture_of({name: name for name in NAMES})


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Without gradients, and with several pieces at once."""
    monkeypatch.setitem(reread._MOST_TOKENS, "cpu", 16_384)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("at_once", [16_384, 32, 1])
def test_scores_and_choice_are_those_of_the_definition(name, at_once, monkeypatch):
    """at_once: tokens that are read again at once, in pieces of 16."""
    monkeypatch.setitem(reread._MOST_TOKENS, "cpu", at_once)
    model, ids, calls, stock = tiny.model(name), tiny.tokens(1, 43), [], Reread.chosen
    expected = oracle_reread.scores(model, ids[0], METHOD, NAMES[name])

    def chosen(self, scores, tokens):
        kept, counts = stock(self, scores, tokens)
        calls.append((scores, kept))
        return kept, counts

    monkeypatch.setattr(Reread, "chosen", chosen)
    with condense.use(model, METHOD):
        cache = model(ids, use_cache=True)[CACHE]
    ((scores, kept),) = calls
    for got, want in zip(scores, expected, strict=True):
        torch.testing.assert_close(got[0, :, METHOD.sink :], want[:, METHOD.sink :], **tiny.EXACT)
    positions = oracle_reread.kept(METHOD, expected)
    assert [[head.nonzero()[:, 0].tolist() for head in layer[0]] for layer in kept] == positions
    whole = model(ids, use_cache=True)[CACHE]
    for i, layer in enumerate(cache.layers):
        k = layer.state.entries[0][0]
        assert k.shape[1] == len(positions[i][0])
        if name != "deepseek_v3":  # whose stock cache holds expanded keys
            for head, of_head in enumerate(positions[i]):
                assert torch.equal(k[head], whole.layers[i].keys[0, head, of_head])


@pytest.mark.parametrize(("name", "adding"), ADDING.items(), ids=ADDING)
def test_scores_with_soft_caps_sinks_and_scaled_queries(name, adding, monkeypatch):
    models, layers, changes = adding
    model = models.model(name, **{"layer_types": ["full_attention"] * layers} | changes)
    ids, calls = tiny.tokens(1, 43), []
    model.set_attn_implementation("eager")
    expected = oracle_reread.scores(model, ids[0], METHOD, model.config.num_key_value_heads)[:layers]
    stock = Reread.chosen
    monkeypatch.setattr(Reread, "chosen", lambda self, *given: calls.append(given) or stock(self, *given))
    with condense.use(model, METHOD):
        model(ids, use_cache=True)
    for got, want in zip(calls[0][0], expected, strict=True):
        torch.testing.assert_close(got[0, :, METHOD.sink :], want[:, METHOD.sink :], **tiny.EXACT)


def test_queries_are_scaled_by_slots_whatever_other_rows_hold(monkeypatch):
    """Llama 4 counts padding, in rows that are shorter than another and in a batch that is padded throughout."""
    model, calls, stock = small.model("llama4_text", **ADDING["llama4_text"][2]), [], Reread.chosen
    ids, mask = tiny.left_padded(ROWS)
    monkeypatch.setattr(Reread, "chosen", lambda self, *given: calls.append(given) or stock(self, *given))
    with condense.use(model, METHOD):
        for row in (slice(0, 2), slice(1, 2)):
            model(ids[row], attention_mask=mask[row], use_cache=True)
    together, alone = (scores[0] for scores, _ in calls)
    torch.testing.assert_close(alone[0], together[1, :, : alone.shape[2]], **tiny.EXACT)


def test_caches_grow_and_static_ones_agree_and_hold_what_arithmetic_says(name):
    model, ids = tiny.model(name), tiny.tokens(1, 43)
    dense = tiny.generate(model, ids)
    with condense.use(model, METHOD):
        growing = tiny.generate(model, ids)
        static = StaticCache(model.config, max_cache_len=64)
        assert torch.equal(tiny.generate(model, ids, **{CACHE: static}), growing)
        cache = model(ids, use_cache=True)[CACHE]
        counts = [layer.state.first.num for layer in cache.layers]
        assert len({*counts}) > 1
        assert sum(counts) == tiny.NUM_LAYERS * METHOD.num_kept(43) == tiny.NUM_LAYERS * 13
        reports = inspect(model, METHOD, 43, itemsize=8)
    assert not torch.equal(growing, dense)
    per_token = sum(report.dense_bytes for report in reports) // 43 // tiny.NUM_LAYERS
    assert sum(r.bytes for r in reports) == condense.cache_nbytes(cache) == sum(counts) * per_token
    # 64 - 43 later tokens have room in each layer; beside that a few numbers
    sizes = [(x.buffers.entries_k.shape[2], x.buffers.ring_k.shape[2]) for x in static.layers]
    assert sizes == [(count, 64 - 43) for count in counts]


def test_each_layer_frees_its_prompt_before_the_next_keeps_its_own(monkeypatch):
    model, stock, prompts = tiny.model("llama"), functional.keep_tokens, []

    def keep(method, prompt, *given):
        assert all(k() is None for k in prompts)
        prompts.append(weakref.ref(prompt.entries[0]))
        return stock(method, prompt, *given)

    monkeypatch.setattr(base, "keep_tokens", keep)
    with condense.use(model, METHOD):
        tiny.filled(model, tiny.tokens(1, 40))
    assert len(prompts) == tiny.NUM_LAYERS


def test_rows_share_the_tokens_that_are_read_again_at_once(monkeypatch):
    """Kernels have a limit of rows times heads, which many rows in small pieces would meet."""
    monkeypatch.setitem(reread._MOST_TOKENS, "cpu", 64)
    model, shapes = tiny.model("llama"), []
    model.model.norm.register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape[:2])))
    for rows in (1, 2, 5):
        with condense.use(model, METHOD):
            tiny.filled(model, tiny.tokens(rows, 60))
    assert shapes == [(1, 60), (4, 16), (2, 60), (4, 16), (4, 16), (5, 60), *[(5, 16)] * 4]
    monkeypatch.setitem(reread._MOST_TOKENS, "cpu", 16_384)
    with condense.use(model, METHOD.replace(piece=2)):
        tiny.filled(model, tiny.tokens(1, 300))
    assert shapes[-3:] == [(1, 300), (128, 2), (22, 2)]


def test_recall_with_all_groups_of_kept_tokens_open_is_reread(name, monkeypatch):
    model, ids, sizes = tiny.model(name), tiny.tokens(1, 61), (40, 1, 1, 1, 5, *[1] * 13)
    with condense.use(model, Reread(share=KEPT.keep, window=KEPT.window)):
        expected = tiny.in_chunks(model, ids, sizes)
    with condense.use(model, KEPT):
        for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=64)):
            torch.testing.assert_close(tiny.in_chunks(model, ids, sizes, cache), expected, **tiny.EXACT)
            assert sum(int(x.buffers.seen) for x in cache.layers) == tiny.NUM_LAYERS * (16 + 21)
    with condense.use(model, FEW):
        static, cache = StaticCache(model.config, max_cache_len=64), tiny.filled(model, ids[:, :40])
        tiny.in_chunks(model, ids[:, :40], (40,), static)
        for layers in (static.layers, cache.layers):
            counts, asked = [int(layer.buffers.seen) for layer in layers], []
            monkeypatch.setattr(Store, "fetch", lambda self, buffers, groups, asked=asked: asked.append(groups))
            assert all(layer.fetch() for layer in layers)
            assert asked == [(count - 5) // 3 for count in counts]
        assert not torch.allclose(tiny.in_chunks(model, ids[:, 40:], (1,) * 21, cache), expected[:, 40:])
    assert len({*counts}) > 1
    assert sum(counts) == tiny.NUM_LAYERS * 16


def test_what_is_kept_is_counted_as_a_prompt_of_its_own(name):
    model, reread = tiny.model(name), Reread(share=FEW.keep, window=FEW.window)
    own, short, long = (
        inspect(model, method, length, itemsize=8)
        for method, length in ((FEW, 240), (FEW.replace(keep=1), 96), (FEW.replace(keep=1), 240))
    )
    twice = (inspect(model, method, 240, itemsize=8) for method in (reread, condense.Dense()))
    for mine, kept, whole, second, first in zip(own, short, long, *twice, strict=True):
        for what in ("entries", "bytes", "host_bytes", "read_bytes"):
            assert getattr(mine, what) == getattr(kept, what), what
        more, pairs = mine.flops - whole.flops, second.flops - first.flops
        assert pairs > 0
        # fewer groups are expanded from latents
        assert more < pairs if name == "deepseek_v3" else more == pairs
        assert "read twice" in mine.remark
        assert "all 240" not in mine.remark
    (fit,) = (fit for fit in cache_fits(model, {"few": FEW}, 240, 8, memory=10**7) if fit.name == "few")
    dense = sum(layer.dense_bytes for layer in own)
    assert fit.requests == (int(0.9 * 10**7) - weight_bytes(model, 8) - dense) // fit.device_bytes


def test_all_kept_is_dense_attention_and_the_prompt_always_is(name):
    model, ids = tiny.model(name), tiny.tokens()
    dense = tiny.in_chunks(model, ids, (40, 21))
    with condense.use(model, METHOD.replace(share=1)):
        torch.testing.assert_close(tiny.in_chunks(model, ids, (40, 21)), dense, **tiny.exact(model))
    with condense.use(model, METHOD):
        got = tiny.in_chunks(model, ids, (40, 21))
    torch.testing.assert_close(got[:, :40], dense[:, :40], **tiny.exact(model))
    assert not torch.allclose(got[:, 40:], dense[:, 40:])


@pytest.mark.parametrize(("method", "beams"), [(METHOD, 1), (METHOD, 3), (KEPT, 3), (FEW, 1)], ids=str)
def test_padded_rows_are_those_alone(name, method, beams):
    model = condense.apply(tiny.model(name), method)
    for implementation in ("dynamic", "static"):
        laws.test_each_row_of_a_padded_batch_gets_its_own_tokens(model, beams, implementation)


def last_logits(model, prompt, new, positions=None, mask=None):
    """Those of one token after a prompt ``[B, L]``; positions ``[B, L + 1]``."""
    at = positions if positions is None else positions[:, : prompt.shape[1]]
    held = model(prompt, attention_mask=mask, position_ids=at, use_cache=True)[CACHE]
    mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=1)
    at = positions if positions is None else positions[:, prompt.shape[1] :]
    return model(new, attention_mask=mask, position_ids=at, **{CACHE: held}).logits[:, -1]


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt2", "opt"])
def test_a_prompt_is_repeated_behind_where_it_stands(name):
    """With padding and no positions the model gives its own: slots, or OPT's, which count a row's tokens."""
    model, new = tiny.model(name), tiny.tokens(2, 1, seed=9)
    ids, mask = tiny.left_padded(ROWS)
    slots = torch.arange(1 + ids.shape[1]).expand(2, -1)
    counted = torch.nn.functional.pad(mask, (0, 1), value=1).cumsum(1) - 1
    own = counted.clamp(min=0) if name == "opt" else slots
    with condense.use(model, METHOD):
        got = last_logits(model, ids, new, mask=mask)
        torch.testing.assert_close(got, last_logits(model, ids, new, own, mask), **tiny.exact(model))
        if name in ("gpt2", "opt"):
            return
        alone = torch.cat([last_logits(model, row[None], each[None]) for row, each in zip(ROWS, new, strict=True)])
        moved = last_logits(model, ids[:1], new[:1], slots[:1] + 200)
    # transformers rotates in float32; where other tokens stay, logits differ by a tenth and more
    torch.testing.assert_close(got, alone, rtol=0, atol=1e-3)
    torch.testing.assert_close(moved, alone[:1], rtol=0, atol=1e-3)


def test_the_position_behind_a_prompt():
    """Padding on the right does not count, nor a count of tokens before the axes of pictures."""
    real = torch.tensor([[True] * 5 + [False] * 2, [False] * 3 + [True] * 4])
    assert reread._behind(None, real, counts=False).tolist() == [5, 7]
    assert reread._behind(None, real, counts=True).tolist() == [5, 4]
    assert reread._behind(torch.arange(7) + 3, real, counts=True).tolist() == [8, 10]
    axes = torch.arange(7) // torch.tensor([2, 3, 1])[:, None, None]
    for positions in (axes, torch.cat([torch.arange(7)[None, None] + 50, axes])):
        assert reread._behind(positions, real, counts=False).tolist() == [5, 7]


def test_rotations_that_grow_with_the_text_are_those_of_the_prompt():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model, found = tiny.model("llama", rope_parameters=rope, max_position_embeddings=32), []
    rotary = model.model.rotary_emb
    with reread._rotations_stay(model):
        rotary.first_growth = 1  # as those of layers of several kinds note it
    assert not hasattr(rotary, "first_growth")
    # those that do not grow are left alone, as another thread may rotate by them
    with reread._rotations_stay(other := tiny.model("llama")):
        other.model.rotary_emb.noted = 1
    assert other.model.rotary_emb.noted == 1
    for method in (condense.Dense(), METHOD):
        with condense.use(model, method):
            cache = tiny.filled(model, ROWS[0][None])
            model(tiny.tokens(1, 1), use_cache=True, **{CACHE: cache})
        found.append(rotary.inv_freq.clone())
    assert torch.equal(*found)
    assert not torch.equal(found[0], tiny.model("llama", rope_parameters=rope).model.rotary_emb.inv_freq)


LONGROPE = {"original_max_position_embeddings": 32, "short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 2.0, 4.0]}
ROPES = [({"rope_type": "longrope", **LONGROPE}, {}), ({"rope_type": "dynamic"}, {"max_position_embeddings": 32})]


@pytest.mark.parametrize(("rope", "fields"), ROPES, ids=["longrope", "dynamic"])
@pytest.mark.parametrize("length", [20, 32, 33])
def test_a_prompt_is_repeated_with_the_factors_that_rotated_it(rope, fields, length):
    """They change after 32 positions, dynamic ones with each."""
    model, found = tiny.model("llama", rope_parameters=rope | {"rope_theta": 1e4, "factor": 4.0}, **fields), []
    model.model.rotary_emb.register_forward_hook(lambda module, *_: found.append(module.inv_freq.clone()))
    with condense.use(model, METHOD):
        tiny.filled(model, tiny.tokens(1, length))
    assert len(found) > 1
    assert all(torch.equal(of_piece, found[0]) for of_piece in found)


def test_embeddings_in_place_of_ids_and_inputs_of_each_layer():
    model, ids = tiny.model("llama"), tiny.tokens(2, 40)
    with condense.use(model, METHOD):
        embedded = tiny.generate(model, None, inputs_embeds=model.get_input_embeddings()(ids))
        assert torch.equal(embedded, tiny.generate(model, ids)[:, 40:])
    model, ids = small.model("gemma4"), tiny.tokens(2, 18)
    padded, mask = tiny.left_padded([ids[0], ids[1, 5:]])
    sizes = (13, *[1] * 5)
    with condense.use(model, METHOD.replace(piece=5)):
        batch = tiny.in_chunks(model, padded, sizes, mask=mask)
        torch.testing.assert_close(batch[:1], tiny.in_chunks(model, ids[:1], sizes), **tiny.EXACT)
        alone = tiny.in_chunks(model, ids[1:, 5:], (8, *[1] * 5))
    torch.testing.assert_close(batch[1:, 5:], alone, **tiny.EXACT)


@pytest.mark.parametrize("method", [METHOD, KEPT], ids=type)
def test_kinds_of_tokens_are_repeated(method):
    """Also one row of them for all."""
    model, ids, kinds = tiny.model("gpt2"), tiny.tokens(2, 40), tiny.tokens(1, 40, seed=1)
    embed, logits = model.get_input_embeddings(), []
    with condense.use(model, method):
        for given in ({"input_ids": ids, "token_type_ids": kinds}, {"inputs_embeds": embed(ids) + embed(kinds)}):
            cache = model(**given, use_cache=True)[CACHE]
            logits.append(model(tiny.tokens(2, 1, seed=2), **{CACHE: cache}).logits)
    torch.testing.assert_close(*logits, **tiny.EXACT)


@pytest.mark.parametrize("method", [METHOD, KEPT], ids=type)
def test_what_cannot_be_given_to_pieces_is_refused(monkeypatch, method):
    """As pictures that a decoder adds in several layers, or inserts itself; by the class that was given."""
    model, ids = condense.apply(tiny.model("llama"), method), tiny.tokens(1, 40)
    monkeypatch.setattr(reread, "_OWN", reread._OWN - {"position_ids"})
    said = f"^{type(method).__name__} reads .* parts of position_ids: use inputs_embeds"
    tiny.refused(said, model, ids, position_ids=torch.arange(40)[None])
    model(ids[:, :5], position_ids=torch.arange(5)[None])  # all of it stays


def test_a_cache_of_which_nobody_takes_the_leaves():
    """As that of a process in which transformers has exported a model, whose leaves are those of stock layers alone."""

    class Exported(DynamicCache):
        pass

    def flatten(cache):
        raise RuntimeError

    register_pytree_node(Exported, flatten, lambda leaves, context: Exported())
    model, cache = condense.apply(tiny.model("llama"), METHOD), Exported()
    model(tiny.tokens(1, 50), **{CACHE: cache})
    assert cache.layers[0].state.first.num < 50


def test_beside_other_layers():
    ids = tiny.tokens(1, 50)
    model = tiny.model("gemma2")  # soft caps, and two layers with a sliding window
    with condense.use(model, METHOD):
        cache = tiny.filled(model, ids)
        assert cache.layers[1].state.first.num == METHOD.num_kept(50) == 15
    model = tiny.model("llama")
    with condense.use(model, {0: tiny.CCA, 1: METHOD, 2: condense.Dense()}):
        cache = tiny.filled(model, ids)
    assert [layer.state.first.num for layer in cache.layers] == [0, 15, 0]
    assert cache.layers[0].state.seen == cache.layers[2].state.seen == 50


def test_applied_saved_copied_and_restored(tmp_path):
    model, ids = tiny.model("llama"), tiny.tokens(1, 40)
    stock, expected = tiny.generate(model, ids), tiny.generate(condense.apply(model, METHOD), ids)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert torch.equal(tiny.generate(other, ids), expected)
    with condense.use(model, tiny.CCA):
        assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(tiny.generate(model, ids), expected)
    model.set_attn_implementation("sdpa")
    assert torch.equal(tiny.generate(model, ids), stock)
    condense.restore(model)
    assert torch.equal(tiny.generate(model, ids), stock)
    assert not any(module._forward_hooks for module in model.modules())


def test_what_it_refuses():
    model = tiny.model("llama")
    tiny.refused(r"one setting", condense.apply, model, {0: METHOD, 1: METHOD.replace(share=0.5)})
    tiny.refused(r"one setting", condense.apply, model, {0: KEPT, 1: KEPT.replace(window=7)})
    tiny.refused(r"got Recall[^R]*, Reread[^R]*$", inspect, model, {0: METHOD, "rest": KEPT}, 43)
    own, said = small.model("minimax"), "minimax takes no cache but its own, .*: use Recall with keep=1"
    for method in (METHOD, {0: KEPT}):
        for refuse in (condense.apply, lambda model, method: inspect(model, method, 43)):
            tiny.refused(said, refuse, own, method)
    condense.apply(own, METHOD.replace(share=1.0))  # nothing is read again
    assert tiny.generate(own, tiny.tokens(1, 43)).shape[1] > 43
    tiny.refused(r"use prompt='exact', or keep=1", KEPT.replace, prompt="shared")
    tiny.refused(r"prompt='recall' and keep=1", KEPT.check_gradients)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(("method", "instead"), [(METHOD, "recall"), (KEPT, "keep=1")], ids=["reread", "recall"])
def test_what_models_refuse(method, instead):
    """Errors name no settings, of which the first layer has others than were given."""
    model, ids = condense.apply(tiny.model("llama"), method), tiny.tokens(1, 40)
    name = type(method).__name__
    tiny.refused(r"use model\.generate", condense.GraphDecoder, model, batch_size=1, max_length=64)
    tiny.refused(f"^{name} needs the whole prompt", tiny.generate, model, ids, prefill_chunk_size=16)
    with torch.enable_grad():
        for use_cache in (True, False):
            tiny.refused(f"^{name} lets .*inference.*train with {instead}", model, ids, use_cache=use_cache)
    cache = DynamicCache(config=model.config)
    model(ids, **{CACHE: cache})
    tiny.refused(f"reach into the prompt .* whose end {name} chose", cache.crop, -1)


@pytest.mark.parametrize("method", [METHOD, KEPT], ids=type)
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_prompt_that_was_not_read_again_is_not_gone_on_with(kind, method, monkeypatch):
    model, ids = condense.apply(tiny.model("llama"), method), tiny.tokens(1, 40)
    expected, stock, left = tiny.in_chunks(model, ids, (30, 10)), functional.keep_tokens, iter(range(tiny.NUM_LAYERS))

    def failing(*args):
        if next(left, None) == tiny.NUM_LAYERS - 1:
            raise MemoryError
        return stock(*args)

    cache = kind(config=model.config, **({"max_cache_len": 64} if kind is StaticCache else {}))
    with monkeypatch.context() as patched:
        patched.setattr(base, "keep_tokens", failing)
        with pytest.raises(MemoryError):
            model(ids[:, :30], **{CACHE: cache})
    said = "in all layers" if kind is StaticCache else f"again for {type(method).__name__}"
    tiny.refused(f"{said}.*Start from a new cache", model, ids[:, 30:], **{CACHE: cache})
    cache.reset()
    torch.testing.assert_close(tiny.in_chunks(model, ids, (30, 10), cache), expected, **tiny.EXACT)
