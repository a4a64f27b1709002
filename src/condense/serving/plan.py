"""The pages that a serving engine keeps per request, and the methods that cannot be served.

A condensed layer asks for up to three kinds of pages (`condense.ops.paged`):

- window: the exact tokens, and beside them the sums of values of which `Recall` sees the mean; pages behind the last
  ``window + group_size`` tokens go back to the pool;
- entries: what is kept of closed groups, a slot for each; they stay as long as the request. `Recall(store="host")`
  keeps their exact tokens in host memory (`condense.serving.host`);
- ring: the newest mean queries, one page per request, for methods whose groups are weighed by several queries.

An engine's prefix cache shares a page of entries among requests that begin with the same tokens. So a slot of the
entries, which covers tokens ``[s * g, (s + 1) * g)``, must not depend on later ones: it holds the entry that the last
of these tokens completes. The entry of group j lies in slot ``j + summary_delay / g``. Groups that need no query are
complete with their own last token, so the delay is 0; their entries equal those of caches, which make them only when
groups leave the window.

`Recall` with a ``prompt`` other than "recall" reads several new tokens of a request in another way than single ones. So
a request that the engine preempts, and then reads again with the answer so far as part of the prompt, may continue in
another way than without preemption; and an answer that a later request finds in the prefix cache was read by steps.
With "shared" it also matters in which pieces an engine reads a prompt.

Shapes: g tokens per group, w tokens of window, D and Dv widths.
"""

from dataclasses import dataclass, replace
from typing import Any

from condense.methods import Dense, Method, Recall, StreamingLLM, layers_as_text, methods_in, step_settings
from condense.methods.grouped import GroupPooling
from condense.ops import StepSettings

# pages hold a multiple of this number of slots, so that a kernel's tile of keys is a few whole pages
SLOTS = 16
_SERVED = "Recall, CCA, LCA, StreamingLLM and Dense"


@dataclass(frozen=True)
class ServingPlan:
    """The pages of one method. settings: the method's, for kernels."""

    settings: StepSettings

    @property
    def group_size(self) -> int:
        """Tokens per group, g, which is also the number of tokens that a slot of entries covers."""
        return self.settings.rule.chunk

    @property
    def kept_tokens(self) -> int:
        """Exact tokens that reading the next one needs, itself included: the window and the group that leaves it."""
        assert self.settings.rule.window is not None
        return self.settings.rule.window + self.group_size

    @property
    def ring_slots(self) -> int:
        """Slots of the ring; 0 without one: a summary is then the query that completes a group, or none is needed."""
        num_summary = self.settings.num_summary
        return -(-num_summary // SLOTS) * SLOTS if num_summary > 1 else 0

    @property
    def has_records(self) -> bool:
        """True if slots of entries are records of bytes (`condense.ops.step.record_format`).

        Entries of 16 bits without biases of their own need none: a key and a value stand side by side.
        """
        return self.settings.choice is not None or self.settings.entry_bits < 16 or self.settings.matched

    @property
    def pages(self) -> tuple[object, ...]:
        """The settings that decide, with widths, the sizes of pages: equal for layers with equal pages."""
        settings, choice = self.settings, self.settings.choice
        store = None if choice is None else (choice.store, choice.mean)
        return settings.rule, self.ring_slots, settings.entry_bits, settings.matched, store

    @property
    def on_host(self) -> bool:
        """True if the exact tokens of closed groups lie in host memory."""
        return self.settings.choice is not None and self.settings.choice.store.on_host

    @property
    def takes_back(self) -> bool:
        """True if tokens can be taken back after they were read, as rejected drafts are in speculative decoding.

        Tokens read in their place must then make the same window and entries. They do not with a ring, where drafts
        overwrite older queries, nor if several new tokens are read in another way than single ones.
        """
        return not self.ring_slots and not self.settings.reads_otherwise

    def entry_slots(self, tokens: int) -> int:
        """Slots of a page of entries that covers ``tokens`` tokens: one for each group.

        If only the first groups have entries, as many as these, rounded up to a divisor of the number of groups; all
        lie in a request's first page.
        """
        groups = tokens // self.group_size
        most = self.settings.rule.max_chunks
        return groups if most is None else next(n for n in range(max(most, 1), groups + 1) if groups % n == 0)


def serving_plan(method: Method, longest: int | None = None) -> ServingPlan:
    """The pages of a method. longest: tokens of the longest request, which takes no more slots than it has groups.

    Raises ValueError, with all reasons, for a method that cannot be served in pages.
    """
    if not isinstance(method, GroupPooling | Recall | StreamingLLM):
        raise ValueError(f"method must be one of {_SERVED} to be served, got {method}: others run with model.generate")
    served: Method = method
    if isinstance(method, Recall) and longest is not None:
        served = method.replace(slots=min(method.slots, longest // method.group_size))
    settings = step_settings(served)
    if settings.num_summary == 0:
        settings = replace(settings, summary_delay=0)
    g, delay, num_summary = settings.rule.chunk, settings.summary_delay, settings.num_summary
    wrong = []
    if settings.key_pooling is None:
        wrong.append(f"{method} makes its entries itself, which pages do not: use CCA, LCA or Recall")
    if method.layout.lookahead is not None:
        wrong.append(
            f"{type(method).__name__} needs the end of a prompt, which an engine reads in pieces: use "
            f"{method.layout.lookahead.causal_setting}"
        )
    if g < 2 and isinstance(method, GroupPooling):
        wrong.append(f"group_size must be at least 2 to be served, got {g}: entries of one token save nothing")
    if g < 2 and settings.sees_rest:
        # kernels may read a token behind a shared prefix before the prompt that fills it: it must complete no group
        wrong.append(f"group_size must be at least 2 to be served, got {g}: use unchosen='drop' or larger groups")
    if settings.sees_rest and (settings.rule.window or 0) < g:
        wrong.append(
            f"window must be at least group_size, {g}, to be served, got {settings.rule.window}: the sum of the values "
            f"so far stands beside the tokens of the last whole group: use unchosen='drop' or window={g}"
        )
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
    if wrong:
        raise ValueError("; ".join(wrong))
    return ServingPlan(settings)


def serving_plans(saved: Any, longest: int | None = None) -> dict[int, ServingPlan]:
    """The plan of each condensed layer, from ``config.condense``; layers with `Dense` stay the engine's own. longest:
    as for `serving_plan`.

    Raises ValueError, with all reasons and layers, for methods that cannot be served, and if no layer is left.
    """
    named = methods_in(saved)
    methods = {i: method for i, method in named.items() if not isinstance(method, Dense)}
    if not methods:
        raise ValueError("a layer must be condensed to be served by condense, got dense attention only: use vllm serve")
    plans: dict[int, ServingPlan] = {}
    wrong = []
    for method in dict.fromkeys(methods.values()):
        layers = [i for i in methods if methods[i] == method]
        try:
            plans |= dict.fromkeys(layers, serving_plan(method, longest))
        except ValueError as error:
            where = f"layers {layers_as_text(layers)}: " if len(layers) < len(named) else ""
            wrong.append(f"{where}{error}")
    if wrong:
        raise ValueError("; ".join(wrong))
    return plans
