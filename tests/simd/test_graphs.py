"""Graphs that qualify, and what is said of those that do not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper, numpy_helper

from ondevice.bundle import Bundle
from ondevice.engines.simd.engine import SimdEngine
from ondevice.engines.simd.unsupported import UnsupportedGraphError
from ondevice.errors import BundleError
from ondevice_export import export

Change = Callable[[Any], None]


def first(graph: onnx.GraphProto, op: str) -> onnx.NodeProto:
    return next(node for node in graph.node if node.op_type == op)


def set_attribute(op: str, name: str, value: object) -> Change:
    def change(graph: onnx.GraphProto) -> None:
        node = first(graph, op)
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return change


def set_operator(op: str, other: str) -> Change:
    def change(graph: onnx.GraphProto) -> None:
        first(graph, op).op_type = other

    return change


def swap_inputs(op: str, left: int, right: int) -> Change:
    def change(graph: onnx.GraphProto) -> None:
        inputs = first(graph, op).input
        inputs[left], inputs[right] = inputs[right], inputs[left]

    return change


def add_to_a_norm(graph: onnx.GraphProto) -> None:
    """A norm's weight that is one number too long."""
    name = first(graph, "RMSNormalization").input[1]
    tensor = next(tensor for tensor in graph.initializer if tensor.name == name)
    tensor.CopyFrom(helper.make_tensor(name, 1, [tensor.dims[0] + 32], [1.0] * (tensor.dims[0] + 32)))


def add_to_itself(graph: onnx.GraphProto) -> None:
    """A layer whose input is its own output."""
    last = [node for node in graph.node if node.op_type == "Mul" and node.input[1].endswith("layer_scalar")][-1]
    added = next(node for node in graph.node if node.output[0] == last.input[0])
    added.input[0] = last.output[0]


def swap_rows_of_experts(graph: onnx.GraphProto) -> None:
    """Two experts get each other's rows."""
    split = next(node for node in graph.node if node.op_type == "Split" and len(node.output) > 2)
    split.output[0], split.output[1] = split.output[1], split.output[0]


def set_number(word: str, number: float) -> Change:
    """Change the first number of a tensor that lies in the graph."""

    def change(graph: onnx.GraphProto) -> None:
        tensor = next(tensor for tensor in graph.initializer if word in tensor.name and tensor.data_location == 0)
        array = numpy_helper.to_array(tensor).copy()
        array.reshape(-1)[0] = number
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))

    return change


def next_version(model: onnx.ModelProto) -> None:
    next(opset for opset in model.opset_import if not opset.domain).version += 1


def fix_the_keys(graph: onnx.GraphProto) -> None:
    """A cache of so many rows, and no others."""
    value = next(value for value in graph.input if value.name.endswith(".key"))
    value.type.tensor_type.shape.dim[1].Clear()
    value.type.tensor_type.shape.dim[1].dim_value = 100


def altered(source: Path, directory: Path, graph_name: str, change: Change, of: str = "graph") -> Bundle:
    """A copy of a bundle with one of its graphs changed, sizes and all; `of` a `model`, that is what changes."""
    copy = Path(shutil.copytree(source, directory / "altered"))
    model = onnx.load(copy / graph_name, load_external_data=False)
    change(model.graph if of == "graph" else model)
    onnx.save(model, copy / graph_name)
    manifest = json.loads((copy / "bundle.json").read_text("utf-8"))
    manifest["files"][graph_name]["size"] = (copy / graph_name).stat().st_size
    (copy / "bundle.json").write_text(json.dumps(manifest), "utf-8")
    return Bundle.open(copy)


@pytest.mark.parametrize("graph", ["target.onnx", "drafter.onnx"])
@pytest.mark.parametrize(
    "change",
    [
        set_attribute("MatMulNBits", "block_size", 64),
        set_attribute("MatMulNBits", "K", 1 << 40),
        set_attribute("MatMulNBits", "bits", 2),
        set_attribute("MatMulNBits", "weight_prepacked", 1),
        set_attribute("MatMulNBits", "accuracy_level", 1),
        set_attribute("Attention", "scale", 0.5),
        set_attribute("Attention", "is_causal", 1),
        set_attribute("Attention", "q_num_heads", 1 << 20),
        set_attribute("RotaryEmbedding", "interleaved", 1),
        set_attribute("RMSNormalization", "epsilon", 0.5),
        set_attribute("RMSNormalization", "stash_type", 10),
        set_attribute("Gelu", "approximate", "none"),
        set_attribute("GatherBlockQuantized", "gather_axis", 1),
        set_operator("Add", "Sub"),
        set_operator("Gelu", "Relu"),
        set_operator("Cos", "Sin"),
        swap_inputs("Attention", 1, 2),
        swap_inputs("RotaryEmbedding", 1, 2),
        swap_inputs("MatMulNBits", 1, 2),
        add_to_a_norm,
        add_to_itself,
        set_attribute("RMSNormalization", "epsilon", "small"),
        set_number("layer_scalar", float("nan")),
        set_number("norm.weight", float("inf")),
        set_number("float32.", float("inf")),
        set_number(".1.0_0.", 1e38),
        fix_the_keys,
    ],
)
def test_a_graph_that_computes_something_else_does_not_qualify(
    tiny: Path, tmp_path: Path, graph: str, change: Change
) -> None:
    with pytest.raises(BundleError) as raised:
        SimdEngine(altered(tiny, tmp_path, graph, change), threads=1)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        set_attribute("TopK", "axis", 0),
        set_attribute("TopK", "sorted", 0),
        set_attribute("Split", "axis", 1),
        set_attribute("Softmax", "axis", 0),
        set_attribute("ReduceSum", "keepdims", 0),
        set_attribute("Gemm", "transB", 0),
        set_operator("Equal", "Greater"),
        set_operator("Softmax", "Tanh"),
        set_operator("Div", "Mul"),
        swap_inputs("Slice", 1, 3),
        swap_inputs("Div", 0, 1),
        swap_rows_of_experts,
        set_number("per_expert_scale", float("nan")),
        set_number("int64.12.", 1),
    ],
)
def test_other_experts_do_not_qualify(bundles: dict[str, Bundle], tmp_path: Path, change: Change) -> None:
    with pytest.raises(UnsupportedGraphError) as raised:
        SimdEngine(altered(bundles["26b"].path, tmp_path, "target.onnx", change), threads=1)
    assert "\n" not in str(raised.value)


def test_operators_of_another_version_do_not_qualify(tiny: Path, tmp_path: Path) -> None:
    """They may mean something else by the same name; onnxruntime knows what."""
    with pytest.raises(UnsupportedGraphError, match=r"operators of ONNX 25, com\.microsoft 1\)"):
        SimdEngine(altered(tiny, tmp_path, "target.onnx", next_version, of="model"), threads=1)


def test_the_reason_is_one_line_that_names_the_way_out(tiny: Path, tmp_path: Path) -> None:
    bundle = altered(tiny, tmp_path, "target.onnx", set_operator("Gelu", "Relu"))
    with pytest.raises(UnsupportedGraphError, match=r"is made by Relu, not by Gelu\): use --engine ort"):
        SimdEngine(bundle, threads=1)


def test_float_weights_are_left_to_another_engine(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    source = bundles["e2b"].path.parent / "target"
    with pytest.raises(UnsupportedGraphError, match="weights are not quantised"):
        SimdEngine(Bundle.open(export(source, tmp_path / "float", quantize="none")), threads=1)


@pytest.mark.parametrize("head_bits", [4, 8])
@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_every_width_of_weights(bundles: dict[str, Bundle], tmp_path: Path, quantize: str, head_bits: int) -> None:
    source = bundles["e2b"].path.parent / "target"
    bundle = Bundle.open(export(source, tmp_path / "bundle", quantize=quantize, head_bits=head_bits))
    SimdEngine(bundle, threads=1).close()
