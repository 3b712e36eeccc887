"""A browser that watches its pages: errors on the console, and requests to other hosts."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect, sync_playwright

from tests.clients.servers import QUIRE, serving
from tests.page.environment import AXE, BUILT

WIDE = {"width": 1440, "height": 960}
NARROW = {"width": 390, "height": 844}
TIMEOUT_MS = 60_000
DEMO = ("configs/demo/model", "--port", "0", "--served-model-name", "quire-demo")
# The command with steps that take so long that no answer to 3000 tokens ends while it is looked at.
SLOW = """
import time
import metal_ext
import engine.step.runner
from server.cli.commands import main

sample = engine.step.runner.sample

def slow(*arguments):
    time.sleep(0.05)
    return sample(*arguments)

engine.step.runner.sample = slow
main()
"""
SMALL = ("--kv-budget", "32MiB", "--heap-size", "2MiB", "--max-num-seqs", "3")
KEY = "sk-0123456789abcdef"
FULL_AT_ONCE = ("--set", "limits.max_queued_requests=0")


class Browser:
    """Chromium, and the four servers that pages come from."""

    def __init__(self, program: Path) -> None:
        self._program = program
        self._stack = ExitStack()

    def __enter__(self) -> "Browser":
        self.demo = self._serving(QUIRE, "serve", *DEMO, *SMALL)
        slow = (sys.executable, "-c", SLOW, "serve", *DEMO, *SMALL, *FULL_AT_ONCE)
        self.slow = self._serving(*slow)
        locked = ("--set", f"access.api_keys={KEY}")
        self.locked = self._serving(QUIRE, "serve", *DEMO, *SMALL, *locked)
        parrot = (sys.executable, "-m", "tests.clients.parrot")
        self.parrot = self._serving(*parrot)
        playwright = self._stack.enter_context(sync_playwright())
        expect.set_options(timeout=TIMEOUT_MS)
        # In a container the sandbox of the browser's own cannot be made.
        self._browser = playwright.chromium.launch(
            executable_path=str(self._program), args=["--no-sandbox"]
        )
        self._stack.callback(self._browser.close)
        return self

    def _serving(self, *command: str) -> str:
        return self._stack.enter_context(serving(*command)).url

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def page(
        self, address: str, *, expected: tuple[str, ...] = (), dark: bool = False, **options: Any
    ) -> Iterator[Page]:
        """Open a page of that server. expected: parts of the lines that the console may have. Any
        other line, and a request to any other host, is an AssertionError in the end."""
        context = self._browser.new_context(
            **({"viewport": WIDE, "color_scheme": "dark" if dark else "light"} | options)
        )
        # A script of the page itself could not be added: its policy forbids that.
        context.add_init_script(path=AXE)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        said: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("request", lambda request: asked.append(request.url))
        try:
            page.goto(address)
            expect(page.locator("#conversations-note")).not_to_be_empty()
            yield page
            strangers = {url for url in asked if not url.startswith((address, "data:"))}
            assert not strangers, f"the page asked {strangers}"
            wrong = [line for line in said if not any(part in line for part in expected)]
            assert not wrong, f"on the console: {wrong}"
        except Exception:
            page.screenshot(path=str(BUILT / "failed.png"))
            raise
        finally:
            context.close()


def shot(page: Page, name: str) -> None:
    """A picture to look at."""
    page.screenshot(path=str(BUILT / f"{name}.png"))
