"""Plain `generate` over a CUDA graph: prompts are read as usual, steps of one token are captured once and replayed.

Shapes: B rows, V vocabulary.
"""

import inspect
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel, StaticCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.masking_utils import create_chunked_causal_mask

from condense.caches import CACHE
from condense.models.families import has_eager_experts, rope_that_changes
from condense.models.fused import capture, fused_steps
from condense.models.watch import is_watched

# cache sizes are multiples of this, because Triton compiles kernels anew for numbers of groups that 16 does not divide,
# and a group has 16 tokens by default
_BLOCK = 256
_ONE_FORWARD_PER_TOKEN = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class CacheOfOneCall(StaticCache):
    """A static cache that one call of `generate` makes for itself, and the tokens ``ends`` that end its rows."""

    ends: list[int]


def replayable_cache(
    model: PreTrainedModel, cache: Cache, generation_config: GenerationConfig, mode: GenerationMode, length: int
) -> Cache:
    """A static cache of ``length`` tokens in place of the growing one made by `generate`, if its steps can be replayed.

    They can on one CUDA device with one forward per token (greedy or sampled), for a model that transformers can
    compile as one graph. ``cache`` itself is returned otherwise, and if the caller chose a cache, its implementation,
    ``disable_compile`` or ``return_dict_in_generate``, by which `generate` returns the cache.
    """
    chosen = generation_config.cache_implementation is not None or generation_config.return_dict_in_generate
    if type(cache) is not DynamicCache or cache.offloading or chosen or mode not in _ONE_FORWARD_PER_TOKEN:
        return cache
    config = model.config.get_text_config(decoder=True)
    if not model._can_compile_fullgraph or rope_that_changes(config) is not None or torch.is_autocast_enabled("cuda"):
        return cache
    # in transformers 5.17 `generate` fails on a static cache's masks for layers with chunks (Llama 4)
    has_chunks = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    if has_chunks and "block_sequence_ids" not in inspect.signature(create_chunked_causal_mask).parameters:
        return cache
    static, ends = CacheOfOneCall(config, static_length(length)), generation_config.eos_token_id
    static.ends = [] if ends is None else torch.as_tensor(ends).reshape(-1).tolist()
    compilable = model._valid_auto_compile_criteria({CACHE: static}, generation_config)
    return static if can_replay(model) and compilable else cache


def static_length(length: int) -> int:
    """The size of a static cache for ``length`` tokens, a multiple of `_BLOCK`."""
    return -(-length // _BLOCK) * _BLOCK


def is_compiled(model: PreTrainedModel) -> bool:
    """True if the model's user compiled its forward."""
    return bool(getattr(model, "_compiled_call_impl", None)) or hasattr(model.forward, "_torchdynamo_orig_callable")


def can_replay(model: PreTrainedModel) -> bool:
    """True for a model on one CUDA device and in one process whose steps can be captured.

    Not if its user compiled the forward, nor if its experts wait for the device or each step is watched.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    devices = set(getattr(model, "hf_device_map", {}).values())
    captures = not is_compiled(model) and not has_eager_experts(model) and not is_watched(model)
    return model.device.type == "cuda" and not distributed and len(devices) <= 1 and captures


class ReplayedForward:
    """A model's forward whose steps of one token are one CUDA graph, for a single call of `generate`.

    The first step runs eagerly, which compiles kernels and takes workspaces; the second is captured. In both, norms and
    rotations are compiled (`condense.models.fused`). A step also runs eagerly if the cache is not static, or its
    arguments differ from those of the step before. `generate` drops further tokens of a row that has ended: from then
    on it counts as padding, which condensed layers neither store nor compute.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._known: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._output: Any = None
        self._has_begun = False
        self._ends: Tensor | None = None
        self._ended: Tensor | None = None

    def __call__(self, **inputs: Any) -> Any:
        """The model's output; that of a replayed step is overwritten by the next one."""
        cache: Cache = inputs.pop(CACHE)
        if not self._has_begun:
            self._begin(cache, inputs.get("input_ids"))
        leaves, structure = tree_flatten(inputs)
        others = [(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves]
        call = (id(cache), structure, others)
        ids = inputs.get("input_ids")
        is_step = ids is not None and ids.shape[1] == 1 and isinstance(cache, StaticCache)
        if not is_step or call != self._known:
            self._known, self._graph = call if is_step else None, None
            with fused_steps(self._model, len(ids)) if is_step else nullcontext():  # type: ignore[arg-type]
                return self._forward(cache, inputs)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if self._graph is None:
            self._inputs = [x.clone() for x in tensors]
            held = iter(self._inputs)
            leaves = [next(held) if isinstance(x, Tensor) else x for x in leaves]
            self._graph = self._capture(cache, tree_unflatten(leaves, structure))
        for own, new in zip(self._inputs, tensors, strict=True):
            own.copy_(new)
        self._graph.replay()
        return self._output

    def _begin(self, cache: Cache, ids: Tensor | None) -> None:
        """Prepare to notice rows that end, unless the first call reads a part of the prompt, in which no row ends.

        A single row needs no notice: `generate` stops when it ends.
        """
        self._has_begun = True
        is_own = isinstance(cache, CacheOfOneCall) and bool(cache.ends)
        if ids is None or len(ids) == 1 or not is_own or int(cache.get_seq_length()) == 0:
            return
        self._ends = torch.tensor(cache.ends, device=ids.device)
        self._ended = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

    def _forward(self, cache: Cache, inputs: dict[str, Any]) -> Any:
        """The model's output, with rows that have ended masked."""
        ended = self._ended
        if ended is None:
            return self._model(**{CACHE: cache}, **inputs)
        ended |= (inputs["input_ids"] == self._ends).any(1)  # in place, so that a replayed graph goes on with it

        def masked(x: Tensor) -> Tensor:
            return x.masked_fill(ended.view(-1, *(1,) * (x.ndim - 1)), 0)

        mask = tree_map_only(Tensor, masked, inputs.get("attention_mask"))
        return self._model(**inputs | {CACHE: cache, "attention_mask": mask})

    def _capture(self, cache: Cache, inputs: dict[str, Any]) -> torch.cuda.CUDAGraph:
        with fused_steps(self._model, len(inputs["input_ids"])):
            graph, self._output = capture(partial(self._forward, cache, inputs), self._model.device)
        return graph
