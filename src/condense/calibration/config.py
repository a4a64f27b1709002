"""Goals, candidates and texts of a calibration."""

from collections.abc import Sequence
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
    candidates: the methods, or their names, to choose from in each layer; empty for `default_candidates`. host_memory:
    whether tokens may lie in host memory; if not, the defaults are others, and those that are named must not have them
    there.
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
    host_memory: bool = True
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
            choice = method.layout.choice
            if not self.host_memory and choice is not None and choice.store.on_host:
                raise ValueError(f"candidates: wanted no tokens in host memory, got {method}: use store=device")
        if len({method.as_steps for method in self.candidates}) < len(self.candidates):
            raise ValueError(f"candidates must differ in their steps, got {', '.join(map(str, self.candidates))}")
        if self.candidates and all(isinstance(method, Dense) for method in self.candidates):
            raise ValueError("candidates must hold one besides dense attention")


def default_candidates(length: int, *, latents: bool, host_memory: bool = True) -> tuple[Method, ...]:
    """Methods to choose from for texts of ``length`` tokens, if none are named.

    With host memory: dense attention, three settings of Recall, pooling and a window. Recall reads prompts and keeps
    tokens, in 4 bits, as the named settings do: on the device with all groups open, and in host memory with a quarter
    open but at most 512, or a sixteenth but at most 128, with as many slots. Its window is a thirty-second of the text,
    64 to 256 tokens; the windows of pooling and the last candidate are up to 1,024 tokens. Entries of pooling have 4
    bits.
    Without: Recall on the device, with all groups open for the first layer (`barred`) and with 512 for the others,
    pooling with the window of Recall, and a window.
    latents: for models with latents (MLA), for which the named settings have rules of their own (`Method.of_layer`).
    """
    window = max(64, min(1024, length // 32 // 16 * 16))
    near = StreamingLLM(sink=4, window=window)
    recall = Recall(window=min(256, window), num_recall=1.0, prompt="shared", store_bits=4)
    means = LCA() if latents else CCA(key_pooling="mean", value_pooling="mean")
    pooled = means.replace(window=window, rep_bias="log_size", entry_bits=4)
    if not host_memory:
        fewer = recall.replace(num_recall=512)
        both = (method.of_layer(is_first=method is recall, has_latents=latents) for method in (recall, fewer))
        return *both, pooled.replace(window=recall.window), near
    few = max(2, min(128, length // recall.group_size // 16))
    hosted = [recall.replace(num_recall=number, store="host", slots=number) for number in (4 * few, few)]
    return Dense(), *(each.of_layer(is_first=False, has_latents=latents) for each in (recall, *hosted)), pooled, near


def barred(layers: Sequence[int]) -> set[tuple[int, int]]:
    """Layers and numbers of default candidates without host memory that do not go together.

    On the device open groups take time and no room, so all groups open would always win: only the first layer, whose
    attention is spread over many tokens, may have them.
    """
    return {(layer, 1 if layer == layers[0] else 0) for layer in layers}
