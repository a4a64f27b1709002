"""The command line of vLLM's server for a condensed model."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any

from condense.serving.plan import serving_plans
from condense.serving.vllm.register import condensed_name

_OVERRIDES, _BATCH = "--hf-overrides", "--max-num-batched-tokens"
# vLLM completes a shortened flag, such as `--hf-over`, if only one flag begins so; several begin with this
_AMBIGUOUS = "--hf-"
# vLLM admits a request only if its window and the tokens of a whole batch fit: larger batches mean fewer requests
_BATCHED_TOKENS = "4096"
_ADAPTERS = "--lora-modules"


def server_command(model: str, architecture: str, saved: dict[str, Any], flags: list[str]) -> list[str]:
    """The command that serves ``model``, of that stock architecture, with the methods that ``saved`` names.

    saved: as ``config.condense``. flags: vLLM's, which come last. Raises ValueError for an architecture, a method or
    flags that cannot be served.
    """
    name = condensed_name(architecture)
    serving_plans(saved)
    given, flags = _take(_OVERRIDES, flags)
    overrides = {} if given is None else _parsed(given)
    for key in ("architectures", "condense"):
        if key in overrides:
            raise ValueError(f"{_OVERRIDES} must leave out {key!r}, which condense serve fills in: use --method")
    overrides |= {"architectures": [name], "condense": saved}
    batch = [] if any(flag.split("=")[0] == _BATCH for flag in flags) else [_BATCH, _BATCHED_TOKENS]
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [*server, _OVERRIDES, json.dumps(overrides), *batch, *flags]


def adapters_in(flags: list[str]) -> list[str]:
    """Paths of the adapters that ``--lora-modules`` names, each as ``name=path`` or as a JSON object.

    Anything else is left for vLLM to refuse.
    """
    adapters, is_adapter = [], False
    for word in flags:
        given = word
        if word.startswith("--"):
            name, _, given = word.partition("=")
            is_adapter = name.replace("_", "-") == _ADAPTERS
        if not is_adapter:
            continue
        if given.startswith("{"):
            with suppress(json.JSONDecodeError, KeyError):
                adapters.append(json.loads(given)["path"])
        elif "=" in given:
            adapters.append(given.partition("=")[2])
    return adapters


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
