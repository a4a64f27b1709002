"""On a CUDA device (collected only there): a growing cache decodes by the step, as a static one, without a wait."""

import torch
from gpu.running import SELECT, condensed, methods, no_waiting
from grids import fixture_of
from layers import Counting, read_request
from models import tiny
from oracles import oracle

from condense.caches import CondensedLayer, StaticCondensedLayer
from condense.ops import NewToken

METHODS = methods("cca", "lca", "entries-8", "streaming-llm", "dga") | {"dga-prompt": SELECT}
method = fixture_of(METHODS)


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
    model = condensed(method)
    ids = tiny.tokens(2, 102).cuda()
    cache = tiny.filled(model, ids[:, :100])
    tiny.in_chunks(model, ids[:, 100:], (1, 1), cache)
    assert all(layer._ring is not None for layer in cache.layers)
    q, k, v = (torch.randn(2, heads, 1, 8, device="cuda") for heads in (4, 2, 2))
    with no_waiting(), Counting() as counting:
        for _ in range(100):
            cache.layers[0].step(NewToken(q, k, v), scale=0.3)
    assert set(counting.names) <= {"aten.empty.memory_format", "aten.constant_pad_nd.default"}
    assert counting.names.count("aten.empty.memory_format") == 3 * 100
