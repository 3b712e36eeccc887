"""Read the settings in force, or say what is wrong with them."""

from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError
from pydantic_settings import SettingsError

from server.cli.setting_names import unknown_setting, unknown_variable
from server.config import Config, SettingError, Tables, load, read_file


def read_settings(file: Path | None, flags: Tables) -> Config:
    """Read the settings in force. Raises SettingError that names the field, and the file if it is
    at fault."""
    try:
        from_file = {} if file is None else read_file(file)
    except ValidationError as error:
        raise SettingError(f"{file}: {_first_problem(error)}") from error
    except OSError as error:
        raise SettingError(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise SettingError(f"{file}: {error}") from error
    if (unknown := unknown_variable()) is not None:
        raise SettingError(f"environment: {unknown}")
    try:
        return load(from_file, flags)
    except ValidationError as error:
        raise SettingError(f"setting {_first_problem(error)}") from error
    except SettingsError as error:
        raise SettingError(f"environment: {error}") from error


def with_further(flags: Tables, settings: Iterable[str]) -> Tables:
    """Merge flags with settings that are written SECTION.NAME=VALUE. Raises SettingError for one
    that is not."""
    tables = {section: dict(fields) for section, fields in flags.items()}
    for setting in settings:
        name, equals, value = setting.partition("=")
        section, dot, field = name.partition(".")
        if not (equals and dot):
            # A value may be a secret: it is not repeated.
            raise SettingError(f"--set {name}: it is written SECTION.NAME=VALUE")
        tables.setdefault(section, {})[field] = value
    return tables


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in problem["loc"])
    what = unknown_setting(name) if problem["type"] == "extra_forbidden" else problem["msg"]
    return f"{name}: {what}"
