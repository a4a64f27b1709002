"""Tensor parallelism of MLA: the two sums over processes that latents need.

Every rank has all latents, which the heads share, but only some of the heads.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def head_group(module: nn.Module, heads: int) -> dist.ProcessGroup | None:
    """The processes that a module's heads are spread over, None if this one has all of them.

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
    return weight.device_mesh.get_group()


def sum_over(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """The sum of every rank's x, the same on all of them; gradients are summed alike."""
    return _Sum.apply(x, group, True)


def sum_gradients(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """Return x, the same on all ranks; the gradient is summed over the ranks, as each has that of its own heads."""
    return _Sum.apply(x, group, False)


class _Sum(torch.autograd.Function):
    """All-reduce in the backward pass, and in the forward pass if ``forward``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, forward: bool) -> Tensor:
        ctx.group = group
        return _summed(x, group) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _summed(gradient, ctx.group), None, None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x
