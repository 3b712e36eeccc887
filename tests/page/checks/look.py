"""How it looks."""

from playwright.sync_api import Page, expect

from tests.page.checks.steps import (
    accessible,
    answered,
    ask,
    box,
    long_answers,
    no_overflow,
    settings,
)
from tests.page.checks.text import FORMS
from tests.page.visit import NARROW, Browser, shot

MIDDLE = {"width": 1100, "height": 760}


def it_looks_right_in_dark_and_light_wide_and_narrow(browser: Browser) -> None:
    with long_answers(browser.demo, "Red", "Blue"):
        for dark in (False, True):
            name = "dark" if dark else "light"
            with browser.page(browser.demo, dark=dark) as page:
                ask(page, "Tell me a story about a fox.")
                answered(page)
                page.wait_for_timeout(1500)
                shot(page, f"wide-{name}")
                no_overflow(page)
                page.set_viewport_size(MIDDLE)
                expect(page.locator("#chat")).to_be_visible()
                expect(page.locator("#list")).to_be_hidden()
                page.get_by_role("button", name="Chats").click()
                expect(page.locator("#list")).to_be_visible()
                expect(page.locator("#memory")).to_be_visible()
                shot(page, f"middle-{name}")
                no_overflow(page)
            with browser.page(browser.demo, dark=dark, viewport=NARROW, has_touch=True) as page:
                ask(page, "What can you do?")
                answered(page)
                shot(page, f"narrow-chat-{name}")
                no_overflow(page)
                page.get_by_role("button", name="Memory").click()
                expect(box(page)).to_be_hidden()
                page.wait_for_timeout(1000)
                page.locator(".turn summary").click()
                shot(page, f"narrow-memory-{name}")
                no_overflow(page)
                page.get_by_role("button", name="Chats").click()
                expect(page.locator("#conversations .open")).to_be_visible()
                shot(page, f"narrow-chats-{name}")
                no_overflow(page)
                page.get_by_role("button", name="New chat").click()
                page.get_by_role("button", name="Settings").click()
                shot(page, f"narrow-settings-{name}")
                no_overflow(page)


def axe_finds_nothing_in_dark_and_light_in_lists_and_dialogs(browser: Browser) -> None:
    for dark in (False, True):
        name = "dark" if dark else "light"
        with browser.page(browser.parrot, dark=dark) as page:
            accessible(page)
            # The cache does not have this prompt yet: the turn has reasons to show.
            settings(page, system_prompt=f"{name.capitalize()} is the scheme.")
            ask(page, f"Repeat after me: <think>\nA thought.\n</think>\n\n{FORMS}")
            answered(page)
            expect(page.locator(".hljs-keyword").first).to_be_visible()
            page.locator(".answer summary").click()
            page.locator(".turn summary").click()
            expect(page.locator(".leaves")).to_be_visible()
            accessible(page)
            page.get_by_role("button", name="Edit", exact=True).click()
            accessible(page)
            shot(page, f"edit-{name}")
            page.get_by_role("button", name="Cancel").click()
            dialogs(page, name)
        with browser.page(browser.parrot, dark=dark, viewport=NARROW) as page:
            for view in ("Chats", "Chat", "Memory"):
                page.get_by_role("button", name=view, exact=True).click()
                accessible(page)


def dialogs(page: Page, name: str) -> None:
    """All of them, one after the other."""
    for opener in ("Settings", "Rename, export or delete", "Keyboard shortcuts", "Delete all"):
        page.get_by_role("button", name=opener).click()
        expect(page.get_by_role("dialog")).to_be_visible()
        accessible(page)
        shot(page, f"{opener.split()[0].lower().strip(',')}-{name}")
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
