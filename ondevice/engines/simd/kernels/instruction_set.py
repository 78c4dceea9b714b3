"""Chooses the instruction set for 8-bit dot products by the features of the CPU."""

from __future__ import annotations

from dataclasses import dataclass

from numba.core.registry import cpu_target


@dataclass(frozen=True)
class InstructionSet:
    """Vector instructions that sum four products of 8-bit numbers into each 32-bit lane."""

    name: str
    lanes: int
    """32-bit lanes of a vector."""
    signed: bool
    """Whether its weights are signed bytes, else unsigned ones. Weights of 4 bits, 0..15, are both."""

    @property
    def int8_zero(self) -> int:
        """The code of a zero weight of 8 bits, as the instruction takes it."""
        return 0 if self.signed else 128


AVX512_VNNI = InstructionSet("avx512vnni", 16, signed=False)
AVX_VNNI = InstructionSet("avxvnni", 8, signed=False)
AVX2 = InstructionSet("avx2", 8, signed=True)
NEON_DOTPROD = InstructionSet("neon-dotprod", 4, signed=True)
NEON = InstructionSet("neon", 4, signed=True)
GENERIC = InstructionSet("generic", 4, signed=True)


def of_features(triple: str, features: str) -> InstructionSet:
    """The fastest set of a target; `features` as LLVM writes them: `+avx2,-avx512f,...`."""
    present = {feature[1:] for feature in features.split(",") if feature.startswith("+")}
    if triple.startswith(("aarch64", "arm64")):
        return NEON_DOTPROD if "dotprod" in present else NEON
    if {"avx512vnni", "avx512bw", "f16c", "fma"} <= present:
        return AVX512_VNNI
    if {"avx2", "f16c", "fma"} <= present:
        return AVX_VNNI if "avxvnni" in present or {"avx512vnni", "avx512vl"} <= present else AVX2
    return GENERIC


def has_half(triple: str, features: str) -> bool:
    """Whether the target converts fp16 to fp32 in one instruction."""
    return triple.startswith(("aarch64", "arm64")) or "+f16c" in features.split(",")


def target() -> tuple[str, str]:
    """LLVM's triple and features that numba compiles for: this CPU's, unless NUMBA_CPU_FEATURES says otherwise."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return triple, features


def current() -> InstructionSet:
    """The set that kernels are compiled for."""
    return of_features(*target())
