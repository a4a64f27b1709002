"""The `hopper` backend, held to float64 like the plain kernels; small shapes would not choose it by themselves."""

import pytest
import torch
from oracles import oracle
from triton_kernels import test_attend as plain
from triton_kernels.test_attend import (  # noqa: F401  (collected here too, with the fixture below)
    test_any_number_of_sources_within_budget,
    test_layouts_poisoned_padding_later_tokens_and_repeats_change_no_bit,
)

import condense
from condense.ops import Problem, resolve_backend
from condense.ops.backends import BACKENDS
from condense.ops.hopper import attend_forward, limits

HALF = [dtype for dtype in plain.DTYPES if dtype != torch.float32]
# keys in one part and in two, the latter with each kind of bounds, and with the small blocks that a bias takes (dga)
ROWS = [row for row in plain.MATRIX if row[2] in HALF and row[3] == row[4] and row[3:] in limits.WIDTHS]
ROWS += [
    (name, shape, dtype, *widths)
    for name in ("cca", "streaming-log_size", "dga")
    for shape in plain.SHAPES
    for dtype in HALF
    for widths in plain.LATENT_WIDTHS
]


@pytest.fixture(autouse=True)
def hopper_for_triton(monkeypatch):
    """The tests of the plain kernels ask for "triton"."""
    monkeypatch.setitem(BACKENDS, "triton", BACKENDS["hopper"])


@pytest.mark.parametrize(("name", "shape", "dtype", "D", "Dv"), ROWS, ids=str)
def test_output_lse_and_gradients_within_budget(name, shape, dtype, D, Dv):
    plain.test_output_lse_and_gradients_within_budget(name, shape, dtype, D, Dv)


@pytest.mark.parametrize("name", ["cca", "dense"])
def test_blocks_of_128_keys_that_long_texts_take(name, monkeypatch):
    monkeypatch.setattr(attend_forward, "_LONG", 0)
    plain.test_output_lse_and_gradients_within_budget(name, "ratio3", torch.bfloat16, 128, 128)


@pytest.mark.parametrize(("H", "K", "D", "Dv"), [(32, 8, 128, 128), (16, 16, 192, 128), (40, 40, 96, 64)])
def test_is_chosen_for_long_sequences_and_agrees_with_the_plain_kernel(H, K, D, Dv, monkeypatch):
    """Several tiles per program, so that the ring of keys goes on from one to the next."""
    monkeypatch.undo()
    q, k, v = (x.cuda() for x in oracle.random_qkv(1, H, K, 5000, D, Dv, dtype=torch.bfloat16))
    problem = Problem(q.device, q.dtype, (D, Dv), 5000, rows=1, heads=H, kv_heads=K)
    assert resolve_backend("auto", problem) == "hopper"
    assert resolve_backend("auto", problem._replace(num_queries=50)) == "triton"
    for method in (condense.CCA(), condense.CCA(window=100, rep_bias="log_size"), condense.StreamingLLM(window=500)):
        got = condense.attention(q, k, v, method=method, return_lse=True)
        named = condense.attention(q, k, v, method=method, return_lse=True, backend="hopper")
        assert all(torch.equal(x, y) for x, y in zip(got, named, strict=True))
        want = condense.attention(q, k, v, method=method, return_lse=True, backend="triton")
        # both round weights and outputs to bfloat16
        assert float((got[0].float() - want[0].float()).abs().max()) <= 2**-6 * float(want[0].abs().max())
        assert float((got[1] - want[1]).abs().max()) < 1e-5
