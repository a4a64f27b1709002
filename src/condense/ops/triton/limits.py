"""The limits of the Triton kernels. Does not import Triton, so that it can be read where Triton is missing."""

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from condense.ops.entries import BLOCK_WIDTH
from condense.ops.recall.choice import IndexChoice, RecallSources
from condense.ops.recall.index import block_width
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
# the query heads of a KV head are one tile, which has 32 rows in float32; a tile of scores holds whole groups
MAX_HEADS, MAX_HEADS_FLOAT32, MAX_GROUP_SIZE = 64, 32, 128
# widths of the keys of latents, by which all query heads choose groups together
LATENT_WIDTHS = (288, 576)
# looked up once, because every step asks
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def clauses(found: list[str]) -> str | None:
    """All obstacles as one text, so that a user can remove them together; None if there are none."""
    return "; ".join(found) or None


def absence(device: torch.device) -> list[str]:
    """The obstacles to any Triton kernel on a device."""
    found = list(absence_of_triton())
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        found.append(
            f"needs a CUDA device, or TRITON_INTERPRET=1 in the environment to be interpreted, got {device.type}"
        )
    return found


def absence_of_triton() -> list[str]:
    """One obstacle if Triton is not installed, else none."""
    return [] if _HAS_TRITON else ["needs the triton package"]


def among(text: str, known: tuple[Any, ...], *got: Any) -> list[str]:
    """One obstacle if any of ``got`` is not in ``known``, else none. text: begins the message, before ``known``."""
    if all(x in known for x in got):
        return []
    return [f"{text} {', '.join(map(str, known))}, got {' and '.join(map(str, got))}"]


def attend_obstacle(problem: Problem) -> str | None:
    """All reasons why the attention kernels cannot take a problem, None if they can."""
    found = [*absence(problem.device), *call_obstacles(problem)]
    if problem.device.type == "cuda":
        found += among("takes", DTYPES, problem.dtype)
        found += among("has kernels for head widths", WIDTHS, *problem.widths)
    return clauses(found)


def weights_obstacle(problem: Problem) -> str | None:
    """All reasons why the kernel of `condense.ops.largest_weights` cannot take a problem, None if it can."""
    found = [*absence(problem.device)]
    if problem.device.type == "cuda":
        # float32 products by bfloat16 exceed the error budget, and other ways are no faster than PyTorch's
        found += among("takes", DTYPES[:2], problem.dtype)
        found += among("has kernels for head widths", WIDTHS, *problem.widths)
    return clauses(found)


def call_obstacles(problem: Problem) -> list[str]:
    """All obstacles of a problem other than its device, dtype and widths."""
    found = []
    if problem.dropout_p > 0:
        found.append(f"has no attention dropout (set the model's attention dropout to 0), got {problem.dropout_p}")
    if problem.num_sources > MAX_SOURCES:
        found.append(f"takes up to {MAX_SOURCES} sources, got {problem.num_sources}")
    return found


def recall_obstacle(q: Tensor, sources: RecallSources, choice: IndexChoice, *, softcap: float = 0.0) -> str | None:
    """All reasons why the kernels cannot run `condense.ops.attend_recall` with these arguments, None if they can."""
    found = [*absence(q.device), *among("takes", DTYPES, q.dtype), *recall_call_obstacles(q, sources, choice)]
    if q.device.type == "cuda":
        found += among("has kernels for head widths", WIDTHS, q.shape[3], sources.window.v.shape[3])
    return clauses(found)


def recall_call_obstacles(q: Tensor, sources: RecallSources, choice: IndexChoice) -> list[str]:
    """All obstacles in arguments of `condense.ops.attend_recall` other than device, dtype and widths."""
    found, K, G = [], sources.window.k.shape[1], sources.num_groups
    most, R = MAX_HEADS_FLOAT32 if q.dtype == torch.float32 else MAX_HEADS, q.shape[1] // K
    if most < R:
        found.append(f"takes up to {most} query heads per KV head in {q.dtype}, got {R}")
    if G > MAX_GROUPS:
        found.append(f"chooses from up to {MAX_GROUPS:,} groups, got {G:,}")
    (_, H, _, D), choosers = choice.q.shape, choice.index.steps.shape[1]
    if choosers not in (1, K):
        found.append(f"takes an index for each of {K} KV heads or one for all, got {choosers}")
    if choice.q.device.type == "cuda":
        found += among("scores an index of keys of widths", WIDTHS + LATENT_WIDTHS, D)
    if choice.ranks is not None:
        found.append("chooses for the heads of one process, got some of several")
    if H // choosers > MAX_HEADS:
        found.append(f"chooses for up to {MAX_HEADS} query heads at once, got {H // choosers}")
    return found + _group_obstacles(choice.index.group_size)


def _group_obstacles(g: int) -> list[str]:
    """One obstacle if groups of g tokens are too large to be scored, else none."""
    return [] if g <= MAX_GROUP_SIZE else [f"takes groups of up to {MAX_GROUP_SIZE} tokens, got {g}"]


def pool_obstacle(problem: Problem) -> str | None:
    """All reasons why the kernels of summaries and pooling cannot take a problem, None if they can."""
    found = [*absence(problem.device), *among("takes", DTYPES, problem.dtype)]
    if max(problem.widths) > MAX_POOLING_WIDTH:
        found.append(f"pools head widths up to {MAX_POOLING_WIDTH}, got {problem.widths}")
    return clauses(found)


def step_obstacle(
    device: torch.device,
    dtype: torch.dtype,
    widths: tuple[int, int],
    settings: StepSettings,
    *,
    latent: int = 0,
    entries: int = 0,
) -> str | None:
    """All reasons why the decode step kernels cannot run a method's steps on this device, None if they can.

    widths: of keys and values. latent: columns of the keys that are the values (absorbed MLA), else 0. entries: entries
    that the state has room for; 0 if that is not known.
    """
    (D, Dv), found = widths, [*absence(device), *among("takes", DTYPES, dtype)]
    if latent and not (0 < latent < D and latent <= MAX_STEP_LATENT and D - latent <= MAX_STEP_WIDTH and Dv == 0):
        found.append(
            f"takes latents of up to {MAX_STEP_LATENT} columns of the keys, with up to {MAX_STEP_WIDTH} others and "
            f"values of width 0, got {latent} of {D} and values of width {Dv}"
        )
    if not latent and not (1 <= D <= MAX_STEP_WIDTH and 1 <= Dv <= MAX_STEP_WIDTH):
        found.append(f"decodes widths up to {MAX_STEP_WIDTH}, got {D} and {Dv}")
    if (obstacle := settings_obstacle(settings)) is not None:
        found.append(obstacle)
    if settings.entry_bits < 16 and latent % BLOCK_WIDTH:
        found.append(
            f"rounds entries in blocks of {BLOCK_WIDTH} channels, whole ones of latents, got latents of {latent} "
            f"columns and entry_bits={settings.entry_bits}"
        )
    if settings.choice is None:
        return clauses(found)
    stored, _, slots = settings.choice.store
    if stored < 16 and latent % block_width(D):
        found.append(
            f"reads stored latents rotated in blocks of {block_width(D)} columns, whole ones of values, got latents of "
            f"{latent} of {D} columns and store_bits={stored}"
        )
    found += _group_obstacles(settings.rule.chunk)
    if entries > MAX_GROUPS:
        found.append(
            f"chooses from up to {MAX_GROUPS:,} groups, got room for {entries:,} (a larger group_size or a shorter "
            "cache has fewer)"
        )
    if slots > MAX_SLOTS:
        found.append(f"looks through up to {MAX_SLOTS:,} slots, got {slots:,}")
    return clauses(found)


def check_step(q: Tensor, widths: tuple[int, int], settings: StepSettings, **room: int) -> None:
    """Raise ValueError with the reasons of `step_obstacle`, if any. room: its arguments ``latent`` and ``entries``."""
    if (obstacle := step_obstacle(q.device, q.dtype, widths, settings, **room)) is not None:
        raise ValueError(f"backend 'triton' {obstacle}; use backend='torch'")


def settings_obstacle(settings: StepSettings) -> str | None:
    """All reasons why the decode step kernel cannot run a method's steps on any device, None if it can."""
    focal, chunk, queries, found = settings.num_focal, settings.rule.chunk, settings.num_summary, []
    if settings.key_pooling is None or settings.value_pooling is None:
        found.append("supports built-in pooling only in a decode step, and this method makes its entries itself")
    elif settings.rule.entries != focal + 1:
        found.append(f"makes num_focal + 1 = {focal + 1} entries per chunk, got {settings.rule.entries}")
    if settings.entry_bits < 16 and (focal > 0 or settings.has_first):
        found.append(f"keeps single tokens among entries in 16 bits, got entry_bits={settings.entry_bits}")
    if focal > 0 and chunk > MAX_FOCAL_CHUNK:
        found.append(f"chooses focal tokens in chunks of up to {MAX_FOCAL_CHUNK} tokens, got {chunk}")
    if focal > 0 and not (focal < chunk and queries > 0):
        found.append(f"chooses some tokens of a chunk by a summary query, got {focal} of {chunk}, {queries} queries")
    return clauses(found)
