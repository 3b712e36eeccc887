import httpx2
import pytest
from fastapi import FastAPI

from server.config import Config, SettingError
from server.http.guards.hosts import AllowedHosts
from server.routes.service import Service
from tests.server.harness import CHAT, Connection, chat

OURS = (
    "localhost",
    "LocalHost",
    "localhost:8000",
    "localhost.",
    "localhost.:1",
    "localhost:",
    "127.0.0.1",
    "127.0.0.1:65535",
    "[::1]",
    "[::1]:8000",
    "[0:0:0:0:0:0:0:1]",
    "[::ffff:127.0.0.1]",
    "host.docker.internal",
    "HOST.docker.internal:8000",
)
NOT_OURS = (
    "evil.example",
    "localhost.evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "127.0.0.1.nip.io",
    "192.168.1.5",
    "[fe80::1]",
    "127.1",
    "2130706433",
    "0x7f000001",
    "0.0.0.0",
    "localhost:8000:8000",
    "localhost:port",
    "localhost@evil.example",
    "evil.example#localhost",
    "localhost/",
    "localhost, evil.example",
    "localhost evil.example",
    "::1",
    "[::1",
    "[127.0.0.1]",
    "[]",
    "..",
    ".",
    "",
    "lo\u00e7alhost",
)
PATHS = ("/health", "/", "/metrics", "/nowhere", "/page/x", "/v1/models", CHAT)


def allowed(**sections: dict[str, object]) -> AllowedHosts:
    return AllowedHosts.of(Config.model_validate(sections))


@pytest.mark.parametrize("host", OURS)
def test_threat_02_the_names_of_this_machine_are_answered(host: str) -> None:
    assert allowed().has(host)


@pytest.mark.parametrize("host", NOT_OURS)
def test_threat_02_other_names_are_not(host: str) -> None:
    assert not allowed().has(host)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_threat_02_a_name_of_somebody_else_is_refused_on_every_path(
    http: httpx2.AsyncClient, service: Service, path: str, method: str
) -> None:
    response = await http.request(method, path, headers={"Host": "evil.example:8000"})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "host_not_allowed"
    assert "evil" not in response.text
    assert "access-control-allow-origin" not in response.headers


async def test_threat_02_a_request_has_one_host(app: FastAPI) -> None:
    for hosts in ([], [b"localhost", b"localhost"]):
        connection = Connection(app, "/health", b"", method="GET", hosts=hosts)
        await connection.end()
        assert connection.status == 400


def test_names_can_be_added() -> None:
    hosts = allowed(access={"allowed_hosts": "quire.example, 10.0.0.7,fd00::7, [fd00::8]"})
    for host in ("quire.example:443", "QUIRE.example.", "10.0.0.7", "[fd00::7]", "[fd00::8]:1"):
        assert hosts.has(host)
    assert not hosts.has("www.quire.example")


@pytest.mark.parametrize("name", ["*", "*.example", "http://a.example", "a b", "a/b", "."])
def test_what_is_no_name_cannot_be_added(name: str) -> None:
    with pytest.raises(SettingError, match=r"setting access\.allowed_hosts: .* is no host name"):
        allowed(access={"allowed_hosts": [name]})


def test_the_address_that_is_listened_on_is_a_name_of_ours() -> None:
    assert allowed(server={"host": "192.168.1.5"}).has("192.168.1.5:8000")
    assert allowed(server={"host": "fd00::5"}).has("[fd00::5]:8000")
    assert allowed(server={"host": "mac.local"}).has("mac.local:8000")


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::", ""])
def test_where_all_addresses_are_listened_on_any_will_do_but_no_name(wildcard: str) -> None:
    hosts = allowed(server={"host": wildcard})
    for host in ("192.168.1.5:8000", "[fd00::5]", "localhost"):
        assert hosts.has(host)
    assert not hosts.has("evil.example")


async def test_an_answer_is_given_under_our_own_names(app: FastAPI) -> None:
    connection = Connection(app, CHAT, chat(max_tokens=1), hosts=[b"127.0.0.1:8000"])
    await connection.end()
    assert connection.status == 200


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        (b"http://localhost:8000/v1/models", b"evil.example", 200),
        (b"HTTP://127.0.0.1/v1/models", b"localhost", 200),
        (b"https://[::1]/v1/%6dodels", b"", 200),
        (b"http://localhost", b"localhost", 200),
        (b"http://localhost/nowhere", b"localhost", 404),
        (b"http://evil.example/v1/models", b"localhost", 403),
        (b"http://localhost@evil.example/v1/models", b"localhost", 403),
        (b"http://localhost:80:80/v1/models", b"localhost", 403),
        (b"http:///v1/models", b"localhost", 403),
        (b"ftp://localhost/v1/models", b"localhost", 404),
    ],
)
async def test_a_target_in_absolute_form_has_the_name_that_counts(
    app: FastAPI, target: bytes, host: bytes, status: int
) -> None:
    path = target.decode()
    connection = Connection(app, path, b"", method="GET", hosts=(host,), raw_path=target)
    await connection.begins()
    assert connection.status == status
