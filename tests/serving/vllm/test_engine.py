"""Condensed models in vLLM give the tokens of generate, however their prompts are read and whatever else runs."""

import pytest
import torch
from fresh import run
from small_models import condensed, prompts_of, random_latents, random_llama
from vllm import LLM, SamplingParams

import condense
from condense.methods import methods_in

METHOD = condense.LCA(group_size=4, window=24, rep_bias="log_size")
RECALL = condense.Recall(group_size=4, window=24, num_recall=6, min_recall=4, store_bits=4)
MEANS = condense.CCA(group_size=4, window=16, key_pooling="mean", value_pooling="mean", entry_bits=4)
METHODS = {
    "pooled": METHOD, "recall": RECALL,
    "exact-prompts": RECALL.replace(prompt="exact"), "allocation": {0: RECALL, "rest": MEANS},
    "host": {0: RECALL, "rest": RECALL.replace(store="host")}, "host-16": RECALL.replace(store="host", store_bits=16),
    "latents": METHOD, "latents-allocation": {0: RECALL.replace(unchosen="drop"), "rest": METHOD.replace(entry_bits=8)},
}  # fmt: skip
OTHERS = {
    "last": (condense.CCA(group_size=4, window=19), None),
    "two-of-three-layers": (condense.CCA(group_size=16, window=32, summary="streaming", key_pooling="select"), [0, 2]),
    "large-groups": (condense.LCA(group_size=20, window=40, num_summary_queries=3, key_pooling="mean"), None),
    "two-methods": ({0: condense.CCA(group_size=4, window=24), "rest": condense.LCA(group_size=8, window=16)}, None),
    "one-dense-layer": ({0: condense.Dense(), "rest": condense.LCA(group_size=8, window=16)}, None),
    "4-bits-matched": (condense.LCA(group_size=4, window=24, rep_bias="matched", entry_bits=4), None),
    "recall-16": (RECALL.replace(store_bits=16, num_recall=0.3), None),
    "recall-8": (RECALL.replace(store_bits=8, group_size=8), None),
    "recall-4-drop-beside-dense": (RECALL.replace(unchosen="drop"), [0, 2]),
    "exact-16": (RECALL.replace(prompt="exact", store_bits=16), None),
    "exact-16-host": (RECALL.replace(prompt="exact", store_bits=16, store="host"), None),
    "exact-8-host": (RECALL.replace(prompt="exact", store_bits=8, store="host"), [1, 2]),
    # a code near a tie follows float32's noise: with layers 0 and 2 one of these answers parts from `generate`'s
    "exact-8-beside-dense": (RECALL.replace(prompt="exact", store_bits=8), [1, 2]),
}
# in 16 bits: rounding makes of float32's noise other numbers, and in some texts other tokens
OWN_GROUPS = RECALL.replace(unchosen="drop", num_recall=0.5, group_size=8, store_bits=16)
OTHERS["allocation"] = {0: OWN_GROUPS, 1: MEANS, 2: condense.StreamingLLM(sink=4, window=40)}, None
LENGTHS = (230, 31, 1, 150, 64, 17)
NEW = 24
# pieces of prompts beside single tokens of other requests
PIECES = {"max_num_batched_tokens": 48}
OF_LATENTS = {
    "recall-16": ("deepseek_v2", RECALL.replace(store_bits=16, num_recall=0.3)),
    "recall-8-drop": ("deepseek_v3", RECALL.replace(store_bits=8, unchosen="drop", group_size=8)),
    "recall-4": ("deepseek_v3", RECALL),
    "host-4": ("deepseek_v2", {0: RECALL, "rest": RECALL.replace(store="host")}),
    "host-16-4": (
        "deepseek_v3",
        {0: RECALL.replace(store="host", store_bits=16), "rest": RECALL.replace(store="host")},
    ),
    "matched": ("deepseek_v2", METHOD.replace(rep_bias="matched", summary="last")),
    "allocation": ("deepseek_v2", {0: condense.StreamingLLM(sink=4, window=40), "rest": METHOD}),
}
DRAFTED = {
    "recall": RECALL,
    "recall-drop-8": RECALL.replace(store_bits=8, unchosen="drop"),
    "last": condense.CCA(group_size=4, window=24),
    "window": {0: condense.StreamingLLM(sink=4, window=40), "rest": RECALL},
}
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module", params=METHODS)
def model(request):
    stock = random_latents() if request.param.startswith("latents") else random_llama()
    return condense.apply(stock, METHODS[request.param])


@pytest.fixture(scope="module")
def wanted(model, greedy):
    return greedy(model, prompts_of(LENGTHS), NEW)


@pytest.fixture
def chunked(engine, model, folder):
    return engine(folder, **condensed(model, **PIECES))


def test_prompts_in_pieces_among_single_tokens_are_found_again(chunked, wanted):
    assert chunked.tokens(prompts_of(LENGTHS), NEW) == wanted
    outputs, page = chunked.generate(prompts_of(LENGTHS), NEW), chunked.page
    assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
    assert [output.num_cached_tokens for output in outputs] == [(length - 1) // page * page for length in LENGTHS]


def test_a_shared_beginning(chunked, model, greedy):
    (text,) = prompts_of([192], seed=5)
    first, second = ([*text, *question] for question in prompts_of([9, 33], seed=6))
    want = greedy(model, [first, second], NEW)
    assert chunked.tokens([first], NEW) == want[:1]
    outputs = chunked.generate([first, second], NEW)
    assert [list(output.outputs[0].token_ids) for output in outputs] == want
    assert [output.num_cached_tokens for output in outputs] == [192 // chunked.page * chunked.page] * 2


def test_several_answers_and_stops(chunked, wanted):
    (output,) = chunked.generate(prompts_of(LENGTHS)[:1], NEW, n=3, temperature=1.0, top_k=1)
    assert [list(answer.token_ids) for answer in output.outputs] == [wanted[0]] * 3
    stop = wanted[0][7]
    at = wanted[0].index(stop)
    assert chunked.tokens(prompts_of(LENGTHS)[:1], NEW, stop_token_ids=[stop]) == [wanted[0][: at + 1]]


def test_a_request_that_is_given_up(chunked, wanted):
    engine = chunked.llm.llm_engine
    chunked.scheduler.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    for name, ids in zip("abc", prompts_of(LENGTHS)[:3], strict=True):
        engine.add_request(name, {"prompt_token_ids": ids}, params)
    done = {}
    for step in range(200):
        for output in engine.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
        if step == 2:
            engine.abort_request(["a"])
        if step == 8:
            engine.abort_request(["b"])
        if not engine.has_unfinished_requests():
            break
    assert done == {"c": wanted[2]}


def test_steps_without_a_request_write_to_no_page_of_one(chunked, wanted):
    """As an idle rank does them where data is parallel; pages of earlier requests stay in the prefix cache."""
    assert chunked.tokens(prompts_of(LENGTHS), NEW) == wanted
    llm = chunked.llm.llm_engine
    context = llm.vllm_config.compilation_config.static_forward_context.values()
    pages = [x for layer in context for x in (layer.kv_cache, getattr(layer, "store", None)) if x is not None]
    for x in pages:
        x[0].zero_()  # which belongs to nobody
    before = [x.clone() for x in pages]
    # on a CPU, which has no graphs, only so with attention
    given = {"uniform_decode": True, "force_attention": True, "is_graph_capturing": True}
    llm.engine_core.engine_core.model_executor.collective_rpc(lambda worker: worker.model_runner._dummy_run(1, **given))
    assert all(torch.equal(x[1:], old[1:]) for x, old in zip(pages, before, strict=True))
    assert any(x[0].any() for x in pages)
    outputs = chunked.generate(prompts_of(LENGTHS), NEW)
    assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
    assert outputs[0].num_cached_tokens > 0


def test_whole_prompts(engine, model, folder, wanted):
    started = engine(folder, **condensed(model, max_num_batched_tokens=2048, enable_prefix_caching=False))
    assert started.tokens(prompts_of(LENGTHS), NEW) == wanted


def test_a_pool_that_is_too_small_for_all(engine, model, folder, greedy, put_back):
    """Requests that grow are put back, lose their pages and are read again as prompts that end with the answers so far:
    exactly, by a method that reads prompts so.
    """
    prompts = prompts_of((3, 17, 9, 30, 5, 12), seed=2)
    want = greedy(model, prompts, 70)
    settings = {**PIECES, "max_model_len": 128, "num_gpu_blocks_override": 22}
    started = engine(folder, **condensed(model, scheduler_reserve_full_isl=False, **settings))
    found = put_back(started)
    got = started.tokens(prompts, 70)
    assert len(found) >= 2
    if any(method.as_steps is not method for method in methods_in(model.config.condense).values()):
        for prompt, num in found:
            answer = want[prompts.index(prompt)]
            (answer[num:],) = greedy(model, [[*prompt, *answer[:num]]], 70 - num)
    assert got == want


@pytest.mark.parametrize(("method", "layers"), OTHERS.values(), ids=OTHERS)
def test_other_methods_and_layers(outputs_of, method, layers):
    outputs_of(condense.apply(random_llama(layers=3), method, layers), prompts_of(LENGTHS), NEW, **PIECES)


@pytest.mark.parametrize(("family", "method"), OF_LATENTS.values(), ids=OF_LATENTS)
def test_other_methods_on_latents(outputs_of, family, method):
    outputs_of(condense.apply(random_latents(family), method), prompts_of(LENGTHS), NEW, **PIECES)


def test_prompts_in_which_few_tokens_choose(outputs_of):
    """Read at once, as `generate` reads them: what queries open depends on where calls begin and end."""
    model = condense.apply(random_llama(layers=3), RECALL.replace(prompt="shared", store_bits=16))
    outputs_of(model, prompts_of(LENGTHS), NEW, max_num_batched_tokens=2048, enable_prefix_caching=False)


def check_drafted(folder, settings, prompts, want, new):
    llm, params = LLM(folder, **settings), SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == want
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    assert 0 < counts["vllm:spec_decode_num_accepted_tokens"] < counts["vllm:spec_decode_num_draft_tokens"]


@pytest.mark.parametrize("method", DRAFTED.values(), ids=DRAFTED)
def test_drafts_that_the_model_does_not_agree_with_are_taken_back(greedy, device_settings, tmp_path, method):
    """In a process of its own: once vLLM has loaded what finds n-grams, no other engine starts in one on a CPU."""
    model = condense.apply(random_llama(), method)
    model.save_pretrained(tmp_path)
    prompts = [(ids * 40)[:length] for ids, length in zip(prompts_of((7,) * 4), (230, 31, 150, 64), strict=True)]
    fixed = {"dtype": "float32", "max_num_batched_tokens": 64, "disable_log_stats": False, **device_settings}
    settings = condensed(model, **fixed, speculative_config=NGRAMS)
    run(check_drafted, str(tmp_path), settings, prompts, greedy(model, prompts, 60), 60)
