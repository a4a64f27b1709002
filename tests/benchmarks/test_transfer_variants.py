"""Variants of Recall in the study of what transfers: where the library has them they are its own."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from condense import Recall, use
from condense.ops.recall import ArrayChoice, IndexChoice, Quota, build_index

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "transfer"))

import contenders
import makes
import variants
from variants import Grid, Variant

SMALL = {"num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 64}
GROUP, WINDOW, LENGTH = 8, 16, 100
SHORT = {"group": GROUP, "window": WINDOW}


def drawn(heads: int = 4, length: int = LENGTH, width: int = 16):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(1, n, length, width, generator=generator) for n in (heads, 2, 2))


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_variant_without_changes_is_the_librarys_recall(share, bits):
    model = makes.new_model("llama-77m", 0, **SMALL).double().eval()
    ids = torch.from_numpy(np.random.default_rng(0).integers(4096, size=(1, 200)))
    method = Recall(group_size=GROUP, window=WINDOW, num_recall=share, unchosen="drop", store_bits=bits)
    with torch.no_grad():
        with use(model, method):
            wanted = model(input_ids=ids, use_cache=False).logits
        grid = None if bits == 16 else Grid(turned=False)
        with makes.replaced(Variant(share, grid=grid, **SHORT)):
            got = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(got, wanted)


def test_all_groups_open_in_many_bits_are_dense_attention():
    q, k, v = drawn()
    dense = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for turned in (True, False):
        error = []
        for bits in (8, 4, 3):
            grid = Grid(bits, bits, turned=turned, values_turned=turned)
            error.append(float((Variant(1.0, grid=grid, **SHORT)(None, q, k, v, None) - dense).abs().max()))
        assert error[0] < 0.05
        assert error[0] < error[1] < error[2]
    assert torch.allclose(Variant(1.0, **SHORT)(None, q, k, v, None), dense, atol=1e-5)
    short = [x[:, :, :WINDOW] for x in (q, k, v)]  # nothing is closed
    assert torch.equal(Variant(**SHORT)(None, *short, None), dense[:, :, :WINDOW])


def test_turning_spreads_a_channel_that_is_large():
    x = torch.randn(1, 2, 3, 8, 128, generator=torch.Generator().manual_seed(0))
    x[..., 3] += 40  # 3.5 or -3.5 in each number of a turned key
    k, v = Grid().rounded(x, x)
    assert float((k - x).norm()) < 0.4 * float((v - x).norm())
    assert torch.equal(v, Grid(turned=False).rounded(x, x)[1])


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("every", [2, 8])
def test_a_block_uses_one_choice_and_what_closes_within_it_stays_readable(every, before):
    q, k, v = drawn()
    variant, own = Variant(every=every, before=before, **SHORT), Variant(**SHORT)
    G = (LENGTH - WINDOW) // GROUP
    # what every query alone would choose, of the groups closed for it, and what each sees of all tokens
    alone, mask = own.opened(q, k, 0.25)[0], torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool)
    closed = [max(0, t + 1 - WINDOW) // GROUP for t in range(LENGTH)]
    for t in range(LENGTH):
        chooser = t // every * every - before
        unopened = torch.zeros(2, G, dtype=torch.bool)
        if chooser >= 0:
            unopened[:, : closed[chooser]] = ~alone[:, chooser, : closed[chooser]]
        mask[:, t] = ~F.pad(unopened.repeat_interleave(GROUP, 1), (0, LENGTH - G * GROUP))
    mask &= torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.repeat_interleave(2, 0)[None], enable_gqa=True)
    assert torch.allclose(variant(None, q, k, v, None), wanted, atol=1e-5)
    assert not torch.allclose(own(None, q, k, v, None), wanted, atol=1e-2)


def test_a_second_look_opens_what_has_most(monkeypatch):
    q, k, v = drawn(length=400, width=32)
    dense = F.scaled_dot_product_attention(2 * q, k, v, is_causal=True, enable_gqa=True)
    monkeypatch.setattr(variants, "_BLOCK", 96)
    outs = [Variant(0.125, look=look, **SHORT)(None, 2 * q, k, v, None) for look in (1, 2, 4)]
    error = [float((out - dense).norm()) for out in outs]
    assert error[0] > error[1] > error[2]
    # a first look at all groups: those with the best tokens by the store's keys
    variant = Variant(0.25, look=4, **SHORT)
    groups = variant._groups(k)
    looked = variant._looked(q, groups, groups.flatten(2, 3), 1.0)
    scores = (q[:, :, -1:].unflatten(1, (2, 2)) @ groups.flatten(2, 3)[:, :, None].mT)[..., 0, :]
    best = scores.unflatten(-1, (-1, GROUP)).amax(-1).log_softmax(-1).amax(2)
    places = best.topk(math.ceil(best.shape[2] / 4)).indices
    assert torch.equal(looked[:, :, -1], torch.zeros_like(best, dtype=torch.bool).scatter(2, places, True))


def test_groups_that_queries_open_together():
    q, k, v = drawn(length=512)
    record, variant = [], Variant(**SHORT)
    out = variants.united(variant, record)(None, q, k, v, None)
    assert torch.equal(out, variant(None, q, k, v, None))
    (shares,) = record
    chosen = IndexChoice(q, build_index(variant._groups(k)), 0.25, Quota.of_share(0.25))
    closed = torch.arange(1, 513).sub(WINDOW).clamp(min=0)[None, None] // GROUP
    mask = chosen.at(0, 512, closed, 62)
    assert torch.equal(mask, ArrayChoice(variant.opened(q, k, 0.25)).at(0, 512, closed, 62))
    blocks = [mask[0, :, start : start + 8].any(1).sum(-1) / closed[0, 0, start + 7] for start in range(256, 512, 8)]
    assert shares["8"] == pytest.approx(float(torch.stack(blocks).mean()))
    assert 0.25 < shares["2"] < shares["8"] < shares["64"] <= 1


def test_bytes_of_variants():
    model = makes.new_model("qwen3-83m", 0, num_hidden_layers=2)
    for group in (16, 32):
        for bits, grid in ((16, None), (4, Grid(turned=False))):
            method = contenders.DROP.replace(group_size=group, store_bits=bits)
            wanted = contenders.costs(model, method, 16384)
            got = contenders.costs(model, Variant(group=group, grid=grid), 16384)
            for name, share in wanted.items():
                assert got[name] == pytest.approx(share, rel=0.02), name
    # of a token in groups of 16, in bytes
    assert [sum(Grid(turned=turned).nbytes(128, 16)) for turned in (True, False)] == [136, 164]
    base, shared = (replace(contenders.TURNED, every=n).costs(16384, 128) for n in (1, 16))
    assert base["read"] - shared["read"] == pytest.approx(15 / 16 * 18 / 512, rel=0.02)
    looking = Variant(0.125, grid=Grid(), look=4).costs(16384, 128)["read"]
    assert looking > Variant(0.125, grid=Grid()).costs(16384, 128)["read"]
