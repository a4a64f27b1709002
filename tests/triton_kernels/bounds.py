"""A check that each address that interpreted kernels read or write lies in the memory of a tensor of the launch."""

import numpy as np
from triton.runtime import interpreter

_GridExecutor, _Builder = interpreter.GridExecutor, interpreter.InterpreterBuilder


class OutOfBoundsError(Exception):
    """A kernel reads or writes outside the tensors that it was given."""


class _Memory:
    def __init__(self, arguments):
        pieces = sorted(set(_storages(arguments)))
        self.starts, self.ends = (np.array(x, dtype=np.uint64) for x in zip(*pieces, strict=True))

    def _in_one_piece(self, first, end):
        piece = int(np.searchsorted(self.starts, first, side="right")) - 1
        return piece >= 0 and end <= self.ends[piece]

    def check(self, pointers, mask):
        at, real = np.asarray(pointers.data), np.asarray(mask.data)
        size = np.uint64(np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize)
        if not real.all():
            at = at[np.broadcast_to(real.astype(bool), at.shape)]
        if at.size == 0 or self._in_one_piece(at.min(), at.max() + size):
            return
        at = at.ravel()
        piece = np.searchsorted(self.starts, at, side="right").astype(np.int64) - 1
        wrong = (piece < 0) | (at + size > self.ends[np.maximum(piece, 0)])
        if wrong.any():
            past = int(at[wrong][0]) - int(self.ends[max(int(piece[wrong][0]), 0)])
            raise OutOfBoundsError(f"{int(wrong.sum())} addresses, the first one {past} bytes past a tensor's end")


def _storages(argument):
    if isinstance(argument, (tuple, list)):
        for x in argument:
            yield from _storages(x)
    elif isinstance(argument, interpreter.TensorDescriptor):
        yield from _storages(argument.base)
    elif hasattr(argument, "data_ptr"):
        storage = interpreter._unwrap_tensor(argument).untyped_storage()
        yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def install():
    launched, prepare = [], _GridExecutor._init_args_hst

    def prepared(self, args, kwargs):
        on_host = prepare(self, args, kwargs)
        launched[:] = [_Memory([*on_host[0], *on_host[1].values()])]
        return on_host

    def checked(access, mask_at):
        def run(self, *args, **kwargs):
            pointers, mask = (args[i] for i in mask_at)
            launched[0].check(pointers, mask)
            return access(self, *args, **kwargs)

        return run

    _GridExecutor._init_args_hst = prepared
    # where pointers and mask stand among the arguments
    accesses = {"create_masked_load": (0, 1), "create_masked_store": (0, 2), "create_atomic_rmw": (1, 3)}
    for name, places in accesses.items():
        setattr(_Builder, name, checked(getattr(_Builder, name), places))
