"""The state of one layer in buffers: one table lists them, by which they are made, checked, cleared and counted.

Shapes: B rows, K KV heads, M entries of capacity, W and Q slots of the rings of tokens and of queries, N tokens that
the store has room for, S slots of the store, T sums, F fine entries, g tokens per group, D and Dv widths.
"""

import functools
import math
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor

from condense.ops.checks import check_float64
from condense.ops.recall.index import GroupIndex, index_widths
from condense.ops.step.settings import StepSettings
from condense.ops.tensors.pinned import pinned_zeros


class Per(Enum):
    """The thing that a row of a buffer stands for; every KV head has its own rows, except for ``ROW``."""

    ENTRY = auto()
    TOKEN = auto()  # token of the window
    QUERY = auto()
    STORED = auto()  # token of a closed group
    COPIED = auto()  # token of a group in a slot of the store
    SUM = auto()  # sum of the values of the first j whole groups
    SLOT = auto()
    FINE = auto()  # entry of a chunk that is not merged yet
    ROW = auto()


class Field(NamedTuple):
    """One buffer of a state. width: columns, () for none; a buffer that a method does not need is 0 wide.

    fill: value of a new buffer; None for 0, 1, 2, ... on_host: in host memory, which is pinned beside a GPU.
    """

    name: str
    per: Per
    width: tuple[int, ...]
    dtype: torch.dtype
    fill: int | None = 0
    on_host: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one row of this buffer."""
        return math.prod(self.width) * self.dtype.itemsize


class StateSizes(NamedTuple):
    """Sizes of a layer's buffers, in this order: B, K, (D, Dv), M, W, Q, N, T, F."""

    rows: int
    heads: int
    widths: tuple[int, int]
    entries: int = 0
    tokens: int = 0
    queries: int = 0
    stored: int = 0
    sums: int = 2
    fine: int = 0

    def shape(self, field: Field, settings: StepSettings) -> tuple[int, ...]:
        """The shape of a buffer."""
        if field.per is Per.ROW:
            return (self.rows, *field.width)
        # a slot more than there can be groups would never be used
        slots = 0 if settings.choice is None else min(settings.choice.store.slots, self.entries)
        counts = {
            Per.ENTRY: self.entries, Per.TOKEN: self.tokens, Per.QUERY: self.queries, Per.STORED: self.stored,
            Per.SLOT: slots, Per.COPIED: slots * settings.rule.chunk, Per.SUM: self.sums,
            Per.FINE: self.fine,
        }  # fmt: skip
        return self.rows, self.heads, counts[field.per], *field.width


_Layout = tuple[tuple[Field, tuple[int, ...]], ...]


class StepState(NamedTuple):
    """Buffers of decode steps, at fixed addresses. All their values are finite, also those that no query sees.

    entries_k ``[B, K, M, D]``, entries_v ``[B, K, M, Dv]``: entries, left-aligned, made by the step that pools a chunk;
    with fewer than 16 ``entry_bits`` rows of bytes, uint8 ``[B, K, M, C]`` (`condense.ops.entries.EntryFormat`); of
    width 0 where no query sees them.
    ring_k ``[B, K, W, D]``, ring_v ``[B, K, W, Dv]``: the token at position t of its row stands in slot ``t % W``;
    W is at least window + chunk, or the most tokens that a row can have if that is less.
    ring_q ``[B, K, Q, D]``: head-mean queries in the dtype of q, position t in slot ``t % Q``; Q >= num_summary.
    With larger rings, up to ``W - window - chunk`` tokens and ``Q - num_summary + 1`` queries can be taken back by
    lowering ``seen``: slots and entries past it are overwritten before they are seen again.
    seen int64 ``[B]`` on the device: real tokens per row, but for those of first entries; positions count them.
    first int64 ``[B, 2]`` on the device: the first entries, which stand before those of chunk 0, and how many of these
    stand for single tokens and have no bias (`condense.methods.FirstEntries`); zeros for most methods.
    arrived int32 ``[B, K + 1]`` on the device: counters of the parts of a step that are done; 0 between steps.
    biases float32 or wider ``[B, K, M, 1]``: each entry's own bias, only if matched.

    With a `ChoiceSettings` also the following, and neither ``first`` nor ``arrived``:

    signs, steps: the groups' index, `condense.ops.recall.GroupIndex` with room for M.
    store ``[B, K, N, C]``, N >= M * g: the exact tokens of closed groups, left-aligned, as `StoreFormat` packs them: of
    16 bits a key and its value side by side, C = D + Dv. On the device of the other buffers or in pinned host memory.
    slots ``[B, K, S * g, C]``: copies of groups that were open lately, for a store in host memory. S is the settings'
    number, or M if that is less; it may be 0.
    held int32 ``[B, K, S]``: the group in each slot, -1 for none. order int32 ``[B, K, S]``: all slots, the one whose
    group was open the longest ago first. A step reads an open group from its slot if it has one. The other open groups,
    in ascending order, each take the first slot of ``order`` whose group is not open now, while there is one. Then the
    slots that were read move to the end of ``order``, and behind them those that were taken. A row that is not real
    leaves all as it is. Slots decide from where numbers are read, never which numbers; PyTorch's step, which makes room
    for what it reads in every step, reads the store and leaves them as they are.
    sums float64 ``[B, K, T, Dv]``, if queries see the groups that they do not open as one token: slot ``j % T`` holds
    the sum of the values of a row's first j whole groups, before they are rounded; with latents, whose Dv is 0, the sum
    of keys, ``[B, K, T, D]``. A step that reads the last token of group j writes sum j + 1. So as many tokens can be
    taken back as T - 1 groups hold. In float64 sums of 16-bit numbers hardly round, whatever their order.

    With coarse entries (`condense.ops.coarse.Coarse`), entries_k and entries_v hold these, and fine entries stand in:

    fine_k ``[B, K, F, D]``, fine_v ``[B, K, F, Dv]``: the entry of chunk j in slot ``j % F``; F is at least
    `condense.ops.coarse.CoarseRule.fine_slots`.
    """

    entries_k: Tensor
    entries_v: Tensor
    ring_k: Tensor
    ring_v: Tensor
    ring_q: Tensor
    seen: Tensor
    first: Tensor
    arrived: Tensor
    biases: Tensor
    signs: Tensor
    steps: Tensor
    store: Tensor
    slots: Tensor
    held: Tensor
    order: Tensor
    sums: Tensor
    fine_k: Tensor
    fine_v: Tensor

    def entries(self, settings: StepSettings) -> tuple[Tensor, ...]:
        """The buffers that hold what `condense.Method.represent` returns, in its order."""
        return tuple(getattr(self, name) for name in entry_names(settings))

    @property
    def group_index(self) -> GroupIndex:
        """The index of all groups."""
        return GroupIndex(self.signs, self.steps)

    @property
    def is_apart(self) -> bool:
        """True if the store lies in host memory and the other buffers do not."""
        return self.store.device != self.seen.device


def entry_names(settings: StepSettings) -> tuple[str, ...]:
    """Names of the buffers that hold what `condense.Method.represent` makes, in its order; the store is the last."""
    of_groups = () if settings.choice is None else ("signs", "steps", "store")
    return "entries_k", "entries_v", *(("biases",) if settings.matched else ()), *of_groups


def fields_of(settings: StepSettings, heads: int, widths: tuple[int, int], dtype: torch.dtype) -> tuple[Field, ...]:
    """The buffers of a layer, in the order of `StepState`. heads: K; widths: D and Dv; dtype: of the tokens.

    Raises ValueError for widths that the store cannot hold.
    """
    (D, Dv), form, choice = widths, settings.entry_format, settings.choice
    # not `torch.promote_types`, because it is a torch operation, and growing buffers between steps should run few
    of_entry, wide = form.dtype(dtype), torch.float64 if dtype == torch.float64 else torch.float32
    C, Cv = (form.width(x, dtype.itemsize) if choice is None else 0 for x in widths)
    fields: tuple[Field, ...] = (
        Field("entries_k", Per.ENTRY, (C,), of_entry),
        Field("entries_v", Per.ENTRY, (Cv,), of_entry),
        Field("ring_k", Per.TOKEN, (D,), dtype),
        Field("ring_v", Per.TOKEN, (Dv,), dtype),
        Field("ring_q", Per.QUERY, (D,), dtype),
        Field("seen", Per.ROW, (), torch.int64),
        Field("first", Per.ROW, (2,) if choice is None else (0,), torch.int64),
        Field("arrived", Per.ROW, (heads + 1,) if choice is None else (0,), torch.int32),
        Field("biases", Per.ENTRY, (1,), wide) if settings.matched else Field("biases", Per.ROW, (0,), wide),
    )
    if settings.coarse is not None:
        fields += Field("fine_k", Per.FINE, (D,), dtype), Field("fine_v", Per.FINE, (Dv,), dtype)
    if choice is not None:
        store = settings.store_format
        stored, of_store = store.width(D, Dv, dtype.itemsize), store.dtype(dtype)
        signs, steps = index_widths(settings.rule.chunk, D)
        fields += (
            Field("signs", Per.ENTRY, (signs,), torch.uint8),
            Field("steps", Per.ENTRY, (steps,), dtype),
            Field("store", Per.STORED, (stored,), of_store, on_host=choice.store.on_host),
            Field("slots", Per.COPIED, (stored,), of_store),
            Field("held", Per.SLOT, (), torch.int32, fill=-1),
            Field("order", Per.SLOT, (), torch.int32, fill=None),
            Field("sums", Per.SUM, (Dv or D if choice.mean else 0,), torch.float64),
        )
    known = {field.name: field for field in fields}
    return tuple(known.get(name, Field(name, Per.ROW, (0,), dtype)) for name in StepState._fields)


def empty_state(k: Tensor, settings: StepSettings, sizes: StateSizes) -> StepState:
    """New buffers, with the values of `Field.fill`, for tokens in the dtype and on the device of the keys k.

    Raises ValueError, before memory is taken, as `fields_of`, for a device without float64, and for a choice without
    room for a group, because kernels load one before they know how many there are; RuntimeError where the host cannot
    pin the memory of a store.
    """
    check_float64(k.device)
    if settings.choice is not None and sizes.entries < 1:
        raise ValueError(f"sizes.entries must be at least 1 where groups are chosen, got {sizes.entries}")
    # unpacked, as PyTorch 2.11 cannot compile a named tuple that is made of a generator
    return StepState(*[_new(field, shape, k.device) for field, shape in _layout(settings, sizes, k.dtype)])


def _new(field: Field, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if field.on_host and device.type == "cuda":
        return pinned_zeros(shape, field.dtype, device)
    new = torch.zeros(shape, dtype=field.dtype, device=device)
    _fill(new, field)
    return new


def _fill(x: Tensor, field: Field) -> None:
    """Give a buffer the values of a new one."""
    if field.fill is None:
        x.copy_(torch.arange(x.shape[2], device=x.device))
    else:
        x.fill_(field.fill)


def _layout(settings: StepSettings, sizes: StateSizes, dtype: torch.dtype) -> _Layout:
    """The buffers of a layer, each with its shape."""
    fields = fields_of(settings, sizes.heads, sizes.widths, dtype)
    return tuple((field, sizes.shape(field, settings)) for field in fields)


# cached, because the layout is the same for all layers, in every step until their buffers grow
_known_layout = functools.lru_cache(maxsize=4096)(_layout)


def sizes_of(state: StepState, settings: StepSettings) -> StateSizes:
    """The sizes of a state's buffers, or what the settings need where a buffer is too small."""
    (B, K, W, D), Dv = state.ring_k.shape, state.ring_v.shape[3]
    M, g = state.entries_k.shape[2], settings.rule.chunk
    queries, stored, sums = max(settings.num_summary, state.ring_q.shape[2]), 0, 2
    if settings.choice is not None:
        stored, sums = max(M * g, state.store.shape[2]), max(2, state.sums.shape[2])
    fine = 0 if settings.coarse is None else state.fine_k.shape[2]
    return StateSizes(B, K, (D, Dv), M, W, queries, stored, sums, fine)


def _layout_beside(state: StepState, settings: StepSettings) -> _Layout:
    """The buffers of a state, each with the shape that it must have by `sizes_of`."""
    # not cached while tracing: torch.compile would look through the cache at the function, and warn
    find = _layout if torch.compiler.is_compiling() else _known_layout
    return find(settings, sizes_of(state, settings), state.ring_k.dtype)


def clear_state(state: StepState, settings: StepSettings) -> None:
    """Give all buffers the values of new ones, in place.

    Pinned memory keeps its values, because clearing it takes seconds and no kernel reads groups that are not closed.
    """
    for (field, _), x in zip(_layout_beside(state, settings), state, strict=True):
        if x.device == state.seen.device:
            _fill(x, field)


def check_state(state: StepState, settings: StepSettings) -> None:
    """Raise ValueError for buffers that do not fit together, or that kernels cannot read for their strides."""
    device = state.seen.device
    for (field, shape), x in zip(_layout_beside(state, settings), state, strict=True):
        is_pinned = field.on_host and x.device.type == "cpu" and (x.numel() == 0 or x.is_pinned())
        if x.shape != shape or x.dtype != field.dtype or not (x.device == device or is_pinned):
            raise ValueError(
                f"{field.name} must be {shape} in {field.dtype} on {device}, got {tuple(x.shape)} in {x.dtype} on "
                f"{x.device}"
            )
        by_rows = (
            settings.choice is None and x.dtype != torch.uint8 and field.name not in ("biases", "fine_k", "fine_v")
        )
        if by_rows and x.dim() == 4 and x.stride(3) != 1 and x.shape[3] > 1:
            raise ValueError(f"{field.name} must be contiguous in its last dimension, got strides {x.stride()}")
        if not by_rows and not x.is_contiguous():
            raise ValueError(f"{field.name} must be contiguous, got strides {x.stride()}")
