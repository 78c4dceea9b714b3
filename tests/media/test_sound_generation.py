"""Prompts with sounds, from files to text: as transformers, whatever is drafted or cached or runs beside them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

import ondevice
from ondevice import Audio, Image, Model, PromptError
from ondevice.bundle import Bundle
from ondevice.bundle_format.audio import AudioEntry
from ondevice.generate.batch import ForwardTimes
from ondevice.media.sounds import Sound
from tests.conftest import ENGINES
from tests.fixtures.tiny_models import (
    AUDIO,
    BEGIN,
    BEGIN_AUDIO,
    END,
    END_AUDIO,
    IMAGE,
    MEL_BINS,
    PATCH,
    POOL,
)
from tests.media.pictures_made import noise, png, saved
from tests.media.sounds_made import tone, wav
from tests.media.towers import assert_greedy, audio_tower, encoded, reference_model

FAMILY = "seeing"
SHORT, LONG = wav(tone(0.7, 300)), wav(tone(1.9, 900), 44_100)
TEXT = "a b\na b\na the fox\na b"
WORDS = {"type": "text", "text": TEXT}
CONSTANT: dict[str, Any] = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}


def audio_entry(bundle: Bundle) -> AudioEntry:
    assert bundle.manifest.audio is not None
    return bundle.manifest.audio


def asked(*parts: object) -> list[dict[str, Any]]:
    heard = [Audio(part) if isinstance(part, bytes) else part for part in parts]
    return [{"role": "user", "content": [*heard, WORDS]}]


@pytest.fixture(scope="module", params=ENGINES)
def model(request: pytest.FixtureRequest, seeing: dict[tuple[str, str], Bundle]) -> Iterator[Model]:
    with ondevice.load(seeing[FAMILY, "int8"].path, engine=request.param, threads=1) as made:
        yield made


def ids_after(model: Model, prompt: Any, **options: Any) -> tuple[int, ...]:
    model.forget()
    return model.generate(prompt, max_new_tokens=40, image_tokens=70, **options).token_ids


@pytest.mark.needs("oracle", "onnxruntime")
def test_float_weights_generate_what_transformers_does(
    seeing: dict[tuple[str, str], Bundle], checkpoints: dict[str, Path]
) -> None:
    """From two sounds and a picture between them to logits, through the reference's own processors."""
    import torch
    from transformers import Gemma4AudioFeatureExtractor, Gemma4ImageProcessorPil

    oracle = reference_model(checkpoints[FAMILY], FAMILY)
    sounds = [tone(0.7, 300), tone(1.9, 900)]
    heard = Gemma4AudioFeatureExtractor(feature_size=MEL_BINS)(sounds, return_tensors="pt")
    picture = PIL.Image.fromarray(noise(50, 50))
    seen = Gemma4ImageProcessorPil(patch_size=PATCH, pooling_kernel_size=POOL, max_soft_tokens=70)(
        [picture], return_tensors="pt"
    )
    prompt = asked(wav(sounds[0], bits=320), Image(saved(picture)), Audio(sounds[1], rate=16_000))
    with ondevice.load(seeing[FAMILY, "none"].path, engine="ort", threads=1) as model:
        ids = model.encode(prompt, image_tokens=70)
        # The tenth token is the reference's placeholder of a video, which it would read as padding.
        reply = model.generate(prompt, max_new_tokens=9, image_tokens=70, drafter="none", logprobs=True, top_logprobs=5)
    patches = int(seen["num_soft_tokens_per_image"][0])
    assert [token for token in ids if BEGIN <= token <= END_AUDIO] == [
        BEGIN_AUDIO, *[AUDIO] * 18, END_AUDIO, BEGIN, *[IMAGE] * patches, END, BEGIN_AUDIO, *[AUDIO] * 48, END_AUDIO
    ]  # fmt: skip
    whole = torch.tensor([[*ids, *reply.token_ids]])
    with torch.no_grad():
        logits = oracle(
            whole,
            pixel_values=seen["pixel_values"],
            image_position_ids=seen["image_position_ids"],
            input_features=heard["input_features"],
            input_features_mask=heard["input_features_mask"],
            mm_token_type_ids=(whole == IMAGE).long() + 3 * (whole == AUDIO).long(),
        ).logits[0]
    assert_greedy(reply, logits[len(ids) - 1 : -1], (IMAGE, AUDIO))


@pytest.mark.needs("onnxruntime")
def test_int8_layers_are_near_float32(seeing: dict[tuple[str, str], Bundle]) -> None:
    """Rows point almost in the same direction, and are not the same."""
    towers = [seeing[FAMILY, quantize] for quantize in ("none", "int8")]
    piece = Sound(Audio(LONG), audio_entry(towers[0]), "it").piece(0)
    exact, found = (encoded(audio_tower(bundle), piece) for bundle in towers)
    cosines = (exact * found).sum(axis=1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(found, axis=1)
    assert (found != exact).any()
    assert cosines.min() > 0.98, cosines
    formats = {each.format for each in towers[1].manifest.tensors["audio.onnx"].tensors.values()}
    assert formats == {"int8", "float32"}


def test_the_sound_counts(model: Model) -> None:
    def first(*parts: object) -> Any:
        model.forget()
        return model.generate(asked(*parts), max_new_tokens=1, logprobs=True, top_logprobs=5).logprobs[0].top

    tops = [first(SHORT), first(LONG), first(wav(tone(0.7, 310))), first(SHORT, LONG), first(LONG, SHORT)]
    assert all(tops[index] != other for index in range(5) for other in tops[:index])


@pytest.mark.parametrize("way", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}])
@pytest.mark.parametrize("drafter", ["mtp", "ngram", "medusa", "auto"])
def test_drafts_change_no_token_after_a_sound(model: Model, drafter: str, way: dict[str, Any]) -> None:
    prompt = asked(SHORT, LONG)
    plain = ids_after(model, prompt, drafter="none", **way)
    assert ids_after(model, prompt, drafter=drafter, **CONSTANT, **way) == plain
    if drafter in ("mtp", "medusa"):
        assert model.last_stats.drafted > 0


@pytest.mark.parametrize("chunk", [11, 1000])
def test_sequences_beside_each_other_change_nothing(model: Model, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where prefills are cut within sounds, because others are decoding."""
    monkeypatch.setattr(ForwardTimes, "prefill_chunk", lambda self: chunk)
    prompts = [asked(SHORT), asked(LONG, Image(png(50, 50))), [{"role": "user", "content": TEXT}], asked(LONG, SHORT)]
    ways: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}]
    for way in ways:
        alone = [ids_after(model, prompt, **way) for prompt in prompts]
        model.forget()
        running = [model.stream(prompt, max_new_tokens=40, image_tokens=70, **way) for prompt in prompts]
        found: list[list[int]] = [[] for _ in prompts]
        left, rounds = list(range(len(prompts))), 0
        while left:
            rounds += 1
            for number in [each for each in left if each < rounds / 2]:  # each begins while those before it decode
                step = next(running[number], None)
                if step is None:
                    left.remove(number)
                else:
                    found[number] += step.token_ids
        assert [tuple(each) for each in found] == alone


def test_the_cache_tells_sounds_apart(model: Model) -> None:
    """The same text after another sound of the same length shares nothing beyond the token that begins a sound."""
    options: dict[str, Any] = {"max_new_tokens": 8, "logprobs": True, "top_logprobs": 3}
    model.forget()
    first = model.generate(asked(SHORT), **options)
    before = model.encode(asked(SHORT)).index(BEGIN_AUDIO) + 1
    other = model.generate(asked(wav(tone(0.7, 310))), **options)
    assert model.last_stats.cached_tokens <= before
    again = model.generate(asked(SHORT), **options)
    assert again.token_ids == first.token_ids
    assert first.logprobs[0].top != other.logprobs[0].top
    assert model.last_stats.cached_tokens == model.last_stats.prompt_tokens - 1


def test_a_sound_of_more_than_30_seconds(chat_model: Model) -> None:
    """Each 30 seconds are a sound of their own, and nothing is left out."""
    sound = tone(31.0)
    whole = asked(Audio(sound, 16_000))
    parts = asked(Audio(sound[:480_000], 16_000), Audio(sound[480_000:], 16_000))
    ids = chat_model.encode(whole)
    assert ids == chat_model.encode(parts)
    assert [ids.count(token) for token in (BEGIN_AUDIO, AUDIO, END_AUDIO)] == [2, 750 + 25, 2]
    chat_model.forget()
    reply = chat_model.generate(whole, max_new_tokens=6, temperature=0.0)
    assert chat_model.generate(parts, max_new_tokens=6, temperature=0.0).token_ids == reply.token_ids
    assert chat_model.last_stats.cached_tokens == len(ids) - 1


def test_every_way_to_give_a_sound(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "a sound.wav"
    path.write_bytes(SHORT)
    samples = np.rint(tone(0.7, 300) * 32768).astype(np.int16)
    expected = model.generate(asked(SHORT), max_new_tokens=2, logprobs=True).logprobs
    data = base64.b64encode(SHORT).decode()
    for part in (
        Audio(path),
        Audio(samples, rate=16_000),
        {"type": "audio", "audio": SHORT},
        {"type": "audio", "audio": str(path)},
        {"type": "audio", "audio": Audio(SHORT)},
        {"type": "audio", "audio": samples, "rate": 16_000},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
    ):
        assert model.generate(asked(part), max_new_tokens=2, logprobs=True).logprobs == expected
        assert model.last_stats.cached_tokens == model.last_stats.prompt_tokens - 1


@pytest.mark.parametrize("drafter", ["none", "auto"])
def test_the_placeholder_is_never_generated(model: Model, drafter: str) -> None:
    ids = ids_after(model, asked(SHORT), drafter=drafter, logit_bias={AUDIO: 1e5, IMAGE: 1e5})
    assert len(ids) > 3
    assert not {AUDIO, IMAGE}.intersection(ids)


def test_a_placeholder_in_a_users_text_is_text(model: Model) -> None:
    spelled = [{"role": "user", "content": [Audio(SHORT), {"type": "text", "text": "the <|audio|> fox"}]}]
    assert model.encode(spelled).count(AUDIO) == 18
    assert AUDIO not in model.encode([{"role": "user", "content": "the <|audio|> fox"}])


def test_placeholders_of_another_kind_are_refused(model: Model) -> None:
    """A picture never takes the place of a sound."""
    silent: list[dict[str, Any]] = [
        {"role": "system", "content": "<|audio|>"},
        {"role": "user", "content": [Image(png(50, 50))]},
    ]
    with pytest.raises(PromptError, match="2 placeholders for 1 pictures"):
        model.generate(silent)
    swapped: list[dict[str, Any]] = [{"role": "system", "content": "<|audio|>"}, *asked(Image(png(50, 50)), SHORT)]
    swapped[1]["content"].pop()
    with pytest.raises(PromptError, match="3 placeholders for 2"):
        model.generate(swapped)


def test_wrong_sounds_are_refused(model: Model) -> None:
    def refused(part: object) -> str:
        with pytest.raises(PromptError) as caught:
            model.generate(asked(SHORT, part))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "without a field 'audio'" in refused({"type": "audio"})
    assert "base64 is not a string" in refused({"type": "input_audio"})
    assert "base64 is not a string" in refused({"type": "input_audio", "input_audio": {"data": 7}})
    assert "base64 is damaged" in refused({"type": "input_audio", "input_audio": {"data": "!!!!", "format": "wav"}})
    assert "sound 2 is not a sound file" in refused(b"no sound at all")
    assert "sound 2 is too short" in refused(wav(tone(0.01)))


def test_sounds_that_fill_the_context_are_refused_before_they_are_decoded(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sound, "piece", lambda self, index: pytest.fail("decoded"))
    with pytest.raises(ondevice.ContextOverflowError, match="the context holds 256"):
        model.generate(asked(wav(tone(12.0))))
    assert model.encode(asked(SHORT)).count(AUDIO) == 18  # counted by its header


def test_bundles_without_an_audio_tower(seeing: dict[tuple[str, str], Bundle], reference_bundle: Path) -> None:
    deaf = seeing["seeing-e4b", "int8"].path
    with ondevice.load(deaf, threads=1) as model:
        with pytest.raises(PromptError, match="no audio tower: export it again"):
            model.generate(asked(SHORT))
        assert model.generate(asked(Image(png(50, 50), 70)), max_new_tokens=2).token_ids
    with ondevice.load(reference_bundle, threads=1) as model, pytest.raises(PromptError, match="reads text only"):
        model.generate(asked(SHORT))
