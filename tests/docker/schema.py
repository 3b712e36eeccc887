"""Checks that Grafana knows every field of a board: run by the tools' own Python on a file.

Grafana's own package reads the board into its typed model and writes it again. Fields that the
model does not know are lost on the way. Prints the paths of such fields; ends with 1 if there are
any.
"""

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard


def lost(before: object, after: object, path: str = "") -> list[str]:
    """Return the paths of the first that the second lacks, or has otherwise."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            found
            for name, value in before.items()
            for found in (
                lost(value, after[name], f"{path}.{name}") if name in after else [f"{path}.{name}"]
            )
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [
            found
            for number, pair in enumerate(zip(before, after, strict=True))
            for found in lost(*pair, f"{path}[{number}]")
        ]
    return [] if before == after else [path]


def main() -> int:
    register_default_plugins()
    before = json.loads(Path(sys.argv[1]).read_text())
    after = json.loads(JSONEncoder().encode(Dashboard.from_json(before)))
    found = [path for path in lost(before, after) if not unwritten(path)]
    for path in found:
        print(path)
    return 1 if found else 0


def unwritten(path: str) -> bool:
    """The threshold that all begins with has the value null, which the package leaves out; what an
    annotation is called is the data source's field, which the common model has not."""
    return path.endswith((".thresholds.steps[0].value", ".annotations.list[0].titleFormat"))


if __name__ == "__main__":
    sys.exit(main())
