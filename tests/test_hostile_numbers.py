"""Bundles and saved prefixes with right hashes whose numbers are hostile: one error, the same on both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice.errors import BundleCorruptError
from tests.conftest import ENGINES
from tests.hostile import hostile_bundle, hostile_session, numbers, patterns

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
