"""Recall's prompts by its kernels on latents, with one choice for all heads."""

from dataclasses import replace

import pytest
import torch
from oracles import latent_oracle
from speed.budget import judge

import condense
from condense.ops.backends import BACKENDS
from condense.ops.triton import recall_attend

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# d_n, d_r, d_c, d_v
WIDTHS = [(128, 64, 512, 128), (64, 32, 256, 64), (64, 32, 160, 64)] if CUDA else [(16, 8, 256, 16)]
METHOD = condense.Recall(group_size=4, window=6, num_recall=3)
METHODS = {
    "recall": METHOD,
    "drop": METHOD.replace(unchosen="drop", window=0),
}


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_a_prompt_is_what_the_definition_says(name, widths, monkeypatch):
    """Output and gradients in float32, where both choose the same groups."""
    L, padding, chosen, choose = 31, torch.tensor([0, 9]), [], recall_attend.choose
    monkeypatch.setattr(recall_attend, "choose", lambda *a, **kw: chosen.append(choose(*a, **kw)) or chosen[-1])
    given = [x.to(DEVICE) for x in latent_oracle.random(2, 3, L, widths, torch.float32)]
    weights = torch.randn(2, 3, L, widths[3], generator=torch.Generator().manual_seed(1)).to(DEVICE)
    results = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64), ("torch", torch.float32)):
        inputs = [x.to(dtype).requires_grad_() for x in given]
        out = condense.latent_attention(*inputs, method=METHODS[name], backend=backend, padding=padding)
        results.append([out.detach(), *torch.autograd.grad((out * weights.to(dtype)).sum(), inputs)])
    assert len(chosen) == 1
    assert chosen[0].shape[1] == 1
    verdict = judge(*results)
    assert verdict.passed, verdict


def test_auto_takes_the_kernels_where_they_run(monkeypatch):
    taken, operations = [], BACKENDS["triton"].load()
    counted = operations._replace(attend_recall=lambda *a, **kw: taken.append(a) or operations.attend_recall(*a, **kw))
    monkeypatch.setitem(BACKENDS, "triton", replace(BACKENDS["triton"], imports=lambda: counted, _loaded=[]))
    inputs = [x.to(DEVICE) for x in latent_oracle.random(1, 2, 40, WIDTHS[0], torch.float32)]
    auto, _ = (condense.latent_attention(*inputs, method=METHOD, backend=name) for name in ("auto", "triton"))
    assert len(taken) == (2 if CUDA else 1)
    assert bool(auto.isfinite().all())
