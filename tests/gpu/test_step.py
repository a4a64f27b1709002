"""The decode step on a CUDA device: replayed without a wait, on addresses beyond 32 bits, and in growing caches."""

import pytest
import torch
from gpu import running
from grids import fixture_of
from layers import Counting, read_request
from models import tiny
from oracles import oracle
from triton_kernels.test_step import DTYPES, SELECT, after_prompts, copy_of, decode, empty_state, same, some_step

import condense
from condense.caches import CondensedLayer, StaticCondensedLayer
from condense.methods import step_settings
from condense.ops.step import NewToken, StepCall, StepState
from condense.ops.triton import step as triton_step

METHODS = running.methods("lca", "entries-4", "entries-8", "dga")
METHODS["dga-streaming"] = condense.DGA(gamma=0.5, window=64, summary="streaming")


def captured(now, state, method, scale):
    triton_step.step(StepCall(NewToken(*now), copy_of(state), step_settings(method), scale=scale))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, triton_step.step(StepCall(NewToken(*now), state, step_settings(method), scale=scale))


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_replayed_graph_decodes_as_eager_steps_do(dtype, method):
    """Across group boundaries, without a wait for the device."""
    L, D = 300, 128
    q, k, v = (x.cuda() for x in oracle.random_qkv(2, 8, 2, L, D, D, dtype=dtype))
    eager, replayed = (empty_state(method, 2, 2, D, D, L, dtype=dtype) for _ in range(2))
    want = decode(method, q, k, v, eager)
    now = [x[:, :, :1].clone() for x in (q, k, v)]
    (graph, out), outs = captured(now, replayed, method, D**-0.5), []
    with running.no_waiting():
        for t in range(L):
            for x, whole in zip(now, (q, k, v), strict=True):
                x.copy_(whole[:, :, t : t + 1])
            graph.replay()
            outs.append(out.clone())
    assert torch.equal(torch.cat(outs, 2), want)
    assert same(eager, replayed)


def test_a_replayed_graph_goes_on_from_prompts_of_any_lengths():
    """Captured once; where a row's chunks begin and which of its entries have a bias is read on the device."""
    method = SELECT.replace(min_focal=20)
    q, k, v = (x.cuda() for x in oracle.random_qkv(3, 8, 2, 160, 128, 128, dtype=torch.bfloat16))
    now = [x[:, :, :1].clone() for x in (q, k, v)]
    _, state = after_prompts(method, q, k, v, (120, 77, 1), 160)
    graph, out = captured(now, state, method, 0.3)
    for lengths in ((120, 77, 1), (3, 120, 64)):
        _, eager = after_prompts(method, q, k, v, lengths, 160)
        for mine, new in zip(state, eager, strict=True):
            mine.copy_(new)
        for t in range(120, 160):
            for x, whole in zip(now, (q, k, v), strict=True):
                x.copy_(whole[:, :, t : t + 1])
            with running.no_waiting():
                graph.replay()
            assert torch.equal(out, triton_step.step(StepCall(NewToken(*now), eager, step_settings(method), scale=0.3)))
        assert same(state, eager)


def test_addresses_beyond_32_bits():
    """The second row starts more than 2^31 elements behind the first; takes 4.3 GB."""
    now, state, plan = some_step(torch.bfloat16, seen=24)
    far = torch.empty(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    B, K, M, D = state.entries_k.shape
    moved = []
    for i, x in enumerate((state.entries_k, state.entries_v)):
        place = far.as_strided((B, K, M, D), (2**31, M * D, D, 1), i * 2**18)
        moved.append(place.copy_(x))
    other = StepState(*moved, *(x.clone() for x in state[2:]))
    assert torch.equal(
        triton_step.step(StepCall(NewToken(*now), other, plan, scale=0.25)),
        triton_step.step(StepCall(NewToken(*now), state, plan, scale=0.25)),
    )
    assert same(state, other)


GROWING = running.methods("cca", "lca", "entries-8", "streaming-llm", "dga") | {"dga-prompt": running.SELECT}
method = fixture_of(GROWING)


def test_a_layer_in_bfloat16_gives_what_a_static_one_does(method):
    """To the rounding of the output: the same entries, summed in another order. A model would make much of a little."""
    q, k, v = (x.cuda() for x in oracle.random_qkv(2, 8, 2, 300, 128, 128, dtype=torch.bfloat16))
    growing, static = CondensedLayer(method), StaticCondensedLayer(method, 300)
    for layer in (growing, static):
        layer.read(k[:, :, :100], v[:, :, :100], read_request(q[:, :, :100], scale=0.1))
    for t in range(100, 300):
        now = [x[:, :, t : t + 1] for x in (q, k, v)]
        got, want = (layer.step(NewToken(*now), scale=0.1).float() for layer in (growing, static))
        assert float((got - want).abs().max()) <= torch.finfo(torch.bfloat16).eps * float(v.abs().max())
    for mine, theirs in zip(growing.state.entries, static.buffers.entries(static.settings), strict=True):
        assert torch.equal(mine, theirs[:, :, : mine.shape[2]])


def test_a_step_neither_waits_nor_copies(method):
    """Over several growths of the buffers; their padding and memory for results are all that is made."""
    model = running.condensed(method)
    ids = tiny.tokens(2, 102).cuda()
    cache = tiny.filled(model, ids[:, :100])
    tiny.in_chunks(model, ids[:, 100:], (1, 1), cache)
    assert all(layer._ring is not None for layer in cache.layers)
    q, k, v = (torch.randn(2, heads, 1, 8, device="cuda") for heads in (4, 2, 2))
    with running.no_waiting(), Counting() as counting:
        for _ in range(100):
            cache.layers[0].step(NewToken(q, k, v), scale=0.3)
    assert set(counting.names) <= {"aten.empty.memory_format", "aten.constant_pad_nd.default"}
    assert counting.names.count("aten.empty.memory_format") == 3 * 100
