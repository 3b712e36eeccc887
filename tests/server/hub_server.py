"""A hub on this machine: repositories with commits, and what has been fetched of them."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes | int]
"""Contents by path; a number: so many bytes are claimed, and there is nothing to fetch."""


def files_of(folder: Path) -> Files:
    """All files of a folder."""
    found = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in found}


def changed(files: Files, **changes: Any) -> Files:
    """With other fields in config.json."""
    config = files["config.json"]
    assert isinstance(config, bytes)
    return files | {"config.json": json.dumps(json.loads(config) | changes).encode()}


@dataclass
class Hub:
    """What its clients see, and what they have fetched."""

    url: str = ""
    commits: dict[str, Files] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)
    """The newest commit of every repository."""
    branches: dict[str, str] = field(default_factory=dict)
    """Other branches: the commit of ``NAME@BRANCH``."""
    gated: set[str] = field(default_factory=set)
    """Repositories whose contents nobody gets."""
    fetched: list[str] = field(default_factory=list)
    """``COMMIT/PATH`` of all contents that were sent, in order."""
    sent_bytes: dict[str, int] = field(default_factory=dict)
    """How many bytes of a path were sent."""
    lfs: bool = True
    """Whether weights are known by the checksum of their contents."""
    ranges: bool = True
    """Whether it sends a file from where it is asked to."""
    stop_at: int | None = None
    """A byte of weights where it waits until it is let go on."""
    go_on: threading.Event = field(default_factory=threading.Event)
    lie: Callable[[str, Any], Any] = lambda _, truth: truth
    """What it says instead: of a "commit", a "listing", the "head" of a file, its "contents"."""
    waits: threading.Event = field(default_factory=threading.Event)
    """Set while it waits."""

    def push(self, name: str, files: Files) -> str:
        """A new commit of a repository."""
        commit = hashlib.sha1(f"{name}{len(self.commits)}".encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.heads[name] = commit
        return commit

    def commit_of(self, name: str, revision: str) -> str | None:
        """Of a branch or a commit."""
        if revision == "main":
            return self.heads.get(name)
        return revision if revision in self.commits else self.branches.get(f"{name}@{revision}")

    def fetched_files(self) -> list[str]:
        """Their paths alone."""
        return [entry.partition("/")[2] for entry in self.fetched]


def etag(commit: str, path: str, content: bytes | int, *, lfs: bool) -> str:
    """Of large files the checksum of their contents."""
    lfs = lfs and path.endswith(".safetensors")
    if lfs and isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    if lfs:
        return hashlib.sha256(path.encode()).hexdigest()
    return hashlib.sha1(f"{commit}{path}".encode()).hexdigest()


def listing(commit: str, path: str, content: bytes | int, *, lfs: bool) -> dict[str, Any]:
    """What the hub says of a file."""
    size = content if isinstance(content, int) else len(content)
    oid = hashlib.sha1(f"{commit}{path}".encode()).hexdigest()
    found = {"type": "file", "path": path, "oid": oid, "size": size}
    if lfs and path.endswith(".safetensors"):
        checksum = etag(commit, path, content, lfs=lfs)
        found["lfs"] = {"oid": checksum, "size": size, "pointerSize": 134}
    return found


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
                self._tell("/".join(parts[2:4]), parts[4], "/".join(parts[5:]))
            elif len(parts) > 4 and parts[2] == "resolve":
                self._send_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
            else:
                self._send(404, b"")

        def _tell(self, name: str, what: str, revision: str) -> None:
            commit = hub.commit_of(name, revision)
            if name not in hub.heads or commit is None:
                code = "RevisionNotFound" if name in hub.heads else "RepoNotFound"
                self._send(404, b"{}", {"X-Error-Code": code})
            elif what == "revision":
                told = {"id": name, "sha": hub.lie("commit", commit), "siblings": []}
                self._send(200, json.dumps(told).encode())
            else:
                listed = [
                    listing(commit, path, content, lfs=hub.lfs)
                    for path, content in hub.commits[commit].items()
                ]
                self._send(200, json.dumps(hub.lie("listing", listed)).encode())

        def _send_file(self, name: str, revision: str, path: str) -> None:
            if name in hub.gated:
                self._send(403, b"", {"X-Error-Code": "GatedRepo"})
                return
            commit = hub.commit_of(name, revision)
            content = hub.commits[commit].get(path) if commit else None
            if commit is None or content is None:
                headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": str(commit)}
                self._send(404, b"", headers)
                return
            if self.command == "GET":
                hub.fetched.append(f"{commit}/{path}")
            body = b"" if isinstance(content, int) else content
            headers = {
                "ETag": f'"{etag(commit, path, content, lfs=hub.lfs)}"',
                "X-Repo-Commit": commit,
            }
            if isinstance(content, int):
                headers["X-Linked-Size"] = str(content)
            headers, body = hub.lie("head", headers), hub.lie("contents", body)
            begin = self.headers.get("Range", "")
            if hub.ranges and begin.startswith("bytes="):
                first = int(begin.removeprefix("bytes=").rstrip("-"))
                headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
                self._send(206, body[first:], headers, path)
            else:
                self._send(200, body, headers, path)

        def _send(
            self,
            status: int,
            body: bytes,
            headers: dict[str, str] | None = None,
            path: str = "",
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "GET":
                return
            if hub.stop_at is not None and path.endswith(".safetensors"):
                self._write(path, body[: hub.stop_at])
                hub.waits.set()
                hub.go_on.wait()
                body = body[hub.stop_at :]
            self._write(path, body)

        def _write(self, path: str, body: bytes) -> None:
            with suppress(ConnectionError):  # who asked may have been ended
                self.wfile.write(body)
                if path:
                    hub.sent_bytes[path] = hub.sent_bytes.get(path, 0) + len(body)

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
        hub.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()
