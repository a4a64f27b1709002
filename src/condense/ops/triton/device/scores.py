"""Soft-capped scores: ``cap * tanh(s / cap)``, as some models have them. Scores and cap are base 2."""

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    """tanh, to a few units in the last place: below 1/4 by its series, where ``(1 - t) / (1 + t)`` would cancel."""
    y = x * x
    series = 1.0 + y * (-0.3333333333333333 + y * (0.13333333333333333 + y * (-0.05396825396825397 + y * 0.0218694885)))
    t = tl.exp2(tl.abs(x) * -2.8853900817779268)
    far = (1.0 - t) / (1.0 + t)
    return tl.where(tl.abs(x) < 0.25, x * series, tl.where(x < 0, -far, far))


@triton.jit
def soft_cap(s, CAP: tl.constexpr):
    """Soft-capped scores and their derivative by the scores; the scores themselves and 1 for CAP 0."""
    if CAP > 0:
        t = _tanh(s * (1.0 / CAP))
        return t * CAP, 1.0 - t * t
    else:
        return s, 1.0
