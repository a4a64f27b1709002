"""Attention on latents, beside its definition in `test_functional`: absorbed equals expanded, in any chunks."""

import functools

import pytest
import torch
from grids import grid
from layers import extend
from models import tiny
from oracles import cases, latent_oracle

import condense
from condense import CCA, DGA, LCA
from condense.latent import UpProjection, attend_latents, mean_queries

EXACT = {"rtol": 1e-12, "atol": 1e-12}
WIDTHS = (5, 3, 7, 4)
TURNS = (23, *(1,) * 18)
STEPS = {"at once": (41,), "token by token": (1,) * 41, "prefill then tokens": TURNS, "ragged": (7, 1, 13, 2, 1, 17)}
GRADIENTS = {
    "lca-log_size": LCA(group_size=3, window=2, rep_bias="log_size"),
    "cca": CCA(group_size=3, window=2),
    "streaming-mean-max": LCA(group_size=4, window=3, key_pooling="mean", value_pooling="max"),
    "last-weighted": CCA(group_size=2, window=1, key_pooling="max"),
    "prompt": LCA(group_size=3, window=2, summary="prompt", allow_future=True),
    "dga": DGA(group_size=3, window=1, gamma=0.3),
    "dga-streaming": DGA(group_size=2, window=2, gamma=0.5, summary="streaming", rep_bias="log_size"),
}


@functools.cache
def wanted(shape, method):
    return latent_oracle.attention(latent_oracle.random(*shape), method=method)


def read_in_steps(method, x, steps, *, absorb, hand_over=False):
    """Reads rows as a model does. hand_over: with keys and values of new tokens. absorb: None for if it pays."""
    q, entries = torch.cat([x.q_nope, x.q_rope], -1), torch.cat([x.c, x.k_rope], -1)[:, None]
    told = {} if absorb is None else {"absorbing_pays": lambda *_: absorb}
    up, past, outs = type("Up", (UpProjection,), told)(x.w_uk, x.w_uv), None, []
    view, scale = method.for_latents(x.c.shape[-1]), q.shape[-1] ** -0.5
    for new_q, new in zip(q.split(steps, dim=2), entries.split(steps, dim=2), strict=True):
        sources, past = extend(view, past, mean_queries(method, new_q, up), new, new[..., :0], scale=scale)
        handed = up.expand(new) if hand_over else None
        outs.append(attend_latents(method, new_q, sources, up, new=handed, scale=scale)[0])
    return torch.cat(outs, 2), past


@grid(24, method=cases.PLANS, absorb={"absorbed": True, "expanded": False, "chosen": None}, steps=STEPS)
def test_any_chunks_absorbed_or_expanded_equal_one_call(method, absorb, steps):
    shape = (2, 3, 41, WIDTHS)
    want, _ = wanted(shape, method)
    for hand_over in (False, True):
        out, past = read_in_steps(method, latent_oracle.random(*shape), steps, absorb=absorb, hand_over=hand_over)
        torch.testing.assert_close(out, want, **EXACT)
        assert past.window_k.shape[-1] == 10
        assert past.entries[0].shape[-1] == condense.methods.step_settings(method).entry_format.width(10, 8)
        assert past.window_v.numel() == past.entries[1].numel() == 0
        for tensor in past.tensors:
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("method", cases.PROMPTS.values(), ids=cases.PROMPTS)
def test_after_a_prompt_the_streaming_rule_holds(method):
    x = latent_oracle.random(1, 2, 37, WIDTHS)
    want, _ = latent_oracle.attention(x, method=method, prompt=22)
    out, _ = read_in_steps(method, x, (22, *(1,) * 15), absorb=None)
    torch.testing.assert_close(out, want, **EXACT)


@pytest.mark.parametrize("method", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_are_slopes(backend, method):
    x = [tensor.requires_grad_() for tensor in latent_oracle.random(2, 2, 13, (3, 2, 4, 2))]
    options = {"method": method, "backend": backend, "padding": torch.tensor([0, 2])}
    assert torch.autograd.gradcheck(functools.partial(condense.latent_attention, **options), x, fast_mode=True)


@pytest.mark.parametrize("absorb", [True, False], ids=["absorbed", "expanded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_budget(dtype, absorb):
    method = CCA(group_size=8, window=32, summary="streaming", rep_bias="log_size")
    x = latent_oracle.random(1, 4, 150, (32, 16, 64, 32), dtype)
    want, _ = latent_oracle.attention(x, method=method)
    out, _ = read_in_steps(method, x, (100, *(1,) * 50), absorb=absorb)
    # one rounding of queries, latents, keys, weights and outputs each: what a dense call on the same inputs shows
    dense, _ = latent_oracle.attention(x, method=condense.Dense())
    eager, _ = read_in_steps(condense.Dense(), x, (150,), absorb=False)
    error, yardstick = (out.double() - want).abs(), (eager.double() - dense).abs()
    for of in (torch.max, torch.mean):
        assert of(error) <= 2 * of(yardstick) + torch.finfo(dtype).eps * of(want.abs())


def test_head_means_are_summed_in_float32():
    # 255 heads whose queries would vanish beside the first one's if their sum were kept in bfloat16
    method, H = CCA(group_size=2, window=2), 256
    q, up = torch.full((1, H, 1, 3), 1 / 256), UpProjection(torch.ones(H, 1, 2), torch.ones(H, 1, 2))
    q[:, 0] = 1.0
    summary = mean_queries(method, q.bfloat16(), UpProjection(*(w.bfloat16() for w in up)))
    assert summary.dtype == torch.bfloat16
    rounding = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(summary.float(), mean_queries(method, q, up), rtol=rounding, atol=0)
    # 128 heads whose queries on latents are 512: their sum is the 65536 that float16 does not hold, twice over
    q = torch.full((1, 128, 1, 3), 16.0, dtype=torch.float16)
    up = UpProjection(*torch.full((2, 128, 3, 2), 16.0, dtype=torch.float16))
    want = torch.tensor([[[[512.0, 512.0, 512.0, 16.0]]]], dtype=torch.float16)
    assert torch.equal(mean_queries(LCA(), q, up), want)


def test_autocast_computes_in_its_dtype():
    x, method = latent_oracle.random(1, 2, 30, WIDTHS, torch.float32), cases.PLANS["lca"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = condense.latent_attention(*x, method=method)
    assert torch.equal(got, condense.latent_attention(*(tensor.bfloat16() for tensor in x), method=method))


def arguments(**changes):
    return latent_oracle.random(2, 3, 20, WIDTHS)._asdict() | {"method": LCA(group_size=4, window=4)} | changes


f64 = functools.partial(torch.zeros, dtype=torch.float64)
BAD = {
    "c with heads": ({"c": f64(2, 1, 20, 7)}, r"c must have 3 dimensions .*, got shape \(2, 1, 20, 7\)"),
    "other dtype": ({"c": torch.zeros(2, 20, 7)}, "c must have the dtype of q_nope, torch.float64"),
    "heads": ({"q_rope": f64(2, 2, 20, 3)}, r"q_rope must have the heads of q_nope, 3, got shape \(2, 2, 20, 3\)"),
    "w_uk the other way": ({"w_uk": f64(3, 5, 7)}, r"w_uk must have the d_c of c, 7, got shape \(3, 5, 7\)"),
    "nothing": ({"w_uv": f64(3, 7, 0)}, "w_uv must have at least 1 d_v"),
    "scale": ({"scale": float("nan")}, "scale must be a finite number"),
    "method": ({"method": ["lca"]}, "method must be a condense method"),
    "backend": ({"backend": "cuda"}, "backend must be 'auto' or one of"),
    "both": ({"padding": torch.tensor([0, 1]), "cu_seqlens": torch.tensor([0, 20])}, "exclude each other"),
    "padding": ({"padding": torch.tensor([0])}, "padding must be a tensor of integers"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(changes, message):
    tiny.refused(message, condense.latent_attention, **arguments(**changes))


@pytest.mark.parametrize("name", ["q_nope", "q_rope", "c", "k_rope", "w_uk"])
def test_a_prompt_summary_is_for_inference(name):
    given = arguments(method=cases.PROMPTS["prompt"])
    given[name].requires_grad_()
    tiny.refused(r"^CCA lets .*train with summary='streaming' or pass allow_future", condense.latent_attention, **given)
    with torch.no_grad():
        condense.latent_attention(**given)
