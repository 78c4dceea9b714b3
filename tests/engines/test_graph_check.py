"""Checks of untrusted graphs before ONNX Runtime opens them, and what it does with these graphs by itself."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from ondevice.bundle import MANIFEST, Bundle
from ondevice.bundle_format.interfaces import (
    Interface,
    TensorSignature,
    drafter_interface,
    heads_interface,
    target_interface,
)
from ondevice.bundle_format.manifest import Manifest
from ondevice.engines import graph_check
from ondevice.engines.graph_check import (
    MalformedError,
    ProtobufMessage,
    check_graph,
    check_interface,
)
from ondevice.errors import BundleCorruptError

MEMORY, DEATH, REFUSED, RUNS = {"memory"}, {"dies"}, {"refused"}, {"runs"}
"""ONNX Runtime's ways with a graph that is not checked: it takes memory, ends the process, refuses or runs it."""

UNCHECKED = """
import os, sys
import ondevice, ondevice.model
from ondevice.engines import ort
from ondevice.errors import BundleCorruptError

ort.check_graph = lambda *_: None
for bundle in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            with ondevice.load(bundle, engine="ort", drafter="none") as model:
                model.generate([6000, 6000], max_new_tokens=1)
        except BundleCorruptError:
            os._exit(1)
        os._exit(0)
    _, status, used = os.wait4(child, 0)
    print(used.ru_maxrss << 10, {0: "runs", 1: "refused"}.get(os.waitstatus_to_exitcode(status), "dies"))
"""
"""Opens bundles without the check and runs two tokens; prints for each the most memory in bytes, and how it ended."""

Change = Callable[[onnx.ModelProto], object]


GIANT, LARGE = 1 << 27, 1 << 25
"""More numbers than the data files have bytes: 128 MB as bytes, and as float32."""


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


def expected_of(manifest: Manifest, name: str) -> Interface:
    """The interface of the graph with this file name."""
    target, drafter = manifest.target, manifest.drafter
    assert drafter is not None
    expected = {heads.graph: heads_interface(heads, target) for heads in manifest.heads}
    return (expected | {target.graph: target_interface(target), drafter.graph: drafter_interface(drafter, target)})[
        name
    ]


def check(bundle: Bundle, name: str) -> None:
    check_graph(bundle.graph(name), bundle.manifest, expected_of(bundle.manifest, name))


def refused(bundle: Bundle, words: str) -> None:
    """Check that the target's graph is refused with an error of these words."""
    with pytest.raises(BundleCorruptError, match=f"{words}.*: export the bundle again") as caught:
        check(bundle, "target.onnx")
    assert str(caught.value).isprintable()


def external(model: onnx.ModelProto) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.external_data)


def set_place(key: str, value: str) -> Change:
    def change(model: onnx.ModelProto) -> None:
        next(entry for entry in external(model).external_data if entry.key == key).value = value

    return change


def second_location(model: onnx.ModelProto) -> None:
    external(model).external_data.add(key="location", value="/etc/hostname")


def hidden_in_an_attribute(name: str) -> Change:
    """Put external weights into a node's attribute instead of the graph's initialisers."""

    def change(model: onnx.ModelProto) -> None:
        tensor = onnx.TensorProto(name="w", data_type=1, dims=[1], data_location=onnx.TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value="/etc/hostname")
        model.graph.node[0].attribute.append(helper.make_attribute(name, tensor))

    return change


def a_tensor_in_an_attribute(model: onnx.ModelProto) -> None:
    tensor = numpy_helper.from_array(np.zeros(1, np.float32), "w")
    model.graph.node[0].attribute.append(helper.make_attribute("__value", tensor))


def a_graph_in_an_attribute(model: onnx.ModelProto) -> None:
    """A graph that makes a large tensor, in an attribute whose name ONNX Runtime does not check."""
    size = numpy_helper.from_array(np.array([LARGE]), "size")
    node, out = helper.make_node("ConstantOfShape", ["size"], ["out"]), helper.make_tensor_value_info("out", 1, ["N"])
    inner = helper.make_graph([node], "branch", [], [out], [size])
    model.graph.node[0].attribute.append(helper.make_attribute("__branch", inner))


def behind_another_type(model: onnx.ModelProto) -> None:
    a_graph_in_an_attribute(model)
    model.graph.node[0].attribute[-1].type = onnx.AttributeProto.INT


def in_a_function(model: onnx.ModelProto) -> None:
    """A function that makes a large tensor, and a node that calls it."""
    size = helper.make_node("Constant", [], ["size"], value=numpy_helper.from_array(np.array([LARGE])))
    nodes, opset = [size, helper.make_node("ConstantOfShape", ["size"], ["y"])], helper.make_opsetid("", 21)
    model.functions.append(helper.make_function("ondevice", "f", ["x"], ["y"], nodes, [opset]))
    model.opset_import.append(helper.make_opsetid("ondevice", 1))
    model.graph.node.append(helper.make_node("f", ["wanted"], ["called"], domain="ondevice"))


def sparse(model: onnx.ModelProto) -> None:
    values = numpy_helper.from_array(np.ones(1, np.float32), "s")
    indices = numpy_helper.from_array(np.zeros(1, np.int64), "i")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [LARGE]))


def value(model: onnx.ModelProto, name: str) -> onnx.TypeProto.Tensor:
    """The type of an input or output."""
    found = (*model.graph.input, *model.graph.output)
    return next(value.type.tensor_type for value in found if value.name == name)


def set_dimension(name: str, at: int, size: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        value(model, name).shape.dim[at].dim_value = size

    return change


def another_type(model: onnx.ModelProto) -> None:
    value(model, "token_ids").elem_type = onnx.TensorProto.FLOAT


def a_sequence(model: onnx.ModelProto) -> None:
    kept = model.graph.input[0].type
    model.graph.input[0].type.CopyFrom(helper.make_sequence_type_proto(kept))


def an_output_twice(model: onnx.ModelProto) -> None:
    model.graph.output.append(model.graph.output[0])


def an_input_twice(model: onnx.ModelProto) -> None:
    model.graph.input.append(model.graph.input[0])


def an_input_with_a_value(model: onnx.ModelProto) -> None:
    """A shape that looks constant and is the sequence's length."""
    model.graph.initializer.append(numpy_helper.from_array(np.ones(1, np.int64), "full.write_index"))
    model.graph.initializer.append(numpy_helper.from_array(np.ones(1, np.float32), "one"))
    model.graph.node.append(helper.make_node("Expand", ["one", "full.write_index"], ["many"]))


def an_initialiser_twice(model: onnx.ModelProto) -> None:
    """The second one, a shape with a large number, is the one that ONNX Runtime takes."""
    first = inline(model)
    second = onnx.TensorProto()
    second.CopyFrom(first)
    set_number(GIANT)(model)
    first.raw_data, second.raw_data = second.raw_data, first.raw_data
    model.graph.initializer.append(second)


def shape_of_a_node(model: onnx.ModelProto) -> None:
    name = model.graph.node[0].output[0]
    model.graph.value_info.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [GIANT, 192]))


def inline(model: onnx.ModelProto) -> onnx.TensorProto:
    """An int64 vector in the graph file itself, the shape of a Reshape."""
    name = next(node for node in model.graph.node if node.op_type == "Reshape").input[1]
    del model.graph.value_info[:]
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def set_dims(which: Callable[[onnx.ModelProto], onnx.TensorProto], dims: list[int]) -> Change:
    def change(model: onnx.ModelProto) -> None:
        tensor = which(model)
        del tensor.dims[:]
        tensor.dims.extend(dims)

    return change


def set_type(which: Callable[[onnx.ModelProto], onnx.TensorProto], dtype: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        which(model).data_type = dtype

    return change


def not_external(model: onnx.ModelProto) -> None:
    external(model).data_location = onnx.TensorProto.DEFAULT


def external_in_name_alone(model: onnx.ModelProto) -> None:
    """ONNX Runtime takes the large number in the graph file, whatever place of external data is named."""
    set_number(GIANT)(model)
    inline(model).external_data.add(key="location", value="target.onnx.data")


def larger_than_its_file(model: onnx.ModelProto) -> None:
    """External data without a length: the shape alone says how much is read."""
    tensor = onnx.TensorProto(name="large", data_type=1, dims=[LARGE], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="target.onnx.data")
    model.graph.initializer.append(tensor)
    model.graph.node.append(helper.make_node("Relu", ["large"], ["not negative"]))


def values_in_another_field(model: onnx.ModelProto) -> None:
    set_number(GIANT)(model)
    tensor = inline(model)
    numbers = numpy_helper.to_array(tensor)
    tensor.ClearField("raw_data")
    tensor.int64_data.extend(numbers)


def half_a_number(model: onnx.ModelProto) -> None:
    inline(model).raw_data += b"1234"


def set_number(number: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        tensor = inline(model)
        numbers = numpy_helper.to_array(tensor).copy()
        numbers[0] = number
        tensor.raw_data = numbers.tobytes()

    return change


def added(op: str, *constants: object, domain: str = "") -> Change:
    """Add a node whose inputs are constants."""

    def change(model: onnx.ModelProto) -> None:
        names = [f"constant {number}" for number in range(len(constants))]
        arrays = zip(map(np.asarray, constants), names, strict=True)
        model.graph.initializer.extend(numpy_helper.from_array(array, name) for array, name in arrays)
        model.graph.node.append(helper.make_node(op, names, ["added"], domain=domain))

    return change


def attribute_of(op: str, name: str, number: int) -> Change:
    """Change an attribute of the first node with this operator."""

    def change(model: onnx.ModelProto) -> None:
        node = next(node for node in model.graph.node if node.op_type == op)
        next(attribute for attribute in node.attribute if attribute.name == name).i = number

    return change


def split_into(parts: int) -> Change:
    """Add a node that splits one row into two values, and a number of parts."""

    def change(model: onnx.ModelProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(np.ones((1, 8), np.float32), "row"))
        model.graph.node.append(helper.make_node("Split", ["row"], ["one", "two"], axis=-1, num_outputs=parts))

    return change


def no_write_index(model: onnx.ModelProto) -> None:
    del [node for node in model.graph.node if node.op_type == "TensorScatter"][3].input[2]


def set_repeats(*shape: int) -> Change:
    """Change how often a mask is repeated."""

    def change(model: onnx.ModelProto) -> None:
        name = next(node for node in model.graph.node if node.op_type == "Expand").input[1]
        tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
        tensor.raw_data = np.array(shape, np.int64).tobytes()

    return change


def a_computed_shape(model: onnx.ModelProto) -> None:
    next(node for node in model.graph.node if node.op_type == "Expand").input[1] = "token_ids"


HARMFUL: dict[str, tuple[Change, str, set[str]]] = {
    "a fixed dimension": (
        set_dimension("token_ids", 0, GIANT), r"token_ids is int64\[134217728\], bundle.json makes it", MEMORY
    ),
    "an initialiser twice": (an_initialiser_twice, "occurs twice, or is of an unknown type or place", MEMORY),
    "an initialiser that is an input": (an_input_with_a_value, "full.write_index is an initialiser too", RUNS),
    "a number that looks external": (external_in_name_alone, "unknown type or place", MEMORY),
    "numbers in another field": (values_in_another_field, "has no values, or part of a number", MEMORY),
    "a large number": (set_number(GIANT), "has a number above [0-9]+", MEMORY),
    "a tensor larger than its file": (larger_than_its_file, "is larger than the data files", MEMORY | REFUSED),
    "the shape of a node": (shape_of_a_node, "has a shape and is not an initialiser", MEMORY),
    "sparse": (sparse, "it has functions or sparse weights", MEMORY),
    "a function": (in_a_function, "it has functions or sparse weights", MEMORY),
    "a graph in an attribute": (a_graph_in_an_attribute, "'__branch' of .* is of an unknown type", MEMORY | DEATH),
    "Range": (
        added("Range", np.float32(0), np.float32(LARGE), np.float32(1)), "a Range does not count the vocabulary", MEMORY
    ),
    "Expand": (added("Expand", np.ones(1, np.float32), [1 << 12, 1 << 13]), "an Expand has no constant shape", MEMORY),
    "Pad": (added("Pad", np.ones((1, 1), np.float32), [0, 0, 1 << 12, 1 << 13]), "a Pad has no constant sizes", MEMORY),
    "ConstantOfShape": (
        added("ConstantOfShape", [1 << 12, 1 << 13]), "'ConstantOfShape' is not an operator of exported graphs", MEMORY
    ),
    "many parts": (split_into(LARGE), "num_outputs of Split is 33554432", MEMORY),
    "no heads": (attribute_of("Attention", "q_num_heads", 0), "q_num_heads of Attention is 0", DEATH | REFUSED),
    "no write_index": (no_write_index, "a TensorScatter has no write_index", RUNS),
    "a norm over the rows": (attribute_of("RMSNormalization", "axis", 0), "axis of RMSNormalization is 0", RUNS),
}  # fmt: skip
"""Graphs that this check refuses: how to make one, the error, and what ONNX Runtime 1.25 to 1.32 does with it."""


@pytest.mark.parametrize("case", HARMFUL)
def test_a_harmful_graph_is_refused(copy: Path, case: str) -> None:
    change, words, _ = HARMFUL[case]
    refused(altered(copy, "target.onnx", change), words)


@pytest.mark.needs("onnxruntime")
@pytest.mark.skipif(sys.platform != "linux", reason="measures the memory of a forked process")
def test_onnx_runtime_lets_harmful_graphs_through(reference_bundle: Path, tmp_path: Path) -> None:
    """A check whose graph ONNX Runtime refuses, in its lowest supported version too, can go."""
    bundles = [reference_bundle]
    for number, (change, _, _) in enumerate(HARMFUL.values()):
        made = Path(shutil.copytree(reference_bundle, tmp_path / str(number), copy_function=os.link))
        bundles.append(altered(made, "target.onnx", change).path)
    script = subprocess.run([sys.executable, "-c", UNCHECKED, *bundles], stdout=subprocess.PIPE, text=True, check=True)
    (usual, ended), *found = (line.split() for line in script.stdout.splitlines())
    assert ended == "runs"
    ends = [MEMORY if int(bytes_) > int(usual) + (64 << 20) else {end} for bytes_, end in found]
    assert [case for case, end in zip(HARMFUL, ends, strict=True) if not end <= HARMFUL[case][2]] == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_dimension("token_ids", 0, 0), r"token_ids is int64\[0\]"),
        (set_dimension("full.mask", 1, GIANT), r"full.mask is bool\[\?, 134217728\]"),
        (set_dimension("past.0.key", 1, GIANT), r"past.0.key is float32\[1, 134217728, 64\]"),
        (set_dimension("hidden", 1, GIANT), r"hidden is float32\[\?, 134217728\]"),
        (set_dimension("present.0.value", 1, GIANT), r"present.0.value is float32\[1, 134217728, 64\]"),
        (another_type, r"token_ids is float32\[\?\]"),
        (a_sequence, "'token_ids' occurs twice or is not a tensor"),
        (an_output_twice, "'logits' occurs twice"),
        (set_dims(external, [GIANT]), "is larger than the data files"),
        (set_dims(external, [1] * 70), "is larger than the data files"),
        (not_external, "unknown type or place"),
        (half_a_number, "has no values, or part of a number"),
        (set_number(-(1 << 63)), "has a number above [0-9]+"),
        (a_tensor_in_an_attribute, "'__value' of GatherBlockQuantized is of an unknown type"),
        (added("Range", 0, 6143, 1), "a Range does not count the vocabulary"),
        (added("Expand", np.ones(1, np.float32), [1 << 20, 1 << 20]), "an Expand has no constant shape"),
        (added("Expand", np.ones(1, np.float32)), "an Expand has no constant shape"),
        (added("Expand", np.ones(1, np.float32), [1] * 9), "an Expand has no constant shape"),
        (set_repeats(1 << 20, 4, 1), "an Expand has no constant shape or one too large"),
        (set_repeats(1, 5, 1), "an Expand has no constant shape or one too large"),
        (added("Expand", np.ones(2, np.float32), [5, 2]), "an Expand has no constant shape or one too large"),
        (a_computed_shape, "an Expand has no constant shape"),
        (split_into(1), "num_outputs of Split is 1"),
        (split_into(-1), "num_outputs of Split is -1"),
        (added("MatMulNBits", [1]), "'MatMulNBits' is not an operator of exported graphs"),
        (added("Add", [1], [1], domain="other"), "'Add' is not an operator of exported graphs"),
    ],
)  # fmt: skip
def test_a_graph_that_no_export_makes(copy: Path, change: Change, words: str) -> None:
    """Neighbours of the harmful graphs, and interfaces that engines do not size their buffers by."""
    refused(altered(copy, "target.onnx", change), words)


@pytest.mark.needs("onnxruntime")
@pytest.mark.parametrize(
    "change",
    [
        set_place("location", "../target.onnx.data"),
        set_place("location", "/etc/hostname"),
        set_place("location", "tokenizer.json"),
        set_place("location", "link"),
        set_place("location", ""),
        set_place("offset", "-64"),
        set_place("offset", "x"),
        set_place("offset", str(1 << 62)),
        set_place("offset", "9" * 5000),
        set_place("length", str(1 << 40)),
        set_place("length", "64"),
        second_location,
        set_dims(external, [-1]),
        set_dims(inline, [1 << 10]),
        set_type(external, onnx.TensorProto.FLOAT),
        set_type(inline, onnx.TensorProto.BOOL),
        an_input_twice,
        hidden_in_an_attribute("value"),
        hidden_in_an_attribute("__value"),
        behind_another_type,
    ],
)
def test_onnx_runtime_refuses_these_itself(copy: Path, monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Places outside the directory or the file, sizes that contradict each other, and attributes of other types."""
    from ondevice.engines import ort

    (copy / "link").symlink_to("/etc/hostname")
    bundle = altered(copy, "target.onnx", change)
    monkeypatch.setattr(ort, "check_graph", lambda *_: None)
    with pytest.raises(BundleCorruptError, match=r"onnxruntime cannot load .*: export the bundle again"):
        ort.open_graph(bundle, "target.onnx", expected_of(bundle.manifest, "target.onnx"), threads=1)


@pytest.mark.parametrize(
    ("op", "constants"),
    [
        ("Range", [0, 6144, 1]),
        ("Expand", [np.ones(1, np.float32), [1000, 1000]]),
        ("Expand", [np.array(1, np.float32), [1000, 1000]]),
        ("Expand", [np.zeros(768, np.int64), [4, 768]]),
    ],
    ids=["the vocabulary", "one number", "a scalar", "candidates"],
)
def test_sizes_that_an_export_may_have(copy: Path, op: str, constants: list[object]) -> None:
    check(altered(copy, "heads.medusa.onnx", added(op, *constants)), "heads.medusa.onnx")


@pytest.mark.parametrize("name", ["target.onnx", "drafter.onnx", "heads.medusa.onnx", "heads.blockwise.onnx"])
def test_graphs_as_exported(reference_bundle: Path, name: str) -> None:
    check(Bundle.open(reference_bundle), name)


def test_two_graphs_in_a_file_are_not_made_one(copy: Path) -> None:
    """Protobuf merges repeated fields: the second graph would get the first one's weights too."""
    content = (copy / "target.onnx").read_bytes()
    bundle = replaced(copy, "target.onnx", content + content)
    with pytest.raises(BundleCorruptError, match="field 7 has 2 messages"):
        check(bundle, "target.onnx")


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
            check_graph(path, manifest, expected_of(manifest, "heads.exit.onnx"))


def test_a_file_that_cannot_be_read(reference_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleCorruptError, match="cannot be read"):
        check_graph(tmp_path, Bundle.open(reference_bundle).manifest, Interface({}, {}))


def test_a_file_that_is_too_large(reference_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_check, "MAX_BYTES", 1000)
    with pytest.raises(BundleCorruptError, match="more than 1000 bytes"):
        check(Bundle.open(reference_bundle), "target.onnx")


@pytest.mark.parametrize(
    "data",
    [b"\x08", b"\x08" + b"\xff" * 11, b"\x0a\x05ab", b"\x0d\0", b"\x0b", b"\x09\0\0", b"\xff" * 12],
    ids=["no value", "a number of eleven bytes", "a long length", "half a word", "a group", "a short word", "no key"],
)
def test_a_malformed_message(data: bytes) -> None:
    with pytest.raises(MalformedError):
        ProtobufMessage(memoryview(data))


def test_fields_of_a_message() -> None:
    message = ProtobufMessage(memoryview(b"\x08\x05\x08" + b"\xff" * 9 + b"\x01" + b"\x12\x02hi\x12\x01\xff"))
    assert message.integer(1) == -1, "the last counts, in two's complement"
    assert message.integers(1) == (5, -1)
    assert message.integer(7) == 0
    assert message.fields == {1, 2}
    assert [bytes(each) for each in message.bytes(2)] == [b"hi", b"\xff"]
    for wrong in (
        lambda: message.string(2), lambda: message.bytes(1), lambda: message.integer(2), lambda: message.message(2)
    ):  # fmt: skip
        with pytest.raises(MalformedError):
            wrong()


@pytest.mark.parametrize("data", [b"\x0d\x01\0\0\0", b"\x09\x01" + b"\0" * 7])
def test_a_number_of_fixed_width_is_not_read(data: bytes) -> None:
    """A protobuf reader that knows the field as a varint or as bytes skips such a number."""
    message = ProtobufMessage(memoryview(data))
    for wrong in (lambda: message.integer(1), lambda: message.bytes(1)):
        with pytest.raises(MalformedError):
            wrong()


@pytest.mark.needs("onnxruntime")
def test_a_graph_of_another_model(copy: Path) -> None:
    from ondevice.engines.ort import OrtEngine

    bundle = replaced(copy, "target.onnx", (copy / "drafter.onnx").read_bytes())
    with pytest.raises(BundleCorruptError, match=r"bundle\.json and target\.onnx disagree \(full\.mask is bool"):
        OrtEngine(bundle, threads=1)


def test_interfaces_of_a_graph_are_compared() -> None:
    x, y = TensorSignature("float32", (1, "?")), TensorSignature("int64", ("?", 64))
    expected = Interface({"x": x}, {"y": y})
    check_interface("g", Interface({"x": x}, {"y": y}), expected)
    wrong = {
        r"y is int64\[\?, 65\], bundle\.json makes it int64\[\?, 64\]": Interface(
            {"x": x}, {"y": TensorSignature("int64", ("?", 65))}
        ),
        r"y is int64\[\?, \?\], bundle\.json makes": Interface({"x": x}, {"y": TensorSignature("int64", ("?", "?"))}),
        r"x is float32\[1\], bundle\.json makes it float32\[1, \?\]": Interface(
            {"x": TensorSignature("float32", (1,))}, {"y": y}
        ),
        r"x is float32\[1, 5\], bundle\.json makes": Interface({"x": TensorSignature("float32", (1, 5))}, {"y": y}),
        r"x is int64\[1, \?\], bundle\.json makes": Interface({"x": TensorSignature("int64", (1, "?"))}, {"y": y}),
        r"x is type 77\[1, \?\], bundle\.json makes": Interface({"x": TensorSignature("type 77", (1, "?"))}, {"y": y}),
        r"'z\\n' is in the graph alone": Interface({"x": x, "z\n": x}, {"y": y}),
        r"'y' is in bundle\.json alone": Interface({"x": x}, {}),
    }
    for words, found in wrong.items():
        with pytest.raises(BundleCorruptError, match=f"bundle.json and g disagree .{words}"):
            check_interface("g", found, expected)
