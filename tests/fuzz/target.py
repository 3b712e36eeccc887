"""The server under attack, and the client that attacks it."""

import json
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.abuse.clients import request
from tests.abuse.processes import started
from tests.fuzz.bodies import ORDINARY
from tests.fuzz.judgement import ANSWER_LIMIT_S, Answer
from tests.fuzz.watch import CLOSE, Watch

READ_BYTES = 2**18
HEAD_BYTES = 4096
TOLD_BYTES = 100
WARM_UP: list[tuple[str, dict[str, Any]]] = [
    *ORDINARY.items(),
    ("/v1/completions", {"prompt": [1] * 2000, "max_tokens": 8}),
    ("/v1/chat/completions", ORDINARY["/v1/chat/completions"] | {"guided_regex": "a+"}),
]
"""What is made once, or only grows to its size, is not taken for a hostile body's."""


class Target:
    """A running server and its watch; both are replaced by ``restart``."""

    def __init__(
        self, quire: Sequence[str | Path], model: Path, settings: Sequence[str], streams: int
    ) -> None:
        """quire: the command. settings: of ``--set``. streams: honest ones, all the time."""
        self._quire, self._model, self._streams = quire, model, streams
        self._settings = [f"--set={one}" for one in settings]
        self.starts = 0
        self._start()

    def _start(self) -> None:
        self._server = started(self._model, *self._settings, quire=self._quire)
        self.starts += 1
        self.port = self._server.port
        for path, body in WARM_UP:
            ask(self.port, request("POST", path, CLOSE, json.dumps(body).encode()))
        self.watch_with(self._streams)

    def watch_with(self, streams: int) -> None:
        """Begins to watch, first while nobody attacks."""
        self.watch = Watch(self.port, self._server.process.pid, streams)
        self.calm = self.watch.calm()

    def look_at_calm(self) -> None:
        """Its gaps as they are now: others use the machine, too."""
        self.calm = replace(self.watch.calm(), last_bytes=self.calm.last_bytes)

    @property
    def last_words(self) -> str:
        """The end of its log, once it has died."""
        died = self._server.process.poll() is not None
        return repr(self._server.text[-TOLD_BYTES:]) if died else ""

    def openapi(self) -> dict[str, Any]:
        """The schema of its bodies."""
        with urlopen(f"{self._server.url}/openapi.json", timeout=ANSWER_LIMIT_S) as answer:
            schema: dict[str, Any] = json.load(answer)
        return schema

    def restart(self) -> None:
        """A new server, with what it is like when it is calm."""
        self.close()
        self._start()

    def close(self) -> None:
        """Ends both."""
        self.watch.close()
        self._server.kill()


def ask(port: int, data: bytes, limit_s: float = ANSWER_LIMIT_S) -> Answer:
    """Sends, and reads to the end of the connection; gives up after the limit.

    A server may answer, and close, before it has read everything.
    """
    begun_s = time.monotonic()
    head, is_late = b"", False
    try:
        address = ("127.0.0.1", port)
        with suppress(ConnectionError), socket.create_connection(address, limit_s) as connection:
            with suppress(ConnectionError):
                connection.sendall(data)
            while part := connection.recv(READ_BYTES):
                head += part[: HEAD_BYTES - len(head)]
                connection.settimeout(max(begun_s + limit_s - time.monotonic(), 0.001))
    except TimeoutError:
        is_late = True
    status = re.match(rb"HTTP/1\.\d (\d{3})", head)
    seconds = time.monotonic() - begun_s
    said = head.partition(b"\r\n\r\n")[2][:TOLD_BYTES]
    return Answer(int(status[1]) if status and not is_late else None, seconds, said)
