"""Bundles whose manifest describes another model than their graphs: refused before any memory is sized from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ondevice.bundle import Bundle
from ondevice.engines.choice import open_engine
from ondevice.errors import BundleCorruptError, BundleError
from tests.conftest import ENGINES

Change = Callable[[dict[str, Any]], None]


def changed(source: Path, directory: Path, change: Change) -> Path:
    """A copy of a bundle with another manifest."""
    copy = Path(shutil.copytree(source, directory / "changed"))
    manifest = json.loads((copy / "bundle.json").read_text("utf-8"))
    change(manifest)
    (copy / "bundle.json").write_text(json.dumps(manifest), "utf-8")
    return copy


def in_target(**fields: object) -> Change:
    return lambda manifest: manifest["target"].update(fields)


def in_drafter(**fields: object) -> Change:
    return lambda manifest: manifest["drafter"].update(fields)


def exchange(manifest: dict[str, Any]) -> None:
    """KV heads and their size, at the same product: rows of a cache stay as wide as they are."""
    for layer in manifest["target"]["layers"]:
        layer["kv_heads"], layer["head_dim"] = layer["head_dim"], layer["kv_heads"]


def halve_heads(manifest: dict[str, Any]) -> None:
    for layer in manifest["target"]["layers"]:
        layer["kv_heads"], layer["head_dim"] = 2 * layer["kv_heads"], layer["head_dim"] // 2


def widen_full_layers(manifest: dict[str, Any]) -> None:
    for layer in manifest["target"]["layers"]:
        if layer["kind"] == "full":
            layer["head_dim"] *= 2


def drop_the_last_layer(manifest: dict[str, Any]) -> None:
    del manifest["target"]["layers"][-1]


def share_one_more(manifest: dict[str, Any]) -> None:
    """A layer that owns a cache is said to read its predecessor's."""
    manifest["target"]["layers"][1]["kv_source"] = 0


def own_one_more(manifest: dict[str, Any]) -> None:
    last = len(manifest["target"]["layers"]) - 1
    manifest["target"]["layers"][last]["kv_source"] = manifest["drafter"]["full_layer"] = last


SHAPES = {
    "a larger vocabulary": in_target(vocab_size=6176),
    "a smaller vocabulary": in_target(vocab_size=6112),
    "a larger hidden state": in_target(hidden_size=224),
    "wider rows": widen_full_layers,
    "more candidates": in_drafter(candidates=4096),
    "another layer shares": share_one_more,
    "another layer owns": own_one_more,
}
"""What the inputs and outputs of the graphs contradict."""

NODES = {
    "heads and their size exchanged": exchange,
    "twice the heads, half as large": halve_heads,
    "more query heads": in_target(query_heads=8),
    "fewer layers": drop_the_last_layer,
    "a drafter that reads an earlier layer": in_drafter(sliding_layer=2),
}
"""What only the nodes contradict."""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("change", SHAPES.values(), ids=SHAPES.keys())
def test_shapes_that_contradict_bundle_json(
    reference_bundle: Path, tmp_path: Path, engine: str, change: Change
) -> None:
    with pytest.raises(BundleCorruptError, match=r"bundle\.json and (target|drafter)\.onnx disagree") as raised:
        open_engine(engine, Bundle.open(changed(reference_bundle, tmp_path, change)), threads=1)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("engine", ["auto", "simd"])
@pytest.mark.parametrize("change", NODES.values(), ids=NODES.keys())
def test_nodes_that_contradict_bundle_json(reference_bundle: Path, tmp_path: Path, engine: str, change: Change) -> None:
    """Nothing is left to `ort`: the bundle is damaged, whoever runs it."""
    with pytest.raises(BundleError) as raised:
        open_engine(engine, Bundle.open(changed(reference_bundle, tmp_path, change)), threads=1, kv_cache="int8")
    assert "\n" not in str(raised.value)


def test_a_borrower_s_heads_are_its_owner_s(reference_bundle: Path, tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["target"]["layers"][-1].update(kv_heads=128, head_dim=1)

    with pytest.raises(BundleCorruptError, match="layer 9 cannot read layer 4"):
        Bundle.open(changed(reference_bundle, tmp_path, change))


@pytest.mark.parametrize("engine", ENGINES)
def test_what_was_exported_agrees(reference_bundle: Path, engine: str) -> None:
    open_engine(engine, Bundle.open(reference_bundle), threads=1).close()
