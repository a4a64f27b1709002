"""The pages that a serving engine keeps per request, and the methods and engines that cannot serve.

An engine keeps the tokens of a request in pages of N slots, all of one size, from one pool. A condensed layer has up to
three kinds (`condense.ops.paged`):

- window: the exact tokens, N to a page; pages behind the last ``window + group_size`` tokens go back to the pool;
- entries: one entry per group, so a page covers ``N * group_size`` tokens; kept as long as the request;
- ring: the newest mean queries, one page per request, for methods whose groups are weighed by several queries.

An engine's prefix cache shares a page of entries among requests that begin with the same tokens. So a slot of the
entries, which covers tokens ``[s * g, (s + 1) * g)``, must not depend on later ones: it holds the entry that the last
of these tokens completes, that of group ``j = s - summary_delay / g``.

Shapes: g tokens per group, w tokens of window, N slots of a page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from condense.methods import Dense, Method, methods_in, step_settings
from condense.methods.grouped import GroupPooling
from condense.ops import StepSettings

# pages hold a multiple of so many slots: a tile of keys in a kernel is a few whole pages
_SLOTS = 16


class Blocks(NamedTuple):
    """Pages of each kind, in every condensed layer."""

    window: int
    entries: int
    ring: int

    @property
    def total(self) -> int:
        """All pages."""
        return sum(self)


@dataclass(frozen=True)
class ServingPlan:
    """The pages of one method. settings: the method's, for kernels. slots: slots of a page, N."""

    settings: StepSettings
    slots: int

    @property
    def group_size(self) -> int:
        """Tokens per group, g: a slot of the entries covers as many."""
        return self.settings.rule.chunk

    @property
    def kept_tokens(self) -> int:
        """Exact tokens that reading the next one needs, itself included: the window and the group that leaves it."""
        assert self.settings.rule.window is not None
        return self.settings.rule.window + self.group_size

    @property
    def has_ring(self) -> bool:
        """True if a group's summary is the mean of more queries than that of the token that completes it."""
        return self.settings.num_summary > 1

    @property
    def tokens_per_page(self) -> int:
        """Tokens that a page of entries covers. A common prefix is shared up to a multiple of it."""
        return self.slots * self.group_size

    def blocks(self, num_tokens: int, num_new: int = 1) -> Blocks:
        """The most pages that a request holds while ``num_new`` of its ``num_tokens`` tokens are read."""
        window = min(num_tokens, self.kept_tokens - 1 + num_new)
        # the window may begin anywhere in its first page
        num_window = min(-(-window // self.slots) + 1, -(-num_tokens // self.slots))
        return Blocks(num_window, -(-num_tokens // self.tokens_per_page), int(self.has_ring))


def serving_plan(method: Method) -> ServingPlan:
    """The pages of a method. Raises ValueError, with all reasons, for a method that cannot be served in pages."""
    if not isinstance(method, GroupPooling):
        raise ValueError(f"method must be CCA or LCA to be served, got {method}: others run with model.generate")
    settings = step_settings(method)
    if wrong := _obstacles(method, settings):
        raise ValueError("; ".join(wrong))
    return ServingPlan(settings, -(-max(settings.num_summary, 1) // _SLOTS) * _SLOTS)


def _obstacles(method: GroupPooling, settings: StepSettings) -> list[str]:
    """All settings of a method that pages cannot hold, each with its way out."""
    wrong = []
    g, delay, num_summary = settings.rule.chunk, settings.summary_delay, settings.num_summary
    if method.summary == "prompt":
        wrong.append(
            f"{method} weighs groups by the end of the prompt, which an engine reads in pieces: use summary='streaming'"
        )
    if method.rep_bias == "matched":
        wrong.append(f"pages have no room for the biases of {method}: use rep_bias='log_size'")
    if method.entry_bits < 16:
        wrong.append(f"pages hold entries of 16 bits, got {method}: use entry_bits=16")
    if g < 2:
        wrong.append(f"group_size must be at least 2 to be served, got {g}: entries of one token save nothing")
    if delay % g:
        wrong.append(
            f"window must be a multiple of group_size, {g}, to be served with summary='streaming', got {delay}: use "
            f"window={-(-delay // g) * g} or summary='last'"
        )
    if num_summary > g:
        wrong.append(
            f"num_summary_queries must be at most group_size, {g}, to be served, got {num_summary}: a shared prefix "
            "ends with a whole group, and queries before it are not kept"
        )
    return wrong


def serving_plans(saved: Any) -> dict[int, ServingPlan]:
    """The plan of each condensed layer, from ``config.condense``; layers with `Dense` stay the engine's own.

    Raises ValueError for a method that cannot be served, and if no layer is left.
    """
    plans = {i: serving_plan(method) for i, method in methods_in(saved).items() if not isinstance(method, Dense)}
    if not plans:
        raise ValueError("a layer must be condensed to be served by condense, got dense attention only: use vllm serve")
    return plans


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The settings of an engine that decide whether it can serve a condensed model.

    kv_heads: of the whole model. cache_dtype: "auto" is the model's. one_manager: all caches are managed alike, as
    full attention. shared_context: ranks share the tokens of a request. microbatches: a batch is run in halves.
    """

    version: str
    kv_heads: int
    tensor_parallel: int = 1
    cache_dtype: str = "auto"
    model_dtype: str = "bfloat16"
    kv_transfer: bool = False
    offloading: bool = False
    one_manager: bool = False
    speculative: bool = False
    shared_context: bool = False
    microbatches: bool = False


# releases of vLLM that this package was tested with: from the first, below the second
TESTED = ("0.29", "0.33")


def check_engine(engine: EngineSettings) -> None:
    """Raise ValueError, in vLLM's own terms, with all that keeps an engine from serving condensed models."""
    wrong = []
    first, end = (_release(version) for version in TESTED)
    if not first <= _release(engine.version) < end:
        wrong.append(
            f"vLLM must be at least {TESTED[0]} and below {TESTED[1]}, the releases that condensed models were tested "
            f"with, got {engine.version}: install 'vllm>={TESTED[0]},<{TESTED[1]}'"
        )
    if engine.cache_dtype not in ("auto", engine.model_dtype):
        wrong.append(
            f"--kv-cache-dtype must be auto or the model's {engine.model_dtype} for condensed models, got "
            f"{engine.cache_dtype}: entries are made of exact keys and values"
        )
    if engine.tensor_parallel < 1:
        wrong.append(f"--tensor-parallel-size must be at least 1, got {engine.tensor_parallel}")
    elif engine.kv_heads % engine.tensor_parallel:
        wrong.append(
            f"--tensor-parallel-size must divide the model's {engine.kv_heads} KV heads, got "
            f"{engine.tensor_parallel}: a group is weighed by all query heads of its KV head"
        )
    # vLLM turns offloading into a KV transfer: the error names the flag that the user gave
    transfer = engine.kv_transfer and not engine.offloading
    for chosen, message in (
        (engine.offloading, "--kv-offloading-size is not served with condensed models: leave it out"),
        (transfer, "--kv-transfer-config is not served with condensed models: leave it out"),
        (
            engine.one_manager,
            "--disable-hybrid-kv-cache-manager would keep every token of a condensed model: leave it out",
        ),
        (engine.speculative, "--speculative-config is not served with condensed models: leave it out"),
        (engine.shared_context, "context parallelism is not served with condensed models: use tensor parallelism"),
        (engine.microbatches, "--enable-dbo is not served with condensed models: leave it out"),
    ):
        if chosen:
            wrong.append(message)
    if wrong:
        raise ValueError("; ".join(wrong))


def _release(version: str) -> tuple[int, int]:
    """The first two numbers of a version, of "0.32rc1" too; (0, 0) without them, as in builds from source."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
