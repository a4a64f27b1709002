"""The bundled model in vLLM finds the numbers that generate finds, in the same tokens."""

import math

import pytest
from small_models import condensed

import condense
from condense.demo import demo_model, demo_prompt

METHODS = {
    "pooled": condense.CCA(window=256, summary="streaming", key_pooling="select", rep_bias="log_size"),
    "recall": condense.Recall(window=256, num_recall=32, store_bits=4, unchosen="drop"),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_questions_on_one_text(engine, greedy, method):
    model, tokenizer = demo_model()
    condense.apply(model, method)
    prompt = demo_prompt()
    ids = [tokenizer.encode(prompt.text + question) for question in prompt.questions[:2]]
    want = greedy(model, ids, 8)
    settings = {"max_model_len": 4352, "max_num_batched_tokens": 512}
    started = engine(model.name_or_path, **condensed(model, **settings))
    outputs = started.generate(ids[:1], 8, logprobs=0) + started.generate(ids[1:], 8, logprobs=0)
    assert [list(output.outputs[0].token_ids) for output in outputs] == want
    assert [output.num_cached_tokens for output in outputs] == [0, 3907 // started.page * started.page]
    for output, row, number in zip(outputs, want, prompt.expected, strict=False):
        assert number in tokenizer.decode(row)
        likely = [chosen[token].logprob for chosen, token in zip(output.outputs[0].logprobs, row, strict=True)]
        assert math.fsum(likely) > -5
