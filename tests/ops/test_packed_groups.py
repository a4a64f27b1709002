"""Groups of Recall, index and store, as two backends have packed them, held to each other number by number; and tests
of this comparison, which lets differ what lies at a border, and nothing else.

Kernels rotate keys by sums in another order than PyTorch's. Each number is computed again in float64 from the keys, and
from the packed numbers that it depends on. A chain of n sums and products is off by at most n roundings of the sum of
absolute values. One of them is taken as eps: twice what float32 rounds by, because tensor cores may cut digits off.

Shapes: B rows, K KV heads, G groups of g tokens, D and Dv widths, P columns of a block of the rotation.
"""

import math
from typing import NamedTuple

import pytest
import torch
from oracles import oracle_recall
from torch import Tensor

from condense.ops.recall import GroupIndex, StoreFormat, split_keys
from condense.ops.recall.index import CENTRE_DROPPED, CENTRE_LEVELS, sign_bytes
from condense.ops.tensors.codes import from_bytes


class Packed(NamedTuple):
    """Groups as one backend packed them. store: ``[B, K, G * g, C]``."""

    index: GroupIndex
    store: Tensor

    @classmethod
    def of(cls, state, start, stop):
        index = state.group_index.narrow(start, stop)
        return cls(index, state.store[:, :, start * index.group_size : stop * index.group_size])

    @classmethod
    def of_parts(cls, parts):
        return cls(GroupIndex(parts["signs"], parts["steps"]), parts["store"])


def check_packed(got: Packed, want: Packed, k: Tensor, v: Tensor, bits: int) -> bool:
    """Both hold these keys ``[B, K, G * g, D]`` and values, but for borders. True if codes and signs are equal."""
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
    """Sizes of rotated keys ``[B, K, G, g, D]`` less this index's centre, how far float32 is off them, and its eps."""
    (*_, g, D), dtype, W, P = k.shape, k.dtype, sign_bytes(k.shape[4]), oracle_recall.block(k.shape[4])
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    matrix, wide = oracle_recall.rotation(D).to(k.device), k.double()
    rotated, sizes = wide @ matrix, wide.abs() @ matrix.abs()
    # P terms, then g of these, and the product with 1 / g, which is rounded too
    mean, of_mean = rotated.mean(3), (P + g + 2) * eps * sizes.mean(3)
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
    x, off = rotated - centre, (P + 1) * eps * (sizes + centre.abs())
    _check((index.token_signs(D, torch.float64) > 0) == (x >= 0), "sign", off >= x.abs())
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
    P, step = oracle_recall.block(size.shape[4]), parts["steps of keys"]
    size, off, unit = size / P, off / P, form.key_unit(step.dtype)
    lo, hi = (((size + sign * off).amax(4) * unit * (1 + sign * 2 * eps)).clamp(min=0) for sign in (-1, 1))
    _check_between(lo, step, hi, "step of a key's codes")
    apart = (2 * step.double()).clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    place = size / apart
    _check_codes(parts["codes of keys"].double(), place, off / apart + eps * place, 2**form.bits - 1, "code of a key")
    for name in ("behind the grid", "behind the codes"):
        _check(parts[name] == 0, name)


def _split(store: Tensor, form: StoreFormat, k: Tensor, Dv: int) -> dict[str, Tensor]:
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
    below = (1 << CENTRE_DROPPED) - 1
    return ((x.clamp(min=0).float().view(torch.int32) + below) & ~below).view(torch.float32)


def _check_codes(codes: Tensor, place: Tensor, off: Tensor, most: int, name: str) -> None:
    _check(((place - off).floor().clamp(0, most) <= codes) & (codes <= (place + off).floor().clamp(0, most)), name)


def _check_between(lo: Tensor, steps: Tensor, hi: Tensor, name: str) -> None:
    _check((lo.to(steps.dtype) <= steps) & (steps <= hi.to(steps.dtype)), name)


def _check(right: Tensor, name: str, near: Tensor | bool = False) -> None:
    wrong = ~(right | near)
    assert not wrong.any(), f"{name}: {int(wrong.sum())} of {math.prod(wrong.shape)} beyond any border"


GROUPS = 60
# dtype, bits of the store, tokens per group, widths
CASES = {
    "float32, 4 bits": (torch.float32, 4, 16, (128, 64)), "float32, 8 bits": (torch.float32, 8, 3, (24, 16)),
    "latents": (torch.bfloat16, 4, 6, (40, 0)), "float16": (torch.float16, 8, 16, (64, 64)),
    "16 bits": (torch.float32, 16, 4, (33, 24)), "groups of 1": (torch.bfloat16, 8, 1, (96, 80)),
    "float64": (torch.float64, 16, 4, (5, 4)), "float16, 12 columns": (torch.float16, 4, 4, (12, 6)),
}  # fmt: skip


def two_packings(dtype, bits, g, widths):
    generator, form = torch.Generator().manual_seed(g), StoreFormat(bits, g)
    k, v = (torch.randn(1, 2, GROUPS, g, n, generator=generator).to(dtype) for n in widths)
    packed = []
    for keys in (k, k.double()):
        index, rest = split_keys(keys)
        packed.append(Packed(GroupIndex(index.signs, index.steps.to(dtype)), form.pack(k, v, rest)))
    return *packed, k.flatten(2, 3), v.flatten(2, 3), bits


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_sums_in_another_order_pass(case):
    got, want, *tokens = two_packings(*case)
    # steps of 24 bits follow every sum; of 8 and 11 bits a border is rare
    assert case[0] != torch.float32 or not torch.equal(got.index.steps, want.index.steps)
    check_packed(got, want, *tokens)
    assert check_packed(got, got, *tokens)


def changed(part, place, change):
    """A fault in a number of the second group's signs or steps, or in a byte of its piece of the store."""

    def plant(packed, k):
        pieces = packed.store.view(torch.uint8)[0, 0].unflatten(0, (GROUPS, -1))
        numbers = pieces[1].view(-1) if part == "store" else getattr(packed.index, part)[0, 0, 1]
        numbers[place] = change(numbers[place])

    return plant


def flip_a_large_difference(packed, k):
    W, rest = sign_bytes(k.shape[3]), split_keys(k.unflatten(2, (GROUPS, -1)))[1]
    column = int(rest[0, 0, 1, 0].abs().argmax())
    packed.index.signs[0, 0, 1, column % W] ^= 1 << (column // W)


# the case, a part of the message, and the fault; byte 192 of the first case begins the codes of keys, 1216 of values
FAULTS = {
    "a code one apart": ("float32, 4 bits", "code of a key", changed("store", 192, lambda x: x & 240 | (x + 1) & 15)),
    "a step of codes": ("float32, 4 bits", "step of a key's codes", changed("store", 129, lambda x: x ^ 128)),
    "a code of a value": ("float32, 4 bits", "codes of values", changed("store", 1216, lambda x: x ^ 1)),
    "a zero of a value": ("float32, 4 bits", "grid of values", changed("store", 64, lambda x: x ^ 1)),
    "behind the grid": ("float32, 8 bits", "behind the grid", changed("store", 36, lambda x: 1)),
    "behind the codes": ("float32, 8 bits", "behind the codes", changed("store", 191, lambda x: 1)),
    "a number of 16 bits": ("16 bits", "store", changed("store", 8, lambda x: x ^ 1)),
    "a sign": ("float32, 4 bits", "sign", flip_a_large_difference),
    "a sign behind the last": ("16 bits", "signs behind", changed("signs", 4, lambda x: x ^ 128)),
    "a code of the centre": ("float32, 4 bits", "code of the centre", changed("signs", 256, lambda x: x ^ 1)),
    "a code behind the centre": ("16 bits", "centre behind", changed("signs", 39, lambda x: x ^ 128)),
    "the centre's step": ("latents", "step of the centre", changed("steps", 6, lambda x: x * 1.125)),
    "a step, two units": ("latents", "step of a key's signs", changed("steps", 0, lambda x: x * (1 + 2**-6))),
}


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(("case", "message", "plant"), FAULTS.values(), ids=FAULTS)
def test_faults_are_found(case, message, plant, side):
    *packed, k, v, bits = two_packings(*CASES[case])
    plant(packed[side], k)
    with pytest.raises(AssertionError, match=message):
        check_packed(*packed, k, v, bits)
