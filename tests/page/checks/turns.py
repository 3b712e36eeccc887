"""Why a turn was slow."""

from typing import Any

from playwright.sync_api import expect

from tests.page.checks.steps import accessible, answered, ask, settings
from tests.page.visit import Browser, shot

LONG = "A page that two prompts begin with is mapped twice and kept once. " * 6


def a_turn_says_why_it_was_slow_and_where_it_left_the_cache(browser: Browser) -> None:
    with browser.page(browser.parrot) as page:
        expect(page.locator("#turns-empty")).to_be_visible()
        settings(page, system_prompt="You answer in one word. Number 4711.")
        ask(page, f"Repeat after me: {LONG}")
        answered(page)
        ask(page, "And the second question?")
        answered(page)
        rows = page.locator(".turn")
        expect(rows).to_have_count(2)
        first = rows.first
        expect(first.locator(".turn-facts")).to_contain_text("0 cached · ")
        first.locator("summary").click()
        expect(first).to_contain_text("none of it was cached")
        expect(first.locator(".leaves")).to_contain_text("You answer in one word.")
        second = rows.last
        expect(second.locator(".turn-facts")).not_to_contain_text("0 cached · ")
        second.locator("summary").click()
        expect(second).to_contain_text("so only the new part was computed")
        expect(second.locator(".leaves mark")).to_contain_text("And the second question?")
        expect(second.locator(".leaves .kept")).to_contain_text("is mapped twice")
        accessible(page)
        shot(page, "why")
        settings(page, system_prompt="You answer in two words. Number 4712.")
        ask(page, "And the third?")
        answered(page)
        rows.last.locator("summary").click()
        expect(rows.last).to_contain_text("The prompt does not begin like that of the turn before")
        expect(rows.last.locator(".leaves mark")).to_contain_text("two words")
        # The turns before are shown as they were, whatever the settings are now.
        expect(rows.first.locator(".leaves")).to_contain_text("You answer in one word.")
        page.reload()
        expect(rows).to_have_count(3)
        rows.first.locator("summary").click()
        expect(rows.first.locator(".leaves")).to_contain_text("You answer in one word.")


def reasons_are_told_apart(browser: Browser) -> None:
    with browser.page(browser.demo) as page:
        found: dict[str, list[str]] = page.evaluate(
            """async () => {
              const { explainFacts } = await import("/page/turns.js");
              const facts = { prompt: 1000, cached: 960, tokens: 50, first_s: 0.5, block: 16,
                beside: 0, waited: false, miss: null };
              const missed = (reason, left_at) => ({
                ...facts, miss: { reason, left_at, message: "so it is" },
              });
              const crowded = { ...facts, beside: 3, waited: true };
              const before = { prompt: 900, tokens: 60 };
              return {
                evicted: explainFacts({ ...missed("evicted", 900), cached: 900 }, before, false),
                elsewhere: explainFacts(missed("never_cached", 960), null, false),
                changed: explainFacts(missed("never_cached", 200), before, true),
                thoughts: explainFacts(missed("never_cached", 900), before, true),
                none: explainFacts(facts, before, false),
                company: explainFacts({ ...crowded, block: 64 }, before, false),
              };
            }"""
        )
        parts: dict[str, Any] = {
            "evicted": "The prompt is cached up to token 900: so it is.",
            "elsewhere": "Another conversation had put its beginning into the cache",
            "changed": "which had 900 tokens: it differs from token 200 on",
            "thoughts": "The prompt no longer has that answer's thoughts",
            "none": "No more of it could come from the cache.",
            "company": "Less cannot be computed.",
        }
        for name, part in parts.items():
            assert part in found[name][1], (name, found[name])
        assert found["none"][0].startswith("40 tokens of the prompt had to be computed, 960 tokens")
        assert found["none"][2] == "The first token took 0.50 s."
        speed = "The first token took 0.50 s: about 200 prompt tokens a second."
        assert found["evicted"][2] == speed
        assert found["company"][3:] == [
            "It waited in the queue behind others.",
            "Up to 3 others ran beside it and shared the machine.",
        ]
