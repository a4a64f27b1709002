"""Kernels of prompts for Hopper in Triton's interpreter: warps that barriers order are threads, of which one runs."""

import sys
import threading
from types import SimpleNamespace

import numpy as np
import torch
import triton.language as tl
from triton_kernels import interpreted_gluon
from triton_kernels.interpreted_gluon import number

from condense.ops.hopper import attend_forward, pipeline, recall_attend


class Descriptor:
    """A TMA descriptor, whose fields `condense.ops.triton.launch.descriptor` sets."""

    @property
    def block_type(self):
        return SimpleNamespace(nbytes=2 * int(np.prod(self.block_shape)))


class Barrier:
    """An mbarrier: its phase ends when all have arrived and all bytes that are expected have come."""

    def __init__(self):
        self.count, self.parity, self.pending, self.bytes = 0, 0, 0, 0

    def arrive(self, warps, arrivals, nbytes):
        assert self.count > 0, "initialised"
        self.pending, self.bytes = self.pending - arrivals, self.bytes + nbytes
        assert self.pending >= 0, "as many arrive as the barrier counts"
        if self.pending == 0 and self.bytes == 0:
            self.parity, self.pending, warps.waiting = 1 - self.parity, self.count, 0
            warps.turn.notify_all()


class Warps:
    """Threads of one program, of which the one that holds ``turn`` runs, until it waits."""

    def __init__(self):
        self.turn, self.alive, self.waiting, self.errors = threading.Condition(), 0, 0, []

    def run(self, partitions):
        def one(function, args):
            with self.turn:
                try:
                    function(*args)
                except BaseException as error:  # raised again below
                    self.errors.append(error)
                self.alive, self.waiting = self.alive - 1, 0
                self.turn.notify_all()

        threads = [threading.Thread(target=one, args=partition) for partition in partitions]
        self.alive, self.waiting = len(threads), 0
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def wait(self, barrier, phase):
        while barrier.parity == number(phase):
            self.waiting += 1
            if self.errors or self.waiting == self.alive:
                raise RuntimeError("all warps wait")
            self.turn.wait()


def _language(warps):
    gl = interpreted_gluon.language()
    allocate = interpreted_gluon.allocate_shared_memory

    def allocate_shared_memory(dtype, shape, layout, value=None):
        if dtype != tl.int64:
            return allocate(dtype, shape, layout, value)
        barriers = [Barrier() for _ in range(number(shape[0]))]
        return SimpleNamespace(index=lambda i: barriers[number(i)])

    # numbers as they are, because the interpreter cannot add a constant and a tensor
    gl.constexpr = type("constexpr", (int,), {"value": property(int)})
    for name in ("DotOperandLayout", "DistributedLinearLayout"):
        setattr(gl, name, lambda *args, **given: None)
    gl.NVMMASharedLayout = type("NVMMASharedLayout", (), {
        "__init__": lambda self, **given: None, "get_default_for": staticmethod(lambda shape, dtype: None)
    })  # fmt: skip
    gl.allocate_shared_memory, gl.expand_dims = allocate_shared_memory, lambda x, axis: tl.expand_dims(x, axis)
    gl.convert_layout = lambda x, layout, assert_trivial=False: x
    gl.warp_specialize = lambda partitions, num_warps, registers: warps.run(partitions)
    return gl


def _hopper(warps):
    def init(barrier, count):
        barrier.count = barrier.pending = number(count)

    def copy(source, at, barrier, place):
        kind = np.float16 if source.base.dtype == torch.float16 else np.uint16
        raw, at = source.base.view(torch.int16).numpy().view(kind), [number(x) for x in at]
        block = np.zeros(source.block_shape, raw.dtype)
        found = raw[tuple(slice(x, x + n) for x, n in zip(at, source.block_shape, strict=True))]
        block[tuple(slice(n) for n in found.shape)] = found  # 0 past the ends
        place.raw[...] = block.reshape(place.raw.shape)
        barrier.arrive(warps, 0, -block.nbytes)

    mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: None, init=init, wait=warps.wait,
        arrive=lambda barrier: barrier.arrive(warps, 1, 0),
        expect=lambda barrier, nbytes: barrier.arrive(warps, 1, number(nbytes)),
    )  # fmt: skip
    tma = SimpleNamespace(async_copy_global_to_shared=copy)
    return SimpleNamespace(**interpreted_gluon.PRODUCTS, mbarrier=mbarrier, tma=tma)


def interpreted(monkeypatch):
    """The launches of `attend_forward` and of `recall_attend`, whose kernels the interpreter runs."""
    warps, found = Warps(), {}
    gl, hopper = _language(warps), _hopper(warps)
    for module in (pipeline, attend_forward, recall_attend):
        with monkeypatch.context() as patched:
            for name, made in found.items():
                patched.setitem(sys.modules, name, made)
                patched.setattr(f"condense.ops.hopper.{name.rpartition('.')[2]}", made)
            found[module.__name__] = interpreted_gluon.interpreted(module, monkeypatch, gl, hopper, Descriptor)
    return found[attend_forward.__name__].launch, found[recall_attend.__name__].launch_opened
