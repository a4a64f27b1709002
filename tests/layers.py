"""Tokens for cache layers and for `extend`, and outputs of reading them in whichever way a layer has.

Shapes: B rows, H query heads, K KV heads, L tokens, D and Dv widths.
"""

import torch
from oracles import oracle
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from condense import functional
from condense.caches import ReadRequest
from condense.ops import NewToken
from condense.plan import ForwardPlan

# what changes the rows of a layer of three, and which of them there are then
CHANGES = {
    "reorder": (lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "reorder-alike": (lambda layer: layer.reorder_cache(torch.tensor([1, 1, 1])), [1, 1, 1]),
    "repeat": (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "select": (lambda layer: layer.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
    "select-mask": (lambda layer: layer.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
    "offload-prefetch": (lambda layer: (layer.offload(), layer.prefetch()), [0, 1, 2]),
}


class Counting(TorchDispatchMode):
    """Operations that are called, most numbers of a tensor that one makes, most bytes that live at one time."""

    def __init__(self):
        super().__init__()
        self.names, self.largest, self.most_bytes, self._alive = [], 0, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.largest = max([self.largest, *(x.numel() for x in made)])
        self._alive |= {StorageWeakRef(x.untyped_storage()): x.untyped_storage().nbytes() for x in made}
        self._alive = {memory: size for memory, size in self._alive.items() if not memory.expired()}
        self.most_bytes = max(self.most_bytes, sum(self._alive.values()))
        return out


def draw(L, seed=0, rows=2, heads=(4, 2), widths=(6, 6), dtype=torch.float64, device="cpu"):
    return [x.to(device) for x in oracle.random_qkv(rows, *heads, L, *widths, dtype=dtype, seed=seed)]


def columns(qkv, start, stop):
    return [x[:, :, start:stop] for x in qkv]


def extend(*args, **kwargs):
    context, new_state = functional.extend(*args, **kwargs)
    return context, new_state()


def read_whole(method, q, k, v, **kwargs):
    return functional.extend(method, None, q, k, v, **kwargs)[0]


def read_request(q, *, scale, counts=None):
    """A request with a plan of its own. counts: real tokens at the end of each row, None: all."""
    L = q.shape[2]
    return ReadRequest(q, scale, ForwardPlan(L, counts), L if counts is None else int(counts.min()))


def read(layer, qkv, counts=None, *, scale=0.7, backend="auto", trailing=None):
    """Outputs ``[B, H, L, Dv]`` of new tokens; rows with fewer than L get garbage or 0 before their first."""
    q, k, v = qkv
    if q.shape[2] == 1 and layer.can_step(k, v):
        real = counts > 0 if counts is not None and layer.is_compileable else counts  # bool, or 0 and 1
        return layer.step(NewToken(q, k, v, real), scale=scale)
    request = read_request(q, scale=scale, counts=counts)
    request = request if trailing is None else request._replace(trailing=trailing)
    return layer.method.attend(q, layer.read(k, v, request), scale=scale, backend=backend)[0]
