"""Two processes with half of the heads each compute what one does, with the same anchors on both."""

import pytest
import torch
from fresh import run_ranks
from models import tiny, two_ranks
from torch import nn
from transformers import AutoModelForCausalLM

import condense
from condense.models.sharding import head_group

NAMES = ("minicpm3", "deepseek_v2", "glm4_moe_lite", "llama")
# two ranks want two GPUs, or none
DEVICE = "cuda" if torch.cuda.device_count() > 1 else "cpu"
IDS = tiny.tokens().to(DEVICE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for name in NAMES:
        condense.apply(tiny.model(name), tiny.METHODS["lca"]).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def models(folder):
    """Loaded like those of the ranks, which make their rotary frequencies where they load."""
    return {
        name: AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64, device_map=DEVICE).eval()
        for name in NAMES
    }


@pytest.fixture(scope="module")
def ranks(folder):
    devices = {} if DEVICE == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    run_ranks(2, two_ranks.main, folder, *NAMES, **devices)
    return [torch.load(folder / f"rank{rank}.pt", map_location=DEVICE) for rank in (0, 1)]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_give_what_one_gives(models, ranks, name):
    model = models[name]
    want = tiny.logits(model, IDS)
    tokens = tiny.generate(model, IDS)
    for rank in ranks:
        result = rank[name]
        assert result["heads"] < model.model.layers[0].self_attn.o_proj.weight.shape[1]
        torch.testing.assert_close(result["logits"], want, **tiny.exact(model))
        torch.testing.assert_close(result["chunks"], want, **tiny.exact(model))
        assert torch.equal(result["tokens"], tokens)


@pytest.mark.parametrize("name", NAMES[:3])
def test_both_ranks_hold_the_same_latents_bit_for_bit(ranks, name):
    for a, b in zip(ranks[0][name]["entries"], ranks[1][name]["entries"], strict=True):
        assert a.numel() > 0
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_learn_what_one_learns(models, ranks, name):
    model = models[name].train()
    model.zero_grad()
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    # transformers takes the loss in float32
    for key, parameter in model.named_parameters():
        for rank in ranks:
            error = (rank[name]["gradients"][key] - parameter.grad).abs().max()
            assert error <= 1e-5 * parameter.grad.abs().max(), key
    model.eval()


def test_heads_that_are_missing_without_a_mesh_are_refused():
    module = nn.Module()
    module.num_heads, module.kv_b_proj = 4, nn.Linear(2, 2)
    assert head_group(module, 4) is None
    with pytest.raises(ValueError, match=r"2 of 4 heads are on this rank .* load the model with tp_plan='auto'"):
        head_group(module, 2)
