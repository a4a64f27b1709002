"""Answers of 512 tokens to prompts of 4K to 32K: those of generate, read anew, found in the cache, and put back.

Takes an hour or more on a CPU, so it is no part of `make test-vllm`: docs/vllm-plugin.md has the command.
"""

import pytest
import torch
from small_models import SIZES, condensed, prompts_of
from transformers import LlamaConfig, LlamaForCausalLM

import condense
from condense.models import choice_from_text
from condense.serving.plan import serving_plans

SETTINGS = {
    # In 16 bits: with 4 in three layers float32's noise decides. Weights that differ by 3e-7 of their size change
    # generate's own answers from the second token on. The first layer alone gets numbers free of noise
    # Dense prompts, as what shared choices leave in the cache depends on the pieces in which a prompt is read
    "recall-device": "recall-device:store_bits=16,prompt=exact",
    "calibrated": "recall-device:prompt=exact@0+cca:key_pooling=mean,value_pooling=mean,entry_bits=4@1+"
    "streaming_llm:sink=4,window=1024@2",
    "pooled": "pooled",
}
LENGTHS = [4096 + 1509 * i for i in range(20)]
# every fourth length, so that parts take about as long
PARTS = {f"part{i}": LENGTHS[i::4] for i in range(4)}
NEW, PIECE = 512, 2048
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=SETTINGS)
def model(request):
    torch.manual_seed(0)
    sizes = SIZES | {"max_position_embeddings": LENGTHS[-1] + NEW, "num_hidden_layers": 3}
    return condense.apply(LlamaForCausalLM(LlamaConfig(**sizes)).eval(), choice_from_text(SETTINGS[request.param]))


@pytest.fixture(scope="module", params=PARTS)
def prompts(request):
    return prompts_of(PARTS[request.param], seed=PARTS[request.param][0])


@pytest.fixture(scope="module")
def wanted(model, prompts, greedy):
    return greedy(model, prompts, NEW)


def settings_of_engine(model, **more):
    return condensed(model, max_model_len=LENGTHS[-1] + NEW, max_num_batched_tokens=PIECE, **more)


def test_read_anew_and_found_in_the_cache(engine, model, folder, prompts, wanted):
    started = engine(folder, **settings_of_engine(model))
    started.scheduler.reset_prefix_cache()
    page = started.page
    for is_cached in (False, True):
        outputs = started.generate(prompts, NEW)
        assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
        found = [output.num_cached_tokens for output in outputs]
        assert found == [(len(ids) - 1) // page * page if is_cached else 0 for ids in prompts]


def test_put_back(engine, model, folder, prompts, wanted, greedy):
    """Twice, all that run, amid their answers: their pages go. So a request is read again as a prompt that ends with
    its answer so far, as `generate` reads one.
    """
    from vllm import SamplingParams

    started = engine(folder, **settings_of_engine(model))
    vllm, scheduler = started.llm.llm_engine, started.scheduler
    scheduler.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    for i, ids in enumerate(prompts):
        vllm.add_request(str(i), {"prompt_token_ids": ids}, params)
    cuts, marks, got = {str(i): [] for i in range(len(prompts))}, [NEW // 5, NEW // 2], {}
    while vllm.has_unfinished_requests():
        got |= {o.request_id: list(o.outputs[0].token_ids) for o in vllm.step() if o.finished}
        if marks and len(scheduler.running) == len(prompts):
            answered = {each.request_id.partition("-")[0]: each.num_output_tokens for each in scheduler.running}
            if min(answered.values()) >= marks[0]:
                marks.pop(0)
                for name, num in answered.items():
                    cuts[name].append(num)
                assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert all(len(each) == 2 for each in cuts.values())
    is_exact = any(plan.settings.reads_otherwise for plan in serving_plans(model.config.condense).values())
    for i, (ids, want) in enumerate(zip(prompts, wanted, strict=True)):
        expected = want
        for cut in cuts[str(i)] if is_exact else ():
            (rest,) = greedy(model, [[*ids, *expected[:cut]]], NEW - cut)
            expected = [*expected[:cut], *rest]
        assert got[str(i)] == expected
