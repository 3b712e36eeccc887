"""Several models, as a server with several lists them."""

import re
import time
from typing import Any

from playwright.sync_api import Page, Route, expect

from tests.page.checks.steps import answered, ask, get, sent_bodies
from tests.page.visit import Browser, shot

AWAY = "org/away"
LOADING_S = 3.5
NOT_LOADED = {"model": AWAY, "loaded": False, "loaded_s": None, "requests": [], "map": None}


def a_model_is_chosen_and_its_memory_shown(browser: Browser) -> None:
    # The server does not know the second model: its prompt cannot be made again.
    with browser.page(browser.demo, expected=("404 (Not Found)",)) as page:
        looked = two_models(page, browser.demo)
        bodies = sent_bodies(page)
        with page.expect_request(lambda request: request.url.endswith("?model=quire-demo")):
            page.reload()
        expect(page.locator("#model optgroup")).to_have_count(2)
        for label, option in (("Loaded", "quire-demo · 4k"), ("On this disk", f"{AWAY} · 4k")):
            expect(page.locator(f'#model [label="{label}"] option')).to_have_text(option)
        ask(page, "What can you do?")
        answered(page)
        assert bodies[-1]["model"] == "quire-demo"
        expect(page.locator("#map-sum")).to_contain_text("heaps")
        page.locator("#model").select_option(AWAY)
        expect(page.locator("#state")).to_have_text("Not loaded")
        expect(page.locator("#memory-note")).to_contain_text("org/away is not loaded:")
        ask(page, "And now?")
        expect(page.locator("#state")).to_have_text(re.compile(r"Loading [123] s"))
        expect(page.locator(".waiting").last).to_have_text(
            re.compile(f"Loading {AWAY}: [23] seconds")
        )
        shot(page, "loading")
        answered(page)
        assert bodies[-1]["model"] == AWAY
        expect(page.locator(".answer .facts").last).to_contain_text("cached")
        page.reload()
        expect(page.locator("#model")).to_have_value(AWAY)
        page.locator(".turn summary").last.click()
        expect(page.locator(".why").last).to_contain_text("The model had to be loaded first")
        page.locator(".turn summary").first.click()
        expect(page.locator(".why").first).to_contain_text("had to be computed")
        expect(page.locator(".why").first).not_to_contain_text("loaded first")
        assert {"quire-demo", "org%2Faway"} <= set(looked)


def two_models(page: Page, address: str) -> list[str]:
    """Add a second model to the server's answers. Return the models of asked memory."""
    looked: list[str] = []
    loads: list[float] = []

    def models(route: Route) -> None:
        told: dict[str, Any] = get(address, "/v1/models")
        here = told["data"][0] | {"loaded": True, "loaded_s": 7}
        away = here | {"id": AWAY, "loaded": False, "loaded_s": None}
        # The first of the list is not the one to begin with.
        route.fulfill(json=told | {"data": [away, here]})

    def memory(route: Route) -> None:
        model = route.request.url.partition("?model=")[2]
        looked.append(model)
        if model == "quire-demo":
            route.fulfill(json=get(address, "/memory"))
        else:
            loading_s = time.monotonic() - loads[0] if loads else None
            route.fulfill(json=NOT_LOADED | {"loading_s": loading_s})

    def chat(route: Route) -> None:
        body = route.request.post_data or ""
        if AWAY not in body:
            route.continue_(post_data=body)
            return
        loads.append(time.monotonic())
        # Not a sleep: the other routes are answered meanwhile.
        page.wait_for_timeout(1000 * LOADING_S)
        loads.clear()
        route.continue_(post_data=body.replace(AWAY, "quire-demo"))

    page.route("**/v1/models", models)
    page.route("**/memory?model=*", memory)
    page.route("**/v1/chat/completions", chat)
    return looked
