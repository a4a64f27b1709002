"""Recall over pages of records, beside the laws of `test_paged`: the bits of the step in buffers, what records hold.

Shapes: H query heads, K KV heads, L tokens, D and Dv widths.
"""

from dataclasses import replace

import pytest
import torch
from grids import fixture_of, grid
from paged_sequences import cut, random_latents, random_tokens
from record_pool import EXACT_PROMPTS, RECALL, RECORDS, RecordPool
from step_states import call_of, empty, own_by

from condense.methods import step_settings
from condense.ops import NewToken
from condense.ops.latents import UpProjection
from condense.ops.paged import api
from condense.ops.step.pages import window_columns
from condense.ops.torch import step as torch_step
from condense.serving.plan import ServingPlan, serving_plan

H, K, D, DV = 4, 2, 6, 4
SCALE = 0.6
EXACT = {"rtol": 1e-12, "atol": 1e-12}
METHODS = RECORDS | EXACT_PROMPTS
method = fixture_of(METHODS)


def tokens_of(length, seed=0):
    return random_tokens((H, K, D, DV), length, seed=seed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_records_have_the_bits_of_steps_in_buffers(method, dtype):
    """Rows of several lengths, 0 among them: records are those of a step in rings, outputs but for rounding."""
    g, settings = method.group_size, step_settings(method)
    before, steps = method.window + g + 3, max(24, g + 8)
    lengths = 0, before, before // 2
    pool = RecordPool(method, (K, D, DV), dtype=dtype)
    room = pool.far * -(-(max(lengths) + steps) // pool.far)
    sizes = {"rows": 3, "dtype": dtype, "entries": room // method.group_size}
    state = empty(settings, method.window + method.group_size, K, (D, DV), **sizes)
    qkvs = [[x.to(dtype) for x in tokens_of(n + steps, seed)] for seed, n in enumerate(lengths)]
    requests = [pool.add(n + steps) for n in lengths]
    for i in range(max(lengths) + steps):
        real = torch.tensor([i >= max(lengths) - n for n in lengths])
        places = [max(0, i - max(lengths) + n) for n in lengths]
        rows = [torch.stack([qkv[j][p] for qkv, p in zip(qkvs, places, strict=True)])[:, :, None] for j in range(3)]
        want = torch_step.step(call_of(settings, state, NewToken(*rows, real), scale=SCALE), own_by(settings))
        alive = [n for n in range(3) if real[n]]
        chunks = [(requests[n], cut(qkvs[n], places[n], places[n] + 1)) for n in alive]
        for r in requests:
            r.reserve(room)
        got = torch.cat(pool.read(chunks, scale=SCALE, backend="torch"))
        if dtype == torch.float64:
            torch.testing.assert_close(got, want[alive, :, 0], **EXACT)
    for n, r in enumerate(requests):
        closed = int(settings.rule.closed(torch.tensor(r.seen)))
        for name, x in pool.kept(r).items():
            n_rows = closed * x.shape[2] // max(r.seen // method.group_size, 1)
            assert torch.equal(x[0, :, :n_rows], getattr(state, name)[n][:, :n_rows]), name


def last_sum(pool, request):
    """The sum ``[K, Dv]``, of latents ``[K, D]``, beside a request's last whole group, and what fills its last part."""
    widths, g = (pool.width, pool.value_width), pool.method.group_size
    start, _ = window_columns(*widths, pool.plan.settings, pool.dtype.itemsize)
    token = torch.arange(request.seen // g * g - g, request.seen // g * g)
    slots = torch.tensor(request.window)[token // pool.near], slice(None), token % pool.near
    return pool.view("window").view(pool.dtype)[..., start:].view(torch.float64)[slots].transpose(0, 1).flatten(1)


@grid(32, method=METHODS, Dv={"values": DV, "latents": 0}, dtype=[torch.float64, torch.float32, torch.bfloat16])
def test_records_and_sums_do_not_depend_on_how_tokens_come(method, Dv, dtype):
    far = 4 * method.group_size  # a page has four records
    prefix = far * max(1, 32 // far)
    length, made = prefix + 43, []
    qkv, up = (tokens_of(length), None) if Dv else random_latents(H, (5, 2, 4, 4), length)
    qkv = [x.to(dtype) for x in qkv]
    want = qkv[2 if Dv else 1][: length // method.group_size * method.group_size].double().sum(0)
    for pieces in ([length], [1] * length, [7, 30, 2, length - 39], [prefix, 43], [prefix, *[3] * 14, 1]):
        pool = RecordPool(method, (qkv[1].shape[1], D, Dv), dtype=dtype)
        pool.up = None if up is None else UpProjection(*(w.to(dtype) for w in up))
        request = pool.add(length)
        for i, n in enumerate(pieces):
            if i == 1 and pieces[0] == prefix:
                request = pool.add(length, request, prefix)
            pool.read([(request, cut(qkv, request.seen, request.seen + n))], scale=SCALE, backend="torch")
        made.append(pool.kept(request))
        if method.unchosen == "mean":
            made[-1]["sum"] = last_sum(pool, request)[:, : want.shape[1]]
            torch.testing.assert_close(made[-1]["sum"], want, **EXACT)
    assert all(torch.equal(x, other[name]) for name, x in made[0].items() for other in made)


@pytest.mark.parametrize("name", ["default", "window-4", "window-5", "store-4", "g-16", "drop"])
def test_tokens_that_are_taken_back_leave_no_trace(name):
    """Drafts complete groups; what is read in their place makes other records and sums."""
    pool, alone = (RecordPool(RECORDS[name], (K, D, DV)) for _ in range(2))
    qkv, drafts = tokens_of(90), tokens_of(90, seed=1)
    request, cold = pool.add(90), alone.add(90)
    want = alone.read([(cold, cut(qkv, 0, 60))], scale=SCALE)[0]
    pool.read([(request, cut(qkv, 0, 60))], scale=SCALE)
    for i in range(60, 90, 3):
        # three of eight are kept
        chunk = [torch.cat([x[i : i + 3], y[i + 3 : i + 8]]) for x, y in zip(qkv, drafts, strict=True)]
        out = pool.read([(request, chunk)], scale=SCALE)[0][:3]
        request.seen = i + 3
        want = alone.read([(cold, cut(qkv, i, i + 3))], scale=SCALE)[0]
        torch.testing.assert_close(out, want, **EXACT)


def test_settings_and_records_of_another_kind_are_refused():
    pool, host = (RecordPool(RECORDS[name], (K, D, DV)) for name in ("default", "host-16"))
    own, blocks, drop = pool.plan.settings, pool.blocks, RECALL.replace(unchosen="drop")
    on_host, host.plan = host.plan.settings, pool.plan
    with pytest.raises(ValueError, match="got a store on the device and pages for it"):
        host.read([(host.add(3), tokens_of(3))], scale=SCALE)
    for settings, pool.blocks, message in (
        (on_host, blocks, "got a store on the host and no pages for it"),
        (replace(own, summary_delay=8), blocks, "summary_delay of records must be 0, got 8"),
        (serving_plan(RECORDS["store-8"]).settings, blocks, r"entries must be pages uint8 \[P, 2, N, \d+\], got"),
        (own, torch.empty_like(blocks[:, 8:]), "must begin at multiples of 16 bytes"),
        (serving_plan(drop).settings, blocks, r"window must be pages \[P, 2, N, 10\]"),
    ):
        pool.plan = ServingPlan(settings)
        with pytest.raises(ValueError, match=message):
            pool.read([(pool.add(3), tokens_of(3))], scale=SCALE)


def test_a_backend_is_chosen_for_as_many_groups_as_tables_have_room_for(monkeypatch):
    """Kernels that choose take so many and no more: "auto" must not choose them and then stop."""
    pool, asked = RecordPool(RECALL, (K, D, DV), dtype=torch.float32), []
    monkeypatch.setattr(api, "step_backend", lambda *args, **options: asked.append(options["entries"]) or "torch")
    request, qkv = pool.add(30), [x.float() for x in tokens_of(30)]
    pool.read([(request, qkv)], scale=SCALE)
    state = pool.state([request])
    assert asked == [state.entries.table.shape[1] * state.entries.slots]
    assert [state._replace(longest=n).most_groups(4) for n in (1, 9, 10**6)] == [1, 3, *asked]
