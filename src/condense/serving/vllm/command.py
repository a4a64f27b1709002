"""The command line of vLLM's server for a condensed model."""

from __future__ import annotations

import json
import sys
from typing import Any

from condense.serving.plan import serving_plans
from condense.serving.vllm.register import condensed_name

_OVERRIDES, _BATCH = "--hf-overrides", "--max-num-batched-tokens"
# vLLM admits a request only if its window and the tokens of a whole batch fit: larger batches mean fewer requests
_BATCHED_TOKENS = "4096"


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


def _take(name: str, flags: list[str]) -> tuple[str | None, list[str]]:
    """The value of a flag, given as ``--name value`` or ``--name=value``, and the other flags."""
    for i, flag in enumerate(flags):
        if flag == name:
            if i + 1 == len(flags):
                raise ValueError(f"{name} must have a value, got none")
            return flags[i + 1], flags[:i] + flags[i + 2 :]
        if flag.startswith(f"{name}="):
            return flag.partition("=")[2], flags[:i] + flags[i + 1 :]
    return None, flags


def _parsed(overrides: str) -> dict[str, Any]:
    try:
        parsed = json.loads(overrides)
    except json.JSONDecodeError as error:
        raise ValueError(f"{_OVERRIDES} must be JSON, got {overrides!r}: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{_OVERRIDES} must be a JSON object, got {overrides!r}")
    return parsed
