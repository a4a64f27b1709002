"""Attention of a prompt over latents: one layer, from queries and latents, by Recall, dense attention and LCA.

    python benchmarks/recall_latents.py OUT.json    # on a GPU

The shape is DeepSeek-V2-Lite's. Projections from latents to keys and values are part of the time. "random": all numbers
drawn alone; "topics": 128 latents in a row share one of 400 directions, and 32 queries in a row look for one. Recall's
prompts are also read by PyTorch where that does not take long, and with ``prompt="exact"``.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import condense
from condense.bench.timing import Clock
from condense.latent import UpProjection
from condense.ops.recall import IndexChoice, build_index
from condense.results import refuse_existing, write_results

H, D_N, D_R, D_C, D_V = 16, 128, 64, 512, 128
TOPICS, TEXT, LOOKING = 400, 128, 32
RECALL = condense.Recall()
CALLS = {
    "dense": (condense.Dense(), "auto"),
    "lca": (condense.LCA(), "auto"),
    "recall": (RECALL, "auto"),
    "recall-torch": (RECALL, "torch"),
    "exact": (RECALL.replace(prompt="exact"), "auto"),
}
# PyTorch reads all tokens for every block of queries
MOST_OF_TORCH = 32768


def latents(length: int, data: str, device: torch.device) -> list[Tensor]:
    """The tensors of `condense.latent_attention`, in bfloat16."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def drawn(directions: Tensor, run: int) -> Tensor:
        picked = torch.randint(TOPICS, (-(-length // run),), generator=generator, device=device)
        return directions[picked.repeat_interleave(run)[:length]]

    q, c, w_uk = normal(1, H, length, D_N), normal(1, length, D_C), normal(H, D_C, D_N) * D_C**-0.5
    if data == "topics":
        directions = normal(TOPICS, D_C)
        directions *= D_C**0.5 / directions.norm(dim=1, keepdim=True)
        c = 0.5 * c + drawn(directions, TEXT)
        q = 0.5 * q + 1.5 * drawn(directions, LOOKING) @ w_uk
    tensors = (q, normal(1, H, length, D_R), c, normal(1, length, D_R), w_uk, normal(H, D_C, D_V) * D_C**-0.5)
    return [x.bfloat16() for x in tensors]


def opened_by_neighbours(tensors: list[Tensor], neighbours: int = 64) -> int:
    """How many groups the last queries open together."""
    q_nope, q_rope, c, k_rope, w_uk, w_uv = tensors
    length, rule, index = c.shape[1], RECALL.layout.rule, RECALL.index_settings
    closed = torch.tensor([rule.closed(length - neighbours + n + 1) for n in range(neighbours)], device=c.device)
    G = int(closed[-1])
    entries = torch.cat([c, k_rope], dim=-1)[:, None, : G * RECALL.group_size].unflatten(2, (G, -1))
    q = UpProjection(w_uk, w_uv).absorb(torch.cat([q_nope, q_rope], dim=-1)[:, :, -neighbours:])
    choice = IndexChoice(q, build_index(entries, index), index, (D_N + D_R) ** -0.5, RECALL.quota)
    return int(choice.at(0, neighbours, closed[None, None], G).any(2).sum())


@torch.no_grad()
def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--seconds", type=float, default=0.5, help="time per measurement")
    arguments = parser.parse_args()
    refuse_existing(arguments.out, "OUT.json", overwrite=False)
    if not torch.cuda.is_available():
        sys.exit("recall_latents: needs a CUDA device")
    device = torch.device("cuda")
    clock, rows = Clock(device, arguments.seconds), []
    for tokens in arguments.tokens:
        for data in ("topics", "random"):
            tensors = latents(tokens, data, device)
            row: dict[str, Any] = {"tokens": tokens, "data": data, "opened_by_64": opened_by_neighbours(tensors)}
            row["times"] = {}
            for name, (method, backend) in CALLS.items():
                if backend != "torch" or tokens <= MOST_OF_TORCH:
                    call = partial(condense.latent_attention, *tensors, method=method, backend=backend)
                    row["times"][name] = clock.time(call)
            medians = {name: round(times.median_ms, 2) for name, times in row["times"].items()}
            print(tokens, data, row["opened_by_64"], medians, flush=True)
            rows.append(row)
    content = {"shape": [H, D_N, D_R, D_C, D_V], "dtype": "bfloat16", "calls": CALLS, "rows": rows}
    write_results(arguments.out, content, seed=0, device=device)


if __name__ == "__main__":
    main()
