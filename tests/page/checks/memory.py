"""The memory beside the chat."""

import re
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page, Route, expect

from tests.page.checks.steps import FAILED_LOAD, answered, ask, get, long_answers, metrics
from tests.page.visit import Browser, shot

# The disk may write meanwhile: what it writes is live, and not cached.
QUIET_TRIES = 100
QUIET_MS = 200


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
            last = told["geometry"]["blocks_per_heap"] - 1
            expect(fact).to_contain_text(f"block {last}:")
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
        ask(page, "What can you do?")
        answered(page)
        expect(page.locator("#state")).to_have_text("Idle")
        for _ in range(QUIET_TRIES):
            shown, measured = shown_bytes(page), metrics(browser.demo)
            pool = get(browser.demo, "/memory")["map"]["pool"]
            told = {name: pool[f"{name}_bytes"] for name in shown}
            exported = {name: int(measured[f"quire_kv_{name}_bytes"]) for name in shown}
            if shown["cached"] and shown == told == exported:
                break
            page.wait_for_timeout(QUIET_MS)
        assert shown["cached"] > 0
        assert shown == told == exported
        assert sum(shown.values()) == pool["capacity_bytes"]


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
              const c = await import("/page/curves.js");
              const m = await import("/page/memory_map.js");
              return {
                owners: [...m.expandOwners([-1, 2, 0, 1, 5, 2], 6)],
                sharers: [...m.expandSharers([1, 2, 3, 1, 1, 2], 6)],
                bytes: [0, 1023, 1536, 10 * 2 ** 20, 123 * 2 ** 30].map(f.bytes),
                seconds: [null, 0.004, 0.5, 12.34, 125].map(f.seconds),
                rates: [null, 12.34, 123.4].map(f.rate),
                counts: [f.count(1, "block"), f.count(1200, "block")],
                hues: new Set(Array.from({ length: 64 }, (_, n) => Math.round(f.hue(n)))).size,
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
        }, found


PAINTED = """() => {
  const canvas = document.querySelector("#map-canvas");
  const { width, height } = canvas;
  const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  let [left, top, right, bottom] = [width, height, 0, 0];
  for (let y = 0; y < height; y += 1) {
    for (let x = 0; x < width; x += 1) {
      if (!data[(y * width + x) * 4 + 3]) continue;
      left = Math.min(left, x);
      right = Math.max(right, x);
      // The numbers are the left of it all; what stands highest of them counts.
      if (x < 28) [top, bottom] = [Math.min(top, y), Math.max(bottom, y)];
    }
  }
  return [[left, top, right, bottom], [0, 0, width, height]];
}"""
"""Return the painted part of the map, and the map's size."""


def a_pool_of_many_blocks_is_drawn_while_nobody_waits(browser: Browser) -> None:
    with browser.page(browser.demo, expected=FAILED_LOAD) as page:
        expect(page.locator("#map-sum")).to_contain_text("heaps")
        page.route("**/memory", lambda route: route.abort())
        fastest_ms = page.evaluate(
            """async () => {
              const { updateMap } = await import("/page/memory_map.js");
              const heaps = Array(1563).fill("sscoqfdr".repeat(8));
              const owners = Array.from({ length: 1563 * 8 }, (_, n) => [n % 200, 8]).flat();
              const drawn = (first) => {
                const data = { heaps, owners, sharers: [5, 900, 3, 70, 40, 2],
                  owner_ids: Array.from({ length: 200 }, (_, n) => n + first),
                  geometry: { blocks_per_heap: 64, max_heaps: 1563 } };
                const began = performance.now();
                updateMap(data);
                return performance.now() - began;
              };
              // What others do on the machine can only slow it down.
              return Math.min(...[1, 2, 3, 4, 5].map(drawn));
            }"""
        )
        page.wait_for_timeout(100)
        shot(page, "many-blocks")
        assert fastest_ms < 1000, fastest_ms
        painted: list[list[int]] = page.evaluate(PAINTED)
        (left, top, right, _), (_, _, wide, _) = painted
        assert 0 < top < 12, "the first heap's number is cut"
        assert left < 30
        assert right > wide - 12, f"{wide - right} of {wide} pixels are left empty"


def states_are_shown_by_their_conversations(browser: Browser) -> None:
    with browser.page(browser.demo) as page:
        expect(page.locator("#state")).to_have_text("Idle")
        expect(page.locator("#slots-part")).to_be_hidden()
        told = get(browser.demo, "/memory")
        cached = {"waypoint": 1, "end": 1, "user": 0, "system": 1}
        counts = {"slots": 7, "free": 2, "held": 1, "cached": cached, "waiting": 1}
        told["map"]["pool"]["slots"] = {**counts, "evicted": 0, "slot_bytes": 48 << 20}
        told["map"]["slots"] = [
            {"conversation": number, "position": position, "keep": keep, "holders": holders}
            for number, position, keep, holders in (
                (3, 4096, "waypoint", 0),
                (3, 64, "system", 0),
                (3, 5000, "end", 0),
                (12, 2500, "user", 2),
            )
        ]
        page.route("**/memory", lambda route: route.fulfill(json=told))
        expect(page.locator("#slots-sum")).to_have_text(
            "7 slots · 1 held · 3 cached · 1 waiting · 2 free · 48 MiB each"
        )
        rows = page.locator("#slots li .facts")
        expect(rows).to_have_text(
            ["2,500 question", "64 system prompt · 4,096 on the way · 5,000 end of a turn"]
        )
        expect(page.locator("#slots .tick.held")).to_have_count(1)
        page.locator("#slots-part").scroll_into_view_if_needed()
        shot(page, "states")


def a_window_is_seen_to_move_on(browser: Browser) -> None:
    with browser.page(browser.demo) as page:
        expect(page.locator("#state")).to_have_text("Idle")
        expect(page.locator("#windows")).to_be_hidden()
        told = get(browser.demo, "/memory")
        size = told["map"]["geometry"]["tokens_per_block"]
        names = ("first_block", "mapped_blocks", "sealed_blocks", "borrowed_blocks")
        full, window = (
            dict(zip(names, numbers, strict=True)) for numbers in ((0, 41, 40, 4), (32, 9, 8, 0))
        )
        counts = {"computed_tokens": 40 * size + 1, "most_tokens": 64 * size, "preemptions": 0}
        sequence = {"id": 3, "status": "running", **counts, **full, "other_groups": [window]}
        waiting = {"id": 4, "status": "waiting", "tokens": 7, **counts, "other_groups": [window]}
        geometry = told["map"]["geometry"] | {"window": 8 * size}
        told["map"] |= {
            "sequences": [sequence, waiting | dict.fromkeys(names, 0)],
            "running": 1,
            "waiting": 1,
            "other_groups": [{"geometry": geometry, "heaps": ["s"]}],
        }
        page.route("**/memory", lambda route: route.fulfill(json=told))
        facts = [
            re.compile(f"^{40 * size + 1:,} computed · {41 * size:,} mapped · limit .* shared$"),
            f"{32 * size:,} let go · {9 * size:,} mapped · window {8 * size:,}",
            "waits with 7 tokens",
        ]
        expect(page.locator("#sequences .facts")).to_have_text(facts)
        bars = [page.locator("#sequences .mapped").nth(number).bounding_box() for number in (0, 1)]
        whole, moved = (box for box in bars if box is not None)
        assert abs(moved["x"] - whole["x"] - whole["width"] * 32 / 41) < 2, bars
        assert abs(moved["x"] + moved["width"] - whole["x"] - whole["width"]) < 2, bars
        page.locator("#windows summary").click()
        expect(page.locator("#windows-exact")).to_contain_text(f"window of {8 * size:,} tokens")
        page.locator("#windows").scroll_into_view_if_needed()
        shot(page, "windows")


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
