"""The matrix products of E2B's vision tower in every form that ONNX Runtime has for them, and their errors.

    python -m benchmarks.media_products [--tokens 280] [--threads N] [--rounds 5]

A time is that of all products of the tower's 16 layers, with what surrounds them in that form: quantising rows, scaling
outputs. Attention is left out. An error is relative, of the outputs for rows in which 1 % of the channels are ten times
as large as the others.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from benchmarks.e2b_shape import VISION
from ondevice import machine
from ondevice.bundle_format import graph_io
from ondevice.cli.bench.tables import table
from ondevice_export.matrices import MAX_ACTIVATION, MAX_TRANSPOSED

FloatArray = NDArray[np.float32]
CONTRIB = "com.microsoft"


class Form(NamedTuple):
    """A way to compute y = x @ w.T: nodes that make `y` of `x`, and their constants."""

    nodes: list[Any]
    constants: dict[str, NDArray[Any]]


def float32(w: FloatArray) -> Form:
    return Form([helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)], {"w": w})


def in_blocks(w: FloatArray, block: int) -> Form:
    """MatMulNBits with 8 bits, which quantises activations in the same blocks."""
    rows, width = w.shape
    blocks = w.reshape(rows, width // block, block)
    scales = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    codes = (np.rint(blocks / scales) + 128).astype(np.uint8)
    node = helper.make_node(
        "MatMulNBits", ["x", "codes", "scales"], ["y"], domain=CONTRIB,
        K=width, N=rows, bits=8, block_size=block, accuracy_level=4,
    )  # fmt: skip
    return Form([node], {"codes": codes, "scales": scales[..., 0]})


def _codes(w: FloatArray, most: int) -> tuple[NDArray[np.int8], FloatArray]:
    """Codes of columns int8[width, rows], and a scale per column."""
    scales = np.abs(w).max(axis=1) / np.float32(most)
    return np.ascontiguousarray(np.rint(w / scales[:, None]).astype(np.int8).T), scales


def by_tensor(w: FloatArray) -> Form:
    """One step for all activations."""
    codes, scales = _codes(w, 64)
    node = helper.make_node("DynamicQuantizeMatMul", ["x", "codes", "scales"], ["y"], domain=CONTRIB)
    return Form([node], {"codes": codes, "scales": scales})


def by_tensor_unsigned(w: FloatArray) -> Form:
    """The same with unsigned weights, whose product needs no smaller codes on CPUs without dot products."""
    codes, scales = _codes(w, 127)
    zero = np.array(128, np.uint8)
    node = helper.make_node("DynamicQuantizeMatMul", ["x", "codes", "scales", "zero"], ["y"], domain=CONTRIB)
    return Form([node], {"codes": (codes.astype(np.int16) + 128).astype(np.uint8), "scales": scales, "zero": zero})


def by_row(w: FloatArray, *, activation: int = MAX_ACTIVATION, most: int = MAX_TRANSPOSED) -> Form:
    """A step per row of activations: the tower's form."""
    codes, scales = _codes(w, most)
    nodes = [
        helper.make_node("Abs", ["x"], ["magnitude"]),
        helper.make_node("ReduceMax", ["magnitude", "axis"], ["largest"], keepdims=1),
        helper.make_node("Mul", ["largest", "share"], ["steps"]),
        helper.make_node("Div", ["x", "steps"], ["scaled"]),
        helper.make_node("QuantizeLinear", ["scaled", "one", "zero"], ["quantised"]),
        helper.make_node(
            "MatMulIntegerToFloat", ["quantised", "codes", "one", "scales", "zero"], ["product"], domain=CONTRIB
        ),
        helper.make_node("Mul", ["product", "steps"], ["y"]),
    ]
    constants: dict[str, NDArray[Any]] = {
        "axis": np.array([-1], np.int64), "share": np.array(1 / activation, np.float32), "one": np.array(1, np.float32),
        "zero": np.array(activation, np.uint8), "codes": codes, "scales": scales,
    }  # fmt: skip
    return Form(nodes, constants)


def by_row_signed(w: FloatArray) -> Form:
    """A step per row, signed activations: MatMulInteger of two signed operands."""
    form = by_row(w, activation=127, most=127)
    nodes = [node for node in form.nodes if node.op_type != "MatMulIntegerToFloat"]
    nodes[4:5] = [
        helper.make_node("QuantizeLinear", ["scaled", "one", "zero"], ["quantised"]),
        helper.make_node("MatMulInteger", ["quantised", "codes"], ["sums"]),
        helper.make_node("Cast", ["sums"], ["floats"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", ["floats", "scales"], ["product"]),
    ]
    return Form(nodes, {**form.constants, "zero": np.array(0, np.int8)})


FORMS = {
    "float32": float32,
    "MatMulNBits, blocks of 32": lambda w: in_blocks(w, 32),
    "MatMulNBits, blocks of 256": lambda w: in_blocks(w, 256),
    "unsigned weights, one step": by_tensor_unsigned,
    "signed weights, one step": by_tensor,
    "signed weights, a step per row": by_row,
    "both signed, a step per row": by_row_signed,
}


def opened(form: Form, threads: int) -> ort.InferenceSession:
    constants = [numpy_helper.from_array(value, name) for name, value in form.constants.items()]
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None)
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    operators = [helper.make_opsetid(domain, version) for domain, version in graph_io.OPSETS.items()]
    graph = helper.make_graph(form.nodes, "product", [x], [y], constants)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    model = helper.make_model(graph, opset_imports=operators, ir_version=11)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def seconds_of(graph: ort.InferenceSession, x: FloatArray, rounds: int) -> list[float]:
    taken = []
    for _ in range(rounds + 1):  # the first one takes memory
        started = time.perf_counter()
        graph.run(["y"], {"x": x})
        taken.append(time.perf_counter() - started)
    return taken[1:]


def float_peak(threads: int, rounds: int = 5) -> float:
    """float32 multiplications and additions per second: the fastest of ONNX Runtime's products of several sizes."""
    best = 0.0
    for rows, width, columns in ((512, 512, 512), (2048, 512, 2048), (2520, 768, 768)):
        rng = np.random.default_rng(0)
        graph = opened(float32(rng.standard_normal((columns, width), np.float32)), threads)
        seconds = min(seconds_of(graph, rng.standard_normal((rows, width), np.float32), rounds))
        best = max(best, 2 * rows * width * columns / seconds)
    return best


def shapes() -> dict[tuple[int, int], int]:
    """(inputs, outputs) of a layer's matrices -> how many the tower has."""
    hidden, wide, heads = VISION.hidden_size, VISION.intermediate_size, VISION.query_heads * VISION.head_dim
    found: dict[tuple[int, int], int] = defaultdict(int)
    for shape in [(hidden, heads)] * 3 + [(heads, hidden)] + [(hidden, wide)] * 2 + [(wide, hidden)]:
        found[shape] += VISION.layers
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=280)
    parser.add_argument("--threads", type=int, default=machine.default_threads())
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args(arguments)
    rows = chosen.tokens * VISION.pool**2
    seconds: dict[str, float] = defaultdict(float)
    errors: dict[str, list[float]] = defaultdict(list)
    for (width, columns), count in shapes().items():
        rng = np.random.default_rng(width)
        w = rng.standard_normal((columns, width), np.float32) * np.float32(0.02)
        x = rng.standard_normal((rows, width), np.float32) * np.where(rng.random(width) < 0.01, 10, 1).astype(
            np.float32
        )
        exact = x @ w.T
        for name, make in FORMS.items():
            graph = opened(make(w), chosen.threads)
            seconds[name] += count * median(seconds_of(graph, x, chosen.rounds))
            (found,) = graph.run(["y"], {"x": x})
            errors[name].append(float(np.linalg.norm(found - exact) / np.linalg.norm(exact)))
    lines = [[name, f"{1e3 * seconds[name]:.0f}", f"{100 * max(errors[name]):.1f}"] for name in FORMS]
    print(table(["form", "ms", "error %"], lines, left={"form"}))
    print(f"\n{chosen.tokens} soft tokens, {rows} patches, {chosen.threads} threads, onnxruntime {ort.__version__}")


if __name__ == "__main__":
    main()
