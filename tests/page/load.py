"""Requests beside the page: long answers that end when told to, and what the server says."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

TIMEOUT_S = 30.0
PROMPT = "A page that two prompts begin with is mapped twice and kept once. " * 14


def get(address: str, path: str) -> Any:
    """JSON of the server."""
    return json.loads(text(address, path))


def text(address: str, path: str) -> str:
    with urllib.request.urlopen(address + path, timeout=TIMEOUT_S) as response:
        body: bytes = response.read()
    return body.decode()


def metrics(address: str) -> dict[str, float]:
    """Those without labels."""
    lines = [line.split() for line in text(address, "/metrics").splitlines() if line[:1] != "#"]
    return {name: float(value) for name, value in lines if "{" not in name}


@contextmanager
def long_answers(address: str, *ends: str, tokens: int = 3000) -> Iterator[None]:
    """An answer that goes on for each end of a prompt that all begin alike. All have begun; they
    are left when the block ends."""
    with ExitStack() as stack:
        for end in ends:
            body = {
                "prompt": PROMPT + end,
                "stream": True,
                "max_tokens": tokens,
                "min_tokens": tokens,
            }
            request = urllib.request.Request(
                f"{address}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            response = stack.enter_context(urllib.request.urlopen(request, timeout=TIMEOUT_S))
            while not response.readline().startswith(b"data: "):
                pass
        yield
