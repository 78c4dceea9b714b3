"""The graphs as the engines meet them: names, types, shapes, and where their weights lie."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto

from ondevice.bundle import Bundle
from ondevice.bundle_format import graph_io
from ondevice.bundle_format.interfaces import Interface
from ondevice_export import export
from ondevice_export.graph.graph_builder import GraphBuilder
from tests.export.conftest import Pair
from tests.fixtures.mxfp4 import save_in_mxfp4
from tests.fixtures.tiny_models import VOCAB

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
Signature = dict[str, tuple[int, list[int | str]]]


def signature(values: list[onnx.ValueInfoProto]) -> Signature:
    return {
        value.name: (
            value.type.tensor_type.elem_type,
            [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim],
        )
        for value in values
    }


@pytest.fixture(scope="module", params=["int4", "int4-affine", "int4-table", "mxfp4", "int8"])
def quantized(request: pytest.FixtureRequest, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quantized")
    if request.param == "mxfp4":
        target = save_in_mxfp4(pair.directory / "target", directory / "target", lambda name: "embed_tokens" not in name)
        return export(target, directory / "bundle", drafter=str(pair.directory / "drafter"))
    return export(pair.directory / "target", directory / "bundle", quantize=request.param)


def test_target_signature(pair: Pair) -> None:
    graph = onnx.load(pair.bundle / "target.onnx", load_external_data=False).graph
    target = Bundle.open(pair.bundle).manifest.target
    caches: Signature = {}
    for index in target.kv_layers():
        own = target.layers[index].mixer
        rows = {"full": "Sf", "sliding": "Ss"}[own.kind]
        for part in ("key", "value"):
            caches[graph_io.past(index, part)] = (FLOAT, [1, rows, own.kv_width])
    assert signature(graph.input) == {
        "token_ids": (INT64, ["T"]),
        "positions": (INT64, ["T"]),
        "wanted": (INT64, ["R"]),
        "full.write_index": (INT64, [1]),
        "sliding.write_index": (INT64, [1]),
        "full.mask": (BOOL, ["T", "Sf"]),
        "sliding.mask": (BOOL, ["T", "Ss"]),
        **caches,
    }
    assert signature(graph.output) == {
        "logits": (FLOAT, ["R", VOCAB]),
        "hidden": (FLOAT, ["R", target.hidden_size]),
        **{name.replace("past", "present"): entry for name, entry in caches.items()},
    }


def test_drafter_signature(pair: Pair) -> None:
    graph = onnx.load(pair.bundle / "drafter.onnx", load_external_data=False).graph
    manifest = Bundle.open(pair.bundle).manifest
    assert manifest.drafter is not None
    caches = {}
    for index in manifest.drafter.kv_layers():
        own = manifest.target.layers[index].mixer
        rows = {"full": "Sf", "sliding": "Ss"}[own.kind]
        for part in ("key", "value"):
            caches[f"past.{index}.{part}"] = (FLOAT, [1, rows, own.kv_width])
    hidden, candidates = manifest.target.hidden_size, manifest.drafter.candidates
    assert signature(graph.input) == {
        "token_id": (INT64, [1]),
        "hidden": (FLOAT, [1, hidden]),
        "position": (INT64, [1]),
        "full.mask": (BOOL, [1, "Sf"]),
        "sliding.mask": (BOOL, [1, "Ss"]),
        **caches,
    }
    assert len(caches) == 4
    assert signature(graph.output) == {
        "candidates": (INT64, [candidates]),
        "logits": (FLOAT, [candidates]),
        "next_hidden": (FLOAT, [1, hidden]),
    }


def test_an_operator_that_engines_refuse_is_not_written() -> None:
    with pytest.raises(ValueError, match=r"ConstantOfShape is not one of graph_io\.OPERATORS"):
        GraphBuilder("g", Interface({}, {})).op("ConstantOfShape")


@pytest.mark.parametrize("name", ["target.onnx", "drafter.onnx"])
def test_checker_accepts(pair: Pair, quantized: Path, name: str) -> None:
    for bundle in (pair.bundle, quantized):
        onnx.checker.check_model(str(bundle / name), full_check=True)


def test_the_token_table_is_stored_once(quantized: Path) -> None:
    """Head, embedding and the drafter's embedding are views of the same bytes."""
    places = set()
    for name in ("target.onnx", "drafter.onnx"):
        for tensor in onnx.load(quantized / name, load_external_data=False).graph.initializer:
            place = {entry.key: entry.value for entry in tensor.external_data}
            if place.get("location") == "target.onnx.data" and "embed_tokens.weight.q8" in tensor.name:
                places.add((name, tensor.name.rpartition("weight.")[2], place["offset"], place["length"]))
    assert {(graph, shape) for graph, shape, _, _ in places} == {
        ("target.onnx", "q8"),
        ("target.onnx", "q8.rows"),
        ("drafter.onnx", "q8.rows"),
    }
    assert len({place[2:] for place in places}) == 1


def test_manifest_names_every_file(quantized: Path) -> None:
    bundle = Bundle.open(quantized, verify_hashes=True)
    assert set(bundle.manifest.files) | {"bundle.json"} == {file.name for file in quantized.iterdir()}
