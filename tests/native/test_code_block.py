"""Code blocks: what is refused, and memory that is never writable and executable at once."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from ondevice import OndeviceError
from ondevice.native.code_block import CodeBlock, CodePages, c_function
from tests.native.windows import Kernel32, pretend_windows

SEVEN = {"x86_64": bytes.fromhex("b807000000c3"), "aarch64": bytes.fromhex("e0008052c0035fd6")}
"""Machine code of a function that returns 7."""

processor = platform.machine()
pytestmark = pytest.mark.skipif(processor not in SEVEN, reason="there is no machine code for this processor")


def result_of(address: int) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int)(address)())


def protections(address: int) -> list[str]:
    """The protection of the mapping that an address lies in. Linux joins it with neighbours of the same kind."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text("ascii").splitlines()]
    ranges = [([int(end, 16) for end in line[0].split("-")], line[1]) for line in lines]
    return [protection for (begin, end), protection in ranges if begin <= address < end]


def block() -> CodeBlock:
    return CodeBlock(bytes(16) + SEVEN[processor], {"seven": 16}, {}, [])


def test_a_block_of_a_file_is_the_one_that_was_written() -> None:
    made = block()._replace(imports={"memset": 0}, pointers=[8])
    assert CodeBlock.from_bytes(made.to_bytes()) == made
    assert result_of(CodeBlock.from_bytes(block().to_bytes()).load()("seven")) == 7


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"[]\ncode",
        b"{}\ncode",
        b'{"functions": {}, "imports": {}, "pointers": []}\n',
        b'{"functions": {"f": 16}, "imports": {}, "pointers": []}\n16 bytes of code',
        b'{"functions": {"f": -1}, "imports": {}, "pointers": []}\n16 bytes of code',
        b'{"functions": {"f": "1"}, "imports": {}, "pointers": []}\n16 bytes of code',
        b'{"functions": {}, "imports": {"g": 9}, "pointers": []}\n16 bytes of code',
        b'{"functions": {}, "imports": {}, "pointers": [9]}\n16 bytes of code',
        b'{"functions": 3, "imports": {}, "pointers": []}\n16 bytes of code',
    ],
)
def test_a_file_that_is_no_block_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="this is not a block of machine code"):
        CodeBlock.from_bytes(data)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_code_is_never_writable() -> None:
    pages = CodePages(len(SEVEN[processor]))
    pages.seal(SEVEN[processor])
    assert protections(pages.address) == ["r-xp"]
    assert result_of(pages.address) == 7
    pages.free()
    assert "r-xp" not in protections(pages.address)


@pytest.mark.skipif(sys.platform != "linux", reason="Windows' functions by those of Linux")
def test_windows_functions_load_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel32()
    pretend_windows(monkeypatch, kernel)
    pages = CodePages(len(SEVEN[processor]))
    pages.seal(SEVEN[processor])
    assert result_of(pages.address) == 7
    pages.free()
    assert not kernel.pages


@pytest.mark.parametrize("refused", ["may_execute", "may_allocate"])
def test_a_system_that_allows_no_code_is_named_in_one_line(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel32(**{refused: False})
    pretend_windows(monkeypatch, kernel)
    with pytest.raises(OndeviceError, match="this system allows no machine code that a program has written"):
        block().load()
    assert not kernel.pages


REFUSED = """
import ctypes, sys
from ondevice import OndeviceError
from ondevice.native.code_block import CodeBlock
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):  # PR_SET_MDWE: no page becomes executable later
    sys.exit("unknown")
try:
    CodeBlock(bytes(8), {}, {}, []).load()
except OndeviceError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to refuse")
def test_a_hardened_process_says_why() -> None:
    """As services with systemd's MemoryDenyWriteExecute are."""
    ended = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=False)
    if "unknown" in ended.stderr:
        pytest.skip("this kernel cannot refuse executable pages")
    assert "has written (Permission denied): install a wheel" in ended.stdout


def test_a_c_function_that_is_missing_is_named() -> None:
    assert c_function("memset") > 0
    with pytest.raises(OndeviceError, match="no function ondevice_is_not_there"):
        c_function("ondevice_is_not_there")
