"""One decode step over pages in Triton: the kernel of rings, once to store and once to attend. Nobody waits.

On Hopper, for few requests, each kernel starts while the one before still runs, and waits for it before it reads that
one's results.

Shapes: R requests, H query heads, K KV heads, D and Dv widths.
"""

from typing import Any

from torch import Tensor

from condense.ops.step.pages import PagedState
from condense.ops.step.records import record_format
from condense.ops.step.settings import StepSettings
from condense.ops.step.state import StepState
from condense.ops.triton.device.address import PageForm
from condense.ops.triton.host import dense_rows, on_device_of
from condense.ops.triton.limits import step_obstacle
from condense.ops.triton.ring_step import JOIN, NUM_BUFFERS, STEP, split_scratch
from condense.ops.triton.step_plan import Launch, StepSizes, launch_of


def store(
    q: Tensor, k: Tensor, v: Tensor, state: PagedState, seen: Tensor, settings: StepSettings, *, scale: float
) -> None:
    """Store one token of each request, and the entry of a group that is due.

    q ``[R, H, D]``, k ``[R, K, D]``, v ``[R, K, Dv]``: bfloat16, float16 or float32, one dtype with the window. seen
    int32 ``[R]`` on the device: tokens of each request, the new one included; 0 for an unused place, where nothing is
    stored. settings: as in `condense.ops.paged.read_paged`.
    On latents (``state.up``) q is absorbed, K is 1 and Dv is 0.
    Raises ValueError for what `condense.ops.triton.limits.step_obstacle` names.
    """
    pages = buffers_of(state, q.shape[2], seen, settings)
    launch = _launch_of(q, state, pages, settings, scale)
    with on_device_of(q):
        # no outputs
        _start(launch.store, (q, k, v), state, pages, (seen, seen))


def attend(q: Tensor, state: PagedState, seen: Tensor, settings: StepSettings, *, scale: float, out: Tensor) -> None:
    """Write the attention of one token of each request, after `store`, to ``out`` ``[R, H, Dv]``; 0 for unused places.

    On latents out is d_c wide. Arguments and errors as in `store`.
    """
    pages = buffers_of(state, q.shape[2], seen, settings)
    launch = _launch_of(q, state, pages, settings, scale)
    part, lse = split_scratch(q, launch.num_splits, out.shape[2])
    with on_device_of(q):
        # keys and values are in pages by now
        _start(launch.step, (q, q, q), state, pages, (part, lse))
        join_pages(launch.join, part, lse, seen, state.extras.sink_logits, out)


def join_pages(
    plan: tuple[Any, ...] | None, part: Tensor, lse: Tensor, seen: Tensor, sinks: Tensor | None, out: Tensor
) -> None:
    """Write all splits' outputs, joined under one softmax with ``sinks``, to ``out``; seen as in `store`.

    plan: of `step_join_kernel`. part, lse: as many numbers as `condense.ops.triton.ring_step.split_scratch` has. sinks:
    `condense.ops.Extras.sink_logits`.
    """
    assert plan is not None
    grid, numbers, (*sizes, _, early, _), options = plan
    plan = grid, numbers, (*sizes, True, early, out.stride()[:2]), options
    JOIN.start(plan, (part, lse, out, None, seen, sinks, None), (0, seen.stride(0)))


def _start(
    plan: tuple[Any, ...],
    qkv: tuple[Tensor, Tensor, Tensor],
    state: PagedState,
    pages: StepState,
    splits: tuple[Tensor, Tensor],
) -> None:
    """Start the kernel over pages. splits: outputs and log-sum-exps of all splits."""
    qkv, seen = (dense_rows(qkv[0]), dense_rows(qkv[1]), dense_rows(qkv[2])), pages.seen
    tables = state.window.table, state.entries.table, None if state.ring is None else state.ring.table
    # strides of rings and arrays, which pages have in their forms
    none = (0,) * 15
    strides = (*(n for x in qkv for n in x.stride()[:2]), *none, seen.stride(0), 0, 0, 0, 0, 0)
    STEP.start(plan, (*qkv, *pages[:NUM_BUFFERS], seen, None, None, *splits, splits[0], *tables), strides)


def buffers_of(state: PagedState, D: int, seen: Tensor, settings: StepSettings) -> StepState:
    """The buffers of a step in pages, views ``[P, K, N, columns]``; the window, or ``seen``, in place of those that
    kernels do not read there.
    """
    near, far, past = state.window.cache, state.entries.cache, state.ring
    kept = dict.fromkeys(StepState._fields, near)
    kept |= {"ring_v": near[..., D:], "seen": seen, "first": seen, "arrived": seen}
    if state.holds_records:
        kept |= record_format(settings, (D, near.shape[3] - D), near.dtype).views(far)
    else:
        kept |= {"entries_k": far, "entries_v": far[..., D:]}
    if past is not None:
        kept["ring_q"] = past.cache
    return StepState(**kept)


def _launch_of(q: Tensor, state: PagedState, pages: StepState, settings: StepSettings, scale: float) -> Launch:
    """The launch arguments for these tensors. Raises ValueError as `store`."""
    (R, H, D), (_, K, _, C), rule = q.shape, state.window.cache.shape, settings.rule
    latent, Dv, far, past = state.latent, C - D, state.entries, state.ring
    obstacle = step_obstacle(q.device, q.dtype, (D, Dv), settings, latent=latent)
    if obstacle is not None:
        raise ValueError(f"backend 'triton' {obstacle}; use backend='torch'")
    assert rule.window is not None
    entries = far._replace(cache=pages.entries_k)
    forms = PageForm.of(state.window), PageForm.of(entries), None if past is None else PageForm.of(past)
    room = far.table.shape[1] * far.slots, rule.window + rule.chunk, 0
    sizes = StepSizes(R, H, K, D, latent or Dv, *room, *forms)
    return launch_of(settings.number, (scale, state.extras.softcap), latent, sizes, q.dtype, q.device, False)
