"""Answers of 512 tokens to prompts of 4K to 32K: those of generate, read anew and found in the cache.

Takes an hour or more on a CPU, so it is no part of `make test-vllm`:

    OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -o filterwarnings=default --disable-warnings -m slow \\
      tests/serving/vllm/test_long_answers.py -k recall-device
"""

import pytest
import torch
from small_models import SIZES, condensed, prompts_of
from transformers import LlamaConfig, LlamaForCausalLM

import condense
from condense.models import choice_from_text

SETTINGS = {
    # in 16 bits: with 4 in three layers float32's noise decides. Weights that differ by 3e-7 of their size change
    # generate's own answers from the second token on. The first layer alone gets numbers free of noise
    "recall-device": "recall-device:store_bits=16",
    "calibrated": "recall-device@0+cca:key_pooling=mean,value_pooling=mean,entry_bits=4@1+"
    "streaming_llm:sink=4,window=1024@2",
    "pooled": "pooled",
}
LENGTHS = [4096 + 1509 * i for i in range(20)]
# every fourth length, so that parts take about as long
PARTS = {f"part{i}": LENGTHS[i::4] for i in range(4)}
NEW = 512
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("lengths", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("text", SETTINGS.values(), ids=SETTINGS)
def test_read_anew_and_found_in_the_cache(engine, greedy, tmp_path, text, lengths):
    torch.manual_seed(0)
    sizes = SIZES | {"max_position_embeddings": LENGTHS[-1] + NEW, "num_hidden_layers": 3}
    model = condense.apply(LlamaForCausalLM(LlamaConfig(**sizes)).eval(), choice_from_text(text))
    model.save_pretrained(tmp_path)
    prompts = prompts_of(lengths, seed=lengths[0])
    wanted = greedy(model, prompts, NEW)
    settings = {"max_model_len": LENGTHS[-1] + NEW, "max_num_batched_tokens": 2048}
    started = engine(tmp_path, **condensed(model, **settings))
    page = started.page
    for is_cached in (False, True):
        outputs = started.generate(prompts, NEW)
        assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
        found = [output.num_cached_tokens for output in outputs]
        assert found == [(len(ids) - 1) // page * page if is_cached else 0 for ids in prompts]
