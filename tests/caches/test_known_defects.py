"""What the layers of a cache got wrong once: crops into a prompt, refusals that left traces, rows that are gone."""

import pytest
import torch
from models import tiny
from torch.testing import assert_close
from two_sources import attend_to

import condense
from condense.caches import CondensedLayer, StaticCondensedLayer, read_request
from condense.functional import extend

SCALE, H, K, D = 0.7, 4, 2, 6
PROMPT = tiny.CCA.replace(summary="prompt")


def _qkv(L, B=2, seed=0, heads=H, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, n, L, D, generator=generator, dtype=torch.float64).to(dtype) for n in (heads, K, K)]


def _read(layer, qkv, counts=None, **kwargs):
    q, k, v = qkv
    request = read_request(q, scale=SCALE, counts=counts)._replace(**kwargs)
    return attend_to(layer.read(k, v, request), q, scale=SCALE)[0]


def test_a_prompt_whose_end_made_its_entries_is_not_cropped():
    """Defect 2: with ``summary="prompt"`` the prompt's last queries are in every representative."""
    layer = CondensedLayer(PROMPT)
    _read(layer, _qkv(30))
    with pytest.raises(ValueError, match="crop: "):
        layer.crop(-1)
    assert layer.get_seq_length() == 30
    more, other = _qkv(5, seed=1), _qkv(6, seed=2)
    _read(layer, more)
    with pytest.raises(ValueError, match="crop: "):
        layer.crop(-6)
    layer.crop(-5)
    again = CondensedLayer(PROMPT)
    _read(again, _qkv(30))
    assert_close(_read(layer, other), _read(again, other), rtol=0, atol=1e-12)


def test_a_first_call_that_is_refused_leaves_rows_and_dtype_open():
    """Defect 12: a static layer takes its memory for the first call that it accepts."""
    layer = StaticCondensedLayer(PROMPT, 64)
    q, k, v = _qkv(20, B=3, dtype=torch.float32)
    with pytest.raises(ValueError, match="allow_future"):
        _read(layer, (q.requires_grad_(), k, v))
    out = _read(layer, _qkv(20, B=2))
    assert_close(out, _read(CondensedLayer(PROMPT), _qkv(20, B=2)), rtol=0, atol=1e-12)


def test_padding_of_a_row_that_is_gone_still_ends_what_crop_takes_back():
    """Defect 18, as `CondensedLayer.crop` says: rows share one count of the slots that are real in all of them."""
    layer, qkv, other = CondensedLayer(tiny.CCA), _qkv(9), _qkv(30, B=1, seed=1)
    _read(layer, qkv, counts=torch.tensor([9, 2]), trailing=2)
    layer.batch_select_indices(torch.tensor([0]))
    with pytest.raises(ValueError, match="crop: the last 3 tokens include padding"):
        layer.crop(-3)
    layer.crop(-2)
    assert layer.get_seq_length() == 7
    joined = [torch.cat([a[:1, :, :7], b], dim=2) for a, b in zip(qkv, other, strict=True)]
    want = condense.attention(*joined, method=tiny.CCA, scale=SCALE)[:, :, 7:]
    assert_close(_read(layer, other), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("R", [1, 2, 3, 7])
def test_entries_are_the_same_to_the_bit_chunked_or_not(R):
    """Defect 16: float32 with 7 heads per KV head differed in the last bit."""
    method = tiny.STREAMING_6
    for seed in range(10):
        q, k, v = _qkv(60, B=1, seed=seed, heads=K * R, dtype=torch.float32)
        _, whole = extend(method, None, q, k, v, scale=SCALE)
        past = None
        for part in range(0, 60, 7):
            _, past = extend(method, past, *(x[:, :, part : part + 7] for x in (q, k, v)), scale=SCALE)
        assert all(torch.equal(x, y) for x, y in zip(past.entries, whole.entries, strict=True))
