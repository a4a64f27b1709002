"""FlexAttention with our mask: the right keys, and no block that nobody looks at. Run uncompiled, in float64."""

import pytest
import torch
import torch.nn.functional as F
from oracles import oracle
from speed import baselines
from speed.problems import HeadShape, Setting, pooled
from two_sources import attend_to

import condense

SETTING = Setting(HeadShape(4, 2, 16, 16), 1, torch.float64, torch.device("cpu"), 0)
METHODS = {
    "dense": condense.Dense(),
    "cca": condense.CCA(group_size=4, window=100),
    "log_size": condense.CCA(group_size=2, window=1, rep_bias="log_size"),
    "streaming_llm": condense.StreamingLLM(sink=4, window=130),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("length", [256, 300])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_output_is_ours_and_blocks_are_those_that_somebody_sees(method, length, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)
    inputs = SETTING.inputs(length)
    sources = pooled(method, inputs)
    attend = baselines.flex_attention(sources, length, scale=inputs.scale)
    want = attend_to(sources, inputs.q, scale=inputs.scale)[0]
    # the bias is float32 there
    torch.testing.assert_close(attend(inputs.q, *baselines.joined_keys(sources)), want, rtol=0, atol=1e-6)
    mask = baselines.block_mask(sources, length)
    size, M = baselines.FLEX_BLOCK, sources.entries.k.shape[2]
    P = M + -M % size
    seen = torch.zeros(length, P + length)
    for t in range(length):
        groups, exact = oracle.visible(method, t)
        if method.name == "streaming_llm" and len(exact) <= t:
            # what drops tokens keeps its first ones as entries of their own
            groups, exact = exact[:M], exact[M:]
        seen[t, list(groups)] = 1
        seen[t, [P + i for i in exact]] = 1
    padded = F.pad(seen, (0, -seen.shape[1] % size, 0, -length % size))
    wanted = padded.unflatten(0, (-1, size)).unflatten(2, (-1, size)).amax((1, 3))
    assert torch.equal(mask.to_dense()[0, 0].float(), wanted)
