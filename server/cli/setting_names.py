"""Names of settings, and which one a wrong name may have meant."""

import os
from difflib import get_close_matches

from server.config import ENV_PREFIX, NO_SETTINGS, Config

FIELDS = {section: tuple(type(values).model_fields) for section, values in Config()}
"""The fields of every section."""
LIST = "configs/quire.toml lists all of them"


def unknown_setting(name: str) -> str:
    """Say that there is no such setting, and name the nearest one. name: ``section.field``, or what
    stands in its place."""
    near = nearest(name, (*FIELDS, *_dotted()))
    hint = f"did you mean {near}? " if near else ""
    return f"there is no such setting; {hint}{LIST}"


def unknown_variable() -> str | None:
    """Find a variable of the environment that looks like a setting and is none, and name the
    nearest setting; None where there is none. Its value may be a secret, and is not repeated."""
    variables = {_variable(name): name for name in _dotted()}
    known = {*variables, *(_variable(section) for section in FIELDS), *NO_SETTINGS}
    for written in sorted(os.environ):
        name = written.upper()
        if name.startswith(ENV_PREFIX) and name not in known:
            near = nearest(name.removeprefix(ENV_PREFIX), tuple(_dotted()))
            hint = f"did you mean {_variable(near)}? " if near else ""
            return f"{written} is no setting; {hint}{LIST}"
    return None


def nearest(name: str, known: tuple[str, ...]) -> str | None:
    """Return the known name that a name is most like, in all or in its last part; None where none
    is like it."""
    spellings: dict[str, str] = {}
    for one in known:
        for spelling in (one, one.rpartition(".")[2]):
            spellings.setdefault(_plain(spelling), one)
    found = get_close_matches(_plain(name), spellings, n=1)
    return spellings[found[0]] if found else None


def _dotted() -> list[str]:
    return [f"{section}.{field}" for section, fields in FIELDS.items() for field in fields]


def _variable(name: str) -> str:
    return f"{ENV_PREFIX}{name.replace('.', '__')}".upper()


def _plain(name: str) -> str:
    """Return a name without its separators, so that spellings compare equal."""
    return name.lower().replace("__", "_").replace(".", "_").replace("-", "_")
