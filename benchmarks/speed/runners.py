"""Ways to read a prompt and go on token by token, timed: plain `generate`, and a `GraphDecoder`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationConfig, PreTrainedModel, StoppingCriteriaList

from condense.caches import CACHE, cache_nbytes
from condense.evaluate.compare import Stopwatch, now
from condense.models import GraphDecoder, condensed_layers


@dataclass(frozen=True)
class TimedRun:
    """One prompt: seconds to the first token, of each further one, to prepare; bytes of the cache after the prompt, and
    those of them that do not lie on the model's device.
    """

    first_s: float
    steps_s: list[float]
    cache_bytes: int
    host_bytes: int
    setup_s: float = 0.0


def read_by_loop(
    model: PreTrainedModel, ids: Tensor, steps: int, chunk: int | None, *, cache: str | None = None
) -> TimedRun:
    """Plain ``model.generate``, greedy; ids ``[B, L]``. chunk: its ``prefill_chunk_size``.

    A condensed model on CUDA replays its steps (`condense.models.replay`), a stock one takes Hugging Face's loop over a
    growing cache. cache: ``cache_implementation``; "dynamic" gives a condensed model that loop, too.
    Raises ValueError for a chunk smaller than the prompt where a method looks ahead in it.
    """
    ahead = next((method for method in condensed_layers(model).values() if method.layout.lookahead), None)
    if ahead is not None and chunk is not None and chunk < ids.shape[1]:
        raise ValueError(f"{ahead} needs the whole prompt in one forward: leave prefill_chunk out")
    caches: list[Cache] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caches[:] = [kwargs[CACHE]]

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        watch = timed_generate(model, ids, steps, cache_implementation=cache, prefill_chunk_size=chunk)
    finally:
        hook.remove()
    return _reading(watch, caches[0], ids.device)


def read_by_graph(
    model: PreTrainedModel, ids: Tensor, steps: int, chunk: int | None, *, compile: bool = False
) -> TimedRun:
    """A static cache and a replayed CUDA graph, ids ``[B, L]``; the first token's time is without preparing them."""
    start = now(ids.device)
    decoder = GraphDecoder(model, batch_size=ids.shape[0], max_length=ids.shape[1] + steps, compile=compile)
    decoder.prefill(ids[:, :1])
    setup_s = now(ids.device) - start
    watch = Stopwatch(ids.device)
    tokens = decoder.prefill(ids, chunk=chunk).argmax(-1)
    watch.note()
    for _ in range(steps):
        tokens = decoder.step(tokens).argmax(-1)
        watch.note()
    return _reading(watch, decoder.cache, ids.device, setup_s)


def timed_generate(model: PreTrainedModel, ids: Tensor, steps: int, **settings: Any) -> Stopwatch:
    """The times of plain greedy ``model.generate`` of ids ``[B, L]``, the first new token and ``steps`` more.

    settings: further ones of `generate`. Those of the model (beams, penalties, tokens that end a text) are not used.
    """
    watch, own = Stopwatch(ids.device), model.generation_config
    model.generation_config = GenerationConfig()
    try:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            use_cache=True,
            max_new_tokens=steps + 1,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([watch]),
            **settings,
        )
    finally:
        model.generation_config = own
    return watch


def _reading(watch: Stopwatch, cache: Cache, device: torch.device, setup_s: float = 0.0) -> TimedRun:
    nbytes, (first_s, *steps_s) = cache_nbytes(cache), watch.seconds()
    return TimedRun(first_s, steps_s, nbytes, nbytes - cache_nbytes(cache, device.type), setup_s)


class Runner(NamedTuple):
    """A way to run a model. compile: whether the step of a GraphDecoder is compiled first, None: plain generate, with
    ``cache`` as its ``cache_implementation``.
    """

    description: str
    compile: bool | None
    cache: str | None = None

    def read(self, model: PreTrainedModel, ids: Tensor, steps: int, chunk: int | None) -> TimedRun:
        """Read ids ``[B, L]`` in pieces of ``chunk`` tokens (None: at once) and make ``steps`` further tokens."""
        if self.compile is None:
            return read_by_loop(model, ids, steps, chunk, cache=self.cache)
        return read_by_graph(model, ids, steps, chunk, compile=self.compile)


RUNNERS = {
    name + suffix: Runner(f"{how}, {name if name == 'condensed' else 'stock'} attention", compile)
    for suffix, how, compile in (
        ("", "plain generate", None),
        ("_graph", "GraphDecoder: static cache and CUDA graph", False),
        ("_compiled", "static cache, step compiled by torch.compile, CUDA graph", True),
    )
    for name in ("dense", "condensed")
}
# compiling a large model takes a minute
DEFAULT_RUNNERS = tuple(name for name, runner in RUNNERS.items() if not runner.compile)
RUNNERS["condensed_growing"] = Runner("condensed attention, plain generate over a growing cache", None, "dynamic")
