"""Reading ONNX files: what the exporter writes, and what someone else might have."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ondevice.bundle import Bundle
from ondevice.engines.onnx.file import Bytes, Graph, read_graph
from ondevice.engines.onnx.protobuf import MalformedError, Message
from ondevice.errors import BundleCorruptError


def no_data(name: str) -> Bytes:
    raise BundleCorruptError(f"no {name} here")


def save(path: Path, **fields: Any) -> Path:
    """A graph of one node around some tensors."""
    node = helper.make_node("Gemm", ["x", "w"], ["y"], transB=1, alpha=0.5, domain="com.microsoft", mode="fast")
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("x", 1, [2])], [], **fields)
    onnx.save(helper.make_model(graph), path)
    return path


def external_tensor(offset: int, length: int, shape: list[int]) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name="w", data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "w.data"), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    return tensor


def test_nodes_and_attributes(tmp_path: Path) -> None:
    graph = read_graph(save(tmp_path / "g.onnx"), no_data)
    (node,) = graph.nodes
    assert (node.op, node.inputs, node.outputs) == ("com.microsoft.Gemm", ("x", "w"), ("y",))
    assert node.attributes == {"transB": 1, "alpha": 0.5, "mode": "fast"}
    assert graph.inputs == {"x": (2,)}
    assert graph.producers == {"y": node}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.uint8, np.int32])
def test_tensors_inside_the_file(tmp_path: Path, dtype: type[np.generic]) -> None:
    array = np.arange(-3, 3).astype(dtype).reshape(2, 3)
    listed = helper.make_tensor("listed", TensorProto.INT64, [2], [-1, 5])
    graph = read_graph(save(tmp_path / "g.onnx", initializer=[numpy_helper.from_array(array, "w"), listed]), no_data)
    np.testing.assert_array_equal(graph.tensors["w"], array)
    np.testing.assert_array_equal(graph.tensors["listed"], [-1, 5])


def test_tensors_beside_the_file(tmp_path: Path) -> None:
    path = save(tmp_path / "g.onnx", initializer=[external_tensor(8, 16, [2, 2])])
    data = np.arange(8, dtype=np.float32)
    graph = read_graph(path, lambda name: data.view(np.uint8))
    np.testing.assert_array_equal(graph.tensors["w"], [[2, 3], [4, 5]])


@pytest.mark.parametrize(
    ("offset", "length", "shape"),
    [
        (20, 16, [4]),
        (-4, 16, [4]),
        (0, 12, [4]),
        (0, 4 * 2**40, [2**40]),
        (0, 16, [-4]),
        (2, 16, [4]),
        (0, 0, [2**62, 2**62]),
    ],
)
def test_a_tensor_outside_its_data_file(tmp_path: Path, offset: int, length: int, shape: list[int]) -> None:
    path = save(tmp_path / "g.onnx", initializer=[external_tensor(offset, length, shape)])
    with pytest.raises(BundleCorruptError, match="tensor 'w'"):
        read_graph(path, lambda name: np.zeros(32, np.uint8))


def test_a_data_file_that_the_bundle_does_not_have(tmp_path: Path) -> None:
    path = save(tmp_path / "g.onnx", initializer=[external_tensor(0, 16, [4])])
    with pytest.raises(BundleCorruptError, match=r"no w\.data here"):
        read_graph(path, no_data)


def test_a_truncated_or_altered_file_is_an_error_and_never_a_crash(tmp_path: Path) -> None:
    whole = save(tmp_path / "g.onnx", initializer=[numpy_helper.from_array(np.ones(3, np.float32), "w")]).read_bytes()
    broken = tmp_path / "broken.onnx"
    rng = np.random.default_rng(0)
    for _ in range(300):
        data = bytearray(whole[: int(rng.integers(1, len(whole) + 1))])
        for _ in range(int(rng.integers(0, 4))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        broken.write_bytes(data)
        with contextlib.suppress(BundleCorruptError):
            assert isinstance(read_graph(broken, no_data), Graph)


def chained(path: Path, *edges: tuple[str, str]) -> Path:
    """A graph of nodes with one input and one output each."""
    nodes = [helper.make_node("Identity", [source], [target]) for source, target in edges]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [], [])), path)
    return path


@pytest.mark.parametrize("edges", [[("x", "x")], [("y", "x"), ("x", "y")], [("x", "y"), ("a", "x")]])
def test_nodes_that_cannot_run_in_their_order(tmp_path: Path, edges: list[tuple[str, str]]) -> None:
    """Circles among them, in which a walk from outputs to inputs would never end."""
    with pytest.raises(BundleCorruptError, match="before a node has written it"):
        read_graph(chained(tmp_path / "g.onnx", *edges), no_data)
    assert read_graph(chained(tmp_path / "g.onnx", ("a", "x"), ("x", "y"), ("x", "z")), no_data).producers.keys() == {
        "x", "y", "z",
    }  # fmt: skip


def test_more_dimensions_than_numpy_has(tmp_path: Path) -> None:
    with pytest.raises(BundleCorruptError, match="tensor 'w'"):
        read_graph(
            save(tmp_path / "g.onnx", initializer=[external_tensor(0, 4, [1] * 65)]), lambda name: np.zeros(4, np.uint8)
        )


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BundleCorruptError, match="cannot be read"):
        read_graph(tmp_path, no_data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x80" * 10 + b"\x01", "more than ten bytes"),
        (b"\x80", "ends inside a number"),
        (b"\x08", "ends inside a number"),
        (b"\x0a\xff\xff\xff\xff\x0f", "ends inside a field"),
        (b"\x0a\x02x", "ends inside a field"),
        (b"\x0d\x00\x00\x00", "ends inside a field"),
        (b"\x0b", "wire type 3"),
    ],
)
def test_malformed_wire_data(data: bytes, words: str) -> None:
    with pytest.raises(MalformedError, match=words):
        Message(memoryview(data))


def test_integers_are_signed_and_have_64_bits() -> None:
    for data, value in (
        (b"\x80" * 9 + b"\x01", -(1 << 63)),
        (b"\xff" * 8 + b"\x7f", (1 << 63) - 1),
        (b"\xff" * 9 + b"\x7f", -1),  # bits beyond are dropped
    ):
        assert Message(memoryview(b"\x08" + data)).integer(1) == value
        assert Message(memoryview(b"\x0a" + bytes([len(data)]) + data)).integers(1) == [value]


def test_a_number_is_no_string_and_a_string_is_text() -> None:
    message = Message(memoryview(b"\x08\x05" + b"\x12\x01\xff"))
    with pytest.raises(MalformedError, match="field 1 is a number"):
        message.string(1)
    with pytest.raises(MalformedError, match="field 2 is not UTF-8"):
        message.string(2)


def test_fields_that_nobody_reads_are_skipped() -> None:
    """Of every wire type: a number, eight bytes, a string, four bytes; then a field that is read."""
    message = Message(memoryview(b"\x08\x05" + b"\x11" + bytes(8) + b"\x1a\x02hi" + b"\x25" + bytes(4) + b"\x2a\x01x"))
    assert message.integer(1) == 5
    assert message.integer(2) == 0
    assert message.string(3) == "hi"
    assert message.floating(4) == 0.0
    assert message.string(5) == "x"


def test_a_float_that_is_none() -> None:
    eight_bytes = (1 << 32).to_bytes(8, "little")
    message = Message(memoryview(b"\x09" + eight_bytes + b"\x12\x01x"))
    for number in (1, 2):
        with pytest.raises(MalformedError, match=f"field {number} is not a float"):
            message.floating(number)
    assert message.floating(3) == 0.0


def test_what_the_exporter_writes_reads_as_onnx_reads_it(reference_bundle: Path) -> None:
    bundle = Bundle.open(reference_bundle)
    for name in ("target.onnx", "drafter.onnx"):
        ours = read_graph(reference_bundle / name, lambda file: np.memmap(bundle.graph(file), np.uint8, "r"))
        theirs = onnx.load(reference_bundle / name).graph
        assert [node.inputs for node in ours.nodes] == [tuple(node.input) for node in theirs.node]
        assert tuple(ours.outputs) == tuple(output.name for output in theirs.output)
        for tensor in theirs.initializer:
            np.testing.assert_array_equal(ours.tensors[tensor.name], numpy_helper.to_array(tensor))
