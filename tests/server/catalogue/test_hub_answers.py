"""A hub that says what would be written elsewhere, or never ends, is refused."""

import gzip
from pathlib import Path
from typing import Any

import httpx2
import pytest

from server.catalogue import hub as hub_module
from server.catalogue import hub_answers
from server.catalogue.hub import find_model
from server.catalogue.hub_answers import DownloadError, check_answer
from server.catalogue.names import ModelNotFoundError
from tests.server.hub_server import Files, Hub

MIB = 1 << 20
WEIGHTS, CONFIG = "model.safetensors", "config.json"


def listed(name: str, **changes: Any) -> Any:
    """A lie about a file of the listing."""
    return "listing", lambda files: [f | changes if f["path"] == name else f for f in files]


def oid(checksum: str) -> Any:
    return listed(WEIGHTS, lfs={"oid": checksum, "size": 5, "pointerSize": 9})


def head(name: str, value: str) -> Any:
    return "head", lambda headers: headers | {name: value}


LIES = {
    "a commit above": ("commit", lambda _: "../../../../outside"),
    "an absolute commit": ("commit", lambda _: "/outside"),
    "a commit in capitals": ("commit", lambda commit: commit[:-1] + "F"),
    "half a commit": ("commit", lambda commit: commit[:12]),
    "a commit and a line": ("commit", lambda commit: f"{commit}\n"),
    "no commit": ("commit", lambda _: None),
    "an absolute checksum": oid("/outside/.bash_login"),
    "a checksum above": oid("../../outside"),
    "a checksum of 63 digits": oid("a" * 63),
    "no checksum": oid(""),
    "a checksum of Git above": listed(CONFIG, oid="../../outside"),
    "a file above": listed(CONFIG, path="../../outside.json"),
    "a file above, later": listed(CONFIG, path="a/../../../outside.json"),
    "an absolute file": listed(CONFIG, path="/outside.json"),
    "a file of Windows": listed(CONFIG, path="..\\outside.json"),
    "a file of two lines": listed(CONFIG, path="a\nb.json"),
    "a file without a name": listed(CONFIG, path="a//b.json"),
    "a file of less than nothing": listed(CONFIG, size=-1),
    "a small file of 40 GB": listed(CONFIG, size=40_000_000_000),
    "a small file above the limit": listed(CONFIG, size=64 * MIB + 1),
    "contents above": head("ETag", '"../../outside"'),
    "absolute contents": head("X-Linked-Etag", '"/outside"'),
    "weak contents above": head("ETag", 'W/"../outside"'),
    "contents that are hidden": head("ETag", '".bash_login"'),
    "another commit above": head("X-Repo-Commit", "../../outside"),
    "another commit in short": head("X-Repo-Commit", "abc"),
    "more of all files": ("contents", lambda body: body + b" " * 5 * MIB),
    "a long listing": ("listing", lambda files: [{**files[0], "path": "x" * 3 * MIB}]),
}


@pytest.mark.parametrize("kind", LIES)
def test_what_a_hub_says_is_checked_before_anything_is_written_elsewhere(
    kind: str, hub: Hub, tiny_files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_answers, "MAX_LISTING_BYTES", 2 * MIB)
    what, lie = LIES[kind]
    hub.push("someone/model", tiny_files)
    hub.lie = lambda told, truth: lie(truth) if told == what else truth
    with pytest.raises(ModelNotFoundError) as error:
        find_model("someone/model").fetch_weights()
    assert isinstance(error.value.__cause__, DownloadError)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all((tmp_path / "cache") in path.resolve().parents for path in files)
    assert sum(path.stat().st_size for path in files) < 2 * MIB


@pytest.mark.parametrize("count", [1, 2, 100, 4096, 5 * MIB])
def test_weights_end_where_the_hub_said(
    count: int, hub: Hub, tiny_files: Files, tmp_path: Path
) -> None:
    hub.push("someone/model", tiny_files)
    found = find_model("someone/model")
    hub.lie = lambda told, truth: truth + b" " * count if told == "contents" else truth
    with pytest.raises(ModelNotFoundError, match=r"more arrives than the \d+ bytes that the hub"):
        found.fetch_weights()
    (file,) = found.missing
    assert file.here_bytes <= file.size_bytes


def test_small_files_count_for_the_room_on_the_disk(
    hub: Hub, tiny_files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push("someone/model", tiny_files | {"zz.json": 60 * MIB, "zy.txt": 60 * MIB})
    monkeypatch.setattr(hub_module, "free_bytes", lambda _: 100 * MIB)
    with pytest.raises(ModelNotFoundError, match=r"120\.02 MiB are to be fetched.*make room"):
        find_model("someone/model")
    assert not hub.fetched


def test_a_listing_is_not_compressed() -> None:
    request = httpx2.Request("GET", "http://hub/api/models/a/b/tree/main")
    body, how = gzip.compress(b"[]"), {"content-encoding": "gzip"}
    with pytest.raises(DownloadError, match="compressed"):
        check_answer(httpx2.Response(200, headers=how, content=body, request=request))
