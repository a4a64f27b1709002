"""Recall's kernels for Hopper, held to what Triton's are held to."""

import pytest
import torch
from triton_kernels import conftest, test_recall_prefill
from triton_kernels.test_recall_prefill import Case, Problem, compare, compare_as_one_graph

# fixtures
poison, poisoned_scratch = conftest.poison, test_recall_prefill.poisoned_scratch
chosen, weighed = test_recall_prefill.chosen, test_recall_prefill.weighed
HALF = {"widths": (128, 128), "dtype": torch.bfloat16}
CASES = {
    f"{heads} {width}": Case(heads, 16, 1500, 0, 100, 20, (0, 301), widths=(width, width), dtype=dtype)
    for heads, width, dtype in (
        ((8, 2), 128, torch.bfloat16), ((7, 1), 128, torch.float16), ((4, 2), 64, torch.bfloat16),
    )
}  # fmt: skip
CASES |= {f"groups of {g}": Case((4, 1), g, 333, 2048, g, 9, **HALF) for g in (8, 32, 64)}
CASES["one index for all heads"] = Case((8, 2), 16, 901, 0, 100, 9, (0, 77), latent=128, **HALF)
CASES["the others left out"] = Case((4, 1), 16, 901, 0, 0, 9, unchosen="drop", **HALF)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_choice_output_and_gradients(case, chosen, weighed):
    compare(case, chosen, weighed, "hopper")


def test_long_prompts_agree_with_the_plain_kernels_and_are_read_by_auto(chosen):
    """Several tiles per program, so that the rings of keys go on from one to the next."""
    problem = Problem(Case((32, 8), 16, 5000, 0, 1024, 32, (0,), **HALF))
    with torch.no_grad():
        auto, got, want = (problem.attend(problem.inputs, problem.choice(), x) for x in ("auto", "hopper", "triton"))
    assert all(torch.equal(x, y) for x, y in zip(auto, got, strict=True))
    assert torch.equal(chosen[0], chosen[1])
    # both round weights and outputs to bfloat16
    assert float((got[0].float() - want[0].float()).abs().max()) <= 2**-6 * float(want[0].abs().max())
    assert float((got[1] - want[1]).abs().max()) < 1e-5


# Dynamo traces into the cached function that reads the device's properties, and says so
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache:UserWarning")
def test_compiled_as_one_graph():
    case = Case((4, 1), 16, 901, 0, 100, 9, **HALF)
    compare_as_one_graph(case, "hopper")
