"""A server in a thread that answers as OpenAI's do, at once: for tests of who asks."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from tests.bench.models import TEMPLATE_TOKENS


@dataclass
class SmallServer:
    """What it does, and what it was asked."""

    url: str = ""
    model: str = "small"
    reports_usage: bool = True
    short_by: int = 0
    """How many tokens its answers lack."""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    @property
    def prompts(self) -> list[str]:
        """Of chats, in the order in which they came."""
        return [body["messages"][0]["content"] for body in self.bodies]

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Of a streamed chat: one chunk for two tokens."""
        tokens = body["max_tokens"] - self.short_by
        for _ in range(0, tokens, 2):
            yield {"choices": [{"index": 0, "delta": {"content": "xy"}}]}
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        if self.reports_usage:
            prompt_tokens = len(body["messages"][0]["content"]) + TEMPLATE_TOKENS
            yield {"usage": {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}}


@contextmanager
def small_server(**settings: Any) -> Iterator[SmallServer]:
    """Serves until the block ends."""
    small = SmallServer(**settings)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Says nothing."""

        def do_GET(self) -> None:
            if self.path != "/v1/models":
                self.send_error(404)
                return
            self._begin()
            self.wfile.write(json.dumps({"data": [{"id": small.model}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            small.bodies.append(body)
            self._begin()
            for event in small.events(body):
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")

        def _begin(self) -> None:
            self.send_response(200)
            self.end_headers()

    class ManyAtOnce(ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

    server = ManyAtOnce(("127.0.0.1", 0), Handler)
    small.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield small
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
