"""Gluon's language in Triton's interpreter: layouts say nothing there, shared memory is a box, products are at once."""

import importlib.util
import inspect
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import triton.experimental
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, TensorHandle
from triton_kernels.ptx import wide


class Interpreted(InterpretedFunction):
    """A function whose annotations ``gl.constexpr`` the interpreter knows."""

    def rewrite(self):
        found = super().rewrite()
        found.__annotations__ = {name: kind.replace("gl.", "tl.") for name, kind in found.__annotations__.items()}
        return found


def jit(fn=None, **options):
    return Interpreted(fn) if fn else partial(jit, **options)


def number(x):
    return int(x.handle.data.item()) if isinstance(x, tl.tensor) else int(x)


def tensor(data, dtype):
    return tl.tensor(TensorHandle(np.ascontiguousarray(data), dtype), tl.block_type(dtype, list(data.shape)))


class Shared:
    """Shared memory of any shape, or a view of it; what nobody has written is not a number."""

    def __init__(self, dtype, raw):
        self.dtype, self.raw, self.shape = dtype, raw, raw.shape

    def _view(self, raw):
        assert np.shares_memory(raw, self.raw)
        return Shared(self.dtype, raw)

    def index(self, i):
        return self._view(self.raw[number(i)])

    def slice(self, start, length, dim):
        return self._view(self.raw[(slice(None),) * dim + (slice(number(start), number(start) + number(length)),)])

    def reshape(self, shape):
        return self._view(self.raw.reshape([number(n) for n in shape]))

    def permute(self, order):
        return self._view(self.raw.transpose(order))

    def _reinterpret(self, dtype, shape, layout):
        return Shared(dtype, self.raw)

    def store(self, x):
        # words of two numbers come without a conversion
        self.raw[...] = np.ascontiguousarray(x.handle.data).view(self.raw.dtype).reshape(self.shape)

    def load(self, layout):
        return tensor(self.raw, self.dtype)

    @property
    def numbers(self):
        return wide(SimpleNamespace(data=np.ascontiguousarray(self.raw), dtype=self.dtype)).astype(np.float64)


def allocate_shared_memory(dtype, shape, layout, value=None):
    empty = {tl.float16: (np.nan, np.float16)}.get(dtype, (0x7FC0, np.uint16))
    return Shared(dtype, np.full([number(n) for n in shape], *empty) if value is None else value.handle.data.copy())


def warpgroup_mma(a, b, acc, *, use_acc=True, is_async=False):
    a = a.numbers if isinstance(a, Shared) else wide(a.handle).astype(np.float64)
    found = a @ b.numbers + (acc.handle.data if use_acc else 0)
    return tensor(found.astype(np.float32), tl.float32)


# of the module of what Hopper alone has
PRODUCTS = {
    "warpgroup_mma": warpgroup_mma,
    "warpgroup_mma_wait": lambda count, deps: deps[0] if len(deps) == 1 else tuple(deps),
    "fence_async_shared": lambda: None,
}


def log2(x):
    with np.errstate(divide="ignore"):  # a GPU gives minus infinity for 0, which is what is meant
        return tl.log2(x)


def language():
    """What stands for the module ``gl``."""
    gl = SimpleNamespace(**{
        name: (lambda *args, f=name, **given: getattr(tl, f)(*args, **given))
        for name in ("load", "store", "where", "maximum", "minimum", "max", "sum", "exp2", "reshape", "permute",
                     "join", "program_id", "num_programs", "cdiv", "static_range")
    })  # fmt: skip
    for name in ("constexpr", "int32", "int64", "float32", "bfloat16", "pointer_type"):
        setattr(gl, name, getattr(tl, name))
    for name in ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "NVMMASharedLayout"):
        setattr(gl, name, lambda *args, **given: None)
    gl.num_warps, gl.shared_memory_descriptor = lambda: 8, Shared
    gl.arange = lambda start, end, layout: tl.arange(start, end)
    gl.zeros = lambda shape, dtype, layout: tl.zeros(shape, dtype)
    gl.full = lambda shape, value, dtype, layout: tl.full(shape, value, dtype)
    gl.convert_layout = lambda x, layout: x
    gl.inline_asm_elementwise = lambda *args, is_pure, pack: tl.inline_asm_elementwise(*args, is_pure, pack)
    gl.log2 = log2
    gl.allocate_shared_memory = allocate_shared_memory
    return gl


def interpreted(module, monkeypatch, gl=None, hopper=None, descriptor=None):
    """The module of a kernel in Gluon as one that the interpreter runs. gl, hopper: stand for the language's modules;
    descriptor: for the class of TMA descriptors.
    """
    hopper = hopper or SimpleNamespace(**PRODUCTS)
    name, gl = "triton.experimental.gluon", gl or language()
    modules = {name: {"jit": jit, "language": gl}, f"{name}.language": vars(gl)}
    modules |= {f"{name}.language.nvidia": {"hopper": hopper}, f"{name}.language.nvidia.hopper": vars(hopper)}
    modules |= {f"{name}.nvidia": {}, f"{name}.nvidia.hopper": {"TensorDescriptor": descriptor}}
    with monkeypatch.context() as patched:
        for key, content in modules.items():
            stand_in = ModuleType(key)
            vars(stand_in).update(content)
            patched.setitem(sys.modules, key, stand_in)
            if key == name:
                patched.setattr(triton.experimental, "gluon", stand_in)
        spec = importlib.util.spec_from_file_location(f"interpreted_{module.__name__}", inspect.getsourcefile(module))
        found = importlib.util.module_from_spec(spec)
        patched.setitem(sys.modules, spec.name, found)
        found.tl = tl  # the interpreter looks for it in every module
        spec.loader.exec_module(found)
    monkeypatch.setattr(tl.block_type, "layout", None, raising=False)
    return found
