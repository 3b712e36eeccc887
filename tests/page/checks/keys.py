"""Keys."""

from playwright.sync_api import expect

from tests.page.checks.steps import answered, ask, box, endless
from tests.page.visit import Browser


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
