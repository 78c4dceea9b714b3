"""The instruction sets for 8-bit dot products, and which one kernels are compiled for: it follows from CPU features."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import llvmlite.binding as llvm
from numba.core.registry import cpu_target

from ondevice.jit import is_arm, with_dot_products


@dataclass(frozen=True)
class InstructionSet:
    """Vector instructions that sum four products of 8-bit numbers into each 32-bit lane.

    name : for messages and tests
    lanes : 32-bit lanes of a vector
    signed : whether the weights of a product are signed bytes, else unsigned; 4-bit weights, 0..15, are valid as both
    by_lane : whether products can take one lane of a vector as an operand, and shifts work on bytes: ARM
    """

    name: str
    lanes: int
    signed: bool
    by_lane: bool = False

    def vectors_of_a_pass(self, rows: int) -> int:
        """Vectors of output rows that a pass of the tile product computes; about four sums are then computed at a time.

        Each addition to a sum waits for the one before, so a single sum is slow; and several vectors share the loads of
        activations. On ARM, one row takes 0.95 (Cortex-A76) and 0.80 (A72) of the cycles of four passes, two rows 0.97
        and 0.89. More sums would need more registers than the weights leave. x86 has 16 registers without AVX-512.
        """
        return max(1, 4 // rows) if self.by_lane else 1

    @property
    def int8_zero(self) -> int:
        """The code of a zero 8-bit weight, as the instruction takes it."""
        return 0 if self.signed else 128


AVX512_VNNI = InstructionSet("avx512vnni", 16, signed=False)
AVX_VNNI = InstructionSet("avxvnni", 8, signed=False)
AVX2 = InstructionSet("avx2", 8, signed=True)
NEON_DOTPROD = InstructionSet("neon-dotprod", 4, signed=True, by_lane=True)
NEON = InstructionSet("neon", 4, signed=True, by_lane=True)
GENERIC = InstructionSet("generic", 4, signed=True)


def of_features(triple: str, features: str) -> InstructionSet:
    """The fastest set of a target, by its LLVM features: `+avx2,-avx512f,...`."""
    present = {feature[1:] for feature in features.split(",") if feature.startswith("+")}
    if is_arm(triple):
        return NEON_DOTPROD if "dotprod" in present else NEON
    if {"avx512vnni", "avx512bw", "f16c", "fma"} <= present:
        return AVX512_VNNI
    if {"avx2", "f16c", "fma"} <= present:
        return AVX_VNNI if "avxvnni" in present or {"avx512vnni", "avx512vl"} <= present else AVX2
    return GENERIC


def byte_shuffle(triple: str, features: str) -> str:
    """The widest instruction that looks up bytes in tables of 16 bytes; "" if there is none.

    `vpermb` looks up in 4 tables in one vector, `pshufb-512` and `pshufb-256` in one table for each 128 bits.
    """
    present = {feature[1:] for feature in features.split(",") if feature.startswith("+")}
    if is_arm(triple):
        return "tbl"
    if {"avx512vbmi", "avx512vnni", "avx512bw"} <= present:
        return "vpermb"
    if "avx512bw" in present:
        return "pshufb-512"
    return "pshufb-256" if "avx2" in present else "pshufb-128" if "ssse3" in present else ""


def has_half(triple: str, features: str) -> bool:
    """Whether the target converts fp16 to fp32 in one instruction."""
    return is_arm(triple) or "+f16c" in features.split(",")


@functools.cache
def selects_dot_products(triple: str, cpu: str, features: str) -> bool:
    """Whether LLVM knows that an ARM CPU has dot products; for most CPUs this follows from the CPU's name.

    LLVM ends the process if a kernel uses an instruction that its target lacks. So this compiles a sum of products, for
    which LLVM uses dot products if the target has them, and looks at the code.
    """
    target = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features)
    return "sdot" in target.emit_assembly(llvm.parse_assembly(_SUM_OF_PRODUCTS))


_SUM_OF_PRODUCTS = """
define i32 @dot(<16 x i8> %a, <16 x i8> %b) {
  %c = sext <16 x i8> %a to <16 x i32>
  %d = sext <16 x i8> %b to <16 x i32>
  %products = mul <16 x i32> %c, %d
  %sum = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %products)
  ret i32 %sum
}
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
"""


def usable(triple: str, cpu: str, features: str) -> str:
    """The features that code for a target may use: `features`, and ARM's dot products if LLVM's target has them.

    If an application used numba before ondevice, numba's code generator was made without them.
    """
    complete = with_dot_products(triple, features)
    return complete if complete == features or selects_dot_products(triple, cpu, features) else features


def target() -> tuple[str, str]:
    """LLVM's triple and features that numba compiles for: this CPU's, unless NUMBA_CPU_FEATURES says otherwise."""
    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    return triple, usable(triple, cpu, features)


def current() -> InstructionSet:
    """The set that kernels are compiled for."""
    return of_features(*target())
