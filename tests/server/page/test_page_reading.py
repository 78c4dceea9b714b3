"""How the page reads: math, colours of code, tables, scrolling, keys, screen readers, narrow windows, dark colours."""

from functools import partial

import pytest
from playwright.sync_api import expect

from ondevice.server.guard import Rules
from tests.conftest import ROOT
from tests.server.page.browsing import DRAFTS, new_chat, resize, send, wait_for_end
from tests.server.page.test_page import A_ROUND, stream, text

ROOTS = r"""The roots of $ax^2 + bx + c = 0$ are

$$x_{1,2} = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a},$$

and \(b^2 - 4ac\) decides how many are real."""

LESSON = (
    ROOTS
    + r"""

```python
def roots(a, b, c):
    # both, where they are real
    d = (b * b - 4 * a * c) ** 0.5
    return [(-b - d) / (2 * a), (-b + d) / (2 * a)]
```

| equation | roots | sum |
|:--|:-:|--:|
| x² - 1 | -1 and 1 | 0 |
| x² - 3x + 2 | 1 and 2 | 3 |

- [x] real roots
- [ ] complex roots
"""
)


def answered(page, scripted, text, question="How?"):
    scripted.says(f"{text}<turn|>")
    send(page, question)
    wait_for_end(page)


def test_math(open_page, scripted):
    """Its library comes with the first formula; prices are no math, and nothing of a formula is an id or a link."""
    page = open_page(scripted.served)
    loaded = []
    page.on("request", lambda request: loaded.append(request.url) if "vendor" in request.url else None)
    answered(page, scripted, "It costs $5 or $6, not `$x$`; \\$1.")
    expect(page.locator(".body")).to_have_text("It costs $5 or $6, not $x$; $1.")
    assert loaded == []
    answered(page, scripted, ROOTS)
    expect(page.locator(".body math")).to_have_count(3)
    expect(page.locator(".displayed math mfrac msqrt")).to_have_count(1)
    page.wait_for_function(
        "() => [...document.fonts].some(({ family, status }) => family.includes('page math') && status === 'loaded')"
    )
    assert loaded[0].endswith("/vendor/temml.js")
    assert {url.rpartition("/")[2] for url in loaded} <= {"temml.js", "temml.css", "noto-sans-math.woff2"}
    page.reload()
    expect(page.locator(".body math")).to_have_count(3)
    answered(
        page,
        scripted,
        r"$$\begin{equation}\label{message} x \end{equation}$$ \(\href{javascript:hit()}{x}\) "
        r"\(\includegraphics{x.png}\) $\unknown{<img src=x onerror=hit()>}$",
    )
    last = page.locator(".body").last
    expect(last.locator("math").first).to_be_visible()
    for tag in ("a", "img", "script", "[id]", "[href]", "[onerror]"):
        expect(last.locator(tag)).to_have_count(0)


def test_lines_and_columns_of_math(open_page, scripted):
    """They are in the style sheet of the library: a browser draws none of them by itself."""
    page = open_page(scripted.served)
    answered(page, scripted, r"$\overline{AB} \cancel{x}$ $$\begin{cases} 1 & x > 0 \\ 0 & \text{else} \end{cases}$$")
    expect(page.locator(".body math")).to_have_count(2)
    for selector, name, without in (
        (".tml-overline", "borderTopWidth", "0px"),
        (".tml-cancel", "clipPath", "none"),
        ("mtd >> nth=1", "textAlign", "center"),
    ):
        value = page.locator(".body").locator(selector).evaluate("(each, name) => getComputedStyle(each)[name]", name)
        assert value != without, selector
    assert page.locator("math").first.evaluate("each => getComputedStyle(each).fontFamily").startswith('"page math"')


def test_equations_are_numbered_within_a_reply(open_page, scripted):
    page = open_page(scripted.served)
    for replies in (1, 2):
        answered(page, scripted, r"$$\begin{align} a &= b \\ c &= d \end{align}$$")
        expect(page.locator(".body .tml-eqn")).to_have_count(2 * replies)
        numbers = page.locator(".body").last.evaluate("each => getComputedStyle(each).counterReset")
        assert numbers == "tmlEqnNo 0"


def test_colours_of_code(open_page, scripted):
    """Their library comes with the first block of a language; other blocks stay as they are."""
    page = open_page(scripted.served)
    loaded = []
    page.on("request", lambda request: loaded.append(request.url) if "vendor" in request.url else None)
    answered(page, scripted, "```\nplain <b>\n```\n\n`inline`")
    assert loaded == []
    answered(
        page, scripted, '```python\nif x:  # a <b>comment</b>\n    print("text")\n```\n\n```nolanguage\nif <i>\n```'
    )
    code = page.locator("pre code").nth(1)
    expect(code.locator(".hljs-keyword")).to_have_text("if")
    expect(code.locator(".hljs-comment")).to_have_text("# a <b>comment</b>")
    expect(code.locator(".hljs-string")).to_have_text('"text"')
    assert code.text_content() == 'if x:  # a <b>comment</b>\n    print("text")\n'
    assert page.locator("pre code").nth(2).text_content() == "if <i>\n"
    assert [url.rpartition("/")[2] for url in loaded] == ["highlight.js"]


def test_tables_and_tasks(open_page, scripted):
    page = open_page(scripted.served)
    wide = "| " + " | ".join(f"column{n}" for n in range(20)) + " |\n|" + "--|" * 20 + "\n"
    answered(page, scripted, f"{LESSON}\n\n{wide}")
    cells = page.locator("tbody").first.locator("td")
    aligned = cells.evaluate_all("(all) => all.slice(0, 3).map((each) => getComputedStyle(each).textAlign)")
    assert aligned == ["start", "center", "right"]
    expect(page.locator("li .task")).to_have_text(["☑", "☐"])
    expect(page.get_by_role("img", name="to do")).to_have_count(1)
    resize(page, 320, 640)
    frame = page.locator(".table").last
    assert frame.evaluate("(each) => each.scrollWidth > each.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    assert frame.locator("th").first.evaluate("(each) => each.clientHeight") < 50  # in one line
    frame.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => [...document.querySelectorAll('.table')].at(-1).scrollLeft > 0")


def test_entities_and_characters(open_page, scripted):
    page = open_page(scripted.served)
    answered(page, scripted, "a &amp; b &lt;i&gt; &#x41; &nosuch; \\* 3. x\n\n3. three\n4. four")
    expect(page.locator(".body p").first).to_have_text("a & b <i> A &nosuch; * 3. x")
    assert page.locator(".body ol").evaluate("(list) => list.start") == 3


def test_the_way_to_the_end(open_page, scripted):
    """The page follows the text at its end only, and a button leads back there."""
    page = open_page(scripted.served)
    answered(page, scripted, "A line.\n\n" * 60)
    end = page.locator("#to-end")
    expect(end).to_be_hidden()
    page.locator("#conversation").evaluate("(each) => (each.scrollTop = 0)")
    expect(end).to_be_visible()
    at = page.locator("#conversation").evaluate("(each) => each.scrollTop")
    page.get_by_role("button", name="Rename").focus()
    assert page.locator("#conversation").evaluate("(each) => each.scrollTop") == at
    end.click()
    expect(end).to_be_hidden()
    expect(page.locator("#message")).to_be_focused()
    assert (
        page.locator("#conversation").evaluate("(each) => each.scrollHeight - each.scrollTop - each.clientHeight") < 2
    )


def test_the_keyboard(open_page, scripted):
    """Escape leaves an editor and a name, and the focus goes back to where it came from."""
    page = open_page(scripted.served)
    answered(page, scripted, "One.", "first")
    expect(page.locator("#message")).to_be_focused()
    answered(page, scripted, "Two.", "second")
    page.locator(".edit").first.press("Enter")
    expect(page.locator(".editor textarea")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator(".edit").first).to_be_focused()
    page.get_by_role("button", name="Rename").press("Enter")
    expect(page.locator("#list input")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#list .name")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#message")).to_be_focused()


def test_an_empty_chat_says_what_the_model_can_do(open_page, scripted):
    page = open_page(scripted.served)
    expect(page.locator("#able")).to_contain_text("reference reads text, and can think before it answers.")
    expect(page.locator("#reads li")).to_have_text(["text"])
    expect(page.locator(".example")).to_have_count(4)
    expect(page.locator("#private")).to_have_text("Nothing leaves this machine.")
    scripted.says("It is.<turn|>")
    example = page.locator(".example").first
    asked = example.inner_text()
    example.click()
    expect(page.locator(".user .text")).to_have_text(asked)
    expect(page.locator("#empty")).to_be_hidden()
    wait_for_end(page)
    new_chat(page)
    expect(page.locator(".example")).to_have_count(4)
    expect(page.locator("#empty")).to_be_visible()


def test_a_wrong_key(open_page, serve_toy):
    with serve_toy(rules=Rules(api_key="secret"), context_length=30) as served:
        page = open_page(served, ready=False)
        expect(page.locator("#key-dialog")).to_be_visible()
        expect(page.locator("#key-wrong")).to_be_hidden()
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        expect(page.locator("#key-wrong")).to_be_visible()
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        expect(page.locator("#model")).to_have_text("toy-model")


def test_a_key_that_no_header_can_have(open_page, serve_toy):
    """It is refused like every wrong one: without an answer, the page would ask again at once, for ever."""
    with serve_toy(rules=Rules(api_key="secret"), context_length=30) as served:
        page = open_page(served, ready=False)
        page.fill("#key", "ключ")
        page.press("#key", "Enter")
        expect(page.locator("#key-wrong")).to_be_visible()
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        expect(page.locator("#model")).to_have_text("toy-model")


NESTED = {
    "quotes": "> " * 4000,
    "lists": "1. " * 3000,
    "fewer quotes": "> " * 100 + "Deep.",
    "fewer lists": "1. " * 100 + "Deep.",
    "math": "$" + "{" * 5000 + "}" * 5000 + "$",
}
"""Texts of a model that repeats itself, each nested too deep for the page. The stack of Chromium is too small for some,
those of Firefox and Safari are not."""


@pytest.mark.parametrize("kind", NESTED)
def test_deep_nesting_is_shown_as_text(open_page, scripted, kind):
    page = open_page(scripted.served)
    answered(page, scripted, "> " * 20 + r"$\sqrt{2}$")
    expect(page.locator(f".body {'blockquote ' * 20} msqrt")).to_be_visible()
    events = [text(NESTED[kind]), {"type": "response.round", "round": A_ROUND}]
    page.route("**/v1/responses", lambda route: route.fulfill(content_type="text/event-stream", body=stream(events)))
    send(page, "Deep?")
    wait_for_end(page)
    expect(page.locator(".body").last).to_contain_text(NESTED[kind].strip("$ ")[:1000])
    assert page.locator("#conversation").evaluate("each => each.scrollWidth === each.clientWidth")


def test_the_direction_of_writing(open_page, scripted):
    """Hebrew begins at the right, with its list markers; code always at the left."""
    page = open_page(scripted.served)
    answered(page, scripted, "שלום world.\n\n- אחת\n- שתיים\n\n```python\n# שלום\n```\n\nHello.", "שלום, model!")
    blocks = page.locator(".body > *").evaluate_all(
        "all => all.map((each) => [each.localName, getComputedStyle(each).direction])"
    )
    assert blocks == [["p", "rtl"], ["ul", "rtl"], ["div", "ltr"], ["pre", "ltr"], ["p", "ltr"]]
    for place in (".user .text", "#list .name"):
        assert page.locator(place).evaluate("each => getComputedStyle(each).unicodeBidi") == "plaintext"
    assert page.locator("#list .name").evaluate("each => getComputedStyle(each).direction") == "rtl"  # of its dots


def test_paper_has_the_whole_conversation(open_page, scripted):
    """Black on white, without the controls."""
    page = open_page(scripted.served)
    answered(page, scripted, "A line of a reply.\n\n" * 60)
    page.emulate_media(media="print", color_scheme="dark")
    assert page.locator("#conversation").evaluate("each => each.scrollHeight === each.clientHeight")
    assert page.evaluate("document.documentElement.scrollHeight") > 2000
    for hidden in ("#side", "header", "footer", ".foot .buttons"):
        expect(page.locator(hidden)).to_be_hidden()
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(29, 31, 36)"


@pytest.mark.parametrize("composing", [{"isComposing": True}, {"keyCode": 229}], ids=["standard", "Safari"])
def test_keys_of_an_input_method_send_nothing(open_page, scripted, composing):
    page = open_page(scripted.served)
    answered(page, scripted, "One.")
    press = """(field, init) => {
        const press = (key) => new KeyboardEvent("keydown", { key, bubbles: true, ...init });
        for (const key of ["Enter", "Escape"]) field.dispatchEvent(press(key));
    }"""
    page.fill("#message", "にほん")
    page.locator("#message").evaluate(press, composing)
    expect(page.locator("#message")).to_have_value("にほん")
    page.get_by_role("button", name="Rename").click()
    page.locator("#list input").evaluate(press, composing)
    expect(page.locator("#list input")).to_be_focused()
    page.evaluate("document.dispatchEvent(new Event('keydown'))")  # as of a browser that fills in a field
    expect(page.locator(".turn")).to_have_count(2)


def findings(page):
    """The findings of axe on the page as it is shown."""
    from axe_playwright_python.sync_playwright import Axe

    return [
        (each["id"], each["help"], [node["html"][:200] for node in each["nodes"]])
        for each in Axe().run(page).response["violations"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1000, 320])
def test_axe_finds_nothing(open_page, scripted, scheme, width):
    """In an empty chat, a conversation, an editor, with the list open, and in the dialogs."""
    page = open_page(scripted.served)
    resize(page, width, 800)
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    assert findings(page) == []
    answered(page, scripted, f"# Roots\n\n{LESSON}\n\n> a [link](https://example.org)")
    page.click("text=Regenerate")
    expect(page.locator(".reply .versions")).to_be_visible()
    expect(page.locator(".body math")).to_have_count(3)
    expect(page.locator(".hljs-keyword").first).to_be_visible()
    assert findings(page) == []
    page.locator(".edit").click()
    assert findings(page) == []
    page.keyboard.press("Escape")
    if width == 320:
        page.click("#menu")
        expect(page.locator("#side")).to_be_visible()
        assert findings(page) == []
        page.keyboard.press("Escape")
    page.click("#settings")
    assert findings(page) == []


@pytest.mark.parametrize(
    ("name", "size", "scheme"),
    [
        ("page-math", (1000, 820), "light"),
        ("page-math-dark", (1000, 820), "dark"),
        ("page-math-narrow", (320, 640), "light"),
        ("page-empty", (1000, 640), "light"),
        ("page-empty-narrow", (320, 640), "dark"),
    ],
)
def test_pictures(open_page, scripted, request, monkeypatch, tmp_path, name, size, scheme):
    """Nothing is wider than the window; with --pictures, the first one is written for the documentation."""
    monkeypatch.setattr(scripted.model, "stream", partial(scripted.model.stream, **DRAFTS))
    page = open_page(scripted.served)
    resize(page, *size)
    page.emulate_media(color_scheme=scheme)
    if "math" in name:
        answered(page, scripted, LESSON, "How do I solve a quadratic equation?")
        expect(page.locator(".body math")).to_have_count(3)
        expect(page.locator(".hljs-keyword").first).to_be_visible()
    else:
        page.reload()
        expect(page.locator(".example")).to_have_count(4)
    assert page.evaluate("document.documentElement.scrollWidth") == size[0]
    assert page.evaluate("document.querySelector('#conversation').scrollWidth") <= size[0]
    page.locator("#message").blur()
    published = name == "page-math" and request.config.getoption("--pictures")
    folder = ROOT / "docs" / "images" if published else tmp_path
    page.screenshot(path=folder / f"{name}.png")
    assert (folder / f"{name}.png").stat().st_size < 150_000


def test_marks_of_drafts_have_a_legend(open_page, scripted):
    page = open_page(scripted.served)
    answered(page, scripted, "again and again and again and again and again")
    expect(page.locator(".legend")).to_have_text("Drafted tokens:acceptedrejectednone in this round")
    answered(page, scripted, "and again and again and again and again")
    assert page.locator(".legend").evaluate_all("(all) => all.map((each) => each.checkVisibility())") == [False, True]
