"""Runs the checks: ``python -m tests.metal.darwin [--against CHECKOUT] [pytest's arguments]``."""

import argparse
import sys
from pathlib import Path

import pytest

from tests.metal.darwin.against import compare
from tests.metal.darwin.product import RUNG, Product


def main() -> int:
    """Its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.metal.darwin")
    parser.add_argument("--against", type=Path, help="another checkout, with its .venv")
    arguments, rest = parser.parse_known_args()
    if arguments.against is not None:
        return compare(arguments.against)
    Product.chosen().stage()
    options = ["-o", "python_files=check_*.py", "-p", "no:cacheprovider"]
    return pytest.main([*options, str(RUNG), *rest])


if __name__ == "__main__":
    sys.exit(main())
