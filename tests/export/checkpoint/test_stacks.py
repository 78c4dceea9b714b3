"""Experts of checkpoints that hold them one by one: the stacked tensors, read in pieces, and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.directory import SafetensorsCheckpoint
from ondevice_export.checkpoint.stacks import Taken

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


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("experts.4.up_proj.weight", np.zeros((), np.float32), "has experts of different shapes"),
        ("experts.4.up_proj.weight", np.zeros(WIDTH, np.float32), "has experts of different shapes"),
        ("experts.up_proj", np.zeros((EXPERTS, INNER, WIDTH), np.float32), "has the up of expert 0 twice"),
        (
            "experts.gate_up_proj",
            np.zeros((EXPERTS, 2 * INNER, WIDTH), np.float32),
            "single experts beside gate_up_proj",
        ),
        ("experts.down_proj", np.zeros((EXPERTS, WIDTH, INNER), np.float32), "single experts beside down_proj"),
    ],
)
def test_damaged_experts_are_named(name: str, values: np.ndarray, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        opened(tmp_path, {**one_by_one(), f"model.layers.0.mlp.{name}": values})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["experts.04.up_proj.weight", "experts.\u0664.up_proj.weight"])
def test_a_number_that_is_written_otherwise_is_no_expert(name: str, tmp_path: Path) -> None:
    """It took the place of expert 4 without a word."""
    tensors, own = one_by_one(), f"model.layers.0.mlp.{name}"
    tensors[own] = np.zeros((INNER, WIDTH), np.float32)
    with opened(tmp_path, tensors) as checkpoint:
        assert own in checkpoint
        found = checkpoint.read("model.layers.0.mlp.experts.gate_up_proj")[4, INNER:]
    np.testing.assert_array_equal(found, tensors["model.layers.0.mlp.experts.4.up_proj.weight"])


def test_a_tensor_of_no_experts_is_none_of_experts(tmp_path: Path) -> None:
    with opened(tmp_path, {"experts.gate_proj": np.zeros((0, INNER, WIDTH), np.float32)}) as checkpoint:
        assert checkpoint.names == ["experts.gate_proj"]


@pytest.mark.parametrize("shape", [(), (2 * WIDTH,), (1, 2 * WIDTH, WIDTH), (2 * WIDTH - 1, WIDTH), (0, WIDTH)])
def test_a_joined_matrix_of_another_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    with opened(tmp_path, {"x": np.zeros(shape, np.float32)}) as checkpoint:
        with pytest.raises(CheckpointError, match=r"^x has shape .* asks for 16 rows$"):
            checkpoint.split("", {"a": ("x", [Taken(0, WIDTH)]), "b": ("x", [Taken(WIDTH, 2 * WIDTH)])})
        assert checkpoint.names == ["x"]


def test_the_numbers_of_a_vector_in_another_order(tmp_path: Path) -> None:
    """As of biases, whose matrices have their rows in it."""
    numbers = np.arange(2 * WIDTH, dtype=np.float32)
    taken = [Taken(1, 2 * WIDTH, step=2), Taken(0, 2 * WIDTH, 3.0, step=2)]
    with opened(tmp_path, {"x": numbers}) as checkpoint:
        with pytest.raises(CheckpointError, match=r"^x has shape \[16\], .* asks for 8 rows$"):
            checkpoint.split("", {"x": ("x", taken[:1])})
        checkpoint.split("", {"x": ("x", taken)})
        assert checkpoint.shape("x") == numbers.shape
        np.testing.assert_array_equal(checkpoint.read("x"), [*numbers[1::2], *3 * numbers[::2]])


def test_a_joined_matrix_beside_one_of_its_parts(tmp_path: Path) -> None:
    with (
        opened(tmp_path, {name: np.zeros((WIDTH, WIDTH), np.float32) for name in "ax"}) as checkpoint,
        pytest.raises(CheckpointError, match="holds a beside x, which has the same rows"),
    ):
        checkpoint.split("", {"a": ("x", [Taken(0, WIDTH)])})


def test_what_is_read_whole_is_not_made_of_rows_of_others(tmp_path: Path) -> None:
    with opened(tmp_path, one_by_one()) as checkpoint, pytest.raises(CheckpointError, match="lies in several pieces"):
        checkpoint.dtype("model.layers.0.mlp.experts.down_proj")
