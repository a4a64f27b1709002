"""DeepSeek's models in vLLM with methods of all kinds: the tokens of generate; and what is refused of latents (MLA)."""

import pytest
from small_models import condensed, prompts_of, random_latents
from vllm import LLM

import condense

LCA = condense.LCA(group_size=4, window=24, rep_bias="log_size")
RECALL = condense.Recall(group_size=4, window=24, num_recall=6)
METHODS = {
    "recall-16": ("deepseek_v2", RECALL.replace(num_recall=0.3)),
    "recall-8-drop": ("deepseek_v3", RECALL.replace(store_bits=8, unchosen="drop", group_size=8)),
    "recall-4": ("deepseek_v3", RECALL.replace(store_bits=4, entry_bits=4)),
    "matched": ("deepseek_v2", LCA.replace(rep_bias="matched", summary="last")),
    "allocation": ("deepseek_v2", {0: condense.StreamingLLM(sink=4, window=40), "rest": LCA}),
}
LENGTHS, NEW = (230, 31, 1, 150, 64, 17), 24


@pytest.mark.parametrize("name", METHODS)
def test_tokens_of_generate(engine, greedy, tmp_path, name):
    """Read anew, and again, where vLLM finds prefixes of such models: not on every CPU."""
    family, method = METHODS[name]
    model = condense.apply(random_latents(family), method)
    model.save_pretrained(tmp_path)
    want = greedy(model, prompts_of(LENGTHS), NEW)
    started = engine(tmp_path, **condensed(model, max_num_batched_tokens=48))
    assert started.tokens(prompts_of(LENGTHS), NEW) == want
    assert started.tokens(prompts_of(LENGTHS), NEW) == want


@pytest.mark.parametrize(
    ("layers", "settings", "words"),
    [
        ([0], {}, "all layers of a model with latents .* dense attention in layers 1"),
        (None, {"enable_lora": True}, "--enable-lora is not served with latents"),
        (None, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "--speculative-config"),
    ],
    ids=["dense-layer", "lora", "speculative"],
)
def test_what_is_refused(tmp_path, layers, settings, words):
    model = condense.apply(random_latents(), LCA, layers)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=words):
        LLM(str(tmp_path), dtype="float32", enforce_eager=True, **condensed(model), **settings)
