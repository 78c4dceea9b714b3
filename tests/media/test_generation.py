"""Prompts with pictures, from messages to text: as transformers, whatever is drafted or cached or runs beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import PIL.Image
import pytest

import ondevice
from ondevice import Image, Model, PromptError
from ondevice.bundle import Bundle
from ondevice.engines.simd.caches import LookupSettings
from ondevice.engines.simd.engine import SimdEngine
from ondevice.generate.batch import ForwardTimes
from ondevice.generate.drafters.protocol import Draft, DraftRequest, Forecast
from tests.conftest import ENGINES
from tests.fixtures.tiny_models import BEGIN, END, IMAGE, PATCH, POOL
from tests.media.pictures_made import noise, png, saved
from tests.media.towers import assert_greedy

SQUARE, WIDE = png(50, 50), png(30, 90, seed=1)
TEXT = "a b\na b\na the fox\na b"
TOKENS = 70


def asked(*pictures: object, text: str = TEXT) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": each} for each in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module", params=ENGINES)
def model(request: pytest.FixtureRequest, seeing: dict[tuple[str, str], Bundle]) -> Iterator[Model]:
    with ondevice.load(seeing["seeing", "int8"].path, engine=request.param, threads=1) as made:
        yield made


def ids_after(model: Model, prompt: Any, **options: Any) -> tuple[int, ...]:
    model.forget()
    return model.generate(prompt, max_new_tokens=40, image_tokens=TOKENS, **options).token_ids


@pytest.mark.needs("oracle", "onnxruntime")
def test_float_weights_generate_what_transformers_does(
    seeing: dict[tuple[str, str], Bundle], family: str, oracle: Any
) -> None:
    """From two files to logits, through the reference's own image processor."""
    import torch
    from transformers import Gemma4ImageProcessorPil

    processor = Gemma4ImageProcessorPil(patch_size=PATCH, pooling_kernel_size=POOL, max_soft_tokens=TOKENS)
    files = [PIL.Image.fromarray(noise(50, 50)), PIL.Image.fromarray(noise(30, 90, seed=1))]
    features = processor(files, return_tensors="pt")
    with ondevice.load(seeing[family, "none"].path, engine="ort", threads=1) as model:
        prompt = asked(saved(files[0]), saved(files[1]))
        ids = model.encode(prompt, image_tokens=TOKENS)
        reply = model.generate(
            prompt, max_new_tokens=24, image_tokens=TOKENS, drafter="none", logprobs=True, top_logprobs=5
        )
    counts = [int(count) for count in features["num_soft_tokens_per_image"]]
    assert [token for token in ids if token in (BEGIN, IMAGE, END)] == [
        BEGIN, *[IMAGE] * counts[0], END, BEGIN, *[IMAGE] * counts[1], END
    ]  # fmt: skip
    whole = torch.tensor([[*ids, *reply.token_ids]])
    with torch.no_grad():
        logits = oracle(
            whole,
            pixel_values=features["pixel_values"],
            image_position_ids=features["image_position_ids"],
            mm_token_type_ids=(whole == IMAGE).long(),
        ).logits[0]
    assert_greedy(reply, logits[len(ids) - 1 : -1], (IMAGE,))


@pytest.mark.parametrize("way", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}, {"repetition_penalty": 1.3}])
@pytest.mark.parametrize("drafter", ["mtp", "ngram", "medusa", "blockwise", "auto"])
def test_drafts_change_no_token_after_a_picture(model: Model, drafter: str, way: dict[str, Any]) -> None:
    prompt = asked(SQUARE, WIDE)
    plain = ids_after(model, prompt, drafter="none", **way)
    found = ids_after(
        model, prompt, drafter=drafter, num_assistant_tokens=4, num_assistant_tokens_schedule="constant", **way
    )
    assert found == plain
    if drafter in ("mtp", "medusa"):
        assert model.last_stats.drafted > 0


SETTINGS: dict[str, dict[str, Any]] = {
    "int8": {"kv_cache": "int8"},
    "lookup": {"lookup": LookupSettings("lookup", keys=32, window=64, learn=64)},
    "nomad": {"lookup": LookupSettings("nomad", keys=32, window=64, learn=64)},
    "two threads": {"threads": 2},
}
"""Options of the simd engine; lookups choose among the keys of pictures already."""


@pytest.mark.parametrize("setting", SETTINGS)
def test_drafts_change_no_token_with_other_caches_and_attentions(
    seeing: dict[tuple[str, str], Bundle], setting: str
) -> None:
    bundle = seeing["seeing-e4b", "int8"]
    with Model(bundle, SimdEngine(bundle, **{"threads": 1, **SETTINGS[setting]}), 1) as model:
        for way in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}):
            plain = ids_after(model, asked(SQUARE, WIDE), drafter="none", **way)
            for drafter in ("auto", "swift", "early-exit"):
                assert ids_after(model, asked(SQUARE, WIDE), drafter=drafter, **CONSTANT, **way) == plain, drafter


CONSTANT: dict[str, Any] = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}


def test_a_draft_model_drafts_for_text_and_is_silent_after_a_picture(seeing: dict[tuple[str, str], Bundle]) -> None:
    bundle = seeing["seeing", "int8"].path
    with ondevice.load(bundle, engine="simd", threads=1) as model:
        text = [{"role": "user", "content": TEXT}]
        for prompt in (text, asked(SQUARE), text):
            plain = ids_after(model, prompt, drafter="none")
            assert ids_after(model, prompt, drafter=bundle, **CONSTANT) == plain
            assert (model.last_stats.drafted > 0) == (prompt is text)


def test_ngrams_of_a_text_with_the_same_picture_twice(model: Model) -> None:
    """Rows after a repeated beginning of a picture cannot be drafted; the text around it can."""
    prompt = [*asked(SQUARE), {"role": "assistant", "content": TEXT}, *asked(SQUARE)]
    plain = ids_after(model, prompt, drafter="none")
    assert ids_after(model, prompt, drafter="ngram", **CONSTANT) == plain


class Echo:
    """A drafter that proposes the prompt, soft tokens included."""

    name = "echo"

    def __init__(self) -> None:
        self._prompt: list[int] = []

    def begin(self, prompt_ids: Sequence[int], session: Any) -> None:
        self._prompt = list(prompt_ids)

    def forget(self) -> None:
        self._prompt = []

    def forecast(self, nodes: int) -> Forecast:
        return Forecast(np.full(nodes, 0.9, np.float32), self.name)

    def draft(self, request: DraftRequest) -> Draft:
        first = next(index for index, token in enumerate(self._prompt) if token < 0)
        tokens = self._prompt[first - 1 : first - 1 + request.nodes]
        return Draft.chain(tokens, [0.9] * len(tokens), self.name)

    def observe(self, emitted: Sequence[int], outputs: Any, path: Sequence[int]) -> None:
        pass


def test_soft_tokens_in_a_draft_are_dropped(model: Model) -> None:
    plain = ids_after(model, asked(SQUARE), drafter="none")
    assert ids_after(model, asked(SQUARE), drafter=Echo(), **CONSTANT) == plain
    assert model.last_stats.drafted > 0


def test_a_cancelled_generation_encodes_no_further_picture(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from ondevice.media.tower import Tower

    encode, encoded = Tower.encode, list[object]()

    def cancelling(self: Tower, piece: Any, cancelled: Any) -> Any:
        encoded.append(piece)
        model.cancel()
        assert encode(self, piece, cancelled) is None

    model.forget()
    monkeypatch.setattr(Tower, "encode", cancelling)
    reply = model.generate(asked(SQUARE, WIDE), image_tokens=TOKENS)
    assert (reply.finish_reason, reply.token_ids, len(encoded)) == ("cancelled", (), 1)


@pytest.mark.needs("llguidance")
def test_a_grammar_after_a_picture(model: Model) -> None:
    form = {"type": "choice", "choice": ["ab", "the fox"]}
    texts = {
        drafter: model.generate(
            asked(SQUARE), image_tokens=TOKENS, response_format=form, drafter=drafter, max_new_tokens=9
        ).text
        for drafter in ("none", "auto", "grammar")
    }
    assert len(set(texts.values())) == 1
    assert texts["none"] in form["choice"]


@pytest.mark.parametrize("drafter", ["none", "auto"])
def test_the_placeholder_is_never_generated(model: Model, drafter: str) -> None:
    ids = ids_after(model, asked(SQUARE), drafter=drafter, logit_bias={IMAGE: 1e5})
    assert len(ids) > 3
    assert IMAGE not in ids


def test_the_picture_counts(model: Model) -> None:
    replies = {ids_after(model, asked(each)) for each in (SQUARE, WIDE, png(50, 50, seed=2))}
    assert len(replies) == 3
    assert ids_after(model, asked(SQUARE, WIDE)) != ids_after(model, asked(WIDE, SQUARE))


def test_the_cache_tells_pictures_apart(model: Model) -> None:
    """The same text with another picture shares nothing beyond the token that begins a picture."""
    model.forget()
    options: dict[str, Any] = {"max_new_tokens": 8, "image_tokens": TOKENS, "logprobs": True}
    first = model.generate(asked(SQUARE), **options)
    before = model.encode(asked(SQUARE), image_tokens=TOKENS).index(BEGIN) + 1
    other = model.generate(asked(png(50, 50, seed=2)), **options)
    assert model.last_stats.cached_tokens <= before
    again = model.generate(asked(SQUARE), **options)
    assert again.logprobs == first.logprobs != other.logprobs
    assert model.last_stats.cached_tokens == model.last_stats.prompt_tokens - 1
    model.generate(asked(SQUARE), **{**options, "image_tokens": 140})
    assert model.last_stats.cached_tokens <= before


def test_a_cached_picture_is_not_encoded_again(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from ondevice.media.tower import Tower

    encode, encoded = Tower.encode, list[object]()

    def counted(self: Tower, piece: Any, cancelled: Any) -> Any:
        encoded.append(piece)
        return encode(self, piece, cancelled)

    monkeypatch.setattr(Tower, "encode", counted)
    model.forget()
    history = asked(SQUARE)
    for turn in range(3):
        reply = model.generate(history, max_new_tokens=6, image_tokens=TOKENS)
        history += [{"role": "assistant", "content": "ab"}, {"role": "user", "content": f"the {'a' * turn}"}]
        assert len(encoded) == 1, reply
    model.generate([*history[:-1], *asked(WIDE)], max_new_tokens=6, image_tokens=TOKENS)
    assert len(encoded) == 2


def test_a_picture_is_encoded_once_for_all_conversations(
    seeing: dict[tuple[str, str], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within `media_cache_bytes`, here room for one picture, until the model forgets."""
    from ondevice.media.tower import Tower

    encode, encoded = Tower.encode, list[bytes]()

    def counted(self: Tower, piece: Any, cancelled: Any) -> Any:
        encoded.append(piece.digest())
        return encode(self, piece, cancelled)

    monkeypatch.setattr(Tower, "encode", counted)
    room = 4 * 64 * TOKENS
    with ondevice.load(
        seeing["seeing", "int8"].path, engine="ort", threads=1, cache_bytes=0, media_cache_bytes=room
    ) as model:

        def reply(text: str, *pictures: bytes) -> tuple[int, ...]:
            prompt = [{"role": "system", "content": text}, *asked(*pictures)]
            return model.generate(prompt, max_new_tokens=4, image_tokens=TOKENS).token_ids

        first = reply("a", SQUARE)
        reply("b", SQUARE)
        assert len(encoded) == 1
        reply("a", WIDE)
        assert reply("a", SQUARE) == first
        assert len(encoded) == 3
        model.forget()
        assert reply("a", SQUARE) == first
        assert len(encoded) == 4
    with ondevice.load(seeing["seeing", "int8"].path, engine="ort", threads=1, media_cache_bytes=0) as model:
        for text in "ab":
            reply(text, SQUARE)
    assert len(encoded) == 6
    with pytest.raises(ondevice.UsageError, match="media_cache_bytes must be a whole number"):
        ondevice.load(seeing["seeing", "int8"].path, media_cache_bytes=-1)


@pytest.mark.parametrize("chunk", [11, 1000])
def test_sequences_beside_each_other_change_nothing(model: Model, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where prefills are cut within pictures, because others are decoding."""
    monkeypatch.setattr(ForwardTimes, "prefill_chunk", lambda self: chunk)
    prompts = [asked(SQUARE), asked(WIDE), [{"role": "user", "content": TEXT}], asked(WIDE, SQUARE)]
    alone = [ids_after(model, prompt) for prompt in prompts]
    model.forget()
    running = [model.stream(prompt, max_new_tokens=40, image_tokens=TOKENS) for prompt in prompts]
    found: list[list[int]] = [[] for _ in prompts]
    left, rounds = list(range(len(prompts))), 0
    while left:
        rounds += 1
        for number in [each for each in left if each < rounds / 2]:  # each begins when those before it are decoding
            step = next(running[number], None)
            if step is None:
                left.remove(number)
            else:
                found[number] += step.token_ids
    assert [tuple(each) for each in found] == alone


def test_a_saved_prompt_with_a_picture(model: Model, tmp_path: Any) -> None:
    expected = ids_after(model, asked(SQUARE))
    count = model.save_prefix(asked(SQUARE), tmp_path / "prefix", image_tokens=TOKENS)
    model.forget()
    assert model.load_prefix(tmp_path / "prefix") == count
    reply = model.generate(asked(SQUARE), max_new_tokens=40, image_tokens=TOKENS)
    assert reply.token_ids == expected
    assert model.last_stats.cached_tokens == count - 1


@pytest.mark.parametrize(
    "part",
    [
        Image(SQUARE),
        {"type": "image", "image": Image(SQUARE)},
        {"type": "image", "image": bytearray(SQUARE)},
        {"type": "image", "image": PIL.Image.fromarray(noise(50, 50))},
        {"type": "image", "image": noise(50, 50)},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,BASE64", "detail": "low"}},
        {"type": "image_url", "image_url": "data:image/png;base64,BASE64"},
        Image(SQUARE, tokens=70),
    ],
    ids=lambda part: str(type(part).__name__),
)
def test_every_way_to_give_a_picture(model: Model, part: Any) -> None:
    import base64
    import json

    if isinstance(part, dict) and part["type"] == "image_url":
        part = json.loads(json.dumps(part).replace("BASE64", base64.b64encode(SQUARE).decode()))
    expected = ids_after(model, asked(SQUARE))
    messages = [{"role": "user", "content": [part, {"type": "text", "text": TEXT}]}]
    assert ids_after(model, messages) == expected


def test_a_path(model: Model, tmp_path: Any) -> None:
    path = tmp_path / "a picture.png"
    path.write_bytes(SQUARE)
    expected = ids_after(model, asked(SQUARE))
    assert ids_after(model, asked(path)) == ids_after(model, asked(str(path))) == expected
    with pytest.raises(PromptError, match=r"picture 1 cannot be read: .*nothing.png: No such file"):
        ids_after(model, asked(tmp_path / "nothing.png"))


def test_a_placeholder_in_a_users_text_is_text(model: Model) -> None:
    """It neither counts as a picture nor takes the place of one."""
    spelled = asked(SQUARE, text="the <|image|> fox")
    ids = model.encode(spelled, image_tokens=TOKENS)
    assert ids.count(IMAGE) == ids_of(model, asked(SQUARE)).count(IMAGE)
    assert ids_after(model, spelled) != ids_after(model, asked(SQUARE))
    assert IMAGE not in model.encode([{"role": "user", "content": "the <|image|> fox"}])


def ids_of(model: Model, prompt: Any) -> Sequence[int]:
    return model.encode(prompt, image_tokens=TOKENS)


@pytest.mark.parametrize("prompt", ["the <|image|> fox", [2, IMAGE, 40], [{"role": "system", "content": "<|image|>"}]])
def test_a_placeholder_without_a_picture_is_refused(model: Model, prompt: Any) -> None:
    with pytest.raises(PromptError, match="1 placeholders for 0 pictures"):
        model.generate(prompt)


def test_wrong_parts_are_refused(model: Model) -> None:
    def refused(part: object) -> str:
        with pytest.raises(PromptError) as caught:
            model.generate([{"role": "user", "content": [part]}])
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no address is opened" in refused({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}})
    assert "no address is opened" in refused({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}})
    assert "base64 is damaged" in refused({"type": "image_url", "image_url": "data:image/png;base64,iVBO!Rw=="})
    assert "is not base64" in refused({"type": "image_url", "image_url": "data:image/png,abc"})
    assert "without a field 'image'" in refused({"type": "image"})
    assert "a sound whose base64 is not a string" in refused({"type": "input_audio", "input_audio": {}})
    url = {"url": "data:image/png;base64,aaaa", "detail": "best"}
    assert "use one of auto, low, high" in refused({"type": "image_url", "image_url": url})


def test_pictures_that_fill_the_context_are_refused_before_they_are_decoded(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ondevice.media.images import Picture

    def never(self: Picture, index: int) -> Any:
        raise AssertionError("decoded")

    monkeypatch.setattr(Picture, "piece", never)
    with pytest.raises(ondevice.ContextOverflowError, match="the context holds 256"):
        model.generate(asked(SQUARE, SQUARE, SQUARE, SQUARE), image_tokens=140)


def test_the_tokens_of_a_picture_have_no_probability(model: Model) -> None:
    with pytest.raises(ondevice.UsageError, match="prompt_logprobs is for text"):
        model.generate(asked(SQUARE), prompt_logprobs=True, image_tokens=TOKENS)


def test_a_text_bundle_refuses_pictures(reference_bundle: Any) -> None:
    with ondevice.load(reference_bundle, threads=1) as model, pytest.raises(PromptError, match="reads text only"):
        model.generate(asked(SQUARE))
