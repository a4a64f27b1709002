"""Triton's interpreter, which checks addresses (`bounds`), made four times as fast; `poison` and `lanes`."""

import dataclasses
import math
import os

import numpy as np
import pytest


@pytest.fixture
def poison(monkeypatch):
    """Fills scratch memory that a module's function returns with NaN; the last one stands in the list that it gives."""

    def poison(module, name):
        original, last = getattr(module, name), []

        def poisoned(*args):
            last[:] = [original(*args)]
            for x in last[0]:
                x.fill_(math.nan if x.is_floating_point() else 77_777)
            return last[0]

        monkeypatch.setattr(module, name, poisoned)
        return last

    return poison


@pytest.fixture
def hopper(monkeypatch):
    """Without a GPU, steps of Recall are those of a Hopper GPU with one multiprocessor. Gives the set of names of
    instructions that ran, None with a GPU.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield None
        return
    import torch
    from triton_kernels import interpreted_gluon, ptx

    from condense.ops.triton import host, latent_groups_kernels, launch, recall_step_plan, recall_step_tiles

    ran, folder = ptx.install(monkeypatch), "condense.ops.triton"
    for module in ("recall_close_kernels", "recall_step_kernels", "recall_step_score_kernels", "step_kernels"):
        for name in ("gdc_wait", "gdc_launch_dependents"):
            monkeypatch.setattr(f"{folder}.{module}.{name}", lambda: None, raising=False)
    places = (recall_step_plan, "num_splits"), (recall_step_tiles, "num_splits"), (recall_step_tiles, "_table")
    for module, name in places:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda _, *a, f=original: f(torch.device("cuda"), *a))
    for module in (recall_step_plan, recall_step_tiles):
        monkeypatch.setattr(module, "is_early", lambda device: True)
        monkeypatch.setattr(module, "gpu_of", lambda device: host.Gpu((9, 0), 1))
    opened = interpreted_gluon.interpreted(latent_groups_kernels, monkeypatch)
    monkeypatch.setattr(f"{folder}.recall_step.OPENED", launch.Launcher(opened.latent_groups_kernel))
    for known in (recall_step_plan.plan_of, recall_step_plan.close_of):
        known.cache_clear()
    yield ran
    for known in (recall_step_plan.plan_of, recall_step_plan.close_of):
        known.cache_clear()


@pytest.fixture
def lanes(hopper):
    """Steps of Recall as with `hopper`, which read by lanes."""
    yield
    assert hopper is None or {"mma", "movmatrix", "shfl"} <= hopper


if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.language import core
    from triton.language.core import block_type, constexpr, tensor
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction, interpreter_builder
    from triton_kernels import bounds

    bounds.install()
    called, first_call = set(), InterpretedFunction.__call__

    def call(function, *args, **kwargs):
        """Call a device function. Triton patches `triton.language` before each call, though the launch has done so."""
        if function.fn in called:
            return function.rewrite()(*args, **kwargs)
        called.add(function.fn)
        return first_call(function, *args, **kwargs)

    InterpretedFunction.__call__ = call

    def once(function, key):
        """The function with its results remembered: types, which are made anew for every operation of a kernel."""
        known = {}

        def remember(*arguments):
            name = key(*arguments)
            if name not in known:
                known[name] = function(*arguments)
            return known[name]

        return remember

    builder = type(interpreter_builder)
    interpreter._get_np_dtype = once(interpreter._get_np_dtype, lambda kind: kind.name)
    block_type.with_element_ty = once(block_type.with_element_ty, lambda block, kind: (block.name, kind.name))
    builder.get_block_ty = once(builder.get_block_ty, lambda self, kind, shape: (kind.name, *map(int, shape)))
    shapes, first_of_its_type = {}, tensor.__init__

    def make(self, handle, type):
        """A tensor, with the shape of the last one of its type, rather than one computed anew."""
        if type.name in shapes:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shapes[type.name]
        else:
            first_of_its_type(self, handle, type)
            shapes[type.name] = self.shape, self.numel

    tensor.__init__ = make
    sizes, of_its_size, unwrap_any = {}, block_type.__init__, core._unwrap_if_constexpr

    def make_type(self, kind, shape):
        """Set the fields of a type: those of an earlier one of the same shape, if there was any."""
        key = kind.name, *(getattr(n, "value", n) for n in shape)
        if key not in sizes:
            of_its_size(self, kind, shape)
            sizes[key] = vars(self)
        vars(self).update(sizes[key])

    plain = {int, bool, float, str, type(None), tensor, core.dtype, block_type, core.pointer_type}

    def unwrap(x):
        """The value of a constant; most arguments are tensors or numbers, which are returned at once."""
        kind = type(x)
        return x if kind in plain else x.value if kind is constexpr else unwrap_any(x)

    block_type.__init__, core._unwrap_if_constexpr = make_type, unwrap
    alike, find_alike = {}, TritonSemantic.binary_op_type_checking_impl

    def in_place_of(found, x):
        """The operand x as ``found``, which an earlier operand of its type, or the same number, became; NumPy repeats
        its numbers.
        """
        if type(x) is not tensor:
            return found
        return x if x.type.name == found.type.name else tensor(x.handle, found.type)

    def make_alike(self, *given, **named):
        """Bring two operands to one shape and type; keep results by types and numbers, if no tensor is converted."""
        key = *[x.type.name if type(x) is tensor else (type(x), x) for x in given], *named.items()
        if (found := alike.get(key)) is not None:
            return [in_place_of(*x) for x in zip(found, given, strict=False)]
        found = find_alike(self, *given, **named)
        if all(not isinstance(x, tensor) or x.dtype == y.dtype for x, y in zip(given, found, strict=False)):
            alike[key] = found
        return found

    TritonSemantic.binary_op_type_checking_impl = make_alike

    semantic = {"_semantic": TritonSemantic(interpreter_builder)}

    def patch(module, name, function, builder, scope):
        """A function of the language, without checks that it is called in a kernel."""
        plain = getattr(function, "__wrapped__", function)
        scope.set_attr(module, name, lambda *args, **options: plain(*args, **options | semantic))

    interpreter._patch_attr = patch
    # without `debug` every integer sum is computed once more, in 64 bits, and the comparison thrown away
    assert not interpreter_builder.options.debug
    interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
    # kernels read scratch memory that nobody has written and mask it afterwards: by chance it holds two infinities
    binary_op = builder.binary_op

    def quiet(self, one, *others):
        if one.data.dtype.kind != "f":
            return binary_op(self, one, *others)
        with np.errstate(invalid="ignore"):
            return binary_op(self, one, *others)

    builder.binary_op = quiet
