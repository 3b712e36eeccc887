"""quire's Metal operations in MLX's graph, over a fake Metal: `make -C tests/metal graph`.

The extension is built for Linux as it is for a Mac; standins.cmake says what stands in for what.
Files are called check_*.py, so that plain pytest, which has no such build, passes them by.
"""

from pathlib import Path

# Where `_standin` is built.
__path__.append(str(Path(__file__).parents[3] / "build/metal/graph/standin"))
