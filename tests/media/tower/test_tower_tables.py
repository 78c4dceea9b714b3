"""The tensor tables of all towers: one rule for their formats, and their sizes before they are written."""

from __future__ import annotations

import dataclasses
import math

import pytest

from ondevice.bundle import Bundle
from ondevice.bundle_format.audio import audio_shapes
from ondevice.bundle_format.checks import InvalidFieldError
from ondevice.bundle_format.tensor_table import ALIGNMENT, Scales, Shapes, Tensor, TensorTable, check_tables
from ondevice.bundle_format.vision import vision_shapes
from ondevice_export.export_options import ExportOptions
from ondevice_export.graph_files import estimate_bytes
from tests.fixtures.tiny_models import SEEING

FAR = 1 << 30
"""Offset of scales beyond any tensor of a tiny tower."""


def shapes_of(bundle: Bundle) -> dict[str, Shapes]:
    """By graph, the tensors that a tower has by the configuration."""
    manifest, found = bundle.manifest, dict[str, Shapes]()
    if manifest.vision is not None:
        found[manifest.vision.graph] = vision_shapes(manifest.vision, manifest.target)
    if manifest.audio is not None:
        found[manifest.audio.graph] = audio_shapes(manifest.audio, manifest.target)
    return found


def check(name: str, tensor: Tensor) -> None:
    """Check a table with this tensor alone."""
    table = TensorTable("data", {name: tensor})
    check_tables({"graph": table}, {"graph": {name: tensor.shape}}, {"data": 2 * FAR})


def stored(name: str, shape: tuple[int, ...], form: str, block: int = 0) -> Tensor:
    """A tensor in a format, with scales if it is quantised."""
    bits = {"int4": 4, "int8": 8, "bfloat16": 16, "float32": 32}[form]
    rows, width = math.prod(shape[:-1]), shape[-1]
    scales = Scales("float32", FAR, 4 * rows * (width // block if block else 1)) if bits <= 8 else None
    return Tensor(shape, form, 0, math.prod(shape) * bits // 8, block, scales)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", SEEING)
def test_one_rule_for_all_towers(seeing: dict[tuple[str, str], Bundle], family: str) -> None:
    """Linear layers are float32, or int8 with a scale per row, of any width; all other tensors are float32."""
    for graph, shapes in shapes_of(seeing[family, "int8"]).items():
        assert set(shapes) == set(seeing[family, "int8"].manifest.tensors[graph].tensors)
        for name, shape in shapes.items():
            refused = [("bfloat16", 0), ("int8", 32), ("int4", 0), ("int4", 32)]
            check(name, stored(name, shape, "float32"))
            if ".linear." in name:
                check(name, stored(name, shape, "int8"))
                check(name, stored(name, (*shape[:-1], 40), "int8"))
            else:
                refused.append(("int8", 0))
            for form, block in refused:
                with pytest.raises(InvalidFieldError, match=f"tensor {name} is {form} in blocks of {block}"):
                    check(name, stored(name, shape, form, block))


def test_an_exported_audio_tower_of_any_width_is_read(
    seeing: dict[tuple[str, str], Bundle],
) -> None:
    """Layers of 40 elements, of which 32 is no divisor, in every linear layer that reads them."""
    manifest = seeing["seeing", "int8"].manifest
    assert manifest.audio is not None
    audio = dataclasses.replace(manifest.audio, hidden_size=40)
    for name, shape in audio_shapes(audio, manifest.target).items():
        check(name, stored(name, shape, "int8" if ".linear." in name else "float32"))


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("family", SEEING)
def test_the_room_that_towers_need_is_known(seeing: dict[tuple[str, str], Bundle], family: str, quantize: str) -> None:
    """Before they are written: scales included, and what stays float32."""
    bundle = seeing[family, quantize]
    for graph, shapes in shapes_of(bundle).items():
        table = bundle.manifest.tensors[graph]
        sizes = [
            size for each in table.tensors.values() for size in (each.bytes, each.scales.bytes if each.scales else 0)
        ]
        assert estimate_bytes(shapes, ExportOptions(quantize=quantize).tower_formats) == sum(sizes)
        written = (bundle.path / table.file).stat().st_size
        assert sum(sizes) <= written <= sum(sizes) + ALIGNMENT * len(sizes)
