"""GGUF files: types of tensors against the gguf package, and damaged files."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from ondevice.errors import CheckpointError
from ondevice_export.gguf.blocks import TYPES, read_blocks, to_float32
from ondevice_export.gguf.file import GgufFile
from tests.fixtures.published import published

_HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}  # fmt: skip
"""Where a block has fp16 numbers."""


def _bytes(name: str, rows: int, blocks: int) -> np.ndarray:
    """Random blocks of a type with finite numbers, uint8[rows, bytes]."""
    kind = next(kind for kind in TYPES.values() if kind.name == name)
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (rows, blocks, kind.bytes), np.uint8)
    for at in _HALVES[name]:
        numbers = rng.standard_normal((rows, blocks, 1)).astype(np.float16)
        data[..., at : at + 2] = numbers.view(np.uint8)
    if name == "MXFP4":
        data[..., 0] %= 255  # the exponent of NaN
    return data.reshape(rows, -1)


@pytest.mark.parametrize("name", _HALVES)
def test_quantised_types_are_those_of_the_gguf_package(name: str) -> None:
    kind = next(kind for kind in TYPES.values() if kind.name == name)
    data = _bytes(name, 5, 3)
    expected = gguf.dequantize(data, Kind[name])
    np.testing.assert_array_equal(to_float32(data, kind), expected)
    blocks = read_blocks(data, kind)
    assert blocks.codes.shape == (5, 3 * kind.weights // (16 if name == "Q6_K" else 32), blocks.codes.shape[2])
    assert (blocks.minimums is None) == (name not in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"))
    assert blocks.codes.max() < {"4": 16, "5": 32, "6": 64, "8": 256}[name.removeprefix("I").removeprefix("MXF")[1]]


def test_plain_types() -> None:
    values = np.array([[0.5, -3.0, 65504.0], [1e-7, 0.0, -1.0]], np.float32)
    half, brain = values.astype(np.float16), (values.view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(to_float32(values.view(np.uint8), TYPES[0]), values)
    np.testing.assert_array_equal(to_float32(half.view(np.uint8), TYPES[1]), half.astype(np.float32))
    expected = gguf.dequantize(brain.view(np.uint8), Kind.BF16)
    np.testing.assert_array_equal(to_float32(brain.view(np.uint8), TYPES[30]), expected)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A file with fields of every type and two tensors."""
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_string("text", "naïve ▁")
    writer.add_array("texts", ["a", "", "世界"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_bool("flag", True)
    writer.add_float32("third", 1 / 3)
    writer.add_uint64("large", 1 << 40)
    writer.add_tensor("first", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("second", gguf.quantize(np.ones((2, 3, 64), np.float32), Kind.Q8_0), raw_dtype=Kind.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "small.gguf"


def test_metadata_and_tensors(small: Path) -> None:
    file = GgufFile(small)
    assert file.metadata["text"] == "naïve ▁"
    assert file.metadata["texts"] == ["a", "", "世界"]
    np.testing.assert_array_equal(file.metadata["numbers"], [1, -2, 3])
    assert file.metadata["flag"] is True
    assert file.metadata["third"] == np.float32(1 / 3)
    assert file.metadata["large"] == 1 << 40
    first, second = file.entries["first"], file.entries["second"]
    assert (first.shape, second.shape, second.kind.name, second.rows) == ((3, 4), (2, 3, 64), "Q8_0", 6)
    np.testing.assert_array_equal(to_float32(file.read_rows(first, 1, 3), first.kind), [[4, 5, 6, 7], [8, 9, 10, 11]])
    file.close()


def _changed(find: bytes, new: bytes, behind: int = 0) -> Callable[[bytes], bytes]:
    """Replace the bytes that stand `behind` bytes after the end of the first `find`."""

    def change(content: bytes) -> bytes:
        at = content.index(find) + len(find) + behind
        return content[:at] + new + content[at + len(new) :]

    return change


_COUNT = struct.pack("<Q", 1 << 60)
_DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "empty": ("ends at byte 0|truncated", lambda content: b""),
    "magic": ("not a GGUF file", lambda content: b"GGML" + content[4:]),
    "version": ("version 9", lambda content: content[:4] + struct.pack("<I", 9) + content[8:]),
    "big-endian": ("big-endian", lambda content: content[:4] + struct.pack(">I", 3) + content[8:]),
    "tensors": ("claims .* tensors", lambda content: content[:8] + _COUNT + content[16:]),
    "fields": ("claims .* metadata fields", lambda content: content[:16] + _COUNT + content[24:]),
    "string": ("damaged", _changed(b"text" + struct.pack("<I", 8), _COUNT)),
    "list": ("claims .* items", _changed(b"texts" + struct.pack("<II", 9, 8), _COUNT)),
    "numbers": ("claims .* items", _changed(b"numbers" + struct.pack("<II", 9, 5), _COUNT)),
    "nested": ("is a list of type 9", _changed(b"numbers" + struct.pack("<I", 9), struct.pack("<I", 9))),
    "type of a field": ("unknown type 77", _changed(b"flag", struct.pack("<I", 77))),
    "no text": ("no UTF-8", _changed(b"text" + struct.pack("<IQ", 8, 10), b"\xff\xfe")),
    "twice": ("'texts' twice", lambda content: content.replace(b"third", b"texts")),
    "dimensions": ("9 dimensions", _changed(b"first", struct.pack("<I", 9))),
    "shape": ("with the shape", _changed(b"first" + struct.pack("<I", 2), _COUNT)),
    "zero": ("with the shape", _changed(b"first" + struct.pack("<I", 2), bytes(8))),
    "other type": ("IQ2_XXS, which is not read .only F32, F16", _changed(b"first", struct.pack("<I", 16), 20)),
    "unknown type": ("unknown type 999", _changed(b"first", struct.pack("<I", 999), 20)),
    "offset": ("no multiple of 32", _changed(b"first", struct.pack("<Q", 1), 24)),
    "far": ("truncated", _changed(b"second", struct.pack("<Q", 1 << 50), 32)),
    "overlap": ("overlaps", _changed(b"second", bytes(8), 32)),
    "cut": ("truncated", lambda content: content[:-1000]),
    "name": ("has a tensor named", lambda content: content.replace(b"first", b"fi\nst")),
}


@pytest.mark.parametrize("damage", _DAMAGES)
def test_a_damaged_file_is_refused_in_one_line(small: Path, damage: str) -> None:
    said, change = _DAMAGES[damage]
    small.write_bytes(change(small.read_bytes()))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=said) as caught:
            GgufFile(small)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert str(caught.value).isprintable()
    assert str(small) in str(caught.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(CheckpointError, match="cannot be opened"):
            GgufFile(path)


def test_every_cut_of_a_header_is_refused(small: Path) -> None:
    content = small.read_bytes()
    for size in range(0, len(content) - 64 * 6, 7):
        small.write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            GgufFile(small)


def test_opening_a_large_vocabulary_takes_little_memory() -> None:
    path = published("gemma3")
    tracemalloc.start()
    try:
        GgufFile(path).close()
        assert tracemalloc.get_traced_memory()[1] < 60 << 20
    finally:
        tracemalloc.stop()
