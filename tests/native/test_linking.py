"""Linking: small functions, compiled for each processor, whose references lead where they should."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from ondevice.native.code_block import ADDRESS, CodeBlock
from ondevice.native.features import architecture
from ondevice.native.linking import AARCH64, X86_64, Machine, link
from ondevice.native.sets import block_triple, native_platform

llvm = pytest.importorskip("llvmlite.binding")

FUNCTIONS = """
declare float @fmaf(float, float, float)
declare ptr @memset(ptr, i32, i64)

@pair = internal constant [2 x i64] [i64 1234567890123, i64 -5], align 16
@pointers = internal constant [3 x ptr] [ptr @calls, ptr getelementptr (i8, ptr @pair, i64 8), ptr @memset]

define i64 @pointer(i64 %i) {
  %at = getelementptr [3 x ptr], ptr @pointers, i64 0, i64 %i
  %value = load ptr, ptr %at
  %address = ptrtoint ptr %value to i64
  ret i64 %address
}

define i64 @constant(i64 %i) {
  %at = getelementptr [2 x i64], ptr @pair, i64 0, i64 %i
  %value = load i64, ptr %at
  ret i64 %value
}

define internal i64 @inner(i64 %x) noinline {
  %square = mul i64 %x, %x
  ret i64 %square
}

define i64 @calls(i64 %x) {
  %square = call i64 @inner(i64 %x)
  %sum = add i64 %square, 1
  ret i64 %sum
}

define i64 @fills(i64 %at) {
  %pointer = inttoptr i64 %at to ptr
  %same = call ptr @memset(ptr %pointer, i32 7, i64 100)
  ret i64 0
}

define i64 @address() {
  %at = ptrtoint ptr @fmaf to i64
  ret i64 %at
}

define double @floats(double %x) {
  %product = fmul double %x, 2.5
  ret double %product
}

define i64 @table(i64 %i) {
  switch i64 %i, label %other [ i64 0, label %a i64 1, label %b i64 2, label %c i64 3, label %d i64 4, label %e ]
a:
  %first = call i64 @inner(i64 7)
  ret i64 %first
b:
  %second = call i64 @calls(i64 %i)
  ret i64 %second
c:
  ret i64 -3
d:
  %third = call i64 @inner(i64 %i)
  ret i64 %third
e:
  %fourth = call i64 @constant(i64 1)
  ret i64 %fourth
other:
  ret i64 0
}
"""
"""A constant, a call inside, calls and the address of C functions, a float constant, a jump table."""
IMPORTED = ("fmaf", "memset")


def compiled(code: str, triple: str) -> bytes:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(f'target triple = "{triple}"\n{code}')
    machine = llvm.Target.from_triple(triple).create_target_machine(reloc="pic", codemodel="default")
    return bytes(machine.emit_object(module))


@pytest.fixture(scope="module")
def call() -> Callable[..., Any]:
    """A function that calls one of FUNCTIONS on this machine."""
    if architecture() not in ("x86_64", "aarch64"):
        pytest.skip("no kernels are built for this processor")
    block = CodeBlock.from_bytes(link(compiled(FUNCTIONS, block_triple(native_platform())), IMPORTED).to_bytes())
    address = block.load()

    def call_by_name(name: str, *arguments: Any, of: Any = ctypes.c_int64) -> Any:
        return ctypes.CFUNCTYPE(of, *[of] * len(arguments))(address(name))(*arguments)

    return call_by_name


def test_references_inside_lead_there(call: Callable[..., Any]) -> None:
    assert [call("constant", i) for i in range(2)] == [1234567890123, -5]
    assert call("calls", 9) == 82
    assert call("floats", 3.0, of=ctypes.c_double) == 7.5
    assert [call("table", i) for i in range(6)] == [49, 2, -3, 9, -5, 0]


def test_addresses_of_constants_and_functions_are_those_after_loading(call: Callable[..., Any]) -> None:
    calls, value, fill = (call("pointer", i) for i in range(3))
    assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(calls)(9) == 82
    assert ctypes.c_int64.from_address(value).value == -5
    room = bytearray(8)
    ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)(fill)(
        ctypes.addressof(ctypes.c_char.from_buffer(room)), 3, 4
    )
    assert room == bytes([3] * 4 + [0] * 4)


def test_references_to_the_c_library_lead_there(call: Callable[..., Any]) -> None:
    room = bytearray(128)
    call("fills", ctypes.addressof(ctypes.c_char.from_buffer(room)))
    assert room == bytes([7]) * 100 + bytes(28)
    fmaf = ctypes.CFUNCTYPE(ctypes.c_float, *[ctypes.c_float] * 3)(call("address"))
    assert fmaf(2.0, 3.0, 4.0) == 10.0


WIN64_CALL = """
define i64 @through(i64 %function, i64 %x) {
  %pointer = inttoptr i64 %function to ptr
  %result = call win64cc i64 %pointer(i64 %x)
  ret i64 %result
}
"""
"""Calls a function by Windows' convention."""


@pytest.mark.skipif(native_platform() != "linux-x86_64", reason="calls x86-64 code by Linux's convention")
def test_code_for_windows_runs_by_its_convention() -> None:
    through = link(compiled(WIN64_CALL, block_triple("linux-x86_64")), ()).load()("through")
    address = link(compiled(FUNCTIONS, block_triple("windows-x86_64")), IMPORTED).load()
    call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_uint64, ctypes.c_int64)(through)
    assert call(address("calls"), 9) == 82
    assert [call(address("table"), i) for i in range(6)] == [49, 2, -3, 9, -5, 0]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("system", ["linux", "macos", "windows"])
def test_code_for_every_platform_is_linked(system: str, machine: str) -> None:
    """With the same bytes each time. `tests/simd/machines/test_arm_emulated.py` runs the linked code on ARM."""
    data = compiled(FUNCTIONS, block_triple(f"{system}-{machine}"))
    block = link(data, IMPORTED)
    assert set(block.functions) == {"constant", "calls", "fills", "address", "floats", "table", "pointer"}
    assert set(block.imports) == set(IMPORTED)
    assert all(not any(block.content[offset : offset + ADDRESS.size]) for offset in block.imports.values())
    calls, value, _ = targets = [ADDRESS.unpack_from(block.content, offset)[0] for offset in block.pointers][:3]
    assert calls == block.functions["calls"]
    assert block.content[value : value + 8] == (-5).to_bytes(8, "little", signed=True)
    assert all(0 < target < len(block.content) for target in targets)
    assert link(data, IMPORTED).to_bytes() == block.to_bytes()


PLACE, TARGET = 0x5004, 0x3928
RESOLVED = {
    275: ("adrp x1, 0x0", 0x90000001, 0xD0FFFFE1),  # two pages back
    277: ("add x1, x1, 0", 0x91000021, 0x9124A021),
    278: ("ldrb w1, [x1]", 0x39400021, 0x3964A021),
    283: ("bl 0", 0x94000000, 0x97FFFA49),
    284: ("ldrh w1, [x1]", 0x79400021, 0x79525021),
    285: ("ldr w1, [x1]", 0xB9400021, 0xB9492821),
    286: ("ldr x1, [x1]", 0xF9400021, 0xF9449421),
}
"""Instructions of ARM by types of relocation: as LLVM writes them, and with the distance from PLACE to TARGET."""


@pytest.mark.parametrize("kind", RESOLVED)
def test_an_arm_instruction_refers_to_its_target(kind: int) -> None:
    _, before, after = RESOLVED[kind]
    content = bytearray(PLACE) + before.to_bytes(4, "little")
    AARCH64.relocations[kind].write(content, PLACE, TARGET)
    assert content[PLACE:] == after.to_bytes(4, "little")


@pytest.mark.parametrize(("machine", "kind"), [(X86_64, 2), (AARCH64, 275), (AARCH64, 283)])
def test_a_reference_that_is_too_long_is_an_error(machine: Machine, kind: int) -> None:
    with pytest.raises(RuntimeError, match="too large for its references"):
        machine.relocations[kind].write(bytearray(8), 0, 1 << 33)


def test_a_constant_that_is_not_aligned_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="not aligned"):
        AARCH64.relocations[299].write(bytearray(8), 0, 24)


REFUSED = {
    "a variable": ("@count = global i64 0\n", "kernels have no variables"),
    "a value": ("@count = global i64 7\n", "kernels have no variables"),
    "a thread's own value": ("@count = thread_local global i64 7\n", "kernels have no variables"),
    "another function": (
        "declare i64 @time(ptr)\ndefine i64 @now() { %t = call i64 @time(ptr null) ret i64 %t }\n",
        "time",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_an_object_that_is_more_than_code_and_constants_is_refused(machine: str, name: str) -> None:
    code, reason = REFUSED[name]
    with pytest.raises(RuntimeError, match=reason):
        link(compiled(f"{code}define i64 @one() {{ ret i64 1 }}", block_triple(f"linux-{machine}")), IMPORTED)


def test_an_object_of_another_format_or_processor_is_refused() -> None:
    one = "define i64 @one() { ret i64 1 }"
    with pytest.raises(RuntimeError, match="no ELF object"):
        link(compiled(one, "arm64-apple-macosx11.0.0"), ())
    other = bytearray(compiled(one, block_triple("linux-x86_64")))
    other[18] = 243  # RISC-V
    with pytest.raises(RuntimeError, match="no linker for ELF's machine 243"):
        link(bytes(other), ())
