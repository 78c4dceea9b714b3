"""Bundles and saved prefixes with right hashes whose numbers are hostile: one error, the same on both engines."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.version import Version

import ondevice
from ondevice.bundle import Bundle
from ondevice.engines.protocol import Rows, TokenTree
from ondevice.engines.simd.engine import SimdEngine
from ondevice.errors import BundleCorruptError
from tests.conftest import ENGINES
from tests.fixtures.hostile import hostile_bundle, hostile_session, numbers, patterns, token_ids

IDS = [2, 300, 301, 17, 99, 420]

MESSAGE = (
    "the model computed NaN or infinity in place of logits: its weights, or the saved prefix that was loaded, are "
    "damaged: export the bundle again"
)


def assert_refused(model: ondevice.Model, prompt: list[int]) -> None:
    """Every way to choose tokens raises the one error, and the model stays usable."""
    ways: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 1, "top_p": 0.9}]
    for options in ways:
        for drafter in ("none", "mtp", "medusa", "ngram"):
            with pytest.raises(BundleCorruptError) as raised:
                model.generate(prompt, max_new_tokens=4, drafter=drafter, **options)
            assert str(raised.value) == MESSAGE


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["k_norm.weight", "layer_scalar", "post_attention_layernorm.weight"])
def test_weights_of_3e38_are_one_error(reference_bundle: Path, tmp_path: Path, engine: Any, name: str) -> None:
    bundle = hostile_bundle(reference_bundle, tmp_path / "bundle", {name: numbers("3e38")})
    with ondevice.load(bundle, engine=engine, threads=1, verify_hashes=True) as model:
        assert_refused(model, IDS)


@pytest.mark.parametrize("attention", ["exact", "lookup", "lookup-drafts", "nomad"])
@pytest.mark.parametrize("cache", ["fp16", "int8"])
def test_lookups_of_keys_that_are_no_numbers_are_one_error(
    reference_bundle: Path, tmp_path: Path, attention: Any, cache: Any
) -> None:
    """After 2,560 tokens, where lookups begin. Codebooks of such keys once corrupted the heap."""
    bundle = hostile_bundle(reference_bundle, tmp_path / "bundle", {"k_norm.weight": numbers("3e38")})
    with ondevice.load(bundle, engine="simd", threads=1, attention=attention, kv_cache=cache) as model:
        assert_refused(model, IDS * 430)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["nan", "inf", "3e38"])
def test_a_saved_prefix_that_is_no_numbers_is_one_error(
    reference_bundle: Path, tmp_path: Path, engine: Any, kind: str
) -> None:
    path = tmp_path / "prefix"
    with ondevice.load(reference_bundle, engine=engine, threads=1) as model:
        model.save_prefix(IDS * 20, path)
        expected = model.generate([5, 6, 7], max_new_tokens=4, temperature=0.0).token_ids
        hostile_session(path, patterns(kind, "float16" if engine == "simd" else "float32"))
        model.forget()
        assert model.load_prefix(path) == len(IDS * 20)
        assert_refused(model, [*IDS * 20, 7])
        assert model.generate([5, 6, 7], max_new_tokens=4, temperature=0.0).token_ids == expected


ORDERING = "token_ordering"
"""End of the names of tensors with the token ids of shortlists: of the drafter and of heads."""


def test_token_ids_outside_the_vocabulary_are_refused_by_simd(reference_bundle: Path, tmp_path: Path) -> None:
    for name in ("masked_embedding.token_ordering", "shortlist.token_ordering"):
        bundle = hostile_bundle(reference_bundle, tmp_path / "bundle", {name: token_ids(0.001)})
        with pytest.raises(BundleCorruptError, match=rf"tensor {name} holds numbers outside 0\.\.6143"):
            ondevice.load(bundle, engine="simd", threads=1)


def test_token_ids_that_change_after_they_were_checked_are_not_used(reference_bundle: Path, tmp_path: Path) -> None:
    """A bundle's data files stay mapped, and another program may write to them."""
    changed = hostile_bundle(reference_bundle, tmp_path / "changed", {ORDERING: token_ids()})
    bundle = Path(shutil.copytree(reference_bundle, tmp_path / "bundle"))
    engine = SimdEngine(Bundle.open(bundle), 1)
    session = engine.open_session()
    engine.forward([Rows(session, TokenTree.chain(IDS), [0])])
    session.commit(range(len(IDS)))
    for path in bundle.glob("*.data"):
        with path.open("r+b") as file:
            file.write((changed / path.name).read_bytes())
    hidden = np.ones(engine.target.hidden_size, np.float32)
    found = [
        session.draft_step(7, hidden).candidates,
        *(session.propose(kind, hidden).candidates for kind in engine.heads),
    ]
    engine.close()
    assert all(((each >= 0) & (each < engine.target.vocab_size)).all() for each in found)


@pytest.mark.needs("onnxruntime")
def test_proposals_outside_the_vocabulary_are_left_out_by_ort(reference_bundle: Path, tmp_path: Path) -> None:
    """Its graphs read the ids. The text stays what it was; ONNX Runtime 1.25 refuses such ids, which is an error."""
    hostile = hostile_bundle(reference_bundle, tmp_path / "bundle", {ORDERING: token_ids(0.5)})
    replies, refused = [], 0
    for each in (reference_bundle, hostile):
        with ondevice.load(each, engine="ort", threads=1) as model:
            for drafter in ("mtp", "medusa", "blockwise"):
                options: dict[str, Any] = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}
                options |= {"max_new_tokens": 12, "temperature": 0.0}
                try:
                    replies.append(model.generate(IDS, drafter=drafter, **options).token_ids)
                except BundleCorruptError:
                    assert each == hostile
                    refused += 1
    assert len(set(replies)) == 1
    assert refused == 0 or Version(version("onnxruntime")) < Version("1.32")
