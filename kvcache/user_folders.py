"""quire's folders among the files of its user, where the system wants them. XDG Base Directory
Specification; on a Mac, Apple's File System Programming Guide, unless XDG's variables are set."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder for what can be found out again. Raises RuntimeError where the user has no
    home."""
    return _folder("XDG_CACHE_HOME", ".cache", on_a_mac="Library/Caches")


def state_folder() -> Path:
    """Return the folder for what must outlive a restart. Raises RuntimeError where the user has no
    home."""
    return _folder("XDG_STATE_HOME", ".local/state", on_a_mac="Library/Application Support")


def config_folder() -> Path:
    """Return the folder for settings: on a Mac, too, where people look for those of a command.
    Raises RuntimeError where the user has no home."""
    return _folder("XDG_CONFIG_HOME", ".config", on_a_mac=".config")


def _folder(variable: str, usual: str, *, on_a_mac: str) -> Path:
    chosen = os.environ.get(variable)
    below_home = on_a_mac if sys.platform == "darwin" else usual
    return (Path(chosen) if chosen else Path.home() / below_home) / "quire"
