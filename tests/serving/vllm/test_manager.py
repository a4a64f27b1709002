"""vLLM's own cache manager with the pages of condensed layers, without a model: groups, pages held, shared prefixes."""

import math
from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import CircularBufferSpec, FullAttentionSpec, SlidingWindowSpec, iter_layer_specs
from vllm.v1.request import Request

import condense
from condense.demo import demo_model
from condense.serving.blocks import ServedLayer, blocks_of_request, own_page, page_sizes
from condense.serving.engine import EngineSettings, check_engine
from condense.serving.plan import serving_plan
from condense.serving.vllm import backend
from condense.serving.vllm.backend import CondensedAttention, page_specs
from condense.serving.vllm.models import engine_settings

try:  # from vLLM 0.33 on
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

POOLED = condense.CCA(summary="streaming", key_pooling="select", rep_bias="log_size")
RECALL = condense.Method.parse("recall-device")
WIDE = RECALL.replace(num_recall=256)
MEANS = condense.CCA(key_pooling="mean", value_pooling="mean", rep_bias="log_size", entry_bits=4)
# Llama-3.1-8B in bfloat16
LAYERS, WIDTHS = 32, (128, 128)
# vLLM's own layers that see so many tokens
SLIDING = 1024
SETTINGS = {
    "pooled": [POOLED] * LAYERS, "some layers": [None] * 2 + [POOLED] * (LAYERS - 2),
    "one dense layer": [None] + [MEANS] * (LAYERS - 1), "recall": [RECALL] * LAYERS,
    "calibrated": [WIDE] * 16 + [condense.StreamingLLM(window=1024)] * 16,
    # docs/serving.md measures it
    "three kinds": [RECALL.replace(num_recall=1.0)] + [RECALL.replace(min_recall=512)] * 13
    + [MEANS.replace(window=256)] * 9 + [condense.StreamingLLM(window=1024)] * 9, "latents": [RECALL] * 27,
    "host": [RECALL] + [condense.Method.parse("recall-host")] * (LAYERS - 1), "latents pooled": [condense.LCA()] * 27,
    "sliding": [RECALL if i % 6 == 5 else SLIDING for i in range(48)],
    "sliding and dense": [(None if i == 5 else RECALL) if i % 6 == 5 else SLIDING for i in range(48)],
}  # fmt: skip
# KV heads and widths; those of DeepSeek-V2-Lite, which cache one vector per token, and of Gemma 3 with 12B
GEMMA = (8, (256, 256))
SHAPES = {"latents": (1, (576, 0)), "latents pooled": (1, (576, 0)), "sliding": GEMMA, "sliding and dense": GEMMA}
FLAGS = [
    ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype"),
    ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, "--kv-transfer-config"),
    ({"kv_offloading_size": 1.0}, "--kv-offloading-size"),
    ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager"),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "--speculative-config"),
    ({"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, "--pipeline-parallel-size"),
    ({"hf_overrides": {"dual_chunk_attention_config": {"sparse_attention_config": {}}}}, "dual_chunk_attention_config"),
]


def served(name):
    layers, shape = [], (*SHAPES.get(name, (8, WIDTHS)), torch.bfloat16)
    for method in SETTINGS[name]:
        plan = serving_plan(method) if isinstance(method, condense.Method) else None
        layers.append(ServedLayer(plan, *shape, sliding=method if method == SLIDING else None))
    return layers


def specs_of(name):
    layers, specs = served(name), {}
    for i, layer in enumerate(layers):
        if layer.plan is None:
            page = {"num_kv_heads": layer.heads, "head_size": layer.widths[0], "dtype": torch.bfloat16}
            page |= {"block_size": own_page(layers, page_sizes(layers))}
            sliding = layer.sliding and SlidingWindowSpec(sliding_window=layer.sliding, **page)
            specs[f"model.layers.{i}.self_attn"] = sliding or FullAttentionSpec(**page)
        else:
            specs |= {f"model.layers.{i}.{kind}": s for kind, s in page_specs(layer, page_sizes(layers)).items()}
    return specs


LONG = 131072


@pytest.fixture(scope="module")
def config():
    init_none_hash(sha256)
    folder = demo_model()[0].name_or_path
    made = EngineArgs(folder, max_model_len=LONG, hf_overrides={"max_position_embeddings": LONG}).create_engine_config()
    made.cache_config.kv_cache_layout = "BLHNC"
    return made


def manager_of(config, specs, gib=107, in_flight=2048, caching=True):
    groups = get_kv_cache_groups(config, dict(specs))
    cache = generate_scheduler_kv_cache_config([get_kv_cache_config_from_groups(config, groups, gib << 30)])
    tokens = [group.kv_cache_spec.block_size for group in groups]
    sizes = {"scheduler_block_size": math.lcm(*tokens), "hash_block_size": math.gcd(*tokens)}
    made = KVCacheManager(cache, LONG, max_in_flight_tokens=in_flight, enable_caching=caching, **sizes)
    return made, groups


class Reader:
    """Reads prompts in chunks, as the scheduler does, and takes up what the prefix cache has."""

    def __init__(self, manager, groups, chunk=2048):
        self.manager, self.chunk = manager, chunk
        self.tokens = [group.kv_cache_spec.block_size for group in groups]
        self.is_ring = [isinstance(first_spec(group), CircularBufferSpec) for group in groups]

    def request(self, name, tokens):
        hasher = get_request_block_hasher(math.gcd(*self.tokens), sha256)
        return Request(name, tokens, SamplingParams(max_tokens=512), None, block_hasher=hasher)

    def read(self, request):
        """Where the prompt was taken up, and the pages written, of whatever kind. None if it was refused."""
        computed, hit, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        done, total, written = hit, len(request.prompt_token_ids), set()
        first = {"num_new_computed_tokens": hit, "new_computed_blocks": computed, "full_sequence_must_fit": True}
        while done < total:
            n = min(self.chunk, total - done)
            if self.manager.allocate_slots(request, n, **first) is None:
                return None
            for pages, tokens, is_ring in zip(self.pages(request), self.tokens, self.is_ring, strict=True):
                if not is_ring:
                    written |= set(pages[done // tokens : -(-(done + n) // tokens)])
            first, done = {}, done + n
            request.num_computed_tokens = done
        # the next token: pages that only the prompt's last chunk needed go back
        self.manager.allocate_slots(request, 1)
        return hit, written - {0}

    def pages(self, request):
        return self.manager.get_block_ids(request.request_id)

    def held(self, request):
        """Pages of each kind that the request holds; page 0 is nobody's."""
        return [len(set(pages) - {0}) for pages in self.pages(request)]


def ids(count, start=0):
    return [(start + i) % 50021 for i in range(count)]


@pytest.mark.parametrize(("flags", "words"), FLAGS, ids=str)
def test_flags_that_are_refused(flags, words):
    plain, config = (EngineArgs(demo_model()[0].name_or_path, **each).create_engine_config() for each in ({}, flags))
    assert engine_settings(plain, []) == EngineSettings(version=vllm.__version__, kv_heads=5)
    with pytest.raises(ValueError, match=words):
        check_engine(engine_settings(config, [serving_plan(x) for x in (POOLED, condense.Recall(prompt="exact"))]))


@pytest.mark.parametrize("name", ["recall-device", "recall-host"])
def test_sleep_is_refused_with_tokens_in_host_memory(config, monkeypatch, name):
    monkeypatch.setattr(config.model_config, "enable_sleep_mode", True)  # which vLLM itself refuses on a CPU
    refused = engine_settings(config, [serving_plan(condense.Method.parse(name))]).sleeping_host
    assert refused is (name == "recall-host")


@pytest.mark.parametrize("name", SETTINGS)
def test_groups(config, name):
    """One table of blocks for all that is kept, one or few for each window, one for rings; little is left empty."""
    _, groups = manager_of(config, specs_of(name))
    # vLLM gives its own layers pages of one size: as large as those of all that is kept if one of them keeps all
    at_most = {"recall": 2, "latents": 2, "sliding": 4, "sliding and dense": 16}
    assert len(groups) <= at_most.get(name, 3)
    assert len({group.kv_cache_spec.block_size for group in groups if is_kept(group)}) == 1


def first_spec(group):
    return next(iter(iter_layer_specs(group.kv_cache_spec)))


def is_kept(group):
    return isinstance(first_spec(group), FullAttentionSpec)


@pytest.mark.parametrize("length", [1, 300, 1500, 20000])
@pytest.mark.parametrize("name", SETTINGS)
def test_blocks_that_a_request_holds(config, name, length):
    """As many as `condense inspect` and the server's log say, but for a window that begins with a page."""
    manager, groups = manager_of(config, specs_of(name), gib=8)
    free = manager.block_pool.get_num_free_blocks()
    reader = Reader(manager, groups)
    request = reader.request("a", ids(length))
    reader.read(request)
    most, held = blocks_of_request(served(name), length + 1), sum(reader.held(request))
    assert most.blocks - sum(not is_kept(group) for group in groups) <= held <= most.blocks
    assert most.block_bytes * (free + 1) <= 8 << 30 < most.block_bytes * (free + 2)
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == free


def count_requests(config, specs):
    """Requests of 128K tokens that are admitted and read, one after another, until one is refused."""
    reader, count = Reader(*manager_of(config, specs, caching=False)), 0
    while (request := reader.request(str(count), ids(LONG - 512, count))) and reader.read(request) is not None:
        count += 1
    return count


@pytest.mark.parametrize(
    ("name", "least"), [("pooled", 93), ("recall", 21), ("host", 118), ("calibrated", 37), ("three kinds", 43)]
)
def test_many_times_as_many_long_requests(config, name, least):
    """What 107 GiB hold: figures for the shape of Llama-3.1-8B, of whose dense requests they hold 6."""
    dense = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    assert count_requests(config, {f"model.layers.{i}.self_attn": dense for i in range(LAYERS)}) == 6
    assert count_requests(config, specs_of(name)) >= least


def test_shared_prefixes_are_found_and_never_written_again(config):
    reader = Reader(*manager_of(config, specs_of("pooled"), gib=8))
    text = ids(6000)
    requests = [reader.request(name, [*text, *ids(700, start)]) for name, start in (("a", 7), ("b", 77), ("c", 777))]
    hits = []
    for i, request in enumerate(requests):
        hit, written = reader.read(request)
        hits.append(hit)
        held = {page for other in requests[:i] for pages in reader.pages(other) for page in pages}
        assert written.isdisjoint(held)
    assert hits == [0, 0, 5888]


@pytest.mark.parametrize("name", SETTINGS)
def test_with_windows_kept_in_between_the_next_long_question_finds_most_of_a_text(config, monkeypatch, name):
    interval = page_sizes(served(name)).far
    while interval <= 4096:  # as in `condense serve`; the manager refuses what is not of whole pages
        interval *= 2
    monkeypatch.setattr(config.cache_config, "prefix_cache_retention_interval", interval)
    reader, text = Reader(*manager_of(config, specs_of(name), gib=16)), ids(20000)
    requests = [reader.request(question, [*text, *ids(700, start)]) for start, question in ((7, "a"), (77, "b"))]
    assert [reader.read(request)[0] for request in requests] == [0, 20000 // interval * interval]


def test_all_slots_are_made_before_any_layer_is_measured(monkeypatch):
    """By the first layer that asks, which has none itself; for as many requests in each, though each takes memory."""
    layers, context, like = served("host")[:3], {"other": object()}, torch.empty(0, dtype=torch.bfloat16)
    engine = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    for i, layer in enumerate(layers):
        context[str(i)] = object.__new__(CondensedAttention)
        context[str(i)].__dict__.update(served=layer, plan=layer.plan, model=layers, _engine=engine)
    rows = iter((3, 2, 1))
    monkeypatch.setattr(backend, "rows_with_slots", lambda *_: next(rows))
    first, *others = (context[str(i)] for i in range(3))
    assert first.take_slots(like) is None
    assert [len(layer.take_slots(like).held) for layer in others] == [3, 3]
