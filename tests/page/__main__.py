"""The page in a real browser: ``python -m tests.page [WORD ...]``; only checks with all words in
their name. Screenshots go to ``build/page``."""

import sys
import time
import traceback

from tests.page.environment import BUILT, install


def main() -> int:
    """0 when all checks pass."""
    program = install()
    from tests.page.checks import all_checks
    from tests.page.visit import Browser

    began = time.monotonic()
    failed = 0
    with Browser(program) as browser:
        for check in all_checks():
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


if __name__ == "__main__":
    sys.exit(main())
