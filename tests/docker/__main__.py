"""Proves docker/ without Docker: ``python -m tests.docker``. ``make -C tests/docker tools`` before.

Files first: promtool, Docker Compose, hadolint and Grafana's own model read them. Then a quire
under load and a Prometheus that scrapes it: every expression of every panel, rule and alert is
evaluated, and every query of a panel has to show something.
"""

import sys
import time

from tests.docker.files import check_files
from tests.docker.live import check_live


def main() -> int:
    """Both; 0 if all is well."""
    begun = time.monotonic()
    passed = failed = 0
    for check in (check_files, check_live):
        good, bad = check()
        passed += good
        failed += bad
    print(f"docker/ without Docker, in {time.monotonic() - begun:.0f} s")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
