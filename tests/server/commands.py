"""The ``quire`` command as a person runs it: its exit codes, what it says, and whom it asks."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from typer.testing import Result

from server.config import MIB, Tables

ENGINE, SETTINGS, MODEL = 1, 2, 3
Run = Callable[..., Result]
# Settings of a server that needs little.
SMALL: Tables = {
    "server": {"port": 0},
    "engine": {"max_num_seqs": 2, "max_model_len": 256, "max_num_batched_tokens": 64},
    "cache": {"kv_budget": 8 * MIB, "heap_size": MIB, "free_slack": MIB, "page_size": 4096},
}


def one_sentence(result: Result, code: int) -> str:
    """What the command said about why it ended with that code."""
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    said = [line for line in result.stderr.splitlines() if line.startswith("quire: ")]
    (line,) = [line for line in said if not line.startswith("quire: loading")]
    assert "Traceback" not in result.stderr
    return line


class StandIn(ThreadingHTTPServer):
    """A server that answers as its class does, until the block ends."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), StandInHandler)
        self.port = self.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def answer(self, path: str, body: Any, key: str | None) -> tuple[int, Any]:
        """The status, and bytes or what JSON is made of. body: None of a GET."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class StandInHandler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        status, said = self.server.answer(self.path, body, self.headers["authorization"])
        content = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass
