"""One of two processes that share a model's heads; started by test_tensor_parallel.py. Saves what it computed.

On the first two GPUs where there are so many, else on the CPU.
"""

import torch
import torch.distributed as dist
from models import tiny
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import condense  # noqa: F401  (loads saved models condensed)


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def main(folder, *names):
    results = {}
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64, tp_plan="auto").eval()
        ids = tiny.tokens().to(model.device)
        cache = tiny.filled(model, ids)
        result = {
            "heads": model.model.layers[0].self_attn.o_proj.weight.to_local().shape[1],
            "logits": tiny.logits(model, ids), "chunks": tiny.in_chunks(model, ids, tiny.CHUNKS),
            "tokens": tiny.generate(model, ids), "entries": [layer.state.entries[0] for layer in cache.layers],
        }  # fmt: skip
        model.train()(ids, labels=ids, use_cache=False).loss.backward()
        result["gradients"] = {key: whole(p.grad) for key, p in model.named_parameters()}
        results[name] = result
    results = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, results)
    torch.save(results, folder / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()
