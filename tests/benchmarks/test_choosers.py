"""Choosers of the study of what transfers: they find what they should, and by bounds they are the library's own."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "transfer"))

import choosers
import makes

SMALL = {"num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 64}


def tiny(make: str):
    return makes.new_model(make, 0, **SMALL).double().eval()


def drawn_ids(size: int):
    return torch.from_numpy(np.random.default_rng(0).integers(4096, size=(1, size)))


def test_a_choice_by_true_mass_opens_what_has_most():
    q, k, v = (torch.randn(1, heads, 64, 16, dtype=torch.float64) for heads in (4, 2, 2))
    module, small = torch.nn.Module(), {"group": 8, "window": 16, "near": True}
    k[:, :, 8:16] = 30 * q[:, ::2, -1:]  # one group draws all attention of the last query
    dense = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for per_head in (False, True):
        whole = choosers.Chooser(6, choosers.TRUE, per_head=per_head, **small)(module, q, k, v, None)
        assert torch.allclose(whole, dense, atol=1e-12)
        best = choosers.Chooser(1, choosers.TRUE, per_head=per_head, **small)(module, q, k, v, None)
        assert torch.allclose(best[:, ::2, -1], dense[:, ::2, -1], atol=1e-5)
        assert not torch.allclose(best, dense, atol=1e-2)
    # twice as many, as each head that shares them may find up to eight that weigh as much
    tokens = [choosers.best_tokens(num, 8, 16, block=24)(module, q, k, v, None) for num in (2, 6)]
    assert torch.allclose(tokens[0][:, ::2, -1], dense[:, ::2, -1], atol=1e-5)
    assert torch.allclose(tokens[1], dense, atol=1e-5)  # scores are float32


def test_the_others_weigh_what_the_index_says():
    q, k, v = (torch.randn(1, heads, 64, 16, dtype=torch.float64) for heads in (4, 2, 2))
    module, small = torch.nn.Module(), {"group": 8, "window": 16, "near": True}
    # tokens of a group are alike, so its mean with the weight of all is what they give
    k, v = (x[:, :, ::8].repeat_interleave(8, 2) for x in (k, v))
    dense = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out = choosers.Chooser(1, choosers.TRUE, rest=True, **small)(module, q, k, v, None)
    assert torch.allclose(out, dense, atol=1e-5)
    assert not torch.allclose(choosers.Chooser(1, choosers.TRUE, **small)(module, q, k, v, None), dense, atol=1e-2)


def test_a_mass_opens_as_few_groups_as_leave_less_closed():
    q, k, v = (torch.randn(1, heads, 64, 16, dtype=torch.float64) for heads in (2, 2, 2))
    module, small = torch.nn.Module(), {"group": 8, "window": 16, "near": True, "least": 0.3}
    mass = (2 * q[0, :, -1:] @ k[0].mT * 16**-0.5).softmax(-1)[:, 0, :48].unflatten(1, (6, 8)).sum(2)
    chosen, _ = choosers.choose(choosers.Chooser(5, choosers.TRUE, **small), 2 * q[0], k[0], 16**-0.5, 6)
    for head in range(2):
        left = mass[head].sort(descending=True).values
        num = next(n for n in range(6) if left[n:].sum() <= 0.3)
        assert int(chosen[head, -1].sum()) == num
    assert choosers.Chooser(5, choosers.TRUE, **small)(module, q, k, v, None).shape == q.shape


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_bounds_are_above_all_tokens_and_tight_in_16_bits(bits):
    generator = torch.Generator().manual_seed(bits)
    q, k = (torch.randn(2, n, 16, generator=generator) for n in (5, 64))
    low, high = choosers._bounds(k.unflatten(1, (8, 2, 4)), bits)
    blocks = k.unflatten(1, (16, 4))
    scores = q.clamp(min=0) @ high.mT + q.clamp(max=0) @ low.mT
    assert bool((scores + 1e-5 >= (q[:, :, None, None] * blocks[:, None]).sum(-1).amax(-1)).all())
    if bits == 16:
        assert torch.equal(low, blocks.amin(2))
        assert torch.equal(high, blocks.amax(2))


def test_choosers_by_other_indexes_choose_otherwise():
    model, ids, logits = tiny("llama-77m"), drawn_ids(200), []
    with torch.no_grad():
        for index in (choosers.Index(4, 4), choosers.Index(1, 2)):
            with makes.replaced(choosers.Chooser(5, index, group=8, window=16)):
                logits.append(model(input_ids=ids, use_cache=False).logits)
    assert not torch.allclose(*logits, atol=1e-4)


def test_latents_as_an_index_sees_them():
    model, seen = tiny("mla-28m"), []
    choosers.keep_latents(model)

    def attention(module, q, k, v, scale):
        seen.append((q @ k.mT, *choosers.seen_by_index(module, q, k)))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    with makes.replaced(attention), torch.no_grad():
        model(input_ids=drawn_ids(40), use_cache=False)
    for scores, q, k in seen:
        assert k.shape[1] == 1
        assert torch.allclose(q @ k.mT, scores, atol=1e-4)  # absorbed in float32


def test_a_second_look_and_finer_keys_find_more():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 512, 192, generator=generator) * 1.5 for _ in range(2))
    turned = choosers.rotated(k)
    assert torch.allclose(choosers.rotated(q) @ turned.mT, q @ k.mT, atol=1e-3)
    error = [float((choosers.rounded(turned, bits) - turned).square().mean()) for bits in (1, 2, 4)]
    assert error[0] > error[1] > error[2]
    assert torch.allclose((choosers.rounded(turned, 2) * turned).sum(-1), turned.square().sum(-1))

    def mass(**settings):
        chosen = choosers.choose(choosers.Chooser(4, window=32, **settings), q, k, 192**-0.5, 30)[0]
        shares = (q @ k.mT * 192**-0.5)[:, -16:, :480].softmax(-1).unflatten(-1, (30, 16)).sum(-1)
        return float((shares * chosen[:, -16:]).sum())

    one, two, four, true = (mass(index=choosers.Index(1, bits)) for bits in (1, 2, 4, 16))
    assert one < two < four <= true
    bounds = mass(index=choosers.Index(8, 4))
    assert bounds < mass(index=choosers.Index(8, 4), then=choosers.Index(1, 4)) <= true


def test_bytes_of_an_index():
    sizes = [choosers.Index(*index).nbytes(128, 16) for index in ((8, 4), (8, 8), (1, 1), (1, 2))]
    assert sizes == [264, 520, 288, 544]
    halves = choosers.Chooser(128, choosers.Index(8, 4))
    costs = halves.costs(131072, 128, 128, 4)
    groups, exact = (131072 - 256) // 16, 256 * 512
    assert costs["read"] * 131072 * 512 == pytest.approx(groups * 264 + 128 * 2624 + exact)
    assert costs["device"] * 131072 * 512 == pytest.approx(groups * (264 + 2624) + exact)
    # rotated keys of 4 bits are store and index in one
    keys = choosers.Chooser(128, choosers.KEYS).costs(131072, 128, 128, 4)
    assert keys["device"] * 131072 * 512 == pytest.approx(groups * 16 * (66 + 68) + exact)
    assert keys["read"] * 131072 * 512 == pytest.approx(groups * 16 * 66 + 128 * 16 * (66 + 68) + exact)
