"""The comparison of packed groups that tests of kernels use: it lets differ what lies at a border, and nothing else."""

import pytest
import torch
from packed_groups import Packed, check_packed

from condense.ops.recall import GroupIndex, StoreFormat, split_keys
from condense.ops.recall.index import sign_bytes

GROUPS = 60
# dtype, bits of the store, tokens per group, widths
CASES = {
    "float32, 4 bits": (torch.float32, 4, 16, (128, 64)), "float32, 8 bits": (torch.float32, 8, 3, (24, 16)),
    "latents": (torch.bfloat16, 4, 6, (40, 0)), "float16": (torch.float16, 8, 16, (64, 64)),
    "16 bits": (torch.float32, 16, 4, (33, 24)), "groups of 1": (torch.bfloat16, 8, 1, (96, 80)),
}  # fmt: skip


def two_packings(dtype, bits, g, widths, num_groups=GROUPS):
    """Two `Packed`, of sums of float32 and of float64, and what `check_packed` takes beside them."""
    generator, form = torch.Generator().manual_seed(g), StoreFormat(bits, g)
    k, v = (torch.randn(1, 2, num_groups, g, n, generator=generator).to(dtype) for n in widths)
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


def test_codes_at_a_border_pass():
    """Some codes of 8 bits do lie there: the sums of 128 numbers of float32 put them on its other side."""
    got, want, *tokens = two_packings(torch.float32, 8, 16, (128, 64), num_groups=120)
    codes = [packed.store.unflatten(2, (-1, 16)).flatten(3)[..., 192 : 192 + 16 * 128] for packed in (got, want)]
    assert 0 < int((codes[0] != codes[1]).sum()) < codes[0].numel() / 10_000
    assert not check_packed(got, want, *tokens)
    assert check_packed(got, got, *tokens)


def changed(part, place, change):
    """A fault in a number of the second group's signs or steps, or in a byte of its piece of the store."""

    def plant(packed, k):
        pieces = packed.store.view(torch.uint8)[0, 0].unflatten(0, (GROUPS, -1))
        numbers = pieces[1].view(-1) if part == "store" else getattr(packed.index, part)[0, 0, 1]
        numbers[place] = change(numbers[place])

    return plant


def flip_a_large_difference(packed, k):
    """The sign of a key's number that differs the most from the centre."""
    W, rest = sign_bytes(k.shape[3]), split_keys(k.unflatten(2, (GROUPS, -1)))[1]
    column = int(rest[0, 0, 1, 0].abs().argmax())
    packed.index.signs[0, 0, 1, column % W] ^= 1 << (column // W)


# the case, a part of the message, and the fault; byte 192 of the first case begins the codes of keys, 1216 of values
FAULTS = {
    "a code two apart": ("float32, 4 bits", "code of a key", changed("store", 192, lambda x: x & 240 | (x + 2) & 15)),
    "a code one apart": ("float32, 4 bits", "code of a key", changed("store", 192, lambda x: x & 240 | (x + 1) & 15)),
    "a code of 8 bits": ("float32, 8 bits", "code of a key", changed("store", 48, lambda x: x + 1)),
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
    "a step of float32": ("float32, 4 bits", "step of a key's signs", changed("steps", 0, lambda x: x * 1.001)),
}


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(("case", "message", "plant"), FAULTS.values(), ids=FAULTS)
def test_faults_are_found(case, message, plant, side):
    *packed, k, v, bits = two_packings(*CASES[case])
    plant(packed[side], k)
    with pytest.raises(AssertionError, match=message):
        check_packed(*packed, k, v, bits)
