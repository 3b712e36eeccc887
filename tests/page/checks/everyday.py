"""What a day with the page needs: several answers at once, files, search, formulas, room."""

import json
import re
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page, Route, expect

from tests.page.checks.steps import (
    FAILED_LOAD,
    accessible,
    answered,
    ask,
    box,
    endless,
    get,
    no_overflow,
    sent_bodies,
)
from tests.page.visit import NARROW, Browser, shot

TARGET_PX = 44
SMALL = f"""() => [...document.querySelectorAll("button, select, summary, input, textarea")]
  .filter((one) => one.checkVisibility({{ visibilityProperty: true }}) && one.type !== "checkbox")
  .map((one) => [one.id || one.textContent, one.getBoundingClientRect()])
  .filter(([, {{ width, height }}]) => Math.min(width, height) < {TARGET_PX - 0.5})
  .map(([name]) => name)"""


def answers_go_on_while_another_conversation_is_open(browser: Browser) -> None:
    with browser.page(browser.slow) as page:
        page.route("**/v1/chat/completions", endless)
        ask(page, "Tell me a story about a fox.")
        text = page.locator(".answer .text")
        expect(text).not_to_be_empty()
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".answer")).to_have_count(0)
        expect(page.locator("#send")).to_be_visible()
        ask(page, "What can you do?")
        expect(text).not_to_be_empty()
        expect(page.locator("#conversations .runs")).to_have_count(2)
        assert get(browser.slow, "/memory")["map"]["running"] == 2
        accessible(page)
        shot(page, "running")
        fox = page.get_by_role("button", name="Tell me a story about a fox.", exact=True)
        fox.click()
        before = len(text.inner_text())
        page.wait_for_function(
            "before => document.querySelector('.answer .text').textContent.length > before + 20",
            arg=before,
        )
        page.get_by_role("button", name="Stop").click()
        answered(page)
        expect(page.locator("#conversations .runs")).to_have_count(1)
        # What the server knows of a stopped answer is shown.
        facts = page.locator(".answer .facts")
        expect(facts).to_contain_text(re.compile(r"\d+ tokens·?.*/s.*cached.*stopped"))
        expect(page.locator(".turn")).to_have_count(1)
        shot(page, "stopped")
        # A deleted conversation does not come back with its answer.
        page.get_by_role("button", name="Rename, export or delete What").click()
        page.get_by_role("button", name="Delete", exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
        expect(page.locator("#state")).to_have_text("Idle")
        expect(page.locator("#conversations .open")).to_have_text(["Tell me a story about a fox."])
        page.reload()
        expect(facts).to_contain_text("cached")


def a_question_waits_and_fails_in_its_own_conversation(browser: Browser) -> None:
    with browser.page(browser.demo, expected=FAILED_LOAD) as page:
        held: list[Route] = []
        page.route("**/v1/chat/completions", lambda route: held.append(route))
        ask(page, "Will it fail?")
        expect(page.locator(".answer")).to_have_attribute("aria-busy", "true")
        page.get_by_role("button", name="New chat").click()
        expect(page.locator("#conversations .open")).to_have_text(["Will it fail?"])
        held[0].abort()
        expect(page.locator("#conversations .runs")).to_have_count(0)
        expect(page.get_by_role("alert")).to_have_count(0)
        page.get_by_role("button", name="Will it fail?", exact=True).click()
        expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
        expect(page.locator(".unsent")).to_contain_text("Not sent")
        assert "none" in str(
            page.locator(".unsent .text").evaluate("one => getComputedStyle(one).textDecoration")
        )
        accessible(page)
        shot(page, "not-sent")
        page.unroute("**/v1/chat/completions")
        page.get_by_role("button", name="Send").click()
        answered(page)
        expect(page.locator(".asked .text")).to_have_text(["Will it fail?"])
        expect(page.locator(".unsent")).to_have_count(0)


def speeds_are_the_servers_own_and_nothing_else(browser: Browser) -> None:
    told: list[dict[str, Any]] = []
    for name in ("timings", "other"):
        with browser.page(browser.demo) as page:
            page.route("**/v1/chat/completions", at_once(told, name))
            ask(page, "Tell me a story about a fox.")
            answered(page)
            facts = page.locator(".answer .facts")
            if name == "timings":
                rate = told[0]["tokens_per_s"]
                shown = f"{rate:.0f}/s" if rate >= 100 else f"{rate:.1f}/s"
                expect(facts).to_contain_text(shown)
                expect(page.locator(".thinking summary")).to_contain_text("Thought for")
            else:
                expect(facts).to_contain_text("cached")
                expect(facts).not_to_contain_text("/s")
                expect(page.locator(".thinking summary")).to_have_text("Thoughts")
                expect(page.locator(".turn-facts")).not_to_contain_text("/s")


def at_once(told: list[dict[str, Any]], name: str) -> Callable[[Route], None]:
    """Send the whole answer in one piece: the browser's own times say nothing. name: that of the
    server's times, which are added to ``told``."""

    def send(route: Route) -> None:
        text = route.fetch().text()
        (last,) = (line for line in text.splitlines() if '"usage":{' in line)
        told.append(json.loads(last.removeprefix("data: "))["usage"]["timings"])
        changed = text.replace('"timings"', f'"{name}"')
        route.fulfill(body=changed, content_type="text/event-stream")

    return send


def the_memory_folds_away_and_stays_away(browser: Browser) -> None:
    with browser.page(browser.demo) as page:
        chat = page.locator("#chat")
        narrow = chat.bounding_box()
        memory = page.get_by_role("button", name="Memory", exact=True)
        expect(memory).to_have_attribute("aria-pressed", "true")
        memory.click()
        expect(page.locator("#memory")).to_be_hidden()
        expect(memory).to_have_attribute("aria-pressed", "false")
        wide = chat.bounding_box()
        assert narrow is not None
        assert wide is not None
        assert wide["width"] > narrow["width"] + 500
        page.reload()
        expect(page.locator("#memory")).to_be_hidden()
        ask(page, "Tell me a story about a fox.")
        answered(page)
        accessible(page)
        shot(page, "folded-light")
        page.keyboard.press("Alt+KeyK")
        expect(page.locator("#map-canvas")).to_be_visible()
        page.reload()
        expect(page.locator("#map-canvas")).to_be_visible()
        page.set_viewport_size(NARROW)
        page.keyboard.press("Alt+KeyK")
        expect(chat).to_be_hidden()
        expect(page.locator("#memory")).to_be_visible()


def idle_heaps_are_one_bar_and_words_are_plain(browser: Browser) -> None:
    with browser.page(browser.demo) as page:
        expect(page.locator("#state")).to_have_text("Idle")
        told = get(browser.demo, "/memory")
        per_heap = told["map"]["geometry"]["blocks_per_heap"]
        for heaps, idle in (
            (["f" * per_heap], "1 free heap"),
            (["f" * per_heap, "d" + "f" * (per_heap - 1)], "2 free heaps"),
            (["f" * per_heap, "c" + "f" * (per_heap - 1), "f" * per_heap], "2 free heaps"),
            (["c" * per_heap], ""),
        ):
            told["map"] |= {"heaps": heaps, "owners": [-1, len(heaps) * per_heap], "sharers": []}
            page.route("**/memory", lambda route: route.fulfill(json=told))
            expect(page.locator("#map-sum")).to_contain_text(f"{len(heaps)} of ")
            expect(page.locator("#map-idle")).to_be_visible(visible=bool(idle))
            expect(page.locator("#map-idle")).to_contain_text(idle)
            expect(page.locator("#map")).to_be_visible(visible="c" in "".join(heaps))
            if len(heaps) == 3:
                page.locator("#map").focus()
                page.keyboard.press("Home")
                expect(page.locator("#map-fact")).to_have_text("Heap 1, block 0: cached")
            page.unroute("**/memory")
        for groups in ("#pool-groups span", "#map-groups span"):
            expect(page.locator(groups)).to_have_text(["In use", "Kept for reuse", "Free"])
        expect(page.locator("#pool-legend")).to_be_hidden()
        page.get_by_text("Details", exact=True).first.click()
        expect(page.locator("#pool-legend li").nth(1)).to_contain_text("unused ends")
        accessible(page)
        shot(page, "plain-words")


def attach(page: Page, *files: tuple[str, bytes]) -> None:
    page.locator("#attach-files").set_input_files(
        [{"name": name, "mimeType": "text/plain", "buffer": content} for name, content in files]
    )


def text_files_go_with_a_message(browser: Browser) -> None:
    with browser.page(browser.parrot, expected=FAILED_LOAD) as page:
        bodies = sent_bodies(page)
        note = page.locator("#files-note")
        for name, content, problem in (
            ("photo.png", b"\x89PNG\r\n", "photo.png is no text."),
            ("zero.bin", b"a\0b", "zero.bin is no text."),
            ("big.txt", b"x" * (2**20 + 1), "A message takes 1 MiB, too few for big.txt."),
        ):
            attach(page, (name, content))
            expect(note).to_have_text(problem)
        attach(page, ("half.txt", b"x" * 2**19), ("more.txt", b"x" * (2**19 + 1)))
        expect(note).to_have_text("A message takes 1 MiB, too few for more.txt.")
        page.get_by_role("button", name="Leave out half.txt").click()
        expect(page.locator("#files li")).to_have_count(0)
        attach(page, ("notes.md", "A *note*: ä\n```\ncode\n```\n".encode()))
        page.evaluate(
            """() => {
              const given = (name) => {
                const data = new DataTransfer();
                data.items.add(new File(["from " + name], name));
                return data;
              };
              const fire = (id, event) => document.getElementById(id).dispatchEvent(event);
              const how = { bubbles: true, cancelable: true };
              for (const kind of ["dragover", "drop"]) {
                fire("chat", new DragEvent(kind, { ...how, dataTransfer: given("drop.txt") }));
              }
              fire("prompt", new ClipboardEvent("paste", { ...how,
                clipboardData: given("paste.txt") }));
            }"""
        )
        expect(page.locator("#files li")).to_have_count(3)
        box(page).fill("What do they say?")
        accessible(page)
        shot(page, "files")
        page.route("**/v1/chat/completions", lambda route: route.abort())
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("alert")).to_be_visible()
        page.unroute("**/v1/chat/completions")
        # The files come back with the question.
        expect(page.locator("#files li")).to_have_count(3)
        page.get_by_role("button", name="Send").click()
        answered(page)
        expect(page.locator("#files li")).to_have_count(0)
        expected = "notes.md:\n````\nA *note*: ä\n```\ncode\n```\n````\n\n"
        expected += "drop.txt:\n```\nfrom drop.txt\n```\n\npaste.txt:\n```\nfrom paste.txt\n```\n\n"
        assert bodies[-1]["messages"] == [
            {"role": "user", "content": f"{expected}What do they say?"}
        ]
        page.reload()
        expect(page.locator(".asked .files li")).to_have_count(3)
        ask(page, "And now?")
        answered(page)
        assert bodies[-1]["messages"][0]["content"].startswith(expected)
        # A file may go without a question.
        attach(page, ("alone.txt", b"alone"))
        page.get_by_role("button", name="Send").click()
        answered(page)
        assert bodies[-1]["messages"][-1]["content"] == "alone.txt:\n```\nalone\n```"
        page.set_viewport_size(NARROW)
        no_overflow(page)
        shot(page, "narrow-files")


def conversations_are_searched(browser: Browser) -> None:
    with browser.page(browser.parrot) as page:
        for text in ("apples and Pears", "pears alone", "nothing"):
            page.get_by_role("button", name="New chat").click()
            ask(page, f"Repeat after me: {text}")
            answered(page)
        search = page.get_by_role("searchbox", name="Search conversations")
        shown = page.locator("#conversations .open")
        for words, count in (("PEARS", 2), ("pears apples", 1), ("alone", 1), ("", 3), ("plum", 0)):
            search.fill(words)
            expect(shown).to_have_count(count)
        expect(page.locator("#conversations-empty")).to_have_text(
            "No conversation has these words."
        )
        shot(page, "search")


FORMULAS = r"""The root of $x^2 = \frac{a}{b}$ is \(x = \sqrt{\tfrac{a}{b}}\).

$$
\boxed{\int_0^\infty e^{-x^2}\,dx

= \frac{\sqrt{\pi}}{2}}
$$

\[
A = \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}, \mathbb{R}, \mathcal{L}, \mathfrak{g}, \mathtt{t}
\]

- in a list: $\sum_i i$, and \[\alpha\]

It costs $5, or $10 for two. `$code$` and \$x\$ are none. A $\unknown{formula}$ stays."""
# Each tries to be more than a formula.
HOSTILE = (
    r"\href{javascript:hacked()}{x}",
    r"\url{javascript:hacked()}",
    r"\includegraphics[height=1em]{http://evil.example/x.png}",
    r"\htmlStyle{position:fixed}{x}",
    r"\htmlId{messages}{x}",
    r"\htmlData{x=1}{x}",
    r"\text{<img src=x onerror=hacked()>}",
    r"\def\a{\a\a}\a",
    r"\rule{9999em}{9999em}",
    r"\fbox{x}\colorbox{red}{y}\pmb{z}\boxed{42}",
)


def formulas_are_drawn_and_fetched_only_then(browser: Browser) -> None:
    for dark in (False, True):
        with browser.page(browser.parrot, dark=dark) as page:
            ask(page, "Repeat after me: no formula, $5 and $6")
            answered(page)
            assert page.evaluate("'katex' in globalThis") is False
            ask(page, f"Repeat after me: {FORMULAS}")
            answered(page)
            text = page.locator(".answer .text").last
            expect(text.locator(".katex")).to_have_count(6)
            expect(text.locator(".katex-display")).to_have_count(3)
            expect(text.locator("code.math")).to_have_text(r"\unknown{formula}")
            expect(text).to_contain_text("It costs $5, or $10 for two. $code$ and $x$ are none.")
            fonts = page.evaluate(
                """async () => {
                  await document.fonts.ready;
                  return [...document.fonts].filter(({ status }) => status === "loaded").length;
                }"""
            )
            assert fonts >= 5, fonts
            accessible(page)
            name = "dark" if dark else "light"
            shot(page, f"formulas-{name}")
            page.set_viewport_size(NARROW)
            no_overflow(page)
            shot(page, f"narrow-formulas-{name}")


def hostile_formulas_are_inert(browser: Browser) -> None:
    with browser.page(browser.parrot) as page:
        page.evaluate("() => { globalThis.hacked = () => { globalThis.wasHacked = true; }; }")
        for number in range(0, len(HOSTILE), 5):
            formulas = "\n\n".join(f"$${formula}$$" for formula in HOSTILE[number : number + 5])
            ask(page, f"Repeat after me: {formulas}")
            answered(page)
        expect(page.locator(".answer .katex").first).to_be_attached()
        expect(page.locator(".text :is(a, img, script, iframe, [id], [data-x])")).to_have_count(0)
        assert page.evaluate("'wasHacked' in globalThis") is False
        no_overflow(page)
        shot(page, "hostile-formulas")


def fingers_find_their_targets(browser: Browser) -> None:
    with browser.page(browser.parrot, viewport=NARROW, has_touch=True) as page:
        ask(page, "Repeat after me: <think>\nA thought.\n</think>\n\nyes")
        answered(page)
        for view in ("Chats", "Chat", "Memory"):
            page.get_by_role("button", name=view, exact=True).click()
            assert page.evaluate(SMALL) == [], view
        page.get_by_role("button", name="Chat", exact=True).click()
        page.get_by_role("button", name="Settings").click()
        assert page.evaluate(SMALL) == []
        page.get_by_role("button", name="Done").click()
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".answer")).to_have_count(0)
        expect(box(page)).to_be_focused()
