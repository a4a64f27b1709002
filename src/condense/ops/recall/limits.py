"""The limits of Recall's kernels: attention over a prompt, and the decode step.

Shapes as in `condense.ops.recall.api` and `condense.ops.recall.state`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from condense.ops.hopper import limits as hopper_limits
from condense.ops.recall.choice import Choice, IndexChoice
from condense.ops.recall.sources import RecallSources
from condense.ops.recall.state import RecallSettings, RecallState
from condense.ops.spans import RuleSpans, UniformRule
from condense.ops.triton.host import gpu_of
from condense.ops.triton.limits import DTYPES, MAX_STEP_LATENT, MAX_STEP_WIDTH, WIDTHS, absence, latent_obstacle
from condense.ops.types import NewToken

# one program ranks all groups of a KV head and packs two counts of groups into 32 bits
MAX_GROUPS = 2**15
# one program holds all pairs of an open group and a slot
MAX_PAIRS = 2**16
# the query heads of a KV head are one tile, which has 32 rows in float32; the loop over a group's blocks is unrolled
MAX_HEADS, MAX_HEADS_FLOAT32, MAX_BLOCKS, MAX_GROUP_SIZE = 64, 32, 16, 128
# keys of latents, by which all heads choose together
LATENT_WIDTHS = (288, 576)
# keys and values of Hopper's kernels; groups are loaded by rows of eight, and a block of 64 keys holds whole groups
HOPPER_WIDTHS, HOPPER_GROUPS = ((64, 64), (128, 128)), (8, 16, 32, 64)


def attend_obstacle(q: Tensor, sources: RecallSources, choice: Choice) -> str | None:
    """Why the kernels cannot attend over a prompt, None if they can; see `condense.ops.recall.attend_recall`."""
    entries, _, window, spans = sources
    if (missing := absence(q.device)) is not None:
        return missing
    D, Dv, K, G = q.shape[3], window.v.shape[3], window.k.shape[1], entries.k.shape[2]
    on_gpu, R = q.device.type == "cuda", q.shape[1] // K
    if not isinstance(spans, RuleSpans) or not isinstance(spans.rule, UniformRule):
        return f"takes the spans of a uniform rule, got {spans}"
    if q.dtype not in DTYPES:
        return f"takes {', '.join(map(str, DTYPES))}, got {q.dtype}"
    if on_gpu and (D not in WIDTHS or Dv not in WIDTHS):
        return f"has kernels for head widths {', '.join(map(str, WIDTHS))}, got {D} and {Dv}"
    most = MAX_HEADS_FLOAT32 if q.dtype == torch.float32 else MAX_HEADS
    if most < R:
        return f"takes up to {most} query heads per KV head in {q.dtype}, got {R}"
    if G > MAX_GROUPS:
        return f"chooses from up to {MAX_GROUPS:,} groups, got {G:,}"
    return _choice_obstacle(choice, K, on_gpu=on_gpu) if isinstance(choice, IndexChoice) else None


def _choice_obstacle(choice: IndexChoice, K: int, *, on_gpu: bool) -> str | None:
    """Why the kernels cannot choose for K KV heads, None if they can."""
    (_, H, _, D), dtype, choosers = choice.q.shape, choice.q.dtype, choice.index.codes.shape[1]
    if choosers not in (1, K):
        return f"takes an index for each of {K} KV heads or one for all, got {choosers}"
    if on_gpu and D not in WIDTHS + LATENT_WIDTHS:
        return f"scores an index of keys of widths {', '.join(map(str, WIDTHS + LATENT_WIDTHS))}, got {D}"
    most = MAX_HEADS_FLOAT32 if dtype == torch.float32 and max(WIDTHS) >= D else MAX_HEADS
    if H // choosers > most:
        return f"chooses for up to {most} query heads of width {D} at once in {dtype}, got {H // choosers}"
    if choice.settings.num_blocks > MAX_BLOCKS:
        return f"takes an index of up to {MAX_BLOCKS} blocks per group, got {choice.settings.num_blocks}"
    return None


def hopper_obstacle(q: Tensor, sources: RecallSources, choice: Choice, *, softcap: float) -> str | None:
    """Why the kernels for Hopper cannot attend over a prompt, None if they can; arguments as in `attend_obstacle`."""
    if softcap:
        return f"{hopper_limits.NO_SOFTCAP}, got a cap of {softcap}"
    if (obstacle := attend_obstacle(q, sources, choice)) is not None:
        return obstacle
    bias, window = sources.entries.bias, sources.window
    if isinstance(bias, Tensor):
        return f"takes one bias for all entries, got a tensor of shape {tuple(bias.shape)}"
    widths, R = (q.shape[3], window.v.shape[3]), q.shape[1] // window.k.shape[1]
    if q.device.type != "cuda" or gpu_of(q.device).capability != (9, 0):
        return "needs a GPU of compute capability 9.0 (H100, H200)"
    if q.dtype not in hopper_limits.DTYPES:
        return f"takes {', '.join(map(str, hopper_limits.DTYPES))}, got {q.dtype}"
    if widths not in HOPPER_WIDTHS:
        return f"takes keys and values of widths {', '.join(map(str, HOPPER_WIDTHS))}, got {widths}"
    if R < 2:
        return "takes at least 2 query heads per KV head, got 1"
    if sources.group_size not in HOPPER_GROUPS:
        return f"takes groups of {', '.join(map(str, HOPPER_GROUPS))} tokens, got {sources.group_size}"
    return None


def step_obstacle(token: NewToken, state: RecallState, settings: RecallSettings, *, latent: int = 0) -> str | None:
    """Why the kernels cannot run this step, None if they can; arguments as in `condense.ops.recall.recall_step`."""
    obstacle = store_obstacle(token.k, token.v, settings, latent=latent)
    if obstacle is not None:
        return obstacle
    G, S = state.entries_k.shape[2], state.held.shape[2]
    return groups_obstacle(G) or pairs_obstacle(settings.quota.at(G), S)


def groups_obstacle(groups: int) -> str | None:
    """Why the kernels cannot choose from this number of groups, None if they can."""
    if groups > MAX_GROUPS:
        return f"chooses from up to {MAX_GROUPS:,} groups, got room for {groups:,}"
    return None


def pairs_obstacle(opened: int, slots: int) -> str | None:
    """Why the kernels cannot look for ``opened`` groups in ``slots`` slots of a KV head, None if they can."""
    if opened * slots > MAX_PAIRS:
        return f"looks for up to {MAX_PAIRS:,} pairs of an open group and a slot, got {opened:,} times {slots:,}"
    return None


def store_obstacle(k: Tensor, v: Tensor, settings: RecallSettings, *, latent: int = 0) -> str | None:
    """Why the kernels cannot run any step with keys and values like k and v, None if they can."""
    if (missing := absence(k.device)) is not None:
        return missing
    D, Dv, index = k.shape[3], v.shape[3], settings.index
    if k.dtype not in DTYPES:
        return f"takes {', '.join(map(str, DTYPES))}, got {k.dtype}"
    if latent and (latent > MAX_STEP_LATENT or D > MAX_STEP_LATENT + MAX_STEP_WIDTH):
        return (
            f"takes latents of up to {MAX_STEP_LATENT} columns, with up to {MAX_STEP_WIDTH} others, got {latent} of {D}"
        )
    if settings.pool and (obstacle := latent_obstacle(latent, settings.entries.bits)) is not None:
        return obstacle
    if not latent and not (1 <= D <= MAX_STEP_WIDTH and 1 <= Dv <= MAX_STEP_WIDTH):
        return f"decodes widths up to {MAX_STEP_WIDTH}, got {D} and {Dv}"
    if D * index.bits % 16:
        return f"reads an index of {index.bits} bits in words of 16, got keys of width {D}"
    if index.group_size > MAX_GROUP_SIZE or index.num_blocks > MAX_BLOCKS:
        return (
            f"takes groups of up to {MAX_GROUP_SIZE} tokens in up to {MAX_BLOCKS} blocks, got {index.group_size} "
            f"tokens in {index.num_blocks}"
        )
    return None
