"""On a CUDA device (collected only there): a growing cache decodes by the step, as a static one."""

import torch
from gpu.running import SELECT, methods
from grids import fixture_of
from oracles import oracle

from condense.caches import CondensedLayer, StaticCondensedLayer, read_request
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
