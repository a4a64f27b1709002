"""Decode of Recall over pages of records, beside the budget of `test_paged_step`: interpreted in float32 on a CPU,
compiled for every dtype on a GPU.

A choice may differ where two groups' scores differ by less than the scores' own error, and with it the output; such
steps are found by the definition's own scores and must be few.
"""

import pytest
import torch
from paged_sequences import run, run_steps
from record_pool import EXACT_PROMPTS, RECORDS, RecordPool, check_records, check_same
from triton_kernels.test_paged_step import DEVICE, DTYPES, SHAPES, poisoned_scratch, tokens_of  # noqa: F401
from triton_kernels.test_recall_step import ranks_few  # noqa: F401

from condense.ops.triton import paged_step


def steps_of(shape, method, lengths, num, backend):
    """`run` over a pool of its own."""
    pool = RecordPool(method, shape[1:], num_pages=200, dtype=torch.float32, device=DEVICE)
    return run(pool, shape, lengths, num, backend)


# every shape of pages compiles kernels of its own, so most dtypes and head shapes are seen with some methods alone
HOST = [name for name, method in RECORDS.items() if method.store == "host"]
CELLS = [(m, "gqa", dtype) for m in RECORDS if m not in HOST for dtype in DTYPES if dtype != torch.float16 or "4" in m]
CELLS += [("store-8", "one-head", DTYPES[-1]), ("store-4", "seven", DTYPES[0])]
# wide heads and groups of 16, of which up to eight query heads share one: a GPU reads these by lanes
WIDE = {"wide": (8, 2, 128, 128), "wide-three": (6, 2, 128, 128), "wide-seven": (7, 1, 128, 128)}
OF_16 = {name: RECORDS[name].replace(group_size=16, window=16, num_recall=9) for name in ("store-4", "drop")}


@pytest.mark.parametrize(("method", "shape", "dtype"), CELLS, ids=str)
def test_steps_are_those_of_pytorch(method, shape, dtype):
    check_steps(method, shape, dtype)


@pytest.mark.usefixtures("lanes")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numbers that are masked afterwards
@pytest.mark.parametrize(("method", "shape"), [*(("store-4", shape) for shape in WIDE), ("drop", "wide")])
def test_steps_by_lanes(method, shape):
    check_steps(method, shape, torch.bfloat16)


def check_steps(method, shape, dtype):
    """Both read the bytes that the kernels have stored, so that a code at a border counts once, where it is made."""
    # in three steps some request completes a group, of whatever size
    lengths, steps, outs, made = (0, 61, 18, 41), 3 if DEVICE == "cpu" else 40, [], {"dtype": dtype, "device": DEVICE}
    if shape in WIDE:
        # pages of 16 records, as engines have them
        lengths, made = tuple(7 * n for n in lengths), made | {"per_page": 16}
        steps = min(steps, 40 if DEVICE == "cuda" else 1)
    method, shape = (OF_16 if shape in WIDE else RECORDS)[method], (SHAPES | WIDE)[shape]
    mine, theirs = pools = [RecordPool(method, shape[1:], num_pages=200, **made) for _ in range(2)]
    both = (run_steps(pool, shape, lengths, steps, x) for pool, x in zip(pools, ("triton", "torch"), strict=True))
    for step in zip(*both, strict=True):
        outs.append(step)
        check_records(pools)
        theirs.blocks.copy_(mine.blocks)
    check_same(*map(torch.stack, zip(*outs, strict=True)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", HOST)
def test_tokens_in_host_memory_are_those_of_the_device(method, dtype):
    """The same bytes; outputs are sums in another order, as other programs read the window."""
    shape, made = SHAPES["gqa"], {"num_pages": 200, "dtype": dtype, "device": DEVICE}
    pools = [RecordPool(RECORDS[method].replace(store=where), shape[1:], **made) for where in ("host", "device")]
    steps, reader = (3, "torch") if DEVICE == "cpu" else (40, "triton")
    outs = [run(pool, shape, (0, 61, 18, 41), steps, "triton", reader) for pool in pools]
    check_same(*outs)
    for one, other in zip(*(pool.requests for pool in pools), strict=True):
        kept, wanted = (pool.kept(request) for pool, request in zip(pools, (one, other), strict=True))
        assert all(torch.equal(kept[part].cpu(), wanted[part].cpu()) for part in ("signs", "steps", "store"))


@pytest.mark.usefixtures("ranks_few")
@pytest.mark.parametrize("method", ["default", "store-8"])
def test_requests_of_all_lengths_where_each_has_room_for_many_groups(method):
    lengths = 0, 20, 41, 77, 12
    check_same(*(steps_of(SHAPES["gqa"], RECORDS[method], lengths, 2, x) for x in ("triton", "torch")))


@pytest.mark.parametrize("method", ["default", "drop", *EXACT_PROMPTS])
def test_prompts_that_share_a_call(method):
    """Rows of several lengths beside a single token, one of them a later piece: their attention, and their records."""
    shape, tokens, outs, pools = SHAPES["gqa"], [tokens_of(SHAPES["gqa"], 40, seed=n) for n in range(4)], [], []
    for backend in ("triton", "torch"):
        pool = RecordPool((RECORDS | EXACT_PROMPTS)[method], shape[1:], dtype=torch.float32, device=DEVICE)
        single, later, *others = [pool.add(40) for _ in tokens]
        for request, count in ((single, 39), (later, 22)):
            pool.read([(request, [x[:count] for x in tokens[0]])], scale=0.1, backend="torch")
        chunks = [(single, [x[39:] for x in tokens[0]]), (later, [x[22:] for x in tokens[0]])]
        chunks += [(r, [x[:n] for x in qkv]) for r, n, qkv in zip(others, (40, 23), tokens[1:], strict=False)]
        outs.append(torch.cat(pool.read(chunks, scale=0.1, backend=backend)))
        pools.append(pool)
    check_same(*outs)
    check_records(pools)


def test_pages_that_lie_far_apart():
    """Offsets pass 2 ** 31, in bytes and in numbers."""
    shape, method = SHAPES["one-head"], RECORDS["default"]
    pools = [
        RecordPool(method, shape[1:], num_pages=130, dtype=torch.float32, device=DEVICE, block=block)
        for block in (None, 80 << 20)
    ]
    tokens, outs = tokens_of(shape, 44), []
    for pool in pools:
        request = pool.add(44)
        pool.read([(request, [x[:42] for x in tokens])], scale=0.1, backend="torch")
        outs += pool.read([(request, [x[42:43] for x in tokens])], scale=0.1, backend="triton")
        outs += pool.read([(request, [x[43:44] for x in tokens])], scale=0.1, backend="triton")
    assert max(max(r.window + r.entries) for r in pools[1].requests) * pools[1].blocks.stride(0) > 2**33
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_requests_that_attend_one_part_after_another(rows, monkeypatch):
    """As they do where many share a long prefix, so that their groups fill the pool many times."""
    lengths = (0, 50, 80, 3, 61)
    want = steps_of(SHAPES["gqa"], RECORDS["default"], lengths, 1, "triton")
    monkeypatch.setattr(paged_step, "rows_at_once", lambda records: rows)
    check_same(steps_of(SHAPES["gqa"], RECORDS["default"], lengths, 1, "triton"), want)


def test_no_token_is_read_before_it_is_there():
    """The same bits whatever stands where later tokens will be."""
    shape, outs = SHAPES["gqa"], []
    for fill in (0, 255):
        pool = RecordPool(RECORDS["store-8"], shape[1:], num_pages=60, dtype=torch.float32, device=DEVICE, fill=fill)
        request, tokens = pool.add(60), tokens_of(shape, 60)
        request.reserve(60)
        pool.read([(request, [x[:41] for x in tokens])], scale=0.1, backend="torch")
        outs += pool.read([(request, [x[41:42] for x in tokens])], scale=0.1, backend="triton")
    assert torch.equal(*outs)
