"""A growing past in buffers, so that a decode step changes it in place: one operation, no copy and no wait.

The buffers have some room to spare and are moved to larger ones when it is used up. The rings keep what
`condense.functional.extend` keeps: `condense.functional.SLACK` tokens and queries more than a step needs, so that as
many can be taken back. Shapes as in `condense.ops.types`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.caches.buffers import empty_state, read_past, write_past
from condense.functional import SLACK, Past, num_entries
from condense.methods import Method
from condense.ops import StepSettings, StepState, decode_step
from condense.ops.tensors.per_row import PerRow, int_if_equal, max_row, min_row

# sizes are multiples of it: kernels are compiled anew for a size that is none
_BLOCK = 16


def room_for(needed: int) -> int:
    """Slots to take where ``needed`` are: one to `_BLOCK` more, and one in 32."""
    return _blocks(needed + needed // 32 + 1)


def _blocks(slots: int) -> int:
    return (slots + _BLOCK - 1) // _BLOCK * _BLOCK


class RingState:
    """What one layer keeps while tokens come one by one, on the Triton step.

    state: the buffers. origin, as in `condense.functional.Past`, and the numbers below are known on the host.
    num_band, num_queries: newest columns in the rings that hold something, as many as a past would have.
    """

    def __init__(self, method: Method, plan: StepSettings, past: Past, latent: int) -> None:
        """Take over a past; method and latent as in `condense.methods.for_latents`, 0 for ordinary keys."""
        self.method, self.plan, self.latent = method, plan, latent
        rule, S = plan.rule, plan.num_summary
        self.num_band, self.num_queries = past.window_k.shape[2], past.summary_q.shape[2]
        self._most_band = sys.maxsize if rule.window is None else _blocks(rule.window + rule.chunk + SLACK)
        # a single query is that of the step itself
        self._most_queries = 0 if S <= 1 else S - 1 + SLACK
        self.origin = past.origin
        # seen is the sum: the first differs between rows and is not touched by a step that all of them take
        self._before, self._taken = past.seen, 0
        M, W = self._entry_slots(past.entries_k.shape[2]), self._token_slots(max_row(past.seen))
        self.state = empty_state(past.window_k, past.window_v, M, W, max(S, self._most_queries))
        write_past(method, self.state, None, past)
        self._steps_left = self._count_steps()

    @property
    def seen(self) -> PerRow:
        """Real tokens per row, as in `condense.functional.Past`."""
        return self._before + self._taken

    def past(self) -> Past:
        """The same as a past of its own, which further steps leave as it is."""
        past = read_past(self.method, self.state, self.seen, self.origin, self.num_band, self.num_queries)
        return past._replace(entries_k=past.entries_k.clone(), entries_v=past.entries_v.clone())

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, real: Tensor | None) -> Tensor:
        """`condense.ops.decode_step`; real: rows whose token counts, int64 CPU ``[B]``, None for all."""
        if self._steps_left <= 0:
            self._make_room()
        out = decode_step(
            q,
            k,
            v,
            self.state,
            self.plan,
            scale=scale,
            real=None if real is None else real.to(q.device, non_blocking=True),
            represent=self.method.represent,
            latent=self.latent,
            backend="triton",
        )
        self._steps_left -= 1
        self.num_band = min(self.num_band + 1, self.state.ring_k.shape[2])
        self.num_queries = min(self.num_queries + 1, self._most_queries)
        if real is None:
            self._taken += 1
        else:
            self._before = int_if_equal(self._before + real)
        return out

    def crop(self, count: int) -> None:
        """Take the newest ``count`` tokens back, which must be at hand with all that then is needed.

        What they left in the buffers is behind ``seen``: never looked at before it is overwritten.
        """
        self._taken -= count
        self.num_band -= count
        self.num_queries = max(0, self.num_queries - count)
        self.state = self.state._replace(seen=self.state.seen - count)
        self._steps_left = self._count_steps()

    def map_tensors(self, change: Callable[[Tensor], Tensor], change_number: Callable[[PerRow], PerRow]) -> None:
        """Change all tensors, and the numbers of rows."""
        self.state = StepState._make(map(change, self.state))
        self._before, self.origin = change_number(self._before), change_number(self.origin)

    def fits(self, k: Tensor) -> bool:
        """True if a step can add tokens like k in place."""
        ring = self.state.ring_k
        # what was made in inference mode cannot be changed outside
        return k.dtype == ring.dtype and (torch.is_inference_mode_enabled() or not ring.is_inference())

    def _make_room(self) -> None:
        """For one more token in every row, and some to come."""
        state, tokens = self.state, max_row(self.seen) + 1
        entries = max_row(num_entries(self.method, self.seen + 1, self.origin))
        if entries > state.entries_k.shape[2]:
            entries_k, entries_v = (_longer(x, self._entry_slots(entries)) for x in state[:2])
            state = state._replace(entries_k=entries_k, entries_v=entries_v)
        # a ring that is not at its largest has not come round: a token stands in the slot of its position
        if state.ring_k.shape[2] < min(tokens, self._most_band):
            ring_k, ring_v = (_longer(x, self._token_slots(tokens)) for x in state[2:4])
            state = state._replace(ring_k=ring_k, ring_v=ring_v)
        self.state = state
        self._steps_left = self._count_steps()

    def _entry_slots(self, entries: int) -> int:
        limit = self.plan.rule.max_chunks
        if limit is None:
            return room_for(entries)
        return min(room_for(entries), limit * self.plan.rule.entries + max_row(self.method.prompt_entries(self.origin)))

    def _token_slots(self, tokens: int) -> int:
        return min(room_for(tokens), self._most_band)

    def _count_steps(self) -> int:
        """RingState that there is room for, whatever rows take them."""
        rule, summary_delay, num_tokens = self.plan.rule, self.plan.summary_delay, self.state.ring_k.shape[2]
        steps = num_tokens - max_row(self.seen) if num_tokens < self._most_band else sys.maxsize
        chunks = (self.state.entries_k.shape[2] - self.method.prompt_entries(self.origin)) // rule.entries
        if rule.max_chunks is not None and min_row(chunks) >= rule.max_chunks:
            return steps
        return min(steps, min_row((chunks + 1) * rule.chunk + summary_delay - 1 - self.seen))


def _longer(x: Tensor, slots: int) -> Tensor:
    return F.pad(x, (0, 0, 0, slots - x.shape[2]))
