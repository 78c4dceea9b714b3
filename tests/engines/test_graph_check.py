"""Checks of untrusted graphs: the files that they read, and the shapes of their inputs and outputs.

The files are checked before ONNX Runtime opens a graph, the shapes after.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from ondevice.bundle import MANIFEST, Bundle
from ondevice.engines import graph_check
from ondevice.engines.graph_check import Interface, MalformedError, Message, check_graph, check_interface
from ondevice.errors import BundleCorruptError

Change = Callable[[onnx.ModelProto], object]


@pytest.fixture
def copy(reference_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(reference_bundle, tmp_path / "copy", copy_function=os.link))


def replaced(bundle: Path, name: str, content: bytes) -> Bundle:
    """Replace a graph's bytes, correct its size and hash in bundle.json, and open the bundle."""
    (bundle / name).unlink()
    (bundle / name).write_bytes(content)
    data: dict[str, Any] = json.loads((bundle / MANIFEST).read_text())
    data["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (bundle / MANIFEST).unlink()
    (bundle / MANIFEST).write_text(json.dumps({**data, "sha256": None}))
    return Bundle.open(bundle)


def altered(bundle: Path, name: str, change: Change) -> Bundle:
    model = onnx.load(bundle / name, load_external_data=False)
    change(model)
    return replaced(bundle, name, model.SerializeToString())


def external(model: onnx.ModelProto) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.external_data)


def set_place(key: str, value: str) -> Change:
    def change(model: onnx.ModelProto) -> None:
        next(entry for entry in external(model).external_data if entry.key == key).value = value

    return change


def second_location(model: onnx.ModelProto) -> None:
    external(model).external_data.add(key="location", value="/etc/hostname")


def no_length(model: onnx.ModelProto) -> None:
    """Remove the length: ONNX Runtime would read to the end of the file."""
    tensor = external(model)
    kept = [entry for entry in tensor.external_data if entry.key != "length"]
    del tensor.external_data[:]
    tensor.external_data.extend(kept)


def hidden_in_an_attribute(model: onnx.ModelProto) -> None:
    """Put external weights into a node's attribute instead of the graph's initialisers."""
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[1], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="/etc/hostname")
    model.graph.node.append(helper.make_node("Constant", [], ["secret"], value=tensor))


def behind_another_type(model: onnx.ModelProto) -> None:
    hidden_in_an_attribute(model)
    model.graph.node[-1].attribute[0].type = onnx.AttributeProto.INT


def in_a_branch(model: onnx.ModelProto) -> None:
    branch = helper.make_graph([], "branch", [], [], [numpy_helper.from_array(np.zeros(1, np.float32), "w")])
    model.graph.node.append(helper.make_node("If", ["wanted"], ["y"], then_branch=branch, else_branch=branch))


def in_a_function(model: onnx.ModelProto) -> None:
    model.functions.append(helper.make_function("ondevice", "f", ["x"], ["y"], [], []))


def sparse(model: onnx.ModelProto) -> None:
    values = numpy_helper.from_array(np.ones(1, np.float32), "s")
    indices = numpy_helper.from_array(np.zeros(1, np.int64), "i")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_place("location", "../target.onnx.data"), r"lie in '\.\./target\.onnx\.data', which has no tensor table"),
        (set_place("location", "/etc/hostname"), "which has no tensor table"),
        (set_place("location", "tokenizer.json"), "which has no tensor table"),
        (set_place("location", ""), "which has no tensor table"),
        (set_place("offset", "-64"), "lie outside"),
        (set_place("offset", "x"), "lie outside"),
        (set_place("offset", str(1 << 62)), "lie outside"),
        (set_place("offset", "9" * 5000), "lie outside"),
        (set_place("length", str(1 << 40)), "lie outside"),
        (no_length, "lie outside"),
        (second_location, "which has no tensor table|lie in"),
        (hidden_in_an_attribute, "'value' of Constant is of an unknown type"),
        (behind_another_type, "'value' of Constant is of an unknown type"),
        (in_a_branch, "branch' of If is of an unknown type"),
        (in_a_function, "functions, training steps or sparse weights"),
        (sparse, "functions, training steps or sparse weights"),
    ],
)
@pytest.mark.parametrize("name", ["target.onnx", "drafter.onnx", "heads.medusa.onnx"])
def test_weights_come_from_the_data_files_alone(copy: Path, name: str, change: Change, words: str) -> None:
    bundle = altered(copy, name, change)
    with pytest.raises(BundleCorruptError, match=f"{words}.*: export the bundle again") as caught:
        check_graph(bundle.graph(name), bundle.manifest)
    assert str(caught.value).isprintable()


def test_two_graphs_in_a_file_are_not_made_one(copy: Path) -> None:
    """Protobuf merges repeated fields: the second graph would get the first one's weights too."""
    content = (copy / "target.onnx").read_bytes()
    bundle = replaced(copy, "target.onnx", content + content)
    with pytest.raises(BundleCorruptError, match="it has no graph, or several"):
        check_graph(bundle.graph("target.onnx"), bundle.manifest)


def test_a_truncated_or_altered_file_is_an_error_and_never_a_crash(copy: Path, reference_bundle: Path) -> None:
    manifest = Bundle.open(reference_bundle).manifest
    whole, path = (reference_bundle / "heads.exit.onnx").read_bytes(), copy / "broken.onnx"
    rng = np.random.default_rng(0)
    for _ in range(300):
        data = bytearray(whole[: int(rng.integers(1, len(whole) + 1))])
        for _ in range(int(rng.integers(0, 4))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        path.write_bytes(data)
        with contextlib.suppress(BundleCorruptError):
            check_graph(path, manifest)


def test_a_file_that_cannot_be_read(reference_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleCorruptError, match="cannot be read"):
        check_graph(tmp_path, Bundle.open(reference_bundle).manifest)


def test_a_file_that_is_too_large(reference_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_check, "MOST_BYTES", 1000)
    with pytest.raises(BundleCorruptError, match="more than 1000 bytes"):
        check_graph(reference_bundle / "target.onnx", Bundle.open(reference_bundle).manifest)


@pytest.mark.parametrize(
    "data",
    [b"\x08", b"\x08" + b"\xff" * 11, b"\x0a\x05ab", b"\x0d\0", b"\x0b", b"\x09\0\0", b"\xff" * 12],
    ids=["no value", "a number of eleven bytes", "a long length", "half a word", "a group", "a short word", "no key"],
)
def test_a_malformed_message(data: bytes) -> None:
    with pytest.raises(MalformedError):
        Message(memoryview(data))


def test_fields_of_a_message() -> None:
    message = Message(memoryview(b"\x08\x05\x08" + b"\xff" * 9 + b"\x01" + b"\x12\x02hi\x12\x01\xff"))
    assert message.integer(1) == -1, "the last counts, in two's complement"
    assert message.integer(7, 9) == 9
    assert [bytes(each) for each in message.bytes(2)] == [b"hi", b"\xff"]
    for wrong in (lambda: message.string(2), lambda: message.bytes(1), lambda: message.integer(2)):
        with pytest.raises(MalformedError):
            wrong()


@pytest.mark.needs("onnxruntime")
def test_a_graph_of_another_model(copy: Path) -> None:
    from ondevice.engines.ort import OrtEngine

    bundle = replaced(copy, "target.onnx", (copy / "drafter.onnx").read_bytes())
    with pytest.raises(
        BundleCorruptError, match=r"bundle\.json and target\.onnx disagree \(full\.key is in the graph alone"
    ):
        OrtEngine(bundle, threads=1)


def test_shapes_of_a_graph_are_compared() -> None:
    expected = Interface({"x": (1, None)}, {"y": (None, 64)})
    check_interface("g", Interface({"x": (1, 5)}, {"y": (None, 64)}), Interface({"x": (1, 5)}, {"y": (None, 64)}))
    check_interface("g", Interface({"x": (1, None)}, {"y": (None, None)}), expected)
    wrong = {
        r"y is \[\?, 65\], bundle\.json makes it \[\?, 64\]": Interface({"x": (1, None)}, {"y": (None, 65)}),
        r"x is \[1\], bundle\.json makes it \[1, \?\]": Interface({"x": (1,)}, {"y": (None, 64)}),
        r"z is in the graph alone": Interface({"x": (1, None), "z": ()}, {"y": (None, 64)}),
        r"y is in bundle\.json alone": Interface({"x": (1, None)}, {}),
    }
    for words, found in wrong.items():
        with pytest.raises(BundleCorruptError, match=f"bundle.json and g disagree .{words}"):
            check_interface("g", found, expected)
