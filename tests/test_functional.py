"""`condense.attention` and `condense.latent_attention` equal their definitions, in every shape, padded and packed."""

import functools

import pytest
import torch
from grids import CPU_BACKENDS, grid
from layers import columns, extend
from models import tiny
from oracles import cases, latent_oracle, oracle
from step_states import empty, step_settings
from torch._subclasses import FakeTensorMode

import condense
from condense.plan import ForwardPlan

EXACT = {"rtol": 1e-12, "atol": 1e-12}
METHODS = cases.PLANS | cases.PROMPTS | cases.SELECTIONS
# the mean of more queries than most rows have
METHODS |= {"lca-40-queries": condense.LCA(group_size=4, window=7, num_summary_queries=40)}
WIDTHS = (5, 3, 7, 4)
PACKED = {
    "short": (0, 1, 2, 3), "empty in the middle": (0, 20, 20, 41), "empty at the ends": (0, 0, 17, 18, 45, 45),
    "one": (0, 33), "odd": (0, 15, 16, 47),
}  # fmt: skip
NAMES = ("dense", "lm_infinite", "cca-window0", "lca-log_size", "lca-9-queries", "prompt", "dga", *cases.SELECTIONS)
AHEAD = cases.PROMPTS | {"select": cases.SELECTIONS["select"]}
PADDING = {
    "mixed": (0, 5, 36, 17), "all padded alike": (9, 9, 9, 9), "one row of padding only": (37, 0, 36, 2),
    "padding only": (37, 37, 37, 37), "none": (0, 0, 0, 0),
}  # fmt: skip
KINDS = {
    "keys": (oracle.random_qkv, condense.attention, oracle.attention),
    "latents": (latent_oracle.random, condense.latent_attention, latent_oracle.attention),
}


def shape_of(kind, B, H, L):
    return (B, H, H // 2, L, 4, 5) if kind == "keys" else (B, H, L, WIDTHS)


def of_kinds(methods):
    """Methods of either kind; latents refuse selections."""
    keys = {f"keys-{name}": ("keys", method) for name, method in methods.items()}
    return keys | {f"latents-{name}": ("latents", x) for name, x in methods.items() if name not in cases.SELECTIONS}


@functools.cache
def wanted(kind, shape, method, scale, padding, cu_seqlens):
    draw, _, define = KINDS[kind]
    inputs = draw(*shape) if kind == "keys" else [draw(*shape)]
    return define(*inputs, method=method, scale=scale, padding=padding, cu_seqlens=cu_seqlens)


def check(backend, kind, shape, method, *, padding=None, cu_seqlens=None, scale=None):
    draw, attention, _ = KINDS[kind]
    tensors, want = draw(*shape), wanted(kind, shape, method, scale, padding, cu_seqlens)
    arguments = {"method": method, "scale": scale, "backend": backend}
    for name, numbers in (("padding", padding), ("cu_seqlens", cu_seqlens)):
        arguments[name] = None if numbers is None else torch.tensor(numbers, dtype=torch.int32)
    torch.testing.assert_close(attention(*tensors, return_lse=True, **arguments), want, **EXACT)
    # without the log-sum-exp the torch backend may take another way
    torch.testing.assert_close(attention(*tensors, **arguments), want[0], **EXACT)


# one token, then g - 1, g, g + 1, w + g - 1, w + g, w + g + 1 of most methods, an odd number and a prime
@grid(240, backend=CPU_BACKENDS, case=of_kinds(METHODS), length=[1, 3, 4, 5, 11, 12, 13, 63, 97])
def test_every_plan_and_length(backend, case, length):
    kind, method = case
    check(backend, kind, shape_of(kind, 1, 2, length), method)


@grid(120, backend=CPU_BACKENDS, case=of_kinds(cases.GRID))
def test_pooling_grid(backend, case):
    kind, method = case
    check(backend, kind, shape_of(kind, 1, 2, 31), method)


SHAPES = {
    "ratio1": ("keys", (2, 2, 2, 29, 8, 8)),
    "ratio2": ("keys", (1, 4, 2, 29, 8, 8)),
    "ratio3-wide-values": ("keys", (1, 6, 2, 29, 5, 11)),
    "ratio4-narrow-values": ("keys", (1, 4, 1, 29, 16, 3)),
    "ratio7": ("keys", (2, 7, 1, 29, 6, 6)),
    "width1": ("keys", (1, 2, 1, 29, 1, 1)),
    "latents-one-head": ("latents", (1, 1, 29, WIDTHS)),
    "latents-five-heads": ("latents", (2, 5, 29, WIDTHS)),
    # like the models': a latent wider than a head's key and value together
    "wide-latent": ("latents", (1, 2, 29, (4, 2, 16, 4))),
    "latents-width1": ("latents", (1, 3, 29, (1, 1, 1, 1))),
}


@grid(75, backend=CPU_BACKENDS, name=["dense", "streaming_llm", "cca-log_size", "lca", "lca-9-queries"], shape=SHAPES)
def test_heads_and_widths(backend, name, shape):
    check(backend, *shape, METHODS[name], scale=0.7)


def test_focal_tokens_are_ranked_by_the_scale_that_weighs_their_group(backend):
    check(backend, "keys", shape_of("keys", 1, 2, 29), METHODS["dga"], scale=-0.5)


@grid(72, backend=CPU_BACKENDS, case=of_kinds(METHODS), padding=PADDING)
def test_left_padding(backend, case, padding):
    kind, method = case
    check(backend, kind, shape_of(kind, 4, 4, 37), method, padding=padding)


@grid(72, backend=CPU_BACKENDS, case=of_kinds({name: METHODS[name] for name in NAMES}), cu_seqlens=PACKED)
def test_packed(backend, case, cu_seqlens):
    kind, method = case
    check(backend, kind, shape_of(kind, 1, 4, cu_seqlens[-1]), method, cu_seqlens=cu_seqlens)


def test_one_document_is_a_row_like_any_other():
    assert ForwardPlan(5, documents=[0, 5, 0]).documents is None
    assert ForwardPlan(5, documents=[2, 3]).documents.tolist() == [2, 3]


def inputs(**changes):
    q, k, v = oracle.random_qkv(2, 4, 2, 24, 4, 6)
    return {"q": q, "k": k, "v": v, "method": condense.CCA(group_size=4, window=8)} | changes


def zeros(*shape, **options):
    return torch.zeros(shape, dtype=torch.float64, **options)


BAD = {
    "q not a tensor": ({"q": [[1.0]]}, "^q must be a torch.Tensor, got list"),
    "q rank": ({"q": zeros(4, 24, 4)}, r"^q must have 4 dimensions .* got shape \(4, 24, 4\)"),
    "q dtype": ({"q": torch.zeros(2, 4, 24, 4, dtype=torch.int64)}, "^q must be one of .*float64.* got torch.int64"),
    "k dtype": ({"k": zeros(2, 2, 24, 4).float()}, "^k must have the dtype of q, torch.float64, got torch.float32"),
    "v dtype": ({"v": zeros(2, 2, 24, 4).half()}, "^v must have the dtype of q"),
    "k device": ({"k": zeros(2, 2, 24, 4, device="meta")}, "^k must be on the device of q, cpu, got meta"),
    "tokens": ({"k": zeros(2, 2, 23, 4)}, r"^k must have the tokens of q, 24, got shape \(2, 2, 23, 4\)"),
    "value tokens": ({"v": zeros(2, 2, 23, 4)}, "^v must have the tokens of q, 24"),
    "batch": ({"k": zeros(1, 2, 24, 4), "v": zeros(1, 2, 24, 4)}, "^k must have the batch of q, 2, got shape"),
    "width": ({"k": zeros(2, 2, 24, 5)}, "^k must have the width of q, 4, got shape"),
    "heads": ({"k": zeros(2, 3, 24, 4), "v": zeros(2, 3, 24, 4)}, "^k and v must have .* divide .* 4, got 3"),
    "backend triton": ({"backend": "triton"}, "^backend 'triton' needs a CUDA device.*; use backend='torch'"),
    "backend": ({"backend": "numpy", "method": condense.Dense()}, "^backend must be .*, got 'numpy'"),
    "backend of sparse prefill": ({"backend": "numpy", "method": condense.AShape()}, "^backend must be .*'numpy'"),
    "scale": ({"scale": "0.1"}, "^scale must be a finite number, got '0.1'"),
    "scale NaN": ({"scale": float("nan")}, "^scale must be a finite number, got nan"),
    "both": (dict.fromkeys(("padding", "cu_seqlens"), torch.tensor([0, 24])), "^cu_seqlens and padding exclude each"),
    "padding list": ({"padding": [0, 1]}, r"^padding must be a tensor of integers of shape \(2,\)"),
    "padding shape": ({"padding": torch.tensor([0])}, r"^padding must be .* shape \(2,\)"),
    "padding dtype": ({"padding": torch.tensor([0.0, 1.0])}, "^padding must be a tensor of integers"),
    "padding negative": ({"padding": torch.tensor([0, -1])}, r"^padding must be between 0 and .* 24, got \[0, -1\]"),
    "padding too long": ({"padding": torch.tensor([25, 0])}, r"^padding must be between 0 and .*, got \[25, 0\]"),
    "cu_seqlens batch": ({"cu_seqlens": torch.tensor([0, 24])}, "^cu_seqlens needs a batch of 1, got 2"),
}
EMPTY = {
    "rows": {name: zeros(0, 2, 5, 4) for name in "qkv"}, "tokens": {name: zeros(2, 2, 0, 4) for name in "qkv"},
    "heads": {"q": zeros(2, 0, 24, 4)}, "KV heads": {"k": zeros(2, 0, 24, 4), "v": zeros(2, 0, 24, 4)},
    "width": {"q": zeros(2, 4, 24, 0), "k": zeros(2, 2, 24, 0)}, "value width": {"v": zeros(2, 2, 24, 0)},
}  # fmt: skip
BAD |= {f"no {what}": (changes, f"^{next(iter(changes))} must have at least 1") for what, changes in EMPTY.items()}
MARKS = [
    [0, 24], *map(torch.tensor, ([0, 23], [1, 24], [0, 25], [0, 10, 9, 24], [24], [[0, 24]], [0.0, 24.0], 24)),
    torch.tensor([], dtype=torch.int64),
]  # fmt: skip
ROW = dict(zip("qkv", oracle.random_qkv(1, 2, 1, 24, 4, 4), strict=True))
RISING = r"^cu_seqlens must be a tensor of integers that rise from 0 to .* 24, got "
BAD |= {f"marks {marks}": (ROW | {"cu_seqlens": marks, "method": condense.Dense()}, RISING) for marks in MARKS}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_attention_bad_input_is_named(changes, message):
    tiny.refused(message, condense.attention, **inputs(**changes))


@grid(18, backend=CPU_BACKENDS, method=AHEAD, needs=["q", "k", "v"])
def test_attention_gradients_through_what_looks_ahead_need_consent(backend, method, needs):
    arguments = inputs(method=method, backend=backend)
    arguments[needs].requires_grad_()
    tiny.refused("train with (summary|selection)='streaming' or pass allow_future", condense.attention, **arguments)
    with torch.no_grad():
        want = condense.attention(**arguments)
    with torch.inference_mode():
        assert torch.equal(condense.attention(**arguments), want)
    allowed = condense.attention(**arguments | {"method": method.replace(allow_future=True)})
    assert torch.equal(allowed, want)
    allowed.sum().backward()
    assert arguments[needs].grad is not None


def test_attention_prompt_summary_without_scores_looks_at_nothing():
    """Pooling that asks for no scores has no summary, so there is nothing to consent to."""
    method = condense.CCA(group_size=4, window=2, summary="prompt", key_pooling="mean", value_pooling="max")
    arguments = inputs()
    arguments["q"].requires_grad_()
    methods = method, method.replace(summary="last")
    assert torch.equal(*(condense.attention(**arguments | {"method": x}) for x in methods))


def test_attention_on_the_meta_device():
    q, k, v = (x.to("meta") for x in oracle.random_qkv(2, 4, 2, 700, 4, 6))
    random = condense.DGA(focal="random", rep_bias="log_size")
    for method in (condense.LCA(group_size=4, window=8), condense.DGA(), random):
        out, lse = condense.attention(q, k, v, method=method, return_lse=True)
        assert (out.device.type, out.shape, lse.shape) == ("meta", (2, 4, 700, 6), (2, 4, 700))


@pytest.mark.parametrize("method", [condense.Recall(), condense.CCA(), condense.DGA(selection="prompt")], ids=str)
def test_a_device_without_float64_is_refused(method):
    said = "device must have float64.*got mps: use a CPU or CUDA"
    with FakeTensorMode():  # which needs no such device
        q = torch.empty(1, 2, 40, 8, device="mps")
        tiny.refused(said, condense.attention, q, q, q, method=method)
        tiny.refused(said, empty, step_settings(method), 40, 2, (8, 8), dtype=torch.float32, device="mps")


@pytest.mark.parametrize("R", [1, 2, 3, 7])
def test_entries_are_the_same_to_the_bit_chunked_or_not(R):
    method = condense.CCA(group_size=4, window=6, summary="streaming", num_summary_queries=6)
    for seed in range(10):
        qkv, past = oracle.random_qkv(1, 2 * R, 2, 60, 6, 6, dtype=torch.float32, seed=seed), None
        _, whole = extend(method, None, *qkv, scale=0.7)
        for part in range(0, 60, 7):
            _, past = extend(method, past, *columns(qkv, part, part + 7), scale=0.7)
        assert all(torch.equal(x, y) for x, y in zip(past.entries, whole.entries, strict=True))
