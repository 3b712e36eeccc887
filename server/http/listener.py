"""Binds sockets before the model is read, and lets them listen once the server can answer."""

import errno
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from server.config import ServerSection, SettingError

PORT = "server.port"
# Timeout of a request to the program that already uses the server's address.
ASK_TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 8192
QUIRE_ANSWERS = re.compile(
    rb'(?:"name": ?"quire", ?"version": ?"|\r\nserver: quire/)([\w.+-]{1,32})', re.IGNORECASE
)
OLLAMA_ANSWERS = b"Ollama is running"


def reserve(host: str, port: int, setting: str = PORT) -> socket.socket:
    """Bind a socket, which refuses connections until it listens. For port 0 the system chooses a
    port now. ``setting`` is the name of the port's setting, for errors. Raises SettingError."""
    # With SO_REUSEADDR Linux lets two servers bind one address. Without the option, binding fails
    # while connections of an earlier server linger. So the option is only the second choice.
    with suppress(OSError):
        return _bound(host, port, reuses=False)
    try:
        return _bound(host, port, reuses=True)
    except OSError as error:
        raise _cannot_be_had(host, port, error, setting) from error


@contextmanager
def reserved_for_ollama(server: ServerSection) -> Iterator[tuple[socket.socket, ...]]:
    """Bind a second socket to the port in the setting ollama_port, if set. Raises SettingError."""
    if server.ollama_port is None:
        yield ()
        return
    with reserve(server.host, server.ollama_port, "server.ollama_port") as second:
        yield (second,)


def listen_on(listener: socket.socket, backlog: int) -> None:
    # Lets the next server bind the address while connections of this server linger.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.listen(backlog)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _cannot_be_had(host, port, error) from error


def _bound(host: str, port: int, *, reuses: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def _cannot_be_had(host: str, port: int, error: OSError, setting: str = PORT) -> SettingError:
    """Return an error for a failed bind. Its text names the program that uses the address."""
    why = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        program = _program_at(host, port)
        if program is None:
            why = f"another program has this address ({why}); stop it"
        else:
            why = f"{program} serves there already; stop it"
        flag = "--port " if setting == PORT else f"--set {setting}="
        why += f", or choose another port: {flag}{port + 1}, or {flag}0 for a free one"
    return SettingError(f"setting {setting}: {host}:{port} cannot be listened on: {why}")


def _program_at(host: str, port: int) -> str | None:
    """Return the name of the program at an address if it is quire or Ollama, else None."""
    # A quire server that requires API keys shows its version only at /.
    for path in ("/version", "/"):
        with suppress(OSError):
            answer = _answer(host, port, path)
            if quire := QUIRE_ANSWERS.search(answer):
                return f"quire {quire[1].decode()}"
            if OLLAMA_ANSWERS in answer:
                return "Ollama"
    return None


def _answer(host: str, port: int, path: str) -> bytes:
    """Return the beginning of an HTTP answer, after ASK_TIMEOUT_S at most. Raises OSError."""
    deadline = time.monotonic() + ASK_TIMEOUT_S
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = b""
    with socket.create_connection((host, port), ASK_TIMEOUT_S) as connection:
        connection.sendall(request.encode())
        while len(answer) < MAX_ANSWER_BYTES and (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            if not (more := connection.recv(MAX_ANSWER_BYTES)):
                break
            answer += more
    return answer
