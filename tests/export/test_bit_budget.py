"""A format for every matrix within a number of bits."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ondevice.bundle import Bundle
from ondevice.bundle_format.tensor_table import is_plain
from ondevice.bundle_format.weight_format import INT4, INT4_AFFINE, INT4_TABLE, INT8, WeightFormat
from ondevice.engines.choice import open_engine
from ondevice.engines.protocol import Rows, TokenTree
from ondevice.errors import UsageError
from ondevice_export import bit_budget, export
from ondevice_export.bit_budget import choose_formats, kind_of
from ondevice_export.checkpoint.models import TargetCheckpoint, open_target
from ondevice_export.checkpoint.source import locate
from tests.conftest import REFERENCE


@pytest.fixture
def target() -> object:
    with open_target(locate(str(REFERENCE / "target")), lambda _: None) as opened:
        yield opened


def average(target: TargetCheckpoint, chosen: dict[str, WeightFormat]) -> float:
    counts = {name: math.prod(target.shapes[name]) for name in chosen}
    return sum(counts[name] * form.stored_bits for name, form in chosen.items()) / sum(counts.values())


@pytest.mark.parametrize("bits", [4.5, 4.7, 5.0, 6.0, 8.5])
def test_the_budget_is_kept_and_used(target: TargetCheckpoint, bits: float) -> None:
    chosen = choose_formats(target, bits)
    assert set(chosen) == {name for name, shape in target.shapes.items() if not is_plain(name, shape)}
    assert bits - 0.2 < average(target, chosen) <= bits + 1e-9


def test_the_ends_are_one_format(target: TargetCheckpoint) -> None:
    assert set(choose_formats(target, 4.5).values()) == {INT4_TABLE}
    assert set(choose_formats(target, 8.5).values()) == {INT8}


def test_what_counts_most_gets_more(target: TargetCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of matrices that costs much more than the others has int8 before they have anything."""
    monkeypatch.setattr(bit_budget, "SENSITIVITY", {"down_proj": 1e5})
    downs = {name for name in target.shapes if kind_of(name) == "down_proj"}
    share = sum(math.prod(target.shapes[name]) for name in downs)
    total = sum(math.prod(shape) for name, shape in target.shapes.items() if not is_plain(name, shape))
    chosen = choose_formats(target, 4.5 + 4 * share / total + 1e-6)
    assert {name for name, form in chosen.items() if form.bits != 4} == downs
    assert {chosen[name] for name in downs} == {INT8}


def test_a_matrix_on_a_grid_stays_narrow(target: TargetCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """int4 reproduces it, so that more bits would be wasted."""
    name = next(name for name in target.shapes if kind_of(name) == "q_proj")
    real = type(target.checkpoint).rows

    def rows(self: object, asked: str, start: int, stop: int) -> object:
        found = real(self, asked, start, stop)  # type: ignore[arg-type]
        return np.clip(np.rint(found * 100), -8, 7).astype(np.float32) / 64 if asked == name else found

    monkeypatch.setattr(type(target.checkpoint), "rows", rows)
    assert choose_formats(target, 8.0)[name] == INT4


def test_an_export_has_the_chosen_formats(tmp_path: Path, target: TargetCheckpoint) -> None:
    """Also of the token table; both engines run it."""
    chosen = choose_formats(target, 5.2)
    assert len(set(chosen.values())) == 3
    out = export(REFERENCE / "target", tmp_path / "out", drafter="none", heads="none", bits_per_weight=5.2)
    bundle = Bundle.open(out)
    tensors = bundle.manifest.tensors["target.onnx"].tensors
    prefix = target.tensors.names.prefix
    assert {name: tensors[name.removeprefix(prefix)].weight_format for name in chosen} == chosen
    assert bundle.manifest.quantization.weights == "mixed"
    assert bundle.manifest.quantization.head_bits == chosen[f"{prefix}embed_tokens.weight"].bits
    found = []
    for name in ("simd", "ort"):
        engine = open_engine(name, bundle, 1)
        session = engine.open_session()
        [outputs] = engine.forward([Rows(session, TokenTree.chain([2, 30, 40, 50]), [3])])
        found.append(outputs.logits[0].copy())
        engine.close()
    assert np.corrcoef(*found)[0, 1] > 0.98


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"bits_per_weight": 4.4}, "choose a number from 4.5 to 8.5"),
        ({"bits_per_weight": 9}, "choose a number from 4.5 to 8.5"),
        ({"bits_per_weight": float("nan")}, "choose a number from 4.5 to 8.5"),
        ({"bits_per_weight": 5, "quantize": "int4"}, "leave --quantize and --head-bits out"),
        ({"bits_per_weight": 5, "head_bits": 4}, "leave --quantize and --head-bits out"),
        ({"quantize": "mixed"}, "quantize is 'mixed'"),
    ],
)
def test_mistakes(tmp_path: Path, options: dict[str, object], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        export(REFERENCE / "target", tmp_path / "out", drafter="none", **options)  # type: ignore[arg-type]


def test_affine_lies_between() -> None:
    assert INT4.stored_bits == INT4_TABLE.stored_bits < INT4_AFFINE.stored_bits < INT8.stored_bits
