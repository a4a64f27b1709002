"""One cache layer: crop is exact at every boundary, rows follow every batch operation, nothing breaks in refusals."""

import copy

import pytest
import torch
from grids import fixture_of
from layers import CHANGES, columns, draw, read
from models import tiny
from torch.testing import assert_close

import condense
from condense.caches import CondensedLayer
from condense.state import SLACK

METHODS = tiny.METHODS | {
    "wide-groups": condense.CCA(group_size=7, window=5, summary="streaming", num_summary_queries=9),
    "entries-8": condense.CCA(group_size=4, window=6, summary="streaming", entry_bits=8),
}
SCALE = 0.7
# new tokens per row, slots at the end that are real in all rows, tokens that may be taken back
PADDED = {"left": ([2, 9], 2, 2), "left-all-real-before": ([9, 9], 9, 15), "right": ([6, 9], 0, 0)}
method = fixture_of(METHODS)


def _full(method, *parts):
    q, k, v = (torch.cat(xs, dim=2) for xs in zip(*parts, strict=True))
    return condense.attention(q, k, v, method=method, scale=SCALE)


def _filled(method, *parts):
    layer = CondensedLayer(method)
    for part in parts:
        read(layer, part)
    return layer


def test_crop_is_exact_for_every_count_at_every_boundary(method):
    other = draw(12, seed=9)
    for length in range(35, 35 + method.layout.rule.chunk):
        qkv = draw(length)
        filled = _filled(method, qkv)
        for count in range(1, SLACK + 1):
            layer, kept = copy.deepcopy(filled), columns(qkv, 0, length - count)
            layer.crop(-count)
            assert layer.get_seq_length() == length - count
            assert_close(read(layer, other), _full(method, kept, other)[:, :, -12:], rtol=0, atol=1e-12)


def test_another_number_of_rows_changes_nothing():
    model, ids = condense.apply(tiny.model("llama"), tiny.CCA), tiny.tokens(2, 30)
    cache = tiny.filled(model, ids[:, :20])
    for more in (1, 3):
        said = "wanted 2 rows, for which it was made, got 1; make a new cache"
        tiny.refused(said, model, ids[:1, 20 : 20 + more], past_key_values=cache)
    assert_close(tiny.in_chunks(model, ids[:, 20:], (10,), cache), tiny.logits(model, ids)[:, 20:], **tiny.EXACT)


def test_crops_in_a_row_share_the_tokens_that_are_kept_and_one_beyond_them_changes_nothing():
    qkv, other = draw(60), draw(12, seed=9)
    for method in (tiny.CCA, tiny.STREAMING_6, tiny.METHODS["streaming-llm"]):
        layer, kept = _filled(method, qkv), 60
        for count, beyond in ((0, 50), (12, 30), (SLACK - 12, method.layout.rule.chunk)):
            layer.crop(-count)
            past, kept = layer.state, kept - count
            tiny.refused("propose fewer tokens", layer.crop, -beyond)
            tiny.refused(f"more than the {kept} seen", layer.crop, -kept - 1)
            tiny.refused(r"tokens_to_remove must be <= 0, .*, got 3", layer.crop, 3)
            assert layer.state is past
            assert layer.get_seq_length() == kept
        assert_close(read(layer, other), _full(method, columns(qkv, 0, kept), other)[:, :, -12:], rtol=0, atol=1e-12)


def test_changes_of_an_empty_layer_and_crop_of_nothing():
    layer = CondensedLayer(tiny.CCA)
    layer.crop(-3)
    for change, _ in CHANGES.values():
        change(layer)
    assert layer.state is None
    read(layer, draw(20))
    past = layer.state
    layer.crop(0)
    assert layer.state is past
    layer.crop(-torch.tensor(3))  # as transformers 5.17 passes it
    assert repr(layer.get_seq_length()) == "17"


@pytest.mark.parametrize(("counts", "trailing", "allowed"), PADDED.values(), ids=PADDED.keys())
def test_crop_stops_at_padding(counts, trailing, allowed):
    layer = _filled(tiny.CCA, draw(6))
    read(layer, draw(9, seed=1), torch.tensor(counts), trailing=trailing)
    past = layer.state
    tiny.refused(r"include padding .* if the pad token was generated .* another pad_token_id", layer.crop, -allowed - 1)
    assert layer.state is past
    layer.crop(-allowed)
    assert layer.get_seq_length() == 15 - allowed


def test_padding_of_a_row_that_is_gone_still_ends_what_crop_takes_back():
    """Rows share one count of the slots that are real in all of them."""
    layer, qkv, other = CondensedLayer(tiny.CCA), draw(9), draw(30, seed=1, rows=1)
    read(layer, qkv, counts=torch.tensor([9, 2]), trailing=2)
    layer.batch_select_indices(torch.tensor([0]))
    tiny.refused("crop: the last 3 tokens include padding", layer.crop, -3)
    layer.crop(-2)
    assert layer.get_seq_length() == 7
    joined = [torch.cat([a[:1, :, :7], b], dim=2) for a, b in zip(qkv, other, strict=True)]
    want = condense.attention(*joined, method=tiny.CCA, scale=SCALE)[:, :, 7:]
    assert_close(read(layer, other), want, rtol=0, atol=1e-12)


def test_a_prompt_whose_end_made_its_entries_is_not_cropped():
    """With ``summary="prompt"`` the prompt's last queries are in every representative."""
    method, other = tiny.CCA.replace(summary="prompt"), draw(6, seed=2)
    layer, again = _filled(method, draw(30)), _filled(method, draw(30))
    tiny.refused("crop: ", layer.crop, -1)
    assert layer.get_seq_length() == 30
    read(layer, draw(5, seed=1))
    tiny.refused("crop: ", layer.crop, -6)
    layer.crop(-5)
    assert_close(read(layer, other), read(again, other), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("change", "rows"), CHANGES.values(), ids=CHANGES.keys())
def test_rows_follow(method, change, rows):
    qkv, counts, layer = draw(33, rows=3), (20, 33, 27), CondensedLayer(method)
    read(layer, qkv, torch.tensor(counts))
    past = [[x[row : row + 1, :, 33 - n :] for x in qkv] for row, n in enumerate(counts)]
    change(layer)
    new = draw(14, seed=8, rows=len(rows))  # past more group boundaries, in two steps
    out = torch.cat([read(layer, columns(new, 0, 7)), read(layer, columns(new, 7, 14))], dim=2)
    for i, row in enumerate(rows):
        mine = [x[i : i + 1] for x in new]
        assert_close(out[i : i + 1], _full(method, past[row], mine)[:, :, -14:], rtol=0, atol=1e-12)


def test_contract():
    layer = _filled(tiny.CCA, draw(40))
    flags = layer.is_compileable, layer.is_croppable, layer.is_sliding, layer.is_initialized
    assert flags == (False, True, False, True)
    assert (layer.get_seq_length(), layer.get_mask_sizes(5), layer.get_max_length()) == (40, (45, 0), -1)
