"""Take the README's picture of the page: ``python -m tests.page.picture``. The demo model answers,
and two other requests run."""

import sys
from pathlib import Path

from tests.page.environment import ROOT, install

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
    """0 when there is a picture. Raises what the browser does."""
    program = install()
    from tests.page.checks.steps import answered, ask
    from tests.page.load import long_answers
    from tests.page.visit import Browser

    with Browser(program) as browser, browser.page(browser.slow, viewport=SIZE) as page:
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
    size = Path(PICTURE).stat().st_size
    assert size <= MAX_BYTES, f"the picture has {size} bytes; at most {MAX_BYTES} are wanted"
    print(f"{PICTURE.relative_to(ROOT)}: {size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
