"""Multi-head latent attention (MLA) in transformers: latents are cached, attention uses the module's up-projections.

Under tensor parallelism every rank has all latents, which the heads share, but only some of the heads.

Shapes: B rows, H query heads, L new tokens, d_c latent width, d_n, d_r, d_v widths of the head's parts.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate

from condense.latent import UpProjection, attend_latents, mean_queries
from condense.methods import Method
from condense.models.families import is_latent
from condense.models.forward import AttentionCall
from condense.models.layers import read_tokens
from condense.models.stock import method_of
from condense.ops.latents import Ranks


def condensed_latents(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, entries: Tensor) -> Tensor:
    """Condensed attention ``[B, H, L, d_v]`` of new right-aligned tokens to themselves and the tokens in the cache.

    q and k ``[B, H, L, d_n + d_r]``, v ``[B, H, L, d_v]``: as the stock forward expanded the new tokens;
    entries ``[B, 1, L, d_c + d_r]``: their latents and rope keys; only these are cached.
    """
    module = call.module
    up = up_projection(module, q.shape[1], q)
    method = method_of(module)
    mesh = head_mesh(module, q.shape[1])
    ranks = None
    if mesh is not None:
        ranks = Ranks(
            module.num_heads, *(partial(_shared, mesh=mesh, placement=Partial(how)) for how in ("sum", "max"))
        )
        # each rank has the gradient of its own heads; those of rope keys are summed by the stock projection
        c, k_rope = entries.tensor_split([up.latent_width], dim=-1)
        entries = torch.cat([_shared(c, mesh, Replicate()), k_rope], dim=-1)
    mean_q = mean_queries(method, q, up, ranks)
    context = read_tokens(call, method, mean_q, entries, entries[..., :0], latent_width=up.latent_width)
    # if old tokens come before new ones and rows are padded, the new tokens are not the last L columns in every row
    new = (k, v) if call.padding is None or context.window.k.shape[2] == q.shape[2] else None
    context = context._replace(ranks=ranks)
    return attend_latents(method, q, context, up, new=new, scale=call.scale, dropout_p=call.dropout)[0]


def up_projection(module: Any, heads: int, like: Tensor) -> UpProjection:
    """W_UK and W_UV of the module's ``kv_b_proj`` for that many heads, in the dtype and on the device of ``like``."""
    d_n, d_v = module.qk_nope_head_dim, module.v_head_dim
    weight = _matrix(module.kv_b_proj, heads * (d_n + d_v), module.kv_lora_rank, like).to(like.dtype)
    per_head = weight.unflatten(0, (heads, d_n + d_v))
    return UpProjection(per_head[:, :d_n].mT, per_head[:, d_n:].mT)


def _matrix(projection: nn.Module, rows: int, columns: int, like: Tensor) -> Tensor:
    """The matrix ``[rows, columns]`` that a projection without bias multiplies by.

    For a plain layer, its weight. Any other (quantised, with an adapter, sharded, offloaded until it runs) is applied
    to the unit vectors, which costs less than applying it to the tokens and gives adapters their gradients.
    """
    weight: Any = getattr(projection, "weight", None)
    is_float = isinstance(weight, Tensor) and weight.is_floating_point()
    is_plain = type(projection) is nn.Linear and type(weight) is nn.Parameter and is_float and projection.bias is None
    # hooks and a replaced forward change the results, so they are part of the matrix
    is_plain &= not (projection._forward_hooks or projection._forward_pre_hooks or "forward" in vars(projection))
    if is_plain and weight.shape == (rows, columns) and weight.device == like.device:
        return weight
    biases = (getattr(module, "bias", None) for module in projection.modules())
    # in PyTorch's own quantised layers ``bias`` is a method
    if any((bias() if callable(bias) else bias) is not None for bias in biases):
        raise ValueError(
            "kv_b_proj must have no bias, because entries of latents are read through its matrix alone: leave "
            "lora_bias out, or give adapters other target_modules"
        )
    if "adapter_names" in hook_arguments(projection):
        raise ValueError(
            "adapter_names (a LoRA adapter per row) cannot be condensed in MLA models, whose rows share their latents' "
            "projection: call the model once per adapter, after set_adapter"
        )
    return projection(torch.eye(columns, device=like.device, dtype=weight.dtype if is_float else like.dtype)).mT


def hook_arguments(module: nn.Module) -> set[str]:
    """Names of arguments that hooks add to the forwards of a module and its parts, such as PEFT's ``adapter_names``."""
    hooks = (hook for part in module.modules() for hook in part._forward_pre_hooks.values())
    return {name for hook in hooks for name in getattr(hook, "keywords", ())}


def check_latents(methods: Mapping[int, Method], attentions: dict[int, nn.Module]) -> None:
    """Raise ValueError if a layer that caches latents (MLA) gets a method that cannot condense them."""
    for index, method in methods.items():
        module: Any = attentions[index]
        if is_latent(module):
            try:
                method.for_latents(module.kv_lora_rank)
            except ValueError as error:
                raise ValueError(f"layer {index}: {error}") from error


def head_mesh(module: nn.Module, heads: int) -> DeviceMesh | None:
    """The mesh of processes that a module's heads are spread over, None if this process has all heads.

    Raises ValueError if heads are on other ranks and kv_b_proj.weight is not sharded over a mesh of one dimension.
    """
    total: Any = module.num_heads
    if heads == total:
        return None
    weight = getattr(module.kv_b_proj, "weight", None)
    if not isinstance(weight, DTensor) or weight.device_mesh.ndim != 1:
        raise ValueError(
            f"{heads} of {total} heads are on this rank and kv_b_proj.weight is no DTensor on a mesh of one dimension: "
            "load the model with tp_plan='auto' and nothing else, or on one device"
        )
    return weight.device_mesh


def _shared(x: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    """The whole tensor on every rank, reduced from parts (`Partial`) or one of equal copies (`Replicate`). Gradients
    are summed over the ranks.
    """
    whole = DTensor.from_local(x, mesh, [placement]).redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()])
