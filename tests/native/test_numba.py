"""The internals of numba that `native.builder` replaces: an upgrade that changes one fails here, with its name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

numba = pytest.importorskip("numba")

from numba.core import codegen, cpu  # noqa: E402
from numba.core.registry import cpu_target  # noqa: E402

from ondevice.native.builder import CollectedLibrary, CollectingGenerator  # noqa: E402

REPLACED: dict[tuple[type, str], list[str]] = {
    (codegen.CPUCodeLibrary, "__init__"): ["codegen", "name"],
    (codegen.CPUCodeLibrary, "add_ir_module"): ["ir_module"],
    (codegen.CPUCodeLibrary, "add_linking_library"): ["library"],
    (codegen.CPUCodeLibrary, "finalize"): [],
    (codegen.CPUCodegen, "__init__"): ["module_name"],
    (codegen.CPUCodegen, "_init"): ["llvm_module"],
    (codegen.CPUCodegen, "_create_empty_module"): ["name"],
    (codegen.CPUCodegen, "create_library"): ["name", "kwargs"],
    (codegen.CPUCodegen, "_add_module"): ["module"],
    (codegen.CPUCodegen, "magic_tuple"): [],
    (codegen.JITCPUCodegen, "set_env"): ["env_name", "env"],
    (cpu.CPUContext, "get_executable"): ["library", "fndesc", "env"],
}
"""Methods of numba -> their parameters."""

OWN = {"link", "with_callees"}
"""Methods of the builder's classes that numba's do not have."""


@pytest.mark.parametrize(("owner", "name"), REPLACED, ids=lambda each: getattr(each, "__name__", each))
def test_a_method_that_is_replaced_is_as_it_was(owner: Any, name: str) -> None:
    method = getattr(owner, name, None)
    found = None if method is None else list(inspect.signature(method).parameters)[1:]
    assert found == REPLACED[owner, name], (
        f"ondevice/native/builder.py replaces {owner.__name__}.{name}, which numba {numba.__version__} has changed"
    )


def test_the_code_generator_is_where_it_was() -> None:
    context = cpu_target.target_context
    assert getattr(context, "_internal_codegen", None) is context.codegen(), (
        f"ondevice/native/builder.py sets _internal_codegen, which numba {numba.__version__} no longer generates with"
    )


def test_every_replaced_method_is_listed() -> None:
    classes = {CollectedLibrary: codegen.CPUCodeLibrary, CollectingGenerator: codegen.CPUCodegen}
    for own, base in classes.items():
        methods = {name for name, value in vars(own).items() if inspect.isfunction(value)} - OWN
        bases = (base, codegen.JITCPUCodegen)
        assert [name for name in methods if not any((each, name) in REPLACED for each in bases)] == []
