"""A numba type of 16 float32 lanes with loads, stores, arithmetic, and exp, tanh and GELU, for kernels written in
Python.

LLVM splits a vector of 16 into vectors that the CPU has. No lane depends on that split, so every CPU computes the same
bits. Addresses are int64. The first functions are for emitters of LLVM code, the intrinsics after them for kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

from ondevice.engines.simd.kernels.contract.instruction_sets import LANES, instruction_set
from ondevice.engines.simd.kernels.isa.jit import emits
from ondevice.native import library
from ondevice.native.functions import kernel
from ondevice.native.sets import SETS

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, F16 = ir.FloatType(), ir.HalfType()
POINTER = ir.PointerType()
VF32, VI32 = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


class Floats16Type(types.Type):
    """The numba type of a vector of 16 float32."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


floats16 = Floats16Type()


@register_model(Floats16Type)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, VF32)  # type: ignore[no-untyped-call]


def has_half() -> bool:
    """Whether the instruction set converts fp16 to fp32 in one instruction."""
    return instruction_set().by_lane or "f16c" in SETS[library.choice().set].needed


def splat(builder: Any, value: Any, lanes: int) -> Any:
    """A vector of `lanes` copies of a scalar."""
    kind = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
    zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)


def constant(value: float, kind: Any) -> Any:
    """A constant of vector type `kind` with equal lanes."""
    return ir.Constant(kind, [value] * kind.count)


def call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """Call LLVM's intrinsic `name` with a result of type `result`."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    function = get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]
    return builder.call(function, args)


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return call(builder, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


def read(builder: Any, pointer: Any, kind: Any, offset: int = 0, align: int = 4) -> Any:
    """Load a value of type `kind` at `offset` bytes from a pointer."""
    return builder.load(builder.gep(pointer, [I64(offset)], source_etype=I8), typ=kind, align=align)


def widen_half(builder: Any, bits: Any) -> Any:
    """float32 <n x float> of fp16 bits <n x i16>."""
    lanes = bits.type.count
    kind = ir.VectorType(F32, lanes)
    if has_half():
        return builder.fpext(builder.bitcast(bits, ir.VectorType(F16, lanes)), kind)
    # without F16C, LLVM calls a function for each lane that does not exist at run time
    wide = builder.zext(bits, ir.VectorType(I32, lanes))
    sign = builder.shl(builder.and_(wide, constant(0x8000, wide.type)), constant(16, wide.type))
    magnitude = builder.shl(builder.and_(wide, constant(0x7FFF, wide.type)), constant(13, wide.type))
    scaled = builder.fmul(builder.bitcast(magnitude, kind), constant(2.0**112, kind))
    # scaled, infinity would be 65536 and a NaN a number above that
    is_number = builder.icmp_unsigned("<", magnitude, constant(0x7C00 << 13, wide.type))
    no_number = builder.or_(magnitude, constant(0x7F800000, wide.type))
    value = builder.select(is_number, builder.bitcast(scaled, wide.type), no_number)
    return builder.bitcast(builder.or_(value, sign), kind)


def narrow_half(builder: Any, value: Any) -> Any:
    """fp16 bits <n x i16> of float32 <n x float>, rounded to nearest even, overflow to infinity."""
    lanes = value.type.count
    bits = ir.VectorType(I16, lanes)
    if has_half():
        return builder.bitcast(builder.fptrunc(value, ir.VectorType(F16, lanes)), bits)
    wide = ir.VectorType(I32, lanes)
    raw = builder.bitcast(value, wide)
    sign = builder.and_(builder.lshr(raw, constant(16, wide)), constant(0x8000, wide))
    size = builder.and_(raw, constant(0x7FFFFFFF, wide))
    # a number below 2**-14 is a multiple of 2**-24 in fp16: adding 0.5 rounds it to that
    tiny = builder.bitcast(builder.fadd(builder.bitcast(size, value.type), constant(0.5, value.type)), wide)
    tiny = builder.sub(tiny, constant(0x3F000000, wide))
    odd = builder.and_(builder.lshr(size, constant(13, wide)), constant(1, wide))
    rounded = builder.lshr(builder.add(builder.add(size, constant(0xFFF - (112 << 23), wide)), odd), constant(13, wide))
    is_tiny = builder.icmp_unsigned("<", size, constant(0x38800000, wide))
    is_huge = builder.icmp_unsigned(">=", size, constant(0x47800000, wide))
    is_nan = builder.icmp_unsigned(">", size, constant(0x7F800000, wide))
    half = builder.select(is_tiny, tiny, rounded)
    half = builder.select(is_huge, constant(0x7C00, wide), half)
    half = builder.select(is_nan, constant(0x7E00, wide), half)
    return builder.trunc(builder.or_(half, sign), bits)


def pointer_to(builder: Any, address: Any) -> Any:
    """The pointer of an address."""
    return builder.inttoptr(address, POINTER)


def element(builder: Any, base: Any, index: Any, size: Any) -> Any:
    """The pointer to element `index` of an array at address `base`; an element has `size` bytes, an int or a value."""
    size = I64(size) if isinstance(size, int) else size
    return pointer_to(builder, builder.add(base, builder.mul(index, size)))


L1, L2, L1_ONLY = 3, 2, 0
"""LLVM's numbers for the cache level that a prefetch fills. A line of L1_ONLY does not go to a lower level afterwards
(prefetchnta)."""


def prefetch(builder: Any, pointer: Any, offset: int = 0, level: int = L1) -> None:
    """Prefetch the cache line at `offset` bytes from a pointer. The address need not be readable."""
    line = builder.gep(pointer, [I64(offset)], source_etype=I8)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), line, I32(0), I32(level), I32(1))


@emits(floats16, types.int64)
def load(builder: Any, address: Any) -> Any:
    """Load 16 float32."""
    return builder.load(pointer_to(builder, address), typ=VF32, align=4)


@emits(types.void, types.int64, floats16)
def store(builder: Any, address: Any, value: Any) -> None:
    """Store 16 float32."""
    builder.store(value, pointer_to(builder, address), align=4)


@emits(types.void, types.int64, floats16)
def store_half(builder: Any, address: Any, value: Any) -> None:
    """Round 16 float32 to fp16, ties to even, overflow to infinity, and store them."""
    builder.store(narrow_half(builder, value), pointer_to(builder, address), align=2)


@emits(floats16, types.int64)
def load_bfloat16(builder: Any, address: Any) -> Any:
    """Load 16 bfloat16 as float32. A bfloat16 is the upper half of a float32."""
    halves = builder.load(pointer_to(builder, address), typ=ir.VectorType(I16, LANES), align=2)
    return builder.bitcast(builder.shl(builder.zext(halves, VI32), constant(16, VI32)), VF32)


@emits(floats16, types.int64)
def load_int8(builder: Any, address: Any) -> Any:
    """Load 16 codes of 8 bits, 0..255, as float32."""
    codes = builder.load(pointer_to(builder, address), typ=ir.VectorType(I8, LANES), align=1)
    return builder.uitofp(codes, VF32)


def read_int4(builder: Any, address: Any) -> Any:
    """Load 16 codes of 4 bits, the low nibble of a byte first, as <16 x i8>."""
    pairs = builder.load(pointer_to(builder, address), typ=ir.VectorType(I8, LANES // 2), align=1)
    low = builder.and_(pairs, constant(15, pairs.type))
    high = builder.lshr(pairs, constant(4, pairs.type))
    order = [lane // 2 + (LANES // 2 if lane % 2 else 0) for lane in range(LANES)]
    return builder.shuffle_vector(low, high, ir.Constant(VI32, order))


@emits(floats16, types.int64)
def load_int4(builder: Any, address: Any) -> Any:
    """Load 16 codes of 4 bits, the low nibble of a byte first, as float32."""
    return builder.uitofp(read_int4(builder, address), VF32)


@emits(types.void, types.int64, floats16)
def store_rounded_int8(builder: Any, address: Any, value: Any) -> None:
    """Store 16 whole numbers, -128..127, as int8."""
    wide = builder.fptosi(value, VI32)
    builder.store(builder.trunc(wide, ir.VectorType(I8, LANES)), pointer_to(builder, address), align=1)


@emits(types.void, types.int64, types.int64, floats16)
def store_paired_int8(builder: Any, address: Any, stride: Any, value: Any) -> None:
    """Store 16 whole numbers, -128..127, as int8: 0..3 and 8..11 at an address, the others `stride` bytes after it."""
    numbers = builder.trunc(builder.fptosi(value, VI32), ir.VectorType(I8, LANES))
    words = builder.bitcast(numbers, ir.VectorType(I32, 4))
    for order in ([0, 2], [1, 3]):
        eight = builder.shuffle_vector(words, words, ir.Constant(ir.VectorType(I32, 2), order))
        builder.store(eight, pointer_to(builder, address), align=4)
        address = builder.add(address, stride)


@emits(floats16, types.float32)
def full(builder: Any, value: Any) -> Any:
    """Sixteen copies of a number."""
    return splat(builder, value, LANES)


@emits(floats16, floats16, floats16, floats16)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return fused(builder, a, b, c)


@emits(floats16, floats16)
def round_even(builder: Any, value: Any) -> Any:
    """Round numbers of magnitudes below 2**22 to the nearest whole ones, ties to even.

    Adding and subtracting 1.5 * 2**23 gives that on every CPU; the oldest ones have no rounding instruction.
    """
    shift = constant(12582912.0, VF32)
    return builder.fsub(builder.fadd(value, shift), shift)


@emits(floats16, floats16)
def power_of_two(builder: Any, exponent: Any) -> Any:
    """2**x for whole x in -126..127."""
    biased = builder.add(builder.fptosi(exponent, VI32), constant(127, VI32))
    return builder.bitcast(builder.shl(biased, constant(23, VI32)), VF32)


@emits(floats16, floats16)
def magnitude(builder: Any, value: Any) -> Any:
    """|x|."""
    return call(builder, "llvm.fabs.v16f32", VF32, value)


@emits(floats16, floats16, floats16)
def maximum(builder: Any, a: Any, b: Any) -> Any:
    """The larger of each pair; a if one is NaN. One instruction, unlike the maximum of IEEE 754."""
    return _larger(builder, a, b)


@emits(floats16, floats16, floats16)
def minimum(builder: Any, a: Any, b: Any) -> Any:
    """The smaller of each pair; a if one is NaN."""
    return builder.select(builder.fcmp_ordered("<", b, a), b, a)


@emits(floats16, floats16, types.int64, types.int64, types.float32)
def within(builder: Any, value: Any, first: Any, stop: Any, other: Any) -> Any:
    """A vector with lanes first..stop - 1 kept and all others set to `other`; `first` and `stop` fit into 32 bits."""
    lanes = ir.Constant(VI32, list(range(LANES)))
    low = builder.icmp_signed(">=", lanes, splat(builder, builder.trunc(first, I32), LANES))
    high = builder.icmp_signed("<", lanes, splat(builder, builder.trunc(stop, I32), LANES))
    return builder.select(builder.and_(low, high), value, splat(builder, other, LANES))


@emits(types.float32, floats16)
def sum_lanes(builder: Any, value: Any) -> Any:
    """The sum of the lanes, added pairwise: lanes i and i + 8, then i and i + 4, i + 2, i + 1."""
    return _fold(builder, value, builder.fadd)


@emits(types.float32, floats16)
def max_lanes(builder: Any, value: Any) -> Any:
    """The largest lane."""
    return _fold(builder, value, lambda a, b: _larger(builder, a, b))


@emits(types.int64, floats16, floats16)
def largest_bits(builder: Any, a: Any, b: Any) -> Any:
    """The bits of the largest |x| of 32 lanes, which are ordered as the numbers; over those of infinity for a NaN.

    No lane hides a NaN, as in a maximum of floats, and a maximum of integers takes less time.
    """
    low, high = (builder.and_(builder.bitcast(each, VI32), constant(0x7FFFFFFF, VI32)) for each in (a, b))
    return builder.zext(_fold(builder, _larger_int(builder, low, high), lambda *two: _larger_int(builder, *two)), I64)


@emits(types.int64, floats16)
def argmax_lanes(builder: Any, value: Any) -> Any:
    """The index of the largest lane, the lowest index of equal ones; 0..15 also where lanes are NaN.

    A NaN equals nothing: without the bit of the last lane, no lane might be found, and the index would be 16.
    """
    largest = splat(builder, _fold(builder, value, lambda a, b: _larger(builder, a, b)), LANES)
    equal = builder.bitcast(builder.fcmp_ordered("==", value, largest), I16)
    found = builder.or_(equal, I16(1 << (LANES - 1)))
    return builder.zext(call(builder, "llvm.cttz.i16", I16, found, ir.Constant(ir.IntType(1), 1)), I64)


@emits(floats16, floats16, floats16)
def where_at_least(builder: Any, value: Any, least: Any) -> Any:
    """Each lane if it is at least the same lane of `least`, else 0."""
    return builder.select(builder.fcmp_ordered(">=", value, least), value, constant(0.0, VF32))


@emits(types.int64, floats16, floats16)
def count_at_least(builder: Any, value: Any, least: Any) -> Any:
    """The number of lanes that are at least the same lane of `least`."""
    mask = builder.bitcast(builder.fcmp_ordered(">=", value, least), I16)
    return builder.zext(call(builder, "llvm.ctpop.i16", I16, mask), I64)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


def _larger_int(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed(">", b, a), b, a)


def _fold(builder: Any, value: Any, combine: Any) -> Any:
    """Combine the upper half of the lanes with the lower one until a single lane is left."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (ir.Constant(ir.VectorType(I32, width), list(range(i, i + width))) for i in (0, width))
        value = combine(builder.shuffle_vector(value, value, low), builder.shuffle_vector(value, value, high))
    return builder.extract_element(value, I32(0))


def _operator(name: Any, emit: Callable[[Any, Any, Any], Any]) -> None:
    """Give an operator a meaning for two vectors. An overload would be compiled, this is a single instruction."""

    class TwoVectors(ConcreteTemplate):
        key = name
        cases: ClassVar[list[Any]] = [signature(floats16, floats16, floats16)]  # type: ignore[no-untyped-call]

    def lower(context: Any, builder: Any, types: Any, values: Any) -> Any:
        return emit(builder, *values)

    infer_global(name)(TwoVectors)  # type: ignore[no-untyped-call]
    lower_builtin(name, floats16, floats16)(lower)  # type: ignore[no-untyped-call]


_operator(operator.add, lambda builder, a, b: builder.fadd(a, b))
_operator(operator.sub, lambda builder, a, b: builder.fsub(a, b))
_operator(operator.mul, lambda builder, a, b: builder.fmul(a, b))
_operator(operator.truediv, lambda builder, a, b: builder.fdiv(a, b))


# exp, tanh and GELU use additions, products, divisions and FMAs only: the same bits on every CPU.

_F = np.float32
_LOG2_E = _F(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = _F(-0.693359375), _F(2.12194440e-4)
_C0, _C1, _C2 = _F(1.9875691500e-4), _F(1.3981999507e-3), _F(8.3334519073e-3)
_C3, _C4, _C5 = _F(4.1665795894e-2), _F(1.6666665459e-1), _F(5.0000001201e-1)
_LOWEST, _HIGHEST = _F(-87.0), _F(88.0)
_ZERO, _ONE, _TWO = _F(0.0), _F(1.0), _F(2.0)
_SWIGLU_ALPHA, _SWIGLU_LIMIT = _F(1.702), _F(7.0)
_GELU_INNER, _GELU_CUBE = _F(-2.0 * 0.7978845608028654), _F(-2.0 * 0.7978845608028654 * 0.044715)


@kernel
def exp(x: Any) -> Any:
    """e**x, with an error of at most 2 units in the last place; x is clamped to -87..88 (Cephes' polynomial)."""
    x = maximum(minimum(x, full(_HIGHEST)), full(_LOWEST))
    n = round_even(x * full(_LOG2_E))
    r = fma(n, full(_LN2_LOW), fma(n, full(_LN2_HIGH), x))
    p = fma(full(_C0), r, full(_C1))
    p = fma(p, r, full(_C2))
    p = fma(p, r, full(_C3))
    p = fma(p, r, full(_C4))
    p = fma(p, r, full(_C5))
    return (fma(p, r * r, r) + full(_ONE)) * power_of_two(n)


@kernel
def tanh(x: Any) -> Any:
    """tanh(x) = 1 - 2 / (e**2x + 1), with an absolute error of about 1e-7, which is enough for a softcap."""
    return full(_ONE) - full(_TWO) / (exp(x + x) + full(_ONE))


@kernel
def softcap(x: int, stride: int, rows: int, count: int, cap: float) -> None:
    """x = cap * tanh(x / cap) in place, unless the cap is 0.

    x : address of float32[rows, count], where count is a multiple of 16; `stride` bytes from row to row
    """
    if cap > 0:
        inverse = _ONE / cap
        for row in range(rows):
            for at in range(x + row * stride, x + row * stride + 4 * count, 64):
                store(at, full(cap) * tanh(load(at) * full(inverse)))


@kernel
def gelu(x: Any) -> Any:
    """GELU in its tanh form: x / 2 * (1 + tanh(u)) = x / (1 + e**-2u), u = sqrt(2 / pi) * (x + 0.044715 x**3)."""
    inner = fma(x * x, full(_GELU_CUBE), full(_GELU_INNER))
    return x / (full(_ONE) + exp(x * inner))


@kernel
def silu(x: Any) -> Any:
    """x * sigmoid(x) = x / (1 + e**-x)."""
    return x / (full(_ONE) + exp(full(_ZERO) - x))


@kernel
def clamped_swiglu(gate: Any, up: Any) -> Any:
    """g * sigmoid(1.702 * g) * (clamp(up, -7, 7) + 1), where g = min(gate, 7) (GptOssExperts)."""
    gate, limit = minimum(gate, full(_SWIGLU_LIMIT)), full(_SWIGLU_LIMIT)
    up = maximum(minimum(up, limit), full(_ZERO) - limit)
    return gate / (full(_ONE) + exp(gate * full(-_SWIGLU_ALPHA))) * (up + full(_ONE))
