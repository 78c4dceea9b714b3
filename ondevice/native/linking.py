"""Links an ELF object to a `CodeBlock`: places its sections one after another, and resolves every reference.

LLVM writes ELF for any system, with that system's calling convention, so one linker of few relocations is enough: those
of position-independent code without variables, in the small code model. A relocation of another type ends the build.

Calls of C functions go through a stub after the code, which jumps to an address in the block's table; some code reads
an address from there instead:

    sections: code, constants | stubs | table of addresses

Sections with unwinding tables are left out: kernels raise no exceptions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

import numpy as np

from ondevice.native.code_block import ADDRESS, CodeBlock

TABLE_ALIGN, STUB_ALIGN = 64, 16
"""The table does not share a cache line with code."""

Write = Callable[[bytearray, int, int], None]
"""Changes the bytes at a place so that they refer to a target, both given as offsets in the block."""


class Relocation(NamedTuple):
    """The way in which references of one type are resolved.

    write : changes the bytes
    by_table : whether they refer to the symbol's address in the table, instead of to the symbol
    """

    write: Write
    by_table: bool = False


class Machine(NamedTuple):
    """The relocations of a processor, and its stubs.

    pointer : ELF's number of the relocation of an address, 64 bits
    relocations : the others, by ELF's numbers of their types
    stub : machine code that jumps to an address in the table
    stub_references : places in it, the relocations there, and their addends
    """

    pointer: int
    relocations: dict[int, Relocation]
    stub: bytes
    stub_references: tuple[tuple[int, Relocation, int], ...]


def link(data: bytes, allowed: Container[str]) -> CodeBlock:
    """Link an object.

    Args:
        data: an ELF object for x86-64 or 64-bit ARM.
        allowed: the names of C functions that it may call.

    Raises:
        RuntimeError: the object has something that a block cannot have; the message says what.
    """
    elf = _Object(data)
    machine, imported = elf.machine(), sorted({each for each in elf.symbols if each.section == UNDEFINED})
    if unknown := [each.name for each in imported if each.name not in allowed]:
        raise RuntimeError(f"the kernel library would need {', '.join(unknown)}")
    content = bytearray()
    placed = {number: _append(content, elf.content(number), align) for number, align in elf.loaded()}
    stubs = {each: _append(content, machine.stub, STUB_ALIGN) for each in imported}
    content += bytes(-len(content) % TABLE_ALIGN)
    table = {each: _append(content, bytes(ADDRESS.size), ADDRESS.size) for each in imported}
    for each, stub in stubs.items():
        for place, relocation, addend in machine.stub_references:
            relocation.write(content, stub + place, table[each] + addend)

    def offset(symbol: Symbol) -> int:
        if symbol.section == UNDEFINED:
            return stubs[symbol]
        if symbol.section not in placed:
            raise RuntimeError(f"the kernels refer to {symbol.name or 'a section'}, which is not loaded")
        return placed[symbol.section] + symbol.value

    pointers: list[int] = []
    for section, start in placed.items():
        for place, kind, symbol, addend in elf.references(section):
            if kind == machine.pointer:
                ADDRESS.pack_into(content, start + place, offset(symbol) + addend)
                pointers.append(start + place)
                continue
            if (found := machine.relocations.get(kind)) is None:
                raise RuntimeError(f"there is no linker for ELF's relocation {kind} of {symbol.name or 'a section'}")
            if found.by_table and symbol not in table:
                table[symbol] = _append(content, ADDRESS.pack(offset(symbol)), ADDRESS.size)
                pointers.append(table[symbol])
            target = table[symbol] if found.by_table else offset(symbol)
            found.write(content, start + place, target + addend)
    exported = {each.name: offset(each) for each in elf.symbols if each.is_global and each.section != UNDEFINED}
    return CodeBlock(bytes(content), exported, {each.name: table[each] for each in imported}, sorted(pointers))


def _append(content: bytearray, added: bytes, align: int) -> int:
    """Append bytes at the next multiple of `align`; returns their offset."""
    content += bytes(-len(content) % align)
    content += added
    return len(content) - len(added)


# Relocations, by the ABI of each processor.


def _distance(content: bytearray, place: int, target: int) -> None:
    """The distance, 32 bits: of data, of entries of jump tables, of calls on x86."""
    struct.pack_into("<i", content, place, _signed(target - place, 32))


def _page(content: bytearray, place: int, target: int) -> None:
    """The distance in pages of 4096 bytes, 21 bits: of ADRP."""
    pages = _signed((target >> 12) - (place >> 12), 21)
    _insert(content, place, (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5)


def _in_page(shift: int) -> Write:
    """The offset in the page in units of 1 << shift bytes, 12 bits: of ADD, and of loads and stores."""

    def write(content: bytearray, place: int, target: int) -> None:
        if target & ((1 << shift) - 1):
            raise RuntimeError("a constant of the kernel library is not aligned")
        _insert(content, place, (target & 0xFFF) >> shift << 10)

    return write


def _branch(content: bytearray, place: int, target: int) -> None:
    """The distance in instructions, 26 bits: of jumps and calls on ARM."""
    _insert(content, place, _signed(target - place >> 2, 26) & 0x3FFFFFF)


def _insert(content: bytearray, place: int, bits: int) -> None:
    """Set bits of an instruction, which are 0 before."""
    (instruction,) = struct.unpack_from("<I", content, place)
    struct.pack_into("<I", content, place, instruction | bits)


def _signed(value: int, bits: int) -> int:
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise RuntimeError("the kernel library is too large for its references")
    return value


X86_64 = Machine(
    1,
    {
        2: Relocation(_distance),  # PC32
        4: Relocation(_distance),  # PLT32
        9: Relocation(_distance, by_table=True),  # GOTPCREL
        41: Relocation(_distance, by_table=True),  # GOTPCRELX
        42: Relocation(_distance, by_table=True),  # REX_GOTPCRELX
    },
    bytes.fromhex("ff25 00000000"),  # jmp [rip + 0]
    ((2, Relocation(_distance), -4),),
)
AARCH64 = Machine(
    257,
    {
        261: Relocation(_distance),  # PREL32
        275: Relocation(_page),  # ADR_PREL_PG_HI21
        277: Relocation(_in_page(0)),  # ADD_ABS_LO12_NC
        278: Relocation(_in_page(0)),  # LDST8_ABS_LO12_NC
        282: Relocation(_branch),  # JUMP26
        283: Relocation(_branch),  # CALL26
        284: Relocation(_in_page(1)),  # LDST16_ABS_LO12_NC
        285: Relocation(_in_page(2)),  # LDST32_ABS_LO12_NC
        286: Relocation(_in_page(3)),  # LDST64_ABS_LO12_NC
        299: Relocation(_in_page(4)),  # LDST128_ABS_LO12_NC
        311: Relocation(_page, by_table=True),  # ADR_GOT_PAGE
        312: Relocation(_in_page(3), by_table=True),  # LD64_GOT_LO12_NC
    },
    bytes.fromhex("10000090 100240f9 00021fd6"),  # adrp x16, 0; ldr x16, [x16]; br x16
    ((0, Relocation(_page), 0), (4, Relocation(_in_page(3)), 0)),
)
MACHINES = {62: X86_64, 183: AARCH64}
"""By ELF's numbers of processors."""


# ELF objects.


def _structure(**fields: str) -> np.dtype[Any]:
    return np.dtype(list(fields.items()))


HEADER = _structure(
    ident="S16",
    type="<u2",
    machine="<u2",
    version="<u4",
    entry="<u8",
    segments="<u8",
    sections="<u8",
    flags="<u4",
    size="<u2",
    segment_size="<u2",
    segment_count="<u2",
    section_size="<u2",
    section_count="<u2",
    section_names="<u2",
)
SECTION = _structure(
    name="<u4",
    type="<u4",
    flags="<u8",
    address="<u8",
    offset="<u8",
    size="<u8",
    link="<u4",
    info="<u4",
    align="<u8",
    entry_size="<u8",
)
SYMBOL = _structure(name="<u4", info="u1", other="u1", section="<u2", value="<u8", size="<u8")
RELOCATION = _structure(offset="<u8", type="<u4", symbol="<u4", addend="<i8")
"""Structures of <elf.h>, 64 bits, little endian."""

PROGRAM, SYMBOLS, RELOCATIONS = 1, 2, 4
"""Types of sections."""
WRITABLE, LOADED, CODE = 1, 2, 4
"""Flags of sections."""
UNWINDING, CONSTANT_POINTERS = ".eh_frame", ".data.rel.ro"
"""Names of sections: unwinding tables; and constants with addresses, writable only until these are filled in."""
UNDEFINED, GLOBAL = 0, 1
"""The section of an undefined symbol, and the binding of one that other objects see."""


class Symbol(NamedTuple):
    name: str
    section: int
    value: int
    is_global: bool


class _Object:
    """An ELF object.

    symbols : all that have a name, and those of sections
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        if not data.startswith(b"\x7fELF\x02\x01"):
            raise RuntimeError("LLVM wrote no ELF object of 64 bits")
        self._header = np.frombuffer(data, HEADER, 1)[0]
        count, start = int(self._header["section_count"]), int(self._header["sections"])
        self._sections = np.frombuffer(data, SECTION, count, start)
        (table,) = np.flatnonzero(self._sections["type"] == SYMBOLS)
        names = self.content(self._sections["link"][table])
        self._all_symbols = [
            Symbol(_string(names, each["name"]), int(each["section"]), int(each["value"]), each["info"] >> 4 == GLOBAL)
            for each in np.frombuffer(self.content(table), SYMBOL)
        ]
        self.symbols = self._all_symbols[1:]  # the first one is no symbol

    def machine(self) -> Machine:
        """
        Raises:
            RuntimeError: there is no linker for it.
        """
        number = int(self._header["machine"])
        if number not in MACHINES:
            raise RuntimeError(f"there is no linker for ELF's machine {number}")
        return MACHINES[number]

    def content(self, section: Any) -> bytes:
        """The bytes of a section."""
        offset, size = (int(self._sections[field][section]) for field in ("offset", "size"))
        return self._data[offset : offset + size]

    def loaded(self) -> list[tuple[int, int]]:
        """Numbers and alignments of the sections that a block has, code first.

        Raises:
            RuntimeError: there are variables.
        """
        names = self.content(self._header["section_names"])
        found = []
        for number, section in enumerate(self._sections):
            name = _string(names, section["name"])
            if not section["flags"] & LOADED or not section["size"] or name == UNWINDING:
                continue
            is_constant = name.startswith(CONSTANT_POINTERS) or not section["flags"] & WRITABLE
            if section["type"] != PROGRAM or not is_constant:
                raise RuntimeError(f"kernels have no variables, but there is a section {name}")
            found.append((number, max(int(section["align"]), 1)))
        return sorted(found, key=lambda each: not self._sections["flags"][each[0]] & CODE)

    def references(self, section: int) -> Iterator[tuple[int, int, Symbol, int]]:
        """References in a section: where, type of relocation, symbol, and addend."""
        for table in np.flatnonzero((self._sections["type"] == RELOCATIONS) & (self._sections["info"] == section)):
            for each in np.frombuffer(self.content(table), RELOCATION):
                symbol = self._all_symbols[each["symbol"]]
                yield int(each["offset"]), int(each["type"]), symbol, int(each["addend"])


def _string(table: bytes, start: Any) -> str:
    return table[int(start) : table.index(b"\0", int(start))].decode()
