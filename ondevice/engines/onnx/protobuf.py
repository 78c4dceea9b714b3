"""Reads the protobuf wire format, as far as ONNX files use it. No length in a file is trusted."""

from __future__ import annotations

import struct
from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types: the three lowest bits of a field's key."""


class MalformedError(ValueError):
    """Bytes that are not what they claim to be."""


class Message:
    """The fields of one message by number; a field's values are in the order of the file."""

    def __init__(self, data: memoryview) -> None:
        self._fields: dict[int, list[int | memoryview]] = {}
        at = 0
        while at < len(data):
            key, at = varint(data, at)
            value, at = _value(data, at, key & 7)
            self._fields.setdefault(key >> 3, []).append(value)

    def integer(self, number: int, default: int = 0) -> int:
        """The last int64 of a field."""
        values = self.integers(number)
        return values[-1] if values else default

    def integers(self, number: int) -> list[int]:
        """All int64 of a field, packed or not."""
        found: list[int] = []
        for value in self._fields.get(number, []):
            if isinstance(value, int):
                found.append(_signed(value))
            else:
                found.extend(_packed(value))
        return found

    def floating(self, number: int) -> float:
        """The last float of a field, 0 where there is none."""
        value = self._fields.get(number, [0])[-1]
        if not isinstance(value, int) or value >= 1 << 32:
            raise MalformedError(f"field {number} is not a float")
        return float(struct.unpack("<f", value.to_bytes(4, "little"))[0])

    def bytes(self, number: int) -> list[memoryview]:
        """All byte strings of a field."""
        found = []
        for value in self._fields.get(number, []):
            if isinstance(value, int):
                raise MalformedError(f"field {number} is a number")
            found.append(value)
        return found

    def messages(self, number: int) -> Iterator[Message]:
        return (Message(value) for value in self.bytes(number))

    def message(self, number: int) -> Message:
        """The last message of a field, an empty one where there is none."""
        found = self.bytes(number)
        return Message(found[-1] if found else memoryview(b""))

    def strings(self, number: int) -> list[str]:
        try:
            return [bytes(value).decode() for value in self.bytes(number)]
        except UnicodeDecodeError as error:
            raise MalformedError(f"field {number} is not UTF-8 text") from error

    def string(self, number: int) -> str:
        """The last string of a field, an empty one where there is none."""
        found = self.strings(number)
        return found[-1] if found else ""


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """The unsigned number that begins at `at`, in groups of 7 bits, and the offset behind it."""
    result = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise MalformedError("the file ends inside a number")
        byte = data[at]
        at += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result & (2**64 - 1), at
    raise MalformedError("a number has more than ten bytes")


def _value(data: memoryview, at: int, kind: int) -> tuple[int | memoryview, int]:
    """The value of wire type `kind` that begins at `at`, and the offset behind it."""
    if kind == VARINT:
        return varint(data, at)
    if kind == BYTES:
        size, at = varint(data, at)
    elif kind in (FIXED32, FIXED64):
        size = 4 if kind == FIXED32 else 8
    else:
        raise MalformedError(f"wire type {kind}")
    if size > len(data) - at:
        raise MalformedError("the file ends inside a field")
    part = data[at : at + size]
    return (part if kind == BYTES else int.from_bytes(part, "little")), at + size


def _packed(data: memoryview) -> Iterator[int]:
    """The int64 of a packed field."""
    at = 0
    while at < len(data):
        value, at = varint(data, at)
        yield _signed(value)


def _signed(value: int) -> int:
    """The int64 of these 64 bits."""
    return value - 2**64 if value >= 2**63 else value
