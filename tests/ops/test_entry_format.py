"""`EntryFormat` and `StoreFormat`: how far numbers may move, what a row holds, and that it needs one rounding."""

import itertools

import pytest
import torch
from layers import columns, extend, read, read_whole
from oracles import oracle

import condense
from condense.caches import CondensedLayer, StaticCondensedLayer
from condense.ops.entries import BLOCK_WIDTH, EntryFormat
from condense.ops.recall import StoreFormat, block_width, rotation, split_keys
from condense.ops.tensors.codes import quantise

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 2, 11, 32, 80, 192]


def vectors(*shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]), dtype=torch.float64)
    x[..., :1] *= 50  # one channel that is large in all vectors
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("D", WIDTHS)
def test_errors_are_at_most_half_a_step_and_a_rounding(bits, dtype, D):
    form, x = EntryFormat(bits), vectors(2, 3, 50, D, dtype=dtype)
    rows = form.pack(x)
    assert (rows.shape, rows.dtype) == ((2, 3, 50, form.width(D, dtype.itemsize)), torch.uint8)
    got = form.unpack(rows, D, dtype)
    assert got.dtype == dtype
    for mine, of in zip(*(y.double().split(BLOCK_WIDTH, dim=-1) for y in (got, x)), strict=True):
        # steps have 8 significant bits, positions are float32's of up to 255, halves are rounded at the number's dtype
        step = (of.amax(-1) - of.amin(-1)) / (2**bits - 1) * (1 + 2**-7) ** 2
        step = step.clamp(min=torch.finfo(dtype).tiny)
        allowed = step * (0.5 + 2**-15) + of.abs().amax(-1) * torch.finfo(dtype).eps
        assert bool(((mine - of).abs().amax(-1) <= allowed).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_a_step_times_a_code_is_exact(bits, dtype):
    """So a number is the same to the bit with and without a fused multiplication and addition."""
    form, D = EntryFormat(bits), 64
    start, wide = form.grid_start(D, dtype.itemsize), torch.promote_types(dtype, torch.float32)
    x = vectors(2, 3, 50, D, dtype=dtype)
    rows = form.pack(torch.cat([x, (x.double() / 1000).to(dtype)]))
    steps = rows[..., start : start + 4 * dtype.itemsize].contiguous().view(dtype)[..., ::2]
    for code in range(2**bits):
        assert torch.equal((steps.to(wide) * code).double(), steps.double() * code)
    assert torch.equal(steps, steps.to(torch.bfloat16).to(dtype))


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_channels_are_exact_zeros_give_zeros_and_none_give_none(bits, dtype):
    form = EntryFormat(bits)
    x = torch.tensor([-3.25, 0.1, 0.0, 1e-30], dtype=torch.float64).to(dtype)[:, None].expand(4, 34)
    assert torch.equal(form.unpack(form.pack(x), 34, dtype), x)
    for width in (34, 0):
        empty = torch.zeros(3, form.width(width, dtype.itemsize), dtype=form.dtype(dtype))
        assert torch.equal(form.unpack(empty, width, dtype), torch.zeros(3, width, dtype=dtype))
    assert form.pack(x[:, :0]).shape == (4, 0) == (4, form.width(0, dtype.itemsize))


@pytest.mark.parametrize("bits", [8, 4])
def test_finite_numbers_of_float16_stay_finite(bits):
    """Half a step above them may lie past the largest number, 65,504: in entries and in stored tokens."""
    x = torch.cat([torch.tensor([-65504.0]), torch.linspace(57000, 65504, 31)]).to(torch.float16)
    k, v = x[:, None].expand(1, 1, 1, 32, 2), x.expand(1, 1, 1, 32, 32)
    form, store = EntryFormat(bits), StoreFormat(bits, 32)
    index, rest = split_keys(k)
    of_keys, of_values = store.unpack(store.pack(k, v, rest), 2, 32, x.dtype, index)
    for got in (form.unpack(form.pack(x), 32, x.dtype), of_keys, of_values):
        assert bool(got.isfinite().all())
        assert got is of_keys or got.max() == 65504


def test_bytes_of_an_entry():
    """A step and a zero of 2 bytes for each 32 channels; rows begin at multiples of 8 bytes."""
    assert [EntryFormat(bits).width(128, 2) for bits in (16, 8, 4)] == [128, 128 + 16, 64 + 16]
    assert [EntryFormat(bits).width(64, 2) for bits in (16, 8, 4)] == [64, 64 + 8, 32 + 8]
    assert [EntryFormat(bits).width(80, 2) for bits in (8, 4)] == [96, 56]
    assert [EntryFormat(bits).width(576, 2) for bits in (8, 4)] == [576 + 72, 288 + 72]  # latents
    assert EntryFormat(4).grid_start(5, 4) == 8  # a step and a zero of 4 bytes each are loaded as one word


def check_keys(got, k, bits):
    D, dtype = k.shape[-1], k.dtype
    P, matrix, index = block_width(D), rotation(D, k.device, torch.float64), split_keys(k)[0]
    x, error = k.double() @ matrix / P, ((got.double() - k.double()) @ matrix / P).abs()
    rest = x - index.steps[..., -1:, None].double() * index.centres(D, torch.float64)[..., None, :]
    step = rest.abs().amax(-1, keepdim=True) / 2 ** (bits + 1) * (1 + torch.finfo(dtype).eps) ** 2
    # rotated numbers and keys are rounded to their dtype, sums of D numbers in float32
    size = (x.abs().amax(-1, keepdim=True) + k.double().abs().sum(-1, keepdim=True) / P) * (1 + 2**-bits)
    rounded = torch.finfo(dtype).eps + 2 * D * torch.finfo(torch.float32).eps
    assert bool((error <= step + rounded * size).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("widths", [(6, 4), (24, 0), (2, 8)], ids=str)
def test_errors_of_stored_tokens_are_at_most_a_step_and_a_rounding(bits, dtype, widths):
    form, (k, v) = StoreFormat(bits, 4), (vectors(2, 2, 3, 4, n, dtype=dtype) for n in widths)
    index, rest = split_keys(k)
    rows = form.pack(k, v, rest)
    assert (rows.shape, rows.dtype) == ((2, 2, 12, form.width(*widths, dtype.itemsize)), torch.uint8)
    got = form.unpack(rows, *widths, dtype, index)
    check_keys(got[0].unflatten(2, (3, 4)), k, bits)
    if widths[1] == 0:
        assert got[1].shape[3] == 0
        return
    error, eps = (got[1].unflatten(2, (3, 4)).double() - v.double()).abs(), torch.finfo(dtype).eps
    # of the range, rounded up twice to the dtype; positions are float32's, and off by 2 ** -24 of up to 2 ** 8
    steps = (v.amax(-1, keepdim=True) - v.amin(-1, keepdim=True)).double() / (2**bits - 1) * (1 + eps) ** 2
    assert bool((error <= steps * (0.5 + 2**-9) + v.double().abs() * eps).all())


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_equal_tokens_are_exact(bits):
    """Keys of fewer bits but for what their centre is off by."""
    k, v, form = torch.full((1, 1, 2, 4, 6), -3.25), torch.full((1, 1, 2, 4, 4), 0.1), StoreFormat(bits, 4)
    index, rest = split_keys(k)
    got = form.unpack(form.pack(k, v, rest), 6, 4, k.dtype, index)
    assert torch.equal(got[1], v.flatten(2, 3))
    if bits == 16:
        assert torch.equal(got[0], k.flatten(2, 3))
    else:
        check_keys(got[0].unflatten(2, (2, 4)), k, bits)


def test_bytes_of_a_token():
    """Llama's shape, groups of 16: codes, 4 bytes for the value and 2 for the key."""
    assert StoreFormat(16, 16).width(128, 128, 2) == 256
    assert StoreFormat(8, 16).width(128, 128, 2) == 256 + 4 + 2
    assert StoreFormat(4, 16).width(128, 128, 2) == 128 + 4 + 2
    # pieces of groups of any size begin at whole numbers, so that steps and zeros are read at their alignment
    for g, D, Dv, size in ((1, 16, 24, 4), (3, 10, 6, 4), (5, 2, 2, 8), (6, 128, 64, 2)):
        assert all(g * StoreFormat(bits, g).width(D, Dv, size) % size == 0 for bits in (8, 4))
    k, v = (torch.zeros(2, 2, 3, 4, n) for n in (5, 4))
    for call in (lambda: StoreFormat(4, 4).pack(k, v, split_keys(k)[1]), lambda: StoreFormat(4, 16).width(5, 4, 2)):
        with pytest.raises(ValueError, match="store_bits=4 needs keys and values of even widths, got 5 and 4: use"):
            call()


@pytest.mark.parametrize("offset", [0.001, 1.0, 50.0, 10000.0])
def test_float32_holds_bfloat16_numbers_of_four_bits_exactly(offset):
    """So one that is rounded once, to bfloat16, as in the step's kernel, has the bits of one in float32."""
    generator = torch.Generator().manual_seed(0)
    x, middle = (torch.randn(4, n, 64, generator=generator) for n in (16, 1))
    x = (x + offset * middle).bfloat16()
    codes, step, zero = (y.double() for y in quantise(x, 1, 4, torch.bfloat16))
    assert torch.equal((zero.float() + step.float() * codes.float()).double(), zero + step * codes)
    index = split_keys(x[None, None])[0]
    centre = index.steps[..., -1:].float() * index.centres(64, torch.float32)
    assert torch.equal(centre, centre.bfloat16().float())


POOLED = condense.CCA(group_size=4, window=6, summary="streaming", rep_bias="matched")
SCALE = 0.3


def inputs(dtype):
    """Keys have three blocks of channels, the last of them short, values an odd width."""
    return oracle.random_qkv(2, 4, 2, 41, 80, 11, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_read_is_what_is_kept_to_the_bit(bits, dtype):
    q, k, v = inputs(dtype)
    form, method = EntryFormat(bits), POOLED.replace(entry_bits=bits)
    exact = read_whole(method.replace(entry_bits=16), k=k, v=v, q=q, scale=SCALE).sources[0]
    whole = read_whole(method, k=k, v=v, q=q, scale=SCALE).sources[0]
    context, state = extend(method, None, k=k, v=v, q=q, scale=SCALE)
    for i, width in enumerate((80, 11)):
        rows = form.pack(exact[i])
        assert torch.equal(state.entries[i], rows)
        assert torch.equal(whole[i], form.unpack(rows, width, dtype))
        assert torch.equal(context.sources[0][i], whole[i])
        assert not torch.equal(whole[i], exact[i])
    # biases are those of the pooled keys
    assert torch.equal(whole.bias, exact.bias)


@pytest.mark.parametrize("fixed", [False, True], ids=["grow", "fix"])
def test_pieces_before_the_first_entry_read_none(fixed):
    """Buffers without entries hold rows of bytes already, and so does a growing layer that took all of them back."""
    qkv, method = inputs(torch.float64), POOLED.replace(entry_bits=4)
    layer = StaticCondensedLayer(method, 41) if fixed else CondensedLayer(method)
    want = condense.attention(*qkv, method=method, scale=SCALE)

    def check(*ends):
        for start, stop in itertools.pairwise(ends):
            got = read(layer, columns(qkv, start, stop), scale=SCALE)
            torch.testing.assert_close(got, want[:, :, start:stop], rtol=0, atol=1e-12)

    if not fixed:
        check(0, 5, 12)
        layer.crop(-8)
        check(4, 6)
        layer.reset()
    check(0, 2, 5, 8, 12, 41)
