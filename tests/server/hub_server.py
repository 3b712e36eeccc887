"""A hub on this machine: repositories with commits, and what has been fetched of them."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes | int]
"""Contents by path; a number: so many bytes are claimed, and there is nothing to fetch."""


def files_of(folder: Path) -> Files:
    """All files of a folder."""
    found = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in found}


@dataclass
class Hub:
    """What its clients see, and what they have fetched."""

    url: str = ""
    commits: dict[str, Files] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)
    """The newest commit of every repository."""
    fetched: list[str] = field(default_factory=list)
    """``COMMIT/PATH`` of all contents that were sent, in order."""

    def push(self, name: str, files: Files) -> str:
        """A new commit of a repository."""
        commit = hashlib.sha1(f"{name}{len(self.commits)}".encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.heads[name] = commit
        return commit

    def fetched_files(self) -> list[str]:
        """Their paths alone."""
        return [entry.partition("/")[2] for entry in self.fetched]


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """Until the block ends."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self._tell(hub.heads.get("/".join(parts[2:4])), parts[4])
            elif len(parts) > 4 and parts[2] == "resolve":
                commit = hub.heads["/".join(parts[:2])] if parts[3] == "main" else parts[3]
                self._send_file(commit, "/".join(parts[4:]))
            else:
                self._send(404, b"")

        def _tell(self, commit: str | None, what: str) -> None:
            if commit is None:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif what == "revision":
                self._send(200, json.dumps({"id": "x/y", "sha": commit, "siblings": []}).encode())
            else:
                listed = [
                    {
                        "type": "file",
                        "path": path,
                        "oid": hashlib.sha1(f"{commit}{path}".encode()).hexdigest(),
                        "size": content if isinstance(content, int) else len(content),
                    }
                    for path, content in hub.commits[commit].items()
                ]
                self._send(200, json.dumps(listed).encode())

        def _send_file(self, commit: str, path: str) -> None:
            content = hub.commits[commit].get(path)
            if content is None:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
                return
            if self.command == "GET":
                hub.fetched.append(f"{commit}/{path}")
            body = b"" if isinstance(content, int) else content
            etag = hashlib.sha1(f"{commit}{path}".encode()).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit}
            if isinstance(content, int):
                headers["X-Linked-Size"] = str(content)
            self._send(200, body, headers)

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
