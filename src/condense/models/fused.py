"""Norms and rotations compiled into one kernel each: in steps that a CUDA graph captures, and in long prompts.

PyTorch runs a norm of transformers as several kernels, and a rotation too (``apply_rotary_pos_emb`` of the model's own
file). In a step of one token each of these takes longer to start than to work, in a replayed graph too; in a long
prompt each reads and writes all of its tokens.
"""

import functools
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from condense.models.streams import parallel_projections

# fewest parameters for which compiling pays: a process's first call takes some seconds longer
_LEAST_WEIGHTS = 2**29
OF_MODELS, _ROTATION = "transformers.models.", "apply_rotary_pos_emb"
_BACKEND = "inductor"
# ``form``: the `Form` in which the current thread rotates
_HERE = threading.local()
# the number of blocks that use a file's replaced rotation, and a lock for replacing it
_USERS, _CHANGING = Counter[ModuleType](), threading.Lock()
# classes of norms that could not be compiled
_FAILED: set[type] = set()
logger = logging.getLogger("condense")
T = TypeVar("T")


class Form(Enum):
    """Kinds of forwards that are compiled: steps, for their number of rows, and prompts, for any length."""

    STEP = 1
    PROMPT = 2


def capture(forward: Callable[[], T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """A CUDA graph of a call of ``forward``, and the output of that call, which replays overwrite."""
    graph = torch.cuda.CUDAGraph()
    # by default a call of another thread, such as one for memory, would end the capture
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        return graph, forward()


@contextmanager
def fused_steps(model: PreTrainedModel, rows: int) -> Iterator[None]:
    """For the length of a ``with`` block, run steps of ``rows`` tokens as `fused` says, and projections as
    `condense.models.streams` does.
    """
    projections = parallel_projections(model) if _is_large(model) else nullcontext()
    with fused(model, (rows, 1), Form.STEP), projections:
        yield


@contextmanager
def fused(model: PreTrainedModel, tokens: tuple[int, int], form: Form) -> Iterator[None]:
    """For the length of a ``with`` block, run the model's norms and rotations compiled. tokens: rows, and the most
    that is read of a row.

    Models of fewer than `_LEAST_WEIGHTS` parameters, and norms with hooks, stay as they are. Where PyTorch cannot
    compile, a warning says so, and norms and rotations stay as they are. Other threads rotate as before. Results differ
    by rounding.
    """
    norms = [module for module in model.modules() if _is_norm(module)]
    kinds = {kind for module in model.modules() if hasattr(module, "layer_idx") for kind in type(module).__mro__}
    files = {sys.modules[kind.__module__] for kind in kinds if kind.__module__.startswith(OF_MODELS)}
    if not norms or not _is_large(model) or not _compiles(norms[0], tokens, model.dtype, form):
        yield
        return
    for norm in norms:
        norm.forward = MethodType(_compiled(type(norm).forward, form), norm)
    try:
        with _compiled_rotations([file for file in files if _ROTATION in vars(file)], form):
            yield
    finally:
        for norm in norms:
            vars(norm).pop("forward", None)


@contextmanager
def _compiled_rotations(files: Sequence[ModuleType], form: Form) -> Iterator[None]:
    """Compiled rotations of these files in the current thread, for the length of a ``with`` block."""
    before, _HERE.form = getattr(_HERE, "form", None), form
    with _CHANGING:
        for file in files:
            if _USERS[file] == 0:
                setattr(file, _ROTATION, _by_thread(vars(file)[_ROTATION]))
            _USERS[file] += 1
    try:
        yield
    finally:
        _HERE.form = before
        with _CHANGING:
            for file in files:
                _USERS[file] -= 1
                if _USERS[file] == 0:
                    setattr(file, _ROTATION, vars(file)[_ROTATION].__wrapped__)


def _is_large(model: PreTrainedModel) -> bool:
    return model.num_parameters() >= _LEAST_WEIGHTS


def is_stock(module: nn.Module) -> bool:
    """True for a module without hooks whose forward is its class's."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _is_norm(module: nn.Module) -> bool:
    """True for an RMS norm of transformers that nothing was added to."""
    cls, weight = type(module), getattr(module, "weight", None)
    is_own = cls.__module__.startswith(OF_MODELS) and isinstance(cls.forward, FunctionType)
    return is_own and cls.__name__.endswith("RMSNorm") and isinstance(weight, nn.Parameter) and is_stock(module)


@functools.cache
def _compiled(function: Callable[..., Any], form: Form) -> Callable[..., Any]:
    """The function compiled, once per process for all models; for prompts of any length."""
    return torch.compile(function, backend=_BACKEND, dynamic=True if form is Form.PROMPT else None)


def _by_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs compiled in threads that are in a block of `_compiled_rotations`, and as it is in others."""

    @functools.wraps(function)
    def rotate(*args: Any, **kwargs: Any) -> Any:
        form = getattr(_HERE, "form", None)
        return (function if form is None else _compiled(function, form))(*args, **kwargs)

    return rotate


def _compiles(norm: Any, tokens: tuple[int, int], dtype: torch.dtype, form: Form) -> bool:
    """True if PyTorch can compile a norm here, which is tried on so many tokens of zeros."""
    if type(norm) in _FAILED:
        return False
    x = torch.zeros(*tokens, norm.weight.shape[0], dtype=dtype, device=norm.weight.device)
    try:
        _compiled(type(norm).forward, form)(norm, x)
    except Exception as error:
        logger.warning("norms and rotations run as they are, because PyTorch cannot compile them: %s", error)
        _FAILED.add(type(norm))
        return False
    return True
