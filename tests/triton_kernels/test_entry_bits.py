"""The decode step over entries in 8 and 4 bits: their bytes against PyTorch's step on the same state."""

import itertools

import pytest
import torch
from speed.budget import errors, one_ulp
from triton_kernels.test_step import DEVICE, DTYPES, WIDTHS, copy_of, drawn, empty_state, same

import condense
from condense.methods import step_settings
from condense.ops.entries import BLOCK_WIDTH
from condense.ops.step import NewToken, StepCall, StepState
from condense.ops.torch import step as torch_step
from condense.ops.triton import step as triton_step

METHODS = {
    "cca": condense.CCA(group_size=4, window=3),
    "cca-window0": condense.CCA(group_size=4, window=0, rep_bias="log_size"),
    "lca-matched": condense.LCA(group_size=4, window=3, rep_bias="matched"),
    "mean-max": condense.LCA(group_size=3, window=2, key_pooling="mean", value_pooling="max"),
    "max-select": condense.CCA(group_size=5, window=2, key_pooling="max", value_pooling="select"),
}


def exact_outputs(method, q, state, D, Dv, dtype, latent, scale):
    """Attention in float64 of queries q ``[B, H, 1, D]`` over entries as numbers and tokens of the state after it."""
    rule, form, outs = method.layout.rule, step_settings(method).entry_format, []
    entries_k, entries_v = (form.unpack(x, width, dtype) for x, width in ((state.entries_k, D), (state.entries_v, Dv)))
    for b, seen in enumerate(state.seen.tolist()):
        closed = rule.closed(seen)
        M, at = rule.visible_entries(closed), torch.arange(closed * rule.chunk, seen) % state.ring_k.shape[2]
        k = torch.cat([entries_k[b, :, :M], state.ring_k[b][:, at.to(DEVICE)]], 1)
        v = k[..., :latent] if latent else torch.cat([entries_v[b, :, :M], state.ring_v[b][:, at.to(DEVICE)]], 1)
        bias = torch.zeros(k.shape[:2], dtype=torch.float64, device=DEVICE)
        bias[:, :M] = state.biases[b, :, :M, 0] if method.layout.matched else step_settings(method).bias
        scores = q[b].double().unflatten(0, (len(k), -1))[:, :, 0] @ k.double().mT * scale + bias[:, None]
        outs.append((scores.softmax(-1) @ v.double()).flatten(0, 1)[:, None])
    return torch.stack(outs)


def check_rows(got, want, D, dtype, form, largest):
    """Sums in different orders round to codes at most one apart, and differ by the last digits of all that is read."""
    start, last = form.grid_start(D, dtype.itemsize), 2 * form.num_blocks(D) * dtype.itemsize
    step = want[..., start : start + last].contiguous().view(dtype)[..., ::2].double()
    step = step.repeat_interleave(min(D, BLOCK_WIDTH), -1)[..., :D]
    allowed = step * (1 + 2**-7) + 4 * torch.finfo(dtype).eps * largest
    got, want = (form.unpack(rows, D, dtype).double() for rows in (got, want))
    assert bool(((got - want).abs() <= allowed).all())


def rounded_steps(method, shape, dtype, L, *, latent=0):
    """Every token one step from the state that PyTorch's step left, one row pausing now and then. Anchors are the same:
    the mean of two query heads is, in any order.
    """
    (H, K, D, Dv), plan, scale = shape, step_settings(method), 0.1
    q, k, v = drawn(2, H, K, L, D, Dv, dtype)
    form = plan.entry_format
    own = (method.for_latents(latent) if latent else method).represent
    theirs = StepState._make(x.nan_to_num(0.0) for x in empty_state(method, 2, K, D, Dv, L, dtype=dtype))
    exact_bytes = {"max", "select"} >= {method.key_pooling, method.value_pooling}
    # a bias is a product of D numbers in float32 with a key that may be rounded differently where it is a sum
    of_keys = torch.float32 if not latent and method.key_pooling in ("max", "select") else dtype
    of_biases = scale * D * float(q.abs().max() * k.abs().max()) * torch.finfo(of_keys).eps
    # the mean of a token's queries, summed in another order
    of_mean = 16 * torch.finfo(torch.float32).eps * float(q.abs().max())
    results = []
    for t in range(L):
        real, mine, before = torch.tensor([True, t % 5 != 2], device=DEVICE), copy_of(theirs), copy_of(theirs)
        now = [x[:, :, t : t + 1].masked_fill(~real[:, None, None, None], torch.nan) for x in (q, k, v)]
        token = NewToken(*now, real)
        plain = torch_step.step(StepCall(token, theirs, plan, scale=scale, latent=latent), own)
        out = triton_step.step(StepCall(token, mine, plan, scale=scale, latent=latent))
        assert all(torch.equal(x[~real], y[~real]) for x, y in zip(mine, before, strict=True))
        assert not out[~real].any()
        assert same((*mine[2:4], *mine[5:8]), (*theirs[2:4], *theirs[5:8]))
        torch.testing.assert_close(mine.ring_q, theirs.ring_q, rtol=2 * torch.finfo(dtype).eps, atol=of_mean)
        torch.testing.assert_close(mine.biases, theirs.biases, rtol=0, atol=of_biases)
        for got, want, width, x in ((mine[0], theirs[0], D, k), (mine[1], theirs[1], Dv, v)):
            if not torch.equal(got, want):
                assert not exact_bytes
                check_rows(got, want, width, dtype, form, float(x.abs().max()))
        exact = (exact_outputs(method, q[:, :, t : t + 1], x, D, Dv, dtype, latent, scale) for x in (mine, theirs))
        results.append([x[real] for x in (out, plain, *exact)])
    assert theirs.entries_k[0].any()
    out, plain, want, want_plain = (torch.cat(x) for x in zip(*results, strict=True))
    assert bool((errors(out, want) <= 2 * errors(plain, want_plain) + one_ulp(want, dtype)).all())


# every pooling, and on a GPU every width, with the dtypes in turn
CELLS = [(name, 128 if DEVICE == "cuda" else (16, 40), DTYPES[0]) for name in METHODS]
if DEVICE == "cuda":
    CELLS += [("cca", width, dtype) for width, dtype in zip((*WIDTHS, 40, 33), itertools.cycle(DTYPES), strict=False)]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("name", "width", "dtype"), CELLS, ids=str)
def test_steps(name, width, dtype, bits):
    D, Dv = width if isinstance(width, tuple) else (width, width)
    method = METHODS[name].replace(entry_bits=bits)
    rounded_steps(method, (4, 2, D, Dv), dtype, 60 if DEVICE == "cuda" else 2 * method.group_size + 4)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", [(512, 64), (256, 32)] if DEVICE == "cuda" else [(32, 16)], ids=str)
def test_latents(widths, dtype, bits):
    """Pooled without anchors, which other sums of 16 queries may choose otherwise."""
    latent, rope = widths
    method = condense.LCA(group_size=4, window=3, key_pooling="weighted", rep_bias="matched", entry_bits=bits)
    H, L = (16, 60) if DEVICE == "cuda" else (2, 12)
    rounded_steps(method, (H, 1, latent + rope, 0), dtype, L, latent=latent)
