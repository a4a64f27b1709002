"""A condensed cache layer of fixed size at fixed addresses, for compiled decode and CUDA graphs.

Its buffers have room for the entries of ``max_cache_len`` tokens and for the window, a ring. A single new token is one
`condense.ops.decode_step`; several are read by `condense.functional.extend`, and the new state is written back.

If several tokens come first, of which the method makes first entries (`condense.methods.FirstEntries`), buffers are
sized for these and the chunks that can follow; if a step comes first, as before a CUDA graph is captured, for the most
entries that there can be. Shapes as in `condense.state` and `condense.ops.step.state`.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from condense.caches.base import CondensedCacheLayer, Expected, refuse_others
from condense.caches.buffers import Buffered, room_of
from condense.caches.store import Store
from condense.methods import NO_FIRST, FirstEntries, Method, step_settings
from condense.ops import NO_EXTRAS, Extras, NewToken, StepCall, StepState, decode_step
from condense.ops.step import StateSizes, clear_state, empty_state
from condense.ops.tensors.per_row import PerRow, int_if_equal, max_row
from condense.state import LayerState, fine_slots, most_entries, num_entries


def _refused(what: str) -> Callable[..., NoReturn]:
    """A method of static layers that raises ValueError, saying what such a cache does instead."""

    def refuse(layer: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(f"a static condensed cache {what}: use a cache that grows (cache_implementation unset)")

    return refuse


class StaticCondensedLayer(Buffered, CondensedCacheLayer):
    """One attention layer's state for up to ``max_cache_len`` slots, padding included.

    Memory is taken when the first tokens come, for their rows, heads, widths, dtype and device, and stays where it is,
    unless after `reset` more first entries are made than there is room for. Another number of rows, or more tokens than
    fit, raise ValueError and change nothing; so do, with no memory taken, tokens that
    `condense.caches.store.Store.check` refuses. RuntimeError where the host cannot pin what a store needs.

    Slots are counted in ``num_slots`` (int64 ``[]``) on the device, so that a replayed CUDA graph counts too. The host
    counts as well until a step is captured or compiled, because a replay passes it by; `know_slots` sets its count
    again. ``expected``: the tokens that come next, by which a model chooses between `read` and `step`.
    """

    is_compileable = True
    is_croppable = False
    is_sliding = False
    buffers: StepState | None = None
    # the ring has no room for tokens that might be taken back, and buffers at fixed addresses cannot change their size
    crop = check_crop = _refused("cannot take tokens back (assisted decoding, prompt lookup)")
    batch_repeat_interleave = batch_select_indices = _refused("keeps its number of rows")
    offload = _refused("stays where it is")

    def __init__(self, method: Method, max_cache_len: int) -> None:
        self.method = method
        self.max_cache_len = max_cache_len
        self.settings = step_settings(method)
        self.store = Store(self.settings)
        self.num_slots = torch.zeros((), dtype=torch.int64, device="cpu")
        # the number of entries that a prompt leaves is known only once it has been read
        self.sizes_by_prompt = self.settings.has_first or method.reread is not None
        self.expected = self._first_expected = Expected.FIRST_ENTRIES if self.sizes_by_prompt else Expected.ANY
        # slots seen, as the host counts them; None if only ``num_slots`` on the device has the count
        self._slots: int | None = 0
        # ``seen`` and ``first`` of the state after a `read`; None after a step, which counts on the device alone
        self._rows: tuple[PerRow, FirstEntries] | None = None
        super().__init__()

    def lazy_initialization(
        self,
        key_states: Tensor,
        value_states: Tensor,
        room: tuple[int, int] | None = None,
    ) -> None:
        """Take the memory for rows, heads, widths, dtype and device of key_states ``[B, K, L, D]`` and value_states.

        room: columns of entries, and of the ring, for what a prompt left and what can follow it; None: for all that
        ``max_cache_len`` tokens can need.
        """
        k, v, N, settings = key_states, value_states, self.max_cache_len, self.settings
        M, W = room_of(self.method, most_entries(self.method, N), N) if room is None else room
        self.latent_method = self._method_of_tokens
        self.store.check(k, v, self.latent_width, groups=M)
        self.backend = self.store.backend(k, v, self.latent_width, M)
        stored = 0 if settings.choice is None else M * settings.rule.chunk
        widths, fine = (k.shape[3], v.shape[3]), fine_slots(self.method)
        sizes = StateSizes(k.shape[0], k.shape[1], widths, M, W, settings.num_summary, stored, fine=fine)
        self.buffers = empty_state(k, settings, sizes)
        self.is_initialized = True
        self.num_slots = self.num_slots.to(k.device)
        self.batch_size, self.dtype, self.device = k.shape[0], k.dtype, k.device
        if not torch.compiler.is_compiling():
            for tensor in (*self.buffers, self.num_slots):
                torch._dynamo.mark_static_address(tensor)

    def can_step(self, k: Tensor, v: Tensor) -> bool:
        """True unless first entries are made of the next tokens; see `condense.caches.CondensedLayer`."""
        return self.expected is not Expected.FIRST_ENTRIES

    def step(
        self, token: NewToken, *, scale: float, latent_width: int | None = None, extras: Extras = NO_EXTRAS
    ) -> Tensor:
        """Read one token per row and return its attention ``[B, H, 1, Dv]``: no gradients, one graph, no waiting.

        token: its ``real`` on the device. latent_width: for latents: the token's k holds latents, q absorbed queries, v
        has width 0, and values are the first ``latent_width`` columns of k. extras: as in `condense.ops.Extras`.
        Raises ValueError, state unchanged, for another number of rows, another dtype and a full cache; not for a full
        one while it is compiled or captured: then one step too many writes inside the buffers all the same.
        """
        self._check_fit(token.k)
        if not self.is_initialized:
            self.latent_width = latent_width or 0
            self.lazy_initialization(token.k, token.v)
        assert self.buffers is not None
        token = token._replace(counter=self.num_slots)  # the step adds 1 to it
        call = StepCall(token, self.buffers, self.settings, scale, self.latent_width, extras)
        out = decode_step(call, self.latent_method.represent, backend=self.backend)
        self.expected = Expected.ANY
        self.know_slots(None if _is_recorded(self.device) or self._slots is None else self._slots + 1)
        return out

    def _before(self, k: Tensor, v: Tensor) -> LayerState | None:
        self._check_fit(k)
        self._new_slots = k.shape[2]
        return None if self.count_slots() == 0 else self._held_state()

    def _hold(self, before: LayerState | None, after: LayerState) -> None:
        """Write the state ``after``, which the newest slots made from ``before``; None if they are the first.

        For the first slots memory is taken, for what they left and for what can follow; at new addresses if the buffers
        of an earlier prompt are too small.
        """
        slots = self._new_slots
        if before is None:
            room, left, held = None, self.max_cache_len - slots, (0, 0)
            if self.buffers is not None:
                held = self.buffers.entries_k.shape[2], self.buffers.ring_k.shape[2]
            if self.sizes_by_prompt:
                tokens = left + (0 if self.settings.has_first else max_row(after.seen))
                M, W = room_of(self.method, max_row(num_entries(self.method, tokens, after.first.num)), tokens)
                room = max(held[0], M), max(held[1], W)
            if self.buffers is None or (room is not None and room != held):
                self.buffers = None  # frees the buffers of an earlier prompt
                self.lazy_initialization(after.window_k, after.window_v, room)
        self._write_state(before, after)
        self.num_slots.add_(slots)
        if self._slots is not None:
            self._slots, self._rows = self._slots + slots, (after.seen, after.first)
        self.expected = Expected.ANY

    def skip_prompt(self) -> None:
        """Count the prompt as read though none was, so that `step` reads the next token."""
        self.expected = Expected.ANY

    def expect_prompt(self, *, plain: bool) -> None:
        """Expect a prompt without padding if ``plain`` and if the host knows that the next tokens are the first."""
        if not self.sizes_by_prompt:
            self.expected = Expected.PLAIN_PROMPT if plain and self._slots == 0 else Expected.ANY

    def count_slots(self) -> int:
        """``num_slots`` as an int; waits for the device if the host does not know it."""
        return int(self.num_slots) if self._slots is None else self._slots

    def count_tokens(self) -> PerRow:
        """Real tokens per row, without those that a second reading dropped; may wait for the device."""
        if self._rows is not None or self.buffers is None:
            return 0 if self._rows is None else self._rows[0]
        # copy=True also on a CPU: the shared plan keeps this tensor, and the next step adds 1 to `seen` in place
        return int_if_equal(self.buffers.seen.to("cpu", copy=True))

    def know_slots(self, count: int | None) -> None:
        """Set the host's count of slots. None: no count, because a replayed step may advance ``num_slots``."""
        self._slots, self._rows = count, None

    def _check_fit(self, k: Tensor) -> None:
        """Raise ValueError if tokens like k ``[B, K, L, D]`` do not fit in."""
        L, held = k.shape[2], 0
        if self.is_initialized:
            refuse_others(self.batch_size, self.dtype, k)
            held = 0 if _is_recorded(self.device) else self.count_slots()
        if held + L > self.max_cache_len:
            raise ValueError(
                f"static cache: wanted at most {self.max_cache_len} tokens (max_cache_len), got {held} and {L} more; "
                "make it longer, or use a cache that grows (cache_implementation unset)"
            )

    def _held_state(self) -> LayerState:
        """The state in the buffers."""
        assert self.buffers is not None
        seen, first = self.count_tokens(), NO_FIRST
        if self._rows is not None:
            first = self._rows[1]
        elif self.settings.has_first:
            first = FirstEntries.of(*self.buffers.first.to("cpu", copy=True).T)
        return self._read_state(seen, first, max_row(seen), max_row(seen))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask's length and offset: it has a column for every slot that there will ever be."""
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        """The largest number of slots, ``max_cache_len``."""
        return self.max_cache_len

    def get_seq_length(self) -> Tensor | int:
        """Slots seen, padding included; once there are any, the counter itself, as transformers' static layers."""
        return self.num_slots if self.is_initialized else 0

    def reset(self) -> None:
        """Forget everything, in place."""
        if self.buffers is not None:
            clear_state(self.buffers, self.settings)
            self.store.forget()
            self.num_slots.zero_()
        self.expected, self.prompt, self.dropped = self._first_expected, None, 0
        # without a count the host does not begin one, because a step may be replayed before the next prompt
        self.know_slots(None if self._slots is None else 0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder rows in place by ``beam_idx`` (int ``[B]``). Raises ValueError for a store in host memory."""
        self.store.refuse_reorder()
        self.store.forget()
        self._rows = None
        for tensor in self.buffers or ():
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))


def _is_recorded(device: torch.device) -> bool:
    """True while calls are compiled or captured as a graph, which later repeats them without this Python code."""
    return torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
