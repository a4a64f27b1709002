"""vLLM's own cache manager with the pages of condensed layers, without a model: groups, pages held, shared prefixes."""

from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

import condense
from condense.demo import demo_model
from condense.serving.plan import EngineSettings, check_engine, serving_plan
from condense.serving.vllm.layer import _engine_settings, _specs

PLAN = serving_plan(condense.CCA(summary="streaming", key_pooling="select", rep_bias="log_size"))
# Llama-3.1-8B in bfloat16
LAYERS, SHAPE = 32, SimpleNamespace(num_kv_heads=8, head_size=128, kv_cache_torch_dtype=torch.bfloat16)
DENSE = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
CONDENSED = {f"model.layers.{i}.{kind}": spec for i in range(LAYERS) for kind, spec in _specs(SHAPE, PLAN).items()}
LONG = 131072
HASHED = 16


@pytest.fixture(scope="module")
def config():
    init_none_hash(sha256)
    folder = demo_model()[0].name_or_path
    made = EngineArgs(folder, max_model_len=LONG, hf_overrides={"max_position_embeddings": LONG}).create_engine_config()
    made.cache_config.kv_cache_layout = "LBHNC"
    return made


def manager_of(config, specs, gib=107, in_flight=2048, caching=True):
    groups = get_kv_cache_groups(config, dict(specs))
    cache = get_kv_cache_config_from_groups(config, groups, gib << 30)
    unit = max(group.kv_cache_spec.block_size for group in groups)
    sizes = {"scheduler_block_size": unit, "hash_block_size": HASHED}
    made = KVCacheManager(cache, LONG, max_in_flight_tokens=in_flight, enable_caching=caching, **sizes)
    return made, groups


class Reader:
    """Reads prompts in chunks, as the scheduler does, and takes up what the prefix cache has."""

    def __init__(self, manager, chunk=2048):
        self.manager, self.chunk = manager, chunk

    def request(self, name, tokens):
        hasher = get_request_block_hasher(HASHED, sha256)
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
            for pages, tokens in zip(self.pages(request), (16, 256), strict=False):
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


def test_settings_that_are_checked(config):
    assert _engine_settings(config) == EngineSettings(version=vllm.__version__, kv_heads=5)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype"),
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, "--kv-transfer-config"),
        ({"kv_offloading_size": 1.0}, "--kv-offloading-size"),
        ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "--speculative-config"),
    ],
    ids=str,
)
def test_flags_that_are_refused(flags, words):
    config = EngineArgs(demo_model()[0].name_or_path, max_model_len=4096, **flags).create_engine_config()
    with pytest.raises(ValueError, match=words):
        check_engine(_engine_settings(config))


def test_groups(config):
    _, groups = manager_of(config, CONDENSED)
    assert [group.kv_cache_spec.block_size for group in groups] == [16, 256, 16]
    assert [len(group.layer_names) for group in groups] == [LAYERS] * 3
    assert len({group.kv_cache_spec.page_size_bytes for group in groups}) == 1


@pytest.mark.parametrize("length", [1, 300, 1500, 20000])
def test_pages_that_a_request_holds(config, length):
    manager, _ = manager_of(config, CONDENSED, gib=4)
    free = manager.block_pool.get_num_free_blocks()
    reader = Reader(manager)
    request = reader.request("a", ids(length))
    reader.read(request)
    most = PLAN.blocks(length + 1)
    window, entries, ring = reader.held(request)
    assert most.window - 1 <= window <= most.window
    assert (entries, ring) == (most.entries, most.ring)
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == free


def count_requests(config, specs):
    """Requests of 128K tokens that are admitted and read, one after another, until one is refused."""
    manager, _ = manager_of(config, specs, caching=False)
    reader, count = Reader(manager), 0
    while (request := reader.request(str(count), ids(LONG - 512, count))) and reader.read(request) is not None:
        count += 1
    return count


def test_many_times_as_many_long_requests(config):
    """What 107 GiB hold: figures for the shape of Llama-3.1-8B."""
    assert count_requests(config, {f"model.layers.{i}.self_attn": DENSE for i in range(LAYERS)}) == 6
    assert count_requests(config, CONDENSED) >= 90


def test_shared_prefixes_are_found_and_never_written_again(config):
    """The second request shows where a prefix ends; from then on it is taken over. No page of another is written."""
    reader = Reader(manager_of(config, CONDENSED, gib=8)[0])
    text = ids(6000)
    requests = [reader.request(name, [*text, *ids(700, start)]) for name, start in (("a", 7), ("b", 77), ("c", 777))]
    hits = []
    for i, request in enumerate(requests):
        hit, written = reader.read(request)
        hits.append(hit)
        held = {page for other in requests[:i] for pages in reader.pages(other) for page in pages}
        assert written.isdisjoint(held)
    assert hits == [0, 0, 5888]
