from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_settings import SettingsError

from engine.monitor import POLL_S
from kvcache.backend import MAPPING_LIMIT_S
from server.config import MIB, Config, engine_config, load, read_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "quire.toml"
    path.write_text("[server]\nport = 1\nhost = '0.0.0.0'\n[cache]\nkv_budget = '1GiB'\n")
    return path


def test_without_anything_the_defaults_stand() -> None:
    assert load({}, {}) == Config()
    assert load({}, {}).server.host == "127.0.0.1"


def test_a_mapping_that_hangs_is_known_as_such_before_the_watchdog_sees_a_step_that_does() -> None:
    assert Config().engine.watchdog_s > MAPPING_LIMIT_S + POLL_S


def test_flags_win_over_the_environment_and_that_over_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(read_file(file), {}).server.port == 1
    monkeypatch.setenv("QUIRE_SERVER__PORT", "2")
    assert load(read_file(file), {}).server.port == 2
    config = load(read_file(file), {"server": {"port": 3}})
    assert config.server.port == 3
    # What the winner does not name comes from the others.
    assert config.server.host == "0.0.0.0"
    assert engine_config(config).kv_budget_bytes == 1024 * MIB
    assert config.server.sse_ping_s == Config().server.sse_ping_s


@pytest.mark.parametrize(
    ("size", "in_bytes"),
    [("4GiB", 4 * 1024 * MIB), ("512MiB", 512 * MIB), ("65536", 65536), (65536, 65536)],
)
def test_sizes_take_units(size: Any, in_bytes: int) -> None:
    assert engine_config(load({}, {"cache": {"heap_size": size}})).heap_bytes == in_bytes


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("server", "port", -1),
        ("server", "port", 65536),
        ("server", "prot", 1),
        ("server", "sse_ping_s", 0),
        ("server", "ready_timeout_s", 0),
        ("limits", "max_body_bytes", "8 parsecs"),
        ("limits", "max_queued_requests", -1),
        ("engine", "max_num_seqs", 0),
        ("engine", "max_num_batched_tokens", 0),
        ("engine", "max_model_len", 1),
        ("engine", "step_time_target_ms", 0),
        ("engine", "threads", 0),
        ("cache", "kv_backend", "papyrus"),
        ("cache", "kv_budget", -1),
        ("cache", "dtype", "float64"),
        ("log", "level", "loud"),
        ("log", "format", "xml"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(section: str, field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        load({}, {section: {field: value}})
    assert caught.value.errors()[0]["loc"] == (section, field)


def test_a_table_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "quire.toml"
    file.write_text("[sever]\nport = 1\n")
    with pytest.raises(ValidationError) as caught:
        read_file(file)
    assert caught.value.errors()[0]["loc"] == ("sever",)


def test_a_wrong_value_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ENGINE__MAX_NUM_SEQS", "many")
    with pytest.raises(ValidationError) as caught:
        load({}, {})
    assert caught.value.errors()[0]["loc"] == ("engine", "max_num_seqs")


def test_a_table_in_the_environment_must_be_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_SERVER", '{"port": 7}')
    assert load({}, {}).server.port == 7
    monkeypatch.setenv("QUIRE_SERVER", "port 7")
    with pytest.raises(SettingsError, match="server"):
        load({}, {})


def test_a_file_that_is_no_toml_or_does_not_exist_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "quire.toml"
    with pytest.raises(FileNotFoundError):
        read_file(file)
    file.write_text("[server")
    with pytest.raises(ValueError, match="end of a table"):
        read_file(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UnicodeDecodeError):
        read_file(file)


def test_a_wrong_value_in_the_file_is_wrong_even_where_a_flag_would_win(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("[server]\nport = 'eighty'\n")
    monkeypatch.setenv("QUIRE_SERVER__PORT", "2")
    with pytest.raises(ValidationError) as caught:
        read_file(file)
    assert caught.value.errors()[0]["loc"] == ("server", "port")


def test_the_file_is_not_blamed_for_the_environment(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_SERVER__PORT", "eighty")
    assert read_file(file)["server"]["port"] == 1


def test_a_flag_that_was_not_given_changes_nothing(file: Path) -> None:
    assert load(read_file(file), {"server": {"port": None}}).server.port == 1


def test_settings_never_change() -> None:
    config = load({}, {})
    with pytest.raises(ValidationError):
        config.server.port = 1
    with pytest.raises(ValidationError):
        config.server = config.server


@pytest.mark.parametrize("written", ["a.example, b.example", ["a.example", "b.example"]])
def test_lists_may_be_written_with_commas(
    written: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = ("a.example", "b.example")
    assert load({}, {"access": {"allowed_hosts": written}}).access.allowed_hosts == expected
    if isinstance(written, str):
        monkeypatch.setenv("QUIRE_ACCESS__ALLOWED_HOSTS", written)
        assert load({}, {}).access.allowed_hosts == expected


def test_keys_come_from_the_environment_and_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ACCESS__API_KEYS", "sk-0123456789abcdef,sk-fedcba9876543210")
    keys = load({}, {}).access.api_keys
    assert [key.get_secret_value()[:5] for key in keys] == ["sk-01", "sk-fe"]
    assert "sk-" not in repr(load({}, {}))
