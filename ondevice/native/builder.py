"""Compiles the kernel library: numba's front end for every entry, then one LLVM module, one optimisation, one object.

    python -m ondevice.native.builder --set NAME [--part PART ...] [--object] [--out FILE]

The object is linked to a `CodeBlock`, which `library` loads; `--object` leaves it to a platform's linker (`shipping`).

numba's own way compiles each function alone and again inside each caller, with wrappers for Python, and keeps 13 MB of
code for 0.25 MB that are run: 48 s. Collecting the unoptimised modules of all functions and optimising them together
once takes 18 s.

numba has no interface for this, so two of its parts are replaced, for the rest of the process: the code generator, by
one that only collects LLVM modules, for any target; and the function that makes compiled code callable. Functions keep
numba's calling convention; each entry also gets a C function (see `functions.Entry`).

The result depends on the sources, numba, llvmlite and the set only, not on this machine; `PYTHONHASHSEED` must be 0 for
equal bytes, because the order of numba's sets decides the order of some branches.
"""

# numba has types for few of its internals.
# mypy: disable-error-code="no-untyped-call, attr-defined"

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import _dynfunc, types
from numba.core import cgutils, codegen, cpu
from numba.core.registry import cpu_target

from ondevice.native import library
from ondevice.native.functions import ENTRIES, FAILED, Entry, Kernel, Parameter
from ondevice.native.linking import link
from ondevice.native.sets import PARTS, PLATFORMS, SETS, TargetSet, block_triple, native_platform

MODULES = (
    "ondevice.engines.simd.kernels.contract.entries",
    "ondevice.generate.sampling.masks",
    "ondevice.generate.sampling.row_draw",
    "ondevice.generate.drafters.ngram",
    "ondevice_export.calibration.round_block",
    "ondevice_export.quantize",
)
"""The modules that declare entries. Those that are not installed are left out."""

LIBC = (
    "memcpy",
    "memset",
    "memmove",
    "fmaf",
    "rintf",
    "sqrtf",
    "syscall",
    "usleep",
    "WaitOnAddress",
    "WakeByAddressAll",
    "bzero",
    "__bzero",
    "memset_pattern16",
)
"""The functions of the C library that the library may need. For most of them LLVM has instructions; the last three are
macOS's."""

I64 = ir.IntType(64)
C_TYPES = {"i64": I64, "f32": ir.FloatType(), "f64": ir.DoubleType()}
"""LLVM's types by the names of `Parameter.c_types`."""


def build(target: TargetSet, triple: str, parts: Sequence[str], on_function: Callable[[], None]) -> bytes:
    """Compile parts of the library to one object.

    Args:
        target: instruction set to compile for.
        triple: LLVM's name of the platform.
        parts: names of the parts whose entries are included.
        on_function: called after each function that numba has translated.

    Returns:
        An object file of the platform's format.
    """
    library.compile_for(target.name)
    generator = _collect(target, triple, on_function)
    for name in MODULES:
        if find_spec(name.partition(".")[0]) is not None:
            import_module(name)
    entries = [entry for entry in ENTRIES.values() if entry.part in parts]
    return generator.link([CFunction(entry, generator) for entry in entries])


class CollectedLibrary(codegen.CPUCodeLibrary):
    """Takes the LLVM modules of one function as text, and neither optimises nor links them."""

    def __init__(self, generator: CollectingGenerator, name: str) -> None:
        codegen.CodeLibrary.__init__(self, generator, name)
        self._linking_libraries: list[Any] = []
        self.modules: list[str] = []

    def add_ir_module(self, module: Any) -> None:
        self.modules.append(cgutils.normalize_ir_text(str(module)))

    def add_linking_library(self, library: Any) -> None:
        self._linking_libraries.append(library)

    def finalize(self) -> None:
        self._finalized = True

    def with_callees(self, seen: dict[int, CollectedLibrary]) -> None:
        """Add this library and those of all functions that it calls, by identity."""
        if id(self) not in seen:
            seen[id(self)] = self
            for other in self._linking_libraries:
                other.with_callees(seen)


class CollectingGenerator(codegen.CPUCodegen):
    """numba's code generator for one target, which need not be this machine. Nothing that it makes can be run."""

    _library_class = CollectedLibrary

    def __init__(self, target: TargetSet, triple: str, on_function: Callable[[], None]) -> None:
        self.target, self.triple, self.on_function = target, triple, on_function
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        super().__init__("ondevice")

    def _init(self, module: Any) -> None:
        self._tm_features = self.target.features
        self._tm = llvm.Target.from_triple(self.triple).create_target_machine(
            cpu=self.target.cpu, features=self.target.features, opt=3, reloc="pic", codemodel="default"
        )
        self._target_data = self._tm.target_data
        self._data_layout = str(self._target_data)

    def _create_empty_module(self, name: str) -> Any:
        module = super()._create_empty_module(name)
        module.triple = self.triple
        return module

    def create_library(self, name: str, **options: Any) -> Any:
        self.on_function()
        return super().create_library(name, **options)

    def _add_module(self, module: Any) -> None:
        """Do nothing: there is no engine to which code is added."""

    def set_env(self, env_name: str, env: Any) -> None:
        """Do nothing: kernels use no Python objects."""

    def magic_tuple(self) -> tuple[str, str, str]:
        return self.triple, self.target.cpu, self.target.features

    def link(self, functions: Sequence[CFunction]) -> bytes:
        """Link the modules of C functions and all that they call, optimise once, and emit the object."""
        whole = llvm.parse_assembly(str(self._create_empty_module("ondevice")))
        whole.data_layout = self._data_layout
        libraries: dict[int, CollectedLibrary] = {}
        for function in functions:
            function.library.with_callees(libraries)
        texts = [text for each in libraries.values() for text in each.modules]
        for text in (*texts, *(str(function.module) for function in functions)):
            module = llvm.parse_assembly(text)
            for name in module.functions:
                if not name.is_declaration and name.linkage == llvm.Linkage.linkonce_odr:
                    name.linkage = "weak_odr"  # else what is linked before its caller would be dropped
            whole.link_in(module)
        exported = {function.name for function in functions}
        for each in (*whole.functions, *whole.global_variables):
            if not each.is_declaration:
                each.linkage = "external" if each.name in exported else "internal"
        whole.verify()
        passes, builder = self._module_pass_manager(opt=3, loop_vectorize=True, slp_vectorize=True)
        passes.run(whole, builder)
        undefined = {each.name for each in whole.functions if each.is_declaration and each.name not in LIBC}
        undefined = {name for name in undefined if not name.startswith("llvm.")}
        if undefined:
            raise RuntimeError(f"the kernel library would need {', '.join(sorted(undefined))}")
        return bytes(self._tm.emit_object(whole))


class CFunction:
    """The C function of an entry, in an LLVM module of its own."""

    def __init__(self, entry: Entry[..., Any], generator: CollectingGenerator) -> None:
        self.name = entry.symbol
        dispatcher = entry.kernel.dispatcher
        signature = tuple(map(_numba_type, entry.parameters))
        dispatcher.compile(signature)
        compiled = dispatcher.overloads[signature]
        self.library = compiled.library
        self.module = generator._create_empty_module(self.name)
        self._emit(entry, compiled)

    def _emit(self, entry: Entry[..., Any], compiled: Any) -> None:
        context = cpu_target.target_context
        kinds = [C_TYPES[name] for parameter in entry.parameters for name in parameter.c_types()]
        function = ir.Function(self.module, ir.FunctionType(I64, [I64] if entry.by_record else kinds), self.name)
        builder = ir.IRBuilder(function.append_basic_block())
        given, values = iter(function.args), []
        if entry.by_record:
            record = next(given)
            places = [builder.add(record, I64(8 * place)) for place in range(len(kinds))]
            pointers = [builder.inttoptr(at, kind.as_pointer()) for at, kind in zip(places, kinds, strict=True)]
            given = iter([builder.load(pointer) for pointer in pointers])
        for parameter, kind in zip(entry.parameters, compiled.signature.args, strict=True):
            if not parameter.dims:
                values.append(next(given))
                continue
            address = next(given)
            shape = [next(given) for _ in range(parameter.dims)]
            strides: list[Any] = []
            size = I64(parameter.dtype.itemsize)
            for length in reversed(shape):
                strides.insert(0, size)
                size = builder.mul(size, length)
            array = context.make_array(kind)(context, builder)
            array.data = builder.inttoptr(address, array.data.type)
            array.shape, array.strides = (cgutils.pack_array(builder, each) for each in (shape, strides))
            array.itemsize = I64(parameter.dtype.itemsize)
            array.nitems = builder.udiv(size, array.itemsize)
            values.append(array._getvalue())
        declared = context.call_conv.get_function_type(compiled.fndesc.restype, compiled.fndesc.argtypes)
        callee = ir.Function(self.module, declared, compiled.fndesc.llvm_func_name)
        status, result = context.call_conv.call_function(
            builder, callee, compiled.fndesc.restype, compiled.fndesc.argtypes, values
        )
        with builder.if_then(status.is_error, likely=False):
            builder.ret(I64(FAILED))
        returns = compiled.signature.return_type
        if returns == types.none:
            builder.ret(I64(0))
        elif returns == types.boolean:
            builder.ret(builder.zext(result, I64))
        else:
            assert isinstance(returns, types.Integer), f"{entry.name} returns {returns}"
            builder.ret(result if returns.bitwidth == 64 else builder.sext(result, I64))


def _numba_type(parameter: Parameter) -> Any:
    number = numba.from_dtype(parameter.dtype)
    return types.Array(number, parameter.dims, "C") if parameter.dims else number


def _collect(target: TargetSet, triple: str, on_function: Callable[[], None]) -> CollectingGenerator:
    """Make numba compile for a target, and only collect LLVM modules, from now on in this process."""
    generator = CollectingGenerator(target, triple, on_function)
    cpu_target.target_context._internal_codegen = generator
    cpu.CPUContext.get_executable = _never_called  # type: ignore[method-assign]
    Kernel.options.update(no_cpython_wrapper=True, no_cfunc_wrapper=True)
    return generator


def _never_called(context: Any, library: Any, description: Any, environment: Any) -> Any:
    """In place of `CPUContext.get_executable`: a function object for each library, which cannot be called."""
    name = description.qualname.rpartition(".")[2]
    return _dynfunc.make_function(description.lookup_module(), name, "", 1, environment, (library,))


def main(arguments: Sequence[str] | None = None) -> None:
    """Build parts of the library for a set, and print an empty line for each function that numba has translated."""
    parser = argparse.ArgumentParser(prog="python -m ondevice.native.builder", description=main.__doc__)
    parser.add_argument("--set", required=True, choices=SETS, help="instruction set")
    parser.add_argument("--platform", choices=PLATFORMS, help="platform to build for (default: this one)")
    parser.add_argument("--object", action="store_true", help="write an object of the platform's format, not linked")
    parser.add_argument("--part", action="append", choices=PARTS, help="parts to include (default: all)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: the output)")
    args = parser.parse_args(arguments)
    platform = args.platform or native_platform()
    triple = PLATFORMS[platform].triple if args.object else block_triple(platform)
    code = build(SETS[args.set], triple, args.part or PARTS, lambda: print(flush=True))  # noqa: T201
    if not args.object:
        code = link(code, LIBC).to_bytes()
    if args.out is not None:
        try:
            library.write(args.out, code, args.set, platform)
            return
        except OSError as error:  # a full disk, for instance: the process that waits for the code takes it all the same
            if args.object:
                raise
            print(error.strerror, file=sys.stderr)  # noqa: T201
    with open(1, "wb", closefd=False) as output:
        output.write(code)


if __name__ == "__main__":
    main()
