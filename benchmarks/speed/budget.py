"""The error budget: twice the error of plain PyTorch in the same dtype, plus one unit in the last place.

Errors are distances from float64 on the same, already rounded, inputs: the largest and the mean one, each held to its
own budget. The unit in the last place is allowed because even an exact result is off by up to half a unit when it is
rounded, and the plain run may by chance have rounded better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def errors(got: Tensor, want: Tensor) -> Tensor:
    """The largest and the mean distance, float64 ``[2]``."""
    difference = (got.double() - want).abs()
    return torch.stack([difference.max(), difference.mean()])


def one_ulp(want: Tensor, dtype: torch.dtype) -> Tensor:
    """One unit in the last place of the largest value, and of the mean one, ``[2]``."""
    return torch.finfo(dtype).eps * torch.stack([want.abs().max(), want.abs().mean()])


@dataclass(frozen=True)
class Verdict:
    """``share``: the worst error divided by its budget; at most 1 passes.

    near_ties: number of results that were not compared, because they depend on a choice of groups that was a near tie.
    """

    share: float
    near_ties: int = 0

    @property
    def passed(self) -> bool:
        """True if the share is at most 1; False if anything is not finite."""
        return self.share <= 1

    def to_dict(self) -> dict[str, object]:
        """The verdict in JSON types, for result files."""
        verdict: dict[str, object] = {"passed": self.passed, "share_of_budget": self.share}
        return verdict | ({"near_ties": self.near_ties} if self.near_ties else {})

    def and_also(self, other: Verdict) -> Verdict:
        """The verdict on both."""
        return Verdict(max(self.share, other.share), self.near_ties + other.near_ties)


def judge(
    results: Sequence[Tensor], wants: Sequence[Tensor], yardsticks: Sequence[Tensor], *, near_ties: int = 0
) -> Verdict:
    """Compare results with float64 ``wants``; yardsticks: the same by plain operations in the results' dtype."""
    shares = [0.0]
    for got, want, yardstick in zip(results, wants, yardsticks, strict=True):
        if want.numel() == 0:
            continue
        error = errors(got, want)
        share = torch.where(error == 0, error, error / (2 * errors(yardstick, want) + one_ulp(want, got.dtype)))
        shares.append(float(share.max()) if bool(share.isfinite().all()) else math.inf)
    return Verdict(max(shares), near_ties)
