"""Recall, and DGA with a prompt's selection, in models, beside the laws of `test_laws`."""

import copy
from functools import partial

import pytest
import torch
from models import tiny
from models.tiny import IDS, MASK, ROWS
from step_states import RECALLS, empty, own_by, step_settings, token_at
from transformers import StaticCache

import condense
from condense.caches import store
from condense.models import watch
from condense.models.watch import unread_share
from condense.ops.recall.choice import choose_groups, index_scores, token_scores
from condense.ops.step import StepCall
from condense.ops.torch import step as torch_step

METHOD = tiny.RECALL
HOST = METHOD.replace(store="host", slots=3)
CHUNKS = (20, 17, 1, 16)
LONG, LONG_MASK = tiny.left_padded([tiny.tokens(1, n, seed=n)[0] for n in (54, 47)])


@pytest.mark.parametrize("model", tiny.RECALLS.values(), ids=tiny.RECALLS, indirect=True)
def test_exact_prompts_read_the_same_stored_tokens_in_a_padded_batch(model):
    condense.apply(model, METHOD.replace(prompt="exact", store_bits=8))
    got = tiny.logits(model, IDS, attention_mask=MASK, position_ids=(MASK.cumsum(1) - 1).clamp(min=0))
    for row, out in zip(ROWS, got, strict=True):
        torch.testing.assert_close(out[-len(row) :], tiny.logits(model, row[None])[0], **tiny.exact(model))


@torch.no_grad()
def test_exact_prompts_after_a_crop_and_a_padded_turn():
    """Dense attention, though the window begins late in the text and has columns that hold no token."""
    model, ids, outs = tiny.model("llama"), tiny.tokens(1, 30), []
    mask = torch.cat([torch.ones(1, 9), torch.zeros(1, 15), torch.ones(1, 5)], dim=1).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    turn = torch.cat([torch.ones(1, 15).long(), ids[:, 9:14]], dim=1)
    for method in (condense.Dense(), METHOD.replace(group_size=2, window=2, prompt="exact")):
        condense.apply(model, method)
        cache = tiny.filled(model, ids[:, :27])
        cache.crop(-18)
        for start, stop in ((9, 26), (26, 29)):
            of_turn = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
            out = model(turn[:, start - 9 : stop - 9], past_key_values=cache, **of_turn).logits
        outs.append(out)
    torch.testing.assert_close(*outs, **tiny.EXACT)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_store_is_checked_for_latents_of_their_width(kind, monkeypatch):
    """As on a GPU, where what is stored in few bits is rotated back in blocks, of which latents must be whole ones."""
    model, widths = condense.apply(tiny.model("deepseek_v3"), METHOD.replace(store="host")), set()

    def check(store, k, v, latent, groups=None):
        widths.add((k.shape[3] - v.shape[3], latent))

    monkeypatch.setattr(store.Store, "check", check)
    tiny.generate(model, ROWS[0][None], cache_implementation=kind)
    latent = model.config.kv_lora_rank
    assert widths == {(latent + model.config.qk_rope_head_dim, latent)}


@pytest.mark.parametrize("cause", ["has no attention dropout", "keeps no gradients"])
def test_a_call_is_refused_before_a_token_is_stored(cause):
    changes, bits = ({"attention_dropout": 0.5}, 16) if "dropout" in cause else ({}, 8)
    model, ids = condense.apply(tiny.model("llama", **changes), METHOD.replace(store_bits=bits)), tiny.tokens(1, 40)
    cache = tiny.filled(model, ids)
    with torch.set_grad_enabled(bits < 16), pytest.raises(ValueError, match=cause):
        model.train(bits == 16)(ids[:, :5], past_key_values=cache, use_cache=True)
    assert [layer.get_seq_length() for layer in cache.layers] == [40] * tiny.NUM_LAYERS


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_errors_do_not_name_the_settings_of_the_first_layer_alone(dropout):
    model = tiny.model("llama", attention_dropout=dropout).train()
    condense.apply(model, "recall-device:window=8,min_recall=2,group_size=4")
    calls = {
        "has no attention dropout"
        if dropout
        else "with store_bits=16, got 4; .*, got prompt='shared'. It needs": model,
        "use prompt='recall', or generate without": partial(tiny.generate, model, prompt_lookup_num_tokens=3),
        "leave use_cache on, or use prompt='recall'$": partial(tiny.generate, model, use_cache=False),
        "reads as a token of an answer: use": partial(tiny.generate, model, prefill_chunk_size=3),
    }
    for said, call in calls.items():
        with pytest.raises(ValueError, match=f"^[^(]*Recall [^(]*{said}"):
            call(tiny.tokens(1, 40))


@pytest.fixture
def fetches(monkeypatch):
    """Copies that were begun for the next layer while a layer attends, and for each store read if it was one of them.
    On a CPU there is nothing to copy, so that the functions that copy are replaced by ones that only tell.
    """
    begun, used = [], []

    def begin(tensor, count, device):
        begun.append(tensor[:, :, :count].clone() if count else None)
        return begun[-1]

    def read(self, tensor, count, device):
        fetched, self._fetched = self._fetched, None
        used.append(fetched is not None and any(fetched is x for x in begun))
        if fetched is not None:
            assert fetched.shape[2] >= count
            assert torch.equal(fetched[:, :, :count], tensor[:, :, :count])
        return tensor[:, :, :count]

    monkeypatch.setattr(store, "_begin_to_fetch", begin)
    monkeypatch.setattr(store.Store, "read", read)
    return begun, used


@pytest.mark.parametrize("padded", [False, True], ids=["real", "padded"])
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("name", ["llama", "deepseek_v2"])
def test_the_next_layers_tokens_are_fetched(fetches, name, static, padded):
    begun, used = fetches
    model = condense.apply(tiny.model(name), HOST)
    ids, mask = (LONG, LONG_MASK) if padded else (LONG[:1], None)
    caches = [StaticCache(model.config, max_cache_len=80) if static else None for _ in range(2)]
    want = tiny.in_chunks(model, ids, CHUNKS, caches[0], mask=mask)
    # the second and the fourth piece, the third being a step; the first layer's tokens are copied when it reads
    assert used == [False, True, True] * 2
    assert sum(x is not None for x in begun) == 4
    condense.apply(model, HOST.replace(store="device"))
    assert torch.equal(tiny.in_chunks(model, ids, CHUNKS, caches[1], mask=mask), want)


def test_tokens_are_fetched_once_for_a_layer_behind_layers_without_a_store(fetches):
    begun, used = fetches
    tiny.in_chunks(condense.apply(tiny.model("llama"), {"0-1": tiny.CCA, "2": HOST}), LONG[:1], CHUNKS)
    # the first piece has nothing to copy; the third is a single token, for which nothing is copied ahead
    assert used == [True, True]
    assert sum(x is not None for x in begun) == 2


@pytest.mark.parametrize("name", ["two-open", "three-open", "g-1-opened", "window-0-opened", "a-third", "all-open"])
def test_the_closed_mass_is_the_share_of_the_weights_of_closed_groups(name):
    settings, generator = step_settings(RECALLS[name]), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 40, 16, generator=generator, dtype=torch.float64) for n in (4, 2, 2))
    state, g, window = empty(settings, 40, 2, (16, 16)), settings.rule.chunk, settings.rule.window
    for t in range(40):
        torch_step.step(StepCall(token_at((q, k, v), t), state, settings, scale=0.4), own_by(settings))
        asked, closed = q[:, :, t : t + 1], max(0, t + 1 - window) // g
        scores, quota = index_scores(asked, state.group_index, 0.4), settings.choice.quota
        chosen = choose_groups(scores, torch.full((2, 1, 1), closed), quota, 2)[:, :, 0, :closed]
        far = token_scores(asked, state.group_index, 0.4)[:, :, 0, :closed].exp().sum(-1)
        near = (0.4 * asked @ k[:, :, closed * g : t + 1].repeat_interleave(2, 1).mT).exp().sum((2, 3))
        want = (far * ~chosen.repeat_interleave(2, 1)).sum(-1) / (far.sum(-1) + near)
        torch.testing.assert_close(unread_share(asked, state, settings, 0.4), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_the_closed_mass_of_every_step_is_noted_in_growing_and_static_caches(family):
    model, noted = condense.apply(tiny.model(family), tiny.RECALL), []
    for options in ({}, {"cache_implementation": "static"}):
        with condense.closed_mass(model) as shares:
            tiny.generate(model, ROWS[0][None], **options)
        tiny.generate(model, ROWS[0][None], **options)
        noted.append(torch.stack([torch.stack(shares[layer]) for layer in range(tiny.NUM_LAYERS)]))
    assert len(noted[0][0]) == tiny.NEW - 1
    torch.testing.assert_close(*noted, rtol=0, atol=1e-6)
    assert bool(((noted[0] >= 0) & (noted[0] < 1)).all())
    # the first layer opens all groups
    assert (noted[0] == 0).flatten(1).all(1).tolist() == [True, False, False]


def test_padding_has_no_closed_mass_and_open_groups_leave_nothing():
    model = condense.apply(tiny.model("llama"), tiny.RECALL.replace(num_recall=1.0))
    with torch.no_grad(), condense.closed_mass(model) as shares:
        cache = model(IDS, attention_mask=MASK, use_cache=True).past_key_values
        mask = torch.cat([MASK, MASK.new_tensor([[1], [0], [1]])], 1)
        model(IDS[:, :1], attention_mask=mask, past_key_values=cache)
        tiny.refused("watched already", condense.closed_mass(model).__enter__)
    for (share,) in shares.values():
        assert share.nan_to_num(-1.0).tolist() == [[0.0] * 4, [-1.0] * 4, [0.0] * 4]
    tiny.refused("must have layers with Recall", condense.closed_mass(tiny.model("llama")).__enter__)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph"):
        torch.compile(lambda: watch._note([], IDS, None, None, 1.0), fullgraph=True, backend="eager")()


@pytest.fixture
def selecting():
    return condense.apply(tiny.model("llama"), tiny.SELECT)


def test_padding_anywhere_beside_a_selection(selecting):
    ids, mask = tiny.tokens(2), torch.ones(2, tiny.LENGTH, dtype=torch.long)
    mask[0, 10:17] = mask[1, 50:] = 0
    got = tiny.logits(selecting, ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    for row, real, out in zip(ids, mask.bool(), got, strict=True):
        torch.testing.assert_close(out[real], tiny.logits(selecting, row[None, real])[0], **tiny.EXACT)


def test_a_crop_of_a_selection_is_exact_after_the_prompt_and_refused_inside(selecting):
    ids = tiny.tokens()
    cache = tiny.filled(selecting, ids[:, :30])
    prompt = copy.deepcopy(cache)
    want = tiny.in_chunks(selecting, ids[:, 30:50], (1,) * 20, cache)
    for count in (1, 6, 7, 20):
        cropped = copy.deepcopy(cache)
        cropped.crop(-count)
        got = tiny.in_chunks(selecting, ids[:, 50 - count : 50], (count,), cropped)
        torch.testing.assert_close(got, want[:, 20 - count :], **tiny.EXACT)
    for full, count in ((cache, 21), (prompt, 1)):
        tiny.refused(f"{count} tokens reach into the prompt of 30 tokens", full.crop, -count)
    torch.testing.assert_close(tiny.in_chunks(selecting, ids[:, 30:50], (20,), prompt), want, **tiny.EXACT)


def _first(*tokens):
    """Entries of prompts of so many tokens, and how many of these are focal tokens."""
    return [[count(n) for n in tokens] for count in (tiny.SELECT.num_entries, tiny.SELECT.prompt_focal)]


def test_rows_of_selections_follow_with_prompts_of_different_lengths(selecting):
    ids, mask = tiny.left_padded([*ROWS, tiny.tokens(1, 3, seed=3)[0]])
    with torch.no_grad():
        layer = selecting(ids, attention_mask=mask, use_cache=True).past_key_values.layers[0]
    assert [x.tolist() for x in layer.state.first] == _first(39, 26, 32, 3)
    layer.reorder_cache(torch.tensor([3, 0, 0, 2]))
    assert [x.tolist() for x in layer.state.first] == _first(3, 39, 39, 32)
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0, 7]))
    assert [x.tolist() for x in layer.state.first] == _first(3, 32)
    layer.reset()
    assert layer.state is None
