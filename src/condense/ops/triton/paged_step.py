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
from condense.ops.triton.device.address import PageForm
from condense.ops.triton.host import dense_rows, on_device_of
from condense.ops.triton.launch import Launcher
from condense.ops.triton.limits import step_obstacle
from condense.ops.triton.ring_step import split_scratch
from condense.ops.triton.step_kernels import step_join_kernel, step_kernel
from condense.ops.triton.step_plan import Launch, StepSizes, launch_of

_step, _join = Launcher(step_kernel), Launcher(step_join_kernel)


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
    launch = _launch_of(q, state, settings, scale)
    with on_device_of(q):
        # no outputs
        _start(launch.store, (q, k, v), state, seen, settings, (seen, seen))


def attend(q: Tensor, state: PagedState, seen: Tensor, settings: StepSettings, *, scale: float, out: Tensor) -> None:
    """Write the attention of one token of each request, after `store`, to ``out`` ``[R, H, Dv]``; 0 for unused places.

    On latents out is d_c wide. Arguments and errors as in `store`.
    """
    launch = _launch_of(q, state, settings, scale)
    part, lse = split_scratch(q, launch.num_splits, out.shape[2])
    with on_device_of(q):
        # keys and values are in pages by now
        _start(launch.step, (q, q, q), state, seen, settings, (part, lse))
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
    _join.start(plan, (part, lse, out, None, seen, sinks, None), (0, seen.stride(0)))


def _start(
    plan: tuple[Any, ...],
    qkv: tuple[Tensor, Tensor, Tensor],
    state: PagedState,
    seen: Tensor,
    settings: StepSettings,
    splits: tuple[Tensor, Tensor],
) -> None:
    """Start the kernel over pages. splits: outputs and log-sum-exps of all splits."""
    near, far, past, D = state.window, state.entries, state.ring, qkv[0].shape[2]
    qkv = dense_rows(qkv[0]), dense_rows(qkv[1]), dense_rows(qkv[2])
    kept = parts_of(state, D, settings)
    # the kernel gets the window, or `seen`, in place of what it does not read
    tokens = near.cache, near.cache[..., D:], near.cache if past is None else past.cache
    buffers = kept["entries_k"], kept["entries_v"], *tokens, seen, seen, seen, kept["biases"], seen
    tables = near.table, far.table, None if past is None else past.table
    # strides of rings and arrays, which pages have in their forms
    none = (0,) * 15
    strides = (*(n for x in qkv for n in x.stride()[:2]), *none, seen.stride(0), 0, 0, 0, 0, 0)
    _step.start(plan, (*qkv, *buffers, None, None, *splits, splits[0], *tables), strides)


def parts_of(state: PagedState, D: int, settings: StepSettings) -> dict[str, Tensor]:
    """The parts of all entries or records in pages ``[P, K, N, columns]``, views; the window in place of empty ones."""
    near, far = state.window.cache, state.entries.cache
    parts = dict.fromkeys(("entries_k", "entries_v", "biases"), near)
    if state.holds_records:
        return parts | record_format(settings, (D, near.shape[3] - D), near.dtype).views(far)
    return parts | {"entries_k": far, "entries_v": far[..., D:]}


def _launch_of(q: Tensor, state: PagedState, settings: StepSettings, scale: float) -> Launch:
    """The launch arguments for these tensors. Raises ValueError as `store`."""
    (R, H, D), (_, K, _, C), rule = q.shape, state.window.cache.shape, settings.rule
    latent, Dv, far, past = state.latent, C - D, state.entries, state.ring
    obstacle = step_obstacle(q.device, q.dtype, (D, Dv), settings, latent=latent)
    if obstacle is not None:
        raise ValueError(f"backend 'triton' {obstacle}; use backend='torch'")
    assert rule.window is not None
    entries = far._replace(cache=parts_of(state, D, settings)["entries_k"])
    forms = PageForm.of(state.window), PageForm.of(entries), None if past is None else PageForm.of(past)
    room = far.table.shape[1] * far.slots, rule.window + rule.chunk, 0
    sizes = StepSizes(R, H, K, D, latent or Dv, *room, *forms)
    return launch_of(settings.number, (scale, state.extras.softcap), latent, sizes, q.dtype, q.device, False)
