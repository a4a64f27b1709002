"""Norms and rotations of steps, compiled into one kernel each while a CUDA graph of them is captured.

PyTorch runs a norm of transformers as several kernels, and a rotation too (``apply_rotary_pos_emb`` of the model's own
file). In a step of one token each of these takes longer to start than to work, in a replayed graph too.
"""

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from condense.models.streams import parallel_projections

# fewest parameters for which compiling pays: a process's first call takes some seconds longer
_LEAST_WEIGHTS = 2**29
_OF_MODELS, _ROTATION = "transformers.models.", "apply_rotary_pos_emb"
_BACKEND = "inductor"
# held in a block, because it changes functions that all threads call
_ENTERING = threading.RLock()
# classes of norms that could not be compiled
_FAILED: set[type] = set()
logger = logging.getLogger("condense")
T = TypeVar("T")


def capture(forward: Callable[[], T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """A CUDA graph of a call of ``forward``, and the output of that call, which replays overwrite."""
    graph = torch.cuda.CUDAGraph()
    # by default a call of another thread, such as one for memory, would end the capture
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        return graph, forward()


@contextmanager
def fused_steps(model: PreTrainedModel, rows: int) -> Iterator[None]:
    """For the length of a ``with`` block, run the model's norms and rotations of ``rows`` tokens compiled, and its
    projections as `condense.models.streams` says.

    Models of fewer than `_LEAST_WEIGHTS` parameters, and norms with hooks, stay as they are. Where PyTorch cannot
    compile, a warning says so, and norms and rotations stay as they are. Other threads rotate as before. Results differ
    by rounding.
    """
    if model.num_parameters() < _LEAST_WEIGHTS:
        yield
        return
    norms = [module for module in model.modules() if _is_norm(module)]
    kinds = {kind for module in model.modules() if hasattr(module, "layer_idx") for kind in type(module).__mro__}
    if not norms or not _compiles(norms[0], rows, model.dtype):
        norms, kinds = [], set()
    files = {sys.modules[kind.__module__] for kind in kinds if kind.__module__.startswith(_OF_MODELS)}
    with _ENTERING, parallel_projections(model):
        stock = {file: vars(file)[_ROTATION] for file in files if _ROTATION in vars(file)}
        try:
            for norm in norms:
                norm.forward = MethodType(_compiled(type(norm).forward), norm)
            for file, function in stock.items():
                setattr(file, _ROTATION, _for_this_thread(function))
            yield
        finally:
            for norm in norms:
                vars(norm).pop("forward", None)
            for file, function in stock.items():
                setattr(file, _ROTATION, function)


def _is_norm(module: nn.Module) -> bool:
    """True for an RMS norm of transformers that nothing was added to."""
    changed = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    cls, weight = type(module), getattr(module, "weight", None)
    is_own = cls.__module__.startswith(_OF_MODELS) and isinstance(cls.forward, FunctionType)
    return is_own and cls.__name__.endswith("RMSNorm") and isinstance(weight, nn.Parameter) and not changed


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled, once per process for all models."""
    return torch.compile(function, backend=_BACKEND)


def _for_this_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs compiled in the current thread, and as it is in all others."""
    owner, compiled = threading.get_ident(), _compiled(function)
    return lambda *args, **kwargs: (compiled if threading.get_ident() == owner else function)(*args, **kwargs)


def _compiles(norm: Any, rows: int, dtype: torch.dtype) -> bool:
    """True if PyTorch can compile a norm here, which is tried on ``rows`` tokens of zeros."""
    if type(norm) in _FAILED:
        return False
    x = torch.zeros(rows, 1, norm.weight.shape[0], dtype=dtype, device=norm.weight.device)
    try:
        _compiled(type(norm).forward)(norm, x)
    except Exception as error:
        logger.warning("norms and rotations of steps run as they are, because PyTorch cannot compile them: %s", error)
        _FAILED.add(type(norm))
        return False
    return True
