"""Entries in 8 and 4 bits: rounded once, when they are made, and the same to the bit wherever they are read.

What all methods promise (parity, causality, gradients, buffers) is tested where the other methods are, with cases of
`oracles.cases`.
"""

import itertools

import pytest
import torch
from layers import extend, read_request, read_whole
from oracles import oracle

import condense
from condense.caches import CondensedLayer, StaticCondensedLayer
from condense.ops import EntryFormat

POOLED = condense.CCA(group_size=4, window=6, summary="streaming", rep_bias="matched")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
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
    (q, k, v), method = inputs(torch.float64), POOLED.replace(entry_bits=4)
    layer = StaticCondensedLayer(method, 41) if fixed else CondensedLayer(method)
    want = method.attend(q, read_whole(method, q, k, v, scale=SCALE), scale=SCALE)[0]

    def read(*ends):
        for start, stop in itertools.pairwise(ends):
            part = [x[:, :, start:stop] for x in (q, k, v)]
            context = layer.read(*part[1:], read_request(part[0], scale=SCALE))
            got = method.attend(part[0], context, scale=SCALE)[0]
            torch.testing.assert_close(got, want[:, :, start:stop], rtol=0, atol=1e-12)

    if not fixed:
        read(0, 5, 12)
        layer.crop(-8)
        read(4, 6)
        layer.reset()
    read(0, 2, 5, 8, 12, 41)
