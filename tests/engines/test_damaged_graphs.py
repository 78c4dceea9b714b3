"""Graphs, found by `make fuzz`, that ONNX Runtime accepts but then fails to run or crashes on by a division by zero."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import ondevice
from ondevice.bundle import MANIFEST
from ondevice.engines.protocol import DraftStep, Outputs
from ondevice.errors import BundleCorruptError
from ondevice.generate.drafters.mtp import MtpDrafter
from ondevice.generate.drafters.protocol import DraftRequest

IDS = [2, 300, 301, 17]


def altered(bundle: Path, out: Path, graph: str, change: Callable[[onnx.GraphProto], None]) -> Path:
    """Copy a bundle to `out` with one graph changed and its size and hash in bundle.json corrected."""
    shutil.copytree(bundle, out)
    model = onnx.load_model(out / graph, load_external_data=False)
    change(model.graph)
    content = model.SerializeToString()
    (out / graph).write_bytes(content)
    data: dict[str, Any] = json.loads((out / MANIFEST).read_text())
    data["files"][graph] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (out / MANIFEST).write_text(json.dumps({**data, "sha256": None}))
    return out


@pytest.mark.needs("onnxruntime")
@pytest.mark.parametrize("graph", ["target.onnx", "drafter.onnx"])
@pytest.mark.parametrize("heads", [0, 1 << 62, -(1 << 63)])
def test_a_count_of_heads_that_is_zero_does_not_end_the_process(
    reference_bundle: Path, tmp_path: Path, graph: str, heads: int
) -> None:
    def change(found: onnx.GraphProto) -> None:
        node = next(node for node in found.node if node.op_type == "Attention")
        next(attribute for attribute in node.attribute if attribute.name == "kv_num_heads").i = heads

    broken = altered(reference_bundle, tmp_path / "broken", graph, change)
    with pytest.raises(BundleCorruptError, match="kv_num_heads of Attention is"):
        ondevice.load(broken, engine="ort")


@pytest.mark.needs("onnxruntime")
def test_keys_that_are_told_no_row_are_refused(reference_bundle: Path, tmp_path: Path) -> None:
    """Without this check there would be no error, but drafts would change the text."""

    def change(found: onnx.GraphProto) -> None:
        node = [node for node in found.node if node.op_type == "TensorScatter"][3]
        del node.input[2]

    broken = altered(reference_bundle, tmp_path / "broken", "target.onnx", change)
    with pytest.raises(BundleCorruptError, match="a TensorScatter has no write_index"):
        ondevice.load(broken, engine="ort")


@pytest.mark.needs("onnxruntime")
@pytest.mark.parametrize(("op", "axis"), [("RMSNormalization", -3), ("RMSNormalization", 0), ("TensorScatter", -1)])
def test_an_axis_that_mixes_rows_is_refused(reference_bundle: Path, tmp_path: Path, op: str, axis: int) -> None:
    """Without this check there would be no error for a norm, but drafts would change the text."""

    def change(found: onnx.GraphProto) -> None:
        node = next(node for node in found.node if node.op_type == op)
        next(attribute for attribute in node.attribute if attribute.name == "axis").i = axis

    broken = altered(reference_bundle, tmp_path / "broken", "target.onnx", change)
    with pytest.raises(BundleCorruptError, match=f"axis of {op} is {axis}"):
        ondevice.load(broken, engine="ort")


@pytest.mark.needs("onnxruntime")
def test_a_graph_that_fails_while_it_runs_is_one_line(reference_bundle: Path, tmp_path: Path) -> None:
    def change(found: onnx.GraphProto) -> None:
        node = next(node for node in found.node if node.op_type == "Attention")
        next(attribute for attribute in node.attribute if attribute.name == "q_num_heads").i = 3

    broken = altered(reference_bundle, tmp_path / "broken", "target.onnx", change)
    with pytest.raises(BundleCorruptError, match=r"onnxruntime cannot (load|run)") as caught:
        ondevice.load(broken, engine="ort").generate(IDS, max_new_tokens=3)
    assert "\n" not in str(caught.value)


@pytest.mark.needs("onnxruntime")
@pytest.mark.parametrize("message", ["", "out of memory\nin an allocation"])
def test_whatever_ends_the_opening_of_a_graph_is_one_line(
    reference_bundle: Path, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    """A C++ exception may have no message, or one of several lines."""

    def fail(*given: object, **options: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr("onnxruntime.InferenceSession", fail)
    with pytest.raises(BundleCorruptError, match=rf"\({message.partition(chr(10))[0] or 'RuntimeError'}\)") as caught:
        ondevice.load(reference_bundle, engine="ort")
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("logits", "candidates"),
    [
        ([np.nan, 1.0], [3, 4]),
        ([np.inf, 1.0], [3, 4]),
        ([-np.inf, -np.inf], [3, 4]),
        ([2.0, 1.0], [99, 4]),
        ([2.0, 1.0], [-1, 4]),
    ],
)
def test_a_damaged_drafter_drafts_nothing(logits: list[float], candidates: list[int]) -> None:
    class Session:
        exact_trees = True

        def draft_step(self, token: int, hidden: object, depth: int = 0) -> DraftStep:
            return DraftStep(np.array(candidates), np.array(logits, np.float32), np.zeros(2, np.float32))

    drafter = MtpDrafter(10)
    drafter.begin(IDS, Session())  # type: ignore[arg-type]
    drafter.observe([5], Outputs(np.zeros((1, 10), np.float32), np.zeros((1, 2), np.float32)), [0])
    assert len(drafter.draft(DraftRequest(4))) == 0
