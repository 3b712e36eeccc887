"""Lists the threats and the faults with the tests that hold them: ``make threats``."""

import sys

from tests.abuse.tables import FAULTS, THREATS, described, missing, unknown


def main() -> int:
    """1 where a row has no test."""
    for line in described():
        print(line)
    print(f"{len(THREATS)} threats, {len(FAULTS)} faults; without a test: {len(missing())}")
    return 1 if missing() or unknown() else 0


if __name__ == "__main__":
    sys.exit(main())
