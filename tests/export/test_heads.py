"""Heads in an export: found, refused where they are another model's, and what a damaged directory is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ondevice.bundle import Bundle
from ondevice.errors import CheckpointError, PairMismatchError
from ondevice_export import export
from tests.fixtures.tiny_models import save_heads, save_target


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with heads beside it, and heads of another training."""
    directory = tmp_path_factory.mktemp("heads")
    save_target(directory / "target", "e2b")
    save_heads(directory / "heads", directory / "target", "e2b")
    save_target(directory / "others" / "target", "e2b", seed=9)
    save_heads(directory / "others" / "heads", directory / "others" / "target", "e2b")
    return directory


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "heads", tmp_path / "copy"))


def test_heads_beside_a_target_are_found(made: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(export(made / "target", tmp_path / "bundle", drafter="none"), verify_hashes=True)
    assert [(heads.kind, heads.offsets, heads.layer) for heads in bundle.manifest.heads] == [
        ("medusa", 3, None),
        ("blockwise", 3, None),
        ("exit", 1, 2),
    ]
    assert bundle.manifest.sources["heads"].id == "heads"
    for heads in bundle.manifest.heads:
        assert {heads.graph, f"{heads.graph}.data"} <= set(bundle.manifest.files)


def test_none_are_left_out(made: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(export(made / "target", tmp_path / "bundle", drafter="none", heads="none"))
    assert not bundle.manifest.heads
    assert not [name for name in bundle.manifest.files if "heads" in name]


def test_heads_of_other_weights_are_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(PairMismatchError, match=r"trained for 'tiny', whose weights are not those of '.*'"):
        export(made / "target", tmp_path / "bundle", drafter="none", heads=str(made / "others" / "heads"))
    assert not (tmp_path / "bundle").exists()


def test_those_that_are_only_found_are_left_out_with_a_note(made: Path, tmp_path: Path) -> None:
    """A target that was trained again, with its old heads still beside it."""
    shutil.copytree(made / "target", tmp_path / "target")
    shutil.copytree(made / "others" / "heads", tmp_path / "heads")
    notes: list[str] = []
    bundle = Bundle.open(export(tmp_path / "target", tmp_path / "bundle", drafter="none", note=notes.append))
    assert not bundle.manifest.heads
    assert any("no heads: the heads were trained for 'tiny'" in line for line in notes)


def edited(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "config.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.update(model_type="gemma4"), "model_type is 'gemma4'"),
        (lambda data: data.update(model_type=["x"]), "model_type is"),
        (lambda data: data["kinds"].update(mystery={}), "kinds has 'mystery'"),
        (lambda data: data.update(kinds={}), "kinds is empty"),
        (lambda data: data.update(kinds=[]), "kinds is"),
        (lambda data: data["kinds"]["medusa"].update(offsets=17), "offsets is 17"),
        (lambda data: data["kinds"]["medusa"].update(offsets=4), "has shape"),
        (lambda data: data["kinds"]["blockwise"].pop("width"), "width is missing"),
        (lambda data: data["kinds"]["exit"].update(layer=6), "layer is 6"),
        (lambda data: data["shortlist"].update(clusters=47), "47 clusters do not divide"),
        (lambda data: data["shortlist"].update(top=49), "top is 49"),
        (lambda data: data["shortlist"].update(clusters="many"), "clusters is 'many'"),
        (lambda data: data.update(target=7), "target is 7"),
    ],
)
def test_a_damaged_configuration_is_one_line(
    made: Path, copy: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    edited(copy, change)
    with pytest.raises(CheckpointError, match=words) as caught:
        export(made / "target", tmp_path / "bundle", drafter="none", heads=str(copy))
    assert "\n" not in str(caught.value)


def test_heads_for_another_size_name_both_models(made: Path, copy: Path, tmp_path: Path) -> None:
    edited(copy, lambda data: data["target"].update(name="gemma-4-E4B-it", hidden_size=2560))
    with pytest.raises(
        PairMismatchError, match=r"trained for 'gemma-4-E4B-it' \(hidden_size 2560\), not for '.+' \(64\)"
    ):
        export(made / "target", tmp_path / "bundle", drafter="none", heads=str(copy))


def test_a_target_whose_head_is_not_the_token_table(made: Path, tmp_path: Path) -> None:
    """They were trained through the one, and the graph would go through the other."""
    save_target(tmp_path / "target", "e2b", tie_word_embeddings=False)
    with pytest.raises(PairMismatchError, match="plain, tied token embedding"):
        export(tmp_path / "target", tmp_path / "bundle", drafter="none", heads=str(made / "heads"))


def test_an_order_that_names_a_token_twice(made: Path, copy: Path, tmp_path: Path) -> None:
    tensors = dict(load_file(copy / "model.safetensors"))
    tensors["shortlist.token_ordering"] = np.zeros_like(tensors["shortlist.token_ordering"])
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match="does not name 384 of 384 tokens once each"):
        export(made / "target", tmp_path / "bundle", drafter="none", heads=str(copy))


def test_heads_without_a_tensor(made: Path, copy: Path, tmp_path: Path) -> None:
    tensors = dict(load_file(copy / "model.safetensors"))
    del tensors["exit.block.weight"]
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"exit\.block\.weight is missing"):
        export(made / "target", tmp_path / "bundle", drafter="none", heads=str(copy))
