"""Models built from configuration and tensors: the outputs of both engines agree for every weight format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.bundle import Bundle
from ondevice.bundle_format.manifest import AS_TRAINED
from ondevice.engines.protocol import Engine, Rows, TokenTree
from ondevice.engines.simd.engine import SimdEngine
from ondevice.engines.simd.program import BundleModels
from ondevice.engines.simd.tensor_files import UnsupportedGraphError
from ondevice_export import export
from tests.conftest import MakePair
from tests.fixtures.mxfp4 import save_in_mxfp4
from tests.fixtures.tiny_models import QUANTISED, VOCAB

IDS = np.random.default_rng(3).integers(0, VOCAB, 48).tolist()
DRAFTED = 8
"""Draft steps that are compared: the error of a single one varies too much, in every format, for a bound."""
FORMATS: dict[str, dict[str, Any]] = {
    "int4": {},
    "int4, head of 4 bits": {"head_bits": 4},
    "int8": {"quantize": "int8"},
    "int4-affine": {"quantize": "int4-affine"},
    "int4-affine, head of 4 bits": {"quantize": "int4-affine", "head_bits": 4},
    "int4-table": {"quantize": "int4-table"},
    "int4-table, head of 4 bits": {"quantize": "int4-table", "head_bits": 4},
}


def answers(engine: Engine) -> list[np.ndarray]:
    """Logits of a prompt's second half, and of DRAFTED draft steps and rows of heads with one entry per token."""
    session = engine.open_session()
    engine.forward([Rows(session, TokenTree.chain(IDS[:24]), [0])])
    session.commit(range(24))
    (outputs,) = engine.forward([Rows(session, TokenTree.chain(IDS[24:]), range(24))])
    found = [outputs.logits[:, :VOCAB].copy()]
    session.commit(range(24))
    # both engines get the same hidden states, so that only the computation from them can differ
    states = np.random.default_rng(4).standard_normal((DRAFTED, engine.target.hidden_size)).astype(np.float32)
    if engine.drafter is not None:
        drafted = []
        for token, state in enumerate(states, 7):
            step = session.draft_step(token, state)  # its arrays are valid until the next step
            drafted.append((step.hidden.copy(), by_token(step.candidates, step.logits)))
        found += [np.stack(each) for each in zip(*drafted, strict=True)]
    for kind in sorted(engine.heads):
        rows = []
        for state in states:
            proposals = session.propose(kind, state)
            rows += [by_token(*row) for row in zip(proposals.candidates, proposals.logits, strict=True)]
        found.append(np.stack(rows))
    engine.close()
    return found


def by_token(candidates: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Logits of the whole vocabulary, NaN for tokens that were not scored."""
    found = np.full(VOCAB, np.nan, np.float32)
    found[candidates] = logits[: len(candidates)]
    return found


def assert_agree(bundle: Bundle) -> None:
    from ondevice.engines.ort import OrtEngine

    most = 0.25 if bundle.manifest.quantization.weights == AS_TRAINED else 0.1
    for ours, theirs in zip(answers(SimdEngine(bundle, threads=1)), answers(OrtEngine(bundle, threads=1)), strict=True):
        both = np.isfinite(ours) & np.isfinite(theirs)
        assert both.sum() > 0.7 * np.isfinite(theirs).sum(), "clusters that score alike may change places"
        error = np.sqrt(((ours - theirs)[both] ** 2).mean()) / np.sqrt((theirs[both] ** 2).mean())
        assert error < most, "activations of 8 bits, rounded in two ways"


@pytest.mark.needs("onnxruntime")
def test_the_engines_agree(bundle: Bundle) -> None:
    assert_agree(bundle)


@pytest.mark.needs("onnxruntime")
@pytest.mark.parametrize("options", list(FORMATS.values())[1:], ids=list(FORMATS)[1:])
@pytest.mark.parametrize("family", QUANTISED)
def test_the_engines_agree_on_every_format(
    make_pair: MakePair, kernels: None, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    source = make_pair(family) / "target"
    assert_agree(Bundle.open(export(source, tmp_path / "bundle", **options)))


@pytest.mark.needs("onnxruntime")
@pytest.mark.parametrize("family", QUANTISED)
def test_the_engines_agree_on_mxfp4(make_pair: MakePair, kernels: None, tmp_path: Path, family: str) -> None:
    source = save_in_mxfp4(make_pair(family) / "target", tmp_path / "target")
    assert_agree(Bundle.open(export(source, tmp_path / "bundle", drafter=str(make_pair(family) / "drafter"))))


def test_float_weights_are_left_to_another_engine(make_pair: MakePair, tmp_path: Path) -> None:
    source = make_pair("e2b") / "target"
    with pytest.raises(UnsupportedGraphError, match=r"weights of .* are not quantised\): use --engine ort"):
        SimdEngine(Bundle.open(export(source, tmp_path / "float", quantize="none")), threads=1)


def test_a_float_drafter_of_a_trained_target_too(make_pair: MakePair, tmp_path: Path) -> None:
    source = make_pair("half") / "target"
    with pytest.raises(UnsupportedGraphError, match="not quantised"):
        SimdEngine(Bundle.open(export(source, tmp_path / "float", quantize="none")), threads=1)


def test_sizes_are_those_of_the_configuration(bundles: dict[str, Bundle]) -> None:
    """E2B's upper half has a double-wide mlp, and its layers read two caches of the lower half and have none."""
    bundle = bundles["e2b"]
    models = BundleModels(bundle)
    model, drafter = models.target, models.drafter
    assert [layer.source for layer in model.layers] == [0, 1, 2, 1, 1, 2]
    assert ["self_attn.k_proj" in layer.matrices for layer in model.layers] == [True] * 3 + [False] * 3
    assert [layer.matrices["mlp.gate_proj"].rows for layer in model.layers] == [96] * 3 + [192] * 3
    assert model.config.first_shared_layer == 3
    assert drafter is not None
    assert [layer.source for layer in drafter.layers] == [1, 1, 1, 2]
