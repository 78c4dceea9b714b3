"""Tells numba's code generator of ARM's dot products, which LLVM does not list among the features of a CPU."""

from __future__ import annotations

import llvmlite.binding as llvm
from numba.core import config
from numba.core.codegen import get_host_cpu_features

from ondevice import machine


def is_arm(triple: str) -> bool:
    """Whether a target is 64-bit ARM."""
    return triple.startswith(("aarch64", "arm64"))


def with_dot_products(triple: str, features: str) -> str:
    """The features of this CPU, with ARM's dot products where the system says that it has them: LLVM does not look."""
    if not is_arm(triple) or "+dotprod" in features.split(",") or not machine.arm_dot_products():
        return features
    return f"{features},+dotprod" if features else "+dotprod"


def tell_numba() -> None:
    """Have numba compile for them too, unless NUMBA_CPU_FEATURES says otherwise: before it compiles anything."""
    triple = llvm.get_process_triple()
    if config.CPU_FEATURES is None and is_arm(triple):  # type: ignore[attr-defined]
        host = get_host_cpu_features()  # type: ignore[no-untyped-call]
        config.CPU_FEATURES = with_dot_products(triple, host)  # type: ignore[attr-defined]
