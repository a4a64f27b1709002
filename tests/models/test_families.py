"""Every causal-LM type of the installed transformers: exact, or refused for a reason; and `condense.register`."""

import pickle
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from models import small, tiny
from torch import nn
from transformers import AutoModelForCausalLM, StaticCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama import modeling_llama

import condense
from condense.caches import CACHE
from condense.models import condensed_layers, families, prompts
from condense.models.families import FAMILIES, REFUSED, obstacle

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
# type -> what the page says of it
ROWS = re.findall(r"^\| (.+?) \| (`.+?) \|$", PAGE, re.MULTILINE)
STATED = {name: said for said, names in ROWS for name in re.findall(r"`([^`]+)`", names)}
EXACT = "exact"
FORTY = tiny.tokens(2, 40)
LENGTH, PROMPT, NUM_PADS = 18, 13, 5
CONDENSED = condense.CCA(group_size=2, window=4)
# methods that change nothing: a window longer than the text, and groups of one token
STOCK = (condense.CCA(group_size=2, window=LENGTH), condense.CCA(group_size=1, window=0))
# some models compute routers, rotations or linear attention in float32, where sums in another order differ by so much
ROUNDED = {"rtol": 0, "atol": 5e-6}
SCALED = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 4}
# Llama 4 scales the queries of layers without rotation by the number of tokens in the cache
BY_POSITION = {"ministral3": {"rope_parameters": SCALED}, "llama4_text": {"floor_scale": 4, "attn_scale": 0.5}}


def test_the_page_knows_every_type():
    missing = set(small.TYPES) - set(STATED)
    assert not missing, f"decide: add to FAMILIES or REFUSED, and to docs/models.md: {sorted(missing)}"
    # the lists name families that exist, and none twice
    assert not set(FAMILIES.values()) & set(REFUSED)
    said = set(STATED.values()) - {EXACT}
    assert said <= {*REFUSED.values(), "its mask lets the tokens of a picture see each other"}


# gpt_bigcode of the oldest transformers compiles a function with it
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in small.TYPES if STATED.get(name) == EXACT])
def test_exact(name, monkeypatch):
    """Also if feed-forward modules read a prompt in pieces."""
    monkeypatch.setattr(prompts, "_PIECE", 8)
    model = small.model(name)
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # transformers 5.17 takes SDPA for it, which does not cap scores
    ids = tiny.tokens(2, LENGTH)
    stock = tiny.logits(model, ids)
    for method in STOCK:
        with condense.use(model, method):
            torch.testing.assert_close(tiny.logits(model, ids), stock, **ROUNDED)
    with condense.use(model, CONDENSED):
        rows = [tiny.logits(model, ids[:1])[0], tiny.logits(model, ids[1:, :-NUM_PADS])[0]]
        assert (rows[0] - stock[0]).abs().max() > 1e-3
        padded, mask = tiny.left_padded([ids[0], ids[1, :-NUM_PADS]])
        with prompts._feed_forward_in_pieces(model):
            steps = tiny.in_chunks(model, padded, (PROMPT, *[1] * (LENGTH - PROMPT)), mask=mask)
    torch.testing.assert_close(steps[0], rows[0], **ROUNDED)
    torch.testing.assert_close(steps[1, NUM_PADS:], rows[1], **ROUNDED)
    torch.testing.assert_close(tiny.logits(model, ids), stock, rtol=0, atol=0)
    # positions end where there is a table of them, and the table is known
    most = families.max_learned_positions(model.config.get_text_config(decoder=True))
    with nullcontext() if most is None else pytest.raises(IndexError):
        tiny.logits(model, ids[:, :1], position_ids=torch.full((2, 1), most or small.SIZES["n_positions"]))


@pytest.mark.parametrize("name", [name for name in small.TYPES if STATED.get(name) != EXACT])
def test_refused(name):
    if name in small.UNBUILT:
        cls = AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[name]]
        reason = REFUSED[cls.__module__.split(".")[-2]]
    else:
        model = small.outline(name)
        classes = [type(module) for module in model.modules()]
        tiny.refused(r"has cross-attention|cannot be condensed: ", condense.apply, model, CONDENSED)
        assert [type(module) for module in model.modules()] == classes
        reason = obstacle(model)
    assert STATED[name] == reason


@pytest.mark.parametrize(("name", "base"), [("LlamaAttentions", nn.Module), ("Gated", modeling_llama.LlamaAttention)])
def test_an_unknown_class_is_named_with_those_like_it(name, base):
    said, model = f"that condense knows, but {name}; it knows LlamaAttention[.,]", _model(type(name, (base,), {}))
    tiny.refused(said, condense.apply, model, CONDENSED)


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("name", BY_POSITION)
def test_queries_scaled_by_position(name, static):
    """Scaling makes other queries, of which nothing is cached: a model with it is condensed like any other."""
    model, ids = small.model(name, **BY_POSITION[name]), tiny.tokens(1, LENGTH)
    stock = tiny.logits(model, ids)
    assert (stock - tiny.logits(small.model(name), ids)).abs().max() > 1e-3
    exact = tiny.EXACT if name == "ministral3" else ROUNDED
    for method in (STOCK[1], CONDENSED):
        condense.apply(model, method)
        whole = tiny.logits(model, ids)
        if method is not CONDENSED:
            torch.testing.assert_close(whole, stock, **exact)
        cache = StaticCache(model.config, max_cache_len=40) if static else None
        steps = tiny.in_chunks(model, ids, (PROMPT, *[1] * (LENGTH - PROMPT)), cache)
        torch.testing.assert_close(steps, whole, **exact)


def test_a_layer_that_turns_out_to_have_a_sliding_window():
    model = condense.apply(small.model("minimax", sliding_window=6), CONDENSED)
    tiny.refused("layer 0 has a sliding window and cannot be condensed", tiny.logits, model, tiny.tokens(1, LENGTH))


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
    def forward(
        self, hidden_states, position_embeddings, attention_mask, use_cache, position_ids, cache=None,
        past_key_values=None,
    ):  # fmt: skip
        return super().forward(hidden_states, position_embeddings, attention_mask, cache or past_key_values)


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


def test_a_layer_may_name_the_cache_as_transformers_did():
    model, ids = condense.apply(tiny.model("llama"), tiny.CCA), tiny.tokens(2, LENGTH)
    whole = tiny.logits(model, ids)

    def renamed(module, args, kwargs):
        return args, {("past_key_values" if name == CACHE else name): x for name, x in kwargs.items()}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(renamed, with_kwargs=True)
    torch.testing.assert_close(tiny.in_chunks(model, ids, (PROMPT, 1, LENGTH - PROMPT - 1)), whole, **tiny.EXACT)


def test_a_class_that_proves_right_is_registered(tmp_path):
    model = _model(LlamaAttention)
    stock = tiny.logits(model, FORTY)
    tiny.refused(r"no attention that condense knows, but LlamaAttention", condense.apply, model, tiny.CCA)
    partly = tiny.model("llama")
    partly.model.layers[1].self_attn.__class__ = LlamaAttention
    tiny.refused("has layers of LlamaAttention beside those that condense knows", condense.apply, partly, "recall-host")
    model.train().model.norm.eval()  # modules in different modes, which stay as they are
    modes = [module.training for module in model.modules()]
    assert condense.register(LlamaAttention, model) is LlamaAttention
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(tiny.logits(model.eval(), FORTY), stock)
    condense.apply(model, tiny.CCA)
    condensed = tiny.logits(model, FORTY)
    assert (condensed - stock).abs().max() > 1
    torch.testing.assert_close(tiny.in_chunks(model, FORTY, (17, 1, 22)), condensed, **tiny.EXACT)
    assert torch.equal(tiny.logits(pickle.loads(pickle.dumps(model)), FORTY), condensed)
    known = condense.apply(tiny.model("llama"), tiny.CCA)
    assert not isinstance(known.model.layers[0].self_attn, LlamaAttention)
    model.save_pretrained(tmp_path)
    assert condensed_layers(AutoModelForCausalLM.from_pretrained(tmp_path)) == dict.fromkeys(range(3), tiny.CCA)
    assert torch.equal(tiny.logits(condense.restore(model), FORTY), stock)
    assert type(model.model.layers[0].self_attn) is LlamaAttention


WRONG = {
    "own-softmax": (_OwnSoftmax, "pooling changes nothing|is not the stock model|something else|row per sequence"),
    "turned-keys": (_TurnsCachedKeys, "something else than one forward"),
    "reverses": (_Reverses, "the stock model's own prompt and single steps give something else than one forward"),
    "no-keywords": (_TakesNoKeywords, "unexpected keyword argument"),
}


@pytest.mark.parametrize(("cls", "reason"), WRONG.values(), ids=WRONG.keys())
def test_a_class_that_proves_wrong_is_not(cls, reason):
    model = _model(cls)
    stock = tiny.logits(model, FORTY[:1, :20])
    tiny.refused(f"{cls.__name__} cannot be condensed: .*({reason})", condense.register, cls, model)
    assert not families.REGISTERED
    assert all(type(layer.self_attn) is cls for layer in model.model.layers)
    assert not hasattr(model.config, "condense")
    assert torch.equal(tiny.logits(model, FORTY[:1, :20]), stock)


def test_what_register_wants_to_see():
    layers = "model must be a transformers model with layers of LlamaAttention, got "
    low = r"must be in float32 or float64, .* got torch.bfloat16: make a tiny one"
    given = (tiny.model("llama"), layers + "Llama"), ("name", layers + "str"), (_model(LlamaAttention).bfloat16(), low)
    for model, message in given:
        tiny.refused(message, condense.register, LlamaAttention, model)
