"""Rescaling between a norm and the matrices that read it: factors, what is stored, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ondevice.arrays import Float32Array
from ondevice.bundle import Bundle
from ondevice.bundle_format.tensor_table import NORMS, TensorTable
from ondevice.bundle_format.weight_format import INT4, INT8, WeightFormat
from ondevice_export import export
from ondevice_export.calibration import rounding
from ondevice_export.calibration.rounding import Factors, Moments, column_factors, symmetric
from ondevice_export.checkpoint.directory import Checkpoint
from ondevice_export.checkpoint.named_tensors import NamedTensors
from ondevice_export.data_file import DataFile
from ondevice_export.export_options import Formats
from ondevice_export.graph.layer import READERS
from ondevice_export.graph.weights import Weights
from ondevice_export.matrices import MatrixWriter
from ondevice_export.quantize import Quantized, dequantize, quantize
from tests.conftest import REFERENCE, MakePair
from tests.export.test_calibration import write_matrix

WIDTH = 96
Q, K, NORM = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight", "layers.0.input_layernorm.weight"


def some_moments(width: int = WIDTH) -> Moments:
    random = np.random.default_rng(7)
    moments = Moments.zeros(width)
    moments.add((random.standard_normal((300, width)) * random.lognormal(0, 1, width)).astype(np.float32))
    return moments


class Arrays(Checkpoint):
    """A checkpoint in memory."""

    def __init__(self, tensors: dict[str, Float32Array]) -> None:
        self.config, self.origin, self._tensors = {}, "test", tensors

    def close(self) -> None: ...

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        return "F32"

    def read(self, name: str) -> Float32Array:
        return self._tensors[name]

    def rows(self, name: str, start: int, stop: int) -> Float32Array:
        return self._tensors[name][start:stop]

    def raw_rows(self, name: str, start: int, stop: int) -> npt.NDArray[np.uint8]:
        raise NotImplementedError

    def picked_rows(self, name: str, indices: npt.NDArray[np.int64]) -> Float32Array:
        raise NotImplementedError

    def integers(self, name: str) -> npt.NDArray[np.int64]:
        raise NotImplementedError

    def kept_format(self, name: str) -> WeightFormat | None:
        return None

    def kept_blocks(
        self, name: str, start: int, stop: int
    ) -> tuple[npt.NDArray[np.uint8], Float32Array, Float32Array | None]:
        raise NotImplementedError


class Known:
    """A calibration with the same moments for all matrices but those of `unknown`; it notes what is rescaled."""

    unfinished = None

    def __init__(self, unknown: str = "") -> None:
        self.rescaled: list[str] = []
        self._unknown = unknown

    def factors(self, name: str, finish: Callable[[], None]) -> Factors | None:
        return None

    def rescale(self, names: Sequence[str], finish: Callable[[], None]) -> Float32Array | None:
        if self._unknown in names:
            return None
        self.rescaled += names
        return column_factors(some_moments())

    def is_written(self, name: str) -> bool:
        return False


def written(
    directory: Path, tensors: dict[str, Float32Array], calibration: Known, formats: Formats
) -> dict[str, Float32Array]:
    """The norm and the matrices that `Weights` stores, as float32."""
    with DataFile(directory / "data") as file, MatrixWriter(lambda count: None) as writer:
        weights = Weights(NamedTensors(Arrays(tensors)), file, writer, formats=formats, calibration=calibration)
        found = {NORM: weights.rescale(weights.read(NORM), [Q, K, "layers.0.self_attn.v_proj.weight"])}
        for name in (Q, K):
            weights.matrix(name, formats.layers)
    return found | {name: stored(directory, TensorTable("data", weights.tensors), name) for name in (Q, K)}


def stored(directory: Path, table: TensorTable, name: str) -> Float32Array:
    """A tensor of a data file as float32."""
    data, tensor = (directory / table.file).read_bytes(), table.tensors[name]
    form = tensor.weight_format
    if tensor.scales is None:
        return np.frombuffer(data, np.float32, tensor.bytes // 4, tensor.offset).reshape(tensor.shape)
    codes = np.frombuffer(data, np.uint8, tensor.bytes, tensor.offset).reshape(*tensor.scale_shape, -1)
    scales = np.frombuffer(data, np.float32, tensor.scales.bytes // 4, tensor.scales.offset)
    packed = Quantized(codes, scales.reshape(tensor.scale_shape), None, finite=True)
    return dequantize(packed, form).reshape(tensor.shape)


def some_tensors(on_grid: WeightFormat | None = None) -> dict[str, Float32Array]:
    random = np.random.default_rng(3)
    tensors = {name: random.standard_normal((70, WIDTH)).astype(np.float32) for name in (Q, K)}
    if on_grid is not None:
        tensors[K] = dequantize(quantize(tensors[K], on_grid), on_grid)
    return tensors | {NORM: random.uniform(0.5, 2, WIDTH).astype(np.float32)}


def test_factors_are_larger_for_larger_inputs() -> None:
    moments = some_moments()
    factors, sizes = column_factors(moments), np.diagonal(moments.blocks[0])
    assert np.array_equal(np.argsort(factors), np.argsort(sizes))
    assert np.log(factors).mean() == pytest.approx(0, abs=1e-6)
    twice = column_factors(Moments((np.diag([1, 256] * 16).astype(np.float32),)))
    assert twice[1] / twice[0] == pytest.approx(256 ** (rounding.RESCALING / 2), rel=0.1)


def test_an_input_that_never_occurs_has_a_finite_factor() -> None:
    for moments in (Moments.zeros(64), Moments((np.diag(np.arange(64)).astype(np.float32),))):
        factors = column_factors(moments)
        assert np.isfinite(factors).all()
        assert (factors > 0.2).all()


def test_divided_moments_are_those_of_divided_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "MAX_TOGETHER", 64)
    inputs = np.random.default_rng(5).standard_normal((100, 192)).astype(np.float32)
    factors = np.random.default_rng(6).uniform(0.5, 2, 192).astype(np.float32)
    whole, parts = Moments.zeros(192), Moments.zeros(192)
    whole.add(inputs)
    parts.add(inputs / factors)
    for one, other in zip(whole.divided(factors).blocks, parts.blocks, strict=True):
        assert np.allclose(symmetric(one), symmetric(other), rtol=1e-4, atol=1e-3)


def test_the_norm_is_divided_and_its_readers_are_multiplied(tmp_path: Path) -> None:
    """Readers that the checkpoint lacks, as layers that share keys and values do, are passed over."""
    tensors, calibration = some_tensors(), Known()
    found = written(tmp_path, tensors, calibration, Formats(INT4, INT8))
    assert calibration.rescaled == [Q, K]
    assert np.allclose(found[NORM] * column_factors(some_moments()), tensors[NORM], rtol=1e-6)
    for name in (Q, K):
        error = found[name] * found[NORM] - tensors[name] * tensors[NORM]
        assert np.square(error).mean() < 0.02 * np.square(tensors[name] * tensors[NORM]).mean()


@pytest.mark.parametrize(
    ("on_grid", "formats", "unknown"),
    [
        (INT4, Formats(INT4, INT8), ""),
        (None, Formats(INT8, INT8), ""),
        (None, Formats(INT4, INT8), Q),
        (INT4, Formats(INT8, INT8, {K: INT4}), ""),
    ],
    ids=["a reader on the grid", "int8", "inputs that are not known", "the reader of 4 bits on the grid"],
)
def test_weights_are_left_alone(tmp_path: Path, on_grid: WeightFormat | None, formats: Formats, unknown: str) -> None:
    tensors, calibration = some_tensors(on_grid), Known(unknown)
    found = written(tmp_path, tensors, calibration, formats)
    assert calibration.rescaled == []
    assert np.array_equal(found[NORM], tensors[NORM])
    for name in (Q, K):
        form = formats.chosen.get(name, formats.layers)
        assert np.array_equal(found[name], dequantize(quantize(tensors[name], form), form))


def test_one_reader_of_4_bits_is_enough(tmp_path: Path) -> None:
    calibration = Known()
    written(tmp_path, some_tensors(), calibration, Formats(INT8, INT8, {K: INT4}))
    assert calibration.rescaled == [Q, K]


def test_a_calibrated_export_rescales_every_norm_before_a_block(tmp_path: Path) -> None:
    """Its other norms are those of an export without calibration."""
    text = tmp_path / "text"
    text.write_text(Path(__file__).read_text("utf-8"))
    norms: list[dict[str, Float32Array]] = []
    for calibrate in (None, str(text)):
        place = export(
            REFERENCE / "target", tmp_path / f"b{calibrate is None}", quantize="int4", drafter="none", heads="none",
            calibrate=calibrate,
        )  # fmt: skip
        table = Bundle.open(place).manifest.tensors["target.onnx"]
        vectors = [name for name, tensor in table.tensors.items() if tensor.scales is None and len(tensor.shape) == 1]
        norms.append({name: stored(place, table, name) for name in vectors})
    before = {NORMS[kind][0] for kind in READERS}
    for name, plain in norms[0].items():
        factors = plain / norms[1][name]
        if name.rsplit(".", 2)[-2] in before:
            assert np.log(factors).mean() == pytest.approx(0, abs=1e-4)
            assert np.log(factors).std() > 0.01
        else:
            assert (factors == 1).all()


def test_norms_that_routers_read_too_are_not_rescaled(tmp_path: Path, make_pair: MakePair) -> None:
    """A shared expert reads the norm before a block too, and its inputs are known; those of attention are rescaled."""
    random, hidden = np.random.default_rng(9), 96
    known = [*(f"blk.{layer}.ffn_{name}_shexp.weight" for layer in range(4) for name in ("gate", "up"))]
    sums = {name: random.lognormal(0, 2, (1, hidden)).astype(np.float32) for name in (*known, "blk.3.attn_q.weight")}
    matrix = write_matrix(tmp_path / "imatrix.gguf", sums)
    norms: list[dict[str, Float32Array]] = []
    for calibrate in (None, str(matrix)):
        place = export(
            make_pair("qwen3.5-moe") / "target", tmp_path / f"b{calibrate is None}", quantize="int4",
            calibrate=calibrate,
        )  # fmt: skip
        table = Bundle.open(place).manifest.tensors["target.onnx"]
        vectors = [name for name, tensor in table.tensors.items() if tensor.shape == (hidden,)]
        norms.append({name: stored(place, table, name) for name in vectors})
    changed = [name for name, plain in norms[0].items() if not np.array_equal(plain, norms[1][name])]
    assert changed == ["layers.3.input_layernorm.weight"]
