"""The page in a real browser: ``python -m tests.page [WORD ...]`` runs the checks with all words in
their name, and writes screenshots to ``build/page``. ``python -m tests.page --picture`` takes the
README's picture of the page."""

import sys
import time
import traceback
from collections.abc import Callable
from inspect import isfunction, signature
from types import ModuleType
from typing import TYPE_CHECKING

from tests.page.environment import BUILT, ROOT, install

if TYPE_CHECKING:
    from tests.page.visit import Browser

PICTURE = ROOT / "docker" / "page.png"
SIZE = {"width": 1440, "height": 900}
MAX_BYTES = 300_000
QUESTIONS = (
    "What is a sparse buffer?",
    "Tell me a story about a fox.",
    "What can you do?",
    "What is a prefix hit?",
)


def main() -> int:
    """Return 0 when all checks pass, or when there is a picture."""
    program = install()
    # Playwright is there only now.
    from tests.page.checks import (
        chat,
        conversations,
        everyday,
        look,
        memory,
        models,
        replicas,
        text,
        turns,
    )
    from tests.page.visit import Browser

    with Browser(program) as browser:
        if sys.argv[1:] == ["--picture"]:
            take_picture(browser)
            return 0
        modules = (chat, everyday, text, conversations, models, turns, memory, replicas, look)
        return run([check for module in modules for check in checks_of(module)], browser)


def checks_of(module: ModuleType) -> list[Callable[["Browser"], None]]:
    """Return the module's functions that take a browser and nothing else."""
    functions = (value for value in vars(module).values() if isfunction(value))
    return [
        function for function in functions if list(signature(function).parameters) == ["browser"]
    ]


def run(checks: list[Callable[["Browser"], None]], browser: "Browser") -> int:
    began = time.monotonic()
    failed = 0
    for check in checks:
        name = check.__name__.replace("_", " ")
        if not all(word in name for word in sys.argv[1:]):
            continue
        try:
            check(browser)
        except Exception:
            failed += 1
            print(f"FAILED  {name}")
            traceback.print_exc(file=sys.stdout)
        else:
            print(f"ok      {name}")
    print(f"{failed} failed; {time.monotonic() - began:.0f} s; screenshots in {BUILT}")
    return 1 if failed else 0


def take_picture(browser: "Browser") -> None:
    """The demo model answers, and two other requests run."""
    from tests.page.checks.steps import answered, ask, long_answers

    with browser.page(browser.slow, viewport=SIZE) as page:
        for question in QUESTIONS[:2]:
            ask(page, question)
            answered(page)
        page.get_by_role("button", name="New chat").click()
        with long_answers(browser.slow, "Red", "Blue"):
            for question in QUESTIONS[2:]:
                ask(page, question)
                answered(page)
            page.locator(".turn summary").last.click()
            page.locator(".leaves").wait_for()
            page.wait_for_timeout(4000)
            page.screenshot(path=str(PICTURE))
    size = PICTURE.stat().st_size
    assert size <= MAX_BYTES, f"the picture has {size} bytes; at most {MAX_BYTES} are wanted"
    print(f"{PICTURE.relative_to(ROOT)}: {size} bytes")


if __name__ == "__main__":
    sys.exit(main())
