import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcache.user_folders import cache_folder, config_folder, state_folder


@pytest.mark.parametrize(
    ("platform", "folder", "below_home"),
    [
        ("linux", cache_folder, ".cache/quire"),
        ("linux", config_folder, ".config/quire"),
        ("linux", state_folder, ".local/state/quire"),
        ("darwin", cache_folder, "Library/Caches/quire"),
        ("darwin", config_folder, ".config/quire"),
        ("darwin", state_folder, "Library/Application Support/quire"),
    ],
)
def test_a_users_files_are_kept_where_the_system_wants_them(
    platform: str,
    folder: Callable[[], Path],
    below_home: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(variable, "")
    assert folder() == tmp_path / below_home
    for variable in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / "chosen"))
    assert folder() == tmp_path / "chosen" / "quire"
