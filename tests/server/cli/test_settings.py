"""Settings come from a file, the environment and flags, and whatever is wrong is named."""

from pathlib import Path

import pytest

from server.cli.settings import read_settings, with_further
from server.config import MIB, SettingError


def test_settings_come_from_file_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "quire.toml"
    file.write_text("[server]\nport = 1\n[cache]\nkv_budget = '1GiB'\n")
    settings = read_settings(file, {"server": {"port": 2, "host": None}})
    assert (settings.server.port, settings.server.host) == (2, "127.0.0.1")
    assert settings.cache.kv_budget == 1024 * MIB


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[server]\nport = 'x'\n", "server.port: "),
        ("[server]\nprot = 1\n", "server.prot: "),
        ("[sever]\nport = 1\n", "sever: "),
        ("port = 1\n", "port: "),
        ("server = 1\n", "server: "),
        ("[server", ""),
        (None, "No such file or directory"),
    ],
)
def test_a_wrong_file_is_named_with_its_field(
    tmp_path: Path, text: str | None, problem: str
) -> None:
    file = tmp_path / "quire.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SettingError) as caught:
        read_settings(file, {})
    assert str(caught.value).startswith(f"{file}: {problem}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("QUIRE_SERVER__PORT", "x", "setting server.port: "),
        ("QUIRE_SERVER__PORT", "-1", "setting server.port: "),
        ("QUIRE_CACHE__KV_BUDGET", "3 parsecs", "setting cache.kv_budget: "),
        ("QUIRE_SERVER", "port 7", "environment: "),
    ],
)
def test_a_wrong_variable_is_named(
    variable: str, value: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingError) as caught:
        read_settings(None, {})
    assert str(caught.value).startswith(problem)
    assert "server" in str(caught.value) or "kv_budget" in str(caught.value)


def test_a_wrong_flag_is_named() -> None:
    with pytest.raises(SettingError, match=r"setting cache\.substrate: "):
        read_settings(None, {"cache": {"substrate": "papyrus"}})


@pytest.mark.parametrize("value", ["sparse", "paged", "dense", "posix", "auto"])
def test_a_variable_forces_the_substrate(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE__SUBSTRATE", value)
    assert read_settings(None, {}).cache.substrate == value
    assert read_settings(None, {"cache": {"substrate": "posix"}}).cache.substrate == "posix"


def test_any_setting_may_be_set_by_its_name() -> None:
    flags = with_further(
        {"limits": {"max_tools": 3}}, ["limits.max_choices=2", "access.allowed_hosts=a.b,c=d"]
    )
    settings = read_settings(None, flags)
    assert (settings.limits.max_tools, settings.limits.max_choices) == (3, 2)
    assert settings.access.allowed_hosts == ("a.b", "c=d")


@pytest.mark.parametrize("written", ["max_choices=2", "limits.max_choices", "", "a"])
def test_a_setting_that_is_written_otherwise_is_refused_without_its_value(written: str) -> None:
    with pytest.raises(SettingError, match=r"SECTION\.NAME=VALUE") as caught:
        with_further({}, [written])
    assert "=2" not in str(caught.value)
