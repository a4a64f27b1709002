"""Assembly of kernels, and bfloat16, by NumPy: so Triton's interpreter runs what else only a GPU can.

A register is an array with a number for each thread; a warp is 32 threads. In matrices, thread t of a warp has row
``t // 4`` and columns from ``t % 4`` on.
"""

import ctypes
import re

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

LANE = np.arange(32)
ROW, COLUMN = LANE // 4, LANE % 4
BITS = 0xFFFFFFFF
# as the interpreter holds them
NUMPY = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}


class Assembly:
    """What a piece of assembly returns. pack: elements of a thread. ran: gets the names of instructions."""

    def __init__(self, ran, asm, constraints, values, types, _is_pure, pack):
        num_outs, self.shape = constraints.count("="), values[0].data.shape if values else (32,)
        inputs = [x for value in values for x in registers_of(value.data, pack)]
        self.registers = {f"${num_outs + i}": x for i, x in enumerate(inputs)}
        for line in re.sub(r"^\s*\{|\}\s*$|//.*", "", asm).split(";"):
            name, _, rest = line.strip().partition(" ")
            if name and name != ".reg" and not name.startswith(("@", "griddepcontrol")):
                to, *given = (re.findall(r"[^\s{},\[\]]+", x) for x in re.findall(r"\{[^}]*\}|[^,\s][^,]*", rest))
                ran.add(name.partition(".")[0])
                results = operation(name)(*([self.value(x) for x in names] for names in given))
                self.registers |= zip(to, results, strict=True)
        self.types = [getattr(kind, "scalar", kind) for kind in types]

    def value(self, name):
        register, _, offset = name.partition("+")
        if register in self.registers:
            return self.registers[register] + np.uint64(offset) if offset else self.registers[register]
        threads = len(next(iter(self.registers.values()), LANE))
        if name == "%laneid":
            return np.tile(LANE, threads // 32).astype(np.uint32)
        return np.full(threads, int(re.sub("^0[fx]", "0x", name), 0) & BITS, np.uint32)

    def get_result(self, i):
        kind = self.types[i]
        x = self.registers.get(f"${i}", np.zeros(32, np.uint32))
        x = np.ascontiguousarray(x).view(f"uint{kind.primitive_bitwidth}") if kind.primitive_bitwidth < 32 else x
        x = x[::2] if len(x) > np.prod(self.shape) else x
        return TensorHandle(x.view(NUMPY.get(kind.name, kind.name)).reshape(self.shape), kind)


def registers_of(data, pack):
    """An argument in registers: narrow numbers share one, wide ones have one for each element of a thread."""
    x = np.ascontiguousarray(data).reshape(-1)
    if x.itemsize < 4 and pack * x.itemsize == 4:
        return [x.view(np.uint32)]
    wide = x.view(np.uint64) if x.itemsize == 8 else x.view(f"uint{8 * x.itemsize}").astype(np.uint32)
    return [wide[i::pack] for i in range(pack)]


def halves(x):
    return np.stack([x & 0xFFFF, x >> 16], -1).astype(np.uint16)


def bf16(x):
    return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def to_bf16(x):
    bits = x.astype(np.float32).view(np.uint32)
    return np.where(np.isnan(x), 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint32)


def pairs(f):

    def of_pairs(*x):
        out = to_bf16(f(*(bf16(halves(of[0])) for of in x)))
        return [out[..., 0] | out[..., 1] << 16]

    return of_pairs


def floats(f):
    return lambda *x: [f(*(of[0].view(np.float32).astype(np.float64) for of in x)).astype(np.float32).view(np.uint32)]


def lop3(a, b, c, table):
    """Any function of three bits, given by its table."""
    out = np.zeros_like(a[0])
    for i in range(8):
        if int(table[0][0]) >> i & 1:
            out |= np.bitwise_and.reduce([x[0] if i & bit else ~x[0] for x, bit in ((a, 4), (b, 2), (c, 1))])
    return [out]


def prmt(a, b, choice):
    bytes = np.stack([x[0] >> 8 * i & 0xFF for x in (a, b) for i in range(4)], -1)
    places = int(choice[0][0])
    return [sum(bytes[:, places >> 4 * i & 7] << 8 * i for i in range(4)).astype(np.uint32)]


def warps(x):
    return x.reshape(-1, 32)


def product(unpacked, depth):
    """A matrix instruction of 16 rows and 8 columns. unpacked: gives the numbers in a register. depth: of the sums."""

    def run(a, b, c):
        per = unpacked(a[0]).shape[-1]
        A, B = np.zeros((len(a[0]) // 32, 16, depth)), np.zeros((len(a[0]) // 32, depth, 8))
        for j in range(per):
            for i, x in enumerate(a):
                A[:, ROW + 8 * (i % 2), COLUMN * per + j + i // 2 * 4 * per] = warps(unpacked(x)[..., j])
            for i, x in enumerate(b):
                B[:, COLUMN * per + j + i * 4 * per, ROW] = warps(unpacked(x)[..., j])
        kind = np.int32 if unpacked in (bytes_of, bits_of) else np.float32
        sums = ((A @ B)[:, ROW + 8 * (i // 2), 2 * COLUMN + i % 2].reshape(-1) for i in range(4))
        return [(x + was.view(kind)).astype(kind).view(np.uint32) for x, was in zip(sums, c, strict=True)]

    return run


def bytes_of(x):
    return np.ascontiguousarray(x).view(np.int8).reshape(*x.shape, 4).astype(np.float64)


def bits_of(x):
    return (x[..., None] >> np.arange(32, dtype=np.uint32) & 1).astype(np.float64)


def transposed(a):
    """8 times 8 numbers of 16 bits, of which each thread has two of a row, transposed."""
    x = warps(a[0])
    matrix = halves(x).reshape(-1, 8, 8).transpose(0, 2, 1)
    return [np.ascontiguousarray(matrix.reshape(-1, 32, 2)).view(np.uint32).reshape(-1)]


def loaded(words):
    """Words of 32 bits that lie side by side, from addresses."""
    at_word = [4 * i for i in range(words)]
    return lambda at: [
        np.array([ctypes.c_uint32.from_address(int(x) + i).value for x in at[0]], np.uint32) for i in at_word
    ]


def from_lanes(a, lane, bounds, _):
    """Numbers of a lane of each part of a warp: the bits of a lane's number that name its part are its own."""
    part = int(bounds[0][0]) >> 8
    return [warps(a[0])[:, LANE & part | int(lane[0][0]) & ~part].reshape(-1)]


def same(a, b):
    assert np.array_equal(a[0], b[0])
    return a


def fp16(x):
    return halves(x).view(np.float16).astype(np.float64)


OPERATIONS = {
    "mov.b64": lambda a: [(a[0] & BITS).astype(np.uint32), (a[0] >> np.uint64(32)).astype(np.uint32)],
    "mov.": lambda a: a,
    "shr": lambda a, n: [a[0] >> n[0]],
    "shl": lambda a, n: [a[0] << n[0]],
    "and": lambda a, b: [a[0] & b[0]],
    "add.u32": lambda a, b: [a[0] + b[0]],
    "lop3": lop3,
    "prmt": prmt,
    "mad.lo.s32": lambda a, b, c: [a[0] * b[0] + c[0]],
    "add.rn.bf16x2": pairs(lambda a, b: a + b),
    "fma.rn.f32": floats(lambda a, b, c: a * b + c),
    "mul.rn.f32": floats(lambda a, b: a * b),
    "cvt.rn.f32.s32": lambda a: [a[0].view(np.int32).astype(np.float32).view(np.uint32)],
    "cvt.rn.bf16x2.f32": lambda a, b: [to_bf16(b[0].view(np.float32)) | to_bf16(a[0].view(np.float32)) << 16],
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16": product(lambda x: bf16(halves(x)), 16),
    "mma.sync.aligned.m16n8k16.row.col.f32.f16": product(fp16, 16),
    "mma.sync.aligned.m16n8k32": product(bytes_of, 32),
    "mma.sync.aligned.m16n8k128": product(bits_of, 128),
    "movmatrix": transposed,
    "shfl.sync.idx": from_lanes,
    "shfl.sync.bfly": lambda a, n, *_: [warps(a[0])[:, LANE ^ int(n[0][0])].reshape(-1)],
    "setp.ne": same,
    "ld.global.b32": loaded(1),
    "ld.global.v4.b32": loaded(4),
}


def operation(name):
    return next(f for start, f in OPERATIONS.items() if name.startswith(start))


def is_bf16(x):
    return x.dtype.scalar == tl.bfloat16


def wide(x):
    return (x.data.astype(np.uint32) << 16).view(np.float32) if is_bf16(x) else x.data


def install(monkeypatch):
    """Let the interpreter run assembly, and round to bfloat16; a set that gets the names of instructions that ran."""
    ran = set()
    dot, binary, cast = (getattr(InterpreterBuilder, name) for name in ("create_dot", "binary_op", "cast_impl"))

    def create_dot(self, a, b, *options):
        a, b = (TensorHandle(wide(x), tl.float32) if is_bf16(x) else x for x in (a, b))
        return dot(self, a, b, *options)

    def binary_op(self, a, b, operation):
        if not is_bf16(a):
            return binary(self, a, b, operation)
        out = operation(wide(a), wide(b))
        is_bool = out.dtype == bool
        return TensorHandle(out if is_bool else to_bf16(out).astype(np.uint16), tl.int1 if is_bool else tl.bfloat16)

    def cast_impl(self, x, kind):
        if kind.scalar == tl.bfloat16 and x.dtype.scalar == tl.float32:
            return TensorHandle(to_bf16(x.data).astype(np.uint16), tl.bfloat16)
        return cast(self, x, kind)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", lambda self, *given: Assembly(ran, *given))
    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "binary_op", binary_op)
    return ran
