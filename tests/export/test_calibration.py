"""Rounding that knows the inputs of a matrix: the moments, scales, feedback, and exports with a text or a matrix."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from ondevice.bundle import MANIFEST, Bundle
from ondevice.bundle_format.weight_format import INT4, INT4_AFFINE, INT4_TABLE, WeightFormat
from ondevice.engines.ort import OrtEngine
from ondevice.engines.simd.layer_inputs import LayerInputs, Show
from ondevice.engines.simd.tensor_files import UnsupportedGraphError
from ondevice.errors import CheckpointError, PromptError, UsageError
from ondevice.quality import measure, text_ids
from ondevice_export import export
from ondevice_export.calibration import rounding, source
from ondevice_export.calibration.round_block import nearest_code
from ondevice_export.calibration.rounding import Grid, Moments, feedback, round_rows, symmetric
from ondevice_export.calibration.source import TEXT, ImportanceMatrix
from ondevice_export.calibration.unfinished import unfinished_export
from ondevice_export.data_file import DataFile
from ondevice_export.matrices import MatrixWriter
from ondevice_export.quantize import BLOCK, dequantize, quantize
from tests.conftest import REFERENCE
from tests.fixtures.mxfp4 import save_in_mxfp4

GRIDS = {form.name: Grid.of(form) for form in (INT4, INT4_AFFINE, INT4_TABLE)}
Floats = NDArray[np.float32]


def some_inputs(count: int, width: int) -> Floats:
    """Inputs that depend on each other, of very different sizes."""
    random = np.random.default_rng(7)
    mixed = random.standard_normal((count, width // 4)) @ random.standard_normal((width // 4, width))
    return ((mixed + 0.3 * random.standard_normal((count, width))) * random.lognormal(0, 1, width)).astype(np.float32)


def moments_of(inputs: Floats) -> Moments:
    moments = Moments.zeros(inputs.shape[1])
    moments.add(inputs)
    return moments


def values(grid: Grid, rounded: tuple[NDArray[np.uint8], Floats, Floats | None]) -> Floats:
    """The weights that rounded rows stand for."""
    codes, scales, minimums = rounded
    found = grid.levels[codes].reshape(*scales.shape, BLOCK) * scales[..., None]
    if minimums is not None:
        found = found + minimums[..., None]
    return found.reshape(len(codes), -1)


def output_error(weights: Floats, rounded: Floats, inputs: Floats) -> float:
    return float(np.square(inputs @ (weights - rounded).T).sum() / np.square(inputs @ weights.T).sum())


@pytest.mark.parametrize(("form", "at_most"), [(INT4, 0.4), (INT4_AFFINE, 0.4), (INT4_TABLE, 0.4)])
def test_outputs_are_closer_than_with_weights_rounded_alone(form: WeightFormat, at_most: float) -> None:
    """On inputs that the moments were not taken of."""
    inputs, others = np.split(some_inputs(2000, 128), 2)
    weights = np.random.default_rng(1).standard_normal((60, 128)).astype(np.float32)
    plain = output_error(weights, dequantize(quantize(weights, form), form), others)
    grid = Grid.of(form)
    calibrated = values(grid, round_rows(weights, grid, feedback(moments_of(inputs))))
    assert output_error(weights, calibrated, others) < at_most * plain


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_is_reproduced(name: str) -> None:
    """Weights that a format can hold stay what they are, whatever the moments are."""
    grid, random = GRIDS[name], np.random.default_rng(2)
    codes = random.integers(0, 16, (20, 96)).astype(np.uint8)
    codes[:, ::BLOCK], codes[:, 1::BLOCK] = 0, 15
    scales = random.uniform(0.01, 0.02, (20, 3)).astype(np.float16).astype(np.float32)
    minimums = random.uniform(-0.1, 0, (20, 3)).astype(np.float16).astype(np.float32) if grid.affine else None
    weights = values(grid, (codes, scales, minimums))
    found = values(grid, round_rows(weights, grid, feedback(moments_of(some_inputs(300, 96)))))
    assert np.square(found - weights).sum() < 2e-6 * np.square(weights).sum()  # scales are rounded to fp16


@pytest.mark.parametrize("name", GRIDS)
def test_codes_are_the_nearest_levels(name: str) -> None:
    grid = GRIDS[name]
    wanted = np.random.default_rng(3).uniform(1.3 * grid.levels[0] - 1, 1.3 * grid.levels[-1], 500).astype(np.float32)
    nearest = np.abs(wanted[:, None] - grid.levels).argmin(1)
    assert [nearest_code(value, grid.levels, grid.nearest) for value in wanted] == nearest.tolist()
    assert nearest_code(np.float32(np.nan), grid.levels, grid.nearest) == 0


def test_feedback_inverts_the_moments() -> None:
    moments = moments_of(some_inputs(300, 96))
    [(upper, order)] = feedback(moments)
    assert np.array_equal(upper, np.triu(upper))
    assert sorted(order) == [0, 1, 2]
    block = symmetric(moments.blocks[0])
    sizes = np.diagonal(block).reshape(3, 32).sum(1)
    assert list(sizes[order]) == sorted(sizes, reverse=True)
    columns = (32 * order[:, None] + np.arange(32)).reshape(-1)
    damped = block.astype(np.float64)[np.ix_(columns, columns)]
    damped += np.eye(96) * rounding.DAMPING * np.diagonal(damped).mean()
    assert np.allclose(upper.T @ upper @ damped, np.eye(96), atol=1e-2)


def test_many_inputs_have_blocks_along_the_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "MAX_TOGETHER", 64)
    inputs = some_inputs(200, 192)
    moments = moments_of(inputs)
    assert [len(block) for block in moments.blocks] == [64, 64, 64]
    assert np.allclose(symmetric(moments.blocks[1]), inputs[:, 64:128].T @ inputs[:, 64:128], rtol=1e-4)
    weights = np.random.default_rng(1).standard_normal((8, 192)).astype(np.float32)
    grid, parts = Grid.of(INT4), feedback(moments)
    whole = values(grid, round_rows(weights, grid, parts))
    for number, factor in enumerate(parts):
        columns = slice(64 * number, 64 * number + 64)
        assert np.array_equal(whole[:, columns], values(grid, round_rows(weights[:, columns], grid, [factor])))


@pytest.mark.parametrize("width", [4864, 5120, 11008, 6176, 2048, 96])
def test_inputs_of_every_number_have_blocks(width: int) -> None:
    """Whole blocks of 32 inputs: 4864 of Qwen2.5-0.5B are no multiple of 3, and 6176 / 4 is none of 32."""
    sizes = [len(block) for block in Moments.zeros(width).blocks]
    assert sum(sizes) == width
    assert len(sizes) == -(-width // rounding.MAX_TOGETHER)
    assert all(size % BLOCK == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= BLOCK


def test_blocks_of_two_sizes_round_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "MAX_TOGETHER", 64)
    inputs = some_inputs(200, 160)
    moments = moments_of(inputs)
    assert [len(block) for block in moments.blocks] == [32, 64, 64]
    weights = np.random.default_rng(1).standard_normal((8, 160)).astype(np.float32)
    grid = Grid.of(INT4)
    plain = output_error(weights, dequantize(quantize(weights, INT4), INT4), inputs)
    assert output_error(weights, values(grid, round_rows(weights, grid, feedback(moments))), inputs) < plain


def test_extreme_moments_and_weights() -> None:
    """Inputs that never occur, all weights zero, and weights at the ends of fp16."""
    inputs = some_inputs(50, 64)
    inputs[:, 10:30] = 0
    weights = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    weights[0], weights[1], weights[2, ::2] = 0, 60000, 1e-9
    for grid in GRIDS.values():
        for moments in (moments_of(inputs), moments_of(0 * inputs)):
            codes, scales, minimums = round_rows(weights, grid, feedback(moments))
            assert np.isfinite(scales).all()
            assert minimums is None or np.isfinite(minimums).all()
            found = values(grid, (codes, scales, minimums))
            assert not found[0].any()
            assert np.allclose(found[1], 60000, rtol=0.01)


@pytest.mark.parametrize("on_grid", [True, False])
def test_weights_that_were_trained_for_a_grid_stay(tmp_path: Path, on_grid: bool) -> None:
    """Even if they were stored as bfloat16, which the search for scales would take for noise."""
    random = np.random.default_rng(4)
    codes = random.integers(-8, 8, (40, 3, 32))
    codes[:, :, 0] = -8
    weights = (codes * random.uniform(0.01, 0.02, (40, 3, 1)).astype(np.float16)).astype(np.float32).reshape(40, 96)
    weights = (weights.view(np.uint32) + 0x8000 & 0xFFFF0000).view(np.float32)
    if not on_grid:
        weights += random.normal(0, 0.004, weights.shape).astype(np.float32)
    plain = quantize(weights, INT4)
    with DataFile(tmp_path / "data") as file, MatrixWriter(lambda count: None) as writer:
        stored = writer.add(
            file, "w", (40, 96), INT4, lambda start, stop: weights[start:stop],
            factors=feedback(moments_of(some_inputs(300, 96))),
        )  # fmt: skip
    data = (tmp_path / "data").read_bytes()
    kept = data[stored.data.offset : stored.data.offset + stored.data.nbytes] == plain.packed.tobytes()
    assert kept == on_grid


def test_a_matrix_whose_factors_come_late_is_rounded_by_them_when_all_others_are_complete(tmp_path: Path) -> None:
    weights = np.random.default_rng(5).standard_normal((40, 96)).astype(np.float32)
    factors, written = feedback(moments_of(some_inputs(300, 96))), 0

    def count(weights: int) -> None:
        nonlocal written
        written += weights

    def late() -> rounding.Factors:
        assert written == weights.size
        return factors

    with DataFile(tmp_path / "data") as file, MatrixWriter(count) as writer:
        stored = [
            writer.add(file, name, (40, 96), INT4, lambda start, stop: weights[start:stop], factors=given)
            for name, given in (("late", late), ("soon", factors))
        ]
    data = (tmp_path / "data").read_bytes()
    for part in ("data", "scales"):
        regions = [getattr(each, part) for each in stored]
        first, second = (data[region.offset : region.offset + region.nbytes] for region in regions)
        assert first == second
    assert written == 2 * weights.size


Export = Callable[[int, bool], Path]
Divergence = Callable[[int, bool], float]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A text to calibrate with, some 1,600 tokens, and another text: Python code, as the pair was trained on.

    They are of the default text, which stays as it is: of other code, the losses below are others.
    """
    whole, path = TEXT.read_text("utf-8"), tmp_path_factory.mktemp("texts") / "code.py"
    path.write_text(whole[35_000:40_000], "utf-8")
    return path, whole[50_000:75_000]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, texts: tuple[Path, str]) -> Export:
    """A function: (bits of the head, whether it is calibrated) -> a bundle of int4 weights."""

    @cache
    def make(bits: int, calibrates: bool) -> Path:
        return export(
            REFERENCE / "target", tmp_path_factory.mktemp("exported") / "b", quantize="int4", head_bits=bits,
            drafter="none", heads="none", calibrate=str(texts[0]) if calibrates else None,
        )  # fmt: skip

    return make


@pytest.fixture(scope="module")
def divergence(tmp_path_factory: pytest.TempPathFactory, exported: Export, texts: tuple[Path, str]) -> Divergence:
    """A function: (as of `exported`) -> KL from the checkpoint, on 2,048 tokens that it was not calibrated with."""
    original = export(REFERENCE / "target", tmp_path_factory.mktemp("original") / "b", quantize="none", drafter="none")

    @cache
    def compare(bits: int, calibrates: bool) -> float:
        bundle, reference = Bundle.open(exported(bits, calibrates)), Bundle.open(original)
        ids = text_ids(texts[1], bundle, reference)[:2048]
        with closing(OrtEngine(bundle, 1)) as engine, closing(OrtEngine(reference, 1)) as other:
            return measure(engine, other, ids, None).kl.value

    return compare


def test_a_calibrated_export_is_closer_to_the_checkpoint(exported: Export, divergence: Divergence) -> None:
    """Same formats and sizes."""
    plain, calibrated = (Bundle.open(exported(8, calibrates)).manifest for calibrates in (False, True))
    assert plain.weight_bytes == calibrated.weight_bytes
    assert plain.tensors["target.onnx"].tensors == calibrated.tensors["target.onnx"].tensors
    assert divergence(8, True) < 0.8 * divergence(8, False)


def test_a_head_of_4_bits_is_calibrated_too(divergence: Divergence) -> None:
    """The loss that 4 bits for the token table add, with calibration and without."""
    added, added_without = (divergence(4, calibrates) - divergence(8, calibrates) for calibrates in (True, False))
    assert added < 0.92 * added_without


def test_progress_counts_the_text(tmp_path: Path, texts: tuple[Path, str]) -> None:
    shown: list[tuple[int, int]] = []
    export(
        REFERENCE / "target", tmp_path / "out", drafter="none", heads="none", quantize="int4", calibrate=str(texts[0]),
        progress=lambda *each: shown.append(each),
    )  # fmt: skip
    assert shown == sorted(shown)
    assert shown[-1][0] > 0.99 * shown[-1][1]


class Ended(BaseException):
    """An interrupt."""


def calibrated(
    out: Path,
    calibrate: Path | None,
    until: float,
    notes: list[str],
    bits_per_weight: float | None = None,
    *,
    source: Path = REFERENCE / "target",
    **more: Any,
) -> Path:
    """Export with a text, and end it at a share of its progress."""

    def progress(done: int, total: int) -> None:
        if done > until * total:
            raise Ended

    quantize, head_bits = ("int4", 4) if bits_per_weight is None else (None, None)
    return export(
        source, out, drafter="none", heads="none", quantize=quantize, head_bits=head_bits,
        bits_per_weight=bits_per_weight, progress=progress, calibrate=None if calibrate is None else str(calibrate),
        note=notes.append, **more,
    )  # fmt: skip


def test_an_export_that_was_ended_goes_on(tmp_path: Path, texts: tuple[Path, str]) -> None:
    """It writes the bytes of one that was not ended, and leaves nothing behind."""
    whole, layers, notes = calibrated(tmp_path / "whole", texts[0], 2, []), [], list[str]()
    for until in (0.5, 0.65, 0.8, 0.97):
        with pytest.raises(Ended):
            calibrated(tmp_path / "parts", texts[0], until, notes)
        assert not (tmp_path / "parts").exists()
        layers.append(json.loads((tmp_path / ".parts.calibration" / "state.json").read_text())["layers"])
    assert layers == sorted(layers)
    assert 0 < layers[0] < layers[-1] == 10
    assert f"continuing after layer {layers[0]} of an interrupted export" in notes
    assert any(f"the same command continues after layer {layers[0]}; " in line for line in notes)
    parts = calibrated(tmp_path / "parts", texts[0], 2, notes)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["parts", "whole"]
    for file in whole.iterdir():
        assert file.name == MANIFEST or (parts / file.name).read_bytes() == file.read_bytes()


def test_an_export_of_mixed_formats_goes_on(tmp_path: Path, texts: tuple[Path, str]) -> None:
    """Matrices of 8 bits are rescaled with those of 4 bits that read the same norm, before an interrupt and after."""
    whole, notes = calibrated(tmp_path / "whole", texts[0], 2, [], 5.2), list[str]()
    with pytest.raises(Ended):
        calibrated(tmp_path / "parts", texts[0], 0.8, notes, 5.2)
    parts = calibrated(tmp_path / "parts", texts[0], 2, notes, 5.2)
    assert any("continuing after layer" in line for line in notes)
    assert (parts / "target.onnx.data").read_bytes() == (whole / "target.onnx.data").read_bytes()


def test_an_export_with_matrices_that_are_kept_goes_on(tmp_path: Path, texts: tuple[Path, str]) -> None:
    source = save_in_mxfp4(REFERENCE / "target", tmp_path / "target", lambda name: "down_proj" in name)
    whole, notes = calibrated(tmp_path / "whole", texts[0], 2, [], source=source), list[str]()
    with pytest.raises(Ended):
        calibrated(tmp_path / "parts", texts[0], 0.8, notes, source=source)
    parts = calibrated(tmp_path / "parts", texts[0], 2, notes, source=source)
    assert any("continuing after layer" in line for line in notes)
    assert (parts / "target.onnx.data").read_bytes() == (whole / "target.onnx.data").read_bytes()


@pytest.mark.parametrize("calibrates", [True, False])
def test_another_export_begins_anew(tmp_path: Path, texts: tuple[Path, str], calibrates: bool) -> None:
    """With another text, or without calibration."""
    text, directory, notes = tmp_path / "text", tmp_path / ".out.calibration", list[str]()
    text.write_text(texts[1][:5000])
    with pytest.raises(Ended):
        calibrated(tmp_path / "out", texts[0], 0.6, [])
    assert directory.exists()
    calibrated(tmp_path / "out", text if calibrates else None, 2, notes)
    assert not any("continuing after layer" in line for line in notes)
    assert not directory.exists()


def test_an_export_with_another_context_begins_anew(tmp_path: Path, texts: tuple[Path, str]) -> None:
    """With it, frequencies can be others in all that the text was run through."""
    notes: list[str] = []
    for context in (None, 128):
        with pytest.raises(Ended):
            calibrated(tmp_path / "out", texts[0], 0.6, notes, context=context)
    assert not any("continuing after layer" in line for line in notes)
    with pytest.raises(Ended):
        calibrated(tmp_path / "out", texts[0], 0.6, notes, context=128)
    assert any("continuing after layer" in line for line in notes)


@pytest.mark.parametrize(
    ("content", "layers"),
    [
        ('{"key": "k", "layers": 3}', 3),
        ('{"key": "other", "layers": 3}', 0),
        ('{"key": "k", "layers": "many"}', 0),
        ('{"key": "k"}', 0),
        ("[]", 0),
        ("{", 0),
    ],
)
def test_only_an_intact_state_of_the_same_export_is_used(tmp_path: Path, content: str, layers: int) -> None:
    directory = tmp_path / ".out.calibration"
    directory.mkdir()
    (directory / "state.json").write_text(content)
    (directory / "hidden-3.npy").write_text("")
    with unfinished_export(tmp_path / "out", "k", lambda line: None) as found:
        assert found.layers == layers
        assert (directory / "hidden-3.npy").exists() == (layers == 3)
    assert not directory.exists()


def test_one_process_at_a_time_calibrates_for_a_bundle(tmp_path: Path, texts: tuple[Path, str]) -> None:
    with unfinished_export(tmp_path / "out", "other", lambda line: None) as other:
        with pytest.raises(UsageError, match="wait for it"):
            calibrated(tmp_path / "out", texts[0], 2, [])
        assert other.directory.exists()
    assert not other.directory.exists()


def write_matrix(path: Path, sums: dict[str, Floats], kind: str | list[int] = "imatrix") -> Path:
    writer = gguf.GGUFWriter(path, "", use_temp_file=False)
    if isinstance(kind, str):
        writer.add_type(kind)
    else:
        writer.add_array("general.type", kind)
    for name, values_ in sums.items():
        writer.add_tensor(f"{name}.in_sum2", values_)
        writer.add_tensor(f"{name}.counts", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_an_importance_matrix_weights_the_search(tmp_path: Path) -> None:
    sums = np.ones((1, 64), np.float32)
    sums[0, 5] = 1000
    path = write_matrix(tmp_path / "imatrix.gguf", {"blk.3.attn_q.weight": sums})
    matrix = ImportanceMatrix(path)
    factors = matrix.factors("model.layers.3.self_attn.q_proj.weight")
    assert factors is not None
    assert [len(factor.upper) for factor in factors] == [32, 32]
    assert matrix.factors("model.layers.2.self_attn.q_proj.weight") is None
    assert matrix.factors("model.embed_tokens.weight") is None
    weights = np.random.default_rng(1).standard_normal((50, 64)).astype(np.float32)
    grid = Grid.of(INT4)
    errors = np.square(weights - values(grid, round_rows(weights, grid, factors))).mean(0)
    assert errors[5] < 0.3 * np.median(errors)
    matrix.close()


def test_an_importance_matrix_of_another_model_is_refused(tmp_path: Path) -> None:
    sums = {f"blk.{layer}.ffn_down.weight": np.ones((1, 64), np.float32) for layer in range(8)}
    path = write_matrix(tmp_path / "imatrix.gguf", sums)
    with pytest.raises(CheckpointError, match="its importance matrix 64"):
        export(REFERENCE / "target", tmp_path / "out", quantize="int4", drafter="none", calibrate=str(path))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"quantize": "int8", "calibrate": ""}, "add --quantize int4, int4-affine or int4-table"),
        ({"quantize": "int4", "calibrate": "missing.txt"}, "cannot read missing.txt"),
        ({"quantize": "int4", "calibrate": "missing.gguf"}, "missing.gguf cannot be opened"),
        ({"quantize": "int4", "calibrate": "OTHER"}, "is not an importance matrix"),
        ({"quantize": "int4", "calibrate": "DAMAGED"}, "is not an importance matrix"),
        ({"quantize": "int4", "calibrate": "EMPTY"}, "empty.txt has no text to calibrate with"),
    ],
)
def test_mistakes(tmp_path: Path, options: dict[str, str], complaint: str) -> None:
    made = {"OTHER": write_matrix(tmp_path / "other.gguf", {}, "model"), "EMPTY": tmp_path / "empty.txt"}
    made["DAMAGED"] = write_matrix(tmp_path / "damaged.gguf", {}, [1, 2])
    made["EMPTY"].write_text("")
    given = {name: str(made.get(value, value)) for name, value in options.items()}
    with pytest.raises((UsageError, CheckpointError, PromptError), match=complaint):
        export(REFERENCE / "target", tmp_path / "out", drafter="none", **given)  # type: ignore[arg-type]


def test_a_model_that_simd_cannot_run_needs_an_importance_matrix(
    tmp_path: Path, texts: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*operands: object) -> None:
        raise UnsupportedGraphError("a head of 80 numbers is not a multiple of 32")

    monkeypatch.setattr(source, "LayerInputs", refuse)
    with pytest.raises(UsageError, match=r"this model \(a head of 80 numbers .* importance matrix"):
        export(REFERENCE / "target", tmp_path / "out", quantize="int4", drafter="none", calibrate=str(texts[0]))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_states_that_are_not_finite_are_an_error(
    tmp_path: Path, texts: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    def run(self: LayerInputs, index: int, show: Show, after_chunk: object) -> None:
        show(["self_attn.q_proj"], np.full((3, 192), value if index == 2 else 1.0, np.float32))

    monkeypatch.setattr(LayerInputs, "run", run)
    with pytest.raises(CheckpointError, match="NaN or infinite in layer 2: the weights are damaged"):
        calibrated(tmp_path / "out", texts[0], 2, [])
    assert list(tmp_path.iterdir()) == []


def test_the_texts_are_different() -> None:
    from ondevice.quality import TEXT as MEASURED

    calibrating, measured = (path.read_text("utf-8") for path in (TEXT, MEASURED))
    lines = {line for line in calibrating.splitlines() if len(line) > 40}
    assert not lines & {line for line in measured.splitlines() if len(line) > 40}
