"""A method in pages: page arithmetic, blocks per request, and what is refused by name, without an engine."""

import pytest

import condense
from condense.methods import methods_in, settings_of
from condense.serving.plan import EngineSettings, check_engine, serving_plan

STREAMING = condense.CCA(summary="streaming", key_pooling="select", rep_bias="log_size")


def test_the_pages_of_the_paper_settings():
    plan = serving_plan(STREAMING)
    assert (plan.slots, plan.group_size, plan.kept_tokens, plan.tokens_per_page) == (16, 16, 1040, 256)
    assert plan.has_ring
    # what one request of 128K tokens holds: 512 pages of entries, 65 or 66 of the window, a ring
    assert plan.blocks(131072) == (66, 512, 1)
    assert plan.blocks(131072).total == 579


def test_short_requests_hold_their_tokens():
    plan = serving_plan(STREAMING)
    assert plan.blocks(1) == (1, 1, 1)
    assert plan.blocks(100) == (7, 1, 1)


def test_a_chunk_in_flight_is_held_too():
    plan = serving_plan(STREAMING)
    assert plan.blocks(131072, num_new=2048).window == (1040 - 1 + 2048) // 16 + 2
    assert plan.blocks(300, num_new=2048).window == 19


@pytest.mark.parametrize("held", range(1, 70))
def test_blocks_cover_every_position_of_the_window(held):
    """The most pages that any ``kept_tokens`` tokens in a row touch, counted."""
    plan = serving_plan(condense.LCA(group_size=4, window=20))
    starts = range(max(0, held - plan.kept_tokens), max(0, held - plan.kept_tokens) + 1)
    for start in starts:
        pages = {position // plan.slots for position in range(start, held)}
        assert len(pages) <= plan.blocks(held).window


@pytest.mark.parametrize(
    ("method", "slots", "ring"),
    [
        (condense.CCA(), 16, False),
        (condense.CCA(window=1000, group_size=16), 16, False),
        (condense.CCA(key_pooling="mean", value_pooling="mean", summary="streaming"), 16, False),
        (condense.LCA(num_summary_queries=1), 16, False),
        (condense.LCA(num_summary_queries=3), 16, True),
        (condense.LCA(group_size=48, window=96), 48, True),
        (condense.LCA(group_size=20, window=100), 32, True),
    ],
    ids=str,
)
def test_the_ring_fits_a_page(method, slots, ring):
    plan = serving_plan(method)
    assert (plan.slots, plan.has_ring) == (slots, ring)
    assert plan.slots >= plan.settings.num_summary


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (condense.DGA(), "CCA or LCA"),
        (condense.Recall(), "CCA or LCA"),
        (condense.StreamingLLM(), "CCA or LCA"),
        (condense.Dense(), "CCA or LCA"),
        (condense.CCA(group_size=1), "at least 2"),
        (condense.CCA(summary="prompt"), "summary='streaming'"),
        (condense.LCA(window=1000, group_size=16), "window=1008 or summary='last'"),
        (condense.LCA(num_summary_queries=17), "at most group_size, 16"),
        (STREAMING.replace(entry_bits=4), "pages hold entries of 16 bits, got .*: use entry_bits=16"),
        (STREAMING.replace(entry_bits=4, window=1000), "use entry_bits=16; window must be .*: use window=1008 or"),
    ],
    ids=str,
)
def test_methods_that_are_refused(method, words):
    with pytest.raises(ValueError, match=words):
        serving_plan(method)


FITS = EngineSettings(version="0.32.0", kv_heads=8)


def changed(**settings):
    return EngineSettings(**{"version": "0.32.0", "kv_heads": 8, **settings})


@pytest.mark.parametrize(
    "engine",
    [
        FITS,
        changed(tensor_parallel=8),
        changed(cache_dtype="bfloat16"),
        changed(version="0.29.1+cpu"),
        changed(version="0.32rc1"),
    ],
    ids=str,
)
def test_engines_that_fit(engine):
    check_engine(engine)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (changed(version="0.28.2"), "vllm>=0.29,<0.33"),
        (changed(version="0.33.0"), "vllm>=0.29,<0.33"),
        (changed(cache_dtype="fp8_e4m3"), "--kv-cache-dtype must be auto or the model's bfloat16"),
        (changed(cache_dtype="float16"), "--kv-cache-dtype"),
        (changed(version="dev"), "vllm>=0.29,<0.33"),
        (changed(tensor_parallel=0), "at least 1, got 0"),
        (changed(tensor_parallel=16), "8 KV heads, got 16"),
        (changed(tensor_parallel=3), "8 KV heads, got 3"),
        (changed(kv_transfer=True), "--kv-transfer-config"),
        (changed(offloading=True), "--kv-offloading-size"),
        (changed(one_manager=True), "--disable-hybrid-kv-cache-manager"),
        (changed(speculative=True), "--speculative-config"),
        (changed(shared_context=True), "context parallelism"),
        (changed(microbatches=True), "--enable-dbo"),
        (changed(offloading=True, kv_transfer=True), "^--kv-offloading-size is .*: leave it out$"),
        (changed(tensor_parallel=3, speculative=True), "^--tensor-parallel-size .*; --speculative-config .* out$"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_engines_that_are_refused(engine, words):
    with pytest.raises(ValueError, match=words):
        check_engine(engine)


def test_the_settings_of_is_read_back():
    choice = {0: condense.CCA(), 2: condense.LCA(window=32), 5: condense.CCA()}
    saved = settings_of(choice)
    assert [part["layers"] for part in saved["methods"]] == [[0, 5], [2]]
    assert methods_in(saved) == choice
    with pytest.raises(ValueError, match=r"config\.condense must be"):
        methods_in({"method": "cca"})
