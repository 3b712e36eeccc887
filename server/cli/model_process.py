"""The program of a process that serves one model for the supervisor (server/supervisor). Arguments
are the descriptors of two inherited sockets: a listening one, and a connection to the supervisor.
The process ends when the connection ends. server/supervisor/process.py describes the messages."""

import json
import os
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

from engine.client import EngineClient
from engine.machine import raise_descriptor_limit, use_one_arena
from kvcache.child import Child
from server.catalogue.names import printable
from server.chat.drain import Drain
from server.cli.log import configure_log
from server.cli.model_files import read_model
from server.cli.salt_secret import read_salts
from server.cli.serve import serve_on
from server.config import Config, StartError
from server.supervisor.process import MAX_REASON_CHARS

AT_THE_START = -1
"""The number in a report for which the supervisor has not asked."""


class Control:
    """Exchanges messages with the supervisor, on a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._lock = threading.Lock()

    def __enter__(self) -> "Control":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)  # ends _obey, for which close() would wait
        self._lines.close()

    def read(self) -> dict[str, Any] | None:
        """Wait for the next message, and return it; return None if the connection has ended."""
        line = self._lines.readline()
        message: dict[str, Any] | None = json.loads(line) if line else None
        return message

    def tell(self, **message: Any) -> None:
        """Send a message, from any thread, unless the connection has ended."""
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            try:
                self._connection.sendall(line)
            except OSError:
                return

    def begin(self, client: EngineClient, drain: Drain, limit_bytes: int) -> None:
        """Report readiness and start to obey the supervisor. limit_bytes: memory for K and V."""
        self._limit(client, limit_bytes, AT_THE_START)
        threading.Thread(target=self._obey, args=(client, drain), daemon=True).start()
        self.tell(ready=True)

    def _obey(self, client: EngineClient, drain: Drain) -> None:
        """Obey the supervisor's messages until the connection ends; then end the requests."""
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
        # The first call refuses new requests; the second call ends running requests.
        drain.begin()
        drain.begin()

    def _limit(self, client: EngineClient, limit_bytes: int, number: int) -> None:
        """Limit the memory of K and V. Reply to the message ``number`` with the limit in force."""
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
    # The interpreter is not torn down: see main in server/cli/commands.py.
    os._exit(code)


def _serve(listener: socket.socket, control: Control) -> None:
    start = control.read()
    if start is None:
        return
    control.tell(started=True)
    trial = Child(modules=("server.text.template_trial",))
    trial.start()
    use_one_arena()
    raise_descriptor_limit()
    settings = Config.model_validate(start["settings"])
    configure_log(settings.log)
    salts = read_salts(settings.access.salt_secret_file)
    model = read_model(start["model"], settings, trial, any_name=True)

    def ready(client: EngineClient, drain: Drain, _: str) -> None:
        control.begin(client, drain, start["kv_limit"])

    def progress(done: int, total: int) -> None:
        control.tell(loaded=done, of=total)

    serve_on(listener, settings, salts, model, progress=progress, ready=ready)
