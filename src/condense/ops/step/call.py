"""The contract of one decode step: a token per row is read into a state, in place, and attends.

A backend's ``step(call) -> out`` closes, chooses, attends and joins (the torch backend's also takes the method's
`condense.Method.represent`, as settings may not say how entries are made):

1. close: k, v and the head-mean of q (`condense.ops.tensors.right_aligned.head_mean`) go into the rings, at
   ``seen % size``; with ``n = seen + 1`` and d the settings' ``summary_delay``, chunk j is due if
   ``rule.pooled(n, d) = j + 1 > rule.pooled(seen, d)``; its entries, made of its tokens and the mean of the newest
   ``num_summary`` queries, go to ``[a + p * j, a + p * (j + 1))`` of the entries (and of their biases), after the
   row's a first entries. With a choice, its index also goes to column j of ``signs`` and ``steps``, and its tokens to
   columns ``[j * c, (j + 1) * c)`` of the store;
2. choose: with a choice, the query opens the best ``quota.at(closed)`` of the ``closed = rule.closed(n)`` closed
   groups, as `condense.ops.recall.choose_groups` does; `StepState` says from where their tokens are read;
3. attend: to entries ``[0, a + rule.visible_entries(closed))``, or with a choice to the tokens of open groups and, if
   its ``mean`` says so, to one token for all others; and to the tokens from position ``closed * c`` on, as
   `condense.ops.attend` and `condense.ops.attend_recall` do;
   with coarse entries (`condense.ops.coarse`) a chunk's entry goes into the ring of fine ones, at ``j % F``, runs of
   older ones are merged into entries, and queries see what `condense.ops.coarse.CoarseRule.spans` says;
4. join: parts of the work that ran in parallel become one output, and seen becomes n.

A row that is not ``real`` changes nothing and gets 0; a query that sees nothing gets 0. Every decision that depends on
data is a mask on the device: no host synchronisation and no branch, so that a step can be traced and captured.
A chunk whose entries do not all fit into the buffers is dropped and never seen.

Shapes: B rows, H query heads, K KV heads, M entries of capacity, c tokens per chunk, p entries per chunk, D and Dv
widths.
"""

from typing import NamedTuple

from torch import Tensor

from condense.ops.step.settings import StepSettings
from condense.ops.step.state import StepState, check_state
from condense.ops.types import NO_EXTRAS, Extras


class NewToken(NamedTuple):
    """A new token of every row: q ``[B, H, 1, D]``, k ``[B, K, 1, D]``, v ``[B, K, 1, Dv]`` in the dtype of the state.

    For latents Dv is 0: their values are columns of their keys. real: bool or integer ``[B]``, whether a row's token
    counts; None: all do. counter: int64 ``[]`` on the device, to which the step adds 1; or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    real: Tensor | None = None
    counter: Tensor | None = None


class StepCall(NamedTuple):
    """The arguments of a step. scale: factor of the scores.

    latent: if > 0, values are the first ``latent`` columns of the keys, Dv of token and state is 0, and the output is
    ``latent`` wide (absorbed MLA: 512 of 576). extras: as in `condense.ops.attend`; groups are chosen without them.
    """

    token: NewToken
    state: StepState
    settings: StepSettings
    scale: float
    latent: int = 0
    extras: Extras = NO_EXTRAS


def check_call(call: StepCall) -> None:
    """Raise ValueError for tensors of a step that do not fit together."""
    (q, k, v, real, _), state = call.token, call.state
    (B, K, _, D), Dv = state.ring_k.shape, state.ring_v.shape[3]
    dtype, device = q.dtype, q.device
    for name, x, wanted in (
        ("k", k, (B, K, 1, D)),
        ("v", v, (B, K, 1, Dv)),
        ("q", q, (B, q.shape[1] // K * K, 1, D)),
        ("ring_k", state.ring_k, state.ring_k.shape),
        ("seen", state.seen, state.seen.shape),
    ):
        kind = x.dtype if x is state.seen else dtype
        if x.shape != wanted or x.dtype != kind or x.device != device:
            raise ValueError(
                f"{name} must be {tuple(wanted)} in {kind} on {device}, got {tuple(x.shape)} in {x.dtype} on {x.device}"
            )
    check_state(state, call.settings)
    if real is not None and (real.shape != (B,) or real.is_floating_point() or real.device != device):
        raise ValueError(f"real must be bool or integer of shape ({B},) on {device}, got {real}")
