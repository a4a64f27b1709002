"""MInference's patterns against plain loops, head by head, and sparse prefill over the keys of latents.

Shapes: H query heads, K KV heads, L tokens, D width; d_c, d_r, d_n, d_v widths of latents and heads' parts.
"""

import json
import math

import pytest
import torch
from models import tiny

import condense
from condense.methods import AShape, BlockSparse, FlexPrefill, MInference, VerticalSlash
from condense.ops import BLOCK

H, K, D = 4, 2, 8
SCALE = D**-0.5
PATTERNS = (
    "a_shape:sink=60,window=150",
    "block_sparse:blocks=2",
    "vertical_slash:vertical=40,slash=110",
    "a_shape:sink=1,window=1",
)


def qkv(L, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, n, L, D, generator=generator, dtype=torch.float64) for n in (H, K, K))
    return 3 * q, k, v


def masked_attention(q, k, v, seen):
    """Attention of one row where seen bool ``[H, L, L]``."""
    k, v = (x.repeat_interleave(H // K, 1) for x in (k, v))
    return (SCALE * q @ k.mT).masked_fill(~seen, -math.inf).softmax(-1) @ v


def seen_by_loops(method, q, k):
    """What `AShape` and `BlockSparse` let each query see, bool ``[H, L, L]``, block by block."""
    L = q.shape[2]
    N = -(-L // BLOCK)
    blocks = torch.zeros(H, N, N, dtype=torch.bool)
    tokens = [range(j * BLOCK, min(L, (j + 1) * BLOCK)) for j in range(N)]
    for h in range(H):
        for i in range(N):
            if isinstance(method, AShape):
                for j in range(i + 1):
                    near = tokens[i][0] - tokens[j][-1] < method.window
                    blocks[h, i, j] = near or tokens[j][0] < method.sink
                continue
            mean_q = q[0, h, tokens[i]].mean(0)
            scores = [float(mean_q @ k[0, h // (H // K), tokens[j]].mean(0)) for j in range(i + 1)]
            for j in sorted(range(i + 1), key=lambda j: -scores[j])[: method.blocks]:
                blocks[h, i, j] = True
            blocks[h, i, i] = True
    block = torch.arange(L) // BLOCK
    return blocks[:, block][:, :, block] & torch.ones(L, L).tril().bool()


@pytest.mark.parametrize("method", [AShape(sink=60, window=100), AShape(sink=129, window=1), BlockSparse(blocks=2)])
@pytest.mark.parametrize("L", [5 * BLOCK, 4 * BLOCK + 37])
def test_patterns_see_what_plain_loops_choose(method, L):
    q, k, v = qkv(L)
    seen = seen_by_loops(method, q, k)
    assert 0.2 < seen.double().mean() / 0.5 < 0.97, "some pairs are left out, and not nearly all"
    torch.testing.assert_close(condense.attention(q, k, v, method=method), masked_attention(q, k, v, seen))


def test_each_head_has_its_pattern():
    q, k, v = qkv(4 * BLOCK + 37)
    out = condense.attention(q, k, v, method=MInference(patterns=PATTERNS))
    for head, text in enumerate(PATTERNS):
        alone = condense.attention(q, k, v, method=text.split("@")[0])
        torch.testing.assert_close(out[:, head], alone[:, head])
    one = condense.attention(q, k, v, method=MInference(patterns=PATTERNS[1:2]))
    torch.testing.assert_close(one, condense.attention(q, k, v, method=BlockSparse(blocks=2)))


def test_patterns_are_saved_and_checked():
    method = MInference(patterns=PATTERNS)
    again = condense.Method.parse(json.loads(json.dumps(method.to_dict())))
    assert again == method
    assert hash(again) == hash(method)
    assert condense.Method.parse("minference:patterns=a_shape") == MInference(patterns=("a_shape",))
    for patterns, message in (
        ((), "condense analyze patterns"),
        (3, "condense analyze patterns"),
        (("cca",), "a_shape, vertical_slash or block_sparse"),
        ((AShape(),), "a_shape, vertical_slash or block_sparse"),
        (("block_sparse:blocks=0",), "blocks"),
    ):
        with pytest.raises(ValueError, match=message):
            MInference(patterns=patterns)
    q, k, v = qkv(40)
    with pytest.raises(ValueError, match=r"one for each of 4 query heads, got 3"):
        condense.attention(q, k, v, method=MInference(patterns=PATTERNS[:3]))


SPARSE = [
    FlexPrefill(gamma=0.3, tau=0.0, min_budget=1),
    FlexPrefill(gamma=0.3, tau=1.0, min_budget=1),
    VerticalSlash(vertical=5, slash=3),
    MInference(patterns=PATTERNS),
]


@pytest.mark.parametrize("method", SPARSE, ids=["flex-lines", "flex-by-query", "vertical-slash", "minference"])
def test_latents_are_read_by_the_keys_that_they_expand_to(method):
    L, d_c, d_r, d_n, d_v = 4 * BLOCK + 37, 12, 4, 6, 5
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q_nope, q_rope, c, k_rope = 3 * random(1, H, L, d_n), 3 * random(1, H, L, d_r), random(1, L, d_c), random(1, L, d_r)
    w_uk, w_uv = random(H, d_c, d_n) / 3, random(H, d_c, d_v)
    out = condense.latent_attention(q_nope, q_rope, c, k_rope, w_uk, w_uv, method=method)
    q = torch.cat([q_nope, q_rope], -1)
    k = torch.cat([c[:, None] @ w_uk, k_rope[:, None].expand(-1, H, -1, -1)], -1)
    want = condense.attention(q, k, c[:, None] @ w_uv, method=method)
    assert (want - condense.attention(q, k, c[:, None] @ w_uv, method=condense.Dense())).abs().max() > 0.1
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
@torch.no_grad()
def test_an_mla_model_reads_its_prompt_sparsely_and_decodes_densely(name):
    model, ids = tiny.model(name), tiny.tokens(2, 5 * BLOCK + 30)
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    mask[1, :140] = 0
    stock = model.generate(ids, attention_mask=mask, **settings)
    with condense.use(model, FlexPrefill(gamma=1.0)):
        assert torch.equal(model.generate(ids, attention_mask=mask, **settings), stock), "it sees everything"
    dense = model(ids).logits
    with condense.use(model, FlexPrefill(gamma=0.1, tau=0.0, min_budget=1)):
        output = model(ids, use_cache=True)
        assert (output.logits[:, -1] - dense[:, -1]).abs().max() > 1e-3
        cache = output.past_key_values
        assert cache.get_seq_length() == ids.shape[1]
    with condense.use(model, "dense"):
        kept = model(ids, use_cache=True).past_key_values
        assert condense.cache_nbytes(cache) == condense.cache_nbytes(kept)
