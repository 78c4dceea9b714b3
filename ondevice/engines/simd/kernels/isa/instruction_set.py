"""The instruction sets for 8-bit dot products, and the one of the kernel library. It imports no compiler."""

from __future__ import annotations

from dataclasses import dataclass

from ondevice.native import library
from ondevice.native.sets import SETS

LANES = 16
"""float32 lanes of the vectors that kernels are written with, on every instruction set."""


@dataclass(frozen=True)
class InstructionSet:
    """Vector instructions that sum four products of 8-bit numbers into each 32-bit lane.

    name : for messages and tests
    lanes : 32-bit lanes of a vector
    signed : whether the weights of a product are signed bytes, else unsigned; 4-bit weights, 0..15, are valid as both
    by_lane : whether products can take one lane of a vector as an operand, and shifts work on bytes: ARM
    pairs : whether an instruction multiplies two rows of weights by two rows of activations, 8 numbers each, which
        then lie in pairs: see `matmul.activations`
    """

    name: str
    lanes: int
    signed: bool
    by_lane: bool = False
    pairs: bool = False

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
NEON_I8MM = InstructionSet("neon-i8mm", 4, signed=True, by_lane=True, pairs=True)
NEON = InstructionSet("neon", 4, signed=True, by_lane=True)
GENERIC = InstructionSet("generic", 4, signed=True)

_OF_SETS = {
    "generic": GENERIC,
    "avx2": AVX2,
    "avxvnni": AVX_VNNI,
    "avx512vnni": AVX512_VNNI,
    "avx512vbmi": AVX512_VNNI,
    "neon": NEON,
    "neon-dotprod": NEON_DOTPROD,
    "neon-i8mm": NEON_I8MM,
}


def current() -> InstructionSet:
    """The set for which kernels are compiled, or were."""
    return of_set(library.choice().set)


def of_set(name: str) -> InstructionSet:
    """The instructions of a set by its name in `native.sets`."""
    return _OF_SETS[name]


def byte_shuffle() -> str:
    """The widest instruction that looks up bytes in tables of 16 bytes; "" if there is none.

    `vpermb` looks up in 4 tables in one vector, `pshufb-512` and `pshufb-256` in one table for each 128 bits.
    """
    if current().by_lane:
        return "tbl"
    shuffles = {"avx512vbmi": "vpermb", "avx512vnni": "pshufb-512", "avxvnni": "pshufb-256", "avx2": "pshufb-256"}
    return shuffles.get(library.choice().set, "")


def has_half() -> bool:
    """Whether the set converts fp16 to fp32 in one instruction."""
    return current().by_lane or "f16c" in SETS[library.choice().set].needed
