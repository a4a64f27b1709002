"""`condense.register`: unknown classes prove on a model that condensing them is right, or are refused."""

import pickle

import pytest
import torch
from models import tiny
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

import condense
from condense.models import condensed_layers, families

IDS = tiny.tokens(2, 40)


class LlamaAttention(modeling_llama.LlamaAttention):
    """Attention with gated values, in a class of the stock name."""

    def forward(self, hidden_states, *args, **kwargs):
        out, weights = super().forward(hidden_states, *args, **kwargs)
        return out * torch.sigmoid(hidden_states.mean(-1, keepdim=True)), weights


def _projected(attention, hidden_states):
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    return (x(hidden_states).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for x in projections)


class _OwnSoftmax(modeling_llama.LlamaAttention):
    def forward(self, hidden_states, position_embeddings, **kwargs):
        q, k, v = _projected(self, hidden_states)
        q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        if kwargs.get("past_key_values") is not None:
            k, v = kwargs["past_key_values"].update(k, v, self.layer_idx)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


class _TurnsCachedKeys(modeling_llama.LlamaAttention):
    """Keys that change after they were cached: with their distance from the end."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        function = modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        q, k, v = _projected(self, hidden_states)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        k = k / torch.arange(1, k.shape[2] + 1, dtype=k.dtype)[:, None]
        out, _ = function(self, q, k, v, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(out.flatten(2)), None


class _TakesNoKeywords(modeling_llama.LlamaAttention):
    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values, use_cache, position_ids):
        return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values)


class _Reverses(modeling_llama.LlamaAttention):
    """An output gate, of which steps know nothing."""

    def forward(self, *args, **kwargs):
        out, weights = super().forward(*args, **kwargs)
        return out.flip(1), weights


@pytest.fixture(autouse=True)
def _forget():
    yield
    families.REGISTERED.clear()


def _model(cls):
    model = tiny.model("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = cls
    return model


def test_a_class_that_proves_right(tmp_path):
    model = _model(LlamaAttention)
    stock = tiny.logits(model, IDS)
    with pytest.raises(ValueError, match=r"no attention that condense knows, but LlamaAttention"):
        condense.apply(model, tiny.CCA)
    partly = tiny.model("llama")
    partly.model.layers[1].self_attn.__class__ = LlamaAttention
    with pytest.raises(ValueError, match="has layers of LlamaAttention beside those that condense knows"):
        condense.apply(partly, "recall-host")
    assert condense.register(LlamaAttention, model) is LlamaAttention
    assert torch.equal(tiny.logits(model, IDS), stock)
    condense.apply(model, tiny.CCA)
    condensed = tiny.logits(model, IDS)
    assert (condensed - stock).abs().max() > 1
    torch.testing.assert_close(tiny.in_chunks(model, IDS, (17, 1, 22)), condensed, **tiny.EXACT)
    assert torch.equal(tiny.logits(pickle.loads(pickle.dumps(model)), IDS), condensed)
    known = condense.apply(tiny.model("llama"), tiny.CCA)
    assert not isinstance(known.model.layers[0].self_attn, LlamaAttention)
    model.save_pretrained(tmp_path)
    assert condensed_layers(AutoModelForCausalLM.from_pretrained(tmp_path)) == dict.fromkeys(range(3), tiny.CCA)
    assert torch.equal(tiny.logits(condense.restore(model), IDS), stock)
    assert type(model.model.layers[0].self_attn) is LlamaAttention


WRONG = {
    "own-softmax": (_OwnSoftmax, "pooling changes nothing|is not the stock model|something else|row per sequence"),
    "turned-keys": (_TurnsCachedKeys, "something else than one forward"),
    "reverses": (_Reverses, "the stock model's own prompt and single steps give something else than one forward"),
    "no-keywords": (_TakesNoKeywords, "unexpected keyword argument"),
}


@pytest.mark.parametrize(("cls", "reason"), WRONG.values(), ids=WRONG.keys())
def test_a_class_that_does_not(cls, reason):
    model = _model(cls)
    stock = tiny.logits(model, IDS[:1, :20])
    with pytest.raises(ValueError, match=f"{cls.__name__} cannot be condensed: .*({reason})"):
        condense.register(cls, model)
    assert not families.REGISTERED
    assert all(type(layer.self_attn) is cls for layer in model.model.layers)
    assert not hasattr(model.config, "condense")
    assert torch.equal(tiny.logits(model, IDS[:1, :20]), stock)


def test_what_it_wants_to_see():
    layers = "model must be a transformers model with layers of LlamaAttention, got "
    low = r"must be in float32 or float64, .* got torch.bfloat16: make a tiny one"
    given = (tiny.model("llama"), layers + "Llama"), ("name", layers + "str"), (_model(LlamaAttention).bfloat16(), low)
    for model, message in given:
        with pytest.raises(ValueError, match=message):
            condense.register(LlamaAttention, model)
