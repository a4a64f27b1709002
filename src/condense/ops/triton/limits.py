"""The limits of the Triton kernels. Does not import Triton, so that it can be read where Triton is missing."""

from __future__ import annotations

import importlib.util
import os

import torch

from condense.ops.entries import BLOCK_WIDTH
from condense.ops.types import Problem, StepSettings

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
    device: torch.device, dtype: torch.dtype, widths: tuple[int, int], settings: StepSettings, *, latent: int = 0
) -> str | None:
    """Why the decode step kernel cannot run a method's steps with this device, dtype and widths, None if it can.

    widths: of keys and values. latent: columns of the keys that are the values (absorbed MLA), else 0.
    """
    obstacle = absence(device) or settings_obstacle(settings)
    if obstacle is not None:
        return obstacle
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
    return latent_obstacle(latent, settings.entry_bits)


def latent_obstacle(latent: int, entry_bits: int) -> str | None:
    """Why decode step kernels cannot round entries of latents of this width to so many bits, None if they can."""
    if entry_bits < 16 and latent % BLOCK_WIDTH:
        return (
            f"rounds entries in blocks of {BLOCK_WIDTH} channels, whole ones of latents, got latents of {latent} "
            f"columns and entry_bits={entry_bits}"
        )
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
