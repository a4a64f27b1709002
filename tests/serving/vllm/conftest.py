"""Engines of vLLM in this process, small; and a check that each gives its pages back.

`make test-vllm` runs this folder on the CPU, in an environment of its own; with vLLM for CUDA it runs on a GPU, with
steps recorded in graphs. Without vLLM installed it is not collected.
"""

import gc
import importlib.util
import json
import math
import os

import pytest
import torch
from small_models import condensed

HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]

if HAS_VLLM:
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_USE_FLASHINFER_SAMPLER="0",
        HF_HUB_OFFLINE="1",
        # LoRA's kernels would round float32 to fewer bits
        TRITON_F32_DEFAULT="ieee",
    )

# an engine's settings on this device: on a GPU single tokens are read by recorded kernels
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
DEVICE_SETTINGS = {"enforce_eager": True}
if torch.cuda.is_available():
    DEVICE_SETTINGS = {"compilation_config": GRAPHS, "kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.01}


class Engine:
    """A model in vLLM, asked in token ids; greedy unless told otherwise."""

    def __init__(self, folder, **settings):
        from vllm import LLM

        fixed = {"dtype": "float32", "max_num_seqs": 8, "seed": 0}
        self.llm = LLM(str(folder), **{**fixed, **DEVICE_SETTINGS, **settings})
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler

    def generate(self, prompts, max_tokens, **sampling):
        from vllm import SamplingParams

        params = SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **sampling})
        return self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    def tokens(self, prompts, max_tokens, **sampling):
        return [list(o.outputs[0].token_ids) for o in self.generate(prompts, max_tokens, **sampling)]

    @property
    def page(self):
        """Tokens of which requests share multiples: whole pages of every kind but rings."""
        specs = [group.kv_cache_spec for group in self.scheduler.kv_cache_config.kv_cache_groups]
        return math.lcm(*(spec.block_size for spec in specs if type(spec).__name__ != "CircularBufferSpec"))

    def close(self):
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.scheduler
        cleanup_dist_env_and_memory()
        gc.collect()


@pytest.fixture(scope="session")
def engines():
    """At most one engine at a time, with what it was made of."""
    alive = {}
    yield alive
    for each in alive.values():
        each.close()


@pytest.fixture
def engine(engines):
    """Makes an engine, or hands out the last one if it is asked for the same; afterwards all its pages are free."""

    def make(folder, **settings):
        key = f"{folder} {settings}"
        if key not in engines:
            while engines:
                engines.popitem()[1].close()
            engines[key] = Engine(folder, **settings)
        return engines[key]

    yield make
    for each in engines.values():
        pool = each.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one belongs to nobody


@pytest.fixture
def put_back(monkeypatch):
    """Requests that an engine puts back from now on, in a list: the prompt, and the length of its answer by then."""

    def watch(engine):
        found, preempt = [], engine.scheduler._preempt_request

        def count(request, *rest, **options):
            found.append((request.prompt_token_ids, request.num_output_tokens))
            return preempt(request, *rest, **options)

        monkeypatch.setattr(engine.scheduler, "_preempt_request", count)
        return found

    return watch


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def device_settings():
    return DEVICE_SETTINGS


@pytest.fixture(scope="session")
def device_flags():
    """This device's settings for the server's command line."""
    flags = [[f"--{name.replace('_', '-')}", json.dumps(value)] for name, value in DEVICE_SETTINGS.items()]
    return [word for flag in flags for word in flag if word != "true"]


@pytest.fixture(scope="session")
def greedy():
    """Tokens that a transformers model generates, one row at a time."""

    def generate(model, prompts, max_tokens):
        fixed = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": max_tokens}
        rows = [torch.tensor([ids]) for ids in prompts]
        outs = [model.generate(row, attention_mask=torch.ones_like(row), **fixed) for row in rows]
        return [out[0, row.shape[1] :].tolist() for row, out in zip(rows, outs, strict=True)]

    return generate


@pytest.fixture
def outputs_of(engine, greedy, tmp_path):
    """What a model's engine puts out the second time; anew and again the answers must be those of `generate`."""

    def read(model, prompts, max_tokens, **settings):
        model.save_pretrained(tmp_path)
        want = greedy(model, prompts, max_tokens)
        started = engine(tmp_path, **condensed(model, **settings))
        assert started.tokens(prompts, max_tokens) == want
        outputs = started.generate(prompts, max_tokens)
        assert [list(output.outputs[0].token_ids) for output in outputs] == want
        return outputs

    return read
