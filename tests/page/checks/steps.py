"""Steps that many checks take: on the page, and in requests beside it."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from playwright.sync_api import Locator, Page, Request, Route, expect

TIMEOUT_S = 30.0
PROMPT = "A page that two prompts begin with is mapped twice and kept once. " * 14
FAILED_LOAD = ("Failed to load resource",)
RUN_AXE = """async () => (await axe.run()).violations.map((found) =>
  `${found.id}: ${found.nodes.map((node) => node.html).join(" ")}`)"""


def box(page: Page) -> Locator:
    """Where messages are written."""
    return page.get_by_role("textbox", name="Message", exact=True)


def ask(page: Page, question: str) -> None:
    box(page).fill(question)
    box(page).press("Enter")


def answered(page: Page) -> None:
    """Until the newest answer is complete."""
    expect(page.locator(".answer").last).to_have_attribute("aria-busy", "false")


def endless(route: Route) -> None:
    """The same request, but its answer may not end by itself."""
    body = json.loads(route.request.post_data or "{}") | {"min_tokens": 3000, "max_tokens": 3000}
    route.continue_(post_data=json.dumps(body))


def settings(page: Page, **values: str) -> None:
    """Fill in fields of the settings, by their labels."""
    page.get_by_role("button", name="Settings").click()
    for label, value in values.items():
        page.get_by_label(label.replace("_", " ").capitalize(), exact=True).fill(value)
    page.get_by_role("button", name="Done").click()


def sent_bodies(page: Page) -> list[dict[str, Any]]:
    """Return a list that collects the bodies of all further questions."""
    bodies: list[dict[str, Any]] = []

    def note(request: Request) -> None:
        if request.url.endswith("/chat/completions"):
            bodies.append(json.loads(request.post_data or ""))

    page.on("request", note)
    return bodies


def no_overflow(page: Page) -> None:
    """Nothing makes the page wider than the screen."""
    wide, screen = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide <= screen, f"{wide} pixels on {screen}"


def accessible(page: Page) -> None:
    """axe finds nothing."""
    violations: list[str] = page.evaluate(RUN_AXE)
    assert not violations, "\n".join(violations)


def get(address: str, path: str) -> Any:
    return json.loads(read_text(address, path))


def read_text(address: str, path: str) -> str:
    with urllib.request.urlopen(address + path, timeout=TIMEOUT_S) as response:
        body: bytes = response.read()
    return body.decode()


def metrics(address: str) -> dict[str, float]:
    """Return the metrics without labels."""
    lines = read_text(address, "/metrics").splitlines()
    plain = [line.split() for line in lines if line[:1] != "#" and "{" not in line]
    return {name: float(value) for name, value in plain}


@contextmanager
def long_answers(address: str, *ends: str, tokens: int = 3000) -> Iterator[None]:
    """Begin an answer for each end of a prompt; all prompts begin alike. The answers end with the
    block."""
    with ExitStack() as stack:
        for end in ends:
            body = {
                "prompt": PROMPT + end,
                "stream": True,
                "max_tokens": tokens,
                "min_tokens": tokens,
            }
            request = urllib.request.Request(
                f"{address}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            response = stack.enter_context(urllib.request.urlopen(request, timeout=TIMEOUT_S))
            while not response.readline().startswith(b"data: "):
                pass
        yield
