"""Pictures on the page at `/`: attached, shown, sent, kept in the browser, refused where the model reads text only."""

from __future__ import annotations

import base64
import json
import re
import wave
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import PIL.Image
import PIL.ImageDraw
import pytest
from numpy.typing import NDArray
from playwright.sync_api import expect

from ondevice import Generation, Model, Prompt
from tests.conftest import ROOT
from tests.fixtures.chat_bundle import Script
from tests.media.pictures_made import noise, png, saved
from tests.media.sounds_made import tone
from tests.server.page.browsing import DRAFTS, PATIENCE_MS, bodies_of, resize, send, wait_for_end
from tests.server.served import Served, serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

PICTURE, OTHER = png(60, 80), png(90, 50, seed=1)
pytestmark = pytest.mark.needs("onnxruntime")


class Scripted(NamedTuple):
    """A server whose model sees, and generates the text that a test sets."""

    served: Served
    says: Callable[[str], None]


@pytest.fixture(scope="module")
def served(chat_bundle: Path, chat_model: Model) -> Iterator[Served]:
    with serving(chat_bundle, lambda: chat_model) as server:
        yield server
        server.wait_until_idle()


@pytest.fixture
def scripted(served: Served, chat_model: Model, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    text = ["<turn|>"]
    stream = chat_model.stream

    def say(prompt: Prompt, **options: Any) -> Generation:
        script = Script(text[0], len(chat_model.encode(prompt)), chat_model.tokenizer)
        return stream(prompt, logits_processors=[script], **options)

    monkeypatch.setattr(chat_model, "stream", say)
    return Scripted(served, lambda wanted: text.__setitem__(0, wanted))


def file(content: bytes = PICTURE, name: str = "photo.png", kind: str = "image/png") -> dict[str, Any]:
    return {"name": name, "mimeType": kind, "buffer": content}


def sent(body: dict[str, Any], index: int = -1) -> tuple[list[bytes], list[str]]:
    """Pictures and texts of a message of a request."""
    content = body["input"][index]["content"]
    if isinstance(content, str):
        return [], [content]
    pictures = [part["image_url"] for part in content if part["type"] == "input_image"]
    texts = [part["text"] for part in content if part["type"] == "input_text"]
    return [base64.b64decode(url.partition(",")[2]) for url in pictures], texts


def give(page: Page, way: str, *files: dict[str, Any]) -> None:
    """Let the page get files by a paste or a drop."""
    given = [[base64.b64encode(each["buffer"]).decode(), each["name"], each["mimeType"]] for each in files]
    page.evaluate(
        """([way, given]) => {
            const data = new DataTransfer();
            for (const [content, name, type] of given) {
                data.items.add(new File([Uint8Array.from(atob(content), (one) => one.charCodeAt(0))], name, { type }));
            }
            const made = way === "paste"
                ? new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true })
                : new DragEvent(way, { dataTransfer: data, bubbles: true, cancelable: true });
            document.getElementById("message").dispatchEvent(made);
        }""",
        [way, given],
    )


def expect_pictures(page: Page, selector: str, *sizes: list[int]) -> None:
    """Wait until exactly these pictures are shown, each loaded: [width, height] in pixels of the file."""
    page.wait_for_function(
        """([selector, sizes]) => JSON.stringify(
            [...document.querySelectorAll(selector)].map((each) => [each.naturalWidth, each.naturalHeight])
        ) === JSON.stringify(sizes)""",
        arg=[selector, sizes],
    )


def test_a_picture_is_attached_shown_sent_and_kept(open_page: Any, scripted: Scripted, chat_model: Model) -> None:
    page = open_page(scripted.served)
    bodies = bodies_of(page)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Attach files").click()
    chooser.value.set_files([file(), file(OTHER, "other.png")])
    expect(page.locator("#attached li")).to_have_count(2)
    expect_pictures(page, "#attached img", [80, 60], [50, 90])
    scripted.says("A fox.<turn|>")
    send(page, "the fox")
    wait_for_end(page)
    expect(page.locator("#attached")).to_be_hidden()
    expect(page.locator(".body")).to_have_text("A fox.")
    assert sent(bodies[-1]) == ([PICTURE, OTHER], ["the fox"])
    shown = [{"type": "image_url", "image_url": part["image_url"]} for part in bodies[-1]["input"][0]["content"][:2]]
    length = len(chat_model.encode([{"role": "user", "content": [*shown, {"type": "text", "text": "the fox"}]}]))
    assert length > 120
    for _ in range(2):
        expect_pictures(page, ".user img", [80, 60], [50, 90])
        assert page.locator(".user img").first.get_attribute("alt") == "photo.png"
        expect(page.locator(".user .text")).to_have_text("the fox")
        expect(page.locator("#context")).to_have_text(f"{length + len('A fox.') + 1} of 4,096 tokens")
        page.reload()
        expect(page.locator("#model")).not_to_have_text("ondevice")
    send(page, "and now?")
    wait_for_end(page)
    assert sent(bodies[-1], 0) == ([PICTURE, OTHER], ["the fox"])
    assert sent(bodies[-1]) == ([], ["and now?"])


@pytest.mark.parametrize("way", ["paste", "drop"])
def test_pictures_are_pasted_and_dropped(open_page: Any, scripted: Scripted, way: str) -> None:
    page = open_page(scripted.served)
    bodies = bodies_of(page)
    give(page, way, file(), file(OTHER, "other.png"))
    expect(page.locator("#attached li")).to_have_count(2)
    page.get_by_role("button", name="Remove photo.png").press("Enter")
    expect(page.locator("#attached li")).to_have_count(1)
    expect(page.get_by_role("button", name="Remove other.png")).to_be_focused()
    expect(page.locator("#announcer")).to_have_text("photo.png is removed.")
    page.press("#message", "Enter")  # a picture without a text
    wait_for_end(page)
    assert sent(bodies[-1]) == ([OTHER], [])
    expect(page.locator("#list .name")).to_have_text("other.png")


def test_dragging_shows_where_to_drop(open_page: Any, scripted: Scripted) -> None:
    page = open_page(scripted.served)
    give(page, "dragover", file())
    expect(page.locator("body")).to_have_class("side dropping")
    give(page, "dragleave", file())
    expect(page.locator("body")).to_have_class("side")


def test_editing_keeps_pictures_or_removes_them(open_page: Any, scripted: Scripted) -> None:
    page = open_page(scripted.served)
    bodies = bodies_of(page)
    give(page, "paste", file())
    expect(page.locator("#attached li")).to_have_count(1)
    send(page, "first")
    wait_for_end(page)
    page.click("text=Regenerate")
    wait_for_end(page)
    assert sent(bodies[-1]) == ([PICTURE], ["first"])
    page.press("#message", "ArrowUp")
    give(page, "paste", file(OTHER, "other.png"))
    expect(page.locator(".editor li")).to_have_count(2)
    page.get_by_role("button", name="Remove photo.png").click()
    page.fill(".editor textarea", "second")
    page.press(".editor textarea", "Enter")
    wait_for_end(page)
    assert sent(bodies[-1]) == ([OTHER], ["second"])
    expect_pictures(page, ".user img", [50, 90])
    page.press("#message", "ArrowUp")
    page.get_by_role("button", name="Remove other.png").click()
    page.press(".editor textarea", "Escape")  # takes the removal back
    expect_pictures(page, ".user img", [50, 90])


def expect_files(page: Page, count: int) -> None:
    """Wait until the browser keeps so many files: it writes and removes them by the side."""
    page.wait_for_function(
        """(count) => new Promise((resolve) => {
            const opening = indexedDB.open("ondevice", 1);
            opening.onsuccess = () => {
                const asked = opening.result.transaction("files").objectStore("files").count();
                asked.onsuccess = () => {
                    opening.result.close();
                    resolve(asked.result === count);
                };
            };
        })""",
        arg=count,
    )


def test_export_and_delete(open_page: Any, scripted: Scripted) -> None:
    page = open_page(scripted.served)
    give(page, "paste", file())
    expect(page.locator("#attached li")).to_have_count(1)
    send(page, "first")
    wait_for_end(page)
    expect_files(page, 1)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    kept = json.loads(download.value.path().read_text("utf-8"))["messages"][0]["files"]
    assert [(each["name"], each["url"]) for each in kept] == [
        ("photo.png", "data:image/png;base64," + base64.b64encode(PICTURE).decode())
    ]
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()
    expect(page.locator("#list .name")).to_have_count(0)
    expect(page.locator(".turn")).to_have_count(0)
    expect_files(page, 0)


def test_a_browser_without_room_says_so_and_sends_all_the_same(open_page: Any, scripted: Scripted) -> None:
    page = open_page(scripted.served)
    bodies = bodies_of(page)
    page.evaluate(
        """() => {
            IDBObjectStore.prototype.put = () => { throw new DOMException("full", "QuotaExceededError"); };
        }"""
    )
    give(page, "paste", file())
    expect(page.locator("#attached li")).to_have_count(1)
    scripted.says("A fox.<turn|>")
    for text in ("first", "second"):
        send(page, text)
        wait_for_end(page)
        expect(page.locator("#status")).to_contain_text("no room for the files" if text == "first" else "")
        assert sent(bodies[-1], 0) == ([PICTURE], ["first"])
    page.reload()
    expect(page.locator("#model")).not_to_have_text("ondevice")
    expect(page.locator(".gone")).to_have_text("photo.png is not kept in this browser")
    send(page, "third")
    wait_for_end(page)
    expect(page.locator(".failure")).to_contain_text("photo.png is not kept in this browser: edit its message")


@pytest.mark.parametrize(
    ("content", "kind", "size"),
    [
        (saved(PIL.Image.fromarray(noise(60, 80)), "BMP"), "image/bmp", (80, 60)),  # not a format of the server
        (saved(PIL.Image.new("RGB", (16400, 20)), "PNG"), "image/png", (4096, 5)),  # a side that is too long
        (PICTURE + bytes(8 << 20), "image/png", (80, 60)),  # a file that is too large
    ],
    ids=["BMP", "long", "large"],
)
def test_what_the_server_would_refuse_is_drawn_again(
    open_page: Any, scripted: Scripted, content: bytes, kind: str, size: tuple[int, int]
) -> None:
    page = open_page(scripted.served)
    bodies = bodies_of(page)
    page.set_input_files("#files", [file(content, "photo", kind)])
    expect(page.locator("#attached li")).to_have_count(1)
    page.press("#message", "Enter")
    wait_for_end(page)
    [[picture], _] = sent(bodies[-1])
    with PIL.Image.open(BytesIO(picture)) as opened:
        assert (opened.format, opened.size) == ("JPEG", size)


def test_a_file_that_is_no_picture(open_page: Any, scripted: Scripted) -> None:
    page = open_page(scripted.served)
    page.set_input_files("#files", [file(b"never a picture", "letter.png")])
    expect(page.locator("#status")).to_have_text("letter.png is not a picture that this browser can read.")
    expect(page.locator("#attached")).to_be_hidden()


def wav(samples: NDArray[np.float32], rate: int = 16_000) -> bytes:
    """A WAV file as most programs write it, which browsers play: 16 bits, without further chunks."""
    content = BytesIO()
    with wave.open(content, "wb") as written:
        written.setparams((samples.reshape(len(samples), -1).shape[1], 2, rate, 0, "NONE", ""))
        written.writeframes((samples * 32767).round().astype("<i2").tobytes())
    return content.getvalue()


def heard(body: dict[str, Any]) -> bytes:
    """The sound of a request's last message."""
    [part, *_] = body["input"][-1]["content"]
    assert (part["type"], part["input_audio"]["format"]) == ("input_audio", "wav")
    return base64.b64decode(part["input_audio"]["data"])


def test_a_wav_file_is_sent_as_it_is(open_page: Any, scripted: Scripted) -> None:
    page = open_page(scripted.served)
    bodies = bodies_of(page)
    sound = wav(tone(0.5))
    page.set_input_files("#files", [file(sound, "call.wav", "audio/wav"), file()])
    expect(page.locator("#attached audio")).to_have_count(1)
    scripted.says("A fox.<turn|>")
    send(page, "the fox")
    wait_for_end(page)
    expect(page.locator(".body")).to_have_text("A fox.")
    assert heard(bodies[-1]) == sound
    assert sent(bodies[-1]) == ([PICTURE], ["the fox"])
    page.wait_for_function("() => document.querySelector('.user audio').duration === 0.5")
    assert page.locator(".user audio").get_attribute("aria-label") == "call.wav"


def test_other_sounds_become_wav_files(open_page: Any, scripted: Scripted) -> None:
    page = open_page(scripted.served)
    bodies = bodies_of(page)
    left = tone(0.5, rate=44_100)
    page.set_input_files(
        "#files", [file(wav(np.stack([left, 0 * left], axis=1), rate=44_100), "call.ogg", "audio/ogg")]
    )
    expect(page.locator("#attached audio")).to_have_count(1)
    page.press("#message", "Enter")
    wait_for_end(page)
    with wave.open(BytesIO(heard(bodies[-1]))) as opened:
        assert opened.getparams()[:4] == (1, 2, 16_000, 8_000)
        samples = np.frombuffer(opened.readframes(8_000), np.int16) / 32767
    wanted = tone(0.5) / 2
    assert np.abs(samples - wanted)[200:-200].max() < 0.02 * np.abs(wanted).max()


def test_a_recording(open_page: Any, scripted: Scripted) -> None:
    page = open_page(scripted.served)
    bodies = bodies_of(page)
    button = page.get_by_role("button", name="Record", exact=True)
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#status")).to_have_text(re.compile(r"Recording: [1-9]\d* s"))
    button.click()
    expect(button).to_have_attribute("aria-pressed", "false")
    expect(page.locator("#attached audio")).to_have_count(1)
    page.press("#message", "Enter")
    wait_for_end(page)
    with wave.open(BytesIO(heard(bodies[-1]))) as opened:
        assert opened.getparams()[:3] == (1, 2, 16_000)
        assert opened.getnframes() > 15_900
    expect(page.locator(".failure")).to_have_count(0)
    expect(page.locator("#list .name")).to_have_text("recording.wav")


def test_without_a_microphone(open_page: Any, scripted: Scripted) -> None:
    page = open_page(scripted.served)
    page.evaluate("() => { navigator.mediaDevices.getUserMedia = () => Promise.reject(new Error('no')); }")
    page.get_by_role("button", name="Record", exact=True).click()
    expect(page.locator("#status")).to_have_text("This browser gives no microphone to this page.")


def test_a_file_that_is_no_sound(open_page: Any, scripted: Scripted) -> None:
    page = open_page(scripted.served)
    page.set_input_files("#files", [file(b"never a sound", "letter.mp3", "audio/mpeg")])
    expect(page.locator("#status")).to_have_text("letter.mp3 is not a sound that this browser can read.")


def poster() -> bytes:
    """A picture that a reader recognises in the documentation."""
    picture = PIL.Image.new("RGB", (640, 400), "#9fd3f5")
    draw = PIL.ImageDraw.Draw(picture)
    draw.rectangle((0, 290, 640, 400), fill="#6fae5c")
    draw.ellipse((500, 40, 580, 120), fill="#ffd34d")
    draw.rectangle((170, 190, 370, 330), fill="#f3e3c3")
    draw.polygon([(150, 190), (270, 90), (390, 190)], fill="#c0503c")
    draw.rectangle((250, 250, 300, 330), fill="#7a4b2a")
    draw.rectangle((195, 215, 235, 250), fill="#5b8bd0")
    return saved(picture)


def test_picture_of_the_documentation(
    open_page: Any,
    scripted: Scripted,
    chat_model: Model,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(chat_model, "stream", partial(chat_model.stream, **DRAFTS))
    page = open_page(scripted.served)
    resize(page, 1000, 720)
    page.set_input_files("#files", [file(poster(), "house.png")])
    expect(page.locator("#attached li")).to_have_count(1)
    scripted.says(
        "A **house** with a red roof and a brown door, on a meadow. The sun is shining, and the sky is clear:\n\n"
        "- its one window is *blue*\n- nobody is to be seen<turn|>"
    )
    send(page, "What is in this picture?")
    wait_for_end(page)
    expect_pictures(page, ".user img", [640, 400])
    assert page.evaluate("document.documentElement.scrollWidth") == 1000
    folder = ROOT / "docs" / "images" if request.config.getoption("--pictures") else tmp_path
    page.locator("#message").blur()
    page.screenshot(path=folder / "page-picture.png")
    assert (folder / "page-picture.png").stat().st_size < 150_000


def test_an_empty_chat_says_what_the_model_reads(open_page: Any, scripted: Scripted) -> None:
    page = open_page(scripted.served)
    expect(page.locator("#reads li")).to_have_text(["text", "images", "sound"])
    expect(page.locator("#able")).to_contain_text("reads text, images, and sound")
    expect(page.locator(".example")).to_have_count(4)
    with page.expect_file_chooser() as chooser:
        page.locator(".example").first.click()
    expect(page.locator("#message")).to_have_value("What is in this picture?")
    chooser.value.set_files([file()])
    expect(page.locator("#attached li")).to_have_count(1)


def test_the_buttons_fit_into_a_narrow_window(open_page: Any, scripted: Scripted) -> None:
    page = open_page(scripted.served)
    resize(page, 320, 640)
    for name in ("#attach", "#record", "#thinking-option", "#send"):
        expect(page.locator(name)).to_be_visible()
    right = "each => each.getBoundingClientRect().right"
    assert page.locator("#send").evaluate(right) < page.locator("#form").evaluate(right)


def test_an_imported_conversation_has_its_files(open_page: Any, scripted: Scripted, tmp_path: Path) -> None:
    page = open_page(scripted.served)
    give(page, "paste", file())
    expect(page.locator("#attached li")).to_have_count(1)
    send(page, "first")
    wait_for_end(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    download.value.save_as(tmp_path / "exported.json")
    other = open_page(scripted.served)
    bodies = bodies_of(other)
    other.set_input_files("#imported", tmp_path / "exported.json")
    expect_pictures(other, ".user img", [80, 60])
    expect_files(other, 1)
    other.click("text=Regenerate")
    expect(other.locator(".reply .versions")).to_contain_text("2 / 2")
    assert sent(bodies[-1]) == ([PICTURE], ["first"])


def limited(page: Page, served: Served, **modalities: bool) -> None:
    """Load the page again, for a model that reads only some kinds of files."""
    props = {**served.get("/props").body, "modalities": modalities}
    page.route("**/props*", lambda route: route.fulfill(json=props))
    page.reload()
    expect(page.locator("#model")).not_to_have_text("ondevice", timeout=PATIENCE_MS)


def test_a_model_that_reads_text_only(open_page: Any, scripted: Scripted) -> None:
    page = open_page(scripted.served)
    limited(page, scripted.served, vision=False, audio=False)
    for name in ("#attach", "#record", "#attached"):
        expect(page.locator(name)).to_be_hidden()
    give(page, "drop", file())
    expect(page.locator("#status")).to_have_text("This model reads text only.")
    expect(page.locator("#attached")).to_be_hidden()


def test_a_model_that_reads_pictures_but_no_sounds(open_page: Any, scripted: Scripted) -> None:
    page = open_page(scripted.served)
    limited(page, scripted.served, vision=True, audio=False)
    expect(page.locator("#record")).to_be_hidden()
    expect(page.locator("#files")).to_have_attribute("accept", "image/*")
    give(page, "drop", file(wav(tone(0.5)), "call.wav", "audio/wav"), file())
    expect(page.locator("#attached img")).to_have_count(1)
    expect(page.locator("#attached audio")).to_have_count(0)
