import socket
from typing import Any

import pytest

from server.config import Config, SettingError
from server.http.guards.keys import check_access, only_this_machine

KEY = "sk-0123456789abcdef"
OF_THIS_MACHINE = ("127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1", "localhost")
OF_OTHERS = ("0.0.0.0", "::", "", "192.168.1.5", "fd00::5", "::ffff:10.0.0.1")


def checked(host: str, **access: Any) -> None:
    check_access(Config.model_validate({"server": {"host": host}, "access": access}))


@pytest.mark.parametrize("host", OF_THIS_MACHINE)
def test_threat_01_this_machine_needs_no_key(host: str) -> None:
    checked(host)


@pytest.mark.parametrize("host", OF_OTHERS)
def test_threat_01_other_machines_need_a_key_or_a_decision(host: str) -> None:
    with pytest.raises(SettingError, match=r"setting server\.host: .* set access\.api_keys, or"):
        checked(host)
    with pytest.raises(SettingError, match=r"setting access\.api_keys: key 1 has 15 characters"):
        checked(host, api_keys=[KEY[:15]])
    with pytest.raises(SettingError, match=r"setting server\.host"):
        checked(host, scrape_key=KEY)
    checked(host, api_keys=[KEY[:16]])
    checked(host, insecure_no_auth=True)


def test_a_name_is_where_it_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*addresses: str) -> None:
        places = [(0, 0, 0, "", (address, 0)) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)

    found("127.0.0.1", "::1")
    assert only_this_machine("mac.local")
    found("127.0.0.1", "192.168.1.5")
    assert not only_this_machine("mac.local")

    def nothing(*_: object, **__: object) -> None:
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", nothing)
    assert not only_this_machine("mac.local")


@pytest.mark.parametrize("wrong", [{"allowed_hosts": "*"}, {"allowed_origins": "null"}])
def test_lists_are_read_before_anything_is_loaded(wrong: dict[str, str]) -> None:
    with pytest.raises(SettingError, match=r"setting access\.allowed_"):
        checked("127.0.0.1", **wrong)
