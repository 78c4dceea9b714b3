"""Layers that run one after the other over a text: the bits of a whole forward, and the inputs of all matrices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ondevice.bundle import Bundle
from ondevice.bundle_format.tensor_table import is_plain, target_shapes
from ondevice.engines.layer_path import LayerPath
from ondevice.engines.protocol import Rows, TokenTree
from ondevice.engines.simd.engine import SimdEngine
from ondevice.engines.simd.kernels.contract.entries import read_groups
from ondevice.engines.simd.kernels.contract.matrices import groups_form
from ondevice.engines.simd.layer_inputs import LayerInputs
from ondevice.engines.simd.model import read_target
from ondevice.engines.simd.tensor_files import TensorFiles
from tests.fixtures.tiny_models import QUANTISED, VOCAB
from tests.simd.conftest import AFFINE, MXFP4, TABLE
from tests.simd.kernels.memory import read_records, records_of

CHUNKS = np.random.default_rng(3).integers(0, VOCAB, (2, 45))


@pytest.mark.parametrize("family", [*QUANTISED, AFFINE, TABLE, MXFP4])
def test_hidden_states_are_those_of_the_engine(bundles: dict[str, Bundle], tmp_path: Path, family: str) -> None:
    bundle, names, shapes = bundles[family], list[str](), set[tuple[int, ...]]()

    def show(own: Sequence[str], rows: NDArray[np.float32]) -> None:
        names.extend(own)
        shapes.add(rows.shape)
        assert np.isfinite(rows).all()

    run, engine = LayerInputs(bundle, list(CHUNKS), 2, tmp_path), SimdEngine(bundle, 1)
    for index in range(run.layers):
        run.run(index, show)
        for chunk, hidden in zip(CHUNKS, run.hidden, strict=True):
            rows = Rows(engine.open_session(), TokenTree.chain(chunk.tolist()), range(45), LayerPath(stop=index + 1))
            assert np.array_equal(engine.forward([rows])[0].hidden, hidden)
    matrices = {
        name: shape for name, shape in target_shapes(bundle.manifest.target).items() if not is_plain(name, shape)
    }
    wanted = [name for name, shape in matrices.items() if name.startswith("layers.") and len(shape) == 2]
    assert sorted(names) == sorted(2 * [name.split(".", 2)[2].removesuffix(".weight") for name in wanted])
    assert shapes == {(45, matrices[name][1]) for name in wanted}

    heads: list[NDArray[np.float32]] = []
    run.run(run.layers, lambda own, rows: heads.append(rows))
    for chunk, inputs in zip(CHUNKS, heads, strict=True):
        whole = engine.forward([Rows(engine.open_session(), TokenTree.chain(chunk.tolist()), range(45))])
        np.testing.assert_allclose(inputs, whole[0].hidden, rtol=1e-5, atol=1e-6)
    assert f"{run.head}.weight" in matrices
    engine.close()
    run.close()


@pytest.mark.parametrize("family", QUANTISED)
def test_another_run_goes_on_behind_any_layer(bundles: dict[str, Bundle], tmp_path: Path, family: str) -> None:
    """With per-layer embeddings, and with layers that read the keys and values of earlier ones."""
    bundle = bundles[family]
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = LayerInputs(bundle, list(CHUNKS), 1, tmp_path / "whole")
    for index in range(whole.layers):
        own, other = list[NDArray[np.float32]](), list[NDArray[np.float32]]()
        whole.run(index, lambda names, rows, own=own: own.append(rows))  # type: ignore[misc]
        part = LayerInputs(bundle, list(CHUNKS), 1, tmp_path / "parts", index)
        part.run(index, lambda names, rows, other=other: other.append(rows))  # type: ignore[misc]
        part.save(index + 1)
        part.close()
        assert all(map(np.array_equal, own, other))
        assert all(map(np.array_equal, whole.hidden, part.hidden))
    whole.close()


def test_inputs_belong_to_their_matrices(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    """Attention and the feed-forward block read the normed hidden states before them, in int8."""
    bundle, found, first = bundles["12b"], dict[str, NDArray[np.float32]](), frozenset([0])
    run, engine = LayerInputs(bundle, [CHUNKS[0]], 1, tmp_path), SimdEngine(bundle, 1)
    run.run(0, lambda names, rows: found.update(dict.fromkeys(names, rows.copy())))
    norms = read_target(TensorFiles(bundle), bundle.manifest).layers[0].floats
    for name, norm, path in (
        ("self_attn.k_proj", "input_layernorm", LayerPath(first, first, 1)),
        ("mlp.up_proj", "pre_feedforward_layernorm", LayerPath(without_mlp=first, stop=1)),
    ):
        rows = Rows(engine.open_session(), TokenTree.chain(CHUNKS[0].tolist()), range(45), path)
        hidden = engine.forward([rows])[0].hidden  # times the layer's scalar, which the norm takes away
        normed = hidden / np.sqrt(np.square(hidden).mean(1, keepdims=True)) * norms[norm]
        assert np.abs(found[name] - normed).max() < 0.006 * np.abs(normed).max()
    run.close()
    engine.close()


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8, 13])
def test_groups_are_read_as_they_were_written(rows: int) -> None:
    x = np.random.default_rng(rows).standard_normal((rows, 96)).astype(np.float32)
    records = records_of(x, groups_form(8))
    quantized = read_records(records, rows)
    found = np.empty((rows, 96), np.float32)
    read_groups(records.ctypes.data, 3, found)
    assert np.array_equal(found, (quantized.codes * quantized.scales[..., None]).reshape(rows, 96).astype(np.float32))
    assert np.abs(found - x).max() <= 0.51 * quantized.scales.max()
