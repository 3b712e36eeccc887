"""The program of one of several models' processes; its arguments are the numbers of two sockets.

It serves as a process with one model does, on a socket that it inherits, and ends with the process
that started it. server/supervisor/process.py describes the messages between the two.
"""

import json
import os
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

from engine.client import EngineClient
from engine.machine import raise_descriptor_limit, use_one_arena
from server.catalogue.names import printable
from server.chat.drain import Drain
from server.chat.salts import Salts
from server.cli.log import configure_log
from server.cli.model_files import read_model
from server.cli.salt_secret import salt_secret
from server.cli.serve import serve_on
from server.config import Config, StartError
from server.supervisor.process import MAX_REASON_CHARS
from server.text.limited_process import LimitedProcess

AT_THE_START = -1
"""The number of an answer that no question was asked for."""


class Control:
    """The connection to the supervisor."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._lock = threading.Lock()

    def __enter__(self) -> "Control":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)  # closing would wait for the thread below
        self._lines.close()

    def read(self) -> dict[str, Any] | None:
        """Wait for the next message; None after the end of the connection."""
        line = self._lines.readline()
        message: dict[str, Any] | None = json.loads(line) if line else None
        return message

    def tell(self, **message: Any) -> None:
        """Send a message, from any thread; drop it after the end of the connection."""
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            try:
                self._connection.sendall(line)
            except OSError:
                return

    def begin(self, client: EngineClient, drain: Drain, limit_bytes: int) -> None:
        """Report that clients can come, and obey from now on. limit_bytes: of K and V at first."""
        self._limit(client, limit_bytes, AT_THE_START)
        threading.Thread(target=self._obey, args=(client, drain), daemon=True).start()
        self.tell(ready=True)

    def _obey(self, client: EngineClient, drain: Drain) -> None:
        """Obey the supervisor, on a thread of its own; end with the connection."""
        while (message := self.read()) is not None:
            if "ping" in message:
                self.tell(number=message["number"])
            elif "kv_limit" in message:
                self._limit(client, message["kv_limit"], message["number"])
            else:
                self._end(drain)
        self._end(drain)

    @staticmethod
    def _end(drain: Drain) -> None:
        # The first call refuses new requests, the second one ends running ones.
        drain.begin()
        drain.begin()

    def _limit(self, client: EngineClient, limit_bytes: int, number: int) -> None:
        """Limit the memory of K and V, and answer the new limit. number: of the question."""
        client.set_kv_limit(limit_bytes, lambda allowed: self.tell(kv_limit=allowed, number=number))


def main() -> None:
    listener, connection = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    code = 0
    with listener, connection, Control(connection) as control:
        try:
            _serve(listener, control)
        except StartError as error:
            control.tell(failed=printable(str(error), MAX_REASON_CHARS))
            code = error.exit_code
    sys.stderr.flush()
    # As the command itself ends: see server/cli/commands.py.
    os._exit(code)


def _serve(listener: socket.socket, control: Control) -> None:
    start = control.read()
    if start is None:
        return
    control.tell(started=True)
    trial = LimitedProcess(modules=("server.text.template_trial",))
    trial.start()
    use_one_arena()
    raise_descriptor_limit()
    settings = Config.model_validate(start["settings"])
    configure_log(settings.log)
    salts = Salts(salt_secret(settings.access.salt_secret_file))
    model = read_model(start["model"], settings, trial, any_name=True)

    def ready(client: EngineClient, drain: Drain, _: str) -> None:
        control.begin(client, drain, start["kv_limit"])

    def progress(done: int, total: int) -> None:
        control.tell(loaded=done, of=total)

    serve_on(listener, settings, salts, model, progress=progress, ready=ready)
