"""What a method says of itself as data: which tokens become which entries, when, and with which bias.

Shapes: c tokens per chunk, p entries per chunk. A chunk is the tokens that a method handles together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from condense.ops import Pooling, UniformRule


class ChunkPooling(NamedTuple):
    """A method's `condense.Method.represent` as data, for kernels.

    key, value: how a chunk's tokens become its last entry. num_focal: those with the highest scores, ties to the
    earlier, are not pooled but entries of their own, ahead of it and in order of position. weight_scale: scale of the
    scores, None: attention's.
    """

    key: Pooling
    value: Pooling
    num_focal: int = 0
    weight_scale: float | None = None


class Lookahead(NamedTuple):
    """Entries of a prompt depend on queries that come after tokens which see them: for inference only.

    permitted: the user consents to gradients all the same. causal_setting: the setting without it, as errors name it.
    """

    permitted: bool
    causal_setting: str


@dataclass(frozen=True)
class Layout:
    """Who sees what, and how a chunk of c tokens becomes its p entries.

    rule: the window, the chunks behind it, their entries. summary_delay: tokens after a chunk's last one until its
    entries can be made, at most the window. num_summary: queries, ending ``summary_delay`` tokens after a chunk's last,
    whose mean weighs the chunk; 0: none needed. pooling: how kernels make the entries, None where only the method's
    `represent` knows. bias: what is added to the scaled scores of a chunk's entries, one number each; empty for none.
    lookahead: None for a causal method.
    """

    rule: UniformRule
    summary_delay: int = 0
    num_summary: int = 0
    pooling: ChunkPooling | None = None
    bias: tuple[float, ...] = ()
    lookahead: Lookahead | None = None


# tokens that leave the window one by one and stay entries of their own
EACH_TOKEN = ChunkPooling("mean", "mean")


def first_tokens(window: int | None, kept: int) -> Layout:
    """The first ``kept`` tokens stay, each its own entry; of the others the last ``window``, None for all of them."""
    return Layout(UniformRule(chunk=1, window=window, max_chunks=kept), pooling=EACH_TOKEN)
