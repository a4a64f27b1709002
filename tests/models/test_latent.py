"""Multi-head latent attention in models: what reaches the cache, how up-projections are found, what is refused."""

from functools import partial

import pytest
import torch
from grids import grid
from models import tiny
from oracles import latent_oracle
from torch import nn
from transformers import AutoModelForCausalLM

import condense
from condense.models import attention as models_attention
from condense.models.inspect import inspect

IDS = tiny.tokens()
LCA = tiny.METHODS["lca"]
DEFINED = [
    *((name, "lca") for name in tiny.LATENT),
    *(("deepseek_v3", method) for method in ("cca", "streaming-6", "dga", "dga-streaming-log", "streaming-llm")),
]


@pytest.mark.parametrize(("name", "method"), DEFINED)
def test_layers_compute_the_definition_with_the_models_own_scale(monkeypatch, name, method):
    model = condense.apply(tiny.model(name), tiny.METHODS[method])
    calls, stock = [], models_attention.condensed_latents

    def record(call, q, k, v, entries):
        out = stock(call, q, k, v, entries)
        calls.append((call.module, q.detach(), entries.detach()[:, 0], call.scale, out))
        return out

    monkeypatch.setattr(models_attention, "condensed_latents", record)
    model(IDS[:1], use_cache=False)
    assert [call[0].layer_idx for call in calls] == [0, 1, 2]
    for module, q, entries, scale, out in calls:
        assert scale == module.scaling
        assert (abs(scale * 12**0.5 - 1) > 0.1) == (name == "deepseek_v2")  # YaRN's own
        weight = module.kv_b_proj.weight
        w_uk, w_uv = weight.unflatten(0, (4, 14)).mT.split([8, 6], -1)
        latents = latent_oracle.Latents(*q.split([8, 4], -1), *entries.split([12, 4], -1), w_uk, w_uv)
        want, _ = latent_oracle.attention(latents, method=tiny.METHODS[method], scale=scale)
        torch.testing.assert_close(out, want, rtol=1e-11, atol=1e-11)
        # the up-projection makes the new tokens' keys and values, the representatives' and the pooling weights
        got, want = (torch.autograd.grad(x.square().sum(), weight, retain_graph=True) for x in (out, want))
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_no_step_expands_the_past_and_chunks_representatives_and_window_alone(expanded):
    tiny.generate(condense.apply(tiny.model("deepseek_v3"), LCA), IDS)
    # the prompt's entries in each layer; its tokens came expanded
    assert expanded == [13] * 3
    expanded.clear()
    model = condense.apply(tiny.model("deepseek_v3", kv_lora_rank=7), LCA)
    # as wide as a head's key and value together: nothing is gained by absorbing
    tiny.in_chunks(model, tiny.tokens(1, 200), (100, 100))
    assert expanded[:6] == [23, 23, 23, 48, 28, 48]
    assert max(expanded) < 100


class Quantized(nn.Module):
    """Integers and a scale, as quantised layers hold them."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        self.scale = weight.abs().max() / 127
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return x @ self.whole.to(x.dtype).mT

    def bias(self):  # a method, as in PyTorch's own quantised layers
        return None

    @property
    def whole(self):
        return self.weight.double() * self.scale


class Gathered(nn.Linear):
    """The weight is there only while the layer runs, as in sharded training."""

    def __init__(self, linear):
        nn.Module.__init__(self)
        self.whole = nn.Parameter(linear.weight.detach().clone())
        self.weight = nn.Parameter(linear.weight.new_zeros(0))
        self.bias = None

    def forward(self, x):
        return nn.functional.linear(x, self.whole)


@pytest.mark.parametrize("way", ["hook", "pre-hook", "forward", "bias"])
def test_what_changes_a_projection_from_outside_is_read_or_refused(way):
    model = condense.apply(tiny.model("deepseek_v3", num_hidden_layers=1), condense.Dense())
    linear = model.model.layers[0].self_attn.kv_b_proj
    if way == "bias":
        linear.bias = nn.Parameter(torch.ones(linear.out_features, dtype=torch.float64))
        tiny.refused("kv_b_proj must have no bias.*leave lora_bias out", tiny.logits, model, IDS)
        return
    before, forward = tiny.logits(model, IDS), linear.forward
    if way == "hook":
        linear.register_forward_hook(lambda module, args, out: 2 * out)
    elif way == "pre-hook":
        linear.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    else:
        linear.forward = lambda x: 2 * forward(x)
    whole = tiny.logits(model, IDS)
    assert not torch.allclose(whole, before)
    torch.testing.assert_close(tiny.in_chunks(model, IDS, tiny.CHUNKS), whole, **tiny.exact(model))


@grid(4, name=tiny.LATENT, kind={"quantized": Quantized, "gathered": Gathered})
def test_projections_that_only_run(name, kind):
    model, grads = condense.apply(tiny.model(name), LCA), []
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = kind(layer.self_attn.kv_b_proj)
    full = tiny.logits(model, IDS)
    torch.testing.assert_close(tiny.in_chunks(model, IDS, tiny.CHUNKS), full, **tiny.exact(model))
    tokens = tiny.generate(model, IDS)
    assert torch.equal(tokens, tiny.generate(model, IDS, use_cache=False))
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    for layer in model.model.layers:
        grads.append(layer.self_attn.kv_b_proj.whole.grad)
        weight = layer.self_attn.kv_b_proj.whole.detach()
        layer.self_attn.kv_b_proj = nn.Linear(*weight.shape[::-1], bias=False, dtype=torch.float64)
        layer.self_attn.kv_b_proj.weight.data = weight
    torch.testing.assert_close(tiny.logits(model, IDS), full, **tiny.exact(model))
    assert torch.equal(tiny.generate(model, IDS), tokens)
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    for layer, grad in zip(model.model.layers, grads, strict=True):
        if kind is Gathered:
            torch.testing.assert_close(grad, layer.self_attn.kv_b_proj.weight.grad, **tiny.exact(model))


@pytest.mark.parametrize("name", tiny.LATENT)
def test_a_prompt_selection_is_refused(name):
    refused = r"DGA\(.*'prompt'.*latents \(MLA\).*: use selection='streaming'"
    config = tiny.config(name, condense={"methods": [{"method": tiny.SELECT.to_dict(), "layers": [0]}]})
    calls = [partial(call, tiny.model(name), tiny.SELECT) for call in (condense.apply, partial(inspect, length=100))]
    for call in (*calls, partial(AutoModelForCausalLM.from_config, config)):
        tiny.refused(refused, call)
