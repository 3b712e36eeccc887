"""``python -m tests.metal.prediction [--check]`` writes METAL.md's prediction, or checks it."""

import sys

from tests.metal.prediction.sheet import SECTION, sheet

sys.exit(SECTION.main(sheet(), sys.argv[1:]))
