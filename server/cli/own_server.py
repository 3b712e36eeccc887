"""Starts a server for one command: a process that serves one model on a free port of this machine
until the command ends. server/supervisor/process.py describes the messages to the process."""

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvcache.child import end
from server.cli.sentences import say
from server.cli.serve import STOP_TIMEOUT_S
from server.cli.serve_models import COMMAND, plain_settings
from server.config import Config, StartError
from server.http.listener import reserve
from server.http.server import url_of

HOST = "127.0.0.1"
# A limit of K and V beyond any machine's memory. The process lowers it to what fits.
NO_LIMIT_BYTES = 2**62


class OwnServerError(StartError):
    """Raised if the process does not serve. ``exit_code`` is that of the process, but never 0."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.exit_code = code or 1  # type: ignore[misc]


@contextmanager
def own_server(settings: Config, folder: Path, name: str) -> Iterator[str]:
    """Serve a model until the block ends; yield the server's address. name: the model's name for
    clients. Raises StartError."""
    ours, theirs = socket.socketpair()
    with ours, theirs, reserve(HOST, 0) as listener:
        numbers = (listener.fileno(), theirs.fileno())
        # The process gets its own session, because a terminal's Ctrl-C must reach only the command.
        process = subprocess.Popen(
            [*COMMAND, *map(str, numbers)],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        try:
            message = {"model": str(folder), "settings": _settings(settings, name)}
            with suppress(ConnectionError):
                ours.sendall(json.dumps(message | {"kv_limit": NO_LIMIT_BYTES}).encode() + b"\n")
            say(f"loading {name}")
            _wait_until_ready(ours, process)
            yield url_of(listener)
        finally:
            # The process ends with the connection, whatever it is doing.
            ours.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
            end(process)


def _settings(settings: Config, name: str) -> dict[str, Any]:
    tables = plain_settings(settings)
    tables["server"] |= {"host": HOST, "ollama_port": None, "served_model_name": name}
    tables["log"] |= {"level": "warning", "file": None}
    return tables


def _wait_until_ready(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Raises OwnServerError if the process ends before."""
    reason = "the model's process ended before it was ready"
    with suppress(ConnectionError), connection.makefile("rb") as lines:
        for line in lines:
            message = json.loads(line)
            if message.get("ready"):
                return
            reason = message.get("failed", reason)
    raise OwnServerError(reason, process.wait())
