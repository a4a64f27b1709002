"""Loaded by processes of their own; functions import condense, so that they can do without it first."""

import sys

import torch
from transformers import AutoModelForCausalLM


@torch.no_grad()
def without_and_with_condense(folder, names):
    ids = torch.load(folder / "ids.pt")

    def loaded(name):
        try:
            model = AutoModelForCausalLM.from_pretrained(folder / name)
        except ValueError as error:
            return str(error)
        return model(ids).logits, type(next(m for m in model.modules() if hasattr(m, "layer_idx"))).__name__

    result = {"without": {name: loaded(name) for name in names}}
    assert "condense" not in sys.modules
    # condense is imported by what the pickle names
    result["pickled"] = torch.load(folder / "module.pt", weights_only=False)(ids).logits
    import condense  # noqa: F401

    result["with"] = {name: loaded(name) for name in names}
    torch.save(result, folder / "fresh.pt")


def import_peft_after_condense(folder):
    from condense.models import condensed_layers

    assert "peft.peft_model" not in sys.modules
    from peft import AutoPeftModelForCausalLM

    assert len(condensed_layers(AutoPeftModelForCausalLM.from_pretrained(folder))) == 3


def compute_on_a_rank(folder, *names):
    """What one of two processes that share a model's heads saves: what it computed, gradients of whole weights."""
    import torch.distributed as dist
    from models import tiny

    import condense  # noqa: F401  (loads saved models condensed)

    results = {}
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64, tp_plan="auto").eval()
        ids = tiny.tokens().to(model.device)
        cache = tiny.filled(model, ids)
        result = {
            "heads": model.model.layers[0].self_attn.o_proj.weight.to_local().shape[1],
            "logits": tiny.logits(model, ids), "chunks": tiny.in_chunks(model, ids, tiny.CHUNKS),
            "tokens": tiny.generate(model, ids),
            "entries": [max(layer.state.entries, key=torch.Tensor.numel) for layer in cache.layers],
        }  # fmt: skip
        model.train()(ids, labels=ids, use_cache=False).loss.backward()
        gradients = {key: p.grad for key, p in model.named_parameters()}
        result["gradients"] = {key: x.full_tensor() if hasattr(x, "full_tensor") else x for key, x in gradients.items()}
        results[name] = result
    results = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, results)
    torch.save(results, folder / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()
