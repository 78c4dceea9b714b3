"""The page at `/`, in a browser without a window."""

import gzip
import json
import re
import time
from functools import partial
from itertools import chain

import pytest
from playwright.sync_api import expect

from ondevice.server.guard import Rules
from ondevice.server.page import FILES
from tests.conftest import ROOT
from tests.server.page.browsing import DRAFTS, PATIENCE_MS, bodies_of, new_chat, resize, send, wait_for_end

PAGE = ROOT / "ondevice" / "server" / "page"


def test_send_and_stream(open_page, scripted):
    page = open_page(scripted.served)
    expect(page.locator("#model")).to_have_text("reference")
    page.check("#thinking")
    scripted.says(
        "<|channel>thought\nLight is scattered.\n<channel|>Blue light is scattered most:\n\n"
        "```python\nprint('<b>blue</b>')\n```\nThat is all.<turn|>"
    )
    send(page, "Why is the sky <i>blue</i>?")
    wait_for_end(page)
    expect(page.locator(".user .text")).to_have_text("Why is the sky <i>blue</i>?")
    expect(page.locator(".body pre code")).to_have_text("print('<b>blue</b>')\n")
    expect(page.locator(".body p").last).to_have_text("That is all.")
    thoughts = page.locator("details .text")
    expect(thoughts).not_to_be_visible()
    expect(page.locator("summary")).to_have_text(re.compile(r"Thought for \d+(\.\d)? s"))
    page.click("summary")
    expect(thoughts).to_have_text("Light is scattered.")
    expect(page.locator(".figures")).to_have_text(re.compile(r"\d+ tokens · \d+\.\d tokens/s"))


def test_a_reload_keeps_the_message_that_is_being_written(open_page, scripted):
    page = open_page(scripted.served)
    message = page.get_by_label("Message", exact=True)
    message.fill("half a\nmessage")
    page.reload()
    expect(message).to_have_value("half a\nmessage")
    expect(page.locator("#model")).to_have_text("reference")
    scripted.says("Yes.<turn|>")
    message.press("Enter")
    wait_for_end(page)
    page.reload()
    expect(page.locator(".user .text")).to_have_text("half a\nmessage")
    expect(message).to_have_value("")


def test_markdown_and_nothing_else(open_page, scripted):
    """Formatting reaches the page; HTML is text, and no script, picture, form or style comes from a reply."""
    page = open_page(scripted.served)
    scripted.says(
        "**bold** and `code`\nnext line\n\n1. one\n2. two\n\n| a | b |\n|---|---|\n| c | d |\n\n"
        "<img src=x onerror=hit()> <script>hit()</script> <form action=/x><input name=key></form>\n\n"
        "[bad](javascript:hit()) [good](https://example.org) ![picture](https://example.org/x.png) "
        "<b onclick=hit()>b</b>\n\n<style>body { display: none }</style>\n\n"
        "<svg><a xlink:href='javascript:hit()'>s</a></svg><turn|>"
    )
    send(page, "Format")
    wait_for_end(page)
    body = page.locator(".body")
    for found in ("strong", "p > code", "br", "ol > li:nth-child(2)", "td"):
        expect(body.locator(found).first).to_be_visible() if found != "br" else expect(
            body.locator(found)
        ).to_have_count(1)
    expect(body).to_contain_text("<img src=x onerror=hit()> <script>hit()</script>")
    expect(body).to_contain_text("picture <b onclick=hit()>b</b>")
    for tag in ("img", "script", "form", "input", "style", "svg", "b", "iframe"):
        expect(body.locator(tag)).to_have_count(0)
    assert body.locator("a").evaluate_all(
        "all => all.map((a) => [a.textContent, a.getAttribute('href'), a.target])"
    ) == [
        ["bad", None, "_blank"],
        ["good", "https://example.org", "_blank"],
    ]


def stop_clock(page):
    """Let no time pass for the page, in which a label changes back."""
    page.clock.install(time=0)
    page.clock.pause_at(3600)


def test_copy(open_page, scripted):
    page = open_page(scripted.served)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    scripted.says("Run:\n\n```python\nprint(1)\n```\n\n- one\n- two<turn|>")
    send(page, "Code")
    wait_for_end(page)
    expect(page.locator(".bar .language")).to_have_text("python")
    stop_clock(page)
    page.get_by_role("button", name="Copy the code").click()
    expect(page.locator(".bar .copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "print(1)\n"
    page.get_by_role("button", name="Copy the reply").click()
    expect(page.locator(".foot .copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "Run:\n\n```python\nprint(1)\n```\n\n- one\n- two"


def test_a_refused_clipboard_is_said_and_the_label_returns(open_page, scripted):
    page = open_page(scripted.served)
    scripted.says("One.<turn|>")
    send(page, "Copy")
    wait_for_end(page)
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('no')); }")
    stop_clock(page)
    page.get_by_role("button", name="Copy the reply").click()
    expect(page.locator(".foot .copy")).to_have_text("Refused")
    page.clock.run_for(3000)
    expect(page.locator(".foot .copy")).to_have_text("Copy")


def test_a_long_block_is_rendered_seldom(open_page, served):
    """After a rendering of 50 ms, 200 ms pass before the next one, and it has all text that came meanwhile."""
    page = open_page(served)
    rest, waits, text = page.evaluate(
        """async () => {
            const { GrowingMarkdown } = await import("./rendering.js");
            let now = 1000;
            const waits = [];
            performance.now = () => now;
            window.setTimeout = (act, ms) => waits.push(ms);
            const growing = new GrowingMarkdown(document.createElement("div"), () => (now += 50));
            growing.append("one ");
            growing.render();
            growing.timer = 0;
            growing.append("two ");
            growing.append("three");
            growing.render();
            return [growing.restUntil - now, waits, growing.element.textContent];
        }"""
    )
    assert (rest, waits[1:]) == (200, [200])
    assert text.strip() == "one two three"


def test_growing_text_is_rendered_as_the_whole_text(open_page, served):
    page = open_page(served)
    text = (
        "1. one\n\n2. two\n\n# Head\n\na | b\n--|--\nc | d\n\n"
        "```js\n1\n\n2\n```\n\npara\n\n> quote\n\n- x\n\n- y\n\nend"
    )
    grown, settled, whole = page.evaluate(
        """async (text) => {
            const { GrowingMarkdown } = await import("./rendering.js");
            const element = document.createElement("div");
            const growing = new GrowingMarkdown(element, () => null);
            for (const character of text) {
                growing.text += character;
                growing.render();
            }
            const grown = element.innerText;
            const settled = growing.settled;
            growing.end();
            return [grown, settled, element.innerText];
        }""",
        text,
    )
    assert settled > len(text) / 2
    assert grown.split() == whole.split()


def test_a_second_message_has_the_first_before_it(open_page, scripted):
    page = open_page(scripted.served)
    bodies = bodies_of(page)
    scripted.says("One.<turn|>")
    send(page, "first")
    wait_for_end(page)
    scripted.says("Two.<turn|>")
    send(page, "second")
    wait_for_end(page)
    assert [message["content"] for message in bodies[-1]["input"]] == ["first", "One.", "second"]
    new_chat(page)
    send(page, "third")
    wait_for_end(page)
    assert [message["content"] for message in bodies[-1]["input"]] == ["third"]


def text(delta):
    return {"type": "response.output_text.delta", "delta": delta}


def stream(events):
    """A response with these events, as a server would write it."""
    response = {"id": "resp_1", "model": "reference"}
    begin = {"type": "response.created", "response": response}
    end = {"type": "response.completed", "response": {**response, "status": "completed", "usage": None}}
    numbered = [{**event, "sequence_number": number} for number, event in enumerate([begin, *events, end])]
    return "".join(f"id: {event['sequence_number']}\ndata: {json.dumps(event)}\n\n" for event in numbered)


A_ROUND = {"tokens": 2, "drafted": 3, "accepted": 1, "source": "ngram", "time_ms": 50}


def test_rounds_and_context(open_page, scripted):
    """Bars and figures show the rounds of a stream, and stay after the page is loaded again.

    The stream is written here: whether a server drafts depends on its measured costs.
    """
    page = open_page(scripted.served)
    rounds = [(1, 0, 0), (3, 4, 2), (1, 0, 0), (5, 4, 4), (1, 2, 0)]
    events = [{"type": "response.prompt_progress", "prompt_progress": {"total": 100, "processed": 100}}]
    for tokens, drafted, accepted in rounds:
        figures = {"tokens": tokens, "drafted": drafted, "accepted": accepted, "source": "ngram", "time_ms": 50}
        events += [text("word "), {"type": "response.round", "round": figures}]
    page.route("**/v1/responses", lambda route: route.fulfill(content_type="text/event-stream", body=stream(events)))
    send(page, "Repeat")
    wait_for_end(page)
    shown = "11 tokens · 50.0 tokens/s · 2.50 tokens per round · 60 % of 10 drafted tokens accepted"
    for _ in range(2):
        expect(page.locator(".figures")).to_have_text(shown)
        paths = [page.locator(f".rounds .{name}").get_attribute("d") for name in ("plain", "drafted", "accepted")]
        assert paths == ["M7 28v-2", "M2 28v-28M12 28v-28M17 28v-14", "M2 28v-14M12 28v-28"]
        expect(page.locator("#context")).to_have_text("111 of 8,192 tokens")
        page.reload()
        expect(page.locator("#model")).to_have_text("reference")


def test_regenerate_and_edit(open_page, scripted):
    page = open_page(scripted.served)
    bodies = bodies_of(page)
    scripted.says("One.<turn|>")
    send(page, "first")
    wait_for_end(page)
    scripted.says("Two.<turn|>")
    send(page, "second")
    wait_for_end(page)
    scripted.says("Three.<turn|>")
    page.click("text=Regenerate")
    expect(page.locator(".body").last).to_have_text("Three.")
    wait_for_end(page)
    assert [message["content"] for message in bodies[-1]["input"]] == ["first", "One.", "second"]
    page.locator(".edit").first.click()
    page.fill(".editor textarea", "changed")
    page.press(".editor textarea", "Enter")
    expect(page.locator(".turn")).to_have_count(2)
    wait_for_end(page)
    assert [message["content"] for message in bodies[-1]["input"]] == ["changed"]
    page.press("#message", "ArrowUp")
    page.press(".editor textarea", "Escape")
    expect(page.locator(".user .text")).to_have_text("changed")


def test_conversations_are_kept(open_page, scripted):
    page = open_page(scripted.served)
    scripted.says("One.<turn|>")
    send(page, "first question")
    wait_for_end(page)
    page.keyboard.press("Control+Shift+O")
    expect(page.locator(".turn")).to_have_count(0)
    send(page, "second question")
    wait_for_end(page)
    expect(page.locator("#list .name")).to_have_text(["second question", "first question"])
    page.get_by_role("button", name="Rename").click()
    page.fill("#list input", "A name")
    page.press("#list input", "Enter")
    page.reload()
    expect(page.locator("#list .name")).to_have_text(["A name", "first question"])
    expect(page.locator(".body")).to_have_text("One.")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    assert download.value.suggested_filename == "A name.json"
    kept = json.loads(download.value.path().read_text("utf-8"))
    assert [message["content"] for message in kept["messages"]] == ["second question", "One."]
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()
    expect(page.locator("#list .name")).to_have_text(["first question"])
    assert page.evaluate("Object.keys(localStorage).filter((name) => name.includes('conversation')).length") == 1


def test_settings(open_page, scripted):
    page = open_page(scripted.served)
    bodies = bodies_of(page)
    scripted.says("One.<turn|>")
    page.click("#settings")
    expect(page.get_by_label("Top-k")).to_have_attribute("placeholder", "off")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Drafter").select_option("none")
    page.get_by_label("Repeat penalty").fill("0")
    page.click("#done")
    expect(page.locator("#settings-dialog")).to_be_visible()  # the server would refuse it with each message
    page.get_by_label("Repeat penalty").fill("")
    page.click("#done")
    page.reload()
    expect(page.locator("#model")).to_have_text("reference")
    send(page, "first")
    wait_for_end(page)
    assert bodies[-1]["instructions"] == "Be brief."
    assert (bodies[-1]["temperature"], bodies[-1]["drafter"]) == (0.5, "none")
    page.click("#settings")
    page.click("#defaults")
    page.click("#done")
    send(page, "second")
    wait_for_end(page)
    assert {"temperature", "drafter", "instructions"}.isdisjoint(bodies[-1])


def test_tool_calls_are_shown(open_page, scripted):
    page = open_page(scripted.served)
    scripted.says('<|tool_call>call:get_weather{city:<|"|>Bern<|"|>,days:2}<tool_call|><|tool_response>')
    tools = [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]
    page.route(
        "**/v1/responses",
        lambda route: route.continue_(post_data={**route.request.post_data_json, "tools": tools}),
    )
    send(page, "Weather?")
    wait_for_end(page)
    expect(page.locator(".call summary")).to_have_text("Calls get_weather")
    page.click(".call summary")
    expect(page.locator(".call pre")).to_contain_text('"city": "Bern"')


def answer_about(row, names=("name", "size", "date", "owner", "kind")):
    """A reply whose lines repeat each other."""
    lines = "".join(f"{row}s.sort(key=lambda {row}: {row}.{name})  # stable\n" for name in names)
    return (
        f"Sorting {row}s by keys keeps the order of equal entries:\n\n```python\n{lines}```\n\n"
        "The **last** key counts most, so write it last.<turn|>"
    )


@pytest.mark.parametrize(
    ("name", "row", "size", "scheme"),
    [
        ("page-light", "row", (1000, 640), "light"),
        ("page-dark", "file", (1000, 640), "dark"),
        ("page-narrow", "user", (320, 640), "light"),
    ],
)
def test_pictures(open_page, scripted, request, monkeypatch, tmp_path, name, row, size, scheme):
    """Nothing is wider than the window; with --pictures, the pictures of the documentation are written."""
    monkeypatch.setattr(scripted.model, "stream", partial(scripted.model.stream, **DRAFTS))
    page = open_page(scripted.served)
    resize(page, *size)
    page.emulate_media(color_scheme=scheme)
    page.reload()
    expect(page.locator("#model")).to_have_text("reference")
    scripted.says(answer_about(row, ("owner", "date", "kind", "size", "name")))
    send(page, "Does sorting keep the order?")  # the drafter knows much of the next text, but not the order of names
    wait_for_end(page)
    page.keyboard.press("Control+Shift+O")
    expect(page.locator(".turn")).to_have_count(0)
    scripted.says(answer_about(row))
    send(page, f"How do I sort {row}s by several keys?")
    wait_for_end(page)
    assert page.evaluate("document.documentElement.scrollWidth") == size[0]
    assert page.evaluate("document.querySelector('#conversation').scrollWidth") <= size[0]
    folder = ROOT / "docs" / "images" if request.config.getoption("--pictures") else tmp_path
    folder.mkdir(exist_ok=True)
    page.locator("#message").blur()
    page.screenshot(path=folder / f"{name}.png")
    assert (folder / f"{name}.png").stat().st_size < 150_000


STREAM = """async (pieces) => {
    const shifts = [];
    const keep = (entries) => entries.forEach(({ value, sources }) => (
        shifts.push([value, ...sources.map(({ node }) => node?.className || node?.nodeName)])
    ));
    const observer = new PerformanceObserver((list) => keep(list.getEntries()));
    const drawn = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
    const real = window.fetch;
    const body = new TransformStream();
    window.fetch = (path, options) => (
        path === "v1/responses" ? Promise.resolve(new Response(body.readable)) : real(path, options)
    );
    document.getElementById("message").value = "How?";
    document.getElementById("form").requestSubmit();
    for (let frame = 0; frame < 5; frame++) await drawn();
    observer.observe({ type: "layout-shift" });
    const writer = body.writable.getWriter();
    for (const piece of pieces) {
        await writer.write(new TextEncoder().encode(`${piece}\\n\\n`));
        await drawn();
    }
    await writer.close();
    while (document.getElementById("send").hidden) await drawn();
    for (let frame = 0; frame < 5; frame++) await drawn();
    keep(observer.takeRecords());
    return shifts;
}"""
"""Lets the page ask, gives it the pieces of a reply, one per frame, and returns the layout shifts from the fifth
frame on, also of those within 500 ms after the question."""


@pytest.mark.parametrize("before", ["", "A line of a reply.\n\n" * 8], ids=["short", "scrolled"])
def test_nothing_jumps_while_a_reply_grows(open_page, scripted, before):
    """Neither while the text fits into the window, nor when the page scrolls with it."""
    page = open_page(scripted.served)
    if before:
        scripted.says(f"{before}<turn|>")
        send(page, "First?")
        wait_for_end(page)
    thoughts = [{"type": "response.reasoning_text.delta", "delta": "Let me see. "}] * 5
    code, entries = "value = 1\n" * 6, "- an entry of a list\n" * 8
    whole = f"First:\n\n```python\n{code}```\n\n{entries}\nThe last paragraph."
    deltas = [text(whole[at : at + 6]) for at in range(0, len(whole), 6)]
    call = {"type": "response.output_item.done", "item": {"type": "function_call", "name": "look", "arguments": "{}"}}
    pieces = [[each, {"type": "response.round", "round": A_ROUND}] for each in [*thoughts, *deltas, call]]
    first, *others = stream(list(chain.from_iterable(pieces))).strip().split("\n\n")
    parts = [first, *("\n\n".join(others[at : at + 2]) for at in range(0, len(others), 2))]
    shifts = page.evaluate(STREAM, parts)
    assert sum(value for value, *_ in shifts) < 0.001, shifts
    expect(page.locator(".body").last).to_contain_text("The last paragraph.")
    expect(page.locator(".turn .figures").last).to_contain_text("tokens per round")


def test_a_reply_is_complete_when_its_stream_has_ended(open_page, served):
    """Not with its last event: the button that stops it would give way before those of a complete reply are there."""
    page = open_page(served)
    before, after = page.evaluate(
        """async (events) => {
            const real = window.fetch;
            const body = new TransformStream();
            window.fetch = (path, options) => (
                path === "v1/responses" ? Promise.resolve(new Response(body.readable)) : real(path, options)
            );
            let now = performance.now();
            performance.now = () => (now += 1000); // each event is kept
            document.getElementById("message").value = "How?";
            document.getElementById("form").requestSubmit();
            const state = () => [document.getElementById("send").hidden, document.querySelectorAll(".again").length];
            const writer = body.writable.getWriter();
            await writer.write(new TextEncoder().encode(events));
            while (!Object.values(localStorage).some((each) => each.includes('"content":"Yes."'))) {
                await new Promise((resolve) => setTimeout(resolve, 1));
            }
            const before = state();
            await writer.close();
            while (!document.querySelector(".again")) await new Promise((resolve) => setTimeout(resolve, 1));
            return [before, state()];
        }""",
        stream([text("Yes."), {"type": "response.round", "round": A_ROUND}]),
    )
    assert (before, after) == ([True, 0], [False, 1])


def test_colours(open_page, served):
    page = open_page(served)
    page.emulate_media(color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.click("#theme")
    expect(page.locator("#theme")).to_have_attribute("aria-label", "Colours: dark")
    dark = page.evaluate(background)
    assert dark != light
    page.reload()
    expect(page.locator("#theme")).to_have_attribute("aria-label", "Colours: dark")
    assert page.evaluate(background) == dark


def test_the_page_is_small(open_page, served):
    """The files that a browser loads at first, and after a reply with math and code only."""
    page = open_page(served)
    loaded = page.evaluate("performance.getEntriesByType('resource').map((each) => new URL(each.name).pathname)")
    names = {FILES[path] for path in ("/", *loaded) if path in FILES}
    assert set(FILES.values()) - names == {
        "recorder.js",
        "vendor/highlight.js",
        "vendor/noto-sans-math.woff2",
        "vendor/temml.css",
        "vendor/temml.js",
    }
    assert sum(len(gzip.compress((PAGE / name).read_bytes())) for name in names) < 60_000


def end_slowly(served, gate):
    """A browser closes a connection when it finds the time: forwards wait for it."""
    while served.gauge("requests_processing"):
        gate.step()
        time.sleep(0.05)
    gate.open()
    served.wait_until_idle()


def test_stop(open_page, serve_toy, gate):
    with serve_toy(context_length=4000) as served:
        page = open_page(served)
        gate.close(behind=40)
        send(page, "abc")
        expect(page.locator(".body")).to_have_text(re.compile(r"\w"), timeout=PATIENCE_MS)
        page.click("#stop")
        wait_for_end(page)
        expect(page.locator(".figures")).to_contain_text("stopped")
        end_slowly(served, gate)
        assert served.gauge("tokens_predicted_total") < 1000


def test_stop_while_the_prompt_is_read(open_page, serve_toy, gate):
    with serve_toy() as served:
        page = open_page(served)
        gate.close()
        send(page, "abc" * 50)
        expect(page.locator("#stop")).to_be_visible()
        page.press("#message", "Escape")
        wait_for_end(page)
        end_slowly(served, gate)
        assert served.gauge("tokens_predicted_total") < 200


def test_two_tabs(open_page, served):
    pages = [open_page(served) for _ in range(2)]
    for page, text in zip(pages, ("def one(x):", "class Two:"), strict=True):
        page.route(
            "**/v1/responses",
            lambda route: route.continue_(
                post_data={**route.request.post_data_json, "max_output_tokens": 30, "temperature": 0}
            ),
        )
        send(page, text)
    texts = []
    for page in pages:
        wait_for_end(page)
        expect(page.locator(".figures")).to_contain_text("30 tokens")
        texts.append(page.locator(".body").inner_text())
    assert texts[0] != texts[1]


def test_errors_are_shown(open_page, serve_toy):
    with serve_toy(context_length=30) as served:
        page = open_page(served)
        send(page, "abc" * 50)
        wait_for_end(page)
        expect(page.locator(".failure")).to_contain_text("shorten it by")


def test_a_key_is_asked_for(open_page, serve_toy):
    with serve_toy(rules=Rules(api_key="secret"), context_length=30) as served:
        page = open_page(served, ready=False)
        expect(page.locator("#key-dialog")).to_be_visible()
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        expect(page.locator("#model")).to_have_text("toy-model")
        send(page, "abc")
        wait_for_end(page)
        expect(page.locator(".figures")).to_contain_text("tokens")


def test_nothing_comes_from_elsewhere(served):
    for path, name in FILES.items():
        if name.endswith(".woff2"):
            continue  # a font is not text, and names no address
        answer = served.get(path)
        assert answer.status == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        text = (PAGE / name).read_text("utf-8")
        assert answer.body == text
        if not name.startswith("vendor/"):
            assert not re.search(r"https?://", text)
            assert "innerHTML" not in text
    there = {path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*") if path.is_file()}
    assert {name for name in there if not name.endswith(".LICENSE")} == set(FILES.values())
    assert {f"{name.rpartition('.')[0]}.LICENSE" for name in FILES.values() if "vendor" in name} <= there
