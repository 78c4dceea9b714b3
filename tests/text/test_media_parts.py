"""Parts of messages that are pictures: found in their order, and replaced by placeholders."""

import base64
from typing import Any

import pytest

from ondevice.errors import PromptError
from ondevice.text import media_parts
from ondevice.text.chat_template import ChatTemplate
from ondevice.text.media_parts import PLACEHOLDERS, Image, bytes_of_base64, picture_of_url, take_media
from ondevice.text.messages import plain_messages
from tests.text.templates import GEMMA, GEMMA_4_SEEING

TEXT = {"type": "text", "text": "a"}


def url(data: bytes = b"abc") -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def test_messages_without_pictures_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": [TEXT]}, {"role": "user", "content": "a"}, {"role": "x"}, 7, None]
    found, images = take_media(messages)
    assert found is messages
    assert images == []


def test_pictures_in_their_order() -> None:
    first, second, third, fourth = Image("1"), Image("2", 70), "3", b"4"
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [first, TEXT, {"type": "image", "image": second}], "name": "n"},
        {"role": "assistant", "content": "a"},
        {
            "role": "user",
            "content": ({"type": "image", "image": third}, {"type": "image_url", "image_url": url(fourth)}),
        },
    ]
    found, images = take_media(messages)
    assert images == [first, second, Image(third), Image(fourth)]
    assert found == [
        {"role": "user", "content": [PLACEHOLDERS[0], TEXT, PLACEHOLDERS[0]], "name": "n"},
        messages[1],
        {"role": "user", "content": [PLACEHOLDERS[0], PLACEHOLDERS[0]]},
    ]
    assert first in messages[0]["content"]
    plain = plain_messages(found)
    text = ChatTemplate(GEMMA_4_SEEING).render(plain)
    assert text.count("<|image|>") == 4
    assert text.index("<|image|>a<|image|>") < text.index("<|image|><|image|>")


def test_a_template_that_reads_no_parts_has_no_place_for_pictures() -> None:
    messages = plain_messages([{"role": "user", "content": [PLACEHOLDERS[0], TEXT]}])
    with pytest.raises(PromptError, match="no place for pictures"):
        ChatTemplate(GEMMA).render(messages)


@pytest.mark.parametrize(
    ("detail", "tokens"), [(None, None), ("auto", None), ("low", 70), ("high", 560), ("original", 1120)]
)
def test_details(detail: str | None, tokens: int | None) -> None:
    assert picture_of_url(url(), detail, "message 1") == Image(b"abc", tokens)


@pytest.mark.parametrize(
    ("address", "detail", "message"),
    [
        (7, None, "not a data: URI"),
        (None, None, "not a data: URI"),
        ("https://example.com/a.png", None, "no address is opened"),
        ("DATA:image/png;base64,YWJj", None, "not a data: URI"),
        ("data:image/png,abc", None, "is not base64"),
        ("data:image/png;base64", None, "is not base64"),
        ("data:image/png;base64,YWJjY", None, "base64 is damaged"),
        ("data:image/png;base64,YWJj=", None, "base64 is damaged"),
        ("data:image/png;base64,YQ==YQ==", None, "padding before its end"),
        ("data:image/png;base64,-_-_", None, "base64 is damaged"),
        ("data:image/png;base64,YW Jj", None, "base64 is damaged"),
        ("data:image/png;base64,äöüß", None, "base64 is damaged"),
        (url(), "best", "use one of auto, low, high, original"),
        (url(), ["low"], "use one of auto"),
    ],
)
def test_addresses_that_are_refused(address: object, detail: object, message: str) -> None:
    with pytest.raises(PromptError, match=message) as caught:
        picture_of_url(address, detail, "message 1")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", range(300, 304))
@pytest.mark.parametrize("line", ["\n", "\r\n"])
@pytest.mark.parametrize("piece", [7, 76, 1 << 20])
def test_base64_in_lines_and_without_padding(
    monkeypatch: pytest.MonkeyPatch, length: int, line: str, piece: int
) -> None:
    monkeypatch.setattr(media_parts, "PIECE", piece)
    content = bytes(range(256)) + bytes(length - 256)
    lines = base64.encodebytes(content).decode().replace("\n", line)
    for text in (lines, lines.rstrip("\r\n="), lines.replace(line, "").rstrip("=")):
        assert bytes_of_base64(text, "it") == content


def test_more_than_is_read_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_parts, "MAX_BYTES", 3000)
    assert picture_of_url(url(b"x" * 3000), None, "it").source == b"x" * 3000
    assert bytes_of_base64(base64.encodebytes(b"x" * 3000).decode(), "it") == b"x" * 3000
    monkeypatch.setattr(base64, "b64decode", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(PromptError, match="has a picture of more than"):
        picture_of_url(url(b"x" * 3010), None, "it")
