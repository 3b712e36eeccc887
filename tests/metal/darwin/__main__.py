"""Runs the checks: ``python -m tests.metal.darwin [pytest's arguments]``."""

import sys

import pytest

from tests.metal.darwin.product import RUNG, stage

if __name__ == "__main__":
    stage()
    options = ["-o", "python_files=check_*.py", "-p", "no:cacheprovider"]
    sys.exit(pytest.main([*options, str(RUNG), *sys.argv[1:]]))
