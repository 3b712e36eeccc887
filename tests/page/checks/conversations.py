"""Conversations that are kept."""

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect

from tests.page.checks.hostile import TEXTS
from tests.page.checks.steps import FAILED_LOAD, answered, ask, box, sent_bodies, settings
from tests.page.environment import BUILT
from tests.page.visit import Browser

PUT = """async (values) => {
  const opening = indexedDB.open("quire", 1);
  await new Promise((resolve) => (opening.onsuccess = resolve));
  const name = "conversations";
  const table = opening.result.transaction(name, "readwrite").objectStore(name);
  for (const value of values) table.put(value);
  await new Promise((resolve) => (table.transaction.oncomplete = resolve));
  opening.result.close();
}"""


def conversations_outlive_a_reload_and_are_renamed_and_deleted(browser: Browser) -> None:
    with browser.page(browser.demo) as page:
        ask(page, "Tell me a story about a fox.")
        answered(page)
        said = page.locator(".answer .text").inner_text()
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".answer")).to_have_count(0)
        ask(page, "What can you do?")
        answered(page)
        expect(page.locator("#conversations .open")).to_have_text(
            ["What can you do?", "Tell me a story about a fox."]
        )
        page.reload()
        expect(page.locator(".asked .text")).to_have_text("What can you do?")
        expect(page.locator(".answer .facts")).to_contain_text("cached")
        expect(page.locator("#conversations [aria-current]")).to_have_text("What can you do?")
        page.get_by_role("button", name="Tell me a story about a fox.", exact=True).click()
        expect(page.locator(".answer .text")).to_have_text(said)
        ask(page, "And then?")
        answered(page)
        expect(page.locator("#conversations .open").first).to_have_text(
            "Tell me a story about a fox."
        )
        page.get_by_role("button", name="Rename, export or delete Tell").click()
        page.get_by_label("Title").fill("The fox")
        page.get_by_role("button", name="Done").click()
        expect(page.locator("#conversations .open").first).to_have_text("The fox")
        page.get_by_role("button", name="Rename, export or delete The fox").click()
        page.get_by_role("button", name="Delete", exact=True).click()
        page.get_by_role("button", name="Keep").click()
        expect(page.locator("#conversations .open")).to_have_count(2)
        page.get_by_role("button", name="Rename, export or delete The fox").click()
        page.get_by_role("button", name="Delete", exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
        expect(page.locator("#conversations .open")).to_have_text(["What can you do?"])
        expect(page.locator(".answer")).to_have_count(0)
        page.reload()
        expect(page.locator("#conversations .open")).to_have_text(["What can you do?"])
        page.get_by_role("button", name="Delete all").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
        expect(page.locator("#conversations-empty")).to_be_visible()


def a_message_is_edited_and_an_answer_regenerated(browser: Browser) -> None:
    with browser.page(browser.parrot, expected=FAILED_LOAD) as page:
        bodies = sent_bodies(page)
        for word in ("one", "two"):
            ask(page, f"Repeat after me: {word}")
            answered(page)
        page.get_by_role("button", name="Regenerate").click()
        answered(page)
        expect(page.locator(".answer .text")).to_have_text(["one", "two"])
        assert [turn["role"] for turn in bodies[-1]["messages"]] == ["user", "assistant", "user"]
        box(page).press("ArrowUp")
        field = page.get_by_label("Edit message")
        field.fill("Repeat after me: three")
        field.press("Enter")
        answered(page)
        expect(page.locator(".answer .text")).to_have_text(["one", "three"])
        assert "two" not in json.dumps(bodies[-1])
        # A turn that cannot be answered again is not lost.
        page.route("**/v1/chat/completions", lambda route: route.abort())
        page.get_by_role("button", name="Regenerate").click()
        expect(page.get_by_role("alert")).to_have_text(
            "The server cannot be reached. Is it still running?"
        )
        expect(page.locator(".answer .text")).to_have_text(["one", "three"])
        page.unroute("**/v1/chat/completions")
        box(page).fill("")
        page.get_by_role("button", name="Edit", exact=True).first.click()
        field.fill("Repeat after me: four")
        page.get_by_role("button", name="Send again").click()
        answered(page)
        expect(page.locator(".answer .text")).to_have_text(["four"])
        page.reload()
        expect(page.locator(".answer .text")).to_have_text(["four"])


def settings_belong_to_a_conversation_and_are_sent(browser: Browser) -> None:
    values = {
        "system_prompt": "Be brief.",
        "temperature": "0.7",
        "top_p": "0.9",
        "top_k": "40",
        "min_p": "0.05",
        "max_tokens": "64",
        "seed": "7",
    }
    with browser.page(browser.demo) as page:
        bodies = sent_bodies(page)
        settings(page, **values)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Let the model think").uncheck()
        page.keyboard.press("Escape")
        expect(page.locator("#settings-sum")).to_contain_text("system prompt · temperature 0.7")
        ask(page, "What can you do?")
        answered(page)
        expected: dict[str, Any] = {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.05,
            "max_tokens": 64,
            "seed": 7,
            "enable_thinking": False,
        }
        assert bodies[-1] == bodies[-1] | expected
        assert bodies[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
        page.reload()
        expect(page.locator("#settings-sum")).to_contain_text("no thoughts")
        page.get_by_role("button", name="Settings").click()
        assert page.get_by_label("Seed").input_value() == "7"
        page.get_by_label("Seed").fill("1.5")
        page.get_by_label("Temperature").fill("")
        page.keyboard.press("Escape")
        expect(page.locator("#settings-sum")).not_to_contain_text("seed")
        expect(page.locator("#settings-sum")).not_to_contain_text("temperature")


def exported(page: Page, name: str) -> Path:
    """A file that the page gives away, by the button's name."""
    with page.expect_download() as given:
        page.get_by_role("button", name=name).click()
    path = BUILT / str(given.value.suggested_filename)
    given.value.save_as(path)
    return path


def conversations_leave_as_files_and_come_back(browser: Browser) -> None:
    with browser.page(browser.parrot) as page:
        settings(page, system_prompt="Be brief.", top_k="3")
        ask(page, "Repeat after me: **a** fox")
        answered(page)
        page.get_by_role("button", name="Rename, export or delete").click()
        text = exported(page, "Export as Markdown")
        assert text.name == "repeat-after-me-a-fox.md"
        assert text.read_text() == (
            "# Repeat after me: **a** fox\n\n## System\n\nBe brief.\n\n## You\n\n"
            "Repeat after me: **a** fox\n\n## Answer\n\n**a** fox\n"
        )
        one = exported(page, "Export as JSON")
        page.get_by_role("button", name="Done").click()
        page.get_by_role("button", name="New chat").click()
        ask(page, "Repeat after me: two")
        answered(page)
        both = exported(page, "Export all")
        assert len(json.loads(both.read_text())["conversations"]) == 2
        page.get_by_role("button", name="Delete all").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
        expect(page.locator("#conversations-empty")).to_be_visible()
        page.locator("#import-file").set_input_files(one)
        expect(page.locator(".answer .text strong")).to_have_text("a")
        expect(page.locator("#settings-sum")).to_have_text("system prompt · top k 3")
        page.locator("#import-file").set_input_files(both)
        # Imported conversations have new ids: the stored ones stay.
        expect(page.locator("#conversations .open")).to_have_count(3)


def hostile_files_and_kept_conversations_are_inert(browser: Browser) -> None:
    evil = TEXTS[0]
    turn = {
        "question": evil,
        "answer": "\n\n".join(TEXTS[:24]),
        "thoughts": evil,
        "ended": evil,
        "facts": {
            "prompt": evil,
            "cached": 1e400,
            "miss": {"reason": evil, "message": evil},
            "system": {},
        },
    }
    conversation = {
        "id": '"><script>hacked()</script>',
        "title": evil,
        "changed": 9e99,
        "model": evil,
        "system": evil,
        "sampling": {"temperature": evil, "top_k": 1.5, "seed": -1, "constructor": 1},
        "turns": [turn],
        "__proto__": {"polluted": True},
    }
    files = {
        "no.json": "{",
        "other.json": '{"format": "other", "conversations": []}',
        "turns.json": json.dumps(envelope({**conversation, "turns": [{"question": 1}]})),
        "many.json": json.dumps(
            envelope({**conversation, "turns": [turn | {"facts": None}] * 2001})
        ),
        "long.json": json.dumps(envelope({**conversation, "system": "x" * 8_000_001})),
    }
    with browser.page(browser.parrot) as page:
        for name, text in files.items():
            (BUILT / name).write_text(text)
            page.locator("#import-file").set_input_files(BUILT / name)
            expect(page.locator("#conversations-note")).to_contain_text("holds no conversations")
            page.evaluate("document.querySelector('#conversations-note').textContent = 'again'")
        hostile = BUILT / "hostile.json"
        hostile.write_text(json.dumps(envelope(conversation)).replace("Infinity", "1e400"))
        page.locator("#import-file").set_input_files(hostile)
        expect(page.locator(".answer .text")).to_contain_text("hacked()")
        expect(page.locator("#conversations .open")).to_have_text([evil])
        expect(page.locator("#settings-sum")).to_have_text("system prompt")
        expect(page.locator("#model")).to_have_value("recall")
        # As somebody else may have left them in the browser.
        page.evaluate(PUT, [{"id": 5}, {"id": "x", "turns": "none"}, conversation | {"id": "y"}])
        page.reload()
        expect(page.locator("#conversations .open")).to_have_count(2)
        expect(page.locator("#messages :is(img, script, style, iframe, form, svg)")).to_have_count(
            0
        )
        assert page.evaluate("'polluted' in {}") is False
        assert page.evaluate("'wasHacked' in globalThis") is False


def envelope(conversation: dict[str, Any]) -> dict[str, Any]:
    return {"format": "quire-conversations", "version": 1, "conversations": [conversation]}


def only_the_newest_are_kept(browser: Browser) -> None:
    def one(number: int) -> dict[str, Any]:
        turn = {"question": "q", "answer": "a", "thoughts": "", "ended": "stop", "facts": None}
        return {
            "id": f"{number:032x}",
            "title": f"No. {number}",
            "changed": number,
            "turns": [turn],
        }

    with browser.page(browser.demo) as page:
        page.evaluate(PUT, [one(number) for number in range(203)])
        ask(page, "What can you do?")
        answered(page)
        expect(page.locator("#conversations .open")).to_have_count(200)
        expect(page.locator("#conversations .open").first).to_have_text("What can you do?")
        expect(page.locator("#conversations .open").last).to_have_text("No. 4")


def a_browser_that_keeps_nothing_says_so(browser: Browser) -> None:
    forbid = """for (const name of ["indexedDB", "sessionStorage"]) {
      const get = () => { throw new DOMException("", "SecurityError"); };
      Object.defineProperty(window, name, { get });
    }"""
    with browser.page(browser.demo) as page:
        page.add_init_script(forbid)
        page.reload()
        expect(page.locator("#conversations-note")).to_have_text(
            "This browser keeps nothing: they end with the tab."
        )
        for question in ("What can you do?", "Tell me a story about a fox."):
            ask(page, question)
            answered(page)
            page.get_by_role("button", name="New chat").click()
        page.get_by_role("button", name="What can you do?", exact=True).click()
        expect(page.locator(".answer .facts")).to_contain_text("cached")
