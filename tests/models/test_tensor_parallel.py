"""Two processes with half of the heads each compute what one does; FSDP2 and context parallelism: what comes too late
or cannot work is refused. Losses and gradients of several processes: tests/train/test_processes.py."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from fresh import run_ranks
from models import loading, tiny
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from transformers import AutoModelForCausalLM

import condense
from condense.models import condensed_layers
from condense.models.mla import head_mesh

NAMES = dict.fromkeys(("minicpm3", "deepseek_v2", "glm4_moe_lite", "llama"), tiny.METHODS["lca"])
NAMES["minicpm3-recall"] = {"rest": tiny.RECALL}
# two ranks want two GPUs, or none
DEVICE = "cuda" if torch.cuda.device_count() > 1 else "cpu"
IDS = tiny.tokens().to(DEVICE)
TOKENS = tiny.tokens()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for name, method in NAMES.items():
        condense.apply(tiny.model(name.removesuffix("-recall")), method).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def models(folder):
    """Loaded like those of the ranks, which make their rotary frequencies where they load."""
    load = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float64, device_map=DEVICE)
    return {name: load(folder / name).eval() for name in NAMES}


@pytest.fixture(scope="module")
def ranks(folder):
    devices = {} if DEVICE == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    run_ranks(2, loading.compute_on_a_rank, folder, *NAMES, **devices)
    return [torch.load(folder / f"rank{rank}.pt", map_location=DEVICE) for rank in (0, 1)]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_give_and_learn_what_one_does(models, ranks, name):
    model, results = models[name], [rank[name] for rank in ranks]
    want, tokens, entries = tiny.logits(model, IDS), tiny.generate(model, IDS), [each["entries"] for each in results]
    model.train()(IDS, labels=IDS, use_cache=False).loss.backward()
    for result in results:
        assert result["heads"] < model.model.layers[0].self_attn.o_proj.weight.shape[1]
        torch.testing.assert_close(result["logits"], want, **tiny.exact(model))
        torch.testing.assert_close(result["chunks"], want, **tiny.exact(model))
        assert torch.equal(result["tokens"], tokens)
        # transformers takes the loss in float32
        for key, parameter in model.named_parameters():
            error = (result["gradients"][key] - parameter.grad).abs().max()
            assert error <= 1e-5 * parameter.grad.abs().max(), key
    assert name == "llama" or all(x.numel() > 0 and torch.equal(x, y) for x, y in zip(*entries, strict=True))


def test_heads_that_are_missing_without_a_mesh_are_refused():
    module = nn.Module()
    module.num_heads, module.kv_b_proj = 4, nn.Linear(2, 2)
    assert head_mesh(module, 4) is None
    tiny.refused(r"2 of 4 heads are on this rank .* load the model with tp_plan='auto'", head_mesh, module, 2)


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["apply", "restore"])
def test_apply_and_restore_come_before_attention_modules_are_sharded(mesh, name):
    model = tiny.model("llama")
    if name == "restore":
        condense.apply(model, tiny.CCA)
    want, held = tiny.logits(model, TOKENS), condensed_layers(model)
    for layer in model.model.layers:
        fully_shard(layer.self_attn, mesh=mesh)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=rf"FSDP\w*LlamaAttention.* call condense\.{name} before fully_shard"):
        condense.apply(model, tiny.CCA) if name == "apply" else condense.restore(model)
    assert [type(module) for module in model.modules()] == classes
    assert condensed_layers(model) == held
    assert hasattr(model.config, "condense") == (name == "restore")
    assert torch.equal(tiny.logits(model, TOKENS), want)


def test_decoder_layers_may_be_sharded_before_and_after(mesh):
    model, other = (tiny.model("llama") for _ in range(2))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    for change in (lambda each: condense.apply(each, tiny.CCA), condense.restore):
        assert torch.equal(tiny.logits(change(model), TOKENS), tiny.logits(change(other), TOKENS))


@pytest.mark.parametrize("marked", [False, True], ids=["", "with-positions"])
def test_context_parallelism_is_refused(mesh, marked):
    """It would attend within each process's part of a text: alone, or as packed documents by its positions."""
    model = condense.apply(tiny.model("llama"), tiny.CCA)
    want, ids = tiny.logits(model, TOKENS), TOKENS[:, :40].clone()
    positions = {"position_ids": torch.arange(40)[None].expand(len(ids), -1)} if marked else {}
    with (
        # outside, as PyTorch 2.11 does not leave it after an error
        context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]),
        pytest.raises(ValueError, match="context parallelism cannot be condensed"),
    ):
        model(ids, use_cache=False, **positions)
    assert torch.equal(tiny.logits(model, TOKENS), want)
