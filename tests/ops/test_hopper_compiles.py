"""Kernels compiled for Hopper on a machine without one: attention forward, and Recall's."""

import re

import pytest
import torch
from paged_pool import Pool
from record_pool import RecordPool
from step_states import empty, step_settings, with_store
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import condense
from condense.ops import unpack_store
from condense.ops.hopper import limits as hopper_limits
from condense.ops.recall import IndexChoice, Quota, RecallSources, StoreFormat, split_keys
from condense.ops.spans import RuleSpans, Source, UniformRule
from condense.ops.step import NewToken, StepCall
from condense.ops.triton import host, limits, paged_step, recall_step_plan, step_plan
from condense.ops.triton import step as triton_step
from condense.ops.triton.attend_call import call_of

WIDTHS = [widths for widths in hopper_limits.WIDTHS if len(set(widths)) > 1]
SHARED_MEMORY = 227 * 1024


class Hopper:
    """A driver that answers all that Triton asks before the launch."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(monkeypatch):
    kernels, run = [], JITFunction.run
    monkeypatch.setattr(driver, "_active", Hopper())
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kw: kernels.append(run(*args, **kw | {"warmup": True})))
    return kernels


@pytest.mark.parametrize(("D", "Dv"), WIDTHS)
def test_two_part_keys_fit_into_shared_memory(D, Dv, compiled):
    from condense.ops.hopper.attend_forward import launch

    q, k, v = (torch.zeros(1, 2, 128, width, dtype=torch.bfloat16) for width in (D, D, Dv))
    launch(call_of(q, [Source(k, v), Source(k, v)], RuleSpans(UniformRule(16, 64, max_chunks=8), 0, 0), 0.1), 132)
    assert compiled[0].metadata.shared <= SHARED_MEMORY
    assert "wgmma.mma_async" in compiled[0].asm["ptx"]


@pytest.fixture
def steps_on_hopper(monkeypatch):
    table = recall_step_plan._table
    monkeypatch.setattr(recall_step_plan, "_table", lambda device, *args: table(torch.device("cuda"), *args))
    monkeypatch.setattr(recall_step_plan, "gpu_of", lambda device: host.Gpu((9, 0), 132))
    monkeypatch.setattr(limits, "absence", lambda device: [])
    recall_step_plan.plan_of.cache_clear()
    yield
    recall_step_plan.plan_of.cache_clear()


@pytest.mark.usefixtures("steps_on_hopper")
@pytest.mark.parametrize(("D", "slots"), [(128, 0), (96, 16)])
def test_the_index_is_multiplied_in_halves(D, slots, compiled):
    """Bits become float16 two at a time, which the interpreter does not do, and tensor cores multiply them."""
    method = condense.Recall(window=64, num_recall=8)
    settings = with_store(step_settings(method), slots=slots)
    state = empty(settings, 1024, 2, (D, 128), rows=1, dtype=torch.bfloat16)
    heads = ((8, D), (2, D), (2, 128))
    token = NewToken(*(torch.zeros(1, n, 1, width, dtype=torch.bfloat16) for n, width in heads))
    triton_step.step(StepCall(token, state, settings, scale=0.1))
    score = compiled[1]
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in score.asm["ptx"]
    assert all(f", {0x00010001 << bit};" in score.asm["ptx"] for bit in range(8))
    assert len(compiled) == 5
    assert all(kernel.metadata.shared <= SHARED_MEMORY for kernel in compiled)


@pytest.mark.usefixtures("steps_on_hopper")
@pytest.mark.parametrize("method", [condense.Recall(), condense.Recall(store_bits=4, entry_bits=4, num_recall=0.3)])
def test_the_step_over_pages_compiles(method, compiled):
    """The same kernels with rows found by tables, within shared memory; bits are multiplied in halves."""
    pool = RecordPool(method, (2, 128, 128), num_pages=60, dtype=torch.bfloat16, slots=16, per_page=16)
    request = pool.add(300)
    request.reserve(300)
    token = [torch.zeros(1, heads, 128, dtype=torch.bfloat16) for heads in (8, 2, 2)]
    pool.read([(request, token)], scale=0.1, backend="triton")
    assert all(f", {0x00010001 << bit};" in compiled[1].asm["ptx"] for bit in range(8))
    assert len(compiled) == 5
    assert all(kernel.metadata.shared <= SHARED_MEMORY for kernel in compiled)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_the_pooled_step_over_pages_compiles(bits, compiled, monkeypatch):
    """Stores, attends and joins in pages of numbers and of records, early, within shared memory."""
    launch_of = step_plan.launch_of.__wrapped__
    monkeypatch.setattr(limits, "absence", lambda device: [])
    monkeypatch.setattr(step_plan, "gpu_of", lambda device: host.Gpu((9, 0), 132))
    monkeypatch.setattr(paged_step, "launch_of", lambda *args: launch_of(*args[:5], torch.device("cuda"), *args[6:]))
    method = condense.LCA(window=64, entry_bits=bits, rep_bias="log_size" if bits == 16 else "matched")
    pool = Pool(method, (2, 128, 128), num_pages=60, dtype=torch.bfloat16)
    request = pool.add(300)
    request.reserve(300)
    token = [torch.zeros(1, heads, 128, dtype=torch.bfloat16) for heads in (8, 2, 2)]
    pool.read([(request, token)], scale=0.1, backend="triton")
    assert len(compiled) == 3
    assert all("griddepcontrol.wait" in kernel.asm["ptx"] for kernel in compiled)
    assert all(kernel.metadata.shared <= SHARED_MEMORY for kernel in compiled)


def read_prompt(attend, q, k, v, asked, keys):
    """A prompt whose queries ``asked`` choose by an index of ``keys``."""
    of_k, of_v = (x.unflatten(2, (-1, 16)).mean(3) for x in (k, v))
    sources = RecallSources(Source(of_k, of_v), Source(k, v), Source(k, v), RuleSpans(UniformRule(16, 64), 0, 0))
    choice = IndexChoice(asked, split_keys(keys.unflatten(2, (-1, 16)))[0], 0.1, Quota(8))
    attend(q, sources, choice, scale=0.1, softcap=0.0, pool=True, return_lse=False)


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(64,), (128,), (192, 128, 576), (96, 64, 288)], ids=str)
def test_the_kernels_of_a_prompt(widths, compiled, monkeypatch):
    """Those for Hopper, and on latents Triton's: they fit, and tensor cores multiply."""
    from condense.ops.hopper import attend as hopper_attend
    from condense.ops.triton import attend, recall_attend, recall_choice, recall_score

    # sizes of tiles as on a GPU
    places = (attend, "tiles_of", 2), (recall_score, "_tiles", 1), (recall_choice, "queries_per_program", 1)
    for module, name, i in places:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, f=original, i=i: f(*a[:i], True, *a[i + 1 :]))
    monkeypatch.setattr(hopper_attend, "gpu_of", lambda device: host.Gpu((9, 0), 132))
    if len(widths) == 1:
        q, k = (torch.zeros(1, heads, 2048, *widths, dtype=torch.bfloat16) for heads in (8, 2))
        read_prompt(hopper_attend.attend_recall, q, k, k, q, k)
    else:
        q, v, latents = (torch.zeros(1, 4, 2048, width, dtype=torch.bfloat16) for width in widths)
        read_prompt(recall_attend.attend_recall, q, q, v, latents, latents[:, :1])
    assert len(compiled) == 7
    assert all(kernel.metadata.shared <= SHARED_MEMORY for kernel in compiled)
    assert sum("wgmma.mma_async" in kernel.asm["ptx"] for kernel in compiled) == 2


@pytest.mark.parametrize("dtype", limits.DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_a_store_is_unpacked_in_whole_words(bits, dtype, compiled, monkeypatch):
    """Codes 8 bytes at a time, numbers 16."""
    monkeypatch.setattr(limits, "absence", lambda device: [])
    form = StoreFormat(bits, 16)
    pieces = torch.zeros(1, 2, 64, 16 * form.width(128, 128, dtype.itemsize), dtype=torch.uint8)
    index = split_keys(torch.zeros(1, 2, 64, 16, 128, dtype=dtype))[0]
    unpack_store(form, pieces, index, (128, 128), dtype, backend="triton")
    ptx = compiled[0].asm["ptx"]
    assert not re.search(r"ld\.global\.b8|st\.global\.b(8|16|32|64)", ptx)
