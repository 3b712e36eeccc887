"""What ``quire doctor`` does: examines, and hands back the text and whether something can serve.

Nothing here imports the native extension or MLX: they may be what is wrong.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.doctor.answers import answers
from engine.doctor.examine import Wishes, examine
from server.cli.doctor.text import report_lines
from server.cli.settings import read_settings
from server.config import Tables, engine_config


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """What the user asked for."""

    as_json: bool
    release_test: bool
    stress: bool = False
    forget_faults: bool = False


def examine_machine(
    file: Path | None, flags: Tables, options: DoctorOptions, progress: Callable[[str], None]
) -> tuple[str, bool]:
    """Return the report, and whether something can serve with these settings. progress: called with
    each thing that is being done. Raises SettingError."""
    config = engine_config(read_settings(file, flags))
    report = examine(
        Wishes(
            config.substrate,
            config.page_bytes,
            config.headroom_bytes,
            options.release_test,
            options.stress,
            config.map_while_running,
            options.forget_faults,
        ),
        progress,
    )
    if options.as_json:
        return json.dumps(report.as_json() | {"mac": answers(report)}, indent=2), report.serves
    return "\n".join(report_lines(report)), report.serves
