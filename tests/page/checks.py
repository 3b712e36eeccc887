"""What the page must do, in a real browser in front of real servers."""

import json
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page, Route, expect

from tests.page.load import get, long_answers, metrics
from tests.page.visit import KEY, NARROW, Browser, shot

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script> **bold <b>not</b>**"
CODE = "\n```python\nprint('<script>')\n```\n- one `x<y`\n- two"
FAILED_LOAD = ("Failed to load resource",)


def all_checks() -> list[Callable[[Browser], None]]:
    return [
        an_answer_is_shown_with_its_thoughts_and_its_figures,
        what_a_model_writes_is_text_and_never_markup,
        an_answer_streams_and_stop_ends_its_request_on_the_server,
        enter_sends_and_shift_enter_and_input_methods_do_not,
        a_refusal_is_shown_as_a_sentence_and_the_question_is_kept,
        a_full_server_says_when_to_try_again,
        a_key_is_asked_for_and_kept_for_the_tab_alone,
        the_map_shows_sequences_that_share_a_prefix,
        numbers_on_the_page_are_those_of_the_server,
        curves_grow_while_the_page_is_seen_and_rest_while_it_is_not,
        lists_and_numbers_are_read_right,
        a_pool_of_many_blocks_is_drawn_while_nobody_waits,
        it_looks_right_in_dark_and_light_wide_and_narrow,
        a_server_that_is_gone_or_stuck_is_said_to_be,
    ]


def ask(page: Page, question: str) -> None:
    page.get_by_label("Message").fill(question)
    page.get_by_label("Message").press("Enter")


def answered(page: Page) -> None:
    """Until the newest answer is complete."""
    expect(page.locator(".answer").last).to_have_attribute("aria-busy", "false")


def endless(route: Route) -> None:
    """The same request, but its answer may not end by itself."""
    body = json.loads(route.request.post_data or "{}") | {"min_tokens": 3000, "max_tokens": 3000}
    route.continue_(post_data=json.dumps(body))


def an_answer_is_shown_with_its_thoughts_and_its_figures(browser: Browser) -> None:
    with browser.page(browser.demo) as page:
        expect(page.locator("#model")).to_have_text("quire-demo")
        ask(page, "Tell me a story about a fox.")
        answered(page)
        answer = page.locator(".answer").last
        expect(answer.locator(".text")).to_contain_text("page")
        expect(answer.locator("summary")).to_contain_text("Thought for")
        assert not answer.locator("details").evaluate("element => element.open"), "still open"
        answer.locator("summary").click()
        expect(answer.locator(".thought")).to_contain_text("They want")
        facts = answer.locator(".facts").inner_text()
        for part in ("tokens/s", "first token after", "prompt tokens cached"):
            assert part in facts, facts
        ask(page, "What can you do?")
        answered(page)
        assert page.locator(".answer").count() == 2
        page.get_by_text("Settings").click()
        page.get_by_label("Let the model think").uncheck()
        ask(page, "What can you do?")
        answered(page)
        expect(page.locator(".answer").last.locator("details")).to_be_hidden()
        page.get_by_role("button", name="New chat").click()
        assert page.locator(".answer").count() == 0


def what_a_model_writes_is_text_and_never_markup(browser: Browser) -> None:
    with browser.page(browser.parrot) as page:
        page.on("dialog", lambda _: (_ for _ in ()).throw(AssertionError("a script ran")))
        thought = f"<think>\n{EVIL}\n</think>\n\n"
        ask(page, f"Repeat after me: {thought}{EVIL}\n{CODE}")
        answered(page)
        answer = page.locator(".answer").last
        expect(answer.locator(".thought")).to_contain_text("<img src=x onerror=alert(1)>")
        text = answer.locator(".text")
        expect(text).to_contain_text("<img src=x onerror=alert(1)><script>alert(2)</script>")
        expect(text.locator("strong")).to_have_text("bold <b>not</b>")
        expect(text.locator("pre code")).to_have_text("print('<script>')")
        expect(text.locator("li")).to_have_count(2)
        expect(text.locator("li code")).to_have_text("x<y")
        shot(page, "markup")
        for kind in ("img", "script", "b"):
            assert page.locator(f"#messages {kind}").count() == 0


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
        message = page.get_by_label("Message")
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


def a_refusal_is_shown_as_a_sentence_and_the_question_is_kept(browser: Browser) -> None:
    with browser.page(browser.demo, expected=FAILED_LOAD) as page:
        page.get_by_text("Settings").click()
        page.get_by_label("Temperature").fill("99")
        ask(page, "What can you do?")
        answered(page)
        expect(page.get_by_role("alert")).to_contain_text("temperature")
        shot(page, "refusal")
        assert page.get_by_label("Message").input_value() == "What can you do?"
        page.get_by_label("Temperature").fill("0")
        page.get_by_role("button", name="Send").click()
        answered(page)
        expect(page.locator(".answer").last.locator(".facts")).to_contain_text("tokens/s")


def a_full_server_says_when_to_try_again(browser: Browser) -> None:
    with (
        browser.page(browser.slow, expected=FAILED_LOAD) as page,
        long_answers(browser.slow, "One", "Two", "Three"),
    ):
        ask(page, "What can you do?")
        answered(page)
        expect(page.get_by_role("alert")).to_contain_text("Try again in 1 second.")


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
        field.fill(KEY)
        field.press("Enter")
        expect(field).to_be_hidden()
        expect(page.locator("#state")).to_have_text("Idle")
        ask(page, "What can you do?")
        answered(page)
        expect(page.locator(".answer .facts")).to_contain_text("tokens/s")
        assert KEY not in page.content()
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        assert KEY in page.evaluate("Object.values(sessionStorage)")
        page.reload()
        expect(page.locator("#model")).to_have_text("quire-demo")
        expect(field).to_be_hidden()


def the_map_shows_sequences_that_share_a_prefix(browser: Browser) -> None:
    with browser.page(browser.slow) as page:
        with long_answers(browser.slow, "Red", "Blue"):
            expect(page.locator("#state")).to_have_text("2 running")
            expect(page.locator("#sequences li")).to_have_count(2)
            expect(page.locator("#sequences li").last).to_contain_text("blocks shared")
            expect(page.locator("#pool-sum")).to_contain_text("saved by sharing")
            told = get(browser.slow, "/memory")["map"]
            first = told["sequences"][0]["id"]
            shared = told["sharers"][0]
            page.locator("#map").focus()
            page.keyboard.press("Home")
            for _ in range(shared):
                page.keyboard.press("ArrowRight")
            fact = page.locator("#map-fact")
            expect(fact).to_contain_text(f"sequence {first}, first of 2 sequences that share it")
            page.keyboard.press("End")
            expect(fact).to_contain_text("block 63:")
            box = page.locator("#map").bounding_box()
            assert box is not None
            page.mouse.move(box["x"] + 36, box["y"] + 5)
            shot(page, "block")
            expect(page.locator("#tip")).to_contain_text("Heap 0, block 0")
            # The colours are those of the sequences: as many pixels change as blocks have owners.
            colours = page.evaluate(
                """() => {
                  const canvas = document.querySelector("#map-canvas");
                  const { width, height } = canvas;
                  const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
                  const seen = new Map();
                  for (let i = 0; i < data.length; i += 4) {
                    const pixel = data.slice(i, i + 3).join();
                    seen.set(pixel, (seen.get(pixel) ?? 0) + 1);
                  }
                  return [...seen.values()].filter((count) => count > 100).length;
                }"""
            )
            assert colours >= 4, colours
        expect(page.locator("#state")).to_have_text("Idle")
        expect(page.locator("#sequences-empty")).to_be_visible()


def shown_bytes(page: Page) -> dict[str, int]:
    """The legend's figures, as the page has them."""
    found: dict[str, int] = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll("#pool-legend li")].map((item) =>
          [item.querySelector("i").classList[1], Number(item.querySelector("b").dataset.bytes)]))"""
    )
    return found


def numbers_on_the_page_are_those_of_the_server(browser: Browser) -> None:
    with browser.page(browser.demo) as page:
        expect(page.locator("#state")).to_have_text("Idle")
        pool = get(browser.demo, "/memory")["map"]["pool"]
        while pool["live_bytes"] or pool["quarantined_bytes"]:  # on their way to the cache
            pool = get(browser.demo, "/memory")["map"]["pool"]
        page.wait_for_function(
            """cached => Number(document.querySelector("#pool-legend .cached ~ b")
              ?.dataset.bytes) === cached""",
            arg=pool["cached_bytes"],
        )
        shown, measured = shown_bytes(page), metrics(browser.demo)
        assert pool["cached_bytes"] > 0
        assert sum(shown.values()) == pool["capacity_bytes"]
        for name, figure in shown.items():
            assert figure == pool[f"{name}_bytes"] == measured[f"quire_kv_{name}_bytes"], name


def samples(page: Page) -> int:
    """Points of the curve of live bytes."""
    path = page.locator("path.curve.live").first.get_attribute("d") or ""
    return path.count("L") + path.count("M")


def curves_grow_while_the_page_is_seen_and_rest_while_it_is_not(browser: Browser) -> None:
    with browser.page(browser.demo) as page:
        page.wait_for_function(
            """() => (document.querySelector("path.curve.live")?.getAttribute("d")
              .match(/[ML]/g) ?? []).length >= 4"""
        )
        page.evaluate(
            """() => {
              Object.defineProperty(document, "hidden", { configurable: true, get: () => true });
              document.dispatchEvent(new Event("visibilitychange"));
            }"""
        )
        page.wait_for_load_state("networkidle")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        before = samples(page)
        page.wait_for_timeout(1200)
        assert (asked, samples(page)) == ([], before)
        page.evaluate(
            """() => {
              delete document.hidden;
              document.dispatchEvent(new Event("visibilitychange"));
            }"""
        )
        page.wait_for_function(
            """before => document.querySelector("path.curve.live").getAttribute("d")
              .match(/[ML]/g).length > before""",
            arg=before,
        )


def lists_and_numbers_are_read_right(browser: Browser) -> None:
    with browser.page(browser.demo) as page:
        found: dict[str, Any] = page.evaluate(
            """async () => {
              const f = await import("/page/format.js");
              const m = await import("/page/markdown.js");
              const c = await import("/page/curves.js");
              return {
                owners: [...f.expandOwners([-1, 2, 0, 1, 5, 2], 6)],
                sharers: [...f.expandSharers([1, 2, 3, 1, 1, 2], 6)],
                bytes: [0, 1023, 1536, 10 * 2 ** 20, 123 * 2 ** 30].map(f.bytes),
                seconds: [null, 0.004, 0.5, 12.34, 125].map(f.seconds),
                rates: [null, 12.34, 123.4].map(f.rate),
                counts: [f.count(1, "block"), f.count(1200, "block")],
                hues: new Set(Array.from({ length: 64 }, (_, n) => Math.round(f.hue(n)))).size,
                blocks: m.parse("# T\\n\\na\\nb\\n\\n1. x\\n2. y\\n   z\\n```js\\n- no\\n")
                  .map((b) => [b.kind, b.lines]),
                steps: [100, 3 * 2 ** 20, 40 * 2 ** 30].map((n) => n / c.gridStep(n)),
              };
            }"""
        )
        assert found.pop("hues") > 60
        assert all(2 <= lines <= 8 for lines in found.pop("steps"))
        assert found == {
            "owners": [-1, -1, 0, 5, 5, -1],
            "sharers": [0, 3, 3, 0, 2, 0],
            "bytes": ["0 B", "1,023 B", "1.5 KiB", "10 MiB", "123 GiB"],
            "seconds": ["–", "4 ms", "0.50 s", "12.3 s", "2 min 5 s"],  # noqa: RUF001
            "rates": ["–", "12.3", "123"],  # noqa: RUF001
            "counts": ["1 block", "1,200 blocks"],
            "blocks": [
                ["heading", ["T"]],
                ["paragraph", ["a", "b"]],
                ["list", ["x", "y z"]],
                ["code", ["- no", ""]],
            ],
        }, found


def a_pool_of_many_blocks_is_drawn_while_nobody_waits(browser: Browser) -> None:
    with browser.page(browser.demo, expected=FAILED_LOAD) as page:
        expect(page.locator("#map-sum")).to_contain_text("heaps")
        page.route("**/memory", lambda route: route.abort())
        fastest_ms = page.evaluate(
            """async () => {
              const { MemoryMap } = await import("/page/memory_map.js");
              const at = (id) => document.getElementById(id);
              const map = new MemoryMap({ map: at("map"), canvas: at("map-canvas"), tip: at("tip"),
                cursor: at("map-cursor"), fact: at("map-fact") });
              const heaps = Array(1563).fill("sscoqfdr".repeat(8));
              const owners = Array.from({ length: 1563 * 8 }, (_, n) => [n % 200, 8]).flat();
              const drawn = (first) => {
                const data = { heaps, owners, sharers: [5, 900, 3, 70, 40, 2],
                  owner_ids: Array.from({ length: 200 }, (_, n) => n + first),
                  geometry: { blocks_per_heap: 64, max_heaps: 1563 } };
                const began = performance.now();
                map.update(data);
                return performance.now() - began;
              };
              // What others do on the machine can only slow it down.
              return Math.min(...[1, 2, 3, 4, 5].map(drawn));
            }"""
        )
        page.wait_for_timeout(100)
        shot(page, "many-blocks")
        assert fastest_ms < 1000, fastest_ms


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
            with browser.page(browser.demo, dark=dark, viewport=NARROW, has_touch=True) as page:
                ask(page, "What can you do?")
                answered(page)
                shot(page, f"narrow-chat-{name}")
                no_overflow(page)
                page.get_by_role("button", name="Memory").click()
                expect(page.get_by_label("Message")).to_be_hidden()
                page.wait_for_timeout(1000)
                shot(page, f"narrow-memory-{name}")
                no_overflow(page)


def no_overflow(page: Page) -> None:
    """Nothing makes the page wider than the screen."""
    wide, screen = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide <= screen, f"{wide} pixels on {screen}"


def a_server_that_is_gone_or_stuck_is_said_to_be(browser: Browser) -> None:
    with browser.page(browser.demo, expected=FAILED_LOAD) as page:
        expect(page.locator("#state")).to_have_text("Idle")
        expect(page.locator("#map-sum")).to_contain_text("heaps")
        page.route("**/memory", lambda route: route.abort())
        expect(page.locator("#state")).to_have_text("Not reachable")
        expect(page.locator("#memory-note")).to_contain_text("What is shown is from before")
        shot(page, "gone")
        page.unroute("**/memory")
        for change, state, note in (
            ({"age_s": 12.4}, "No answer", "What is shown is 12.4 s old."),
            ({"age_s": 70, "engine_alive": False}, "Engine ended", "restart the server"),
        ):
            page.route("**/memory", changed(change))
            expect(page.locator("#state")).to_have_text(state)
            expect(page.locator("#memory-note")).to_contain_text(note)
            page.unroute("**/memory")
        expect(page.locator("#state")).to_have_text("Idle")
        expect(page.locator("#memory-note")).to_be_hidden()


def changed(fields: dict[str, Any]) -> Callable[[Route], None]:
    """The server's own answer, but for these fields."""

    def answer(route: Route) -> None:
        route.fulfill(json=get(route.request.url.removesuffix("/memory"), "/memory") | fields)

    return answer
