"""Lists threats, faults and defects with the tests that hold them: ``python -m tests.abuse``.

``--against CHECKOUT`` runs the tests of the defects here and on the product of another checkout,
which has been built there: here they must pass, and there they must fail.
"""

import argparse
import signal
import sys
from pathlib import Path

from tests.abuse import defects
from tests.abuse.against import compare
from tests.abuse.defects import DEFECTS
from tests.abuse.tables import FAULTS, THREATS, described, missing, unknown


def main() -> int:
    """1 where a row has no test, or a test does not end as it should."""
    parser = argparse.ArgumentParser(description="Threats, faults, defects and their tests.")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    parser.add_argument("--only", default="", help="defects whose names begin so")
    asked = parser.parse_args()
    if asked.against:
        # What was started is ended.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        tests = {name: one.tests for name, one in DEFECTS.items() if name.startswith(asked.only)}
        return compare(tests, asked.against)
    for line in (*described(), *defects.described()):
        print(line)
    bare = len(missing()) + len(defects.untested())
    print(f"{len(THREATS)} threats, {len(FAULTS)} faults, {len(DEFECTS)} defects; untested: {bare}")
    return 1 if bare or unknown() else 0


if __name__ == "__main__":
    sys.exit(main())
