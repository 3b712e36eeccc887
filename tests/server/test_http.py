import socket

import pytest

from server import http
from server.config import Config
from server.http import LISTEN_BACKLOG, GuardedServer, http_config
from server.service import Service
from tests.server.harness import eventually


def test_what_uvicorn_is_told(service: Service) -> None:
    config = http_config(Config(), service)
    assert not config.proxy_headers
    assert not config.server_header
    assert not config.access_log
    assert config.h11_max_incomplete_event_size == Config().limits.max_header_bytes
    assert config.timeout_keep_alive == Config().limits.keep_alive_s


def test_a_system_with_few_descriptors_takes_fewer_connections(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(http, "connections_that_fit", lambda _: 7)
    config = http_config(Config(), service)
    assert config.http.rules.limits.max_connections == 7  # type: ignore[union-attr]
    assert "open files for 7 only" in "".join(capsys.readouterr())


async def test_many_may_wait_to_be_accepted(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    listen = socket.socket.listen

    class Listener(socket.socket):
        def listen(self, backlog: int = 0, /) -> None:
            asked.append(backlog)
            listen(self, backlog)

    server = GuardedServer(http_config(Config(), service))
    with Listener() as listener:
        listener.bind(("127.0.0.1", 0))
        server.should_exit = True
        await server.serve([listener])
        await eventually(lambda: not server.server_state.connections)
    assert asked[-1] == LISTEN_BACKLOG


async def test_without_sockets_of_ours_there_is_nothing_to_set(service: Service) -> None:
    config = http_config(Config.model_validate({"server": {"port": 0}}), service)
    server = GuardedServer(config)
    server.should_exit = True
    await server.serve()
