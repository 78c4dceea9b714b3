"""Experts of checkpoints that hold them one by one: the stacked tensors, read in pieces, and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.directory import SafetensorsCheckpoint

EXPERTS, INNER, WIDTH = 11, 4, 8
Tensors = dict[str, np.ndarray]


def one_by_one() -> Tensors:
    """The matrices of the experts of one layer, and another tensor."""
    rng = np.random.default_rng(0)
    shapes = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    found = {"model.layers.0.mlp.gate.weight": rng.standard_normal((EXPERTS, WIDTH), np.float32)}
    for number in range(EXPERTS):
        for name, shape in shapes.items():
            full = f"model.layers.0.mlp.experts.{number}.{name}_proj.weight"
            found[full] = rng.standard_normal(shape, np.float32)
    return found


def opened(directory: Path, tensors: Tensors) -> SafetensorsCheckpoint:
    """A checkpoint of two files, with the experts' matrices in both."""
    names = list(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in files.items():
        save_file({name: tensors[name] for name in own}, directory / file)
    index = {"weight_map": {name: file for file, own in files.items() for name in own}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text("{}")
    return SafetensorsCheckpoint(directory)


def test_experts_are_stacked_gate_above_up(tmp_path: Path) -> None:
    tensors, prefix = one_by_one(), "model.layers.0.mlp.experts"
    both = [[tensors[f"{prefix}.{each}.{name}_proj.weight"] for name in ("gate", "up")] for each in range(EXPERTS)]
    expected = {
        f"{prefix}.gate_up_proj": np.array(both).reshape(EXPERTS, 2 * INNER, WIDTH),
        f"{prefix}.down_proj": np.array([tensors[f"{prefix}.{each}.down_proj.weight"] for each in range(EXPERTS)]),
        "model.layers.0.mlp.gate.weight": tensors["model.layers.0.mlp.gate.weight"],
    }
    with opened(tmp_path, tensors) as checkpoint:
        assert set(checkpoint.names) == set(expected)
        for name, values in expected.items():
            assert checkpoint.shape(name) == values.shape
            np.testing.assert_array_equal(checkpoint.read(name), values)
            flat = values.reshape(-1, values.shape[-1])
            for start, stop in ((0, 1), (3, 5), (INNER, 2 * INNER), (7, len(flat)), (len(flat) - 1, len(flat))):
                np.testing.assert_array_equal(checkpoint.rows(name, start, stop), flat[start:stop])


@pytest.mark.parametrize("missing", ["3.up", "10.gate", "0.down"])
def test_an_expert_without_one_of_its_matrices(missing: str, tmp_path: Path) -> None:
    tensors = one_by_one()
    del tensors[f"model.layers.0.mlp.experts.{missing}_proj.weight"]
    number = missing.split(".", 1)[0]
    with pytest.raises(CheckpointError, match=rf"layers\.0\.mlp\.experts has not all matrices of expert {number}$"):
        opened(tmp_path, tensors)


def test_experts_of_different_shapes(tmp_path: Path) -> None:
    tensors = one_by_one()
    tensors["model.layers.0.mlp.experts.4.up_proj.weight"] = np.zeros((INNER + 1, WIDTH), np.float32)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts has experts of different shapes"):
        opened(tmp_path, tensors)
