"""Instruction sets for 8-bit dot products, and that of this process."""

from __future__ import annotations

from dataclasses import dataclass

from ondevice.native import library

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
        then lie in pairs: see `activations`
    group_rows : most rows of activations in one product, a group: with AVX-512 as many as have their sums in registers.
        In groups of 8, 9 to 12 rows took 1.15 times as long there, and a prefill of 512 rows 1.05 (E2B's shape, two
        cores of an Intel Xeon)
    """

    name: str
    lanes: int
    signed: bool
    by_lane: bool = False
    pairs: bool = False
    group_rows: int = 8

    @property
    def int8_zero(self) -> int:
        """The code of a zero 8-bit weight, and of a zero level of a table, as the instruction takes it."""
        return 0 if self.signed else 128


AVX512_VNNI = InstructionSet("avx512vnni", 16, signed=False, group_rows=12)
AVX_VNNI = InstructionSet("avxvnni", 8, signed=False)
AVX2 = InstructionSet("avx2", 8, signed=True)
NEON_DOTPROD = InstructionSet("neon-dotprod", 4, signed=True, by_lane=True)
NEON_I8MM = InstructionSet("neon-i8mm", 4, signed=True, by_lane=True, pairs=True)
NEON = InstructionSet("neon", 4, signed=True, by_lane=True)
GENERIC = InstructionSet("generic", 4, signed=True)

INSTRUCTION_SETS = {
    "generic": GENERIC,
    "avx2": AVX2,
    "avxvnni": AVX_VNNI,
    "avx512vnni": AVX512_VNNI,
    "avx512vbmi": AVX512_VNNI,
    "neon": NEON,
    "neon-dotprod": NEON_DOTPROD,
    "neon-i8mm": NEON_I8MM,
}
"""By the names of `native.sets.SETS`."""


def instruction_set() -> InstructionSet:
    """The set for which kernels are compiled, or were."""
    return INSTRUCTION_SETS[library.choice().set]
