"""The settings of vLLM that decide whether it can serve condensed models, and the reasons why it cannot."""

import os
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass

from condense.methods import layers_as_text


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The settings of an engine that decide whether it can serve a condensed model.

    version: None if it is not known. kv_heads: of the whole model, None for latents (MLA). cache_dtype: "auto" is the
    model's. one_manager: all caches are managed alike, as full attention. speculative: drafts that are not served.
    shared_context: ranks share the tokens of a request. microbatches: a batch is run in halves. dense_latents: numbers
    of layers on latents that are not condensed. choosing_latents: tokens of prompts choose groups of latents.
    adapted_latents, adapted_gpt_oss: a model with latents, or GPT-OSS, gets LoRA adapters. uneven_stages: stages of a
    pipeline have layers whose pages differ. dual_chunks: queries get several rotations, by the chunk that a key is in.
    sleeping_host: tokens lie in host memory, and the engine may be put to sleep.
    """

    version: str | None
    kv_heads: int | None
    tensor_parallel: int = 1
    cache_dtype: str = "auto"
    model_dtype: str = "bfloat16"
    kv_transfer: bool = False
    offloading: bool = False
    one_manager: bool = False
    speculative: bool = False
    shared_context: bool = False
    microbatches: bool = False
    dense_latents: Collection[int] = ()
    choosing_latents: bool = False
    adapted_latents: bool = False
    adapted_gpt_oss: bool = False
    uneven_stages: bool = False
    dual_chunks: bool = False
    sleeping_host: bool = False


GPT_OSS = "gpt_oss"  # a `model_type`
# releases of vLLM whose interfaces the plugin is known to fit: from the first, below the second
RELEASES = ("0.30", "0.34")
REQUIREMENT = f"vllm>={RELEASES[0]},<{RELEASES[1]}"
# an environment variable: "1" lets later releases be tried, as a nightly test does
ANY_VLLM = "CONDENSE_ANY_VLLM"
# settings that are not served -> why, and the way out
_UNSERVED = {
    "offloading": "--kv-offloading-size is not served with condensed models: leave it out",
    "kv_transfer": "--kv-transfer-config is not served with condensed models: leave it out",
    "one_manager": "--disable-hybrid-kv-cache-manager would keep every token of a condensed model: leave it out",
    "speculative": (
        "--speculative-config is not served with condensed models, nor are --spec-method and --spec-model, but for the "
        "method ngram with Recall that reads prompts as steps (prompt='recall') and groups that one query weighs, or "
        "none (summary='last'): leave it out"
    ),
    "shared_context": "context parallelism is not served with condensed models: use tensor parallelism",
    "microbatches": "--enable-dbo and --ubatch-size are not served with condensed models: leave them out",
    "adapted_latents": (
        "--enable-lora is not served with latents (MLA), whose up-projections are read without their adapters: "
        "leave it out"
    ),
    "adapted_gpt_oss": (
        "--enable-lora is not served with condensed GPT-OSS: vLLM knows the order of gates and values in adapters of "
        "its experts by the name of the stock architecture alone; leave it out, or merge the adapter"
    ),
    "uneven_stages": (
        "--pipeline-parallel-size is served only if all layers are condensed and have pages alike, as with "
        "recall-device or pooled, as vLLM gives all stages the same: use --tensor-parallel-size"
    ),
    "dual_chunks": (
        "dual_chunk_attention_config in the model's configuration is not served with condensed models: remove it from "
        "config.json"
    ),
    "sleeping_host": (
        "--enable-sleep-mode is not served with tokens in host memory, which stay there, and their slots on the GPU, "
        "while vLLM sleeps: leave it out, or use store='device', as recall-device does"
    ),
}


def check_engine(engine: EngineSettings) -> None:
    """Raise ValueError, in vLLM's own terms, with all reasons why an engine cannot serve condensed models."""
    wrong = []
    first, end = (_release(version) for version in RELEASES)
    if os.environ.get(ANY_VLLM) == "1":
        end = (sys.maxsize, 0)
    if engine.version is not None and not first <= _release(engine.version) < end:
        wrong.append(
            f"vLLM must be at least {RELEASES[0]} and below {RELEASES[1]}, the releases whose interfaces the plugin "
            f"for condensed models fits, got {engine.version}: install '{REQUIREMENT}', or set {ANY_VLLM}=1 "
            "to try a later release, untested"
        )
    if engine.cache_dtype not in ("auto", engine.model_dtype):
        # a checkpoint in FP8 may name a cache dtype, which vLLM then takes where the flag is "auto"
        wrong.append(
            f"--kv-cache-dtype must be the model's {engine.model_dtype} for condensed models, got {engine.cache_dtype} "
            f"from the flag or the checkpoint: entries are made of exact keys and values, give --kv-cache-dtype "
            f"{engine.model_dtype}"
        )
    if engine.tensor_parallel < 1:
        wrong.append(f"--tensor-parallel-size must be at least 1, got {engine.tensor_parallel}")
    elif engine.choosing_latents and engine.tensor_parallel > 1:
        wrong.append(
            "--tensor-parallel-size must be 1 for Recall on latents (MLA) whose prompts choose groups, got "
            f"{engine.tensor_parallel}: kernels of prompts choose for the heads of one process, use prompt='exact'"
        )
    elif engine.kv_heads is not None and engine.kv_heads % engine.tensor_parallel:
        wrong.append(
            f"--tensor-parallel-size must divide the model's {engine.kv_heads} KV heads, got "
            f"{engine.tensor_parallel}: a group is weighed by all query heads of its KV head"
        )
    # vLLM turns offloading into a KV transfer: the error names the flag that the user gave
    hidden = {"kv_transfer"} if engine.offloading else set()
    wrong += [message for name, message in _UNSERVED.items() if getattr(engine, name) and name not in hidden]
    if engine.dense_latents:
        wrong.append(
            "all layers of a model with latents (MLA) must be condensed to be served, got dense attention in layers "
            f"{layers_as_text(engine.dense_latents)}: give each a method"
        )
    if wrong:
        raise ValueError("; ".join(wrong))


def _release(version: str) -> tuple[int, int]:
    """The first two numbers of a version, of "0.32rc1" too; (0, 0) without them, as in builds from source."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
