"""FSDP2 and context parallelism on a group of one process: what comes too late or cannot work is refused.

Losses and gradients of several processes: tests/train/test_processes.py, tests/models/test_tensor_parallel.py.
"""

import pytest
import torch
import torch.distributed as dist
from models import tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel

import condense
from condense.models import condensed_layers

IDS = tiny.tokens()


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def shard_attention(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer.self_attn, mesh=mesh)


def test_apply_comes_before_attention_modules_are_sharded(mesh):
    model = tiny.model("llama")
    shard_attention(model, mesh)
    with pytest.raises(ValueError, match=r"FSDPLlamaAttention: call condense\.apply before fully_shard"):
        condense.apply(model, tiny.CCA)
    assert not hasattr(model.config, "condense")


def test_restore_comes_before_attention_modules_are_sharded(mesh):
    model = condense.apply(tiny.model("llama"), tiny.CCA)
    want = tiny.logits(model, IDS)
    shard_attention(model, mesh)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=r"FSDPCondensedLlamaAttention, .* call condense\.restore before fully_shard"):
        condense.restore(model)
    assert [type(module) for module in model.modules()] == classes
    assert condensed_layers(model) == dict.fromkeys(range(3), tiny.CCA)
    assert torch.equal(tiny.logits(model, IDS), want)


def test_decoder_layers_may_be_sharded_before_and_after(mesh):
    model, stock = (tiny.model("llama") for _ in range(2))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    condense.apply(model, tiny.CCA)
    assert torch.equal(tiny.logits(model, IDS), tiny.logits(condense.apply(tiny.model("llama"), tiny.CCA), IDS))
    condense.restore(model)
    assert torch.equal(tiny.logits(model, IDS), tiny.logits(stock, IDS))


@pytest.mark.parametrize("marked", [False, True], ids=["", "with-positions"])
def test_context_parallelism_is_refused(mesh, marked):
    """It would attend within each process's part of a text: alone, or as packed documents by its positions."""
    model = condense.apply(tiny.model("llama"), tiny.CCA)
    want, ids = tiny.logits(model, IDS), IDS[:, :40].clone()
    positions = {"position_ids": torch.arange(40)[None].expand(len(ids), -1)} if marked else {}
    with (
        # outside, as PyTorch 2.11 does not leave it after an error
        context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]),
        pytest.raises(ValueError, match="context parallelism cannot be condensed"),
    ):
        model(ids, use_cache=False, **positions)
    assert torch.equal(tiny.logits(model, IDS), want)
