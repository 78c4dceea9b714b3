"""A draft model beside the reference target, on both engines: the same weights, and coarser ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice import Model, UsageError
from ondevice_export import export
from tests.conftest import ENGINES, REFERENCE
from tests.fixtures.pairwise import pairwise
from tests.model.test_lossless import PROMPTS

CONSTANT: dict[str, Any] = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}


@pytest.fixture(scope="module")
def coarse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with a head of 4 bits: mostly of the same opinion."""
    return export(REFERENCE / "target", tmp_path_factory.mktemp("coarse") / "coarse", head_bits=4, drafter="none")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The draft model that ships beside the target: of another opinion in most rounds."""
    return export(REFERENCE / "draft-model", tmp_path_factory.mktemp("small") / "small", drafter="none")


@pytest.fixture(scope="module", params=ENGINES)
def model(request: pytest.FixtureRequest, reference_bundle: Path, coarse: Path) -> Iterator[Model]:
    with ondevice.load(reference_bundle, engine=request.param, threads=1, drafter=coarse) as loaded:
        yield loaded


@pairwise(schedule=["constant", "auto"], temperature=[0.0, 1.0], prompt=list(PROMPTS))
def test_the_text_is_that_of_plain_decoding(
    model: Model, coarse: Path, prompt: str, temperature: float, schedule: str
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 96, "temperature": temperature, "seed": 12}
    plain = model.generate(PROMPTS[prompt], drafter="none", **options)
    options["num_assistant_tokens_schedule"] = schedule
    alone = model.generate(PROMPTS[prompt], **options)
    assert alone.token_ids == plain.token_ids
    assert alone.stats.drafter == "draft:coarse"
    if schedule == "constant":
        assert 0.5 * alone.stats.drafted < alone.stats.accepted
    beside = model.generate(PROMPTS[prompt], drafter=f"auto+{coarse}", **options)
    assert beside.token_ids == plain.token_ids
    assert beside.stats.drafter.startswith("mtp+ngram+")
    assert beside.stats.drafter.endswith("+draft:coarse")


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
def test_the_draft_model_that_ships_beside_the_target(reference_bundle: Path, small: Path, temperature: float) -> None:
    options: dict[str, Any] = {"max_new_tokens": 96, "temperature": temperature, "seed": 12}
    with ondevice.load(reference_bundle, engine="simd", threads=1, drafter=small) as model:
        for prompt in PROMPTS.values():
            plain = model.generate(prompt, drafter="none", **options)
            drafted = model.generate(prompt, **options, **CONSTANT)
            assert drafted.token_ids == plain.token_ids
            assert drafted.stats.drafter == "draft:small"
            assert drafted.stats.accepted > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
def test_the_target_itself_is_always_right(model: Model, reference_bundle: Path, temperature: float) -> None:
    """Past the window too, where rows are forgotten; its MTP drafter takes no part."""
    options: dict[str, Any] = {"max_new_tokens": 96, "temperature": temperature, "seed": 5}
    stats = model.generate(PROMPTS["long"], drafter=reference_bundle, **CONSTANT, **options).stats
    assert stats.accepted == stats.drafted > 60


@pytest.mark.parametrize("sampling", ["coupled", "ratio"])
def test_a_processor_that_forbids_every_token_is_the_error_of_plain_decoding(
    model: Model, reference_bundle: Path, sampling: str
) -> None:
    """Also after a draft that was accepted to its end, of which the draft model has read all tokens."""
    prompt, tokens = model.encode(PROMPTS["short"]), list[int]()

    def forbid(logits: np.ndarray, context: Sequence[int]) -> np.ndarray:
        return logits if len(context) < len(prompt) + 6 else np.full_like(logits, -np.inf)

    options: dict[str, Any] = {"temperature": 0.5, "seed": 3, "logits_processors": [forbid], "draft_sampling": sampling}
    with pytest.raises(UsageError, match="every token is forbidden"):
        tokens.extend(
            token
            for step in model.stream(prompt, drafter=reference_bundle, **CONSTANT, **options)
            for token in step.token_ids
        )
    assert len(tokens) == 6


def test_drafts_after_rejections_are_those_of_a_fresh_reading(model: Model, small: Path) -> None:
    """Whatever was rewound: the text goes on from any place with the drafts that it would have had there."""
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0, "seed": 3, "drafter": small, **CONSTANT}
    prompt = model.encode(PROMPTS["short"])
    with model.stream(prompt, **options) as generation:
        rounds = [(step.token_ids, step.drafted, step.accepted) for step in generation]
    assert any(accepted < drafted for _, drafted, accepted in rounds)
    text = list(prompt)
    for (tokens, *_), (_, drafted, accepted) in itertools.pairwise(rounds[:7]):
        text += tokens
        model.forget()
        with model.stream(text[:-1], **{**options, "max_new_tokens": 40 - (len(text) - len(prompt)) + 1}) as fresh:
            next(fresh)
            step = next(fresh)
        assert (step.drafted, step.accepted) == (drafted, accepted)


def test_a_model_that_cannot_draft_for_it(reference_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must be one of auto, mtp, .*grammar, none, a draft bundle's directory"):
        ondevice.load(reference_bundle, drafter=tmp_path / "nowhere")
    with pytest.raises(UsageError, match="a name or a path, not 5"):
        ondevice.load(reference_bundle, drafter=5)  # type: ignore[arg-type]
