"""Starting a kernel again: the compiled one that Triton found for arguments of this kind, and no other."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.driver import driver

import condense
from condense.methods import step_settings
from condense.ops.step import StateSizes
from condense.ops.triton import launch as triton_launch
from condense.ops.triton import recall_step_plan, recall_step_tiles, step_plan
from condense.ops.triton.device.address import PageForm
from condense.ops.triton.host import Gpu
from condense.ops.triton.launch import Launcher, Prepared

GRID, CONSTANTS, OPTIONS = (4, 2, 1), ("weighted", True), {"num_warps": 4}


class Kernel:
    """Stands in for a jitted kernel: what it makes is the number of its compilation."""

    def __init__(self, is_interpreted=False):
        self.is_interpreted, self.calls, self.again = is_interpreted, [], []

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.calls.append((grid, arguments, options))
            return None if self.is_interpreted else Compiled(self, len(self.calls))

        return run


class Compiled:
    """A kernel of Triton 3.6 or 3.7: started through its launcher by ``[grid]``, or by ``run`` without it."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel, number):
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.again.append((self.number, grid, arguments))

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        assert (stream, function, metadata) == ("stream", "function", "metadata")
        assert launch_metadata is enter is leave is None
        self.kernel.again.append((self.number, (x, y, z), arguments))


@pytest.fixture
def tensors():
    return torch.zeros(8), torch.zeros(3, dtype=torch.bfloat16)


def test_the_same_again(tensors):
    kernel, others = Kernel(), tuple(x.clone() for x in tensors)
    start = Launcher(kernel)
    start(GRID, tensors, (7, 0.5), CONSTANTS, OPTIONS)
    start((9, 2, 1), others, (7, 0.5), CONSTANTS, OPTIONS)
    (grid, arguments, options), ((number, grid_again, arguments_again),) = *kernel.calls, kernel.again
    assert (grid, options, number, grid_again) == (GRID, OPTIONS, 1, (9, 2, 1))
    for got, handed in ((arguments, tensors), (arguments_again, others)):
        assert all(x is y for x, y in zip(got, handed, strict=False))
        assert got[2:] == (7, 0.5, *CONSTANTS)


def test_whatever_triton_tells_apart_is_asked_for(tensors):
    kernel, (x, y), meta = Kernel(), tensors, tuple(z.to("meta") for z in tensors)
    start = Launcher(kernel)
    kinds = [(tensors, numbers, CONSTANTS, OPTIONS) for numbers in ((7, 16), (1, 16), (7, 17))]
    kinds += [(given, (7, 16), CONSTANTS, OPTIONS) for given in ((x[1:], y), (x, y.to(torch.float16)), meta)]
    kinds += [(tensors, (7, 16), ("mean", True), OPTIONS), (tensors, (7, 16), CONSTANTS, {"num_warps": 8})]
    for _ in range(2):
        for kind in kinds:
            start(GRID, *kind)
    assert len(kernel.calls) == len(kinds)
    assert [number for number, *_ in kernel.again] == list(range(1, len(kinds) + 1))


def test_a_prepared_kernel_gets_addresses(tensors, monkeypatch):
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda device: "stream"))
    kernel, others, plan = Kernel(), tuple(x.clone() for x in tensors), (GRID, (0.5,), CONSTANTS, OPTIONS)
    launcher = Launcher(kernel)
    start = Prepared(launcher, plan, (7,))
    start((*tensors, None))
    start((*others, None))
    assert kernel.calls == [(GRID, (*tensors, None, 7, 0.5, *CONSTANTS), OPTIONS)]
    assert kernel.again == [(1, GRID, (*(x.data_ptr() for x in others), None, 7, 0.5, *CONSTANTS))]
    Prepared(launcher, plan, (7,))((*tensors, None))
    assert len(kernel.calls) == 1


def test_an_interpreted_kernel_is_interpreted_every_time(tensors):
    kernel = Kernel(is_interpreted=True)
    start = Launcher(kernel)
    prepared = Prepared(start, (GRID, (7,), CONSTANTS, OPTIONS), ())
    for _ in range(3):
        start(GRID, tensors, (7,), CONSTANTS, OPTIONS)
        prepared(tensors)
    assert len(kernel.calls) == 6


def test_what_is_remembered_has_an_end(tensors, monkeypatch):
    monkeypatch.setattr(triton_launch, "_MOST_KNOWN", 5)
    kernel = Kernel()
    start = Launcher(kernel)
    for number in range(12):
        start(GRID, tensors, (number,), CONSTANTS, OPTIONS)
    assert len(start._compiled) <= 5
    start(GRID, tensors, (11,), CONSTANTS, OPTIONS)
    assert len(kernel.again) == 1


@pytest.mark.parametrize("text", ["recall-device", "recall:store_bits=8", "cca:summary=streaming"])
def test_steps_over_pages_are_compiled_for_few_numbers_of_requests(text, monkeypatch):
    """While prompts are read the requests that answer are ever others: each new kernel would hold up all of them."""
    for plans in (recall_step_plan, recall_step_tiles, step_plan):
        monkeypatch.setattr(plans, "gpu_of", lambda device: Gpu((9, 0), 132))
    settings = dataclasses.replace(step_settings(condense.Method.parse(text)), summary_delay=0)
    form, device, compiled = PageForm(8, 1 << 20, 1 << 17, 1 << 14, 1024), torch.device("cuda:0"), set()
    plan_of = step_plan.launch_of if settings.choice is None else recall_step_plan.plan_of
    for rows in range(1, 257):
        sizes = StateSizes(rows, 8, (128, 128), 8192, 1040)
        given = sizes, 0, (0.1, 0.0), settings.number, False, 0, form, form, None, 1 << 19
        launches = filter(None, plan_of.__wrapped__(step_plan.StepShape(device, torch.bfloat16, 32, *given))[1:])
        for i, (_, numbers, constants, options) in enumerate(launches):
            # Triton compiles anew for the number 1 and for multiples of 16
            kinds = tuple([isinstance(x, int) and (x == 1, x % 16 == 0) for x in numbers])
            compiled.add((i, kinds, constants, tuple(options.items())))
    assert len(compiled) < 20
