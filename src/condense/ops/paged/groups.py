"""The parts of a record, made of a group's tokens by the settings alone.

Shapes: K KV heads, G groups of g tokens, D and Dv widths.
"""

from __future__ import annotations

from torch import Tensor

from condense.ops.api import matched_bias, pool_groups
from condense.ops.recall.index import build_index
from condense.ops.step.settings import StepSettings
from condense.ops.types import Chunks


def represent(
    chunks: Chunks, summary: Tensor | None, settings: StepSettings, *, scale: float, backend: str
) -> tuple[Tensor, ...]:
    """Entries ``[B, K, G, D]`` and ``[B, K, G, Dv]`` of chunks, of width 0 where no query sees them; their biases
    ``[B, K, G, 1]``, if matched; then, with a choice, the index and the packed tokens of the groups: in the order of
    `condense.ops.step.entry_names`.
    """
    assert settings.key_pooling is not None
    assert settings.value_pooling is not None
    kept: tuple[Tensor, ...] = ()
    if settings.choice is not None:
        tokens = chunks.tokens()
        kept = *build_index(tokens[0]), settings.store_format.pack(*tokens)
        if not settings.choice.pool:
            return tokens[0][:, :, :, 0, :0], tokens[1][:, :, :, 0, :0], *kept
    k, v, *lse = pool_groups(
        chunks, summary, scale=scale, key_pooling=settings.key_pooling, value_pooling=settings.value_pooling,
        return_lse=settings.matched, backend=backend,
    )  # fmt: skip
    biases = [matched_bias(summary, k, x, scale=scale, backend=backend) for x in lse if summary is not None]
    return k, v, *biases, *kept
