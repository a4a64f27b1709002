"""Tokens for cache layers and for `extend`, and outputs of reading them in whichever way a layer has.

Shapes: B rows, H query heads, K KV heads, L tokens, D and Dv widths.
"""

import torch
from oracles import oracle
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from condense import functional
from condense.caches import ReadRequest
from condense.ops import NewToken
from condense.plan import ForwardPlan


class Counting(TorchDispatchMode):
    """Names of the operations that are called, and the most numbers of a tensor that one makes."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        out = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
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


def tensors_of(state):
    return *state.entries, state.window_k, state.window_v, state.mean_q, state.sums


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
