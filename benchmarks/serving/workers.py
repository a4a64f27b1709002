"""Tasks for the process of each GPU, which is given its worker."""

import torch

from condense.serving.blocks import blocks_of_request


def blocks_of(worker, length, batch):
    """Blocks of a condensed request, and those that it needs besides while it is read; None for dense attention."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    served = next((layer.model for layer in layers if hasattr(layer, "served")), None)
    if served is None:
        return None
    one = blocks_of_request(served, length).blocks
    # a piece of a prompt needs more pages of windows for itself, taken from the oldest prompt in the cache
    return one, blocks_of_request(served, length, batch).blocks - one


def _slots(worker):
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    return [layer.slots for layer in layers if getattr(layer, "slots", None) is not None]


def new_copies(worker, rows):
    """Slots that name another record than when this was asked last; None if there are no slots."""
    tags = [slots.tags.clone() for slots in _slots(worker) if len(slots.tags)]
    before, worker.tags_before = getattr(worker, "tags_before", tags), tags
    changed = [(x != y)[:rows].any(-1).sum(-1).float().mean() for x, y in zip(tags, before, strict=True)]
    return float(sum(changed)) / len(changed) if changed else None


@torch.inference_mode()  # as vLLM allocated them
def forget_copies(worker):
    for slots in _slots(worker):
        slots.held.fill_(-1)


def leave_out_model(worker, hidden):
    def nothing(input_ids, **inputs):
        return torch.zeros(input_ids.shape[0], hidden, dtype=torch.bfloat16, device=input_ids.device)

    worker.model_runner.model.forward = nothing


def take_back_model(worker):
    del worker.model_runner.model.forward


def fill_pages(worker):
    done, runner = set(), worker.model_runner
    for cache in runner.kv_caches:
        if cache.data_ptr() not in done:
            done.add(cache.data_ptr())
            if cache.itemsize == 1:
                # whatever numbers they are read as, these bytes make finite ones
                cache.view(torch.uint8).random_(0, 64)
            else:
                cache.normal_(std=0.5)
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    for store in (layer.store for layer in layers if getattr(layer, "store", None) is not None):
        # drawn on the device: a host takes a minute for as many
        part = torch.randint(64, (min(store.numel(), 1 << 28),), dtype=torch.uint8, device=runner.device)
        for piece in store.view(-1).split(len(part)):
            piece.copy_(part[: len(piece)])
