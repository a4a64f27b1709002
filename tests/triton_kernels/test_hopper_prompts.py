"""Prompts by the kernels for Hopper, also interpreted: their warps in turns, their barriers, and their tiles."""

from types import SimpleNamespace

import pytest
import torch
from lanes import CUDA, DEVICE
from oracles import oracle
from speed.budget import judge

import condense
from condense.ops import Source, attend_recall, recall
from condense.ops.hopper import attend as hopper_attend
from condense.ops.hopper import attend_forward, limits
from condense.ops.recall import IndexChoice, Quota, RecallSources, split_keys
from condense.ops.spans import RuleSpans, UniformRule

# query heads, KV heads, left padding of each row
HEADS = {"ratio-4": (4, 1, (0,)), "ratio-1-padded": (2, 2, (0, 37)), "ratio-3": (3, 1, (5, 0))}
CHOICES = {"each": Quota(3), "shared": Quota(least=6, part=1, of=9)}


@pytest.fixture(autouse=True, params=[1, 7], ids="programs-{}".format)
def programs(request, monkeypatch):
    """One program reads all tiles, or 7 share them, whose second round is not full. Gives the variables of the module
    that attends.
    """
    monkeypatch.setattr(hopper_attend, "gpu_of", lambda device: SimpleNamespace(multiprocessors=request.param))
    if CUDA:
        return vars(attend_forward)
    from triton_kernels import interpreted_hopper, ptx

    ptx.install(monkeypatch)
    launch, launch_opened = interpreted_hopper.interpreted(monkeypatch)
    monkeypatch.setattr(hopper_attend, "launch", launch)
    monkeypatch.setattr(hopper_attend, "launch_opened", launch_opened)
    monkeypatch.setattr(limits, "_absence", lambda device, softcap: [])
    return launch.__globals__


def drawn(name, L, widths, dtype):
    H, K, pads = HEADS[name]
    qkv = oracle.random_qkv(len(pads), H, K, L, *widths, dtype=dtype)
    return [x.to(DEVICE) for x in qkv], torch.tensor(pads)


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize(
    ("name", "method", "L", "widths", "dtype"),
    [
        ("ratio-4", condense.Dense(), 150, (64, 64), torch.bfloat16),
        ("ratio-1-padded", condense.CCA(group_size=8, window=70), 290, (96, 64), torch.float16),
        ("ratio-3", condense.CCA(group_size=8, window=20, summary="streaming", rep_bias="matched"), 170, (64, 64),
         torch.bfloat16),
    ],
    ids=["dense", "cca", "matched"],
)  # fmt: skip
def test_attention_is_the_definitions(name, method, L, widths, dtype, side_by_side, programs, monkeypatch):
    monkeypatch.setitem(programs, "_SIDE_BY_SIDE", 1 << 40 if side_by_side else 0)
    qkv, pads = drawn(name, L, widths, dtype)

    def run(backend, *inputs):
        return condense.attention(*inputs, method=method, padding=pads, backend=backend)

    with torch.no_grad():
        got = run("hopper", *qkv)
        want, plain = run("torch", *(x.double() for x in qkv)), run("torch", *qkv)
    verdict = judge([got], [want], [plain])
    assert verdict.passed, verdict


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("name", "g", "L"), [("ratio-4", 16, 150), ("ratio-3", 8, 130)])
def test_open_groups_are_read(name, g, L, choice):
    (q, k, v), pads = drawn(name, L, (64, 64), torch.bfloat16)
    tokens = (L - 20) // g * g
    store, spans = Source(k[:, :, :tokens], v[:, :, :tokens]), RuleSpans(UniformRule(g, 20), -pads, -pads)
    sources, index = RecallSources(store, Source(k, v), spans), split_keys(store.k.unflatten(2, (-1, g)))[0]
    askers = recall.Askers.of_call(sources, L) if choice == "shared" else None

    def run(backend, q, store, window):
        chosen = IndexChoice(q, index, 0.125, CHOICES[choice], askers)
        return attend_recall(q, RecallSources(store, window, spans), chosen, scale=0.125, backend=backend)[0]

    with torch.no_grad():
        got = run("hopper", q, *sources[:2])
        exact = run("torch", q.double(), *(Source(*(x.double() for x in each[:2])) for each in sources[:2]))
        plain = run("torch", q, *sources[:2])
    verdict = judge([got], [exact], [plain])
    assert verdict.passed, verdict
