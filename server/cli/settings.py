"""Reads the settings of a command. Errors name a bad setting and suggest the nearest known name."""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import SettingsError

from kvcache.user_folders import config_folder
from server.catalogue.names import nearest
from server.config import ENV_PREFIX, MIB, Config, SettingError, Tables, load, read_file
from server.shipped import SETTINGS_FILE

FIELDS = {section: tuple(type(values).model_fields) for section, values in Config()}
LIST = "`quire settings` prints all of them"
DISK_FOLDER_TEXT = "Folder of the prefixes on disk."
KV_BACKEND_TEXT = "Kind of memory: auto, sparse, paged, dense or posix."
# Flag of ``quire serve`` -> setting, type and help text. --set changes every other setting.
FLAGS: dict[str, tuple[str, type, str]] = {
    "host": ("server.host", str, "Address to listen on."),
    "port": ("server.port", int, "Port to listen on; 0 takes a free one."),
    "served_model_name": ("server.served_model_name", str, "The model's name for clients."),
    "kv_backend": ("cache.kv_backend", str, KV_BACKEND_TEXT),
    "release_heaps": ("cache.release_heaps", bool, "Give the GPU's heaps back: see quire doctor."),
    "kv_budget": ("cache.kv_budget", str, "All memory of K and V, such as 4GiB."),
    "headroom": ("cache.headroom", str, "Memory for other programs, such as 6GiB."),
    "page_size": ("cache.page_size", str, "Unit of mapping in a layer, such as 64KiB."),
    "heap_size": ("cache.heap_size", str, "Unit of memory taken from the system."),
    "free_slack": ("cache.free_slack", str, "Free memory that is kept for new sequences."),
    "disk": ("cache.disk", str, "Most bytes of prefixes on disk, such as 16GiB; 0 keeps none."),
    "disk_folder": ("cache.disk_folder", str, DISK_FOLDER_TEXT),
    "kv_dtype": ("cache.dtype", str, "Type of K and V: auto, bfloat16, float16 or float32."),
    "max_model_len": ("engine.max_model_len", int, "Tokens of the longest sequence."),
    "max_num_seqs": ("engine.max_num_seqs", int, "Sequences that run at the same time."),
    "max_num_batched_tokens": ("engine.max_num_batched_tokens", int, "Tokens of the largest step."),
    "step_time_target_ms": (
        "engine.step_time_target_ms",
        float,
        "Longest pause (ms) that a prompt causes in answers.",
    ),
    "draft": ("engine.draft_model", str, "Folder or name of the head that drafts (MTP)."),
    "threads": ("engine.threads", int, "CPU threads."),
    "activations": (
        "engine.activations",
        str,
        "Rounding in a CPU's products: auto, float32 (none), bfloat16 or int8.",
    ),
    "log_level": ("log.level", str, "debug, info, warning or error."),
    "insecure_no_auth": ("access.insecure_no_auth", bool, "Let other machines in without a key."),
}
# Type of pydantic's error -> the rule that a value breaks. The error's ``ctx`` fills the braces.
RULES = {
    "greater_than": "more than {gt:.12g}",
    "greater_than_equal": "at least {ge:.12g}",
    "less_than_equal": "at most {le:.12g}",
    "literal_error": "one of {expected}",
}
# First word of an error's type -> the kind of value that is expected.
KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "string": "a text",
    "path": "a path",
    "tuple": "a list",
    "dict": "a table",
    "model": "a table",
}


def own_settings_file() -> Path:
    """Return the user's settings file, existing or not. Raises SettingError without a home."""
    try:
        return config_folder() / SETTINGS_FILE
    except RuntimeError as error:
        text = "there is no home folder for settings: set XDG_CONFIG_HOME, or --config"
        raise SettingError(text) from error


def read_settings(file: Path | None, flags: Tables) -> Config:
    """Read the settings of a command. file: None means the user's own file, if that exists. Raises
    SettingError, which names the bad setting, and its file or the environment."""
    from_file: Tables = {}
    path = file
    with suppress(SettingError):
        path = file or own_settings_file()
    try:
        if path is not None and (file is not None or path.exists()):
            from_file = read_file(path)
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(f"{path}: {_reason(error)}") from error
    if (unknown := unknown_variable()) is not None:
        raise SettingError(f"environment: {unknown}")
    try:
        return load(from_file, flags)
    except ValidationError as error:
        raise SettingError(f"setting {_reason(error)}") from error
    except (SettingsError, RecursionError) as error:
        raise SettingError(f"environment: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in problem["loc"])
        kind = problem["type"]
        if kind == "extra_forbidden":
            return f"{name}: {unknown_setting(name)}"
        rule = RULES.get(kind) or KINDS.get(kind.partition("_")[0])
        if rule is None:
            return f"{name}: {problem['msg']}"
        return f"{name}: it must be {rule.format_map(problem.get('ctx', {}))}"
    if isinstance(error, RecursionError):
        return "a value nests too deep"
    return str(error.strerror if isinstance(error, OSError) else error)


def flags_of(parameters: Mapping[str, Any]) -> Tables:
    """Return those of a command's parameters that are FLAGS, as ``{section: {name: value}}``."""
    tables: Tables = {}
    for flag, (setting, _, _) in FLAGS.items():
        section, _, name = setting.partition(".")
        tables.setdefault(section, {})[name] = parameters.get(flag)
    return tables


def with_further(flags: Tables, settings: Iterable[str]) -> Tables:
    """Merge flags with texts ``SECTION.NAME=VALUE``. Raises SettingError for any other text."""
    tables = {section: dict(fields) for section, fields in flags.items()}
    for setting in settings:
        name, equals, value = setting.partition("=")
        section, dot, field = name.partition(".")
        if not (equals and dot):
            # Leave out the value, which may be a secret.
            raise SettingError(f"--set {name}: it is written SECTION.NAME=VALUE")
        tables.setdefault(section, {})[field] = value
    return tables


def default_of(setting: str) -> str:
    """Return a setting's default as the help writes it. setting: ``section.field``."""
    section, _, field = setting.partition(".")
    default = getattr(getattr(Config(), section), field)
    if default is None:
        return "chosen at start"
    if isinstance(default, bool):
        return "on" if default else "off"
    whole, rest = divmod(default, MIB) if isinstance(default, int) else (0, 0)
    return f"{whole}MiB" if whole and not rest else str(default) or "chosen at start"


def unknown_setting(name: str) -> str:
    """Return an error text with the nearest known setting. name: ``section.field``, or any text."""
    near = nearest(name, (*FIELDS, *_dotted()), ".")
    hint = f"did you mean {near}? " if near else ""
    return f"there is no such setting; {hint}{LIST}"


def unknown_variable() -> str | None:
    """Return an error text if an environment variable has quire's prefix but is no setting, else
    None. The text leaves out the variable's value, which may be a secret."""
    variables = {_variable(name): name for name in _dotted()}
    known = {*variables, *(_variable(section) for section in FIELDS)}
    for written in sorted(os.environ):
        name = written.upper()
        if name.startswith(ENV_PREFIX) and name not in known:
            near = nearest(name.removeprefix(ENV_PREFIX), _dotted(), ".")
            hint = f"did you mean {_variable(near)}? " if near else ""
            return f"{written} is no setting; {hint}{LIST}"
    return None


def _dotted() -> list[str]:
    return [f"{section}.{field}" for section, fields in FIELDS.items() for field in fields]


def _variable(name: str) -> str:
    return f"{ENV_PREFIX}{name.replace('.', '__')}".upper()
