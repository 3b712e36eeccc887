"""Serves the demo model and asks it something, as a client would.

    python -m tests.metal.hosted.serve_and_ask [KIND] -- COMMAND...

COMMAND starts the server without its port, e.g. ``.venv/bin/quire serve configs/demo/model``. KIND
is the Metal backend that it asks for, if it does: a device that lacks what it needs is no fault.
The exit code is 0 when the server became ready, answered twice the same, and ended cleanly.
"""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing

from tests.metal.hosted.device import lacks, may_refuse_kernels
from tests.ports import HeldPort

READY_S = 180.0
ANSWER_S = 120.0
END_S = 60.0
Judge = Callable[[str], None]
"""Asks the server at an address. Raises RuntimeError where it is not as it should be."""

QUESTION = {
    "messages": [{"role": "user", "content": "What is quire?"}],
    "temperature": 0,
    "max_tokens": 48,
}


def get(url: str, body: object = None, timeout_s: float = 5.0) -> bytes:
    """What the server answers. Raises OSError where it does not, or with an error."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        content: bytes = response.read()
    return content


def wait_until_ready(server: "subprocess.Popen[bytes]", url: str) -> None:
    """Raises RuntimeError where the server ends or takes too long."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {server.returncode}")
        try:
            get(f"{url}/ready")
        except OSError:
            time.sleep(0.25)
        else:
            return
    raise RuntimeError(f"the server was not ready after {READY_S:.0f} s")


def ask(url: str) -> str:
    """The answer's text. Raises RuntimeError where it is no answer."""
    answer = json.loads(get(f"{url}/v1/chat/completions", QUESTION, ANSWER_S))
    (choice,) = answer["choices"]
    text = str(choice["message"]["content"])
    if choice["finish_reason"] not in {"stop", "length"} or not text.strip():
        raise RuntimeError(f"no answer: {answer}")
    return text


def excuse(kind: str) -> str:
    """Why the device need not serve from a backend; "" where it must."""
    missing = lacks(kind)
    if missing:
        return "; ".join(missing)
    return "a GPU that may refuse kernels" if may_refuse_kernels() else ""


def ask_twice(url: str) -> None:
    """Raises RuntimeError where it is no answer, or not the same one."""
    first, second = ask(url), ask(url)
    print(f"it answers: {first!r}")
    if first != second:
        raise RuntimeError(f"the second answer is another one: {second!r}")


def serve_and_ask(command: list[str], excused: str = "", judge: Judge = ask_twice) -> int:
    """The exit code. excused: why the server may end by itself here."""
    with closing(HeldPort()) as held:
        command = [*command, "--port", str(held.number)]
        return _serve_and_ask(command, held.number, excused, judge)


def _serve_and_ask(command: list[str], port: int, excused: str, judge: Judge) -> int:
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(command)
    try:
        wait_until_ready(server, url)
        judge(url)
        server.send_signal(signal.SIGTERM)
        code = server.wait(END_S)
        if code != 0:
            raise RuntimeError(f"the server ended with exit code {code}")
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        # A kernel may be refused by the backend's self-test, or only by the first step.
        if excused and server.poll() is not None:
            print(f"SKIPPED: {excused}: {error}")
            return 0
        print(f"WRONG: {error}")
        return 1
    finally:
        server.kill()
        server.wait()
    print("the server was ready, answered as it should, and ended cleanly")
    return 0


if __name__ == "__main__":
    cut = sys.argv.index("--")
    sys.exit(serve_and_ask(sys.argv[cut + 1 :], excuse(sys.argv[1]) if cut == 2 else ""))
