"""Goals, candidates and texts of a calibration."""

import math
from dataclasses import dataclass
from typing import Annotated

from condense.config import Natural, Positive, Range, Share, check_fields, check_list, check_positive
from condense.methods import CCA, LCA, Dense, Method, Recall, StreamingLLM


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """Goals, candidates and texts of a calibration; at least one of ``budget_nats`` and ``cache`` is needed.

    budget_nats: the most that the model may lose: mean divergence of its predictions from the dense model's, in nats
    per token, over the second half of each text. cache: at most this share of the dense model's cache is kept on the
    device, counted at ``cache_length`` tokens (None: ``length``). min_found: the share that must be found of the hidden
    numbers that the dense model finds; without ``budget_nats`` only as far as ``cache`` allows.
    candidates: the methods, or their names, to choose from in each layer; empty for `default_candidates`.
    length: tokens of each text, >= 128. texts: how many are measured, and as many others verify the result, >= 2.
    hidden_numbers: if above 0, as many further texts, with this many numbers hidden in each and asked for at its end.
    seed: decides which stretches of text are taken, and which numbers.
    Raises ValueError for a field out of range or of another type, for candidates that look ahead, and for two with the
    same steps.
    """

    budget_nats: float | None = None
    cache: float | None = None
    min_found: Share = 0.99
    candidates: tuple[Method, ...] = ()
    length: Annotated[int, Range(128)] = 4096
    texts: Annotated[int, Range(2)] = 8
    hidden_numbers: Natural = 0
    cache_length: Positive | None = None
    seed: Natural = 0

    @property
    def counted_length(self) -> int:
        """Tokens at which the cache is counted."""
        return self.length if self.cache_length is None else self.cache_length

    def __post_init__(self) -> None:
        check_list("candidates", self.candidates)
        object.__setattr__(self, "candidates", tuple(map(Method.parse, self.candidates)))
        check_fields(self)
        if self.budget_nats is None and self.cache is None:
            raise ValueError("budget_nats and cache must not both be None: say what may be lost, or how much is kept")
        for name in ("budget_nats", "cache"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.cache is not None and self.cache > 1:
            raise ValueError(f"cache must be a share of the dense cache, at most 1 (0.09 for 9 %), got {self.cache}")
        for method in self.candidates:
            # its loss over whole texts, which see later tokens, would say nothing about its steps
            if (ahead := method.layout.lookahead) is not None:
                raise ValueError(f"candidates: {method} sees later tokens of a whole text: use {ahead.causal_setting}")
        if len({method.as_steps for method in self.candidates}) < len(self.candidates):
            raise ValueError(f"candidates must differ in their steps, got {', '.join(map(str, self.candidates))}")
        if self.candidates and all(isinstance(method, Dense) for method in self.candidates):
            raise ValueError("candidates must hold one besides dense attention")


def default_candidates(length: int, *, latents: bool) -> tuple[Method, ...]:
    """Dense attention, Recall with all groups open and tokens in 4 bits, Recall with its store in host memory, pooling
    and a window, for texts of ``length`` tokens.

    Windows are a thirty-second of the text, 64 to 1,024 tokens. Recall opens an eighth of the groups, 2 to 128, and
    keeps slots for a sixty-fourth, at most 64. Entries of pooling have 4 bits.
    latents: for models with latents (MLA). There Recall keeps its store on the device, in 4 bits and groups of 32, and
    opens all groups, or half of them, at most 512, because all query heads open the same groups.
    """
    window = max(64, min(1024, length // 32 // 16 * 16))
    base = StreamingLLM(sink=4, window=window)
    if latents:
        num_recall = min(512, math.ceil(length / 32 / 2))
        recall = Recall(window=window, group_size=32, num_recall=num_recall, store_bits=4)
        pooled = LCA(window=window, rep_bias="log_size", entry_bits=4)
        return Dense(), recall.replace(num_recall=1.0), recall, pooled, base
    means = CCA(window=window, key_pooling="mean", value_pooling="mean", rep_bias="log_size", entry_bits=4)
    num_recall = max(2, min(128, math.ceil(length / 16 / 8)))
    slots = min(64, math.ceil(length / 16 / 64))
    recall = Recall(window=window, num_recall=num_recall, store="host", slots=slots)
    whole = Recall(window=window, num_recall=1.0, store_bits=4)
    return Dense(), whole, recall, means, base
