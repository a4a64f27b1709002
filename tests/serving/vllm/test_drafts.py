"""Drafts by n-grams in vLLM: condensed layers take back those that the model does not agree with.

Each engine has a process of its own: once vLLM has loaded what finds n-grams, no other starts in the same one on a CPU.
"""

import pytest
from fresh import run
from small_models import condensed, prompts_of, random_llama
from vllm import LLM, SamplingParams

import condense

RECALL = condense.Recall(group_size=4, window=24, num_recall=6, min_recall=4, store_bits=4)
METHODS = {
    "recall": RECALL,
    "recall-drop-8": RECALL.replace(store_bits=8, unchosen="drop"),
    "last": condense.CCA(group_size=4, window=24),
    "window": {0: condense.StreamingLLM(sink=4, window=40), "rest": RECALL},
}
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
NEW = 60


def check_answers(folder, settings, prompts, want):
    llm = LLM(folder, **settings)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == want
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    assert 0 < counts["vllm:spec_decode_num_accepted_tokens"] < counts["vllm:spec_decode_num_draft_tokens"]


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_tokens_of_generate(greedy, device_settings, tmp_path, method):
    """Prompts of texts that repeat themselves, so that there are drafts."""
    model = condense.apply(random_llama(), method)
    model.save_pretrained(tmp_path)
    prompts = [(ids * 40)[:length] for ids, length in zip(prompts_of((7,) * 4), (230, 31, 150, 64), strict=True)]
    fixed = {"dtype": "float32", "max_num_batched_tokens": 64, "disable_log_stats": False, **device_settings}
    settings = condensed(model, **fixed, speculative_config=NGRAMS)
    run(check_answers, str(tmp_path), settings, prompts, greedy(model, prompts, NEW))
