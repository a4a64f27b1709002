"""Kernels compiled for Hopper on a machine without one: attention forward, and Recall's."""

import re
import subprocess
from types import SimpleNamespace

import pytest
import torch
from paged_pool import Pool
from paged_sequences import random_latents
from record_pool import RecordPool
from step_states import empty, step_settings, with_store
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from two_scales import TwoScales

import condense
from condense.ops import Chunks, NewToken, RuleSpans, Source, StepCall, UniformRule, unpack_store
from condense.ops.api import running_sums
from condense.ops.hopper import limits as hopper_limits
from condense.ops.latents import Ranks
from condense.ops.paged import PagedSlots
from condense.ops.recall import GroupMeans, IndexChoice, Quota, RecallSources, StoreFormat, split_keys
from condense.ops.step import StateSizes
from condense.ops.step.pages import Places
from condense.ops.triton import host, limits, paged_step, recall_step_plan, recall_step_tiles, recall_store, step_plan
from condense.ops.triton import step as triton_step
from condense.ops.triton.attend_call import call_of
from condense.ops.triton.recall_store_kernels import Form
from condense.ops.types import AttendOptions

WIDTHS = [widths for widths in hopper_limits.WIDTHS if len(set(widths)) > 1]
SHARED_MEMORY = 227 * 1024


# what Triton asks of a driver before the launch
HOPPER = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
)


@pytest.fixture
def compiled(monkeypatch):
    """The kernels that are compiled, as on a machine with such a GPU; all fit into its shared memory."""
    kernels, run, table = [], JITFunction.run, recall_step_tiles._table
    monkeypatch.setattr(driver, "_active", HOPPER)
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kw: kernels.append(run(*args, **kw | {"warmup": True})))
    monkeypatch.setattr(limits, "absence", lambda device: [])
    monkeypatch.setattr(recall_step_tiles, "_table", lambda device, *args: table(torch.device("cuda"), *args))
    for module in (recall_step_plan, recall_step_tiles, step_plan):
        monkeypatch.setattr(module, "gpu_of", lambda device: host.Gpu((9, 0), 132))
    recall_step_plan.plan_of.cache_clear()
    yield kernels
    recall_step_plan.plan_of.cache_clear()
    assert all(kernel.metadata.shared <= SHARED_MEMORY for kernel in kernels)


@pytest.mark.parametrize(("D", "Dv"), WIDTHS)
def test_two_part_keys_fit_into_shared_memory(D, Dv, compiled):
    from condense.ops.hopper.attend_forward import launch

    q, k, v = (torch.zeros(1, 2, 128, width, dtype=torch.bfloat16) for width in (D, D, Dv))
    launch(call_of(q, [Source(k, v), Source(k, v)], RuleSpans(UniformRule(16, 64, max_chunks=8), 0, 0), 0.1), 132)
    assert "wgmma.mma_async" in compiled[0].asm["ptx"]


def take_a_step(settings, rows, heads, widths, latent=0, dtype=torch.bfloat16, **options):
    """Read one token per row. heads: of queries, and of keys and values."""
    state = empty(settings, 1024, heads[1], widths, rows=rows, dtype=dtype, **options)
    sizes = (heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1])
    token = NewToken(*(torch.zeros(rows, n, 1, width, dtype=dtype) for n, width in sizes))
    triton_step.step(StepCall(token, state, settings, scale=0.1, latent=latent))


def step_over_pages(make, method, width, ranks=None, **options):
    K = 2 if ranks is None else 1
    pool = make(method, (K, width, width), num_pages=60, dtype=torch.bfloat16, **options)
    pool.ranks = ranks
    if method.layout.choice is not None and method.layout.choice.store.slots > 0:
        like = pool.blocks.new_empty(0, dtype=torch.bfloat16)
        pool.slots = PagedSlots.empty(1, 2, (width, width), pool.plan.settings, like)
    request = pool.add(300)
    request.reserve(300)
    token = [torch.zeros(1, heads, width, dtype=torch.bfloat16) for heads in (8, K, K)]
    pool.read([(request, token)], scale=0.1, backend="triton")


@pytest.mark.parametrize(("D", "slots"), [(64, 0), (96, 16), (64, None)], ids=["64", "96, slots", "over pages"])
def test_the_index_is_multiplied_in_halves(D, slots, compiled):
    """Bits become float16 two at a time, which the interpreter does not do, and tensor cores multiply them."""
    if slots is None:
        step_over_pages(RecordPool, condense.Recall(), D, slots=16, per_page=16)
    else:
        settings = step_settings(condense.Recall(window=64, num_recall=8))
        settings = with_store(settings, slots=slots, bits=16 if slots else 4)
        take_a_step(settings, 1, (8, 2), (D, 128))
    if slots == 0:
        check_side_by_side(compiled[3], "shl.b32 s, $2, $3;", 2)
    ptx = compiled[1].asm["ptx"]
    assert re.search(r"mma\S*\.f32\.f16\.f16", ptx)  # by `wgmma` from Triton 3.8 on
    assert all(f", {0x00010001 << bit};" in ptx for bit in range(8))
    assert len(compiled) == 5


@pytest.mark.parametrize(("width", "bits"), [(64, 4), (128, 4), (128, 16)])
def test_slots_over_pages_compile(width, bits, compiled):
    method = condense.Method.parse("recall-host").replace(store_bits=bits)
    step_over_pages(RecordPool, method, width, slots=16, per_page=16)
    assert [kernel.metadata.name for kernel in compiled][2:4] == ["recall_choose_kernel", "recall_attend_kernel"]


@pytest.mark.parametrize(("widths", "latent"), [((128, 128), 0), ((576, 0), 512)], ids=["keys", "latents"])
def test_a_step_on_two_scales_compiles(widths, latent, compiled):
    settings = step_settings(TwoScales(window=512, n=16, near=600))
    take_a_step(settings, 1, (32, 1 if latent else 8), widths, latent=latent)
    assert [kernel.metadata.name for kernel in compiled][:1] == ["step_kernel"]


# what kernels that work by lanes have in their assembly
BY_LANES = {
    "recall_score_kernel": ("%laneid", "shfl.sync.", ".b1.b1."),
    "recall_attend_kernel": ("%laneid", "shfl.sync.", "movmatrix.sync.", ".s8.s8."),
}


def layouts_of(kernel):
    """Layouts of tensors by name, and the assembly within a kernel with the types of its tensors."""
    text = kernel.asm["ttgir"]
    operations = re.findall(r'tt\.elementwise_inline_asm "([^"]*)" (.*)$', text, re.MULTILINE)
    assert len(operations) == text.count("tt.elementwise_inline_asm")
    return dict(re.findall(r"^(#\w+) = #(.*)$", text, re.MULTILINE)), operations


def lane_assembly(kernel):
    """The assembly in which element e of each tensor must be what lane ``e % 32`` of warp ``e // 32`` holds."""
    (layouts, operations), warps = layouts_of(kernel), kernel.metadata.num_warps
    one_each = f"ttg.blocked<{{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [{warps}], "
    found = [(asm, rest) for asm, rest in operations if re.search(r"(shfl|mma|movmatrix)\.sync|%laneid", asm)]
    for asm, rest in found:
        tensors = re.findall(rf"tensor<{32 * warps}x[a-z]\w*, (#\w+)>", rest)
        assert len(tensors) == rest.count("tensor<") >= 2, (asm, rest)
        assert all(layouts[name].startswith(one_each) for name in tensors), (asm, rest)
    return "\n".join(asm for asm, _ in found)


LANES = [(1, 32, torch.bfloat16), (8, 32, torch.bfloat16), (1, 64, torch.bfloat16), (1, None, torch.bfloat16)]


@pytest.mark.parametrize(("rows", "heads", "dtype"), [*LANES, (1, 32, torch.float32)], ids=str)
def test_steps_by_lanes(rows, heads, dtype, compiled):
    """Programs that score have eight warps, or with many rows four; a warp has four query heads, or eight. heads: None
    for the step over pages. In float32 two steps of an index do not fit into a word, and lanes only score.
    """
    if heads is None:
        step_over_pages(RecordPool, condense.Recall(store_bits=4, num_recall=0.3), 128, slots=16, per_page=16)
    else:
        settings = step_settings(condense.Method.parse("recall-device"))
        take_a_step(settings, rows, (heads, 8), (128, 128), dtype=dtype, entries=64)
    kernels = {kernel.metadata.name: kernel for kernel in compiled}
    assert len(kernels) == len(compiled) == 5
    for name in BY_LANES if dtype == torch.bfloat16 else ["recall_score_kernel"]:
        asm = lane_assembly(kernels[name])
        assert all(instruction in asm for instruction in BY_LANES[name])


def check_side_by_side(kernel, instruction, number):
    """Assembly that moves several elements as far as the first of them: a thread has so many of a row side by side."""
    layouts, operations = layouts_of(kernel)
    names = {x for asm, rest in operations if instruction in asm for x in re.findall(r"tensor<[^>]*, (#\w+)>", rest)}
    assert names
    for name in names:
        columns = re.search(r"sizePerThread = \[[\d, ]*?(\d+)\]", layouts[name])[1]
        assert int(columns) % number == 0, layouts[name]


def spills(kernel, folder):
    """Bytes that a thread stores for want of registers."""
    (folder / "kernel.ptx").write_text(kernel.asm["ptx"])
    command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", folder / "kernel.ptx", "-o", folder / "kernel.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search(r"(\d+) bytes spill stores", said)[1])


# rows, heads, widths, slots; products of tensor cores, and numbers of two codes that a thread makes for a tile
LATENTS = [
    (1, 16, (512, 576), 0, 36 + 16 + 4, 72),
    (4, 16, (512, 576), 0, 36 + 32 + 4, 144),
    (1, 16, (512, 576), 8, 36 + 16 + 4, 72),
    (1, 40, (256, 288), 0, 20 + 8 + 4, 40),
    (4, 40, (256, 288), 8, 20 + 8 + 4, 40),
]


@pytest.mark.parametrize(("rows", "heads", "widths", "slots", "products", "made"), LATENTS, ids=str)
def test_steps_on_latents(rows, heads, widths, slots, products, made, compiled, tmp_path):
    """Tensor cores of Hopper multiply whole numbers of 8 bits, and codes that become bfloat16 in shared memory."""
    latent, D = widths
    settings = with_store(step_settings(condense.Recall(window=64, num_recall=8, store_bits=4)), slots=slots)
    take_a_step(settings, rows, (heads, 1), (D, 0), latent=latent)
    kernels = {kernel.metadata.name: kernel for kernel in compiled}
    check_side_by_side(kernels["recall_score_kernel"], "shr.b32 c, $1, $2;", 4)
    ptx = {name: kernel.asm["ptx"] for name, kernel in kernels.items()}
    assert re.search(r"wgmma\.mma_async\.[a-z0-9.]*\.s32\.s8\.s8", ptx["recall_score_kernel"])
    # scores wait for rotated queries, the rotation for the kernel that closes a group
    assert [ptx[f"recall_{x}_kernel"].count("griddepcontrol.wait") for x in ("rotate", "score")] == [1, 3]
    if D == 576:
        # the keys of a group that closes are rotated once: 16 times 1024 columns in blocks of 64, 128 of them at a time
        assert ptx["recall_close_kernel"].count("wgmma.mma_async") == 2 * 4
    # once in the loop over tiles
    assert ptx["latent_groups_kernel"].count("wgmma.mma_async") == products
    assert ptx["latent_groups_kernel"].count("lop3.b32 t, t, 0x001E001E") == made
    # four warps, of many rows, have too few registers for DeepSeek's latents, and are faster all the same
    assert (spills(kernels["latent_groups_kernel"], tmp_path) == 0) == ((rows, D) != (4, 576))


@pytest.mark.parametrize(
    ("widths", "bits"), [((66, 66), 4), ((67, 67), 8), ((264, 0), 4), ((520, 0), 4), ((258, 0), 8)], ids=str
)
def test_groups_of_odd_widths_close(widths, bits, compiled):
    k, v = (torch.zeros(1, 1, 1, 16, width, dtype=torch.bfloat16) for width in widths)
    recall_store.store_groups(StoreFormat(bits, 16), k, v)
    assert len(compiled) == 1


def test_a_step_on_latents_over_pages_compiles(compiled):
    method = condense.Recall(window=64, num_recall=8, store_bits=4)
    pool = RecordPool(method, (1, 288, 0), num_pages=60, dtype=torch.bfloat16, slots=16, per_page=16)
    request = pool.add(300)
    request.reserve(300)
    token, pool.up = random_latents(16, (16, 32, 256, 16), 1, dtype=torch.bfloat16)
    pool.read([(request, token)], scale=0.1, backend="triton")
    ptx = {kernel.metadata.name: kernel.asm["ptx"] for kernel in compiled}
    assert ptx["latent_groups_kernel"].count("wgmma.mma_async") == 20 + 8 + 4


def test_a_choice_by_the_heads_of_several_processes_compiles(compiled):
    step_over_pages(RecordPool, condense.Recall(num_recall=8), 64, ranks=Ranks(32, abs, abs), slots=16, per_page=16)
    names = [kernel.metadata.name for kernel in compiled]
    assert names[1:4] == ["recall_score_kernel", "recall_share_kernel", "recall_choose_kernel"]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("rows", [1, 5, 12, 20, 48])
def test_numbers_of_kernels_are_plain(rows):
    """A constant of Triton's among them would compile a kernel for each of its values."""
    settings = step_settings(condense.Method.parse("recall-device"))
    sizes = StateSizes(rows, 8, (128, 128), 8192, 272, stored=131072)
    shape = step_plan.StepShape(torch.device("cuda"), torch.bfloat16, 32, sizes, 0, (0.1, 0.0), settings.number)
    plan = recall_step_plan.plan_of(shape)
    given = [x for grid, numbers, *_ in filter(None, plan[1:]) for x in (*grid, *numbers)]
    assert {type(x) for x in (*sum(plan.scratch, ()), *given)} == {int, float}


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("rows", range(1, 241, 7))
def test_few_groups_are_read_by_fewer_programs(rows):
    """Never by more, though another number of waves is divided otherwise; one row has two thirds as many at most."""
    settings = step_settings(condense.Method.parse("recall-device"))
    sizes = StateSizes(rows, 8, (128, 128), 8192, 272, stored=131072)
    shape = step_plan.StepShape(torch.device("cuda"), torch.bfloat16, 32, sizes, 0, (0.1, 0.0), settings.number)
    tiles = recall_step_tiles.tiles_of(shape, Form.of(settings.store_format, torch.bfloat16, (128, 128)))
    assert tiles.attend.least > 0
    anyhow = tiles._replace(attend=tiles.attend._replace(least=0))
    fewer, most = (recall_step_tiles.splits_of(shape, x, 512 * 16, True).attend for x in (tiles, anyhow))
    assert fewer <= most
    assert rows > 1 or 3 * fewer <= 2 * most


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_the_pooled_step_over_pages_compiles(bits, compiled, monkeypatch):
    launch_of = step_plan.launch_of.__wrapped__
    monkeypatch.setattr(paged_step, "launch_of", lambda shape: launch_of(shape._replace(device=torch.device("cuda"))))
    method = condense.LCA(window=64, entry_bits=bits, rep_bias="log_size" if bits == 16 else "matched")
    step_over_pages(Pool, method, 128)
    assert len(compiled) == 3
    assert all("griddepcontrol.wait" in kernel.asm["ptx"] for kernel in compiled)


def read_prompt(attend, q, k, v, asked, keys):
    sources = RecallSources(Source(k, v), Source(k, v), RuleSpans(UniformRule(16, 64), 0, 0))
    choice = IndexChoice(asked, split_keys(keys.unflatten(2, (-1, 16)))[0], 0.1, Quota(8))
    attend(q, sources, choice, AttendOptions(0.1), GroupMeans(v[:, :, :1].float(), 0))


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(64,), (128,), (192, 128, 576), (96, 64, 288)], ids=str)
def test_the_kernels_of_a_prompt(widths, compiled, monkeypatch):
    """Those for Hopper, and on latents Triton's: they fit, and tensor cores multiply."""
    from condense.ops.hopper import attend as hopper_attend
    from condense.ops.triton import attend, recall_attend, recall_choice, recall_score

    # sizes of tiles as on a GPU
    places = (attend, "tiles_of", 2), (recall_score, "_tiles", 1), (recall_choice, "queries_per_program", 1)
    for module, name, i in (*places, (recall_attend, "_tile", 1), (recall_score, "_rotation_tile", 1)):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, f=original, i=i: f(*a[:i], True, *a[i + 1 :]))
    monkeypatch.setattr(hopper_attend, "gpu_of", lambda device: host.Gpu((9, 0), 132))
    if len(widths) == 1:
        q, k = (torch.zeros(1, heads, 2048, *widths, dtype=torch.bfloat16) for heads in (8, 2))
        read_prompt(hopper_attend.attend_recall, q, k, k, q, k)
    else:
        q, v, latents = (torch.zeros(1, 4, 2048, width, dtype=torch.bfloat16) for width in widths)
        read_prompt(recall_attend.attend_recall, q, q, v, latents, latents[:, :1])
    assert len(compiled) == 13
    assert sum("wgmma.mma_async" in kernel.asm["ptx"] for kernel in compiled) == 5


@pytest.mark.parametrize("dtype", limits.DTYPES, ids=str)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_store_is_unpacked_in_whole_words(bits, dtype, compiled):
    form = StoreFormat(bits, 16)
    pieces = torch.zeros(1, 2, 64, 16 * form.width(128, 128, dtype.itemsize), dtype=form.dtype(dtype))
    index = split_keys(torch.zeros(1, 2, 64, 16, 128, dtype=dtype))[0]
    # of 16 bits only pages are copied
    places = Places.of(torch.zeros(1, 64, dtype=torch.int64), torch.arange(64)[None], 2) if bits == 16 else None
    unpack_store(form, pieces, index, (128, 128), dtype, places=places, backend="triton")
    ptx = compiled[0].asm["ptx"]
    assert not re.search(r"ld\.global\.b8|st\.global\.b(8|16|32|64)", ptx)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("dtype", "g", "D"), [(torch.bfloat16, 16, 128), (torch.float16, 20, 576), (torch.float32, 16, 80)]
)
def test_sums_of_values_stay_in_registers(dtype, g, D, apart, compiled, tmp_path):
    """Values are loaded in pieces of 16 bytes; means are divided exactly."""
    v, before = torch.zeros(2, 2, 64 * g, D, dtype=dtype), torch.zeros(2, 2, 1, D, dtype=torch.float64)
    at, counts = torch.zeros(2, 64, dtype=torch.int64) if apart else 0, torch.ones(1, 1, 65, 1, dtype=torch.int64)
    running_sums(before, Chunks(v[..., :0], v, at, 64, g, 0), counts, backend="triton")
    blocks, added = compiled
    assert blocks.asm["ptx"].count("ld.global.v4.b32") >= 16
    assert "div.rn.f64" in added.asm["ptx"]
    assert not any(spills(kernel, tmp_path) for kernel in compiled)
