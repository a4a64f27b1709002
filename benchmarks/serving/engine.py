"""An engine of vLLM in this process, dense or condensed, whose steps can be timed one by one."""

import json
import os
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# vLLM starts CUDA in this process then, and CUDA does not work in a fork of such a process
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")

import torch
import vllm
import workers
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

import condense
from condense.methods import settings_of
from condense.models import choice_from_text
from condense.models.choice import parse_layers

METHOD = condense.CCA(summary="streaming", key_pooling="select", rep_bias="log_size")
VLLM = vllm.__version__


class Shape(NamedTuple):
    """A model's configuration, and what a trial changes of it."""

    config: dict[str, Any]
    trial: dict[str, Any]

    def of(self, is_trial):
        return self.config | self.trial if is_trial else self.config


_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 128000,
    "eos_token_id": 128001, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
_DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64, "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "moe_layer_freq": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": False, "scoring_func": "softmax", "vocab_size": 102400,
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                     "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096},
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 100000,
    "eos_token_id": 100001, "attention_bias": False,
}  # fmt: skip
_LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}
_SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
SHAPES = {
    "llama-3.1-8b": Shape(_LLAMA, _SMALL | {"num_key_value_heads": 2, "head_dim": 32}),
    "llama-3.1-70b-fp8": Shape(
        _LLAMA | _LARGE | {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
        _SMALL | {"num_key_value_heads": 2, "head_dim": 32, "quantization_config": None},
    ),
    "deepseek-v2-lite": Shape(
        _DEEPSEEK,
        _SMALL | {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "kv_lora_rank": 32,
                  "num_key_value_heads": 4, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
    ),
}  # fmt: skip
# tokens in one step, as `condense serve` and vLLM's server set them
BATCHED_TOKENS = {"dense": 8192, "condensed": 4096}
# what the model leaves of 0.92 of an H200's memory
PAGES_GIB = 112
# a trial's lengths are shorter by this
SHORTER = 16
# numbers of requests with a graph of their own: up to 32 as `condense serve` has them
SIZES = (*range(1, 33), 40, 48, 64, 80, 90, 128, 192, 256)


def mode_settings(mode):
    """Settings for graphs: "default" records compiled pieces and whole steps, "graph" steps alone, "eager" nothing."""
    if mode == "eager":
        return {"enforce_eager": True}
    compilation = {"cudagraph_capture_sizes": list(SIZES)}
    if mode == "graph":
        compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return {"compilation_config": compilation}


def folder_of(config):
    """A folder with this configuration, without weights."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prompts_of(count, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1000, 100_000, (count, length), generator=generator).tolist()


class Step(NamedTuple):
    """The time when a step's tokens arrived, their number, and the requests that ran."""

    time: float
    tokens: int
    running: int


class Answer(NamedTuple):
    """One request: when its first token came, tokens of its prompt that were cached."""

    first_token: float
    cached: int


class Engine:
    """A model in vLLM; prompts are token ids, answers greedy and of a fixed length."""

    def __init__(self, folder, **settings):
        self.llm = LLM(str(folder), skip_tokenizer_init=True, seed=0, **settings)
        self.engine = self.llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.preempted, preempt = 0, self.scheduler._preempt_request

        def count(*args, **options):
            self.preempted += 1
            return preempt(*args, **options)

        self.scheduler._preempt_request = count

    @property
    def pages(self):
        """Pages of the pool, and how many of them are free."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1, pool.get_num_free_blocks()

    def fits(self, length):
        """Requests of ``length`` tokens whose pages lie in the pool at once while the prompt of one is read."""
        config = self.engine.vllm_config
        one, reading = self.llm.collective_rpc(
            workers.blocks_of, args=(length, config.scheduler_config.max_num_batched_tokens)
        )[0] or (-(-length // config.cache_config.block_size), 0)
        return (self.pages[0] - reading) // one

    def add(self, prompts, max_tokens):
        """Requests that wait from now on; their names."""
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        names = [f"{time.perf_counter_ns()}-{i}" for i in range(len(prompts))]
        for name, ids in zip(names, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": ids}, params)
        return names

    def step(self, answers):
        """One step, at the clock's time; first tokens are noted in ``answers``, by name."""
        outputs = self.engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.request_id not in answers and output.outputs[0].token_ids:
                answers[output.request_id] = Answer(now, output.num_cached_tokens)
        return Step(now, sum(len(o.outputs[0].token_ids) for o in outputs), len(self.scheduler.running))

    def stop(self, names):
        """Gives up these requests, the only ones."""
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def run(self, prompts, max_tokens, until=None):
        """All prompts at once: the steps, and an answer each, timed from now.

        until: stops, with the steps so far, when it is true.
        """
        start, answers, steps = time.perf_counter(), {}, []
        names = self.add(prompts, max_tokens)
        while self.engine.has_unfinished_requests():
            steps.append(self.step(answers))
            if until is not None and until(steps):
                self.stop(names)
                break
        since = [x and x._replace(first_token=x.first_token - start) for x in map(answers.get, names)]
        return [step._replace(time=step.time - start) for step in steps], since

    @contextmanager
    def without_model(self):
        """Prompts are scheduled and get their pages, but nothing is computed: their pages hold what was there."""
        self.llm.collective_rpc(workers.leave_out_model, args=(self.engine.vllm_config.model_config.get_hidden_size(),))
        try:
            yield
        finally:
            self.llm.collective_rpc(workers.take_back_model)

    def fill(self, prompts):
        """Makes prompts look as if they were read: their pages are found in the prefix cache."""
        with self.without_model():
            self.run(prompts, 1)

    def fill_pages(self):
        """Random numbers in all pages: some kernels are faster on zeros."""
        self.llm.collective_rpc(workers.fill_pages)

    @property
    def has_slots(self):
        return self.new_copies(1) is not None

    def new_copies(self, rows):
        """Groups copied from host memory to slots since this was asked last, per request, KV head and layer."""
        return self.llm.collective_rpc(workers.new_copies, args=(rows,))[0]

    def forget_copies(self):
        """Empty slots: the next step reads all open groups over the bus."""
        self.llm.collective_rpc(workers.forget_copies)

    def close(self):
        from vllm.distributed import cleanup_dist_env_and_memory

        self.engine.engine_core.shutdown()
        del self.llm, self.engine, self.scheduler
        cleanup_dist_env_and_memory()


def methods_of(text, layers, has_latents):
    """The method of each layer, of text as after `condense serve --method`: one method, or ``a@0-15+b@16-31``."""
    choice = choice_from_text(text)
    if not isinstance(choice, dict):
        return {i: choice.of_layer(is_first=i == 0, has_latents=has_latents) for i in range(layers)}
    return {
        i: method
        for named, method in choice.items()
        for first, last in parse_layers(named)
        for i in range(first, last + 1)
    }


def engine_of(shape, attention, mode, *, method, longest=131072, pages_gib=PAGES_GIB, is_trial=False, **settings):
    """A shape of `SHAPES` with random weights, with "dense" or "condensed" attention.

    method: text, None: pooling. longest: tokens of a request. is_trial: two small layers, and prompts
    shorter by `SHORTER`.
    """
    config = SHAPES[shape].of(is_trial)
    layers, has_latents = config["num_hidden_layers"], "kv_lora_rank" in config
    config |= {"max_position_embeddings": max(longest, config["max_position_embeddings"])}
    fixed = {
        "load_format": "dummy", "max_model_len": longest // SHORTER + 512 if is_trial else longest, "max_num_seqs": 256,
        "kv_cache_memory_bytes": pages_gib << 30, "max_num_batched_tokens": BATCHED_TOKENS[attention],
        "enable_prefix_caching": True, "dtype": "bfloat16",
    }  # fmt: skip
    if attention == "condensed":
        methods = dict.fromkeys(range(layers), METHOD) if method is None else methods_of(method, layers, has_latents)
        names = [f"Condensed{config['architectures'][0]}"]
        fixed["hf_overrides"] = {"architectures": names, "condense": settings_of(methods)}
    return Engine(folder_of(config), **fixed, **mode_settings(mode), **settings)
