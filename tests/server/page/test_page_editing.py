"""The page's conversations while they are edited, kept, imported and deleted; narrow windows and touch."""

import json

import pytest
from playwright.sync_api import expect

from tests.server.page.browsing import bodies_of, new_chat, resize, send, wait_for_end

QUESTION = {"id": "a", "parent": "", "role": "user", "content": "Why?"}
REPLY = {"id": "b", "parent": "a", "role": "assistant", "content": "So."}
NO_ROOM = "This browser has no room for more: export or delete conversations."
FULL = """() => {
    window.setItem = Storage.prototype.setItem;
    Storage.prototype.setItem = () => { throw new DOMException("", "QuotaExceededError"); };
}"""


def answered(page, scripted, question, answer):
    scripted.says(f"{answer}<turn|>")
    send(page, question)
    wait_for_end(page)


def import_file(page, path, messages):
    path.write_text(json.dumps({"messages": messages}), "utf-8")
    page.set_input_files("#imported", path)


def delete_open(page):
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()


def test_one_message_is_edited_at_a_time(open_page, scripted):
    """Another reply would be written unseen, and a second editor would take the files of the first."""
    page = open_page(scripted.served)
    answered(page, scripted, "first", "One.")
    answered(page, scripted, "second", "Two.")
    page.locator(".edit").first.click()
    page.fill(".editor textarea", "changed")
    for hidden in (".edit", ".again"):
        expect(page.locator(hidden)).to_be_hidden()
    expect(page.locator(".foot .copy").last).to_be_visible()
    page.press("#message", "ArrowUp")
    expect(page.locator(".editor")).to_have_count(1)
    page.press(".editor textarea", "Escape")
    expect(page.locator(".edit").first).to_be_focused()
    expect(page.locator(".user .text")).to_have_text(["first", "second"])
    page.locator(".edit").first.click()
    answered(page, scripted, "third", "Three.")
    expect(page.locator(".user .text")).to_have_text(["first", "second", "third"])
    expect(page.locator(".again")).to_be_visible()


def test_turns_stay_when_one_is_added(open_page, scripted, tmp_path):
    """A long conversation is not made again for each message: 600 turns with code and formulas took 12 seconds."""
    page = open_page(scripted.served)
    import_file(
        page,
        tmp_path / "long.json",
        [QUESTION, REPLY, {"role": "user", "content": "More?"}, {**REPLY, "id": "d", "parent": "m2"}],
    )
    expect(page.locator(".turn")).to_have_count(4)
    page.evaluate("() => document.querySelectorAll('.turn').forEach((turn) => (turn.isOld = true))")
    answered(page, scripted, "third", "Three.")
    is_old = "(all) => all.map((turn) => Boolean(turn.isOld))"
    assert page.locator(".turn").evaluate_all(is_old) == [True] * 3 + [False] * 3  # the fourth has fewer buttons
    page.click("text=Regenerate")
    expect(page.locator(".reply .versions")).to_contain_text("2 / 2")
    wait_for_end(page)
    assert page.locator(".turn").evaluate_all(is_old) == [True] * 3 + [False] * 3
    expect(page.locator(".foot")).to_have_count(3)


def test_a_conversation_that_is_deleted_while_its_message_is_edited(open_page, scripted):
    """The edited text is sent as the first message of a new one, or left."""
    page = open_page(scripted.served)
    bodies = bodies_of(page)
    for leave in (False, True):
        new_chat(page)
        answered(page, scripted, "first", "One.")
        answered(page, scripted, "second", "Two.")
        page.locator(".edit").last.click()
        page.fill(".editor textarea", "changed")
        other = page.context.new_page()
        other.goto(page.url)
        delete_open(other)
        expect(page.locator("#list .open")).to_have_count(0)
        if leave:
            page.press(".editor textarea", "Escape")
            expect(page.locator(".turn")).to_have_count(0)
        else:
            page.press(".editor textarea", "Enter")
            wait_for_end(page)
            expect(page.locator(".user .text")).to_have_text(["changed"])
            assert [each["content"] for each in bodies[-1]["input"]] == ["changed"]


def test_room_that_a_deleted_conversation_leaves_is_used(open_page, scripted):
    page = open_page(scripted.served)
    answered(page, scripted, "old", "One.")
    new_chat(page)
    page.evaluate(FULL)
    answered(page, scripted, "new", "Two.")
    expect(page.locator("#status")).to_have_text(NO_ROOM)
    page.locator("#list .name", has_text="old").click()
    page.evaluate("() => (Storage.prototype.setItem = window.setItem)")
    delete_open(page)
    expect(page.locator("#status")).to_have_text("“old” is deleted.")
    page.reload()
    expect(page.locator("#list .name")).to_have_text(["new"])


def test_an_import_without_room_is_said(open_page, scripted, tmp_path):
    page = open_page(scripted.served)
    page.evaluate(FULL)
    import_file(page, tmp_path / "one.json", [QUESTION, REPLY])
    expect(page.locator(".turn")).to_have_count(2)
    expect(page.locator("#status")).to_have_text(NO_ROOM)


WRONG = {
    "files": [{**QUESTION, "content": "", "files": []}, REPLY],
    "a file": [{**QUESTION, "files": [None]}, REPLY],
    "reasoning": [QUESTION, {**REPLY, "reasoning": 5}],
    "calls": [QUESTION, {**REPLY, "calls": 5}],
    "a call": [QUESTION, {**REPLY, "calls": [None]}],
    "rounds": [QUESTION, {**REPLY, "rounds": "x"}],
    "a round": [QUESTION, {**REPLY, "rounds": [5]}],
}


@pytest.mark.parametrize("kind", WRONG)
def test_fields_of_another_form_are_left_out(open_page, scripted, tmp_path, kind):
    """The page could not be opened again with such a conversation."""
    page = open_page(scripted.served)
    import_file(page, tmp_path / "wrong.json", WRONG[kind])
    expect(page.locator("#status")).to_have_text("Imported.")
    page.reload()
    expect(page.locator("#model")).to_have_text("reference")
    expect(page.locator(".body")).to_have_text("So.")
    expect(page.locator("#list .name")).to_have_count(1)


def test_names_and_excerpts_have_no_half_characters(open_page, scripted):
    page = open_page(scripted.served)
    answered(page, scripted, f"a{'😀' * 60}", "x 😀" * 40)
    expect(page.locator("#list .name")).to_have_text(f"a{'😀' * 23}…")
    page.fill("#search", "x")
    expect(page.locator("#list .excerpt")).to_have_text(f"{'x 😀' * 15}…")


def test_the_name_of_a_model_leaves_room_in_a_narrow_window(open_page, served):
    """One of several models is chosen at the top, left of the settings."""
    page = open_page(served)
    props = served.get("/props").body
    names = [f"a-model-with-a-long-name-of-which-there-are-{each}" for each in ("two", "several")]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": each} for each in names]}))
    page.route("**/props?*", lambda route: route.fulfill(json={**props, "model_alias": names[0]}))
    page.reload()
    resize(page, 320, 640)
    expect(page.locator("#models")).to_be_visible()
    page.evaluate("() => (document.querySelector('#context').textContent = '12,345 of 131,072')")
    right = page.locator("#settings").evaluate("each => each.getBoundingClientRect().right")
    assert 300 < right <= 320
    assert page.locator("#models").evaluate("each => each.clientWidth") > 20


def test_the_list_has_the_focus_where_it_covers_the_page(open_page, scripted):
    page = open_page(scripted.served)
    resize(page, 320, 640)
    page.get_by_role("button", name="Conversations", exact=True).press("Enter")
    expect(page.locator("#new")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#side")).to_be_hidden()
    expect(page.locator("#message")).to_be_focused()


def test_enter_is_a_new_line_on_a_touch_screen(browser, scripted):
    """Its keyboard has no Shift+Enter."""
    context = browser.new_context(viewport={"width": 900, "height": 640}, has_touch=True, is_mobile=True)
    try:
        page = context.new_page()
        page.goto(scripted.served.url)
        expect(page.locator("#model")).to_have_text("reference")
        page.locator("#message").tap()
        page.keyboard.type("one\ntwo")
        expect(page.locator("#message")).to_have_value("one\ntwo")
        expect(page.locator("#form .hint")).to_be_hidden()
        scripted.says("Yes.<turn|>")
        page.locator("#send").tap()
        wait_for_end(page)
        expect(page.locator(".user .text")).to_have_text("one\ntwo")
    finally:
        context.close()
