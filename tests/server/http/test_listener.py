"""A port is taken before the model is read, and clients are refused until it is loaded."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from server.cli import serve
from server.config import ServerSection, SettingError
from server.http import listener
from server.http.listener import listen_on, reserve, reserved_for_ollama
from tests.models import TINY, write_config
from tests.server.commands import SETTINGS, Run, one_sentence

HOST = "127.0.0.1"
VERSION = b'HTTP/1.1 200 OK\r\n\r\n{"name":"quire","version":"9.8.7","models":"/v1/models"}'
SAYS_IT_IN_A_HEADER = b"HTTP/1.1 200 OK\r\nserver: quire/9.8.7\r\n\r\nOllama is running"
OLLAMA = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nOllama is running"
WANTS_KEY = b'HTTP/1.1 401 Unauthorized\r\n\r\n{"error":{}}'


def port_of(reserved: socket.socket) -> int:
    number: int = reserved.getsockname()[1]
    return number


def knock(port: int) -> None:
    """Connects and leaves."""
    socket.create_connection((HOST, port), 5).close()


@contextmanager
def answering(answer: Callable[[str, socket.socket], None]) -> Iterator[int]:
    """The port of a program that answers so. It is told the path."""
    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    client, _ = server.accept()
                    with client, suppress(OSError):
                        answer(client.recv(4096).split()[1].decode(), client)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield port_of(server)
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def refusal(port: int) -> str:
    with pytest.raises(SettingError) as caught:
        reserve(HOST, port)
    said = str(caught.value)
    assert said.startswith(f"setting server.port: {HOST}:{port} cannot be listened on: ")
    assert "\n" not in said
    return said


def test_clients_are_refused_until_it_listens() -> None:
    with reserve(HOST, 0) as reserved:
        with pytest.raises(ConnectionRefusedError):
            knock(port_of(reserved))
        listen_on(reserved, 8)
        knock(port_of(reserved))


def test_a_port_is_reserved_once_also_where_nobody_listens_yet() -> None:
    with reserve(HOST, 0) as reserved:
        said = refusal(port_of(reserved))
        assert "another program has this address (Address already in use)" in said
        assert f"--port {port_of(reserved) + 1}" in said
        listen_on(reserved, 8)
        assert "another program has this address" in refusal(port_of(reserved))


def serve_one(port: int) -> int:
    """Serve a client, whose connection lingers; return the port."""
    with reserve(HOST, port) as reserved:
        listen_on(reserved, 8)
        with socket.create_connection((HOST, port_of(reserved))) as client:
            accepted, _ = reserved.accept()
            accepted.close()  # who closes first lingers
            assert client.recv(1) == b""
        return port_of(reserved)


def test_connections_that_linger_are_no_reason_to_refuse_the_next_server() -> None:
    port = serve_one(0)
    assert [serve_one(port), serve_one(port)] == [port, port]


def test_of_two_that_got_past_what_lingers_the_second_one_is_told_when_it_listens() -> None:
    port = serve_one(0)
    with reserve(HOST, port) as first, reserve(HOST, port) as second:
        listen_on(first, 8)
        with pytest.raises(SettingError, match="cannot be listened on: another program has this"):
            listen_on(second, 8)


@pytest.mark.parametrize(
    ("first", "second"), [(VERSION, b""), (WANTS_KEY, VERSION), (WANTS_KEY, SAYS_IT_IN_A_HEADER)]
)
def test_a_quire_that_is_there_already_is_named(first: bytes, second: bytes) -> None:
    def answer(path: str, client: socket.socket) -> None:
        client.sendall(first if path == "/version" else second)

    with answering(answer) as port:
        said = refusal(port)
    assert "quire 9.8.7 serves there already; stop it, or choose another port" in said


def test_an_ollama_that_is_there_already_is_named() -> None:
    with answering(lambda _, client: client.sendall(OLLAMA)) as port:
        assert ": Ollama serves there already; stop it, or choose another port" in refusal(port)


def test_a_second_port_is_reserved_only_where_it_is_asked_for() -> None:
    with reserved_for_ollama(ServerSection()) as others:
        assert others == ()
    with reserved_for_ollama(ServerSection(ollama_port=0)) as (second,):
        port = port_of(second)
        named = f"^setting server.ollama_port: .* --set server.ollama_port={port + 1}, or --set"
        taken = reserved_for_ollama(ServerSection(ollama_port=port))
        with pytest.raises(SettingError, match=named), taken:
            raise AssertionError("two have it")


def test_a_stranger_who_never_stops_talking_is_not_listened_to_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "ASK_TIMEOUT_S", 0.2)

    def drip(_: str, client: socket.socket) -> None:
        while True:
            client.sendall(b"x")
            time.sleep(0.02)

    with answering(drip) as port:
        began = time.monotonic()
        assert "another program has this address" in refusal(port)
        assert time.monotonic() - began < 5
    with answering(lambda _, client: client.sendall(b"x" * 10**6)) as port:
        assert "another program has this address" in refusal(port)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(SettingError, match=r"192\.0\.2\.1:0 cannot be listened on: [^-]*$"):
        reserve("192.0.2.1", 0)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
def test_an_address_with_colons_is_one_of_ipv6() -> None:
    with reserve("::1", 0) as reserved:
        assert reserved.family is socket.AF_INET6
        assert reserved.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)


def test_a_taken_port_is_found_before_the_model_is_read(
    quire: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "reserve", reserve)
    folder = write_config(tmp_path, TINY, model_type="gpt2")
    with reserve(HOST, 0) as taken:
        line = one_sentence(quire("serve", folder, "--port", port_of(taken)), SETTINGS)
    assert "cannot be listened on" in line
    assert line.count("Address already in use") == 1
