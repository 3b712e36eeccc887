"""Writes the boards that Grafana is provisioned with: ``python docker/grafana/dashboards.py``.

``--check`` writes nothing, and ends with 1 where a file is not what would be written.
"""

import json
import sys
from pathlib import Path

import memory
import service

FOLDER = Path(__file__).parent / "dashboards"
BOARDS = {"service.json": service.BOARD, "memory.json": memory.BOARD}


def texts() -> dict[str, str]:
    """Return the text of each file by its name."""
    return {name: json.dumps(board.json(), indent=2) + "\n" for name, board in BOARDS.items()}


def main() -> int:
    stale = [name for name, text in texts().items() if _written(name) != text]
    if "--check" in sys.argv[1:]:
        print(f"not what the code makes: {stale}" if stale else "boards are what the code makes")
        return 1 if stale else 0
    for name, text in texts().items():
        (FOLDER / name).write_text(text)
    return 0


def _written(name: str) -> str:
    path = FOLDER / name
    return path.read_text() if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
