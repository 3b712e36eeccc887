"""Finds quire's folders of a user by the XDG Base Directory Specification, or by Apple's
conventions on a Mac without XDG variables. Raises RuntimeError if there is no home folder."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder for files that quire can make again."""
    return _folder("XDG_CACHE_HOME", ".cache", on_a_mac="Library/Caches")


def prefixes_folder(named: str | None) -> Path:
    """Return the folder of prefixes on disk. named: the user's choice of it, if any."""
    return cache_folder() / "prefixes" if named is None else Path(named).expanduser()


def state_folder() -> Path:
    """Return the folder for files that must outlive a restart."""
    return _folder("XDG_STATE_HOME", ".local/state", on_a_mac="Library/Application Support")


def config_folder() -> Path:
    """Return the folder for settings. On a Mac it is ~/.config too, which is usual for commands."""
    return _folder("XDG_CONFIG_HOME", ".config", on_a_mac=".config")


def _folder(variable: str, usual: str, *, on_a_mac: str) -> Path:
    chosen = os.environ.get(variable)
    below_home = on_a_mac if sys.platform == "darwin" else usual
    return (Path(chosen) if chosen else Path.home() / below_home) / "quire"
