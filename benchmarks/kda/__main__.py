"""Kimi Delta Attention (KDA, arXiv:2510.26692) from flash-linear-attention: checked, timed, and adapted beside ours.

    python benchmarks/kda check --output CHECK.json
    python benchmarks/kda times --output TIMES.json [--length 32768 131072]
    python benchmarks/kda base --work WORK --train train.npz --test test.npz
    python benchmarks/kda arm --work WORK --train train.npz --test test.npz --arm kda     # one of ARMS
    python benchmarks/kda gather --work WORK --output ADAPTED.json

Needs a CUDA device and `pip install flash-linear-attention`. The text is what `benchmarks/adaptation encode` writes.
check: the library's operations and their gradients against a recurrence in float64.
times: once they are right, in one layer of Llama-3.1-8B's shape, beside CCA and cuDNN, all without projections.
base: the dense model of `benchmarks/zero_shot`, as far as 4,096 tokens, or the bundled one. arm: adapted from that
model, on the same sequences as every other.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import adapt
import measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "times", "base", "arm", "gather"))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--length", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--work", type=Path)
    parser.add_argument("--train", type=Path)
    parser.add_argument("--test", type=Path)
    parser.add_argument("--bundled", action="store_true", help="start from the bundled model, which knows CCA already")
    parser.add_argument("--arm", choices=adapt.ARMS)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--sequences", type=int, default=60, help="held-out texts per figure")
    parser.add_argument("--workers", type=int, default=3, help="processes that build sequences")
    parser.add_argument("--trial", action="store_true", help="two short steps, to try a machine out")
    options = parser.parse_args()
    getattr(measure if options.what in ("check", "times") else adapt, options.what)(options)


if __name__ == "__main__":
    main()
