import sys

import pytest

from tests.metal.hosted.serve_and_ask import BAD_SETTINGS, serve_and_ask

# A server that answers with the words that it is given, one after the other.
SERVER = """
import http.server, json, signal, sys, threading
words = sys.argv[1].split(",")

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())
    def do_GET(self):
        self.answer({})
    def do_POST(self):
        message = {"message": {"content": words.pop(0)}, "finish_reason": sys.argv[2]}
        self.answer({"choices": [message]})
    def log_message(self, *words):
        pass

server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[4])), Handler)
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
server.serve_forever()
"""


def run(words: str, reason: str = "stop") -> int:
    return serve_and_ask([sys.executable, "-c", SERVER, words, reason])


def test_a_server_that_answers_twice_the_same_and_ends_is_good() -> None:
    assert run("hello,hello") == 0


@pytest.mark.parametrize(
    ("words", "reason", "said"),
    [
        ("hello,world", "stop", "another one"),
        (" ,hello", "stop", "no answer"),
        ("hello,hello", "error", "no answer"),
    ],
)
def test_other_answers_are_wrong(
    words: str, reason: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words, reason) == 1
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "excused", "expected"),
    [(1, "", 1), (BAD_SETTINGS, "", 1), (BAD_SETTINGS, "an old GPU", 0), (1, "an old GPU", 1)],
)
def test_a_server_that_does_not_start_is_excused_only_for_what_the_device_lacks(
    code: int, excused: str, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", f"import sys; sys.exit({code})"]
    assert serve_and_ask(command, excused) == expected
    assert ("SKIPPED: an old GPU" in capsys.readouterr().out) == (expected == 0)
