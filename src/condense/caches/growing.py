"""A growing condensed cache layer under transformers' cache contract.

Its length is the number of tokens seen, though it stores entries, the exact window and a few tokens more. It keeps a
`LayerState`, which `condense.functional.extend` makes anew when tokens are read, or a `condense.caches.ring.RingState`,
buffers to which a step adds single tokens in place. The first step after a read copies the state into buffers, the
first read after a step copies it out of them. With a store (`condense.Recall`) that would be too much to copy: there
are buffers from the first read on, to which both reads and steps write. Shapes as in `condense.state`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from condense.caches.base import CondensedCacheLayer, ReadRequest, refuse_others
from condense.caches.ring import RingState
from condense.caches.store import Store
from condense.methods import Context, Method, step_settings
from condense.ops import NO_EXTRAS, Extras, NewToken, StepState
from condense.ops.tensors.per_row import PerRow, int_if_equal, max_row, min_row
from condense.state import SLACK, LayerState, first_needed, num_entries


class CondensedLayer(CondensedCacheLayer):
    """The condensed cache of one attention layer; beams, row selection, repetition, crop and reset apply to all of it.

    A condensed model gives a single token to `step` if `can_step`, and all others to `update`, which calls `read`.
    The first tokens raise ValueError, and nothing is stored, if index and store cannot hold them or steps cannot read
    them (`condense.caches.store.Store.check`); RuntimeError if the host cannot pin the memory of a store.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method
        self.store = Store(step_settings(method))
        self._keeps_buffers = self.store.settings.choice is not None
        # one of `_state` (after a prefill) and `_ring` (while decoding) is set; to change to the other is to copy
        self._state: LayerState | None = None
        self._ring: RingState | None = None
        self.device = torch.device("cpu")
        self._num_slots = 0
        # newest slots that hold a real token in every row: `crop` can take these back, as no padding is among them
        self._num_real_slots = 0
        # slots of a prompt whose entries depend on its last queries: `crop` cannot take any of these back
        self._num_fixed_slots = 0

    @property
    def state(self) -> LayerState | None:
        """The state kept between calls, None before the first tokens; copied from the buffers while decoding."""
        return self._state if self._ring is None else self._ring.state()

    @state.setter
    def state(self, state: LayerState | None) -> None:
        self._state, self._ring = state, None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note the device, once it is clear that tokens like these can be kept."""
        self.store.check(key_states, value_states, self.latent_width)
        self.device = key_states.device
        self.is_initialized = True

    def read(self, k: Tensor, v: Tensor, request: ReadRequest) -> Context:
        """Read new tokens, as `condense.caches.base.CondensedCacheLayer.read` says, without waiting for the device."""
        context = super().read(k, v, request)
        if self._num_slots == 0 and self.method.layout.lookahead is not None:
            self._num_fixed_slots = k.shape[2]
        self._count(k.shape[2], request.trailing)
        return context

    def _hold(self, before: LayerState | None, after: LayerState) -> None:
        if not self._keeps_buffers:
            self.state = after
        elif before is None or self._ring is None:
            self._ring = RingState(self._method_of_tokens, self.store, after, self.latent_width)
        else:
            self._ring.write(before, after)

    def _before(self, k: Tensor, v: Tensor) -> LayerState | None:
        if not self.is_initialized:
            self.lazy_initialization(k, v)
        before = self._held_state()
        if before is not None:
            refuse_others(before.window_k.shape[0], before.window_k.dtype, k)
        return before

    def _held_state(self) -> LayerState | None:
        """The state that new tokens are added to."""
        ring = self._ring
        if ring is None or not self._keeps_buffers:
            state = self.state
            # autograd cannot keep what was made in inference mode
            if state is not None and torch.is_grad_enabled() and any(x.is_inference() for x in state.tensors):
                return state.map(torch.clone, lambda x: x)
            return state
        if not ring.is_writable:
            self._map_tensors(torch.clone)
        # autograd may keep what attention reads, and later tokens are written to the buffers in place
        return ring.state() if torch.is_grad_enabled() else ring.view()

    @property
    def buffers(self) -> StepState | None:
        """The buffers to which steps add tokens, None while there are none."""
        return None if self._ring is None else self._ring.buffers

    def can_step(self, k: Tensor, v: Tensor) -> bool:
        """True if `step` can read tokens like k ``[B, K, 1, D]`` and v: some were read before, and Triton can run.

        Never for a method whose own `attend` the step does not compute (`Method.has_step`).
        """
        if not self.method.has_step:
            return False
        if self._ring is not None:
            return self._ring.is_writable and self._ring.buffers.ring_k.dtype == k.dtype
        if self._state is None or self._state.window_k.dtype != k.dtype:
            return False
        return self.store.backend(k, v, self.latent_width) == "triton"

    def step(
        self, token: NewToken, *, scale: float, latent_width: int | None = None, extras: Extras = NO_EXTRAS
    ) -> Tensor:
        """Read one token per row and return its attention ``[B, H, 1, Dv]``, without gradients; only if `can_step`.

        token: its ``real`` on the CPU. extras: as in `condense.ops.Extras`. latent_width: not used, known from `read`.
        """
        if self._ring is None:
            assert self._state is not None
            self._ring = RingState(self._method_of_tokens, self.store, self._state, self.latent_width)
            self._state = None
        refuse_others(self._ring.buffers.seen.shape[0], self._ring.buffers.ring_k.dtype, token.k)
        out = self._ring.step(token, scale=scale, extras=extras)
        self._count(1, 1 if token.real is None else int(token.real.min()))
        return out

    def count_tokens(self) -> PerRow:
        """Real tokens per row, without those that a second reading dropped; never waits for the device."""
        held = self._state if self._ring is None else self._ring
        return 0 if held is None else held.seen

    def _count(self, L: int, trailing: int) -> None:
        """Count L new slots, the last ``trailing`` of which are real in every row."""
        self._num_slots += L
        self._num_real_slots = self._num_real_slots + L if trailing == L else trailing

    def get_seq_length(self) -> int:
        """Tokens seen, padding included: positions and masks continue from this number."""
        return self._num_slots

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask's length and offset: it covers every slot ever seen (`condense.models.masks`)."""
        return self._num_slots + query_length, 0

    def get_max_length(self) -> int:
        """The largest number of slots: -1, no limit."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.state = self.prompt = None
        self.store.forget()
        self.is_initialized = False
        self._num_slots = self._num_real_slots = self._num_fixed_slots = self.dropped = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest ``-tokens_to_remove`` tokens (assisted decoding).

        Exact for up to `condense.state.SLACK` tokens, counted from the most that were held at any time: several crops
        in a row share this number. Raises ValueError, state unchanged, as `check_crop`.
        """
        count = self.check_crop(tokens_to_remove)
        if count == 0:
            return
        if self._ring is not None:
            self._ring.crop(count)
        if (state := self._state) is not None:
            N, Q, seen = state.window_k.shape[2], state.mean_q.shape[2], state.seen - count
            before, after = (max_row(num_entries(self.method, n, state.first.num)) for n in (state.seen, seen))
            # the method's own tensors may have several columns per entry
            entries = tuple(x[:, :, : x.shape[2] * after // before] if before else x for x in state.entries)
            k, v = (x[:, :, : N - count] for x in (state.window_k, state.window_v))
            mean_q = state.mean_q[:, :, : max(0, Q - count)]
            self._state = state._replace(entries=entries, window_k=k, window_v=v, mean_q=mean_q, seen=seen)
        self._num_slots -= count
        self._num_real_slots -= count

    def check_crop(self, tokens_to_remove: int) -> int:
        """The number of tokens that `crop` takes back, 0 before the first ones.

        Raises ValueError for a positive number, for more tokens than are kept, for tokens of a prompt whose entries
        depend on its end, and for padding among them (also in rows that were dropped since).
        """
        count = -int(tokens_to_remove)  # transformers 5.17 passes a tensor
        if count < 0:
            raise ValueError(f"tokens_to_remove must be <= 0, minus the number of tokens to take back, got {-count}")
        ring, state = self._ring, self._state
        if count == 0 or (ring is None and state is None):
            return 0
        if count > self._num_real_slots:
            raise ValueError(
                f"crop: the last {count} tokens include padding or more than the {self._num_slots} seen; start from a "
                "new cache, or if the pad token was generated beside an assistant, pass generate another pad_token_id"
            )
        if self._num_slots - count < self._num_fixed_slots:
            raise ValueError(
                f"crop: {count} tokens reach into the prompt of {self._num_fixed_slots} tokens, by whose end "
                f"{type(self.method).__name__} chose what it keeps; start from a new cache instead"
            )
        if ring is not None:
            seen, N, Q = ring.seen - count, ring.num_window, ring.num_queries
        else:
            assert state is not None
            seen, N, Q = state.seen - count, state.window_k.shape[2], state.mean_q.shape[2]
        needed = max_row(seen - first_needed(self.method, seen))
        queries_needed = min(max(0, self.method.layout.num_summary - 1), max_row(seen))
        too_few = N - count < needed or (queries_needed > 0 and Q - count < queries_needed)
        if ring is not None and ring.settings.sees_rest:
            too_few |= min_row(seen // ring.settings.rule.chunk - ring.first_sum) < 0
        if too_few or min_row(seen) < 0:  # seen < 0: a prompt that was read at once has no exact tokens to return to
            raise ValueError(
                f"crop: {count} tokens lie beyond the {SLACK} that a condensed cache can take back for sure; copy the "
                "cache before a turn that may be taken back (copy.deepcopy), or propose fewer tokens at a time "
                "(num_assistant_tokens, prompt_lookup_num_tokens)"
            )
        return count

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put rows in the order of ``beam_idx`` (int ``[B]``). Raises ValueError for a store in host memory."""
        self.store.refuse_reorder()
        self._map_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times."""
        self._map_rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows in ``indices`` (int ``[n]`` or bool ``[B]``)."""
        self._map_rows(lambda x: x[indices.to(x.device)])

    def offload(self) -> None:
        """Move the state to the CPU. Raises ValueError for a store that is there already."""
        if self.store.on_host:
            raise ValueError(
                "offloaded caches move all layers to the CPU and back, and store='host' keeps most of them there: "
                "leave cache_implementation unset, or use store='device'"
            )
        self._map_tensors(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the state back to the device of the layer."""
        self._map_tensors(lambda x: x.to(self.device, non_blocking=True))

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply ``change``, which picks rows, to the tensors and numbers of the state."""
        # a number that agrees in all rows, an int, stays as it is, without waiting for indices from the GPU
        self._map_tensors(change, lambda x: int_if_equal(change(x)) if isinstance(x, Tensor) else x)

    def _map_tensors(
        self, change: Callable[[Tensor], Tensor], change_number: Callable[[PerRow], PerRow] = lambda x: x
    ) -> None:
        """Apply ``change`` to all tensors of the state or buffers, and ``change_number`` to the numbers per row."""
        if self._state is not None:
            self._state = self._state.map(change, change_number)
        if self._ring is not None:
            self._ring.map_tensors(change, change_number)
