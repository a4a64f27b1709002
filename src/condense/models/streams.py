"""Projections of one input on several CUDA streams at once, in steps that a graph captures and that warm up for it.

A step of one token reads each weight once, and the weights of k and v are too small to keep a GPU busy alone.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType

import torch
from torch import Tensor, nn

# projections of one module that read the same input
_OF_ONE_INPUT = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
)


@contextmanager
def parallel_projections(model: nn.Module) -> Iterator[None]:
    """For the length of a ``with`` block, compute projections that read the same input at the same time, on CUDA.

    This holds for plain ``nn.Linear`` layers without a replaced forward, in this thread. Results are equal to the bit.
    """
    changed: list[nn.Module] = []
    try:
        for group in _groups(model):
            changed += group
            together = _Together(group)
            for i, linear in enumerate(group):
                linear.forward = MethodType(together.reader(i), linear)
        yield
    finally:
        for linear in changed:
            vars(linear).pop("forward", None)


def _groups(model: nn.Module) -> Iterator[Sequence[nn.Module]]:
    """Groups of layers that read the same input; each layer is in one group at most."""
    for module in model.modules():
        for names in _OF_ONE_INPUT:
            group = [getattr(module, name, None) for name in names]
            if all(type(x) is nn.Linear and x.weight.is_cuda and "forward" not in vars(x) for x in group):
                yield group  # type: ignore[misc]


class _Together:
    """Layers that read the same input: the first one called computes the outputs of all, the others return theirs."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._forwards = [layer.forward for layer in layers]
        self._owner = threading.get_ident()
        self._streams = _streams(next(layers[0].parameters()).device)
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def reader(self, i: int) -> Callable[[nn.Module, Tensor], Tensor]:
        """The forward that takes the place of layer i's own."""

        def forward(_: nn.Module, x: Tensor) -> Tensor:
            if threading.get_ident() != self._owner:
                return self._forwards[i](x)
            if self._input is not x or i not in self._outputs:
                self._input, self._outputs = x, self._read_all(i, x)
            out = self._outputs.pop(i)
            if not self._outputs:  # release the input, whose memory a graph would keep
                self._input = None
            return out

        return forward

    def _read_all(self, i: int, x: Tensor) -> dict[int, Tensor]:
        """Outputs of all layers for x; layer i is computed on the caller's stream.

        The other streams wait for what this stream did before, and it waits for them: so memory that is freed on one
        is not written anew while another still reads it.
        """
        main, others = torch.cuda.current_stream(x.device), [j for j in range(len(self._forwards)) if j != i]
        found = {}
        for j, stream in zip(others, self._streams, strict=False):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                found[j] = self._forwards[j](x)
        found[i] = self._forwards[i](x)
        for _, stream in zip(others, self._streams, strict=False):
            main.wait_stream(stream)
        return found


@functools.cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Streams for all but one layer of a group."""
    return [torch.cuda.Stream(device) for _ in range(max(map(len, _OF_ONE_INPUT)) - 1)]
