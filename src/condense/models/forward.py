"""What the attention layers of one forward share: padding, packed documents, and the plan.

Transformers hands every layer of a forward the same mask, positions and marks. The first layer that a forward reaches
looks at them and keeps what it found in a board that all attention modules of a model share; the others find it there
by those very objects. A layer that asks again is in another forward, and looks anew: tensors may have been rewritten.

Shapes: B rows, L new slots.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache

from condense.models.padding import Padding, check_mask, look_at
from condense.plan import ForwardPlan

# forwards whose layers may take turns: layers with and without a sliding window get masks of their own
_MOST_FORWARDS = 4


class AttentionCall(NamedTuple):
    """One call of the registered attention function: q ``[B, H, L, D]``, k ``[B, K, L, D]``, v ``[B, K, L, Dv]``.

    mask: bool ``[B, 1, 1, n]`` or None. options: further keywords of the call.
    """

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float
    dropout: float
    options: Mapping[str, Any]


class Forward:
    """One forward of a model, as its layers see it."""

    def __init__(self, call: AttentionCall, cache: Cache | None) -> None:
        # weak, so that the board of a model keeps nothing alive that its caller has let go
        self._shared = tuple(map(_weak, _shared_by_layers(call, cache)))
        self.B, self.L = call.q.shape[0], call.q.shape[2]
        self._asked: set[int] = set()
        self._paddings: dict[tuple[int, int], Padding | None] = {}
        self._plans: dict[int | None, ForwardPlan] = {}
        self._lengths: dict[bool, list[int] | None] = {}

    def takes(self, call: AttentionCall, cache: Cache | None, layer_idx: int) -> bool:
        """True if the call is of this forward, by a layer that has not asked yet."""
        same = (
            all(map(_is_of, self._shared, _shared_by_layers(call, cache)))
            and (call.q.shape[0], call.q.shape[2]) == (self.B, self.L)
            and layer_idx not in self._asked
        )
        if same:
            self._asked.add(layer_idx)
        return same

    @property
    def mask(self) -> Tensor | None:
        """The key mask of the calls, bool ``[B, 1, 1, n]``."""
        return self._shared[0]()

    def padding(self, start: int, length: int) -> Padding | None:
        """Padding in columns ``[start, start + length)`` of the mask, None if all are real.

        Raises ValueError for a mask of another shape than ``[B, 1, 1, n]``, and for one that is too short.
        """
        mask = self.mask
        if mask is None:
            return None
        if (start, length) not in self._paddings:
            check_mask(mask, self.B, max(0, -start, start + length - mask.shape[-1]))
            self._paddings[start, length] = look_at(mask[:, 0, 0, start : start + length])
        return self._paddings[start, length]

    def plan(self, padding: Padding | None = None) -> ForwardPlan:
        """The plan of the new tokens, aligned by their padding."""
        key = None if padding is None else id(padding)
        if key not in self._plans:
            self._plans[key] = ForwardPlan(self.L, None if padding is None else padding.counts)
        return self._plans[key]

    def documents(self, *, plain: bool) -> list[int] | None:
        """Lengths of the documents packed into a row, None if there is one; as transformers recognises them.

        Either ``cu_seq_lens_q`` (int ``[n + 1]``, from 0 to L) or, in a call with neither cache nor mask (``plain``),
        ``position_ids`` (int ``[B, L]``) that start again.
        Raises ValueError if several rows are packed, and for marks that do not fit.
        """
        if plain not in self._lengths:
            marks: Tensor | None = self._shared[1]()
            positions: Tensor | None = self._shared[2]() if plain else None
            self._lengths[plain] = self._runs(positions) if marks is None else self._marked(marks)
        return self._lengths[plain]

    def _marked(self, marks: Tensor) -> list[int]:
        ends = marks.tolist()
        lengths = [stop - start for start, stop in itertools.pairwise(ends)]
        if self.B != 1 or not lengths or ends[0] != 0 or ends[-1] != self.L or min(lengths) < 0:
            raise ValueError(
                f"cu_seq_lens_q must rise from 0 to the {self.L} tokens of one row of packed documents, got {ends} and "
                f"{self.B} rows"
            )
        return [n for n in lengths if n]

    def _runs(self, positions: Tensor | None) -> list[int] | None:
        """Lengths of the runs of positions that rise by 1, cut wherever some row is; None for one run."""
        if positions is None or self.L < 2:
            return None
        starts = (positions.diff() != 1).any(0).nonzero()[:, 0].add(1).tolist()
        if not starts:
            return None
        if self.B != 1:
            raise ValueError(f"packed documents (position_ids that start again) must be one row, got {self.B} rows")
        return [stop - start for start, stop in itertools.pairwise([0, *starts, positions.shape[1]])]


class ForwardBoard:
    """Where the layers of a model find the `Forward` they are in. Copies and pickles of a model begin with none."""

    def __init__(self) -> None:
        self._forwards: list[Forward] = []

    def forward_of(self, call: AttentionCall, cache: Cache | None, layer_idx: int) -> Forward:
        """The forward that a layer's call belongs to, new if no layer before it was in the same."""
        if torch.compiler.is_compiling():
            return Forward(call, cache)
        # a copy: other threads may run the same model
        for forward in list(self._forwards):
            if forward.takes(call, cache, layer_idx):
                return forward
        forward = Forward(call, cache)
        forward.takes(call, cache, layer_idx)
        self._forwards = [forward, *self._forwards[: _MOST_FORWARDS - 1]]
        return forward

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardBoard:
        return memo.setdefault(id(self), ForwardBoard())

    def __reduce__(self) -> tuple[type[ForwardBoard], tuple[()]]:
        return ForwardBoard, ()


def _shared_by_layers(call: AttentionCall, cache: Cache | None) -> tuple[Any, ...]:
    """The objects that a forward hands to every layer: mask, marks, positions and cache."""
    return call.mask, call.options.get("cu_seq_lens_q"), call.options.get("position_ids"), cache


def _weak(x: Any) -> Callable[[], Any]:
    return _nothing if x is None else weakref.ref(x)


def _nothing() -> None:
    return None


def _is_of(known: Callable[[], Any], given: Any) -> bool:
    """True if a weak reference is to what is given; one whose object is gone is not to None."""
    return known is _nothing if given is None else known() is given


def refuse_cached_documents(module: nn.Module, cache: Cache | None, seen: int) -> None:
    """Raise ValueError for packed documents that a cache would go on with.

    Training asks for a cache by default and drops it; anybody else would go on with it.
    """
    if cache is not None and (seen > 0 or not module.training):
        raise ValueError("packed documents (cu_seq_lens_q) cannot be cached: pass use_cache=False")
