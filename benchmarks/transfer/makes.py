"""Models of several makes, and their training from scratch within a given time.

Shapes: B rows, H query heads, K KV heads, L tokens, D width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from texts import Texts, training
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

_LONGEST: Mapping[str, int] = {"cohere2-44m": 65536}  # of the others 32,768
_COMMON: dict[str, Any] = {
    "vocab_size": 4096, "tie_word_embeddings": True, "bos_token_id": None,
    # no padding: its embedding would be zero, and where it stands first it stays zero in all layers, so that each of
    # Gemma's norms multiplies its gradient by a thousand until it overflows
    "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


_LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
_SMALL = {"hidden_size": 512, "intermediate_size": 1408}
# heads of width 128, four query heads per KV head
_WIDE = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
MAKES: Mapping[str, Mapping[str, Any]] = {
    "llama-77m": {
        "model_type": "llama", **_LARGE, "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 64,
        **_rope(5e5),
    },
    "qwen3-83m": {"model_type": "qwen3", **_LARGE, **_WIDE, **_rope(1e6)},
    # every second layer has a sliding window
    "gemma3-44m": {
        "model_type": "gemma3_text", **_SMALL, "num_hidden_layers": 12, **_WIDE, "query_pre_attn_scalar": 128,
        "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        },
    },
    # every second layer has a sliding window, the others no positions
    "cohere2-44m": {
        "model_type": "cohere2", **_SMALL, "num_hidden_layers": 12, **_WIDE, "sliding_window": 512, "logit_scale": 1.0,
        "layer_types": ["sliding_attention", "full_attention"] * 6, **_rope(5e4),
    },
    # norms behind attention and feed-forward, and over all heads of q and k
    "olmo2-77m": {"model_type": "olmo2", **_LARGE, "num_attention_heads": 12, "num_key_value_heads": 3, **_rope(5e5)},
    # biases of q, k and v; three query heads per KV head
    "qwen2-79m": {"model_type": "qwen2", **_LARGE, "num_attention_heads": 6, "num_key_value_heads": 2, **_rope(1e6)},
    # latents; all layers dense, none of experts
    "mla-28m": {
        "model_type": "deepseek_v3", **_SMALL, "num_hidden_layers": 8, "first_k_dense_replace": 99,
        "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": None, "kv_lora_rank": 160,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64, **_rope(5e5),
    },
}  # fmt: skip
# tokens of a sequence, share of the time, tokens of a step; as far as a make's longest texts
_STAGES = (
    (512, 0.45, 32_768), (4096, 0.22, 65_536), (16384, 0.23, 65_536), (32768, 0.10, 65_536), (65536, 0.10, 65_536),
)  # fmt: skip
_LEARNED = 0.8  # share of answers' tokens that are right, below which the first stage goes on, for at most a third more
_EVERY = 25  # steps from one record to the next
_MOST_SKIPPED = 5  # steps without a finite gradient, one after another, at which training fails

# attention in place of the function below, of one module, its q, k and v and the scale; set by `replaced`
_instead: list[Callable[..., Tensor]] = []


@contextlib.contextmanager
def replaced(attention: Callable[..., Tensor]) -> Iterator[None]:
    """``attention(module, q, k, v, scale) -> out`` in all layers without a sliding window, within the block."""
    _instead.append(attention)
    try:
        yield
    finally:
        _instead.pop()


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention of whole sequences without padding; sliding layers read two blocks of a window each."""
    L = query.shape[2]
    assert attention_mask is None
    assert key.shape[2] == L
    if sliding_window is not None and sliding_window < L:
        out = _local(query, key, value, scaling, sliding_window)
    elif _instead and sliding_window is None:
        out = _instead[-1](module, query, key, value, scaling)
    else:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def _local(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int) -> Tensor:
    (B, H, real, _), K = q.shape, k.shape[1]
    q, k, v = (F.pad(x, (0, 0, 0, -real % window)) for x in (q, k, v))  # whole blocks; nothing sees the end
    L = q.shape[2]
    blocks = L // window

    def cut(x: Tensor) -> Tensor:  # [B, heads, L, D] -> [B * blocks, heads, window, D]
        return x.unflatten(2, (blocks, window)).transpose(1, 2).flatten(0, 1)

    def paired(x: Tensor) -> Tensor:  # each block with the one before it
        before = F.pad(x, (0, 0, window, 0))[:, :, :L]
        return torch.cat([cut(before), cut(x)], 2).repeat_interleave(H // K, 1)

    t = torch.arange(window, device=q.device)[:, None]
    s = torch.arange(2 * window, device=q.device)[None]
    mask = (s > t) & (s <= t + window)
    first = mask & (s >= window)
    masks = torch.where((torch.arange(B * blocks, device=q.device) % blocks == 0)[:, None, None], first, mask)
    out = F.scaled_dot_product_attention(cut(q), paired(k), paired(v), attn_mask=masks[:, None], scale=scale)
    return out.unflatten(0, (B, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :real]


AttentionInterface.register("transfer", attend)


def longest(make: str) -> int:
    """Tokens of the longest texts that a make is trained and measured on."""
    return _LONGEST.get(make, 32768)


def stages_of(make: str) -> tuple[tuple[int, float, int], ...]:
    """The stages of a make's training."""
    return tuple(stage for stage in _STAGES if stage[0] <= longest(make))


def new_model(make: str, seed: int, **changes: Any) -> PreTrainedModel:
    """A model with random weights in float32; changes: of its configuration."""
    given = {"max_position_embeddings": longest(make)} | dict(MAKES[make]) | changes
    config = AutoConfig.for_model(**(_COMMON | given))
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="transfer")
    return model


class _Batches(IterableDataset):  # type: ignore[type-arg]
    """Batches of one length without end, each worker with numbers of its own."""

    def __init__(self, texts: Texts, length: int, rows: int, seed: int) -> None:
        self.args = (texts, length, rows, seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        texts, length, rows, seed = self.args
        info = torch.utils.data.get_worker_info()
        rng = np.random.default_rng([seed, length, 0 if info is None else info.id])
        while True:
            ids, weights = zip(*(training(texts, rng, length) for _ in range(rows)), strict=True)
            yield torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(weights))


def batches(texts: Texts, length: int, per_step: int, *, seed: int, workers: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Batches of ``per_step`` tokens without end: tokens and their weights ``[B, length]``."""
    return DataLoader(
        _Batches(texts, length, max(1, per_step // length), seed), batch_size=None, num_workers=workers,
        pin_memory=torch.cuda.is_available(), prefetch_factor=4 if workers else None,
    )  # fmt: skip


def rate_at(share: float, peak: float) -> float:
    """Learning rate after that share of the time: constant, and over the last 40 % down to a twentieth."""
    return peak * (1.0 if share < 0.6 else max(0.05, 1 - 0.95 * (share - 0.6) / 0.4))


def new_optimizer(model: PreTrainedModel, rate: float) -> torch.optim.Optimizer:
    """AdamW; norms and biases do not decay."""
    parts = [[p for p in model.parameters() if (p.dim() > 1) == decayed] for decayed in (True, False)]
    return torch.optim.AdamW(
        [{"params": part, "weight_decay": decay} for part, decay in zip(parts, (0.1, 0.0), strict=True)],
        lr=rate, betas=(0.9, 0.95), fused=model.device.type == "cuda",
    )  # fmt: skip


def train(
    model: PreTrainedModel, texts: Texts, seconds: float, *, seed: int, workers: int,
    stages: Sequence[tuple[int, float, int]], log: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    """Train all weights for so many seconds of wall clock, shared out over the stages; ``log`` gets a record at times.

    A stage ends when its time is over, however few steps it had, so that what follows has the time that it needs. A
    step without a finite gradient is skipped and logged; FloatingPointError after several.
    """
    device = model.device
    large = sum(p.numel() for p in model.parameters()) > 60e6
    peak = 1e-3 if large else 1.5e-3
    optimizer = new_optimizer(model, peak)
    torch.set_float32_matmul_precision("high")
    model.train()
    began, steps, tokens, failed, record = time.monotonic(), 0, 0, 0, dict[str, Any]()
    for index, (length, share, per_step) in enumerate(stages):
        data = batches(texts, length, per_step, seed=seed, workers=workers)
        start, right = (time.monotonic() - began) / seconds, 0.0
        end = start + (1 - start) * share / sum(share for _, share, _ in stages[index:])
        for count, (ids, weights) in enumerate(data):
            passed = (time.monotonic() - began) / seconds
            goes_on = index == 0 and right < _LEARNED and passed < end * 4 / 3
            if count and passed >= end and not goes_on:
                break
            for group in optimizer.param_groups:
                group["lr"] = rate_at(passed, peak) * min(1.0, (steps + 1) / 150)
            noted = count % _EVERY == 0
            steps, tokens = steps + 1, tokens + ids.numel()
            try:
                record, failed = step(model, optimizer, ids.to(device), weights.to(device), noted), 0
            except FloatingPointError as error:
                optimizer.zero_grad(set_to_none=True)
                record, failed = {"skipped": str(error)}, failed + 1
                if failed == _MOST_SKIPPED:
                    raise
            if record:
                right = record.get("answers", right)
                at = {"length": length, "step": steps, "tokens": tokens, "seconds": time.monotonic() - began}
                log(at | record)
    model.eval()


def step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, ids: Tensor, weights: Tensor, noted: bool
) -> dict[str, Any]:
    """One step on ids ``[B, L]`` with a weight per token; noted: with its loss and share of right answers.

    Raises FloatingPointError, naming a parameter, where the gradient is not finite.
    """
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    targets, weights = ids[:, 1:], weights[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view_as(targets)
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    # asking for the norm also waits for the device, so that stages end when they should
    if not torch.isfinite(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
        bad = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        raise FloatingPointError(f"gradient: wanted finite numbers, got others in {len(bad)} parameters, as {bad[:3]}")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if not noted:
        return {}
    asked = weights > 1
    right = (logits.argmax(-1) == targets)[asked].float().mean()
    return {"loss": float(losses.detach()[~asked].mean()), "answers": float(right)}
