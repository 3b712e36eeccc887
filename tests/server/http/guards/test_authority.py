from ipaddress import ip_address

import pytest

from server.http.guards.hosts import Authority, is_loopback, read_address, read_authority


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("a.example", "a.example", ""),
        ("A.Example.:80", "a.example", "80"),
        ("127.0.0.1:1", ip_address("127.0.0.1"), "1"),
        ("[::1]:1", ip_address("::1"), "1"),
        ("[::ffff:10.0.0.1]", ip_address("10.0.0.1"), ""),
    ],
)
def test_a_host_is_read_in_one_form(text: str, host: object, port: str) -> None:
    assert read_authority(text) == Authority(host, port)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["", ".", "a:b", "a:123456", "[a]", "[1.2.3.4]", "a b", "a@b", "é"]
)
def test_what_is_none_is_not_read(text: str) -> None:
    assert read_authority(text) is None


def test_only_this_machine_is_loopback() -> None:
    assert is_loopback("localhost")
    assert not is_loopback("localhost.evil.example")
    for text, expected in (("127.8.8.8", True), ("::1", True), ("10.0.0.1", False), ("::", False)):
        address = read_address(text)
        assert address is not None
        assert is_loopback(address) is expected
    assert read_address("localhost") is None
