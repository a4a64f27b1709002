"""Changes that `import condense` makes to transformers: two registered functions and eleven wrapped methods.

`post_init`: condenses a saved condensed model when it is loaded. `to_dict` and `from_dict` of configurations and
`save_pretrained`: write and read the methods of a model, so that no program silently loads it as a dense one, see
`condense.architectures`.
`_prepare_cache_for_generation`: puts condensed layers into the cache before generate decides whether to compile and
whether the cache can be cropped; on CUDA it chooses a static cache where its steps can be replayed.
`_prefill`: raises ValueError for a piece of a prompt that is one token, if a method reads it as a token of an answer;
on CUDA it reads long prompts as `condense.models.prompts` says.
`get_compiled_call`: replays steps of one token as a CUDA graph, unless the caller gave a ``compile_config``.
`DeferredStopCheck.is_supported`: lets the host queue the next replayed step before it looks whether a text has ended.
`Cache.crop` and `Cache.reorder_cache`: take tokens back, or move rows, in all layers, or in none if one refuses.
`init_continuous_batching`: raises ValueError. For models that are not condensed, none of them does anything. Adapters
are saved and loaded with their base's methods, see `condense.models.adapters`.
"""

import copy
from contextlib import nullcontext
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, StaticCache, StaticLayer
from transformers.generation import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import DeferredStopCheck

from condense.architectures import as_read, as_written
from condense.caches import CACHE, CondensedCacheLayer, StaticCondensedLayer
from condense.methods import Method, check_names, methods_in
from condense.models import adapters
from condense.models.adapters import wrap
from condense.models.apply import condense_from_config
from condense.models.attention import IMPLEMENTATION, KEY, condense_attention, is_condensed
from condense.models.choice import described
from condense.models.families import check_learned_positions
from condense.models.layers import ensure_layers
from condense.models.masks import condense_mask
from condense.models.modules import all_methods, condensed_layers, condensed_modules
from condense.models.prompts import long_prompt
from condense.models.replay import CacheOfOneCall, ReplayedForward, can_replay, is_compiled, replayable_cache
from condense.models.stock import reads_otherwise
from condense.version import __version__

_CACHES = (None, "dynamic", "offloaded", "static")


def install() -> None:
    """Register and wrap, once per process."""
    if getattr(PreTrainedModel.post_init, "_condense", False):
        return
    AttentionInterface.register(IMPLEMENTATION, condense_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, condense_mask)
    wrap(PreTrainedConfig, "to_dict", _to_dict)
    wrap(PreTrainedConfig, "from_dict", _from_dict)
    wrap(PreTrainedModel, "save_pretrained", _save_pretrained)
    wrap(PreTrainedModel, "post_init", _post_init)
    PreTrainedModel.post_init._condense = True
    wrap(GenerationMixin, "_prepare_cache_for_generation", _prepare_cache)
    wrap(GenerationMixin, "_prefill", _prefill)
    wrap(PreTrainedModel, "get_compiled_call", _compiled_call)
    wrap(DeferredStopCheck, "is_supported", _stops_late)
    wrap(GenerationMixin, "init_continuous_batching", _continuous_batching)
    wrap(Cache, "crop", _crop)
    wrap(Cache, "reorder_cache", _reorder_cache)
    adapters.install()


def _crop(stock: Any, self: Cache, tokens_to_remove: int) -> None:
    condensed = [layer for layer in self.layers if isinstance(layer, CondensedCacheLayer)]
    for layer in condensed:
        layer.check_crop(tokens_to_remove)
    for layer in self.layers if condensed else ():
        if layer not in condensed:
            # a shallow copy shows if a stock layer refuses: its crop replaces tensors, in dicts too, and writes to none
            trial = copy.copy(layer)
            vars(trial).update({name: copy.copy(x) for name, x in vars(layer).items() if isinstance(x, dict)})
            trial.crop(tokens_to_remove)
    stock(self, tokens_to_remove)


def _reorder_cache(stock: Any, self: Cache, beam_idx: Any) -> None:
    for layer in self.layers:
        if isinstance(layer, CondensedCacheLayer):
            layer.store.refuse_reorder()
    stock(self, beam_idx)


def _to_dict(stock: Any, self: PreTrainedConfig) -> dict[str, Any]:
    """The stock result, changed so that it says which attention runs.

    A condensed configuration is written with its methods, the version of this library and ``attn_implementation``,
    which transformers without `condense` refuse to load, and with the name of a condensed architecture, which engines
    without it refuse. A configuration that was set to another implementation is written as a stock one.
    """
    output: dict[str, Any] = stock(self)
    settings = output.pop(KEY, None)
    if isinstance(settings, dict) and _says_condensed(self):
        output = as_written(output) | {KEY: settings | {"version": __version__}, "attn_implementation": IMPLEMENTATION}
    # loading sets the implementation of a whole model in all its parts, so a condensed part is named by itself
    parts = {key: IMPLEMENTATION for key in self.sub_configs if _says_condensed(getattr(self, key, None))}
    return as_written(output) | {"attn_implementation": parts} if parts else output


def _says_condensed(config: Any) -> bool:
    return bool(getattr(config, KEY, None)) and config._attn_implementation == IMPLEMENTATION


def _from_dict(stock: Any, cls: type[PreTrainedConfig], config_dict: dict[str, Any], **kwargs: Any) -> Any:
    return stock(cls, as_read(config_dict), **kwargs)


def _save_pretrained(stock: Any, self: PreTrainedModel, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    _check_saved(self)
    result = stock(self, save_directory, *args, **kwargs)
    _write_card(Path(save_directory) / "README.md", condensed_layers(self) if is_condensed(self) else {})
    if getattr(self, "_hf_peft_config_loaded", False):
        adapters.write_record(save_directory, self)
    return result


def _check_saved(model: PreTrainedModel) -> None:
    """Raise ValueError for methods without a name, and if ``config.condense`` names other methods than layers run."""
    methods, config = condensed_layers(model), model.config.get_text_config(decoder=True)
    check_names(methods.values())
    if not methods or not is_condensed(model):
        return
    settings, there = getattr(config, KEY, None), condensed_modules(model)
    said = {} if settings is None else {i: method for i, method in methods_in(settings).items() if i in there}
    if said != methods:
        raise ValueError(
            f"config.condense must say what runs, {described(methods)}, got {described(said) or None}: leave it to "
            "condense.apply, and call condense.restore before a stock model is saved"
        )


def _write_card(path: Path, methods: dict[int, Method]) -> None:
    """Write a README on loading the model, unless the user has one; for a stock model, remove one written here."""
    card = resources.files("condense").joinpath("assets/model_card.md").read_text(encoding="utf-8")
    is_own = path.is_file() and path.read_text("utf-8", "replace").startswith(card.partition("{")[0])
    if methods and path.parent.is_dir() and (is_own or not path.exists()):
        text = ", ".join(f"`{method}`" for method in dict.fromkeys(methods.values()))
        classes = {type(method) for method in methods.values()}
        own = {
            f"# here the class {c.__name__}, which a script defined\n"
            if c.__module__ == "__main__"
            else f"import {c.__module__}  # defines {c.__name__}\n"
            for c in classes
            if not c.__module__.startswith("condense.")
        }
        path.write_text(card.format(methods=text, version=__version__, own="".join(sorted(own))), encoding="utf-8")
    elif is_own:
        path.unlink()


def _post_init(stock: Any, self: PreTrainedModel) -> None:
    stock(self)
    condense_from_config(self)


def _prepare_cache(
    stock: Any,
    self: Any,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    generation_mode: GenerationMode,
    batch_size: int,
    max_cache_length: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    methods = condensed_layers(self) if is_condensed(self) else {}
    if methods:
        _check_generation(self, generation_config, generation_mode, methods)
    given = model_kwargs.get(CACHE)
    done = stock(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length, *args, **kwargs)
    cache = model_kwargs.get(CACHE)
    if methods and isinstance(cache, Cache):
        if given is None and all(method.has_step for method in methods.values()):
            cache = replayable_cache(self, cache, generation_config, generation_mode, max_cache_length)
            model_kwargs[CACHE] = cache
        if isinstance(cache, StaticCache):
            _check_room(cache, max_cache_length)
        ensure_layers(cache, all_methods(self))
        if isinstance(cache, StaticCache):
            mask = model_kwargs.get("attention_mask")
            # only compiled forwards ask for it, since looking at the mask waits for the device
            is_plain = is_compiled(self) and (mask is None or bool(mask.all()))
            for layer in cache.layers:
                if isinstance(layer, StaticCondensedLayer):
                    layer.expect_prompt(plain=is_plain)
    return done


def _prefill(
    stock: Any, self: Any, ids: Tensor, config: GenerationConfig, inputs: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    if not is_condensed(self):
        return stock(self, ids, config, inputs, *args, **kwargs)
    mask, cache, size = inputs.get("attention_mask"), inputs.get(CACHE), config.prefill_chunk_size
    tokens = (ids if mask is None else mask).shape[1] - (0 if cache is None else int(cache.get_seq_length()))
    other = reads_otherwise(condensed_layers(self).values())
    if other is not None and size is not None and tokens > size and (size == 1 or tokens % size == 1):
        raise ValueError(
            f"prefill_chunk_size={size} leaves a piece of one token of {tokens}, which {type(other).__name__} "
            "reads as a token of an answer: use another size, or prompt='recall'"
        )
    with long_prompt(self, len(ids), min(tokens, size or tokens)) if can_replay(self) else nullcontext():
        return stock(self, ids, config, inputs, *args, **kwargs)


def _compiled_call(stock: Any, self: Any, compile_config: Any) -> Any:
    if compile_config is None and is_condensed(self) and can_replay(self):
        return ReplayedForward(self)
    return stock(self, compile_config)


def _stops_late(
    stock: Any, device: torch.device, cache: Cache | None, cache_is_returned: bool, is_assistant: bool
) -> bool:
    # one step too many does no harm: transformers drops its token, and nobody reads the cache of one call afterwards.
    # But transformers records the event that the host waits for on the current device, even if the model is on another
    is_here = device.type != "cuda" or device.index in (None, torch.cuda.current_device())
    is_own = isinstance(cache, CacheOfOneCall) and not is_assistant and is_here
    return is_own or bool(stock(device, cache, cache_is_returned, is_assistant))


def _check_room(cache: StaticCache, max_cache_length: int) -> None:
    """Raise ValueError if a static cache is too short: compiled steps cannot check how full it is."""
    full = (layer for layer in cache.layers if isinstance(layer, StaticLayer | StaticCondensedLayer))
    room = min((layer.get_max_length() for layer in full if not layer.is_sliding), default=max_cache_length)
    if max_cache_length > room:
        raise ValueError(
            f"the static cache has room for {room} tokens (max_cache_len), prompt and new tokens need "
            f"{max_cache_length}: make it longer, or leave the cache and cache_implementation unset"
        )


def _continuous_batching(stock: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    # refused here, because with flash attention installed it would silently switch to that and be dense
    if is_condensed(self):
        raise ValueError(
            "continuous batching and paged caches cannot be condensed: use model.generate without "
            "cache_implementation, or call condense.restore(model) first"
        )
    return stock(self, *args, **kwargs)


def _check_generation(
    model: Any, generation_config: GenerationConfig, mode: GenerationMode, methods: dict[int, Method]
) -> None:
    kind = generation_config.cache_implementation
    if kind not in _CACHES:
        raise ValueError(
            f"cache_implementation={kind!r} cannot be condensed: leave it unset, a condensed cache stays small "
            "while it grows, or choose 'static'"
        )
    # a method that looks ahead needs the prompt's end, so the first forward must read exactly the prompt
    ahead = next((method for method in methods.values() if method.layout.lookahead is not None), None)
    ways_out = {
        "unset prefill_chunk_size": generation_config.prefill_chunk_size is not None,
        "leave use_cache on": not generation_config.use_cache,
        "generate without assistant or prompt lookup": mode == GenerationMode.ASSISTED_GENERATION,
    }
    way_out = next((way for way, is_needed in ways_out.items() if is_needed), None)
    if ahead is not None and ahead.layout.lookahead is not None and way_out is not None:
        raise ValueError(
            f"{type(ahead).__name__} needs the whole prompt, alone, in one forward: {way_out}, or use "
            f"{ahead.layout.lookahead.causal_setting}"
        )
    other = reads_otherwise(methods.values())
    if other is not None and mode == GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"{type(other).__name__} reads several tokens in another way than single ones, so tokens that are proposed "
            "would not be judged by its own answers: use prompt='recall', or "
            "generate without assistant or prompt lookup"
        )
    if other is not None and not generation_config.use_cache:
        raise ValueError(
            f"{type(other).__name__} chooses groups for single tokens, and without a cache none is read alone: leave "
            "use_cache on, or use prompt='recall'"
        )
    check_learned_positions(model.config, "prompt and new tokens", generation_config.max_length or 0)
