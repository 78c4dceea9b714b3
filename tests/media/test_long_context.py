"""Pictures in prompts of more than 8,192 tokens, as their first part and in their middle: the logits are those of
transformers, and drafts change no token.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice import Model
from ondevice.arrays import Float32Array
from ondevice.bundle import MANIFEST, Bundle
from ondevice.engines.ort import OrtEngine
from ondevice.engines.protocol import Engine, Outputs, Rows
from ondevice.engines.simd.caches import LookupSettings
from ondevice.engines.simd.engine import SimdEngine
from ondevice.generate import loop
from ondevice.generate.request import Limits, SamplingOptions
from ondevice.generate.sampling.sampler import Sampler
from ondevice.text.messages import ChatOptions
from tests.fixtures.tiny_models import IMAGE, SEEING
from tests.media.pictures_made import png
from tests.media.towers import reference_model

LONG, CONTEXT = 8192, 9216
PLACES = ("front", "middle")
FAMILIES = (SEEING[0], SEEING[2])
"""Pictures whose tokens see earlier ones only, and pictures whose tokens see each other."""


def asked(place: str, seed: int = 0) -> list[dict[str, Any]]:
    """A question with a picture in this place, and words that repeat now and then, so that n-grams find some."""
    rng = random.Random(0)
    words = (" ".join(rng.choice(["a", "b", "ab", "the fox", "the"]) for _ in range(1120)) for _ in range(2))
    first, second = ({"type": "text", "text": each} for each in words)
    picture = {"type": "image", "image": png(50, 50, seed=seed)}
    parts = [picture, first, second] if place == "front" else [first, picture, second]
    return [{"role": "user", "content": parts}]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def long_bundle(
    seeing: dict[tuple[str, str], Bundle], family: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Bundle]:
    """A function that makes a copy of a family's bundle with a longer context, by its weight format."""

    def make(quantize: str) -> Bundle:
        origin, directory = seeing[family, quantize], tmp_path_factory.mktemp("long") / "bundle"
        shutil.copytree(origin.path, directory)
        target = dataclasses.replace(origin.manifest.target, context_length=CONTEXT)
        manifest = dataclasses.replace(origin.manifest, target=target)
        (directory / MANIFEST).write_text(manifest.to_json(), "utf-8")
        return Bundle.open(directory)

    return make


def prefilled(model: Model, engine: Engine, prompt: Any) -> tuple[list[int], Float32Array, Float32Array]:
    """The prompt's ids, the soft rows of its picture, and the logits of all its rows."""
    ids, soft = model._encode(prompt, ChatOptions(), 70)
    logits = list[Float32Array]()

    def forward(rows: Rows) -> Outputs:
        (outputs,) = engine.forward([dataclasses.replace(rows, wanted=range(len(rows.tree)))])
        logits.append(outputs.logits.copy())
        return dataclasses.replace(outputs, logits=outputs.logits[-1:], hidden=outputs.hidden[-1:])

    sampler = Sampler(SamplingOptions(temperature=0.0))
    next(loop.run(loop.generate(engine.open_session(), ids, sampler, Limits(1), soft=soft), forward))
    rows = soft[0].encode(lambda: False)
    assert rows is not None
    return ids, rows, np.concatenate(logits)


@pytest.mark.needs("oracle", "onnxruntime")
def test_float_weights_give_the_logits_of_transformers(
    long_bundle: Callable[[str], Bundle], checkpoints: dict[str, Path], family: str
) -> None:
    """In rows before the picture, in it, just after it, far from it, and at the end; it changes all from it on."""
    import torch
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    oracle, bundle = reference_model(checkpoints[family], family, "sdpa"), long_bundle("none")
    engine = OrtEngine(bundle, 2)
    with Model(bundle, engine, 2) as model:
        for place in PLACES:
            ids, embeddings, found = prefilled(model, engine, asked(place))
            *_, other = prefilled(model, engine, asked(place, seed=5))
            soft = [index for index, token in enumerate(ids) if token < 0]
            end = soft[-1] + 1
            assert len(ids) > LONG
            assert (soft[0] > LONG // 2) == (place == "middle")
            rows = [
                2,
                soft[0] - 1,
                soft[0],
                soft[5],
                end,
                end + 1,
                end + 700,
                LONG - 1,
                LONG,
                len(ids) - 2,
                len(ids) - 1,
            ]
            whole = torch.tensor([[IMAGE if token < 0 else token for token in ids]])
            masks = oracle.create_masks_for_generate(
                oracle.config,
                oracle.get_input_embeddings()(whole),
                None,
                None,
                torch.arange(len(ids))[None],
                (whole == IMAGE).long(),
            )
            with torch.no_grad():
                given = BaseModelOutputWithPooling(pooler_output=(torch.tensor(embeddings),))
                expected = oracle(
                    whole,
                    mm_encoder_outputs={"image": given},
                    attention_mask=masks,
                    logits_to_keep=torch.tensor(rows),
                ).logits[0]
            np.testing.assert_allclose(found[rows], expected.numpy(), atol=1e-4, rtol=0)
            changes = np.abs(found[rows] - other[rows]).max(axis=1)
            assert not changes[:2].any()
            assert changes[2:].min() > 1e-3


SETTINGS: dict[str, dict[str, Any]] = {
    "fp16": {},
    "int8": {"kv_cache": "int8"},
    "lookup": {"lookup": LookupSettings("lookup", keys=64, window=256, learn=256)},
    "nomad of int8": {"kv_cache": "int8", "lookup": LookupSettings("nomad", keys=64, window=256, learn=256)},
}
"""Options of the simd engine; lookups choose among some 8,000 keys, those of the picture too."""


@pytest.fixture(scope="module", params=[*SETTINGS, pytest.param("ort", marks=pytest.mark.needs("onnxruntime"))])
def model(request: pytest.FixtureRequest, long_bundle: Callable[[str], Bundle]) -> Iterator[Model]:
    bundle = long_bundle("int8")
    engine = (
        OrtEngine(bundle, 1) if request.param == "ort" else SimdEngine(bundle, threads=1, **SETTINGS[request.param])
    )
    with Model(bundle, engine, 1) as made:
        yield made


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}], ids=["T=0", "T=1"])
def test_drafts_change_no_token(model: Model, place: str, way: dict[str, Any]) -> None:
    """Nor a bit of a log probability."""
    options: dict[str, Any] = {"max_new_tokens": 40, "image_tokens": 70, "logprobs": True, "top_logprobs": 5, **way}
    prompt = asked(place)
    model.forget()
    plain = model.generate(prompt, drafter="none", **options)
    assert plain.stats.prompt_tokens > LONG
    assert len(plain.token_ids) > 30
    for drafter in ("mtp", "ngram", "medusa", "auto"):
        drafting: dict[str, Any] = {
            "drafter": drafter,
            "num_assistant_tokens": 4,
            "num_assistant_tokens_schedule": "constant",
        }
        reply = model.generate(prompt, **drafting, **options)
        assert (reply.token_ids, reply.logprobs) == (plain.token_ids, plain.logprobs), drafter
        assert reply.stats.drafted > 0 or drafter == "ngram", drafter
