"""Decoding by replaying one CUDA graph per step, without Python, kernel launches or waits between the layers.

Shapes: B rows, L prompt tokens, V vocabulary.
"""

import inspect
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, StaticCache

from condense.caches import CACHE, StaticCondensedLayer
from condense.config import check_int
from condense.models.families import check_learned_positions, has_eager_experts, rope_that_changes, transformers_model
from condense.models.fused import capture, fused_steps
from condense.models.layers import ensure_layers
from condense.models.masks import ALL_REAL
from condense.models.modules import all_methods, condensed_layers
from condense.models.prompts import long_prompt
from condense.models.stock import reads_otherwise

# calls before the capture: the first ones compile kernels and allocate workspaces, which a graph must not record
_WARM_UPS = 3


class GraphDecoder:
    """Prefill and token-by-token decode of a causal LM over a static cache of its own.

    model: a Hugging Face causal LM in eval mode, condensed, or stock without sliding windows; it must not be changed
    afterwards. batch_size and max_length (all tokens, padding included) are fixed; `prefill` starts a new prompt, which
    `extend` and `step` continue. On CUDA the decode step is captured before the first prompt and replayed; on other
    devices it runs eagerly. compile: `torch.compile` the step first, as one graph.
    Raises ValueError for a model or sizes that cannot work.
    """

    def __init__(self, model: nn.Module, *, batch_size: int, max_length: int, compile: bool = False) -> None:
        check_int("batch_size", batch_size, 1)
        check_int("max_length", max_length, 2)
        self.model = _decodable(model, max_length)
        self.batch_size, self.max_length = batch_size, max_length
        self.methods = condensed_layers(self.model)
        self.cache = StaticCache(config=self.model.config.get_text_config(decoder=True), max_cache_len=max_length)
        if (dropping := next((m for m in self.methods.values() if m.reread is not None), None)) is not None:
            raise ValueError(
                f"how much a layer keeps by {dropping} is known once the prompt has been read, and a graph's buffers "
                "come before: use model.generate, which replays its steps on CUDA"
            )
        if self.methods:
            ensure_layers(self.cache, all_methods(self.model))
        elif any(self.cache.is_sliding):
            raise ValueError(
                "a stock model's layers with a sliding window cannot be decoded by a graph: condense the model, or use "
                "model.generate"
            )
        self._condensed = [layer for layer in self.cache.layers if isinstance(layer, StaticCondensedLayer)]
        device = self.model.device
        self._ids = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        self._positions = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        # False at the prompt's padding, True at all later slots
        self._mask = torch.ones(batch_size, max_length, dtype=torch.bool, device=device)
        # None stands for `_decode`: a bound method stored here would be a cycle, which keeps the cache alive longer
        self._compiled = torch.compile(self._decode, fullgraph=True, dynamic=False) if compile else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None
        self._is_prepared = False
        self._length = 0

    @torch.inference_mode(False)
    @torch.no_grad()
    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None = None, chunk: int | None = None) -> Tensor:
        """Empty the cache, read a prompt and return the logits ``[B, V]`` of its last token.

        input_ids int64 ``[B, L]``; attention_mask ``[B, L]``, 0 at padding, which must be on the left; chunk: tokens
        per forward, None: all at once; a single token left over is read with the last chunk.
        Raises ValueError, state unchanged, for another number of rows, a prompt that is too long, padding on the right,
        and a chunk smaller than the prompt if a method looks ahead, or of 1 if it reads single tokens in another way.
        """
        self._check_tokens(input_ids)
        B, L = input_ids.shape
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids, {(B, L)}, got {tuple(attention_mask.shape)}"
            )
        if attention_mask is not None and not bool((attention_mask[:, -1] != 0).all()):
            raise ValueError("padding must stand on the left: the last column of attention_mask has zeros")
        chunk = L if chunk is None else chunk
        check_int("chunk", chunk, 1)
        ahead = next((method for method in self.methods.values() if method.layout.lookahead), None)
        if ahead is not None and chunk < L:
            raise ValueError(f"{ahead} needs the whole prompt in one forward: leave chunk out")
        other = reads_otherwise(self.methods.values())
        if other is not None and chunk == 1 < L:
            raise ValueError(
                f"chunk must be at least 2, as {type(other).__name__} reads single tokens as those of an answer, got 1"
            )
        if not self._is_prepared:
            self._rewind()
            self._decode()  # allocates the buffers
            if self._ids.device.type == "cuda":
                self._capture()
            self._is_prepared = True
        self._reset()
        positions = torch.arange(L, device=self._ids.device).expand(B, L)
        if attention_mask is not None and not bool(attention_mask.all()):
            self._is_padded = True
            self._mask[:, :L] = attention_mask
            positions = (self._mask[:, :L].cumsum(1) - 1).clamp(min=0)
        return self._read(input_ids, positions, chunk)

    @torch.inference_mode(False)
    @torch.no_grad()
    def extend(self, input_ids: Tensor) -> Tensor:
        """Read further tokens, such as a next turn, and return the logits ``[B, V]`` of the last one.

        input_ids int64 ``[B, L]``, read in one forward; a single token is a `step`.
        Raises ValueError, state unchanged, before a prefill, for another shape, and if the cache has no room for them.
        """
        self._check_tokens(input_ids, "extend")
        if (L := input_ids.shape[1]) == 1:
            return self.step(input_ids[:, 0])
        return self._read(input_ids, self._positions + torch.arange(L, device=self._ids.device), L)

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Read one token per row, int64 ``[B]``, and return the logits ``[B, V]`` that follow.

        Raises ValueError, state unchanged, before a prefill, for another number of rows, and if the cache is full.
        """
        if tokens.shape != (self.batch_size,):
            raise ValueError(f"tokens must have shape ({self.batch_size},), got {tuple(tokens.shape)}")
        self._check_tokens(tokens[:, None], "step")
        self._ids.copy_(tokens[:, None])
        self._length += 1
        if self._graph is None:
            return self._forward()
        self._graph.replay()
        assert self._logits is not None
        return self._logits.clone()

    def _read(self, input_ids: Tensor, positions: Tensor, chunk: int) -> Tensor:
        """Read tokens after those read before, ``chunk`` per forward; input_ids and positions ``[B, L]``."""
        L = input_ids.shape[1]
        # a forward that fails may have stored some tokens: with length 0 only a prefill is accepted afterwards
        stop, self._length = self._length, 0
        # no graph is replayed meanwhile, so the host can count slots instead of reading them from the device
        for layer in self._condensed:
            layer.know_slots(stop)
        # ask for the logits of the last token alone, if the model has that argument
        keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}
        # a last piece of one token would be a step, which some methods read in another way
        sizes = [min(chunk, L - begin) for begin in range(0, L - (L > chunk > 1), chunk)]
        sizes[-1] += L - sum(sizes)
        pieces = (x.split(sizes, dim=1) for x in (input_ids.to(positions.device), positions))
        for ids, at in zip(*pieces, strict=True):
            stop += ids.shape[1]
            with nullcontext() if self._graph is None else long_prompt(self.model, *ids.shape):
                logits = self._call(ids, at, self._mask[:, :stop] if self._is_padded else None, **keep)
        for layer in self._condensed:
            layer.know_slots(None)
        self._positions.copy_(positions[:, -1:] + 1)
        self._length = stop
        return logits

    def _call(self, ids: Tensor, positions: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        """Logits ``[B, V]`` of the last token of ``ids`` ``[B, L]``."""
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, CACHE: self.cache}
        return self.model(**inputs, use_cache=True, **options).logits[:, -1]

    def _forward(self) -> Tensor:
        return self._decode() if self._compiled is None else self._compiled()

    def _decode(self) -> Tensor:
        """One step on the tokens in ``_ids``; this is what the graph captures."""
        options = {ALL_REAL: True} if self.methods else {}
        logits = self._call(self._ids, self._positions, self._mask, **options)
        self._positions.add_(1)
        return logits

    def _capture(self) -> None:
        device = self._ids.device
        stream = torch.cuda.Stream(device)
        with nullcontext() if self._compiled else fused_steps(self.model, self.batch_size):
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    self._rewind()
                    self._forward()
            torch.cuda.current_stream(device).wait_stream(stream)
            self._rewind()
            self._graph, self._logits = capture(self._forward, device)

    def _rewind(self) -> None:
        """Empty the cache and let the next step decode, as after an empty prompt."""
        self._reset()
        for layer in self._condensed:
            layer.skip_prompt()
        if any(self.cache.is_linear):
            self._decode()  # a recurrent layer reads the first token as a prompt, and steps from then on

    def _reset(self) -> None:
        self.cache.reset()
        self._positions.zero_()
        self._mask.fill_(True)
        self._is_padded = False
        self._length = 0

    def _check_tokens(self, input_ids: Tensor, call: str | None = None) -> None:
        """Raise ValueError unless tokens ``[B, L]`` fit and the model's methods are those that the buffers were made
        for. call: "extend" or "step", which continue a prompt; None to start one.
        """
        # a replayed step runs no module of the model, so its methods have no effect on what was captured
        is_replayed = call == "step" and self._graph is not None
        if not is_replayed and condensed_layers(self.model) != self.methods:
            raise ValueError("the model's methods must be those that this decoder was made for: make another decoder")
        held = 0 if call is None else self._length
        if call is not None and held == 0:
            raise ValueError(f"{call} continues a prompt: call prefill first")
        if input_ids.ndim != 2 or input_ids.shape[0] != self.batch_size or input_ids.shape[1] == 0:
            raise ValueError(
                f"input_ids must have shape ({self.batch_size}, tokens), got {tuple(input_ids.shape)}; make another "
                "decoder for another batch"
            )
        if held + input_ids.shape[1] > self.max_length:
            raise ValueError(
                f"wanted at most max_length={self.max_length} tokens, got {held} and {input_ids.shape[1]} more; make a "
                "longer decoder"
            )


def _decodable(model: nn.Module, max_length: int) -> PreTrainedModel:
    """The transformers model inside ``model`` (PEFT wrappers included).

    Raises ValueError if a graph cannot decode it, or not up to ``max_length`` tokens.
    """
    base = transformers_model(model)
    if base is None or not base.can_generate() or base.config.is_encoder_decoder:
        raise ValueError(
            f"model must be a decoder-only transformers model that can generate, got {type(model).__name__}"
        )
    if base.training:
        raise ValueError("model must be in eval mode: call model.eval()")
    config = base.config.get_text_config(decoder=True)
    check_learned_positions(config, "max_length", max_length)
    if (rope := rope_that_changes(config)) is not None:
        raise ValueError(
            f"rotary frequencies that change with the length ({rope}) cannot be decoded by a graph: use model.generate"
        )
    if base.device.type == "cuda" and has_eager_experts(base):
        raise ValueError(
            "experts that run one by one wait for the device, which a graph cannot: call "
            "model.set_experts_implementation('batched_mm') first, or, where a model has no other experts (DBRX, "
            "LongCat-Flash), use model.generate"
        )
    return base
