from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine.monitor import POLL_S
from kvcache.backends.backend import MAPPING_LIMIT_S
from server.config import Config, load


def test_a_mapping_that_hangs_is_known_as_such_before_the_watchdog_sees_a_step_that_does() -> None:
    assert Config().engine.watchdog_s > MAPPING_LIMIT_S + POLL_S


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
