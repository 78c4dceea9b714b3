"""Damaged and forged tensor tables, and tables of another configuration: refused before any memory is sized by them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.bundle import MANIFEST, Bundle
from ondevice.bundle_format.manifest import Manifest
from ondevice.bundle_format.tensor_table import ALIGNMENT, DRAFTER_CENTROIDS, DRAFTER_ORDERING
from ondevice.engines.choice import open_engine
from ondevice.errors import BundleCorruptError
from tests.conftest import ENGINES

Change = Callable[[dict[str, Any]], object]

QUERY, NORM, EMBEDDING = "layers.0.self_attn.q_proj.weight", "norm.weight", "embed_tokens.weight"


def changed(source: Path, directory: Path, change: Change) -> Path:
    """A copy of a bundle with another `bundle.json`; the other files are links."""
    copy = Path(shutil.copytree(source, directory / "changed", copy_function=os.link))
    manifest = json.loads((copy / MANIFEST).read_text("utf-8"))
    change(manifest)
    (copy / MANIFEST).unlink()
    (copy / MANIFEST).write_text(json.dumps(manifest), "utf-8")
    return copy


def tensors(data: dict[str, Any], graph: str = "target.onnx") -> dict[str, Any]:
    found: dict[str, Any] = data["tensors"][graph]["tensors"]
    return found


def in_tensor(name: str, **fields: object) -> Change:
    return lambda data: tensors(data)[name].update(fields)


def in_scales(name: str, **fields: object) -> Change:
    return lambda data: tensors(data)[name]["scales"].update(fields)


def with_minimums(name: str, **fields: object) -> Change:
    """Give a tensor minimums, in the place of its scales where no other is given."""
    return lambda data: tensors(data)[name].update(minimums={**tensors(data)[name]["scales"], **fields})


def without(name: str, field: str) -> Change:
    return lambda data: tensors(data)[name].pop(field)


def twice(data: dict[str, Any]) -> None:
    """Two tensors of one shape and format in one place."""
    tensors(data)["layers.1.mlp.up_proj.weight"] = tensors(data)["layers.0.mlp.up_proj.weight"]


def behind_the_end(data: dict[str, Any]) -> None:
    size = data["files"]["target.onnx.data"]["size"]
    tensors(data)[NORM]["offset"] = -(-size // ALIGNMENT) * ALIGNMENT


def one_byte_over_the_end(data: dict[str, Any]) -> None:
    """The last tensor of a file whose size, as listed and on the disk, ends within it."""
    last = max(tensors(data, "drafter.onnx").values(), key=lambda each: each["offset"])
    data["files"]["drafter.onnx.data"]["size"] = last["offset"] + last["bytes"] - 1


def renamed(data: dict[str, Any]) -> None:
    tensors(data)["layers.0.self_attn.query.weight"] = tensors(data).pop(QUERY)


def other_graph(data: dict[str, Any]) -> None:
    data["tensors"]["other.onnx"] = data["tensors"].pop("drafter.onnx")


def one_graph_for_both(data: dict[str, Any]) -> None:
    data["drafter"]["graph"] = "target.onnx"
    del data["tensors"]["drafter.onnx"]


TABLES: dict[str, tuple[Change, str]] = {
    "a tensor is missing": (lambda data: tensors(data).pop(QUERY), "q_proj.weight' of target.onnx is missing"),
    "a tensor is unknown": (
        lambda data: tensors(data).update(surprise=tensors(data)[NORM]),
        "'surprise' .* is unknown",
    ),
    "a tensor has another name": (renamed, "is (missing|unknown)"),
    "a table is missing": (lambda data: data["tensors"].pop("drafter.onnx"), "tensors of 'drafter.onnx' are missing"),
    "a table has another name": (other_graph, "tensors of '(drafter|other).onnx' are (missing|unknown)"),
    "no tables": (lambda data: data.update(tensors={}), "are missing"),
    "two models of one graph": (one_graph_for_both, "two models have one graph"),
    "a file that is not listed": (lambda data: data["tensors"]["target.onnx"].update(file="x"), "which is not listed"),
    "a file outside": (lambda data: data["tensors"]["target.onnx"].update(file="../x"), "which is not listed"),
    "another file": (lambda data: data["tensors"]["target.onnx"].update(file="tokenizer.json"), "lies outside"),
    "an odd offset": (in_tensor(NORM, offset=1), "odd offset 1"),
    "a negative offset": (in_tensor(NORM, offset=-ALIGNMENT), "not a whole number"),
    "an endless offset": (in_tensor(NORM, offset=1 << 70), "not a whole number"),
    "an offset that is true": (in_tensor(NORM, offset=True), "offset is True"),
    "an offset that is no whole number": (in_tensor(NORM, offset=64.0), "offset is 64.0"),
    "behind the end": (behind_the_end, "lies outside target.onnx.data"),
    "one tensor twice": (twice, "overlaps another"),
    "codes over scales": (in_scales(QUERY, offset=0), "overlaps another"),
    "scales far away": (in_scales(QUERY, offset=1 << 40), "lies outside"),
    "scales at a negative offset": (in_scales(QUERY, offset=-64), "not a whole number"),
    "fewer bytes": (in_tensor(QUERY, bytes=64), "has 64 bytes"),
    "endless bytes": (in_tensor(QUERY, bytes=1 << 63), "not a whole number"),
    "fewer scales": (in_scales(QUERY, bytes=64), "scales .* have 64 bytes"),
    "another shape": (in_tensor(QUERY, shape=[192, 192]), "has shape"),
    "no shape": (in_tensor(NORM, shape=[]), "has shape"),
    "an endless shape": (in_tensor(NORM, shape=[1 << 62]), "has shape"),
    "too many dimensions": (in_tensor(NORM, shape=[1] * 70), "has shape"),
    "a shape that is a number": (in_tensor(NORM, shape=192), "shape is 192"),
    "a shape of words": (in_tensor(NORM, shape=["192"]), "shape is"),
    "an unknown format": (in_tensor(QUERY, format="int3"), "format is 'int3'"),
    "another format": (in_tensor(QUERY, format="int8"), "bytes"),
    "a norm of 16 bits": (in_tensor(NORM, format="bfloat16", bytes=384), "is bfloat16"),
    "a norm of whole numbers": (in_tensor(NORM, format="int64", bytes=1536), "is int64"),
    "a norm with scales": (
        lambda data: tensors(data)[NORM].update(scales=tensors(data)[QUERY]["scales"]),
        "with scales",
    ),
    "codes without scales": (without(QUERY, "scales"), "without scales"),
    "larger blocks": (in_tensor(QUERY, block=64), "in blocks of 64"),
    "blocks below zero": (in_tensor(QUERY, block=-32), "not a whole number"),
    "a scale for each row": (in_tensor(QUERY, block=0), "bytes"),
    "an embedding in blocks of another size": (in_tensor(EMBEDDING, block=33), "in blocks of 33"),
    "half the scales": (in_scales(QUERY, dtype="float16"), "scales of float16"),
    "scales of whole numbers": (in_scales(QUERY, dtype="int8"), "dtype is 'int8'"),
    "minimums over scales": (with_minimums(QUERY), "overlaps another"),
    "minimums far away": (with_minimums(QUERY, offset=1 << 40), "its minimums.* lies outside"),
    "minimums at an odd offset": (with_minimums(QUERY, offset=1), "odd offset 1"),
    "minimums at a negative offset": (with_minimums(QUERY, offset=-64), "not a whole number"),
    "fewer minimums": (with_minimums(QUERY, bytes=64), "minimums .* have 64 bytes"),
    "half the minimums": (with_minimums(QUERY, dtype="float16"), "minimums of float16"),
    "minimums of a table of 8 bits": (with_minimums(EMBEDDING), "int8 in blocks of 32 with minimums"),
    "levels and minimums": (
        lambda data: (in_tensor(QUERY, format="int4-table")(data), with_minimums(QUERY)(data)),
        "int4-table in blocks of 32 with minimums",
    ),
    "levels with a scale for each row": (in_tensor(QUERY, format="int4-table", block=0), "int4-table in blocks of 0"),
    "a norm of levels": (in_tensor(NORM, format="int4-table"), "is int4-table"),
    "MXFP4 with minimums": (
        lambda data: (in_tensor(QUERY, format="mxfp4")(data), with_minimums(QUERY)(data)),
        "mxfp4 in blocks of 32 with minimums",
    ),
    "MXFP4 with a scale for each row": (in_tensor(QUERY, format="mxfp4", block=0), "mxfp4 in blocks of 0"),
    "a norm in MXFP4": (in_tensor(NORM, format="mxfp4"), "is mxfp4"),
    "minimums without scales": (
        lambda data: tensors(data)[NORM].update(minimums=tensors(data)[QUERY]["scales"]),
        "float32 in blocks of 0 with minimums",
    ),
    "a step without codes of rows": (in_tensor(QUERY, input_step=0.5), "has the steps"),
    "a step that is not a number": (in_tensor(QUERY, output_step=float("nan")), "has the steps"),
    "a step below zero": (in_tensor(QUERY, input_step=-1.0), "has the steps"),
    "a field is unknown": (in_tensor(QUERY, transposed=True), "unknown field 'transposed'"),
    "a field is missing": (without(QUERY, "offset"), "has no offset"),
    "a tensor that is a list": (lambda data: tensors(data).update({NORM: [1]}), "is \\[1\\]"),
    "an ordering of floats": (
        lambda data: tensors(data, "drafter.onnx")[DRAFTER_ORDERING].update(format="float32"),
        "is float32",
    ),
    "an ordering in blocks": (
        lambda data: tensors(data, "drafter.onnx")[DRAFTER_ORDERING].update(block=32),
        "int64 in blocks of 32",
    ),
    "centroids of 16 bits": (
        lambda data: tensors(data, "drafter.onnx")[DRAFTER_CENTROIDS].update(format="bfloat16"),
        "is bfloat16",
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("change", "words"), TABLES.values(), ids=TABLES.keys())
def test_a_table_that_no_export_has(
    reference_bundle: Path, tmp_path: Path, engine: str, change: Change, words: str
) -> None:
    path = changed(reference_bundle, tmp_path, change)
    with pytest.raises(BundleCorruptError, match=f"(?s){words}.*export the bundle again") as caught:
        open_engine(engine, Bundle.open(path), threads=1)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tensor_that_ends_behind_its_file(reference_bundle: Path, tmp_path: Path, engine: str) -> None:
    path = changed(reference_bundle, tmp_path, one_byte_over_the_end)
    size = json.loads((path / MANIFEST).read_text())["files"]["drafter.onnx.data"]["size"]
    data = (path / "drafter.onnx.data").read_bytes()
    (path / "drafter.onnx.data").unlink()
    (path / "drafter.onnx.data").write_bytes(data[:size])
    with pytest.raises(BundleCorruptError, match=r"lies outside drafter\.onnx\.data"):
        open_engine(engine, Bundle.open(path), threads=1)


def test_a_name_that_stands_there_twice(reference_bundle: Path, tmp_path: Path) -> None:
    """Python's own reader of JSON would take the last."""
    path = changed(reference_bundle, tmp_path, lambda data: None)
    text = (path / MANIFEST).read_text()
    entry = json.dumps(tensors(json.loads(text))[NORM])
    (path / MANIFEST).write_text(text.replace(f'"{NORM}": ', f'"{NORM}": {entry}, "{NORM}": ', 1))
    with pytest.raises(BundleCorruptError, match=f"'{NORM}' stands there twice"):
        Bundle.open(path)


def in_target(**fields: object) -> Change:
    return lambda data: data["target"].update(fields)


def in_layers(change: Callable[[dict[str, Any]], object]) -> Change:
    """Change every layer's attention and feed-forward block, given as one mapping."""

    def change_all(data: dict[str, Any]) -> None:
        for layer in data["target"]["layers"]:
            bodies = [block["body"] for block in layer["blocks"][:2]]
            both = {**bodies[1], **bodies[0]}
            change(both)
            for body in bodies:
                body.update({name: both[name] for name in body if name != "type"})

    return change_all


def attention(data: dict[str, Any], layer: int, model: str = "target") -> dict[str, Any]:
    found: dict[str, Any] = data[model]["layers"][layer]["blocks"][0]["body"]
    return found


def own_one_more(data: dict[str, Any]) -> None:
    last = len(data["target"]["layers"]) - 1
    attention(data, last).update(kv_source=None, k_norm=True, v_norm=True)
    for index, layer in enumerate(data["drafter"]["layers"]):
        if layer["blocks"][0]["body"]["window"] is None:
            attention(data, index, "drafter").update(kv_source=last)


def with_experts(data: dict[str, Any]) -> None:
    experts = {"count": 1 << 10, "top": 8, "intermediate_size": (1 << 31) - 1}
    data["target"]["layers"][0]["blocks"][1]["body"]["experts"] = experts


def with_wide_slices(data: dict[str, Any]) -> None:
    data["target"]["per_layer"].update(width=1 << 20, vocab_size=1 << 20)
    for layer in data["target"]["layers"]:
        layer["blocks"][2]["body"]["width"] = 1 << 20


def all_rotary(data: dict[str, Any], factor: float) -> None:
    rotary = data["target"]["rotary"]
    data["target"]["rotary"] = [(each * 2)[: int(factor * len(each))] for each in rotary]


def larger_heads(data: dict[str, Any], factor: float) -> None:
    all_rotary(data, factor)
    in_layers(lambda layer: layer.update(head_dim=int(factor * layer["head_dim"])))(data)


def exchanged(data: dict[str, Any]) -> None:
    heads = lambda layer: layer.update(  # noqa: E731
        kv_heads=layer["head_dim"], heads=layer["head_dim"] * layer["heads"], head_dim=layer["kv_heads"], rotary=None
    )
    in_layers(heads)(data)


def halved(data: dict[str, Any]) -> None:
    in_layers(lambda layer: layer.update(kv_heads=2 * layer["kv_heads"], heads=2 * layer["heads"]))(data)
    larger_heads(data, 0.5)


CONFIGURATIONS: dict[str, Change] = {
    "a larger vocabulary": in_target(vocab_size=6176),
    "a smaller vocabulary": in_target(vocab_size=6112),
    "a larger hidden state": in_target(hidden_size=224),
    "an endless hidden state": in_target(hidden_size=(1 << 31) - 1),
    "wider heads": lambda data: larger_heads(data, 2),
    "heads and their size exchanged": exchanged,
    "twice the heads, half as large": halved,
    "more query heads": in_layers(lambda layer: layer.update(heads=8)),
    "no norms of queries": in_layers(lambda layer: layer.update(q_norm=False)),
    "biases": in_layers(lambda layer: layer.update(bias=True)),
    "fewer layers": lambda data: data["target"]["layers"].pop(),
    "more layers": lambda data: data["target"]["layers"].append(data["target"]["layers"][-1]),
    "wider feed-forward blocks": in_layers(lambda layer: layer.update(width=1 << 30)),
    "another layer shares": lambda data: attention(data, 1).update(kv_source=0, k_norm=False, v_norm=False),
    "another layer owns": own_one_more,
    "no value projection": in_layers(lambda layer: layer.update(k_eq_v=True)),
    "a head of its own": in_target(tied=False),
    "experts": with_experts,
    "other per-layer embeddings": with_wide_slices,
    "more candidates": lambda data: data["drafter"].update(candidates=4096),
    "other clusters": lambda data: data["drafter"].update(shortlist={"clusters": 1, "top": 1}, candidates=6144),
    "a head over the whole vocabulary": lambda data: data["drafter"].update(shortlist=None, candidates=6144),
    "a wider drafter": lambda data: data["drafter"].update(hidden_size=4096),
    "a drafter with fewer layers": lambda data: data["drafter"]["layers"].pop(),
    "a drafter that reads a layer without a cache": lambda data: attention(data, 0, "drafter").update(kv_source=5),
    "a drafter with the target's head": lambda data: data["drafter"].update(target_head=True),
    "no drafter": lambda data: data.update(drafter=None),
    "no heads": lambda data: data.update(heads=[]),
    "more offsets": lambda data: data["heads"][0].update(offsets=7),
    "a borrower's heads": lambda data: attention(data, -1).update(kv_heads=128, head_dim=1),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("change", CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
def test_a_configuration_of_another_model(reference_bundle: Path, tmp_path: Path, engine: str, change: Change) -> None:
    with pytest.raises(BundleCorruptError, match="export the bundle again") as caught:
        open_engine(engine, Bundle.open(changed(reference_bundle, tmp_path, change)), threads=1)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("engine", ENGINES)
def test_what_was_exported_loads(reference_bundle: Path, engine: str) -> None:
    open_engine(engine, Bundle.open(reference_bundle), threads=1).close()


@pytest.mark.parametrize(
    ("graph", "name", "value"),
    [
        ("target.onnx", NORM, np.float32("nan")),
        ("target.onnx", "layers.3.layer_scalar", np.float32("inf")),
        ("drafter.onnx", "model.layers.0.self_attn.q_norm.weight", np.float32("-inf")),
        ("drafter.onnx", DRAFTER_CENTROIDS, np.float32("nan")),
        ("drafter.onnx", DRAFTER_ORDERING, np.int64(6144)),
        ("drafter.onnx", DRAFTER_ORDERING, np.int64(-1)),
    ],
)
@pytest.mark.parametrize("engine", ["auto", "simd"])
def test_numbers_that_no_model_has(
    reference_bundle: Path, tmp_path: Path, engine: str, graph: str, name: str, value: np.generic
) -> None:
    path = changed(reference_bundle, tmp_path, lambda data: None)
    manifest = Manifest.from_json((path / MANIFEST).read_text())
    table = manifest.tensors[graph]
    data = bytearray((path / table.file).read_bytes())
    offset = table.tensors[name].offset
    data[offset : offset + value.nbytes] = value.tobytes()
    (path / table.file).unlink()
    (path / table.file).write_bytes(data)
    with pytest.raises(BundleCorruptError, match=rf"tensor {name} holds numbers .*: export the bundle again"):
        open_engine(engine, Bundle.open(path), threads=1)
