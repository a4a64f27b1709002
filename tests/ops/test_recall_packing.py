"""`StoreFormat`: how far numbers may move, what a row holds, and that a group depends on itself alone."""

import pytest
import torch

from condense.ops.recall import StoreFormat

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def tokens(D, Dv, dtype, g=4, G=3):
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 2, G, g, n, generator=generator, dtype=torch.float64) for n in (D, Dv))
    k[..., :1] *= 50  # one channel that is large in all tokens
    return k.to(dtype), v.to(dtype)


def steps(x, dim, bits, dtype):
    """Steps of channels or tokens: of the range, rounded up twice to the dtype."""
    spread = (x.amax(dim, keepdim=True) - x.amin(dim, keepdim=True)).double()
    return spread / (2**bits - 1) * (1 + torch.finfo(dtype).eps) ** 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("widths", [(6, 4), (10, 0), (2, 8)], ids=str)
def test_errors_are_at_most_half_a_step_and_a_rounding(bits, dtype, widths):
    form, (k, v) = StoreFormat(bits, 4), tokens(*widths, dtype)
    rows = form.pack(k, v)
    assert rows.shape == (2, 2, 12, form.width(*widths, dtype.itemsize))
    assert rows.dtype == torch.uint8
    got = form.unpack(rows, *widths, dtype)
    for x, y, dim in ((k, got[0], 3), (v, got[1], 4)):
        if x.shape[4] == 0:
            continue
        error = (y.unflatten(2, (3, 4)).double() - x.double()).abs()
        # a position is computed in float32, and off by some 2 ** -24 of up to 255
        allowed = (
            steps(x, dim, bits, dtype) * (0.5 + 2**-15) + x.double().abs().amax(dim, True) * torch.finfo(dtype).eps
        )
        assert bool((error <= allowed).all())


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_group_depends_on_itself_alone(bits):
    form, (k, v) = StoreFormat(bits, 4), tokens(6, 4, torch.bfloat16)
    whole = form.pack(k, v)
    for j in range(3):
        alone = form.pack(k[:, :, j : j + 1], v[:, :, j : j + 1])
        assert torch.equal(whole[:, :, 4 * j : 4 * j + 4], alone)
        for x, y in zip(form.unpack(alone, 6, 4, k.dtype), form.unpack(whole, 6, 4, k.dtype), strict=True):
            assert torch.equal(x, y[:, :, 4 * j : 4 * j + 4])


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_equal_tokens_are_exact(bits):
    k, v = torch.full((1, 1, 2, 4, 6), -3.25), torch.full((1, 1, 2, 4, 4), 0.1)
    got = StoreFormat(bits, 4).unpack(StoreFormat(bits, 4).pack(k, v), 6, 4, k.dtype)
    assert all(torch.equal(x, y.flatten(2, 3)) for x, y in zip(got, (k, v), strict=True))


@pytest.mark.parametrize("bits", [8, 4])
def test_finite_numbers_of_float16_stay_finite(bits):
    """Half a step above them may lie past the largest number, 65,504."""
    x = torch.cat([torch.tensor([-65504.0]), torch.linspace(57000, 65504, 31)]).to(torch.float16)
    k, v = x[:, None].expand(1, 1, 1, 32, 2), x.expand(1, 1, 1, 32, 32)
    got = StoreFormat(bits, 32).unpack(StoreFormat(bits, 32).pack(k, v), 2, 32, x.dtype)
    assert all(y.isfinite().all() and y.max() == 65504 for y in got)


def test_bytes_of_a_token():
    """Llama's shape, groups of 16: codes, 4 bytes for the value, 32 of the group's 2 * 128 numbers for the keys."""
    assert StoreFormat(16, 16).width(128, 128, 2) == 256
    assert StoreFormat(8, 16).width(128, 128, 2) == 256 + 4 + 32
    assert StoreFormat(4, 16).width(128, 128, 2) == 128 + 4 + 32
    with pytest.raises(ValueError, match="store_bits=4 needs keys and values of even widths, got 5 and 4: use"):
        StoreFormat(4, 16).width(5, 4, 2)
