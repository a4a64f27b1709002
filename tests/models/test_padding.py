"""Padding anywhere, and packing: the numbers are those of the same tokens alone."""

import gc
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from models import tiny

import condense
from condense.models import attention, forward
from condense.models.forward import AttentionCall, ForwardBoard
from condense.models.masks import condense_mask

L = tiny.LENGTH
# calls of a layer, and readings of where documents end for all layers
CALLS = {"cca": (condense.CCA(group_size=4, window=6), 1, 1)}
CALLS["recall"] = condense.Recall(group_size=4, window=6, num_recall=2), 4, 0
ROWS = tiny.tokens(1, 40)
RESTARTING = torch.cat([torch.arange(25), torch.arange(15)])[None]
JUMPING = RESTARTING + 30 * (torch.arange(40) >= 25)
# two documents, the first of 30 tokens
TWO = torch.cat([torch.arange(30), torch.arange(L - 30)])[None]
LONG = condense.CCA(window=1000)  # longer than the text: nothing is condensed
LENGTHS = (23, 1, 30, 7)
WRITES = {"pytorch": lambda x, new: x.copy_(new), "data": lambda x, new: x.data.copy_(new)}
WRITES["numpy"] = lambda x, new: np.copyto(x.numpy(), new.numpy())


# tensors made in inference mode do not tell that they were written to
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("layers", [None, [1]], ids=["all-layers", "one-layer"])
def test_a_mask_may_be_changed_in_place_between_calls(layers, mode):
    model = condense.apply(tiny.model("llama"), tiny.CCA, layers=layers)
    with mode():
        ids, mask = tiny.tokens(2), torch.ones(2, 1, 1, L, dtype=torch.bool)
        whole = model(ids, attention_mask=mask, use_cache=False).logits
        mask[0, ..., :20] = False
        padded = model(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(padded[1], whole[1], **tiny.EXACT)
    assert (padded[0, 40:] - whole[0, 40:]).abs().max() > 1


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", ["positions", "marks"])
def test_documents_may_be_marked_in_place_between_calls(how, mode, write):
    model = condense.apply(tiny.model("llama"), tiny.CCA)
    ids = tiny.tokens(1)
    with mode():
        if how == "positions":
            marks, changed = torch.arange(L)[None].clone(), TWO
            kwargs = {"position_ids": marks}
        else:
            marks, changed = torch.tensor([0, 10, L]), torch.tensor([0, 30, L])
            kwargs = {"cu_seq_lens_q": marks, "position_ids": TWO}
        model(ids, use_cache=False, **kwargs)
        write(marks, changed)
        packed = model(ids, use_cache=False, **kwargs).logits
        alone = model(ids[:, 30:], use_cache=False).logits
    torch.testing.assert_close(packed[:, 30:], alone, **tiny.EXACT)


def test_documents_may_be_marked_in_place_between_steps_of_training():
    """Checkpointing runs only those layers again that gradients go through; the next forward is not theirs."""
    model = condense.apply(tiny.model("llama"), tiny.CCA).train()
    tiny.enable_checkpointing(model, reentrant=False)
    ids, positions = tiny.tokens(1), torch.arange(L)[None].clone()
    loss = model(ids, position_ids=positions, use_cache=False).logits.sum()
    torch.autograd.grad(loss, model.model.layers[-1].self_attn.q_proj.weight)
    positions.copy_(TWO)
    packed = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed[:, 30:], model(ids[:, 30:], use_cache=False).logits, **tiny.EXACT)


def test_a_layer_without_marks_is_not_in_a_forward_whose_marks_are_gone():
    board, layer = ForwardBoard(None, {}), torch.nn.Identity()
    q = torch.zeros(1, 1, 40, 4)

    def documents(layer_idx, options):
        call = AttentionCall(layer, q, q, q, None, 1.0, 0.0, options, layer_idx=layer_idx)
        return board.forward_of(call).documents(plain=True)

    assert documents(1, {"cu_seq_lens_q": torch.tensor([0, 30, 40])}) == [30, 10]
    assert documents(0, {}) is None


@pytest.mark.parametrize("layers", [None, [1]], ids=["all-layers", "one-layer"])
def test_a_mask_is_looked_at_once_per_forward(monkeypatch, layers):
    """In inference mode too: on a GPU every look is a wait."""
    looks = Mock(wraps=forward.find_padding)
    monkeypatch.setattr(forward, "find_padding", looks)
    model = condense.apply(tiny.model("llama"), tiny.CCA, layers=layers)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            ids, mask = tiny.left_padded([tiny.tokens(1, 20)[0], tiny.tokens(1, 40)[0]])
            for _ in range(3):
                model(ids, attention_mask=mask, use_cache=False)
                assert looks.call_count <= 1
                looks.reset_mock()


def test_a_token_of_a_growing_cache_gets_no_mask_without_padding():
    """One look per forward; what a layer needs the mask for, it still gets, and refuses one that is too short."""
    ones = torch.ones(2, 9, dtype=torch.long)
    assert [condense_mask(2, 1, 8, 7, attention_mask=mask) for mask in (ones, ones[:, :8])] == [None, None]
    for count, offset in ((1, torch.tensor(7)), (2, 6)):  # a static cache, two tokens
        assert condense_mask(2, count, 8, offset, attention_mask=ones[:, :8]).shape == (2, 1, 1, 8)
    for mask in (ones[:, :8] * torch.tensor([[1], [0]]), ones[:, :7], ones[:1, :8]):
        assert condense_mask(2, 1, 8, 7, attention_mask=mask).shape == (len(mask), 1, 1, mask.shape[1])


def test_nothing_is_remembered_of_masks_that_are_gone():
    model = condense.apply(tiny.model("llama"), tiny.CCA)
    board = model.model.layers[0].self_attn.condense_board
    ids, mask = tiny.left_padded([tiny.tokens(1, 20)[0], tiny.tokens(1, 40)[0]])
    tiny.generate(model, ids, attention_mask=mask)
    tiny.in_chunks(model, ids, (30, 10), mask=mask)
    tiny.logits(model, tiny.tokens(1), position_ids=torch.arange(L)[None])
    gc.collect()
    assert 0 < len(board._forwards) <= 4
    assert all(known.get() is None for one in board._forwards for known in one._shared)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("how", ["positions", "marks"])
@pytest.mark.parametrize(("method", "calls", "readings"), CALLS.values(), ids=CALLS)
def test_calls_per_layer_and_one_reading_of_documents_for_all(name, how, method, calls, readings, monkeypatch):
    model = condense.apply(tiny.model(name), method)
    attend = {"llama": "_condensed", "deepseek_v3": "condensed_latents"}[name]
    attended, read = Mock(wraps=getattr(attention, attend)), Mock(wraps=condense.plan._read_documents)
    monkeypatch.setattr(attention, attend, attended)
    monkeypatch.setattr(condense.plan, "_read_documents", read)
    tiny.logits(model, tiny.tokens(1)[:, : sum(LENGTHS)], **tiny.packed(LENGTHS, how))
    assert (attended.call_count, read.call_count) == (calls * tiny.NUM_LAYERS, readings)


@pytest.mark.parametrize("layers", [None, [1]], ids=["all-layers", "one-layer"])
@pytest.mark.parametrize("places", [RESTARTING, JUMPING], ids=["restarting", "jumping"])
def test_positions_mark_documents_where_they_do_in_transformers(places, layers):
    """They do where there is neither an attention mask nor a cache. Elsewhere windows and groups count tokens."""
    model, calls = tiny.model("llama"), ({"attention_mask": torch.ones_like(ROWS)}, {"use_cache": True}, {})
    want = [tiny.logits(model, ROWS, position_ids=places, **kwargs) for kwargs in calls]
    assert (want[2] - want[1]).abs().max() > 1
    condense.apply(model, LONG, layers=layers)
    got = [tiny.logits(model, ROWS, position_ids=places, **kwargs) for kwargs in calls]
    torch.testing.assert_close(got, want, **tiny.EXACT)
