"""The page at `/`, in a browser without a window."""

import re
import shutil
import time

import pytest
from playwright.sync_api import expect, sync_playwright

from ondevice.server.guard import Rules
from ondevice.server.page import FILES
from tests.conftest import ROOT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PAGE = ROOT / "ondevice" / "server" / "page"
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium here: apt install chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser):
    """Opens the page of a server; in the end, it has asked nobody else and had no error."""
    contexts, asked, errors = [], [], []

    def start(served, ready=True):
        context = browser.new_context(viewport={"width": 900, "height": 640})
        contexts.append((context, served.url))
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(served.url)
        if ready:
            expect(page.locator("#model")).not_to_have_text("ondevice", timeout=PATIENCE_MS)
        return page

    yield start
    for context, _ in contexts:
        context.close()
    assert errors == []
    homes = tuple(f"{url}/" for _, url in contexts)
    assert [url for url in asked if not url.startswith((*homes, "data:"))] == []


def send(page, text):
    page.fill("#message", text)
    page.press("#message", "Enter")


def wait_for_end(page):
    expect(page.locator("#send")).to_be_visible(timeout=PATIENCE_MS)


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
    page.click("summary")
    expect(thoughts).to_have_text("Light is scattered.")
    expect(page.locator(".figures")).to_have_text(re.compile(r"\d+ tokens · \d+\.\d tokens/s"))


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


def test_copy(open_page, scripted):
    page = open_page(scripted.served)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    scripted.says("Run:\n\n```python\nprint(1)\n```\n\n- one\n- two<turn|>")
    send(page, "Code")
    wait_for_end(page)
    expect(page.locator(".bar .language")).to_have_text("python")
    page.get_by_role("button", name="Copy the code").click()
    expect(page.locator(".bar .small")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "print(1)\n"
    page.get_by_role("button", name="Copy the reply").click()
    expect(page.get_by_role("button", name="Copy the reply")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "Run:\n\n```python\nprint(1)\n```\n\n- one\n- two"


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
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    scripted.says("One.<turn|>")
    send(page, "first")
    wait_for_end(page)
    scripted.says("Two.<turn|>")
    send(page, "second")
    wait_for_end(page)
    assert [message["content"] for message in bodies[-1]["messages"]] == ["first", "One.", "second"]
    page.click("#clear")
    expect(page.locator(".turn")).to_have_count(0)
    send(page, "third")
    wait_for_end(page)
    assert [message["content"] for message in bodies[-1]["messages"]] == ["third"]


def test_rounds_have_bars_and_figures(open_page, served):
    page = open_page(served)
    page.route(
        "**/v1/chat/completions",
        lambda route: route.continue_(post_data={**route.request.post_data_json, "max_tokens": 40, "temperature": 0}),
    )
    send(page, "def is_prime(n):")
    wait_for_end(page)
    label = page.locator(".rounds").get_attribute("aria-label")
    tokens, count = map(int, re.findall(r"\d+", label))
    assert page.locator(".rounds i").count() == count
    titles = page.locator(".rounds i").evaluate_all("all => all.map((bar) => bar.title)")
    accepted = sum(int(title.split()[0]) for title in titles if title != "no draft")
    assert tokens == count + accepted
    found = re.match(r"(\d+) tokens · ", page.locator(".figures").inner_text())
    assert found
    assert 0 <= tokens + 1 - int(found[1]) <= 4  # the first token comes with the prefill; the last round may be cut


def test_edit_and_try_again(open_page, scripted):
    page = open_page(scripted.served)
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    for said, text in (("One.<turn|>", "first"), ("Two.<turn|>", "second")):
        scripted.says(said)
        send(page, text)
        wait_for_end(page)
    scripted.says("Again.<turn|>")
    page.get_by_role("button", name="Ask again").last.click()
    expect(page.locator(".body").last).to_have_text("Again.")
    wait_for_end(page)
    assert [message["content"] for message in bodies[-1]["messages"]] == ["first", "One.", "second"]
    expect(page.locator(".turn")).to_have_count(4)
    page.get_by_role("button", name="Edit this message").first.click()
    expect(page.locator("#message")).to_have_value("first")
    expect(page.locator(".turn")).to_have_count(0)
    scripted.says("New.<turn|>")
    send(page, "changed")
    wait_for_end(page)
    assert [message["content"] for message in bodies[-1]["messages"]] == ["changed"]


def test_settings_and_scheme_stay(open_page, scripted):
    page = open_page(scripted.served)
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    page.click("#settings-button")
    page.fill("#system", "Be short.")
    page.fill("#temperature", "0.5")
    page.get_by_role("button", name="Close").click()
    page.click("#scheme")
    scheme = page.evaluate("document.documentElement.style.colorScheme")
    assert scheme in ("dark", "light")
    page.reload()
    expect(page.locator("#model")).to_have_text("reference")
    assert page.evaluate("document.documentElement.style.colorScheme") == scheme
    scripted.says("Yes.<turn|>")
    send(page, "ok?")
    wait_for_end(page)
    assert bodies[-1]["messages"][0] == {"role": "system", "content": "Be short."}
    assert bodies[-1]["temperature"] == 0.5
    assert "top_p" not in bodies[-1]


@pytest.mark.parametrize("width", [320, 900])
def test_nothing_is_wider_than_the_window(open_page, scripted, width):
    page = open_page(scripted.served)
    page.set_viewport_size({"width": width, "height": 640})
    scripted.says("word " * 30 + "\n\n```\n" + "x" * 300 + "\n```\n\n" + "y" * 200 + "<turn|>")
    send(page, "z" * 200)
    wait_for_end(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#conversation").evaluate("one => one.scrollWidth <= one.clientWidth")


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
            "**/v1/chat/completions",
            lambda route: route.continue_(
                post_data={**route.request.post_data_json, "max_tokens": 30, "temperature": 0}
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
        expect(page.locator(".failure")).to_contain_text("shorten the prompt")


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
    assert {f"{name.removesuffix('.js')}.LICENSE" for name in FILES.values() if "vendor" in name} <= there
