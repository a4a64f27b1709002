"""Decode over pages, of tokens, records and latents, against its definition; near ties of Recall's choice are few."""

import itertools
import random
from functools import partial
from types import SimpleNamespace

import paged_sequences
import pytest
import record_pool
import torch
from lanes import DEVICE
from paged_pool import NULL, Pool, complete_a_prefix, leave_a_place_empty
from paged_sequences import exact, on_two_ranks, random_extras, random_tokens, run, run_steps
from record_pool import RecordPool, check_records, check_same
from speed.budget import errors, one_ulp
from triton_kernels.test_recall_step import ranks_few  # noqa: F401

import condense
from condense.ops.paged import PagedSlots
from condense.ops.triton import paged_step, recall_step, step_kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32]
# H, K, D, Dv
SHAPES = {"gqa": (8, 2, 64, 64), "pairs": (4, 2, 64, 64), "one-head": (1, 1, 96, 80), "seven": (7, 1, 64, 32)}
# H, and d_n, d_r, d_c, d_v; interpreted in the smallest that have blocks of 32 channels
LATENTS = {"latents": (3, (16, 16, 32, 16))}
if DEVICE == "cuda":
    LATENTS = {"latents-512": (16, (128, 64, 512, 128)), "latents-256": (40, (64, 32, 256, 64))}
METHODS = {
    "last-odd-window": condense.CCA(group_size=4, window=5, rep_bias="log_size"),
    "window-0": condense.CCA(group_size=3, window=0),
    "streaming": condense.LCA(group_size=4, window=8, num_summary_queries=4, rep_bias="log_size"),
    "streaming-1-query": condense.LCA(group_size=4, window=8, num_summary_queries=1),
    "no-scores": condense.LCA(group_size=4, window=8, key_pooling="mean", value_pooling="max"),
    "group-over-pages": condense.LCA(group_size=20, window=20, key_pooling="weighted"),
    "sinks": condense.StreamingLLM(sink=5, window=9),
}
RECORDS = {
    "records-no-scores": METHODS["no-scores"],
    "records-matched": METHODS["streaming"].replace(rep_bias="matched"),
    "records-8-bits-matched": METHODS["streaming"].replace(rep_bias="matched", entry_bits=8),
    "records-4-bits-matched": condense.LCA(group_size=4, window=8, rep_bias="matched", entry_bits=4),
    "records-4-bits-window-0": METHODS["window-0"].replace(entry_bits=4, rep_bias="log_size"),
    "records-4-bits": METHODS["group-over-pages"].replace(entry_bits=4, group_size=6, window=18),
}
RECALLS = record_pool.RECORDS
POOLS = {name: (Pool, method) for name, method in METHODS.items()}
POOLS |= {name: (RecordPool, method) for name, method in RECORDS.items()}
POOLS |= {f"recall-{name}": (RecordPool, method) for name, method in RECALLS.items()}
tokens_of = partial(random_tokens, dtype=torch.float32, device=DEVICE)


@pytest.fixture(autouse=True)
def poisoned_scratch(poison):
    poison(paged_step, "split_scratch")
    poison(recall_step, "scratch_of")


# the mean of two queries has the same bits in any order, so both backends choose the same anchors of records
CELLS = [(name, "pairs" if name in RECORDS else "gqa") for name in METHODS | RECORDS]
CELLS += [(x, "one-head") for x in (METHODS | RECORDS if DEVICE == "cuda" else ("streaming", "records-4-bits"))]
CELLS += [(f"recall-{name}", "gqa") for name in ("default", "window-0", "g-16", "all-open")]
OF_LATENTS = ["streaming", "last-odd-window", "no-scores", "sinks", "records-4-bits-matched"]
OF_LATENTS += [f"recall-{name}" for name in ("default", "store-8", "store-4", "drop")]
CELLS = [(*cell, dtype) for cell in CELLS for dtype in DTYPES]
CELLS += [(name, shape, dtype) for name in OF_LATENTS for shape in LATENTS for dtype in DTYPES[:2]]


@pytest.mark.parametrize(("name", "shape", "dtype"), CELLS, ids=str)
def test_steps_are_within_the_budget(name, shape, dtype):
    # of 46 tokens one has a code of 4 bits near the middle of two numbers, which rounds otherwise
    first = 38 if name in METHODS | RECORDS and shape in SHAPES else 46
    (make, method), shape = POOLS[name], (SHAPES | LATENTS)[shape]
    heads = shape[1:] if len(shape) == 4 else (1, sum(shape[1][1:3]), 0)
    lengths, steps = (first, 0, 19), 2 if DEVICE == "cpu" else 30
    pools = [make(method, heads, dtype=dtype, device=DEVICE) for _ in range(2)]
    got, plain = (run(pool, shape, lengths, steps, x) for pool, x in zip(pools, ("triton", "torch"), strict=True))
    if name in RECORDS and len(shape) == 4:
        check_records(pools)
    if min(getattr(method, bits, 16) for bits in ("entry_bits", "store_bits")) < 16:
        check_same(got, plain)
        return
    want = exact(shape, method, dtype, lengths, steps).to(DEVICE)
    assert bool((errors(got, want) <= 2 * errors(plain, want) + one_ulp(want, dtype)).all())


# query heads, d_n, d_r, d_c and d_v; where the store is, what stands for other groups, slots
APART = {
    "deepseek": ((3, (128, 64, 512, 128)), "device", "mean", 0),
    "deepseek, host": ((3, (128, 64, 512, 128)), "host", "drop", 0),
    "minicpm3, slots": ((3, (64, 32, 256, 64)), "host", "mean", 4),
}


@pytest.mark.parametrize(("shape", "store", "unchosen", "slots"), APART.values(), ids=APART)
def test_open_groups_that_another_kernel_reads(shape, store, unchosen, slots, hopper, monkeypatch):
    """On Hopper, of latents: three requests, one of them without a closed group."""
    started, start = [], recall_step.OPENED.start
    monkeypatch.setattr(recall_step, "OPENED", SimpleNamespace(start=lambda *x: started.append(start(*x))))
    method = condense.Recall(window=20, num_recall=3, min_recall=0, store_bits=4, unchosen=unchosen)
    made, heads = {"dtype": torch.bfloat16, "device": DEVICE}, (1, sum(shape[1][1:3]), 0)
    mine = RecordPool(method.replace(store=store, slots=slots), heads, **made)
    theirs = RecordPool(method, heads, **made)
    if slots:
        with_slots(mine, 2)
    sequences, reader = (shape, (150, 0, 70), 3), "torch" if DEVICE == "cpu" else "triton"
    got = run(mine, *sequences, "triton", "triton" if slots else reader)
    plain = run(theirs, *sequences, "torch", reader)
    check_same(got, plain)
    if slots:
        check_copies(mine, mine.requests, 2)
    assert started or (DEVICE == "cuda" and torch.cuda.get_device_capability()[0] != 9)


ON_RANKS = {"streaming": 1, "streaming-1-query": 1, "recall-default": 1, "recall-drop": 0}


@pytest.mark.parametrize(("name", "asks"), ON_RANKS.items())
def test_latents_whose_heads_are_spread_over_ranks(name, asks, monkeypatch):
    """Groups are weighed and chosen by the heads of all, as on one; also where nothing is asked, so that groups tie."""
    (method_pool, method), sequences = POOLS[name], paged_sequences._sequences
    _, widths = next(iter(LATENTS.values()))

    def asking(*args, **options):
        qkvs, up = sequences(*args, **options)
        return [[asks * q, *others] for q, *others in qkvs], up

    def make():
        return method_pool(method, (1, sum(widths[1:3]), 0), dtype=torch.float32, device=DEVICE)

    def read(pool):
        return run(pool, (4, widths), (45, 0, 18), 2 if DEVICE == "cpu" else 30, "triton")

    monkeypatch.setattr(paged_sequences, "_sequences", asking)
    check_same(on_two_ranks(make, 4, read), read(make()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("name", ["streaming", "recall-default"])
def test_what_a_model_adds_to_attention(name, softcap, dtype):
    """Sink logits and capped scores, within the same budget; a request of no tokens but the new ones among them."""
    (make, method), shape, lengths = POOLS[name], SHAPES["gqa"], (46, 0)
    extras, outs = random_extras(shape[0], softcap=softcap, dtype=dtype, device=DEVICE), []
    for backend in ("triton", "torch"):
        pool = make(method, shape[1:], dtype=dtype, device=DEVICE)
        pool.extras = extras
        outs.append(run(pool, shape, lengths, 2, backend))
    rounded = extras._replace(sink_logits=extras.sink_logits.double().cpu())
    want = exact(shape, method, dtype, lengths, 2, rounded).to(DEVICE)
    assert bool((errors(outs[0], want) <= 2 * errors(outs[1], want) + one_ulp(want, dtype)).all())


PLACES = {name: partial(Pool, (METHODS | RECORDS)[name]) for name in ("streaming", "records-8-bits-matched")}
PLACES["store-8"] = partial(RecordPool, RECALLS["store-8"])


@pytest.mark.parametrize("make", PLACES.values(), ids=PLACES)
def test_places_left_empty(make):
    shape = SHAPES["gqa"]
    leave_a_place_empty(make(shape[1:], dtype=torch.float32, device=DEVICE), tokens_of(shape, 40))


# and what outputs may differ by: of 4 bits, a code near the middle may round otherwise
PREFIXES = {
    "streaming": (PLACES["streaming"], 1e-5),
    "window-0": (partial(RecordPool, RECALLS["window-0"]), 1e-4),
    "store-4": (partial(RecordPool, RECALLS["store-4"]), 0.02),
    "exact": (partial(RecordPool, record_pool.EXACT_PROMPTS["exact"]), 1e-4),
}


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize(("make", "atol"), PREFIXES.values(), ids=PREFIXES)
def test_a_prefix_that_a_single_token_completes_in_the_same_step(make, atol, new):
    shape, tolerance = SHAPES["gqa"], {"rtol": max(1e-4, atol), "atol": atol}
    pool = make(shape[1:], dtype=torch.float32, device=DEVICE)
    complete_a_prefix(pool, new, shape[0], tolerance, scale=0.1, backend="triton")


@pytest.fixture
def early(monkeypatch):
    """Kernels that start early. Interpreted, no program sees what this step stores before it waits."""
    pools = []
    if DEVICE == "cuda":
        return pools.append
    launch, stored = paged_step.launch_of, []
    store, attend = paged_step.PagedStep.store, paged_step.PagedStep.attend

    def launch_early(*args):
        made, plans = launch(*args), {}
        assert made.num_splits > 1
        for name in ("step", "store"):
            grid, numbers, (kind, *forms), options = getattr(made, name)
            plans[name] = grid, numbers, (kind._replace(early=True), *forms), options
        return made._replace(**plans)

    def kept_store(*args, **options):
        before = pools[0].blocks.clone()
        store(*args, **options)
        stored[:] = [before, pools[0].blocks.clone()]

    def late_attend(*args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(step_kernels, "gdc_launch_dependents", lambda: pools[0].blocks.copy_(stored[0]))
            patch.setattr(step_kernels, "gdc_wait", lambda: pools[0].blocks.copy_(stored[1]))
            attend(*args, **options)

    for name in ("gdc_launch_dependents", "gdc_wait"):
        monkeypatch.setattr(step_kernels, name, lambda: None)
    monkeypatch.setattr(paged_step, "launch_of", launch_early)
    for name, function in (("store", kept_store), ("attend", late_attend)):
        monkeypatch.setattr(paged_step.PagedStep, name, function)
    return pools.append


# with a window of 16 the token before the new one ends a tile of the interpreter, with none the newest entry begins one
@pytest.mark.parametrize("method", [condense.LCA(group_size=4, window=16), METHODS["window-0"]], ids=str)
def test_what_is_stored_in_a_step_is_read_after_the_wait(early, method):
    shape = SHAPES["gqa"]
    pool = Pool(method, shape[1:], num_pages=60, dtype=torch.float32, device=DEVICE)
    early(pool)
    complete_a_prefix(pool, 1, shape[0], {"rtol": 1e-4, "atol": 1e-5}, scale=0.1, backend="triton")


def test_other_dtypes_are_refused():
    pool = Pool(METHODS["streaming"], SHAPES["gqa"][1:], device=DEVICE)
    with pytest.raises(ValueError, match=r"float64.*use backend='torch'"):
        run(pool, SHAPES["gqa"], (0,), 1, "triton")


def steps_of(shape, method, lengths, num, backend):
    pool = RecordPool(method, shape[1:], num_pages=200, dtype=torch.float32, device=DEVICE)
    return run(pool, shape, lengths, num, backend)


# every shape of pages compiles kernels of its own, so most dtypes and head shapes are seen with some methods alone
HOST = [name for name, method in RECALLS.items() if method.store == "host"]
READ = [(m, "gqa", dtype) for m in RECALLS if m not in HOST for dtype in DTYPES if dtype != torch.float16 or "4" in m]
READ += [("store-8", "one-head", DTYPES[-1]), ("store-4", "seven", DTYPES[0])]
READ_FROM_HOST = [(name, "gqa", dtype) for name in HOST for dtype in DTYPES]
READ_FROM_HOST += [("host-16", shape, DTYPES[:2][-1]) for shape in LATENTS]
# wide heads and groups of 16, of which up to eight query heads share one: a GPU reads these by lanes
WIDE = {"wide": (8, 2, 128, 128), "wide-three": (6, 2, 128, 128), "wide-seven": (7, 1, 128, 128)}
OF_16 = {name: RECALLS[name].replace(group_size=16, window=16, num_recall=9) for name in ("store-4", "drop")}


@pytest.mark.parametrize(("method", "shape", "dtype"), READ, ids=str)
def test_steps_are_those_of_pytorch(method, shape, dtype):
    check_steps(method, shape, dtype)


@pytest.mark.usefixtures("lanes")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numbers that are masked afterwards
@pytest.mark.parametrize(("method", "shape"), [*(("store-4", shape) for shape in WIDE), ("drop", "wide")])
def test_steps_by_lanes(method, shape):
    check_steps(method, shape, torch.bfloat16)


def check_steps(method, shape, dtype):
    """Both read the bytes that the kernels have stored, so that a code at a border counts once, where it is made."""
    # in two steps some request completes a group, of whatever size
    lengths, steps, outs, made = (0, 62, 19, 41), 2 if DEVICE == "cpu" else 40, [], {"dtype": dtype, "device": DEVICE}
    if shape in WIDE:
        lengths, made = tuple(7 * n for n in lengths), made | {"per_page": 16}
        steps = min(steps, 40 if DEVICE == "cuda" else 1)
    method, shape = (OF_16 if shape in WIDE else RECALLS)[method], (SHAPES | WIDE)[shape]
    mine, theirs = pools = [RecordPool(method, shape[1:], num_pages=200, **made) for _ in range(2)]
    both = (run_steps(pool, shape, lengths, steps, x) for pool, x in zip(pools, ("triton", "torch"), strict=True))
    for step in zip(*both, strict=True):
        outs.append(step)
        check_records(pools)
        theirs.blocks.copy_(mine.blocks)
    check_same(*map(torch.stack, zip(*outs, strict=True)))


@pytest.mark.parametrize(("method", "shape", "dtype"), READ_FROM_HOST, ids=str)
def test_tokens_in_host_memory_are_those_of_the_device(method, shape, dtype):
    shape, made = (SHAPES | LATENTS)[shape], {"num_pages": 200, "dtype": dtype, "device": DEVICE}
    heads = shape[1:] if len(shape) == 4 else (1, sum(shape[1][1:3]), 0)
    host, device = (RecordPool(RECALLS[method].replace(store=x), heads, **made) for x in ("host", "device"))
    steps, reader = (2, "torch") if DEVICE == "cpu" else (40, "triton")
    check_same(*(run(pool, shape, (0, 62, 19, 41), steps, "triton", reader) for pool in (host, device)))
    for one, other in zip(host.requests, device.requests, strict=True):
        kept, wanted = host.kept(one), device.kept(other)
        assert all(torch.equal(kept[part].cpu(), wanted[part].cpu()) for part in ("signs", "steps", "store"))


@pytest.mark.usefixtures("ranks_few")
@pytest.mark.parametrize("method", ["default", "store-8"])
def test_requests_of_all_lengths_where_each_has_room_for_many_groups(method):
    lengths = 0, 20, 41, 77, 12
    check_same(*(steps_of(SHAPES["gqa"], RECALLS[method], lengths, 2, x) for x in ("triton", "torch")))


@pytest.mark.parametrize("method", ["default", "drop", *record_pool.EXACT_PROMPTS])
def test_prompts_that_share_a_call(method):
    shape, tokens, outs, pools = SHAPES["gqa"], [tokens_of(SHAPES["gqa"], 40, seed=n) for n in range(4)], [], []
    for backend in ("triton", "torch"):
        pool = RecordPool((RECALLS | record_pool.EXACT_PROMPTS)[method], shape[1:], dtype=torch.float32, device=DEVICE)
        single, later, *others = [pool.add(40) for _ in tokens]
        for request, count in ((single, 39), (later, 22)):
            pool.read([(request, [x[:count] for x in tokens[0]])], scale=0.1, backend="torch")
        chunks = [(single, [x[39:] for x in tokens[0]]), (later, [x[22:] for x in tokens[0]])]
        chunks += [(r, [x[:n] for x in qkv]) for r, n, qkv in zip(others, (40, 23), tokens[1:], strict=False)]
        outs.append(torch.cat(pool.read(chunks, scale=0.1, backend=backend)))
        pools.append(pool)
    check_same(*outs)
    check_records(pools)


def test_pages_that_lie_so_far_apart_that_offsets_pass_32_bits():
    shape, made, outs = SHAPES["one-head"], {"num_pages": 130, "dtype": torch.float32, "device": DEVICE}, []
    for block in (None, 80 << 20):
        pool = RecordPool(RECALLS["default"], shape[1:], block=block, **made)
        outs.append(run(pool, shape, (42,), 2, "triton"))
    assert max(pool.requests[0].window + pool.requests[0].entries) * pool.blocks.stride(0) > 2**33
    assert torch.equal(*outs)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_requests_that_attend_one_part_after_another(rows, monkeypatch):
    """As they do where many share a long prefix, so that their groups fill the pool many times."""
    lengths = (0, 50, 80, 3, 61)
    want = steps_of(SHAPES["gqa"], RECALLS["default"], lengths, 1, "triton")
    monkeypatch.setattr(paged_step, "rows_at_once", lambda records: rows)
    check_same(steps_of(SHAPES["gqa"], RECALLS["default"], lengths, 1, "triton"), want)


def test_no_token_is_read_before_it_is_there():
    shape, outs = SHAPES["gqa"], []
    for fill in (0, 255):
        pool = RecordPool(RECALLS["store-8"], shape[1:], num_pages=60, dtype=torch.float32, device=DEVICE, fill=fill)
        request, tokens = pool.add(60), tokens_of(shape, 60)
        request.reserve(60)
        pool.read([(request, [x[:41] for x in tokens])], scale=0.1, backend="torch")
        outs += pool.read([(request, [x[41:42] for x in tokens])], scale=0.1, backend="triton")
    assert torch.equal(*outs)


def with_slots(pool, rows):
    """Give slots to the first rows of every step."""
    widths, like = (pool.width, pool.value_width), pool.blocks.new_empty(0, dtype=pool.dtype)
    pool.slots = PagedSlots.empty(rows, pool.kv_heads, widths, pool.plan.settings, like)
    return pool


@pytest.mark.parametrize(
    ("method", "slots", "rows", "part"), [("host-16", 3, 2, 2), ("host-4", 4, 3, 3), ("host-8-drop", 2, 2, 1)]
)
def test_slots_of_pages_that_change_hands(method, slots, rows, part, monkeypatch):
    """Requests come and go and change places in the batch, and their few pages go to others: the bits without slots;
    also where so few attend at once that a part of them has none.
    """
    monkeypatch.setattr(paged_step, "rows_at_once", lambda records: part)
    width = 32 if DEVICE == "cpu" else 64
    shape, draw, outs = (2, 1, width, width), random.Random(0), []
    chosen = RECALLS[method].replace(slots=slots)
    pools = [RecordPool(chosen, shape[1:], num_pages=24, dtype=torch.float32, device=DEVICE) for _ in range(2)]
    with_slots(pools[0], rows)
    alive, place = [], 0
    for step in range(7 if DEVICE == "cpu" else 120):
        freed = [[], []]
        if step % 4 == 3:
            place = max(range(3), key=lambda i: alive[i][0][0].seen)
            for pool, request, pages in zip(pools, alive.pop(place)[0], freed, strict=True):
                for page in {*request.window, *request.entries} - {NULL}:
                    pool.give_back(page)
                pages += request.entries
                pool.requests.remove(request)
        while len(alive) < 3:
            qkv, start = tokens_of(shape, 60, seed=10 * step + len(alive)), draw.choice((21, 26, 34))
            alive.insert(place, ([pool.add(60) for pool in pools], qkv))
            for pool, request, pages in zip(pools, alive[place][0], freed, strict=True):
                # its groups lie where those of the request before it lay
                request.entries = pages
                pool.free = [page for page in pool.free if page not in pages]
                pool.read([(request, [x[:start] for x in qkv])], scale=0.3, backend="triton")
            freed = [[], []]
        if step % 4 == 1:
            draw.shuffle(alive)
        for i, pool in enumerate(pools):
            chunks = [(both[i], [x[both[i].seen : both[i].seen + 1] for x in qkv]) for both, qkv in alive]
            outs.append(torch.cat(pool.read(chunks, scale=0.3, backend="triton")))
        assert torch.equal(*outs[-2:])
    # a slot in use that holds a copy of what is in host memory, to the byte
    check_copies(pools[0], [both[0] for both, _ in alive], rows)


def check_copies(pool, requests, rows):
    """Slots whose tags are those of a record of the request in their place hold its bytes; some of them do."""
    g, per_page, found = pool.method.group_size, pool.kinds["entries"][0], 0
    stamps = pool.form.views(pool.view("entries"), pool.host)["stamps"]
    for row, request in enumerate(requests[:rows]):
        closed = (request.seen - pool.plan.settings.rule.window) // g
        for head, slot in itertools.product(*map(range, pool.slots.held.shape[1:])):
            group, (place, stamp) = int(pool.slots.held[row, head, slot]), pool.slots.tags[row, head, slot].tolist()
            page, at = divmod(place, per_page)
            there = 0 <= group < closed and (request.entries[group // per_page], group % per_page) == (page, at)
            if there and int(stamps[page, head, at]) == stamp:
                piece = pool.slots.slots[row, head, slot * g : (slot + 1) * g].flatten().view(torch.uint8)
                assert torch.equal(piece.cpu(), pool.host[page, head, at, : len(piece)])
                found += 1
    assert found > 0


def test_slots_are_read_in_place_of_host_memory():
    """What a step has copied need not be there any more, until its record is written anew."""
    shape, method, outs = SHAPES["pairs"], RECALLS["host-4"].replace(slots=8), []
    for disturbs in (False, True):
        pool = with_slots(RecordPool(method, shape[1:], num_pages=60, dtype=torch.float32, device=DEVICE), 1)
        request, qkv = pool.add(60), tokens_of(shape, 60)
        pool.read([(request, [x[:36] for x in qkv])], scale=0.3, backend="triton")
        for step in range(3):
            # all ask the same, and no group is closed between
            outs += pool.read([(request, [x[37:38] for x in qkv])], scale=0.3, backend="triton")
            if step == 0 and disturbs:
                pool.settle()
                pool.host.fill_(1)
            if step == 1 and disturbs:
                pool.form.views(pool.view("entries"), pool.host)["stamps"][request.entries] += 1
    assert [torch.equal(x, y) for x, y in zip(outs[:3], outs[3:], strict=True)] == [True, True, False]
