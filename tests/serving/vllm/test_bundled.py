"""The bundled model in vLLM finds the numbers that generate finds, in the same tokens."""

import math

from small_models import condensed

import condense
from condense.demo import demo_model, demo_prompt

METHOD = condense.CCA(window=256, summary="streaming", key_pooling="select", rep_bias="log_size")


def test_questions_on_one_text(engine, greedy):
    model, tokenizer = demo_model()
    condense.apply(model, METHOD)
    prompt = demo_prompt()
    ids = [tokenizer.encode(prompt.text + question) for question in prompt.questions[:2]]
    want = greedy(model, ids, 8)
    settings = {"max_model_len": 4352, "max_num_batched_tokens": 512}
    started = engine(model.name_or_path, **condensed(model, **settings))
    outputs = started.generate(ids[:1], 8, logprobs=0) + started.generate(ids[1:], 8, logprobs=0)
    assert [list(output.outputs[0].token_ids) for output in outputs] == want
    assert [output.num_cached_tokens for output in outputs] == [0, 3840]
    for output, row, number in zip(outputs, want, prompt.expected, strict=False):
        assert number in tokenizer.decode(row)
        likely = [chosen[token].logprob for chosen, token in zip(output.outputs[0].logprobs, row, strict=True)]
        assert math.fsum(likely) > -5
