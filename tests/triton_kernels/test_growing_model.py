"""Models whose growing caches decode on the Triton step: padded rows get the tokens of `extend`.

Interpreted in float32 on a CPU, compiled on a GPU.
"""

import pytest
import torch
from models import tiny
from triton_kernels.test_growing_layer import DEVICE, Reading, stepping  # noqa: F401

import condense
from condense.caches import CondensedLayer
from condense.models import layers

PAIRS = {"llama-dga": ("llama", "dga-streaming-log"), "deepseek_v3-lca": ("deepseek_v3", "lca")}
# rows and layers keep different numbers of tokens
PAIRS |= {f"{name}-reread": (name, "reread") for name in ("llama", "deepseek_v3")}
METHODS = tiny.METHODS | {"reread": condense.Reread(share=0.4, piece=8, sink=1, window=2)}
ROWS = [tiny.tokens(1, n, seed=n)[0] for n in (27, 18)]


def _condensed(name, method):
    """Two layers, of one KV head: the interpreter is slow."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1} if name == "llama" else {}
    model = tiny.model(name, torch.float32, num_hidden_layers=2, **heads)
    return condense.apply(model, METHODS[method]).to(DEVICE)


def _generate(model, ids, **kwargs):
    kwargs = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
    return tiny.generate(model, ids.to(DEVICE), return_dict_in_generate=True, **kwargs)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_tokens_are_those_of_extend(monkeypatch, pair):
    model, (ids, mask) = _condensed(*pair), tiny.left_padded(ROWS)
    out = _generate(model, ids, attention_mask=mask)
    assert all(type(x) is CondensedLayer and x._ring is not None for x in out.past_key_values.layers)
    # layers that read every token as a piece
    monkeypatch.setattr(layers, "CondensedLayer", Reading)
    want = _generate(model, ids, attention_mask=mask)
    assert {type(x) for x in want.past_key_values.layers} == {Reading}
    assert torch.equal(out.sequences, want.sequences)


def test_tensor_parallel_latents_are_read(monkeypatch):
    """The step would average queries over its own heads only."""
    model = _condensed("deepseek_v3", "lca")
    ids = ROWS[0][None]
    want = _generate(model, ids).sequences
    monkeypatch.setattr("condense.models.attention.head_mesh", lambda *args: "some ranks")
    out = _generate(model, ids)
    assert torch.equal(out.sequences, want)
    assert all(layer._ring is None for layer in out.past_key_values.layers)


@pytest.fixture
def stepped():
    """A model, ids of 27 tokens, and a cache that has read 20 of them and one by a step."""
    model, ids = _condensed("llama", "cca"), ROWS[0][None].to(DEVICE)
    cache = tiny.filled(model, ids[:, :20])
    with torch.no_grad():
        model(ids[:, 20:21], past_key_values=cache)
    return model, ids, cache


def test_gradients_go_by_extend(stepped):
    model, ids, cache = stepped
    assert cache.layers[0]._ring is not None
    model(ids[:, 21:22], past_key_values=cache).logits.sum().backward()
    assert cache.layers[0]._ring is None
    assert all(x.grad is not None for x in model.parameters() if x.requires_grad)


@torch.no_grad()
def test_documents_and_short_masks_are_refused_at_a_step(stepped):
    model, ids, cache = stepped
    with pytest.raises(ValueError, match="cannot be cached"):
        model(ids[:, 21:22], past_key_values=cache, cu_seq_lens_q=torch.tensor([0, 1], device=DEVICE))
    with pytest.raises(ValueError, match="cover all tokens so far"):
        model(ids[:, 21:22], past_key_values=cache, attention_mask=torch.ones(1, 1, device=DEVICE).long())
    assert cache.get_seq_length() == 21
