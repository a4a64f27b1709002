"""Sums and means of values after each whole group: PyTorch's to the bit, as float64 rounds no sum of 16 bits."""

import pytest
import torch
from lanes import DEVICE
from layers import draw, extend

from condense import Recall
from condense.ops import Chunks
from condense.ops.api import running_sums
from condense.ops.triton import limits
from condense.ops.triton import running_sums as module
from condense.plan import ForwardPlan

# g, groups, width, first column of each row's groups, whole groups before them in each row, blocks at most
CASES = {
    "one group": (4, 1, 16, (0,), 0, 128),
    "no group": (4, 0, 16, (3,), 5, 128),
    "a tile but one": (3, 14, 72, (2,), 0, 128),
    "a tile and one": (1, 16, 65, (0,), 7, 128),
    "blocks": (20, 45, 8, (1,), 0, 128),
    "blocks of tiles": (2, 100, 64, (0,), 1, 2),
    "more blocks than totals at once": (1, 1100, 8, (0,), 0, 128),
    "rows apart": (5, 40, 24, (9, 0), (3, 0), 2),
    "past the window": (4, 18, 40, (0, 31), (0, 3), 128),
}
if DEVICE == "cuda":
    CASES["a prompt"] = (16, 8192, 128, (0,), 0, 128)
    CASES["latents, rows apart"] = (16, 1000, 576, (100, 0), (8, 0), 128)


def problem(dtype, g, n, D, starts, first=0, K=2):
    """Numbers of 16 bits, heads of a token side by side; groups may reach past the window."""
    generator, N = torch.Generator().manual_seed(n), max(1, n * g + min(starts) + 2)
    v = torch.randn(2, N, K, D, generator=generator).to(torch.bfloat16).to(DEVICE, dtype).transpose(1, 2)
    before = torch.randn(2, K, 3, D, generator=generator).bfloat16().to(DEVICE, torch.float64)[:, :, -1:]
    at = starts[0]
    if len(starts) > 1:
        at = torch.tensor(starts, device=DEVICE)[:, None] + g * torch.arange(n, device=DEVICE)
    counts = (
        (torch.tensor(first, device=DEVICE).view(-1, 1, 1, 1) + torch.arange(n + 1, device=DEVICE)[:, None]) * g
    ).clamp(min=1)
    return before, Chunks(v[..., :0], v, at, n, g, 0), counts


@pytest.mark.parametrize("dtype", limits.DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_sums_of_16_bits_are_those_of_pytorch_to_the_bit(case, dtype, monkeypatch):
    *sizes, most = case
    monkeypatch.setattr(module, "_MOST_BLOCKS", most)
    before, groups, counts = problem(dtype, *sizes)
    (got, means), (want, of_want) = (running_sums(before, groups, counts, backend=x) for x in ("triton", "torch"))
    assert got.dtype == torch.float64
    assert means.dtype == torch.float32
    assert torch.equal(got, want)
    assert torch.equal(means, of_want)


def test_sums_of_float32_are_off_by_roundings_of_float64():
    before, groups, counts = problem(torch.float32, 16, 100, 64, (0,))
    groups = groups._replace(window_v=groups.window_v / 3)
    got, want = (running_sums(before, groups, counts, backend=x)[0] for x in ("triton", "torch"))
    size = running_sums(before.abs(), groups._replace(window_v=groups.window_v.abs()), counts)[0]
    # either way each of 1601 numbers goes through fewer than so many additions
    assert bool(((got - want).abs() <= 2 * 1601 * 2.0**-53 * size).all())


def test_gradients_are_those_of_pytorch():
    before, groups, counts = problem(torch.float32, 4, 9, 16, (1,))

    def gradients(backend):
        v = groups.window_v.clone().requires_grad_()
        sums, means = running_sums(before, groups._replace(window_v=v), counts, backend=backend)
        return torch.autograd.grad((sums.sin().sum(), means.sin().sum()), v)[0]

    assert torch.equal(gradients("triton"), gradients("torch"))


@pytest.mark.parametrize("starts", [(1,), (3, 0)], ids=["one start", "rows apart"])
def test_compiled(starts):
    """As one operation, whatever the number of groups."""
    compiled = torch.compile(running_sums, backend="eager", fullgraph=True)
    for n in (9, 20, 33):
        before, groups, counts = problem(torch.float32, 4, n, 16, starts, starts)
        got, want = compiled(before, groups, counts, backend="triton"), running_sums(before, groups, counts)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_prompts_and_later_chunks_are_summed_by_the_kernels(monkeypatch):
    """Rows that part and stay apart; the state keeps only the newest sums."""
    runs, run, method = [], module._run, Recall(group_size=4, window=5, num_recall=2)
    monkeypatch.setattr(module, "_run", lambda *args: runs.append(args) or run(*args))
    state, read = None, [torch.zeros(2, 0, 6, dtype=torch.float64, device=DEVICE)] * 2
    for counts in ((37, 37), (20, 3), (2, 2), (50, 3), (41, 41)):
        qkv = draw(max(counts), seed=max(counts), dtype=torch.float16, device=DEVICE)
        plan = ForwardPlan(max(counts), torch.tensor(counts))
        context, state = extend(method, state, *qkv, scale=1.0, plan=plan, backend="triton")
        means = context.means
        assert state.sums.untyped_storage().nbytes() == state.sums.nbytes
        read = [torch.cat([x, v[:, -n:].double()], dim=1) for x, v, n in zip(read, qkv[2], counts, strict=True)]
        for row, first in enumerate(torch.as_tensor(means.first).expand(2).tolist()):
            groups = read[row].shape[1] // 4
            sums = torch.nn.functional.pad(read[row].cumsum(1)[:, 3::4], (0, 0, 1, 0))[:, -state.sums.shape[2] :]
            assert torch.equal(state.sums[row, :, -sums.shape[1] :], sums)
            assert torch.equal(means.means[row, :, groups - first], (sums[:, -1] / (4 * groups)).float())
    assert len(runs) == 5
