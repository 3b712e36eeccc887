"""What ``quire doctor`` does: examines, and hands back the text and whether something can serve.

Nothing here imports the native extension or MLX: they may be what is wrong.
"""

import json
from collections.abc import Callable
from pathlib import Path

from engine.doctor.examine import Wishes, examine
from server.cli.doctor.text import report_lines
from server.cli.settings import read_settings
from server.config import Tables, engine_config


def examine_machine(
    file: Path | None,
    flags: Tables,
    progress: Callable[[str], None],
    *,
    as_json: bool = False,
    **tests: bool,
) -> tuple[str, bool]:
    """Return the report, and whether something can serve with these settings. progress: called with
    each thing that is being done. tests: see Wishes. Raises SettingError."""
    config = engine_config(read_settings(file, flags))
    report = examine(Wishes(config, **tests), progress)
    if as_json:
        return json.dumps(report.as_json(), indent=2), report.serves
    return "\n".join(report_lines(report)), report.serves
