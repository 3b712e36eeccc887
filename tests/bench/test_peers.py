import sys
from pathlib import Path

import pytest

from tests.bench import peers
from tests.bench.load import Target
from tests.bench.peers import BrokenError, Remote, Server, find_model
from tests.bench.programs import Command
from tests.bench.small_server import small_server

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "named"}]}).encode())
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def command(tmp_path: Path, text: str) -> Command:
    file = tmp_path / "server.py"
    file.write_text(text)
    return Command("other", f"'{sys.executable}' '{file}' {{port}}")


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_a_peer_at_a_url_is_asked_for_its_models_name(end: str) -> None:
    with small_server(model="its-model") as server:
        remote = Remote.at("other", server.url + end)
        remote.check()
    assert (remote.target.path, remote.target.model) == ("/v1", "its-model")
    assert not remote.has_our_model
    with pytest.raises(BrokenError, match="other: no list of models: no answer"):
        remote.check()


@pytest.mark.parametrize("text", ["other", "other=", "other=https://127.0.0.1", "other=somewhere"])
def test_what_is_no_name_and_url_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"NAME|plain http only"):
        Remote.parse(text)
    assert Remote.parse("other=http://127.0.0.1:80/v1") == ("other", "http://127.0.0.1:80/v1")


@pytest.mark.parametrize("body", [b"", b"{}", b'{"data": []}', b"[]", b'{"data": [1]}'])
def test_a_list_of_models_that_is_none_is_said(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_get", lambda *_: (200, body))
    with pytest.raises(BrokenError, match="other: its list of models is none"):
        find_model("other", Target("127.0.0.1", 80, "/v1", ""))


def test_a_command_is_started_asked_and_ended(tmp_path: Path) -> None:
    with Server(command(tmp_path, SERVER), threads=1) as server:
        assert (server.label, server.target.model) == ("other", "named")
        assert not server.has_our_model
        server.check()
        remote = Remote.at("other", f"http://127.0.0.1:{server.port}")
    with pytest.raises(BrokenError, match="no answer"):
        remote.check()


def test_a_command_that_ends_at_once_is_broken_with_its_words(tmp_path: Path) -> None:
    failing = command(tmp_path, "import sys; sys.exit('no such model')")
    with (
        pytest.raises(BrokenError, match=r"other ended with code 1:\nno such model"),
        Server(failing, threads=1),
    ):
        pass
