"""`rep_bias="matched"`: what the bias is in its limits. The laws of every method run over it in `cases.PLANS`."""

import math

import pytest
import torch
from oracles import oracle

import condense
from condense.functional import extend
from condense.plan import ForwardPlan

EXACT = {"rtol": 1e-10, "atol": 1e-10}
H, K, D, DV = 4, 2, 6, 5
SCALE = 0.7
MATCHED = condense.CCA(group_size=4, window=5, rep_bias="matched")


def biases(method, q, k, v):
    _, state = extend(method, None, q, k, v, scale=SCALE, plan=ForwardPlan(k.shape[2]))
    return state.entries[2][..., 0]


def test_equal_scores_count_as_many_as_there_are_tokens():
    q, k, v = oracle.random_qkv(1, 1, 1, 24, D, DV)
    bias = biases(MATCHED, 0 * q, k, v)
    torch.testing.assert_close(bias, torch.full_like(bias, math.log(4)), **EXACT)


def test_one_dominant_token_counts_once():
    q, k, v = oracle.random_qkv(1, 1, 1, 24, D, DV)
    q[...] = k[:, :, ::4] = 40.0
    bias = biases(MATCHED, q, k, v)
    torch.testing.assert_close(bias, torch.zeros_like(bias), **EXACT)


def test_weighted_keys_have_the_entropy_of_their_weights():
    q, k, v = oracle.random_qkv(1, 1, 1, 24, D, DV)
    scores = SCALE * (q[:, :, 3::4, None] * k.unflatten(2, (6, 4))).sum(-1)
    entropy = torch.distributions.Categorical(logits=scores).entropy()
    torch.testing.assert_close(biases(MATCHED, q, k, v), entropy, **EXACT)


@pytest.mark.parametrize("pooling", ["weighted", "mean", "select", "max"])
def test_groups_of_equal_keys_give_dense_attention_s_weights(pooling):
    q, k, v = oracle.random_qkv(1, H, K, 24, D, DV)
    k, v = (x[:, :, ::4].repeat_interleave(4, 2) for x in (k, v))
    method = condense.CCA(group_size=4, window=4, key_pooling=pooling, value_pooling=pooling, rep_bias="matched")
    dense = condense.attention(q, k, v, method=condense.Dense(), scale=SCALE)
    torch.testing.assert_close(condense.attention(q, k, v, method=method, scale=SCALE), dense, **EXACT)


@pytest.mark.parametrize("pooling", ["weighted", "mean", "select", "max"])
def test_the_summary_query_sees_the_mass_of_all_tokens(pooling):
    # all queries are the summary query, and the last one sees the same sum of weights as dense attention does
    q, k, v = oracle.random_qkv(1, 1, 1, 24, D, DV)
    q = q[:, :, :1].expand(-1, -1, 24, -1)
    method = condense.CCA(group_size=4, window=0, key_pooling=pooling, rep_bias="matched")
    _, lse = condense.attention(q, k, v, method=method, scale=SCALE, return_lse=True)
    _, dense = condense.attention(q, k, v, method=condense.Dense(), scale=SCALE, return_lse=True)
    torch.testing.assert_close(lse[..., 23], dense[..., 23], **EXACT)


def test_dga_refuses_what_it_cannot_match():
    with pytest.raises(ValueError, match="rep_bias='matched' needs selection='streaming', got 'prompt'"):
        condense.DGA(rep_bias="matched", selection="prompt")
