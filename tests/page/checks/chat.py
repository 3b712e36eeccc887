"""Questions, answers, and keys."""

import json

from playwright.sync_api import Route, expect

from tests.page.checks.steps import (
    FAILED_LOAD,
    accessible,
    answered,
    ask,
    box,
    endless,
    get,
    long_answers,
    settings,
)
from tests.page.visit import KEY, Browser, shot

KEPT = """async () => {
  const { Store } = await import("/page/store.js");
  const store = new Store();
  await store.open();
  return JSON.stringify(await store.all());
}"""


def an_answer_is_shown_with_its_thoughts_and_its_figures(browser: Browser) -> None:
    with browser.page(browser.demo) as page:
        expect(page.locator("#model")).to_have_value("quire-demo")
        ask(page, "Tell me a story about a fox.")
        answered(page)
        answer = page.locator(".answer").last
        expect(answer.locator(".text")).to_contain_text("page")
        expect(answer.locator("summary")).to_contain_text("Thought for")
        assert not answer.locator("details").evaluate("element => element.open"), "still open"
        answer.locator("summary").click()
        expect(answer.locator(".thought")).to_contain_text("They want")
        facts = answer.locator(".facts").inner_text()
        for part in (" tokens", "/s", " cached"):
            assert part in facts, facts
        ask(page, "What can you do?")
        answered(page)
        assert page.locator(".answer").count() == 2
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Let the model think").uncheck()
        page.get_by_role("button", name="Done").click()
        ask(page, "What can you do?")
        answered(page)
        expect(page.locator(".answer").last.locator("details")).to_be_hidden()
        page.get_by_role("button", name="New chat").click()
        assert page.locator(".answer").count() == 0


def an_answer_streams_and_stop_ends_its_request_on_the_server(browser: Browser) -> None:
    with browser.page(browser.slow) as page:
        page.route("**/v1/chat/completions", endless)
        ask(page, "What can you do?")
        text = page.locator(".answer .text")
        expect(text).not_to_be_empty()
        page.wait_for_function(
            "before => document.querySelector('.answer .text').textContent.length > before",
            arg=len(text.inner_text()),
        )
        expect(page.locator(".answer")).to_have_attribute("aria-busy", "true")
        assert get(browser.slow, "/memory")["map"]["running"] == 1
        page.get_by_role("button", name="Stop").click()
        answered(page)
        expect(page.locator(".answer .facts")).to_contain_text("stopped")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        expect(page.locator("#requests tr").first.locator("td").last).to_have_text("aborted")
        expect(page.locator("#state")).to_have_text("Idle")
        told = get(browser.slow, "/memory")
        assert told["map"]["running"] == 0
        assert told["requests"][0]["finish"] == "aborted"


def enter_sends_and_shift_enter_and_input_methods_do_not(browser: Browser) -> None:
    with browser.page(browser.demo) as page:
        message = box(page)
        message.fill("one")
        message.press("Shift+Enter")
        message.press_sequentially("two")
        assert message.input_value() == "one\ntwo"
        message.evaluate(
            """element => element.dispatchEvent(new KeyboardEvent("keydown",
              { key: "Enter", isComposing: true, bubbles: true, cancelable: true }))"""
        )
        assert page.locator(".answer").count() == 0
        message.press("Enter")
        answered(page)
        expect(page.locator(".asked .text")).to_have_text("one\ntwo")


def too_warm(route: Route) -> None:
    """Send the same request with a temperature that no server takes."""
    body = json.loads(route.request.post_data or "{}") | {"temperature": 99}
    route.continue_(post_data=json.dumps(body))


def a_refusal_is_shown_as_a_sentence_and_the_question_is_kept(browser: Browser) -> None:
    with browser.page(browser.demo, expected=FAILED_LOAD) as page:
        settings(page, temperature="99")
        # The browser says that the value is wrong; a wrong value is not taken.
        expect(page.get_by_role("dialog")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#settings-sum")).to_be_empty()
        page.route("**/v1/chat/completions", too_warm)
        ask(page, "What can you do?")
        answered(page)
        expect(page.get_by_role("alert")).to_have_text(
            "The server does not take this temperature. It should be less than or equal to 2. "
            "Change it in Settings."
        )
        accessible(page)
        shot(page, "refusal")
        assert box(page).input_value() == "What can you do?"
        page.unroute("**/v1/chat/completions")
        settings(page, temperature="0")
        page.get_by_role("button", name="Send").click()
        answered(page)
        expect(page.locator(".answer").last.locator(".facts")).to_contain_text("cached")


def a_full_server_says_when_to_try_again(browser: Browser) -> None:
    with (
        browser.page(browser.slow, expected=FAILED_LOAD) as page,
        long_answers(browser.slow, "One", "Two", "Three"),
    ):
        ask(page, "What can you do?")
        answered(page)
        expect(page.get_by_role("alert")).to_have_text(
            "The server has as much to do as it takes on. Try again in 1 second."
        )


def a_key_is_asked_for_and_kept_for_the_tab_alone(browser: Browser) -> None:
    with browser.page(browser.locked, expected=FAILED_LOAD) as page:
        field = page.get_by_label("This server asks for an API key")
        expect(field).to_be_focused()
        expect(page.locator("#state")).to_have_text("Key needed")
        field.fill("a-wrong-key-1234567")
        field.press("Enter")
        expect(page.locator("#key-note")).to_have_text("The server did not accept this key.")
        expect(page.get_by_text("Nothing is known of the memory yet.")).to_be_visible()
        shot(page, "key")
        accessible(page)
        field.fill(KEY)
        field.press("Enter")
        expect(field).to_be_hidden()
        expect(page.locator("#state")).to_have_text("Idle")
        ask(page, "What can you do?")
        answered(page)
        expect(page.locator(".answer .facts")).to_contain_text("cached")
        assert KEY not in page.content()
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        assert KEY not in page.evaluate(KEPT)
        assert KEY in page.evaluate("Object.values(sessionStorage)")
        page.reload()
        expect(page.locator("#model")).to_have_value("quire-demo")
        expect(field).to_be_hidden()


def keys_stop_edit_and_open_what_they_say(browser: Browser) -> None:
    with browser.page(browser.slow) as page:
        page.keyboard.press("ArrowUp")
        page.route("**/v1/chat/completions", endless)
        ask(page, "What can you do?")
        expect(page.locator(".answer .text")).not_to_be_empty()
        page.keyboard.press("Escape")
        answered(page)
        expect(page.locator(".answer .facts")).to_contain_text("stopped")
        page.keyboard.press("ArrowUp")
        field = page.get_by_label("Edit message")
        expect(field).to_be_focused()
        expect(field).to_have_value("What can you do?")
        page.keyboard.press("Escape")
        expect(field).to_have_count(0)
        expect(page.locator(".asked .text")).to_be_visible()
        box(page).fill("not empty")
        box(page).press("ArrowUp")
        expect(field).to_have_count(0)
        page.keyboard.press("Control+Slash")
        expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
        page.keyboard.press("Alt+KeyN")
        expect(page.locator(".answer")).to_have_count(1)
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        page.keyboard.press("Alt+KeyS")
        expect(page.get_by_label("System prompt")).to_be_focused()
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Settings").focus()
        page.keyboard.press("Alt+KeyM")
        expect(box(page)).to_be_focused()
        first = page.locator(".answer .text").inner_text()
        page.keyboard.press("Alt+KeyR")
        expect(page.locator(".answer")).to_have_attribute("aria-busy", "true")
        expect(page.locator(".answer .text")).not_to_be_empty()
        page.get_by_role("button", name="Stop").click()
        answered(page)
        assert page.locator(".answer").count() == 1, first
        page.keyboard.press("Alt+KeyN")
        expect(page.locator(".answer")).to_have_count(0)
        expect(page.locator("#welcome")).to_be_visible()
