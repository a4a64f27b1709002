"""One decode step over fixed-address buffers in Triton, as one torch operation: no wait for the host.

Shapes as in `condense.ops.step.call` and `condense.ops.step.state`.
"""

from typing import Any

import torch
from torch import Tensor

from condense.ops.step.call import NewToken, StepCall, check_call
from condense.ops.step.settings import numbered_settings
from condense.ops.step.state import StepState
from condense.ops.triton.limits import check_step
from condense.ops.triton.recall_step import RecallKernels
from condense.ops.triton.ring_step import PreparedStep, RingKernels
from condense.ops.types import Extras


def step(call: StepCall) -> Tensor:
    """Read one token per row: return attention output ``[B, H, 1, Dv]`` and advance the state in place.

    bfloat16, float16 or float32, one dtype; K divides H; the token may have any strides. Without a choice rings and
    16-bit entries need contiguous last dimensions only, and ``seen``, ``first`` and ``arrived`` none; all other buffers
    are contiguous, with a choice all buffers. Rows without a token are not changed and return 0. Of latent keys, the
    columns that are values are pooled by value_pooling, the others by key_pooling.
    Entries beyond the capacity are dropped and never seen, without an error: ``seen`` is on the device.
    Raises ValueError for what `condense.ops.triton.limits.step_obstacle` names and for a state that does not fit.
    """
    _check(call)
    token, state, settings, scale, latent, extras = call
    out: Tensor = torch.ops.condense.step.default(
        *token[:3], *state, token.counter, token.real, extras.sink_logits, settings.number, scale, latent,
        extras.softcap,
    )  # fmt: skip
    return out


def prepare_step(call: StepCall) -> PreparedStep:
    """Return a step of this state for a loop on the host over tokens laid out as that of ``call``, which is not read.

    Autograd is not told that the state changes, so tensors that it saves must not share memory with the state.
    Arguments and errors as in `step`.
    """
    _check(call)
    return RingKernels(call, host_bound=True) if call.settings.choice is None else RecallKernels(call)


def _check(call: StepCall) -> None:
    (q, k, v, *_), room = call.token, call.state.entries_k.shape[2]
    check_step(q, (k.shape[3], v.shape[3]), call.settings, latent=call.latent, entries=room)
    check_call(call)


def _step(*fields: Any) -> Tensor:
    """Run the operation. fields: q, k and v of the token, the buffers of the state, then the rest of `_SCHEMA`."""
    (q, k, v), state = fields[:3], StepState(*fields[3:_REST])
    counter, real, sink, settings, scale, latent, softcap = fields[_REST:]
    if not torch.is_inference_mode_enabled():  # tell autograd of the change, as in-place operations do
        changed = [x for name, x in state._asdict().items() if name != "first"]
        torch.autograd.graph.increment_version(changed if counter is None else [*changed, counter])
    token = NewToken(q, k, v, real, counter)
    call = StepCall(token, state, numbered_settings(settings), scale, latent, Extras(softcap, sink))
    return (RingKernels if call.settings.choice is None else RecallKernels)(call)(token, sink)


_REST = 3 + len(StepState._fields)
# a step may write to all buffers except ``first``
_BUFFERS = (f"Tensor{'' if name == 'first' else f'(a{i}!)'} {name}" for i, name in enumerate(StepState._fields))
_SCHEMA = (
    f"step(Tensor q, Tensor k, Tensor v, {', '.join(_BUFFERS)}, Tensor(z!)? counter, Tensor? real, Tensor? sink, "
    "SymInt settings, float scale, SymInt latent, float softcap) -> Tensor"
)
# defined without `torch.library.custom_op`, which parses the schema for every argument of an in-place operation in each
# call: that takes several times as long as the rest of the host's work in a step
_LIBRARY = torch.library.Library("condense", "FRAGMENT")
_LIBRARY.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("step", _step, "CompositeExplicitAutograd")
torch.library.register_fake(
    "condense::step", lambda q, k, v, *args: q.new_empty(*q.shape[:3], args[-2] or v.shape[3]), lib=_LIBRARY
)
