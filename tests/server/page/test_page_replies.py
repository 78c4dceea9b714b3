"""Replies of the page belong to the server: reloads, tabs, lost connections and servers; versions, and the list."""

import json
import os
import re
import signal
import threading
from contextlib import contextmanager

import pytest
from playwright.sync_api import expect

from ondevice.bundle import Bundle
from ondevice.server.guard import Rules
from ondevice.server.model_manager import ServedModel
from ondevice.server.running import Server, Setup
from tests.fixtures.model_made import model_over, write_bundle
from tests.fixtures.toy_engine import ToyEngine
from tests.server.alone import served_alone
from tests.server.page.browsing import PATIENCE_MS, bodies_of, is_asked_for, new_chat, send, wait_for_end
from tests.server.served import PATIENCE_S, running, wait_until

GONE = "The server does not answer. This page joins it again by itself."
LOST = "no longer has this reply"
WORD = re.compile(r"\w")


TEXT = """(question) => {
    const names = Object.keys(localStorage).filter((each) => each.startsWith("ondevice.conversation."));
    const all = names.map((name) => JSON.parse(localStorage[name]).messages);
    return all.find(([first]) => first.content === question).at(-1).content;
}"""


def text_of(page, question="abc"):
    """The text of the reply to a question as it is kept in the browser."""
    return page.evaluate(TEXT, question)


def expect_text(page, wanted):
    """Wait until this text of a reply is kept in the browser: tabs see what others keep a moment later."""
    page.wait_for_function(f"([question, wanted]) => ({TEXT})(question) === wanted", arg=["abc", wanted])


def whole_text(served, question="abc"):
    """The text of the same reply without a page: the toy's texts end with the context."""
    return served.post("/v1/responses", input=question).body["output"][0]["content"][0]["text"]


def second_tab(page, served):
    """Another tab of the same browser, at the same address."""
    other = page.context.new_page()
    other.set_default_timeout(PATIENCE_MS)
    other.goto(page.url)
    expect(other.locator("#model")).not_to_have_text("ondevice", timeout=PATIENCE_MS)
    return other


def test_a_reload_joins_the_reply(open_page, serve_toy, gate):
    with serve_toy() as served:
        page = open_page(served)
        bodies = bodies_of(page)
        gate.close(behind=30)
        send(page, "abc")
        expect(page.locator(".body")).to_have_text(WORD)
        expect(page).to_have_url(re.compile("#/c/"))
        page.reload()
        expect(page.locator(".body")).to_have_text(WORD)
        expect(page.locator("#stop")).to_be_visible()
        with page.expect_request(re.compile("starting_after=\\d+")):
            page.reload()
        gate.open()
        wait_for_end(page)
        expect_text(page, whole_text(served))
        assert len(bodies) == 1


def test_a_reply_goes_on_without_its_tab_and_is_forgotten_when_it_was_read(open_page, serve_toy, gate):
    with serve_toy() as served:
        page = open_page(served)
        other = second_tab(page, served)
        gate.close(behind=30)
        with page.expect_response(is_stream) as answered:
            send(page, "abc")
        expect(page.locator(".body")).to_have_text(WORD)
        assert answered.value.ok
        response_id = other.wait_for_function(
            "() => Object.values(localStorage).map((each) => each.match(/resp_\\w+/)?.[0]).find(Boolean)"
        ).json_value()
        address = page.url
        page.close()
        gate.open()
        served.wait_until_idle()
        other.goto(address)
        wait_for_end(other)
        expect_text(other, whole_text(served))
        wait_until(lambda: served.get(f"/v1/responses/{response_id}").status == 404)


def is_stream(response):
    return is_asked_for(response.request)


def test_a_question_that_was_not_sent_is_sent_by_another_tab(open_page, serve_toy):
    """The tab is closed while the server has not answered: a model may be loading."""
    with serve_toy() as served:
        page = open_page(served)
        other = second_tab(page, served)
        page.route("**/v1/responses", lambda route: None)  # never answered
        send(page, "abc")
        other.goto(other.url)
        expect(other.locator("#list .name")).to_contain_text("abc")
        other.click("#list .name")
        expect(other.locator("#stop")).to_be_visible()
        expect(other.locator(".body")).to_have_text("")
        expect(page.locator("#stop")).to_be_visible()
        page.close()
        wait_for_end(other)
        expect_text(other, whole_text(served))


LATE = """
    const kept = Storage.prototype.getItem, request = LockManager.prototype.request;
    LockManager.prototype.request = function (name, call) {
        const before = { ...localStorage };
        return request.call(this, name, () => {
            Storage.prototype.getItem = (key) => before[key] ?? null;
            setTimeout(() => (Storage.prototype.getItem = kept), 300);
            return call();
        });
    };
"""
"""Lets a tab get a lock 300 ms before it sees what the tab that had it before has kept, as a busy browser does."""


@pytest.mark.parametrize("late", [False, True])
def test_another_tab_shows_why_a_reply_was_refused(open_page, serve_toy, late):
    """The server refuses it after the other tab has seen the question, which it does not send again."""
    with serve_toy() as served:
        page = open_page(served)
        other = second_tab(page, served)
        if late:
            other.evaluate(f"() => {{ {LATE} }}")
        held = []
        page.route("**/v1/responses", lambda route: held.extend([route]))
        send(page, "abc")
        other.locator("#list .name", has_text="abc").click()
        expect(other.locator("#stop")).to_be_visible()
        while not held:
            page.wait_for_timeout(10)
        held[0].fulfill(status=400, body=json.dumps({"error": {"message": "refused"}}))
        for each in (page, other):
            expect(each.locator(".failure")).to_have_text("refused")
            expect(each.locator("#send")).to_be_visible()
            expect(each.get_by_role("button", name="Try again")).to_have_count(1)


def test_without_locks(open_page, serve_toy):
    """From another machine without HTTPS: a question that was not sent is told, and sent with a button."""
    with serve_toy() as served:
        page = open_page(served)
        page.context.add_init_script("Object.defineProperty(navigator, 'locks', { value: undefined })")
        page.reload()
        expect(page.locator("#model")).to_have_text("toy-model")
        page.route("**/v1/responses", lambda route: None)  # never answered
        send(page, "abc")
        expect(page.locator("#stop")).to_be_visible()
        address = page.url
        other = page.context.new_page()
        page.close()
        other.goto(address)
        expect(other.locator(".failure")).to_have_text("The tab was closed before the server had this message.")
        other.get_by_role("button", name="Try again").click()
        expect(other.locator(".body")).to_have_text(WORD)
        expect(other.locator(".failure")).to_have_count(0)
        wait_for_end(other)
        expect_text(other, whole_text(served))


def test_a_name_that_is_being_typed_stays_when_a_reply_ends(open_page, serve_toy, gate):
    with serve_toy() as served:
        page = open_page(served)
        gate.close(behind=20)
        send(page, "abc")
        expect(page.locator(".body")).to_have_text(WORD)
        page.get_by_role("button", name="Rename").click()
        page.fill("#list input", "A na")
        gate.open()
        wait_for_end(page)
        expect(page.locator("#list input")).to_have_value("A na")
        page.keyboard.type("me")
        page.keyboard.press("Enter")
        expect(page.locator("#list .name")).to_have_text("A name")


def test_two_tabs_show_the_same(open_page, serve_toy, gate):
    """A reply grows in both; a name and a message of one are in the other; neither overwrites the other's."""
    with serve_toy(context_length=120) as served:
        page = open_page(served)
        gate.close(behind=20)
        send(page, "abc")
        expect(page.locator(".body")).to_have_text(WORD)
        other = second_tab(page, served)
        expect(other.locator(".body")).to_have_text(WORD)
        gate.open()
        wait_for_end(page)
        wait_for_end(other)
        expect(other.locator(".body")).to_have_text(page.locator(".body").inner_text(), use_inner_text=True)
        other.get_by_role("button", name="Rename").click()
        other.fill("#list input", "A name")
        page.locator(".edit").click()
        page.fill(".editor textarea", "xyz")
        other.press("#list input", "Enter")
        page.press(".editor textarea", "Enter")
        wait_for_end(page)
        for each in (page, other):
            expect(each.locator("#list .name")).to_have_text("A name")
            expect(each.locator(".user .text")).to_have_text("xyz")
            expect(each.locator(".user .versions")).to_contain_text("2 / 2")
            expect(each.locator(".figures")).to_contain_text("tokens")
        page.on("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Delete").click()
        expect(other.locator("#list .name")).to_have_count(0)
        expect(other.locator(".turn")).to_have_count(0)


def test_a_page_to_which_the_browser_goes_back_shows_what_other_tabs_have_changed(open_page, served):
    """It was kept as it was left, and no event reached it meanwhile, as none reaches the tab that changes something."""
    page = open_page(served)
    kept = json.dumps({"messages": [{"role": "user", "content": "first"}]})
    page.evaluate("kept => { localStorage['ondevice.conversation.first'] = kept; }", kept)
    expect(page.locator("#list .name")).to_have_count(0)
    page.evaluate("() => { dispatchEvent(new PageTransitionEvent('pageshow', { persisted: true })); }")
    expect(page.locator("#list .name")).to_have_text("first")


def test_a_new_chat_leaves_the_reply_running(open_page, serve_toy, gate):
    with serve_toy() as served:
        page = open_page(served)
        gate.close(behind=20)
        send(page, "abc")
        expect(page.locator(".body")).to_have_text(WORD)
        address = page.url
        new_chat(page)
        expect(page.locator("#list .dot")).to_have_count(1)
        expect(page.locator("#send")).to_be_visible()
        gate.open()
        expect(page.locator("#list .dot")).to_have_count(0)
        page.go_back()
        expect(page).to_have_url(address)
        expect(page.locator(".turn")).to_have_count(2)
        expect_text(page, whole_text(served))


def test_many_replies_at_a_time_leave_connections_free(open_page, serve_toy, gate):
    """A browser opens six connections to a server."""
    with serve_toy(context_length=60) as served:
        page = open_page(served)
        gate.close()
        for number in range(8):
            send(page, f"question {number}")
            expect(page.locator("#list .dot")).to_have_count(number + 1)
            expect(page.locator(".wait")).to_be_visible()
            new_chat(page)
        gate.open()
        expect(page.locator("#list .dot")).to_have_count(0)
        page.locator("#list .name").first.click()
        expect(page.locator(".figures")).to_contain_text("tokens")


def cut_off(open_page, served, relay, gate, behind):
    """A page whose connection was cut in the middle of a reply, of which `behind` forwards have passed."""
    relay.lead_to(served)
    page = open_page(relay)
    gate.close(behind=behind)
    send(page, "abc")
    expect(page.locator(".body")).to_have_text(WORD)
    relay.cut()
    expect(page.locator("#status")).to_have_text(GONE)
    return page


def test_a_lost_connection_is_joined_again(open_page, serve_toy, gate, relay):
    with serve_toy() as served:
        page = cut_off(open_page, served, relay, gate, behind=30)
        gate.open()
        served.wait_until_idle()
        relay.lead_to(served)
        wait_for_end(page)
        expect(page.locator("#status")).to_have_text("")
        expect_text(page, whole_text(served))


def test_a_killed_server_is_joined_when_it_is_back(open_page, reference_bundle, tmp_path, relay):
    """A reply that was cut stays, and can be continued; a message that was sent meanwhile is answered by itself."""
    with served_alone(reference_bundle, tmp_path) as served:
        relay.lead_to(served)
        page = open_page(relay)
        own = "{ temperature: 0, repeat_penalty: 1.05, drafter: 'none' }"
        page.evaluate(f"localStorage['ondevice.settings'] = JSON.stringify({own})")
        relay.pieces = 2  # of up to 12 tokens each; five would be the whole reply
        send(page, "def f(x):")
        expect(page.locator(".body")).to_have_text(WORD)
        os.kill(served.pid, signal.SIGKILL)
        relay.cut()
        expect(page.locator("#status")).to_have_text(GONE)
        before = text_of(page, "def f(x):")
    new_chat(page)
    send(page, "class Tree:")
    expect(page.locator(".turn")).to_have_count(2)
    with served_alone(reference_bundle, tmp_path) as served:
        relay.lead_to(served)
        expect(page.locator(".body")).to_have_text(WORD)
        wait_for_end(page)
        page.locator("#list .name", has_text="def f").click()
        expect(page.locator(".failure")).to_contain_text(LOST)
        assert text_of(page, "def f(x):") == before
        page.get_by_role("button", name="Continue").click()
        expect(page.locator(".failure")).to_have_count(0)
        wait_for_end(page)
        after = text_of(page, "def f(x):")
        assert after.startswith(before)
        assert len(after) > len(before)


def test_a_server_that_is_back_with_another_model(open_page, serve_toy, scripted, relay):
    """It answers what was sent while it was gone."""
    with serve_toy() as served:
        relay.lead_to(served)
        page = open_page(relay)
        expect(page.locator("#model")).to_have_text("toy-model")
        relay.cut()
    send(page, "abc")
    expect(page.locator("#status")).to_have_text(GONE)
    scripted.says("One.<turn|>")
    relay.lead_to(scripted.served)
    expect(page.locator(".body")).to_have_text("One.")
    expect(page.locator("#model")).to_have_text("reference")
    expect(page.locator("#context")).to_contain_text("of 8,192 tokens")


def test_a_hidden_tab_leaves_its_connection_and_gets_the_reply(open_page, serve_toy, gate):
    """A browser opens six connections to a server, in all its tabs together."""
    with serve_toy() as served:
        page = open_page(served)
        gate.close(behind=20)
        send(page, "abc")
        expect(page.locator(".body")).to_have_text(WORD)
        with page.expect_event("requestfailed", is_asked_for):
            hide(page, True)
        with page.expect_request(re.compile("starting_after")) as joined:
            hide(page, False)
        assert joined.value.method == "GET"
        with page.expect_event("requestfailed", lambda request: "starting_after" in request.url):
            hide(page, True)
        gate.open()
        wait_for_end(page)
        expect_text(page, whole_text(served))


def hide(page, is_hidden):
    """Let the page believe that its tab is in the background, or not."""
    page.evaluate(
        """(is) => {
            Object.defineProperty(document, "hidden", { configurable: true, value: is });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        is_hidden,
    )


def test_stop_while_the_server_is_gone(open_page, serve_toy, gate, relay):
    with serve_toy() as served:
        page = cut_off(open_page, served, relay, gate, behind=20)
        page.click("#stop")
        wait_for_end(page)
        expect(page.locator(".figures")).to_contain_text("stopped")
        expect(page.locator("#message")).to_be_focused()
        relay.lead_to(served)
        expect(page.locator("#status")).to_have_text("")


def test_a_proxy_without_its_server(open_page, serve_toy):
    """It answers in HTML that the server is gone: the reply waits for the server, as without a proxy."""
    with serve_toy(context_length=30) as served:
        page = open_page(served)
        asked = []

        def refuse_first(route):
            asked.append(route.request.url)
            if len(asked) == 1:
                route.fulfill(status=502, content_type="text/html", body="<h1>Bad Gateway</h1>")
            else:
                route.continue_()

        page.route("**/v1/responses", refuse_first)
        send(page, "abc")
        wait_for_end(page)
        expect(page.locator(".failure")).to_have_count(0)
        assert len(asked) == 2


def test_questions_about_a_load_do_not_pile_up(open_page, serve_toy, relay):
    """While a message waits for a server that is away, the page asks whether its model is being loaded: once."""
    with serve_toy(context_length=30) as served:
        relay.lead_to(served)
        page = open_page(relay)
        relay.cut()
        send(page, "abc")
        expect(page.locator("#status")).to_have_text(GONE)
        asked = []
        page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/v1/models") else None)
        page.wait_for_timeout(4000)
        relay.lead_to(served)
        wait_for_end(page)
        assert len(asked) <= 3  # the one that waited, and those of a model that may be another now


def test_deleting_a_conversation_ends_its_reply(open_page, serve_toy, gate):
    with serve_toy(context_length=4000) as served:
        page = open_page(served)
        page.on("dialog", lambda dialog: dialog.accept())
        gate.close(behind=20)
        send(page, "abc")
        expect(page.locator(".body")).to_have_text(WORD)
        page.get_by_role("button", name="Delete").click()
        expect(page.locator(".turn")).to_have_count(0)
        gate.open()
        served.wait_until_idle()
        assert served.gauge("tokens_predicted_total") < 1000
        page.wait_for_function("() => Object.keys(localStorage).length === 0")


def test_a_reply_that_was_refused_is_asked_for_again(open_page, scripted):
    page = open_page(scripted.served)
    bodies = bodies_of(page)
    page.check("#thinking")
    scripted.says("<|channel>thought\nLight is scattered.\n<channel|>Blue.<turn|>")
    lost = json.dumps({"error": {"message": "no room"}})
    page.route("**/v1/responses", lambda route: route.fulfill(status=503, body=lost), times=1)
    send(page, "Why?")
    expect(page.locator(".failure")).to_have_text("no room")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".body")).to_have_text("Blue.")
    expect(page.locator(".failure")).to_have_count(0)
    assert bodies[-1]["input"] == [{"role": "user", "content": "Why?"}]
    expect(page.locator(".reply .versions")).to_have_count(0)


def test_stopping_cancels_at_the_server(open_page, serve_toy, gate):
    with serve_toy(context_length=4000) as served:
        page = open_page(served)
        gate.close(behind=20)
        send(page, "abc")
        expect(page.locator(".body")).to_have_text(WORD)
        with page.expect_request("**/cancel"):
            page.press("#message", "Escape")
        wait_for_end(page)
        gate.open()
        served.wait_until_idle()
        assert served.gauge("tokens_predicted_total") < 1000


def test_versions(open_page, scripted):
    """Versions of a reply and of a question; the shown ones are what the model is told, also after a reload."""
    page = open_page(scripted.served)
    bodies = bodies_of(page)
    for answer in ("One.", "Two.", "Three."):
        scripted.says(f"{answer}<turn|>")
        if answer == "One.":
            send(page, "first")
        else:
            page.click("text=Regenerate")
        expect(page.locator(".body")).to_have_text(answer)
        wait_for_end(page)
    expect(page.locator(".reply .versions")).to_contain_text("3 / 3")
    page.get_by_role("button", name="Earlier version").press("Enter")
    expect(page.locator(".body")).to_have_text("Two.")
    expect(page.get_by_role("button", name="Earlier version")).to_be_focused()
    page.reload()
    expect(page.locator("#model")).to_have_text("reference")
    expect(page.locator(".body")).to_have_text("Two.")
    scripted.says("Four.<turn|>")
    send(page, "second")
    expect(page.locator(".body").last).to_have_text("Four.")
    wait_for_end(page)
    assert [each["content"] for each in bodies[-1]["input"]] == ["first", "Two.", "second"]
    page.locator(".edit").first.click()
    page.fill(".editor textarea", "changed")
    page.press(".editor textarea", "Enter")
    wait_for_end(page)
    expect(page.locator(".user .text")).to_have_text(["changed"])
    page.locator(".user .earlier").click()
    expect(page.locator(".user .text")).to_have_text(["first", "second"])
    expect(page.locator(".body")).to_have_text(["Two.", "Four."])


def test_export_and_import(open_page, scripted, tmp_path):
    page = open_page(scripted.served)
    scripted.says("One.<turn|>")
    send(page, "first question")
    wait_for_end(page)
    page.click("text=Regenerate")
    wait_for_end(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    exported = tmp_path / "exported.json"
    download.value.save_as(exported)
    other = open_page(scripted.served)
    plain = {"messages": [{"role": "user", "content": "plain"}, {"role": "assistant", "content": "Yes."}]}
    (tmp_path / "plain.json").write_text(json.dumps(plain), "utf-8")
    other.set_input_files("#imported", [exported, tmp_path / "plain.json"])
    expect(other.locator("#list .name")).to_have_count(2)
    expect(other.locator(".user .text")).to_have_text("first question")
    expect(other.locator(".reply .versions")).to_contain_text("2 / 2")
    other.locator("#list .name", has_text="plain").click()
    expect(other.locator(".body")).to_have_text("Yes.")
    (tmp_path / "wrong.json").write_text("[1]", "utf-8")
    other.set_input_files("#imported", tmp_path / "wrong.json")
    expect(other.locator("#status")).to_have_text("A file has no conversation of this page.")
    expect(other.locator("#list .name")).to_have_count(2)


def test_files_that_are_no_conversation(open_page, scripted, tmp_path):
    """Messages that follow each other in a circle, and types that no export has: the page stays usable."""
    page = open_page(scripted.served)
    question = {"id": "a", "parent": "", "role": "user", "content": "Why?"}
    reply = {"id": "b", "parent": "a", "role": "assistant", "content": "So."}
    found = {
        "circle": {"messages": [question, reply, {**question, "parent": "b"}, {**question, "id": ""}, None]},
        "types": {"title": 5, "chosen": None, "messages": [{**question, "files": 5}, {**reply, "parent": "z"}]},
        "files": {"messages": [{**question, "files": [{"name": "x.png", "url": "data:image/png;base64,@"}]}]},
    }
    for name, content in found.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content), "utf-8")
    page.set_input_files("#imported", tmp_path / "circle.json")
    expect(page.locator(".turn")).to_have_text([re.compile("Why"), re.compile("So")])
    page.set_input_files("#imported", tmp_path / "types.json")
    expect(page.locator("#list .name")).to_have_text(["5", "Why?"])
    expect(page.locator(".turn")).to_have_count(1)
    page.set_input_files("#imported", tmp_path / "files.json")
    expect(page.locator("#status")).to_have_text("A file has no conversation of this page.")
    page.reload()
    expect(page.locator("#list .name")).to_have_count(2)


def test_search_and_titles(open_page, scripted):
    page = open_page(scripted.served)
    scripted.says("Cirrus is a high **cloud** of ice.<turn|>")
    send(page, "Which kinds of weather are there in the north of the country, and what do they bring?")
    wait_for_end(page)
    expect(page.locator("#list .name")).to_have_text("Which kinds of weather are there in the north…")
    new_chat(page)
    scripted.says("Yes.<turn|>")
    send(page, "Short")
    wait_for_end(page)
    page.fill("#search", "ice CLOUD")
    expect(page.locator("#list .name")).to_have_count(1)
    expect(page.locator("#list .excerpt")).to_contain_text("cloud** of ice")
    page.fill("#search", "nothing like it")
    expect(page.locator("#none-found")).to_be_visible()
    page.press("#search", "Escape")
    expect(page.locator("#list .name")).to_have_count(2)
    expect(page.locator("#search")).to_be_focused()


def test_an_address_without_a_conversation(open_page, serve_toy):
    with serve_toy() as served:
        page = open_page(served)
        page.goto(f"{served.url}/#/c/unknown")
        expect(page.locator("#status")).to_have_text("This conversation is not in this browser.")
        expect(page.locator("#examples")).to_be_visible()


def test_a_browser_without_room(open_page, scripted):
    """A conversation is held until the page is closed, and goes on."""
    page = open_page(scripted.served)
    bodies = bodies_of(page)
    page.evaluate("() => { Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError'); }; }")
    scripted.says("One.<turn|>")
    for text in ("first", "second"):
        send(page, text)
        expect(page.locator(".body").last).to_have_text("One.")
        wait_for_end(page)
        expect(page.locator("#status")).to_contain_text("no room for more")
    assert [each["content"] for each in bodies[-1]["input"]] == ["first", "One.", "second"]


NO_STORAGE = """for (const name of ["localStorage", "sessionStorage", "indexedDB"]) {
    Object.defineProperty(window, name, { get() { throw new DOMException("denied", "SecurityError"); } });
}
LockManager.prototype.request = async () => { throw new DOMException("denied", "SecurityError"); };"""
NO_ROOM = "Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError'); };"


@pytest.mark.parametrize("script", [NO_STORAGE, NO_ROOM], ids=["forbidden", "full"])
def test_a_browser_that_keeps_nothing(open_page, serve_toy, script):
    """Key, settings and conversations last until the page is closed."""
    with serve_toy(rules=Rules(api_key="secret")) as served:
        page = open_page(served, ready=False)
        page.add_init_script(script)
        page.reload()
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        expect(page.locator("#model")).to_have_text("toy-model")
        bodies = bodies_of(page)
        page.click("#theme")
        expect(page.locator("#theme")).to_have_attribute("aria-label", "Colours: dark")
        page.click("#settings")
        page.get_by_label("Most tokens").fill("5")
        page.click("#done")
        send(page, "abc")
        wait_for_end(page)
        assert bodies[-1]["max_output_tokens"] == 5
        expect(page.locator("#list .name")).to_have_text("abc")


def test_the_place_in_the_queue_and_the_share_that_was_read(open_page, serve_toy, gate):
    with serve_toy(max_sequences=1) as served:
        page = open_page(served)
        gate.close()
        for text in ("abc", "abc" * 60):
            send(page, text)
            expect(page.locator("#stop")).to_be_visible()
            wait_until(lambda: served.gauge("requests_processing") == 1)
            if text == "abc":
                new_chat(page)
        expect(page.locator(".wait")).to_have_text("Waiting for a free slot: next in the queue")
        page.go_back()
        expect(page.locator(".turn")).to_have_count(0)
        page.go_back()
        expect(page.locator(".user .text")).to_have_text("abc")
        page.click("#stop")
        gate.step()
        wait_for_end(page)
        page.locator("#list .name", has_text="abcabc").click()
        for _ in range(3):
            gate.step()
        expect(page.locator(".wait")).to_have_text(re.compile(r"Reading the conversation: \d+ %"))
        expect(page.locator(".wait progress")).to_be_visible()
        gate.open()
        expect(page.locator(".wait")).to_be_hidden()
        wait_for_end(page)


@pytest.fixture
def serve_two(tmp_path):
    """Serves two toy models; the second one's load waits for the event and has read 40 % until then."""
    loading = threading.Event()

    def source(name):
        bundle = Bundle.open(write_bundle(tmp_path / name, name=name))

        def load(report):
            if name == "second":
                report("reading", 0.4)
                assert loading.wait(PATIENCE_S)
            return model_over(ToyEngine(100, chunk=16), bundle.path, max_sequences=2)

        return ServedModel(bundle, load)

    @contextmanager
    def start():
        with running(Server([source("first"), source("second")], Setup(max_sequences=2, idle_s=0.01))) as served:
            try:
                yield served, loading
            finally:
                loading.set()

    return start


def test_another_model(open_page, serve_two):
    """It is chosen, loaded while the page says so, and stays chosen."""
    with serve_two() as (served, loading):
        page = open_page(served)
        bodies = bodies_of(page)
        loading.set()
        page.get_by_label("Model", exact=True).select_option("second")
        expect(page.locator("#status")).to_have_text("second answers from now on.")
        expect(page.locator("#model")).to_have_text("second")
        wait_until(lambda: served.get("/v1/models/second").body["status"]["value"] == "unloaded")
        loading.clear()
        send(page, "abc")
        expect(page.locator(".wait")).to_have_text("The model is being loaded: 40 %")
        assert served.get("/v1/models/second").body["status"] == {
            "value": "loading",
            "stage": "reading",
            "progress": 0.4,
        }
        loading.set()
        wait_for_end(page)
        assert bodies[-1]["model"] == "second"
        page.reload()
        expect(page.locator("#model")).to_have_text("second")
        expect(page.get_by_label("Model", exact=True)).to_have_value("second")


def test_the_model_that_was_chosen_last_answers(open_page, serve_two):
    """Also where another one, chosen before it, is loaded later."""
    with serve_two() as (served, loading):
        page = open_page(served)
        with page.expect_request(re.compile("props.model=second")):
            page.get_by_label("Model", exact=True).select_option("second")
        page.get_by_label("Model", exact=True).select_option("first")
        expect(page.locator("#status")).to_have_text("first answers from now on.")
        with page.expect_response(re.compile("props.model=second")) as late:
            loading.set()
        late.value.finished()
        page.wait_for_timeout(200)
        expect(page.locator("#status")).to_have_text("first answers from now on.")
        expect(page.locator("#model")).to_have_text("first")
        expect(page.get_by_label("Model", exact=True)).to_have_value("first")


def test_a_drafter_of_another_model_is_not_asked_for(open_page, serve_toy):
    """The setting stays for the model that has it."""
    with serve_toy(context_length=30) as served:
        page = open_page(served)
        bodies = bodies_of(page)
        for drafter, sent in (("medusa", None), ("none", "none")):
            page.evaluate("(drafter) => { localStorage['ondevice.settings'] = JSON.stringify({ drafter }); }", drafter)
            send(page, "abc")
            wait_for_end(page)
            assert bodies[-1].get("drafter") == sent
            expect(page.locator(".failure")).to_have_count(0)
            new_chat(page)
