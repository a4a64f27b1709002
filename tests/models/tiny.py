"""Tiny random models in float64 whose condensed logits are far from the dense ones, and ways to run them.

Shapes: B rows, L tokens, V vocabulary.
"""

import itertools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import condense
from condense.caches import CACHE

VOCAB = 64
LENGTH = 61
NUM_LAYERS = 3
NEW = 8
CHUNKS = (17, 1, 3, 20, 20)
EXACT = {"rtol": 0, "atol": 1e-12}
# deepseek_v2 rotates in float32 whatever the model's dtype: the stock model's logits, some 10 in size, differ by 4e-6
# between one forward and several
ROUNDED = {"rtol": 0, "atol": 1e-4}
G, W = 4, 8
CCA = condense.CCA(group_size=G, window=W)
STREAMING = condense.CCA(group_size=G, window=W, summary="streaming", key_pooling="select", rep_bias="log_size")
STREAMING_6 = STREAMING.replace(num_summary_queries=6, key_pooling="weighted")
DGA = condense.DGA(group_size=G, gamma=0.5)
# focal tokens and groups of a whole prompt
SELECT = DGA.replace(
    selection="prompt", gamma=0.2, min_focal=5, num_recent=4, num_random=8, window=2, rep_bias="log_size"
)
RECALL = condense.Recall(group_size=G, window=W, num_recall=2)
METHODS = {
    "cca": CCA,
    "streaming-select-log": STREAMING,
    "streaming-6": STREAMING_6,
    "streaming-1": STREAMING.replace(num_summary_queries=1),
    "lca": condense.LCA(group_size=G, window=W),
    "max-mean": condense.CCA(group_size=G, window=W, key_pooling="max", value_pooling="mean"),
    "no-window": condense.CCA(group_size=G, window=0),
    "dga": DGA,
    "dga-streaming-log": DGA.replace(window=W, gamma=0.3, summary="streaming", rep_bias="log_size"),
    "dga-random": DGA.replace(window=0, focal="random"),
    "streaming-llm": condense.StreamingLLM(sink=2, window=9),
    "lm-infinite": condense.LMInfinite(n_global=3, window=7),
    "dense": condense.Dense(),
}
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip
# multi-head latent attention, without experts: their router computes in float32 and so limits what can be compared
_LATENTS = {"q_lora_rank": 24, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
_MLA = {key: size for key, size in _SIZES.items() if key != "head_dim"} | _LATENTS | {"num_key_value_heads": 4}
_NO_EXPERTS = _MLA | {"first_k_dense_replace": NUM_LAYERS}
_YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 0.707, "mscale_all_dim": 0.707, "rope_theta": 1e4}
_YARN["original_max_position_embeddings"] = 64
EXPERTS = {
    "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_TOKENS = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 1}
_GPT2 = {"vocab_size": VOCAB, "n_positions": 128, "n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4}
_OPT = {
    "vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4,
    "max_position_embeddings": 128, "word_embed_proj_dim": 32,
}  # fmt: skip
# name -> type and settings
CONFIGS = {
    "llama": ("llama", _SIZES),
    "qwen2": ("qwen2", _SIZES),
    "qwen3": ("qwen3", _SIZES),
    "mistral": ("mistral", _SIZES | {"sliding_window": None}),
    "gemma": ("gemma", _SIZES | {"num_key_value_heads": 1}),
    "phi3": ("phi3", _SIZES | {"sliding_window": None}),
    "gpt2": ("gpt2", _GPT2),
    "gpt2-layer-scale": ("gpt2", _GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "opt": ("opt", _OPT),
    "deepseek_v2": ("deepseek_v2", _NO_EXPERTS | {"q_lora_rank": None, "rope_parameters": _YARN}),
    "deepseek_v3": ("deepseek_v3", _NO_EXPERTS),
    "minicpm3": ("minicpm3", _MLA),
    "glm4_moe_lite": ("glm4_moe_lite", _MLA | {"mlp_layer_types": ["dense"] * NUM_LAYERS}),
    "youtu": ("youtu", _MLA | {"rope_interleave": False}),
    # not to be condensed, or only in part
    "gemma2": ("gemma2", _SIZES),
    "mistral-sliding": ("mistral", _SIZES | {"sliding_window": 12}),
    "qwen2-mixed": ("qwen2", _SIZES | {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
}
LATENT = ("deepseek_v2", "deepseek_v3", "minicpm3", "glm4_moe_lite", "youtu")
OTHERS = ("qwen2", "qwen3", "mistral", "gemma", "phi3", "gpt2", "opt", *LATENT)
# every method in one architecture, and every architecture with some method
_SOME = itertools.cycle(["cca", "streaming-6", "streaming-select-log", "dga", "streaming-llm"])
_TURNS = zip((*OTHERS, "gpt2-layer-scale"), _SOME, strict=False)
PAIRS = {f"llama-{name}": ("llama", method) for name, method in METHODS.items()}
PAIRS |= {f"{name}-{method}": (name, METHODS[method]) for name, method in _TURNS}
RECALLS = {f"recall-{name}": (name, {"rest": RECALL}) for name in ("llama", "gpt2", "deepseek_v2")}
# what `condense.apply` is given: windows and groups of several sizes beside each other, layers that stay stock, and
# layers that are dense by a method; then bits of entries and stores, and matched biases
CHOICES = {
    "recall-cca-window": ("llama", {1: RECALL, "0": STREAMING_6, "rest": METHODS["streaming-llm"]}),
    "dense-recall-dga": ("llama", {0: condense.Dense(), 2: DGA.replace(group_size=3, window=5), "rest": RECALL}),
    "recall-host-stock": ("gpt2", {"0-1": RECALL.replace(store="host", slots=3, group_size=6)}),
    "latents": ("deepseek_v3", {"-1": METHODS["lca"], 0: RECALL.replace(window=5), "rest": condense.Dense()}),
    "one-layer": ("gpt2", {1: STREAMING}),
    "one-layer-of-latents": ("minicpm3", {1: METHODS["lca"]}),
    "two-layers": ("qwen2", {"0,2": METHODS["lca"]}),
    "sliding": ("qwen2-mixed", {0: STREAMING_6}),
}
CASES = {
    **PAIRS,
    **RECALLS,
    **CHOICES,
    "sliding-cca": ("qwen2-mixed", CCA),
    "recall-4-drop": ("gpt2", RECALL.replace(num_recall=3, unchosen="drop")),
    "recall-latents": ("deepseek_v2", RECALL.replace(window=5)),
    "recall-share": ("llama", RECALL.replace(num_recall=0.3, min_recall=2)),
    "recall-store-4": ("deepseek_v2", RECALL.replace(store_bits=4)),
    "recall-store-8-host": ("llama", RECALL.replace(store_bits=8, store="host", slots=3)),
    "cca-matched": ("deepseek_v2", CCA.replace(rep_bias="matched")),
    "lca-matched-entries-4": ("llama", METHODS["lca"].replace(window=6, rep_bias="matched", entry_bits=4)),
    "dga-matched": ("llama", DGA.replace(gamma=0.3, window=5, rep_bias="matched")),
}
# methods that read a prompt whole, in one forward; selections of latents are refused: test_latent.py
WHOLE = {
    "prompt-summary": ("llama", CCA.replace(summary="prompt")),
    "prompt-summary-latents": ("minicpm3", METHODS["lca"].replace(summary="prompt")),
    "select": ("llama", SELECT),
    "select-random": ("llama", SELECT.replace(focal="random", window=0, rep_bias="none")),
    "select-streaming": ("llama", SELECT.replace(summary="streaming", complementary=False)),
    "select-all": ("llama", SELECT.replace(min_focal=1024)),
    **{f"select-{name}": (name, SELECT) for name in OTHERS if name not in LATENT},
}
# methods that read a whole prompt once more, which models do for them, not caches; with GQA, learned positions, latents
REREAD = condense.Reread(share=0.3, piece=16, sink=2, window=3)
KEPT = condense.Recall(group_size=3, window=5, num_recall=1.0, prompt="exact", keep=0.4)
REREADS = {f"reread-{name}": (name, REREAD) for name in ("llama", "gpt2", "deepseek_v3")}
REREADS |= {f"kept-{name}": (name, KEPT) for name in ("llama", "gpt2", "deepseek_v3")}


def config(name, **changes):
    kind, settings = CONFIGS[name]
    return AutoConfig.for_model(kind, **(settings | _TOKENS | changes))


def model(name, dtype=torch.float64, **changes):
    """A model with weights so large that attention is sharp: what it sees or not shows in the logits."""
    return sharpen(AutoModelForCausalLM.from_config(config(name, **changes))).to(dtype).eval()


def condensed(name, choice):
    """A model with a method per layer in three layers, or with one method for all in two, which show as much."""
    layers = {} if isinstance(choice, dict) else {"num_hidden_layers": 2}
    return condense.apply(model(name, **layers), choice)


def exact(model):
    """Tolerances of logits that are the same but for the order of sums."""
    return ROUNDED if model.config.model_type == "deepseek_v2" else EXACT


def sharpen(stock):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in stock.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 2.0 * min(parameter.shape) ** -0.5, generator=generator)
            else:
                parameter.add_(torch.empty_like(parameter).normal_(0, 0.2, generator=generator))
    return stock


def tokens(B=2, L=LENGTH, seed=1):
    """Token ids ``[B, L]``, none of them special."""
    return torch.randint(4, VOCAB, (B, L), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, ids, **kwargs):
    return model(ids, **({"use_cache": False} | kwargs)).logits


@torch.no_grad()
def in_chunks(model, ids, sizes, cache=None, mask=None):
    """Logits ``[B, L, V]`` from one forward per chunk over one cache (made by the model if None is given)."""
    parts, ends = [], list(itertools.accumulate(sizes))
    for start, end in zip([0, *ends], ends, strict=False):
        so_far = None if mask is None else mask[:, :end]
        positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)[:, start:end]
        given = {CACHE: cache, "attention_mask": so_far, "position_ids": positions}
        out = model(ids[:, start:end], use_cache=True, **given)
        cache = out[CACHE]
        parts.append(out.logits)
    return torch.cat(parts, dim=1)


@torch.no_grad()
def filled(model, ids):
    return model(ids, **{CACHE: DynamicCache(config=model.config)}, use_cache=True)[CACHE]


def refused(message, call, *args, **kwargs):
    with pytest.raises(ValueError, match=message) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    del error  # whose traceback holds this frame, and so the arguments


def enter(model, choice, **kwargs):
    with condense.use(model, choice, **kwargs):
        pass


def generate(model, ids, **kwargs):
    """Token ids with `NEW` more; greedy unless told."""
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 1} | kwargs
    if "attention_mask" not in settings and "inputs_embeds" not in settings:
        settings["attention_mask"] = torch.ones_like(ids)
    return model.generate(ids, **settings)


def decoded(decoder, ids, mask=None, *, max_new_tokens, chunk=None):
    """Token ids with those that a `condense.GraphDecoder` finds the most likely behind them."""
    tokens = [decoder.prefill(ids, mask, chunk).argmax(-1)]
    while len(tokens) < max_new_tokens:
        tokens.append(decoder.step(tokens[-1]).argmax(-1))
    return torch.cat([ids, torch.stack(tokens, dim=1)], dim=1)


def enable_checkpointing(model, reentrant):
    """Gradient checkpointing by the name it has in this version of transformers."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


def packed(lengths, how):
    """Arguments of a forward that make one row several documents: by positions, or by ``marks`` beside them."""
    settings = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    if how == "marks":
        marks = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        longest = {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        settings |= {"cu_seq_lens_q": marks, "cu_seq_lens_k": marks, **longest}
    return settings


def left_padded(rows):
    """Rows ``[n]`` of different lengths as ids and mask ``[B, L]``, padding on the left."""
    L = max(len(row) for row in rows)
    ids = torch.stack([torch.cat([torch.ones(L - len(row), dtype=torch.int64), row]) for row in rows])
    mask = torch.stack([(torch.arange(L) >= L - len(row)).long() for row in rows])
    return ids, mask


# each past w + g - 1 of most methods, so that rows close groups at their own times
ROWS = [tokens(1, n, seed=n)[0] for n in (39, 26, 32)]
IDS, MASK = left_padded(ROWS)
