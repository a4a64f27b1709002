"""Kernel for the largest attention weight that a token gets: a maximum over all queries, whose weights are not stored.

Shapes: B rows of the batch, K KV heads, R query heads per KV head, L queries, N keys, D0 + D1 width: parts, see
`condense.ops.triton.device.parts`. BM rows of queries and BN keys per tile.
"""

import triton
import triton.language as tl

from condense.ops.triton.device.parts import load_rows, products
from condense.ops.triton.device.softmax import soft_cap


@triton.jit(do_not_specialize=["L", "N"])
def largest_weights_kernel(
    q_ptr, k_ptr, lse_ptr, out_ptr, s_qb, s_qh, s_ql, s_kb, s_kh, s_kn, K, R, L, N, scale,
    D0: tl.constexpr, D1: tl.constexpr, CAP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the logarithm of each key's largest weight: out float32 ``[B, K, N]``. lse float32 ``[B, K * R, L]``."""
    b, kvh = (tl.program_id(1) // K).to(tl.int64), (tl.program_id(1) % K).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = load_rows(k_ptr, b * s_kb + kvh * s_kh + n.to(tl.int64) * s_kn, n < N, D0, D1)  # [BN, D]
    best = tl.full([BN], float("-inf"), tl.float32)
    for start in range(0, R * L, BM):
        row = start + tl.arange(0, BM)
        inside, head = row < R * L, kvh * R + row // L
        i = (row % L).to(tl.int64)
        q = load_rows(q_ptr, b * s_qb + head * s_qh + i * s_ql, inside, D0, D1)  # [BM, D]
        lse = tl.load(lse_ptr + (b * K * R + head) * L + i, mask=inside, other=float("inf"))
        s = soft_cap(products(q, k, "ieee") * scale, CAP)[0]  # [BM, BN]
        best = tl.maximum(best, tl.max(s - lse[:, None], 0))
    tl.store(out_ptr + (b * K + kvh) * N + n, best, mask=n < N)
