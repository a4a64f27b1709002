"""Padding, packed documents and plan of one forward, shared by all its attention layers; and calls that are refused.

Transformers gives every layer of a forward the same mask, position and document objects. The first layer reads them and
stores the result in the model's `ForwardBoard`; the others look it up there by the identity of these objects. A layer
that asks a second time starts a new forward, and so does one that finds the objects changed, by PyTorch's version
counter (tensors made in inference mode have none). Layers that run again in a backward pass count as another forward.

Shapes: B rows, L new slots.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache

from condense.methods import Method
from condense.models.masks import Padding, check_mask, find_padding
from condense.ops import NO_EXTRAS, Extras
from condense.ops.checks import check_cu_seqlens
from condense.ops.spans import SharedByLayers
from condense.ops.tensors.per_row import PerRow, comparable, int_if_equal
from condense.plan import ForwardPlan

# forwards remembered at a time: sliding and full layers get different masks, and several threads may run one model
_MOST_FORWARDS = 4


class AttentionCall(NamedTuple):
    """One call of the registered attention function: q ``[B, H, L, D]``, k ``[B, K, L, D]``, v ``[B, K, L, Dv]``.

    module: a `condense.models.attention.CondensedAttention`. mask: from `condense.models.masks.condense_mask`: bool
    ``[B, 1, 1, n]``, True at tokens; int32 ``[B, 1, 1, L]``, the numbers of packed documents; or None. options: further
    keywords of the call. cache: its layer ``layer_idx`` takes the new tokens; None without a cache. padding: of the new
    tokens, None if all are real. plan: of the new tokens, once it is known.
    """

    module: Any
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float
    dropout: float
    options: Mapping[str, Any]
    extras: Extras = NO_EXTRAS
    cache: Cache | None = None
    layer_idx: int = 0
    padding: Padding | None = None
    plan: ForwardPlan | None = None

    @property
    def shared(self) -> tuple[Any, ...]:
        """The objects that a forward hands to every layer: mask, marks, positions and cache."""
        return self.mask, self.options.get("cu_seq_lens_q"), self.options.get("position_ids"), self.cache


class Forward(SharedByLayers):
    """The padding, documents and plans of one forward of a model, for all of its layers."""

    def __init__(self, call: AttentionCall) -> None:
        # weak references, so that the board does not keep a caller's mask or cache alive
        self._shared = [_Shared(x) for x in call.shared]
        self.B, self.L = call.q.shape[0], call.q.shape[2]
        self._asked, self._found = {call.layer_idx}, {}

    def takes(self, call: AttentionCall) -> bool:
        """True if the call belongs to this forward: the same objects, from a layer that has not asked yet."""
        if call.layer_idx in self._asked or (call.q.shape[0], call.q.shape[2]) != (self.B, self.L):
            return False
        is_same = all(held.equals(x) for held, x in zip(self._shared, call.shared, strict=True))
        if is_same:
            self._asked.add(call.layer_idx)
        return is_same

    @property
    def _numbers(self) -> Tensor | None:
        """The numbers of packed documents, int32 ``[B, 1, 1, L]``; None if the calls have a padding mask or none."""
        mask: Tensor | None = self._shared[0].get()
        return mask if isinstance(mask, Tensor) and mask.dtype == torch.int32 else None

    @property
    def _padding_mask(self) -> Tensor | None:
        """The calls' padding mask; None if they have none, or numbers of packed documents in its place."""
        return None if self._numbers is not None else self._shared[0].get()

    def padding(self, start: int) -> Padding | None:
        """The padding of the new slots, the first of which is column ``start`` of the mask; None if all are real.

        Raises ValueError for a mask of another shape than ``[B, 1, 1, n]``, and for one that is too short.
        """

        def find() -> Padding | None:
            mask, stop = self._padding_mask, start + self.L
            if mask is None:
                return None
            check_mask(mask, self.B, max(0, stop - mask.shape[-1]))
            return find_padding(mask[:, 0, 0, start:stop])

        return self.once(("padding", start), find)

    def check_slots(self, slots: int) -> None:
        """Raise ValueError unless a layer of the cache has as many slots as the first layer that asked."""
        first = self.once("slots", lambda: slots)
        if slots != first:
            raise ValueError(
                f"the cache must have the same tokens in all layers, got {first} and {slots}: a forward "
                "was interrupted between two layers. Start from a new cache"
            )

    def check_past(self, start: int, held: Callable[[], PerRow]) -> None:
        """Raise ValueError unless the mask's first ``start`` slots have as many tokens per row as the cache, held()."""
        mask = self._padding_mask
        if mask is None:
            return
        past = mask[:, 0, 0, :start]
        got = self.once(("past", start), lambda: comparable(int_if_equal(past.sum(1).cpu())))
        wanted = comparable(int_if_equal(held()))
        if wanted != got:
            raise ValueError(
                "attention_mask must have the cached tokens as they were read, since groups hold them together: wanted "
                f"{wanted} tokens per row in the first {start} slots, got {got}. generate reads as tokens what it adds "
                "to rows that end early: give the model a new cache, or beside an assistant another pad_token_id"
            )

    def plan(self, start: int | None, documents: list[int] | None = None) -> ForwardPlan:
        """The plan of the new tokens; start: their first column in the mask, None if all are real.

        documents: lengths of the documents packed into the row, from `documents`; start is None then.
        """
        padding = None if start is None else self.padding(start)
        counts = None if padding is None else padding.counts
        key = ("plan", start, documents is None)
        return self.once(key, lambda: ForwardPlan(self.L, counts, documents=documents))

    def documents(self, *, plain: bool) -> list[int] | None:
        """Lengths of the documents packed into a row, None if there is only one document.

        They are marked as in transformers: by ``cu_seq_lens_q`` (int ``[n + 1]``, from 0 to L), by the documents'
        numbers in place of a mask, or, in a call without mask and cached tokens (``plain``), by ``position_ids`` (int
        ``[B, L]``) that start again or jump.
        Raises ValueError if several rows are packed, and for marks that do not fit.
        """

        def find() -> list[int] | None:
            marks: Tensor | None = self._shared[1].get()
            if marks is not None:
                return [n for n in check_cu_seqlens(marks, self.B, self.L, "cu_seq_lens_q") if n]
            if self._numbers is not None:
                return self._runs(self._numbers[:, 0, 0].diff() != 0)
            positions: Tensor | None = self._shared[2].get() if plain else None
            return None if positions is None else self._runs(positions.diff() != 1)

        return self.once(("documents", plain), find)

    def _runs(self, begins: Tensor) -> list[int] | None:
        """Lengths of documents, None for one alone; begins bool ``[B, L - 1]``: True at i if one begins at i + 1."""
        starts = begins.any(0).nonzero()[:, 0].add(1).tolist()
        if not starts:
            return None
        if self.B != 1:
            raise ValueError(
                f"packed documents (position_ids that start again or jump) must be one row, got {self.B} rows"
            )
        return [stop - start for start, stop in itertools.pairwise([0, *starts, self.L])]


class ForwardBoard:
    """The newest forwards of a model, whose plans its layers share. Copies and pickles of a board are empty.

    owner: the thread in whose `condense.use` block the model is, None outside of one. methods: layer index to method.
    """

    def __init__(self, owner: int | None, methods: dict[int, Method]) -> None:
        self.owner, self.methods = owner, methods
        self._forwards: list[Forward] = []

    def check_thread(self) -> None:
        """Raise ValueError in another thread than the owner's, unless it runs a backward pass."""
        if self.owner in (None, threading.get_ident()) or torch._C._current_graph_task_id() != -1:
            return
        raise ValueError(
            "the model is in a condense.use block of another thread, which changes the model itself: enter a block in "
            "the thread that runs the model, once no other is in one, or use condense.apply"
        )

    def forward_of(self, call: AttentionCall) -> Forward:
        """The forward that a layer's call belongs to; a new one for the first layer of a forward."""
        if torch.compiler.is_compiling():
            return Forward(call)
        # iterate over a copy, because other threads may run the same model
        for forward in list(self._forwards):
            if forward.takes(call):
                return forward
        forward = Forward(call)
        self._forwards = [forward, *self._forwards[: _MOST_FORWARDS - 1]]
        return forward

    def __reduce__(self) -> tuple[type[Self], tuple[None, dict[int, Method]]]:
        return type(self), (None, self.methods)


class _Shared:
    """A weak reference to an object that layers share, or to None, and a tensor's version counter when it was made."""

    def __init__(self, x: Any) -> None:
        self._is_none, self._version = x is None, _version(x)
        # returns the object, None if it is gone
        self.get: Callable[[], Any] = (lambda: None) if x is None else weakref.ref(x)

    def equals(self, x: Any) -> bool:
        """True if x is the same object and was not written to since."""
        if x is None:
            return self._is_none
        return self.get() is x and (self._version is None or x._version == self._version)


def _version(x: Any) -> int | None:
    """PyTorch's count of writes to a tensor; None for other objects, inference tensors, and while compiling."""
    if not isinstance(x, Tensor) or torch.compiler.is_compiling() or x.is_inference():
        return None
    return x._version


def assert_one_document(call: AttentionCall) -> None:
    """Fail on the device if rows are not plain: a compiled forward cannot look at them on the host.

    Rows are plain if each is one document without padding on its left; padding on the right, as in training, is read
    like tokens, which no earlier token sees. Raises ValueError for documents marked by ``cu_seq_lens_q``.
    """
    if call.options.get("cu_seq_lens_q") is not None:
        raise ValueError("packed documents (cu_seq_lens_q) cannot be compiled as one graph: leave torch.compile out")
    if call.mask is not None:
        real = call.mask.to(torch.int32)
        on_the_right = (real[..., 1:] <= real[..., :-1]).all()
        on_the_left = "padding on the left (set tokenizer.padding_side='right')"
        found = "several documents in a row" if call.mask.dtype == torch.int32 else on_the_left
        torch._assert_async(on_the_right, f"compiled condensed attention: {found}")
    positions = call.options.get("position_ids")
    if isinstance(positions, Tensor):
        steps = positions.diff()
        # a jump begins a document too, but beside a mask positions mark no documents (`Forward.documents`)
        is_one = (steps == 1 if call.mask is None else steps > 0).all()
        torch._assert_async(is_one, "compiled condensed attention: several documents in a row")


def refuse_context_parallel() -> None:
    """Raise ValueError inside torch's ``context_parallel``, where each process has a part of every text.

    It is recognised by PyTorch's fused attention, which it replaces by a function of torch.distributed.
    """
    if not torch.compiler.is_compiling() and F.scaled_dot_product_attention.__module__.startswith("torch.distributed"):
        raise ValueError(
            "context parallelism cannot be condensed: it gives each process a part of every text, and groups are made "
            "of whole ones. Leave context_parallel out; FSDP2 and tp_plan='auto' leave texts whole"
        )


def refuse_options(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Raise ValueError for keywords of a call that condensed attention cannot honour."""
    if options.get("position_bias") is not None:
        raise ValueError("condensed attention has no bias by position (position_bias): call condense.restore(model)")
    if options.get("sliding_window") is not None and module.condense_method is not None:
        raise ValueError(
            f"layer {module.layer_idx} has a sliding window and cannot be condensed: call condense.restore(model), and "
            "name the other layers"
        )
    if options.get("output_attentions"):
        raise ValueError(
            "output_attentions must be False, got True: condensed attention has no weights to return. Stock attention "
            "has: model.set_attn_implementation('eager'), and 'condense' afterwards"
        )
    if options.get("return_shared_kv_states"):
        raise ValueError(
            "return_shared_kv_states must be False, got True: a condensed cache does not keep the keys of all tokens, "
            "which Gemma 4's assistants read. Generate without assistant_model, with another causal model as the "
            "assistant, or call condense.restore(model)"
        )
    if options.get("is_causal") is False:
        raise ValueError("condensed attention is causal: call condense.restore(model) for is_causal=False")
