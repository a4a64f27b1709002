"""The `hopper` backend: the forward pass in kernels for Hopper. Triton kernels compute gradients and choose the groups
that Recall opens.
"""

from functools import partial

from torch import Tensor

from condense.ops.hopper.attend_forward import launch
from condense.ops.hopper.recall_attend import launch_opened
from condense.ops.triton.attend import attend_backward
from condense.ops.triton.attend_call import AttendCall, Attention
from condense.ops.triton.host import gpu_of
from condense.ops.triton.recall_attend import attend_recall as attend_recall_by


def _forward(call: AttendCall) -> tuple[Tensor, Tensor]:
    assert call.softcap == 0, "the backend's limits"
    return (launch if call.groups is None else launch_opened)(call, gpu_of(call.q.device).multiprocessors)


ATTENTION = Attention("attend_hopper", _forward, attend_backward)
attend = ATTENTION.attend
attend_recall = partial(attend_recall_by, attention=ATTENTION)
