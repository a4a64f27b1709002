"""A method in pages: page arithmetic, blocks per request, pages in host memory, and what is refused by name."""

import functools
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from models.tiny import refused

import condense
from condense.methods import settings_of
from condense.ops.latents import UpProjection
from condense.ops.step import record_format
from condense.ops.triton import limits
from condense.serving import trial
from condense.serving.blocks import ServedLayer, blocks_of_request, own_page, page_sizes, table_columns
from condense.serving.engine import EngineSettings, check_engine
from condense.serving.host import HostMemory, copied_bytes, host_bytes, slot_rows
from condense.serving.plan import serving_plan, serving_plans
from condense.serving.vllm.memory import available_bytes, rows_with_slots

STREAMING = condense.CCA(summary="streaming", key_pooling="select", rep_bias="log_size")
# Llama-3.1-8B
BF16, HEADS, WIDTHS, NUM_LAYERS = torch.bfloat16, 8, (128, 128), 32
FIT = [{"version": version} for version in ("0.32.0", "0.30.1+cpu", "0.32rc1", "0.33.0")]
FIT += [{"tensor_parallel": 8}, {"cache_dtype": "bfloat16"}, {"kv_heads": None, "tensor_parallel": 3}]
# latents of 12 and rope keys of 4 columns; queries of 16, as wide as without
LATENTS = UpProjection(torch.randn(4, 12, 12), torch.randn(4, 12, 16))
BY = {"steps": (None, True), "keys": (None, False), "latents": (LATENTS, False)}
TRIED = [STREAMING, condense.CCA(entry_bits=4), condense.StreamingLLM(sink=4, window=20)]
TRIED += [condense.Recall(store_bits=4, window=32, prompt=prompt) for prompt in ("recall", "exact")]
BLOCKS = [
    ((condense.CCA(),), (256, 16)),
    ((condense.CCA(), condense.LCA(group_size=24, window=96)), (480, 48)),
    # beside dense layers, blocks are large, and so may the pages of windows be
    ((condense.CCA(), None), (256, 256)),
    ((condense.CCA(), *[condense.StreamingLLM()] * 3), (224, 16)),
    ((condense.StreamingLLM(),), (256, 16)),
]
RINGS = [
    (condense.CCA(), 0),
    (condense.CCA(key_pooling="mean", value_pooling="mean", summary="streaming"), 0),
    (condense.LCA(num_summary_queries=1), 0),
    (condense.LCA(num_summary_queries=3), 16),
    # what needs no query is made at once: then the window need be no multiple of the group
    (condense.LCA(window=1000, key_pooling="mean", value_pooling="mean"), 0),
    (condense.LCA(group_size=20, window=100), 32),
    (condense.StreamingLLM(), 0),
    (condense.Recall(), 0),
    (condense.Recall(prompt="exact"), 0),
]
REFUSED = [
    (condense.DGA(), "one of Recall, CCA, LCA, StreamingLLM and Dense"),
    (condense.CCA(group_size=1), "at least 2"),
    (condense.Recall(group_size=1), "group_size must be at least 2 to be served, got 1: use unchosen='drop'"),
    (condense.Recall(window=15, store="host"), "^window must .* 16, .* got 15: .*'drop' or window=16$"),
    (condense.CCA(summary="prompt"), "summary='streaming'"),
    (condense.Recall(prompt="exact", keep=0.5), "^Recall needs .*use keep=1"),
    (condense.LCA(window=1000, group_size=16), "window=1008 or summary='last'"),
    (condense.LCA(num_summary_queries=17), "at most group_size, 16"),
    (STREAMING.replace(num_summary_queries=17, window=1000), "use window=1008 or .*; num_summary_queries must be"),
]
RECORDED = [
    (STREAMING.replace(entry_bits=4), WIDTHS, 1 << 20, True),
    (STREAMING.replace(entry_bits=8, rep_bias="matched"), (64, 80), 100, True),
    (condense.StreamingLLM(), WIDTHS, 1 << 20, True),
    (STREAMING.replace(entry_bits=4), (257, 257), 100, False),
    (STREAMING.replace(entry_bits=4), (576, 0), 100, True),
    # blocks of 32 channels would lie across latents and rope key
    (STREAMING.replace(entry_bits=4), (80, 0), 100, False),
    (STREAMING, (80, 0), 100, True),
    (condense.Recall(), WIDTHS, 32768 * 16, True),
    (condense.Recall(), WIDTHS, 32768 * 16 + 1, False),
    (condense.Recall(group_size=128), WIDTHS, 100, True),
    (condense.Recall(group_size=160), WIDTHS, 100, False),
    (None, WIDTHS, 100, False),
]
# beside what `test_command` asks for by flags
REFUSED_ENGINES = [
    ({"version": "0.34.0"}, "vllm>=0.30,<0.34"),
    ({"version": "dev"}, "vllm>=0.30,<0.34"),
    ({"tensor_parallel": 0}, "at least 1, got 0"),
    ({"kv_transfer": True}, "--kv-transfer-config"),
    ({"one_manager": True}, "--disable-hybrid-kv-cache-manager"),
    ({"shared_context": True}, "context parallelism"),
    ({"dense_latents": [0, 1, 4]}, "dense attention in layers 0-1, 4: give each a method"),
    ({"offloading": True, "kv_transfer": True}, "^--kv-offloading-size is .*: leave it out$"),
    ({"tensor_parallel": 3, "speculative": True}, "^--tensor-.* 8 KV heads, got 3: .*; --speculative-config .* out$"),
]
HOST = condense.Recall(group_size=4, window=24, store="host", store_bits=4)
OTHERS = [HOST.replace(store_bits=8), HOST.replace(store_bits=16), condense.CCA(group_size=4, window=24), None]
ON_HOST = [HOST.replace(store="device"), HOST, *OTHERS]
KEPT = [ServedLayer(method and serving_plan(method), 2, (16, 32), torch.float32) for method in ON_HOST]
FAR = page_sizes(KEPT).far
PAGES = torch.empty(10, 2, FAR // 4, 1, dtype=torch.uint8)


@pytest.mark.parametrize(("longest", "slots"), [(None, 64), (1000, 64), (250, 62), (3, 0)])
def test_no_request_has_more_slots_than_groups(longest, slots):
    layer = ServedLayer(serving_plan(HOST, longest), 2, (16, 32), torch.float32)
    assert layer.copied_bytes == 2 * slots * layer.host_slot_bytes
    plans = serving_plans(settings_of({0: HOST, 1: condense.Dense()}), longest)
    assert [plan.settings.choice.store.slots for plan in plans.values()] == [slots]


def layers_of(*methods):
    """The layers of Llama-3.1-8B, with these methods in turn; None for dense attention."""
    plans = [None if method is None else serving_plan(method) for method in methods]
    return [ServedLayer(plans[i % len(plans)], HEADS, WIDTHS, BF16) for i in range(NUM_LAYERS)]


def test_the_pages_of_the_paper_settings():
    plan = serving_plan(STREAMING)
    assert (plan.group_size, plan.kept_tokens, plan.ring_slots, plan.entry_slots(256)) == (16, 1040, 16, 16)
    assert page_sizes(layers_of(STREAMING)) == (256, 16)
    # what one request of 128K tokens holds: 512 blocks of entries, 65 or 66 of the window, a ring; a page of 16 keys
    # and values of all layers each
    layers = layers_of(STREAMING)
    assert blocks_of_request(layers, 131072) == (579, NUM_LAYERS * 16 * HEADS * 512)
    # short requests hold their tokens, and a chunk in flight is held too
    assert [blocks_of_request(layers, held).blocks for held in (1, 100)] == [1 + 1 + 1, 7 + 1 + 1]
    assert blocks_of_request(layers, 131072, num_new=2048).blocks == (1040 - 1 + 2048) // 16 + 2 + 512 + 1
    assert blocks_of_request(layers, 300, num_new=2048).blocks == 19 + 2 + 1
    # sinks lie in the first page
    assert [serving_plan(condense.StreamingLLM(sink=n)).entry_slots(256) for n in (0, 1, 4, 5)] == [1, 1, 4, 8]
    for n in (16, 128, 129, 300, 5000):
        layer = ServedLayer(serving_plan(condense.StreamingLLM(sink=n)), 1, WIDTHS, BF16)
        assert layer.plan.entry_slots(page_sizes([layer, layer]).far) >= n


@pytest.mark.parametrize("held", range(1, 70))
def test_blocks_cover_every_position_of_the_window(held):
    layers = layers_of(condense.LCA(group_size=4, window=20))
    (far, near), plan = page_sizes(layers), layers[0].plan
    pages = {position // near for position in range(max(0, held - plan.kept_tokens), held)}
    assert len(pages) <= blocks_of_request(layers, held).blocks - -(-held // far) - 1


@pytest.mark.parametrize(("methods", "sizes"), BLOCKS, ids=str)
def test_one_size_of_blocks_for_all_layers(methods, sizes):
    layers = layers_of(*methods)
    assert page_sizes(layers) == sizes
    assert all(sizes[0] % layer.plan.entry_slots(sizes[0]) == 0 for layer in layers if layer.plan is not None)


@pytest.mark.parametrize(("dense", "own"), [(False, 16), (True, 256)])
def test_pages_of_the_engines_own_layers(dense, own):
    """Pages of Gemma 3 with 12B are as large as those of windows, unless one layer keeps all tokens."""
    plan, shape = serving_plan(condense.CCA()), (8, (256, 256), BF16)
    layers = [ServedLayer(None, *shape, sliding=1024)] * 40 + [ServedLayer(plan, *shape)] * 8
    layers[-1] = ServedLayer(None, *shape) if dense else layers[-1]
    sizes = page_sizes(layers)
    assert own_page(layers, sizes) == (sizes.far if dense else sizes.near) == own
    # dense attention keeps the windows of the 40 too
    assert 0.1 < blocks_of_request(layers, 131072).share(layers, 131072) < 1


def test_windows_are_dealt_out_evenly_to_the_tables_they_need():
    """Where 40 windows take 16.3 times the bytes of what 8 layers keep, two tables have 20 each."""
    recall, shape = condense.Method.parse("recall-device:unchosen=drop"), (8, (256, 256), BF16)
    layers = [ServedLayer(None, *shape, sliding=1024)] * 40 + [ServedLayer(serving_plan(recall), *shape)] * 8
    assert page_sizes(layers) == (144, 16)
    assert blocks_of_request(layers, 131072).share(layers, 131072) < 0.34
    # vLLM's tables of such pages have room for whole numbers of 1,152 tokens: for more groups than kernels choose from
    assert table_columns(32768 * 16, 144) * 9 > 32768


@pytest.mark.parametrize(("method", "slots"), RINGS, ids=str)
def test_the_ring_holds_a_summary_and_what_lies_there_cannot_be_taken_back(method, slots):
    """Nor what is read otherwise than single tokens."""
    plan = serving_plan(method)
    assert plan.ring_slots == slots
    assert slots >= plan.settings.num_summary or plan.settings.num_summary == 1
    assert plan.settings.reads_otherwise == (method.as_steps is not method)
    assert plan.takes_back == (slots == 0 and method.as_steps is method)


@pytest.mark.parametrize(("method", "words"), REFUSED, ids=str)
def test_methods_that_are_refused(method, words):
    refused(words, serving_plan, method)


def test_a_refusal_names_the_layers():
    saved = settings_of({0: condense.DGA(), 1: STREAMING, 2: condense.DGA(), 3: condense.CCA(group_size=1)})
    refused(r"^layers 0, 2: method must be .*; layers 3: group_size must be", serving_plans, saved)


@pytest.mark.parametrize(("settings", "words"), REFUSED_ENGINES, ids=lambda x: x if isinstance(x, str) else "")
def test_engines_that_fit_and_engines_that_are_refused(settings, words):
    engine = EngineSettings(version="0.32.0", kv_heads=8)
    for fitting in FIT:
        check_engine(replace(engine, **fitting))
    refused(words, check_engine, replace(engine, **settings))


def test_a_later_vllm_is_tried_if_asked_for(monkeypatch):
    monkeypatch.setenv("CONDENSE_ANY_VLLM", "1")
    check_engine(EngineSettings(version="1.2.0", kv_heads=8))
    refused("CONDENSE_ANY_VLLM=1", check_engine, EngineSettings(version="0.29.1", kv_heads=8))


@pytest.mark.parametrize(("method", "widths", "longest", "has"), RECORDED, ids=str)
def test_layers_whose_single_tokens_graphs_may_record(monkeypatch, method, widths, longest, has):
    monkeypatch.setattr(limits, "_HAS_TRITON", True)
    latent = 0 if widths[1] else widths[0] - 64
    plan = None if method is None else serving_plan(method)
    layer = ServedLayer(plan, 1, widths, BF16, latent)
    assert layer.has_step(torch.device("cuda"), longest) is has
    assert not layer.has_step(torch.device("cpu"), longest)


@pytest.mark.parametrize("length", [7, 300])
@pytest.mark.parametrize("method", TRIED, ids=range(5))
@pytest.mark.parametrize(("up", "has_step"), BY.values(), ids=BY)
def test_trials_read_the_ends_of_prompts(method, length, up, has_step, monkeypatch):
    """Of 20 tokens those that fit, each of which attends to something; two prompts, most of whose queries one has; of a
    second layer the longest prompt alone. Single tokens where no step of kernels reads them.
    """
    heads, widths = (2, (16, 16)) if up is None else (1, (16, 0))
    layer, reads, read = ServedLayer(serving_plan(method), heads, widths, torch.float32), [], trial.read_paged
    found, extras = [], condense.ops.Extras(sink_logits=torch.randn(4))

    def read_one(qkv, state, new, *args, **options):
        assert state.extras is extras
        # one form of pages for all lengths: each would compile kernels anew
        assert state.window.table.shape[1] == table_columns(length, state.window.slots)
        block_bytes = blocks_of_request([layer], length).block_bytes
        assert state.entries.cache.stride(0) * state.entries.cache.itemsize == block_bytes
        reads.append(new)
        read(qkv, state, new, *args, **options)

    monkeypatch.setattr(ServedLayer, "has_step", lambda *_: has_step)
    monkeypatch.setattr(trial, "_COMPILED", set())
    monkeypatch.setattr(trial, "read_paged", read_one)
    qkv = [torch.randn(20, *shape) for shape in ((4, 16), (heads, widths[0]), (heads, widths[1]))]
    for _ in range(2):
        out = torch.full((20, 4, 16), float("nan"))
        state_of = functools.partial(condense.ops.paged.PagedState, up=up, extras=extras)
        trial.read_trials(qkv, layer, [layer], length, scale=0.25, out=out, state_of=state_of)
        read_tokens = max(new.starts[-1] for new in reads)
        assert torch.equal(out.isfinite().all(2).all(1), torch.arange(20) < read_tokens)
        assert read_tokens >= min(20, length)
        assert all(len(set(new.starts)) == len(new.starts) and new.starts[-1] <= 20 for new in reads)
        found.append([new.seen for new in reads])
        reads.clear()
    rule, g = layer.plan.settings.rule, layer.plan.group_size
    ends = [rule.window + n * g for n in (0, *(2**i for i in range(9))) if rule.window + n * g < length]
    counts = 2 + (layer.plan.settings.reads_otherwise and not has_step)
    shorter = [lengths for end in ends for lengths in ([end], [end, end - 1]) for _ in range(counts)]
    assert found == [[[length], [length, length], *shorter], [[length]]]


def test_a_page_holds_what_records_leave_out():
    memory, whole = HostMemory(KEPT, ranks=1), record_format(KEPT[0].plan.settings, (16, 32), torch.float32)
    memory.measure(10**9)
    device, four, eight, sixteen, *others = (memory.pages_of(layer, PAGES) for layer in KEPT)
    assert device is None
    assert others == [None, None]
    assert four.shape == (10, 2, FAR // 4, whole.nbytes - KEPT[1].slot_bytes)
    # tokens in their own dtype, a key and its value side by side
    assert sixteen[0].nbytes == 2 * FAR * (16 + 32) * 4
    assert four[0].nbytes + eight[0].nbytes + sixteen[0].nbytes == host_bytes(KEPT)
    # where an engine pads pages to one size, a page is as large as several
    assert memory.pages_of(KEPT[1], PAGES.repeat(1, 1, 3, 1)).nbytes == 3 * four.nbytes
    assert KEPT[0].far_bytes(FAR) == KEPT[1].far_bytes(FAR) + four[0].nbytes


def test_so_many_requests_have_slots_as_fit_beside_them():
    one, slots = blocks_of_request(KEPT, 1000).total_bytes, copied_bytes(KEPT)
    assert slots == sum(64 * x.heads * x.host_slot_bytes for x in KEPT) > 0
    for num in (0, 3):
        assert slot_rows(KEPT, 1000, num * (one + slots) + slots) == num
    assert slot_rows(KEPT, 1000, -5) == 0


@pytest.mark.parametrize(("flag", "wanted"), [(None, 5), ("kv_cache_memory_bytes", 9), ("num_gpu_blocks_override", 9)])
def test_requests_with_slots_follow_the_flags(flag, wanted, monkeypatch):
    """Five and their slots fit; or pages of three are given, and beside them slots of nineteen would fit. At most as
    many as run at once, and none if there is no memory left.
    """
    one, slots = blocks_of_request(KEPT, 1000), copied_bytes(KEPT)
    asked = {"kv_cache_memory_bytes": 3 * one.total_bytes, "num_gpu_blocks_override": 3 * one.blocks}
    given = {name: number if name == flag else None for name, number in asked.items()}
    cache = SimpleNamespace(gpu_memory_utilization=0.5, **given)
    config = SimpleNamespace(
        cache_config=cache, model_config=SimpleNamespace(max_model_len=1000),
        scheduler_config=SimpleNamespace(max_num_seqs=100),
    )  # fmt: skip
    total = 10**9
    free = total // 2 + (3 * one.total_bytes + 19 * slots if flag else 5 * (one.total_bytes + slots))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, total))
    assert rows_with_slots(config, KEPT) == wanted
    config.scheduler_config.max_num_seqs = 2
    assert rows_with_slots(config, KEPT) == 2
    free = total // 3
    assert rows_with_slots(config, KEPT) == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_more_than_the_host_has_is_refused_with_the_number_of_blocks_that_fit(ranks):
    memory = HostMemory(KEPT, ranks)
    memory.measure(9 * ranks * host_bytes(KEPT))
    with pytest.raises(ValueError, match=r"for 10 blocks, of which the host has 0\.0") as error:
        memory.pages_of(KEPT[1], PAGES)
    fitting = int(re.search(r"--num-gpu-blocks-override (\d+), or store='device'", str(error.value))[1])
    assert fitting == 8
    # what this process and others have taken by now is no less than was counted
    memory.measure(0)
    assert [len(memory.pages_of(layer, PAGES[:fitting])) for layer in KEPT[1:3]] == [8, 8]
    assert len(memory.pages_of(KEPT[1], PAGES[:3])) == 3  # vLLM may ask again with another pool
    assert memory.pages_of(KEPT[1], PAGES[:0]) is None
    small = HostMemory(KEPT, ranks)
    small.measure(host_bytes(KEPT) - 1)  # not even one block
    with pytest.raises(ValueError, match=r"of which the host has 0\.0: use store='device'"):
        small.pages_of(KEPT[1], PAGES)


def test_a_container_has_what_its_limit_leaves(tmp_path):
    assert available_bytes(tmp_path / "none") > 2**20
    for name, text in (("memory.stat", "anon 5\ninactive_file 300\n"), ("memory.current", "1000\n")):
        (tmp_path / name).write_text(text)
    for limit, left in (("1500\n", 800), ("max\n", None)):
        (tmp_path / "memory.max").write_text(limit)
        assert (available_bytes(tmp_path) == left) is (left is not None)
