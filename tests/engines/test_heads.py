"""Proposals of heads on both engines, compared with the same arithmetic in numpy for every family."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.arrays import Float32Array
from ondevice.bundle import Bundle
from ondevice.engines.choice import open_engine
from ondevice.engines.protocol import Engine
from ondevice.errors import BundleCorruptError, UsageError
from ondevice_export import export
from ondevice_export.checkpoint.directory import SafetensorsCheckpoint
from tests.conftest import ENGINES, MakePair
from tests.fixtures.tiny_models import QUANTISED

KINDS = ("medusa", "blockwise", "exit")
WIDTH = 64
EPS, CAP = 1e-6, 30.0
TOLERANCE = {"simd": 0.15, "ort": 0.15}
"""Tolerance for logits up to 30, with 8-bit weights and 8-bit activations."""


@pytest.fixture(scope="module", params=QUANTISED)
def pair(request: pytest.FixtureRequest, make_pair: MakePair) -> Path:
    directory = make_pair(request.param)
    export(directory / "target", directory / "bundle", quantize="int8")
    return directory


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, pair: Path) -> Iterator[Engine]:
    made = open_engine(request.param, Bundle.open(pair / "bundle"), 2)
    yield made
    made.close()


def hidden_state(seed: int = 0) -> Float32Array:
    return np.random.default_rng(seed).normal(0, 1.5, WIDTH).astype(np.float32)


def states(kind: str, heads: SafetensorsCheckpoint, x: Float32Array) -> Float32Array:
    """The input of the vocabulary projection, float32[k, H]."""
    if kind == "medusa":
        steps = (heads.read("medusa.blocks.weight") @ x).reshape(-1, WIDTH)
        return x + steps / (1 + np.exp(-steps))
    if kind == "exit":
        x = norm(x) * heads.read("exit.norm.weight")
        steps = (heads.read("exit.block.weight") @ x).reshape(-1, WIDTH)
        return x + steps / (1 + np.exp(-steps))
    inner = np.maximum(heads.read("blockwise.inner.weight") @ x, 0)
    steps = (heads.read("blockwise.outer.weight") @ inner).reshape(-1, WIDTH)
    return norm(x + steps) * heads.read("blockwise.norm.weight")


def norm(x: Float32Array) -> Float32Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)


def projection(pair: Path) -> Float32Array:
    with SafetensorsCheckpoint(pair / "target") as target:
        name = next(name for name in target.names if name.endswith("embed_tokens.weight"))
        return target.read(name)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_target_s_projection_of_the_heads_states(pair: Path, engine: Engine, kind: str) -> None:
    x = hidden_state()
    found = engine.open_session().propose(kind, x)
    with SafetensorsCheckpoint(pair / "heads") as heads:
        wanted = states(kind, heads, x)
        centroids, ordering = heads.read("shortlist.centroids.weight"), heads.integers("shortlist.token_ordering")
    logits = CAP * np.tanh(wanted @ projection(pair).T / CAP)
    entry = engine.heads[kind]
    assert found.logits.shape == found.candidates.shape == (len(wanted), entry.candidates)
    for row in range(len(wanted)):
        assert len(set(found.candidates[row].tolist())) == entry.candidates
        np.testing.assert_allclose(found.logits[row], logits[row][found.candidates[row]], atol=0.15)
        if entry.candidates < logits.shape[1]:
            clusters = ordering.reshape(len(centroids), -1)
            best = np.argsort(-(centroids @ wanted[row]), kind="stable")
            chosen = [
                cluster for cluster in range(len(clusters)) if set(clusters[cluster]) <= set(found.candidates[row])
            ]
            assert len(set(chosen) & set(best[: len(chosen)].tolist())) >= len(chosen) - 1  # one near-tie may flip
        else:
            np.testing.assert_array_equal(found.candidates[row], np.arange(logits.shape[1]))


@pytest.mark.parametrize("kind", KINDS)
def test_sessions_propose_each_into_its_own_memory(engine: Engine, kind: str) -> None:
    one, other = engine.open_session(), engine.open_session()
    first = one.propose(kind, hidden_state(1))
    before = first.logits.tobytes(), first.candidates.tobytes()
    other.propose(kind, hidden_state(2))
    assert (first.logits.tobytes(), first.candidates.tobytes()) == before
    again = other.propose(kind, hidden_state(1))
    assert (again.logits.tobytes(), again.candidates.tobytes()) == before


def test_a_kind_that_there_is_not(engine: Engine) -> None:
    with pytest.raises(UsageError, match="no mystery heads: train some with models/recipe"):
        engine.open_session().propose("mystery", hidden_state())


def test_a_closed_session_proposes_nothing(engine: Engine) -> None:
    session = engine.open_session()
    session.close()
    with pytest.raises(UsageError, match="closed"):
        session.propose("medusa", hidden_state())


def test_a_hidden_state_of_another_size(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"96|broadcast"):
        engine.open_session().propose("medusa", np.zeros(96, np.float32))


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    ("field", "number", "words"),
    [
        ("offsets", 2, r"medusa\.blocks\.weight has shape .*, the configuration asks for"),
        ("candidates", 16, "candidates of the medusa heads is 16"),
        ("graph", "target.onnx", "two models have one graph"),
    ],
)
def test_a_manifest_that_says_something_else(
    pair: Path, tmp_path: Path, name: str, field: str, number: Any, words: str
) -> None:
    import json

    copy = Path(shutil.copytree(pair / "bundle", tmp_path / "copy"))
    data = json.loads((copy / "bundle.json").read_text())
    data["heads"][0][field] = number
    (copy / "bundle.json").write_text(json.dumps({**data, "sha256": None}))
    with pytest.raises(BundleCorruptError, match=words):
        open_engine(name, Bundle.open(copy), 1)
