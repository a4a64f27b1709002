"""Groups of Recall, index and store, as two backends have packed them, held to each other number by number.

Kernels turn keys by sums in another order than PyTorch's. A stored number may differ only where its value before it is
rounded lies so near a border that a sum of float32 may fall on either side of it. So each number is computed again in
float64 from the keys, and from the packed numbers that it depends on: a code of the centre from the centre's step,
signs and steps of keys from the centre, codes from the steps. A chain of n sums and products is off by at most n
roundings of the sum of absolute values. One of them is taken as eps: twice what float32 rounds by, because matrix units
may cut digits off where they add.

Shapes: B rows, K KV heads, G groups of g tokens, D and Dv widths, P columns of a block of the rotation.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from condense.ops.recall import GroupIndex, StoreFormat, block_width, rotation
from condense.ops.recall.index import CENTRE_DROPPED, CENTRE_LEVELS, sign_bytes
from condense.ops.tensors.codes import from_bytes


class Packed(NamedTuple):
    """Groups as one backend packed them. store: ``[B, K, G * g, C]``."""

    index: GroupIndex
    store: Tensor

    @classmethod
    def of(cls, state, start, stop):
        """Groups ``[start, stop)`` of the buffers of a step, as views."""
        index = state.group_index.narrow(start, stop)
        return cls(index, state.store[:, :, start * index.group_size : stop * index.group_size])

    @classmethod
    def of_parts(cls, parts):
        """All groups of the parts of records, by name."""
        return cls(GroupIndex(parts["signs"], parts["steps"]), parts["store"])


def check_packed(got: Packed, want: Packed, k: Tensor, v: Tensor, bits: int) -> bool:
    """Both hold the groups of keys ``[B, K, G * g, D]`` and values ``[B, K, G * g, Dv]``, but for sums near borders.

    Equal to the bit: a store of 16 bits; of fewer, what it holds of values, in which nothing is added up. Returns
    whether all codes and signs are equal too.
    """
    form, Dv = StoreFormat(bits, got.index.group_size), v.shape[3]
    k = k.unflatten(2, (-1, form.group_size))
    for packed in (got, want):
        rest = _check_index(packed.index, k)
        if bits < 16:
            _check_keys(_split(packed.store, form, k, Dv), form, *rest)
        else:
            assert torch.equal(packed.store, torch.cat([k.flatten(2, 3), v], dim=3)), "store"
    alike = torch.equal(got.index.signs, want.index.signs)
    if bits == 16:
        return alike
    mine, theirs = (_split(packed.store, form, k, Dv) for packed in (got, want))
    for name in ("grid of values", "codes of values"):
        assert torch.equal(mine[name], theirs[name]), name
    return alike and torch.equal(mine["codes of keys"], theirs["codes of keys"])


def _check_index(index: GroupIndex, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sizes of what turned keys ``[B, K, G, g, D]`` differ by from this index's centre, how far float32 is off them at
    most, and its eps.
    """
    (*_, g, D), dtype, W, P = k.shape, k.dtype, sign_bytes(k.shape[4]), block_width(k.shape[4])
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    turn, wide = rotation(D, k.device, torch.float64), k.double()
    turned, sizes = wide @ turn, wide.abs() @ turn.abs()
    # P terms, then g of these, and the product with 1 / g, which is rounded too
    mean, of_mean = turned.mean(3), (P + g + 2) * eps * sizes.mean(3)
    step = index.steps[..., -1:].double()
    # a constant that is rounded, and its product
    lo, hi = (
        _up_to_4_bits((mean.abs() + sign * of_mean).amax(3, keepdim=True) / (CENTRE_LEVELS * P) * (1 + sign * 2 * eps))
        for sign in (-1, 1)
    )
    _check((step == lo.to(dtype).double()) | (step == hi.to(dtype).double()), "step of the centre")
    numbers, unit = index.centres(D, torch.float64), step * P
    apart = (2 * unit).clamp(min=torch.finfo(torch.float32).tiny)
    place = mean / apart + (CENTRE_LEVELS + 1) / 2
    # the division and the sum round numbers below the place, or the half of the levels, each
    off = of_mean / apart + eps * (place.abs() + CENTRE_LEVELS)
    _check_codes((numbers + CENTRE_LEVELS) / 2, place, off, CENTRE_LEVELS, "code of the centre")
    # a number of a centre has 8 bits, so that one difference is all that is rounded
    centre = (unit * numbers)[:, :, :, None]
    x, off = turned - centre, (P + 1) * eps * (sizes + centre.abs())
    _check((index.turned(D, torch.float64) > 0) == (x >= 0), "sign", off >= x.abs())
    least, most = (x.abs() - off).clamp(min=0), x.abs() + off
    # D terms that are squares; all are positive, so that sums are off by their share
    room = 1 + torch.tensor([-1, 1], dtype=torch.float64, device=k.device) * 2 * (D + 2) * eps
    tiny = torch.finfo(torch.float32).tiny
    lo = least.square().sum(4) / most.sum(4).clamp(min=tiny) / P * room[0]
    hi = most.square().sum(4) / least.sum(4).clamp(min=tiny) / P * room[1]
    _check_between(lo, index.steps[..., :-1], hi, "step of a key's signs")
    bits = index.signs[..., : g * W].unflatten(3, (g, 1, W)) >> torch.arange(8, device=k.device)[:, None] & 1
    _check(bits.flatten(4)[..., D:] == 0, "signs behind the last column")
    _check(from_bytes(index.signs[..., g * W :], 4)[..., D:] == 0, "codes of the centre behind the last column")
    return x.abs(), off, eps


def _check_keys(parts: dict[str, Tensor], form: StoreFormat, size: Tensor, off: Tensor, eps: float) -> None:
    """Steps and codes of keys that differ from their centre by ``size``, and zeros between and behind all numbers."""
    P, step = block_width(size.shape[4]), parts["steps of keys"]
    size, off, unit = size / P, off / P, form.key_unit(step.dtype)
    # a constant that is rounded, and its product
    lo, hi = (((size + sign * off).amax(4) * unit * (1 + sign * 2 * eps)).clamp(min=0) for sign in (-1, 1))
    _check_between(lo, step, hi, "step of a key's codes")
    apart = (2 * step.double()).clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    place = size / apart
    _check_codes(parts["codes of keys"].double(), place, off / apart + eps * place, 2**form.bits - 1, "code of a key")
    for name in ("behind the grid", "behind the codes"):
        _check(parts[name] == 0, name)


def _split(store: Tensor, form: StoreFormat, k: Tensor, Dv: int) -> dict[str, Tensor]:
    """What pieces of bytes hold, by name: ``[B, K, G, ...]``."""
    g, D, size = form.group_size, k.shape[4], k.itemsize
    (keys, values), grid = form.codes_at(D, Dv, size), form.key_steps_at(Dv, size)
    pieces = store.unflatten(2, (-1, g)).flatten(3)
    ends = [0, grid, grid + g * size, keys, values, values + g * Dv * form.bits // 8, pieces.shape[3]]
    names = "grid of values", "steps of keys", "behind the grid", "codes of keys", "codes of values", "behind the codes"
    parts = {name: pieces[..., start:stop] for name, start, stop in zip(names, ends[:-1], ends[1:], strict=True)}
    parts["steps of keys"] = parts["steps of keys"].contiguous().view(k.dtype)
    parts["codes of keys"] = from_bytes(parts["codes of keys"].unflatten(3, (g, -1)), form.bits)
    return parts


def _up_to_4_bits(x: Tensor) -> Tensor:
    """Numbers rounded up to 4 significant bits."""
    below = (1 << CENTRE_DROPPED) - 1
    return ((x.clamp(min=0).float().view(torch.int32) + below) & ~below).view(torch.float32)


def _check_codes(codes: Tensor, place: Tensor, off: Tensor, most: int, name: str) -> None:
    _check(((place - off).floor().clamp(0, most) <= codes) & (codes <= (place + off).floor().clamp(0, most)), name)


def _check_between(lo: Tensor, steps: Tensor, hi: Tensor, name: str) -> None:
    """Steps between two numbers that are rounded to their dtype."""
    _check((lo.to(steps.dtype) <= steps) & (steps <= hi.to(steps.dtype)), name)


def _check(right: Tensor, name: str, near: Tensor | bool = False) -> None:
    wrong = ~(right | near)
    assert not wrong.any(), f"{name}: {int(wrong.sum())} of {math.prod(wrong.shape)} beyond any border"
