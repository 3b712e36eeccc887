"""Paths of files that ship with the code: settings, short names of models, the demo model."""

from pathlib import Path

import server

SETTINGS_FILE = "quire.toml"
ALIASES_FILE = "aliases.toml"
DEMO_MODEL = "demo/model"


def shipped(name: str) -> Path:
    """Return the path of a file in ``configs``, which only a wheel has inside the package."""
    assert server.__file__ is not None
    package = Path(server.__file__).parent
    installed = package / "configs" / name
    return installed if installed.exists() else package.parent / "configs" / name
