"""A method per layer on a CUDA device (collected only there): graphs give the growing cache's tokens."""

import pytest
import torch
from gpu.test_graph import METHODS, agree
from models import tiny

import condense
from condense.models import condensed_layers

RECALL = condense.Recall(group_size=16, window=48, num_recall=2)
CHOICES = {
    "recall-host-cca-window": (
        "llama",
        {0: RECALL.replace(store="host"), 1: METHODS["streaming"], "rest": METHODS["streaming-llm"]},
    ),
    "dense-recall-dga": ("llama", {"1": condense.Dense(), "2": METHODS["dga"], "rest": RECALL}),
    "recall-stock": ("llama", {-1: RECALL}),
    "latents": ("deepseek_v3", {0: condense.LCA(window=64), -1: RECALL, "rest": condense.Dense()}),
}


@pytest.fixture(params=CHOICES.values(), ids=CHOICES)
def model(request):
    name, choice = request.param
    model = tiny.model(name, torch.float32, max_position_embeddings=1024).to("cuda")
    return condense.apply(model, choice)


def _prompts():
    ids, mask = (x.cuda() for x in tiny.left_padded([tiny.tokens(1, n, seed=n)[0] for n in (150, 101)]))
    others = tiny.tokens(2, 130, seed=9).cuda()
    return (None, ids, mask), (64, others, torch.ones_like(others))


def _generate(model, ids, mask, **settings):
    settings = {"max_new_tokens": 100, "do_sample": False, "pad_token_id": 1} | settings
    return model.generate(ids, attention_mask=mask, **settings)


def test_a_decoder_and_a_replayed_generate(model, graphs):
    decoder = condense.GraphDecoder(model, batch_size=2, max_length=512)
    for chunk, ids, mask in _prompts():
        want = _generate(model, ids, mask, cache_implementation="dynamic")
        agree(decoder.generate(ids, mask, max_new_tokens=100, chunk=chunk), want, model, mask)
        before = len(graphs)
        agree(_generate(model, ids, mask), want, model, mask)
        assert len(graphs) == before + 1
    assert decoder._graph is not None


@torch.no_grad()
def test_pieces_are_the_whole_in_bfloat16():
    """As far from float32's logits as one forward is, on the kernels of a width that they have."""
    sizes = {"head_dim": 64, "hidden_size": 64, "max_position_embeddings": 1024}
    choice = {0: RECALL, 1: METHODS["cca"], "rest": METHODS["streaming-llm"]}
    exact, low = (
        condense.apply(tiny.model("llama", dtype, **sizes).to("cuda"), choice)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert len(set(condensed_layers(low).values())) == 3
    ids = tiny.tokens(1, 430, seed=4).cuda()
    want, eager = (tiny.logits(model, ids) for model in (exact, low))
    got = tiny.in_chunks(low, ids, (130, 1, 99, *[1] * 200))
    assert (got - want).abs().mean() <= 1.5 * (eager - want).abs().mean()
