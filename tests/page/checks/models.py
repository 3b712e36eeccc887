"""Several models, as a server with several lists them."""

import re
import time
from typing import Any

from playwright.sync_api import Page, Route, expect

from tests.page.checks.steps import FAILED_LOAD, answered, ask, get, sent_bodies
from tests.page.visit import Browser, shot

AWAY = "org/away"
LOADING_S = 3.5
NOT_LOADED = {"error": {"message": "org/away is not loaded.", "code": "unavailable"}}


def a_model_is_chosen_and_its_memory_shown(browser: Browser) -> None:
    with browser.page(browser.demo, expected=FAILED_LOAD) as page:
        looked = two_models(page, browser.demo)
        bodies = sent_bodies(page)
        with page.expect_request(lambda request: request.url.endswith("?model=quire-demo")):
            page.reload()
        expect(page.locator("#model option")).to_have_count(2)
        ask(page, "What can you do?")
        answered(page)
        assert bodies[-1]["model"] == "quire-demo"
        expect(page.locator("#map-sum")).to_contain_text("heaps")
        page.locator("#model").select_option(AWAY)
        expect(page.locator("#state")).to_have_text("Not loaded")
        expect(page.locator("#memory-note")).to_contain_text("org/away is not loaded.")
        ask(page, "And now?")
        expect(page.locator(".waiting").last).to_have_text(
            re.compile(f"Loading {AWAY}: [23] seconds")
        )
        shot(page, "loading")
        answered(page)
        assert bodies[-1]["model"] == AWAY
        expect(page.locator(".answer .facts").last).to_contain_text("first token after")
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

    def models(route: Route) -> None:
        told: dict[str, Any] = get(address, "/v1/models")
        away = told["data"][0] | {"id": AWAY, "loaded": False}
        route.fulfill(json=told | {"data": [told["data"][0], away]})

    def memory(route: Route) -> None:
        model = route.request.url.partition("?model=")[2]
        looked.append(model)
        if model == "quire-demo":
            route.fulfill(json=get(address, "/memory"))
        else:
            route.fulfill(status=503, json=NOT_LOADED)

    def chat(route: Route) -> None:
        body = route.request.post_data or ""
        if AWAY in body:
            time.sleep(LOADING_S)
            body = body.replace(AWAY, "quire-demo")
        route.continue_(post_data=body)

    page.route("**/v1/models", models)
    page.route("**/memory?model=*", memory)
    page.route("**/v1/chat/completions", chat)
    return looked
