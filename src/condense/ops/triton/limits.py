"""The limits of the Triton kernels. Does not import Triton, so that it can be read where Triton is missing."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from condense.ops.entries import BLOCK_WIDTH
from condense.ops.recall.choice import Choice, IndexChoice
from condense.ops.recall.sources import RecallSources
from condense.ops.spans import RuleSpans, UniformRule
from condense.ops.step.settings import StepSettings
from condense.ops.types import Problem

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# head widths at which the kernels were tested against float64 on a GPU
WIDTHS = (64, 80, 96, 128, 192, 256)
# attention's kernels have parameters for up to this many sources
MAX_SOURCES = 4
# the pooling kernels hold rows of this width in registers; they loop over tokens, so group sizes have no limit
MAX_POOLING_WIDTH = 1024
MAX_STEP_WIDTH, MAX_STEP_LATENT = 256, 512
# a decode step ranks the tokens of a chunk against each other in registers
MAX_FOCAL_CHUNK = 128
# one program ranks all groups of a KV head and packs two counts of groups into 32 bits
MAX_GROUPS = 2**15
# one program looks through all slots of a KV head
MAX_SLOTS = 2**16
# the query heads of a KV head are one tile, which has 32 rows in float32; the loop over a group's blocks is unrolled
MAX_HEADS, MAX_HEADS_FLOAT32, MAX_BLOCKS, MAX_GROUP_SIZE = 64, 32, 16, 128
# keys of latents, by which all heads choose together
LATENT_WIDTHS = (288, 576)
# looked up once, because every step asks
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def absence(device: torch.device) -> str | None:
    """Why no Triton kernel can run on a device, None if they can."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a CUDA device, or TRITON_INTERPRET=1 in the environment to be interpreted, got {device.type}"
    if not _HAS_TRITON:
        return "needs the triton package"
    return None


def attend_obstacle(problem: Problem) -> str | None:
    """Why the attention kernels cannot take a problem, None if they can."""
    device, dtype = problem.device, problem.dtype
    if (missing := absence(device)) is not None:
        return missing
    if problem.dropout_p > 0:
        return f"has no attention dropout (set the model's attention dropout to 0), got {problem.dropout_p}"
    if problem.num_sources > MAX_SOURCES:
        return f"takes up to {MAX_SOURCES} sources, got {problem.num_sources}"
    if device.type == "cuda" and dtype not in DTYPES:
        return f"takes {', '.join(map(str, DTYPES))}, got {dtype}"
    if device.type == "cuda" and any(width not in WIDTHS for width in problem.widths):
        return f"has kernels for head widths {', '.join(map(str, WIDTHS))}, got {problem.widths}"
    return None


def recall_obstacle(q: Tensor, sources: RecallSources, choice: Choice, *, softcap: float = 0.0) -> str | None:
    """Why the kernels cannot run `condense.ops.attend_recall` with these arguments, None if they can."""
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
    return _index_obstacle(choice, K, on_gpu=on_gpu) if isinstance(choice, IndexChoice) else None


def _index_obstacle(choice: IndexChoice, K: int, *, on_gpu: bool) -> str | None:
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


def pool_obstacle(problem: Problem) -> str | None:
    """Why the kernels of summaries and pooling cannot take a problem, None if they can."""
    if (missing := absence(problem.device)) is not None:
        return missing
    if problem.dtype not in DTYPES:
        return f"pools {', '.join(map(str, DTYPES))}, got {problem.dtype}"
    if max(problem.widths) > MAX_POOLING_WIDTH:
        return f"pools head widths up to {MAX_POOLING_WIDTH}, got {problem.widths}"
    return None


def step_obstacle(
    device: torch.device,
    dtype: torch.dtype,
    widths: tuple[int, int],
    settings: StepSettings,
    *,
    latent: int = 0,
    entries: int = 0,
) -> str | None:
    """Why the decode step kernels cannot run a method's steps with this device, dtype and widths, None if they can.

    widths: of keys and values. latent: columns of the keys that are the values (absorbed MLA), else 0. entries: that
    the state has room for; 0 if that is not known.
    """
    if (missing := absence(device)) is not None:
        return missing
    if dtype not in DTYPES:
        return f"takes {', '.join(map(str, DTYPES))}, got {dtype}"
    D, Dv = widths
    if latent and not (0 < latent < D and latent <= MAX_STEP_LATENT and D - latent <= MAX_STEP_WIDTH and Dv == 0):
        return (
            f"takes latents of up to {MAX_STEP_LATENT} columns of the keys, with up to {MAX_STEP_WIDTH} others and "
            f"values of width 0, got {latent} of {D} and values of width {Dv}"
        )
    if not latent and not (1 <= D <= MAX_STEP_WIDTH and 1 <= Dv <= MAX_STEP_WIDTH):
        return f"decodes widths up to {MAX_STEP_WIDTH}, got {D} and {Dv}"
    return settings_obstacle(settings) or _rounding_obstacle(latent, settings) or _choice_obstacle(D, settings, entries)


def _rounding_obstacle(latent: int, settings: StepSettings) -> str | None:
    """Why decode step kernels cannot round entries of latents of this width to so many bits, None if they can."""
    if settings.entry_bits < 16 and latent % BLOCK_WIDTH and settings.sees_entries:
        return (
            f"rounds entries in blocks of {BLOCK_WIDTH} channels, whole ones of latents, got latents of {latent} "
            f"columns and entry_bits={settings.entry_bits}"
        )
    return None


def _choice_obstacle(D: int, settings: StepSettings, entries: int) -> str | None:
    """Why decode step kernels cannot choose among groups by an index of keys of width D, None if they can."""
    if settings.choice is None:
        return None
    index, slots = settings.choice.index, settings.choice.store.slots
    if D * index.bits % 16:
        return f"reads an index of {index.bits} bits in words of 16, got keys of width {D}"
    if index.group_size > MAX_GROUP_SIZE or index.num_blocks > MAX_BLOCKS:
        return (
            f"takes groups of up to {MAX_GROUP_SIZE} tokens in up to {MAX_BLOCKS} blocks, got {index.group_size} "
            f"tokens in {index.num_blocks}"
        )
    if entries > MAX_GROUPS:
        return (
            f"chooses from up to {MAX_GROUPS:,} groups, got room for {entries:,} (a larger group_size or a shorter "
            "cache has fewer)"
        )
    if slots > MAX_SLOTS:
        return f"looks through up to {MAX_SLOTS:,} slots, got {slots:,}"
    return None


def settings_obstacle(settings: StepSettings) -> str | None:
    """Why the decode step kernel cannot run a method's steps on any device, None if it can."""
    focal, chunk, num_summary = settings.num_focal, settings.rule.chunk, settings.num_summary
    if settings.key_pooling is None or settings.value_pooling is None:
        return "supports built-in pooling only in a decode step, and this method makes its entries itself"
    if settings.rule.entries != focal + 1:
        return f"makes num_focal + 1 = {focal + 1} entries per chunk, got {settings.rule.entries}"
    if settings.entry_bits < 16 and (focal > 0 or settings.has_first):
        return f"keeps single tokens among entries in 16 bits, got entry_bits={settings.entry_bits}"
    if focal > 0 and chunk > MAX_FOCAL_CHUNK:
        return f"chooses focal tokens in chunks of up to {MAX_FOCAL_CHUNK} tokens, got {chunk}"
    if focal > 0 and not (focal < chunk and num_summary > 0):
        return f"chooses some tokens of a chunk by a summary query, got {focal} of {chunk}, {num_summary} queries"
    return None
