import gzip
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from huggingface_hub import constants
from huggingface_hub.file_download import http_get

from kvcache.budget import gib
from server.catalogue import download
from server.catalogue import hub as hub_module
from server.catalogue.download import DownloadError, check_answer
from server.catalogue.hub import FoundModel, find_model
from server.catalogue.lookup import aliases
from server.catalogue.names import ModelNotFoundError
from tests.clients.servers import QUIRE
from tests.server.harness import DEADLINE_S
from tests.server.hub_server import Files, Hub

MIB = 1024**2
# What the hub's client keeps back until it writes.
CHUNK = constants.DOWNLOAD_CHUNK_SIZE


def cut(found: FoundModel, size: int, content: bytes) -> Path:
    """A download that has ended after so many bytes."""
    (file,) = found.missing
    file.part.parent.mkdir(parents=True, exist_ok=True)
    file.part.write_bytes(content[:size])
    return file.part


def weights_of(files: Files) -> bytes:
    weights = files["model.safetensors"]
    assert isinstance(weights, bytes)
    return weights


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_download_that_is_ended_at_half_goes_on_there_and_the_next_start_needs_no_network(
    hub: Hub, tiny_files: Files, tmp_path: Path, number: int
) -> None:
    size = 6 * CHUNK
    weights = weights_of(tiny_files).ljust(size, b"\0")
    hub.push("someone/model", tiny_files | {"model.safetensors": weights})
    hub.stop_at = size // 2 + MIB
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": constants.HF_HUB_CACHE}
    command = [QUIRE, "pull", "someone/model"]
    first = subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True)
    assert hub.waits.wait(DEADLINE_S)
    (file,) = find_model("someone/model").missing
    while file.here_bytes < size // 2:
        assert first.poll() is None
    first.send_signal(number)
    _, said = first.communicate(timeout=DEADLINE_S)
    assert first.returncode == -number
    kept = f"ended by Ctrl-C; {gib(file.here_bytes)} of {gib(size)} are kept, and the same command "
    assert said == (f"quire: {kept}goes on from there\n" if number == signal.SIGINT else "")
    hub.stop_at = None
    hub.go_on.set()
    hub.sent_bytes.clear()
    second = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert hub.sent_bytes["model.safetensors"] <= size // 2
    assert "It is here: `quire serve someone/model` serves it." in second.stdout
    found = find_model("someone/model")
    assert (found.folder / "model.safetensors").read_bytes() == weights
    assert not list(tmp_path.rglob("*.incomplete"))
    hub.fetched.clear()
    offline = environment | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    third = subprocess.run(command, env=offline, capture_output=True, text=True, check=True)
    assert "all of them here" in third.stdout
    assert hub.fetched == []


def test_what_has_arrived_is_not_fetched_again(
    hub: Hub, tiny_files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push("someone/model", tiny_files)
    found = find_model("someone/model")
    weights = weights_of(tiny_files)
    cut(found, 100_000, weights)
    assert found.missing_bytes == len(weights) - 100_000
    kept = list[str]()

    @contextmanager
    def heard(sentence: Callable[[], str]) -> Iterator[None]:
        kept.append(sentence())
        yield

    monkeypatch.setattr(download, "interrupt_says", heard)
    found.fetch_weights()
    size = gib(len(weights))
    assert kept[0].startswith(f"ended by Ctrl-C; {gib(100_000)} of {size} are kept, and the same")
    assert hub.sent_bytes["model.safetensors"] == len(weights) - 100_000
    assert find_model("someone/model").missing == ()


@pytest.mark.parametrize("size", [1000, None])
def test_a_hub_that_sends_no_ranges_sends_it_from_the_beginning(
    size: int | None, hub: Hub, tiny_files: Files
) -> None:
    hub.push("someone/model", tiny_files)
    hub.ranges = False
    found = find_model("someone/model")
    weights = weights_of(tiny_files)
    cut(found, len(weights) if size is None else size, weights)
    found.fetch_weights()
    assert (found.folder / "model.safetensors").read_bytes() == weights


def test_a_part_that_is_too_long_is_begun_anew(hub: Hub, tiny_files: Files) -> None:
    hub.push("someone/model", tiny_files)
    found = find_model("someone/model")
    part = cut(found, 0, b"")
    part.write_bytes(b"x" * (len(weights_of(tiny_files)) + 1))
    found.fetch_weights()
    assert (found.folder / "model.safetensors").read_bytes() == weights_of(tiny_files)


def test_what_does_not_fit_together_is_removed_and_said(hub: Hub, tiny_files: Files) -> None:
    hub.push("someone/model", tiny_files)
    found = find_model("someone/model")
    part = cut(found, 1000, b"other bytes" * 1000)
    with pytest.raises(ModelNotFoundError, match="has another checksum than the hub says, and was"):
        found.fetch_weights()
    assert not part.exists()
    assert find_model("someone/model").missing
    find_model("someone/model").fetch_weights()


def test_weights_that_are_known_by_another_checksum_are_fetched(
    hub: Hub, tiny_files: Files
) -> None:
    hub.push("someone/model", tiny_files)
    hub.lfs = False
    found = find_model("someone/model")
    cut(found, 1000, weights_of(tiny_files))
    found.fetch_weights()
    assert hub.sent_bytes["model.safetensors"] == len(weights_of(tiny_files)) - 1000
    assert (found.folder / "model.safetensors").read_bytes() == weights_of(tiny_files)


def test_contents_that_another_commit_has_are_only_linked(hub: Hub, tiny_files: Files) -> None:
    hub.push("someone/model", tiny_files)
    find_model("someone/model").fetch_weights()
    hub.push("someone/model", tiny_files | {"README.md": b"more words"})
    hub.sent_bytes.clear()
    found = find_model("someone/model")
    assert (len(found.missing), found.missing_bytes) == (1, 0)
    found.fetch_weights()
    assert "model.safetensors" not in hub.sent_bytes
    assert (found.folder / "model.safetensors").exists()


def test_where_one_file_fails_the_others_end_and_what_has_arrived_stays(
    hub: Hub, tiny_files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards: Files = {f"model-{i}.safetensors": bytes([i]) * 10_000 for i in range(3)}
    hub.push("someone/model", {"config.json": tiny_files["config.json"]} | shards)
    found = find_model("someone/model")
    monkeypatch.setattr(download, "FILES_AT_ONCE", 1)
    calls: list[str] = []

    def failing(url: str, *arguments: object, **named: object) -> None:
        calls.append(url)
        if len(calls) == 2:
            raise OSError("No space left on device")
        http_get(url, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(download, "http_get", failing)
    with pytest.raises(ModelNotFoundError, match="No space left on device"):
        found.fetch_weights()
    assert len(find_model("someone/model").missing) == 2
    monkeypatch.setattr(download, "http_get", http_get)
    hub.sent_bytes.clear()
    found.fetch_weights()
    assert sum(hub.sent_bytes.values()) == 20_000


def test_a_file_that_goes_on_while_another_has_failed_is_ended(
    hub: Hub, tiny_files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push("someone/model", {
        "config.json": tiny_files["config.json"],
        "model-00001-of-00002.safetensors": b"1" * 100,
        "model-00002-of-00002.safetensors": b"2" * 100,
    })  # fmt: skip
    both, ended = threading.Barrier(2), list[str]()

    def fails_or_goes_on(*_: object, tqdm_class: Any, **__: object) -> None:
        bar = tqdm_class()
        if both.wait(DEADLINE_S):
            raise OSError("No space left on device")
        try:
            while True:
                bar.update(0)
        except DownloadError as error:
            ended.append(str(error))
            raise

    monkeypatch.setattr(download, "http_get", fails_or_goes_on)
    with pytest.raises(ModelNotFoundError, match="No space left on device"):
        find_model("someone/model").fetch_weights()
    assert ended == ["another file has failed"]


def test_a_disk_that_is_too_small_is_said_before_the_first_byte(
    hub: Hub, tiny_files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push("someone/model", tiny_files)
    found = find_model("someone/model")
    monkeypatch.setattr(hub_module, "free_bytes", lambda _: 1000)
    with pytest.raises(ModelNotFoundError, match=r"the disk of .* has 1000 bytes left: make room"):
        found.fetch_weights()
    assert "model.safetensors" not in hub.fetched_files()


# --- revisions -----------------------------------------------------------------------------------


def test_a_pin_is_a_branch_or_a_commit(hub: Hub, tiny_files: Files) -> None:
    old = hub.push("someone/model", tiny_files | {"README.md": b"old"})
    branch = hub.push("someone/model", tiny_files | {"README.md": b"branch"})
    main = hub.push("someone/model", tiny_files)
    hub.branches["someone/model@dev/4-bit"] = branch
    for pin, commit in (("", main), (f"@{old}", old), ("@dev/4-bit", branch), ("@main", main)):
        found = find_model(f"someone/model{pin}")
        assert (found.folder.name, found.name) == (commit, "someone/model")
    find_model(f"someone/model@{old}").fetch_weights()
    assert find_model(f"someone/model@{old}").missing == ()
    with pytest.raises(ModelNotFoundError, match="has no such branch, tag or commit: see http"):
        find_model("someone/model@nowhere")


def test_a_download_that_has_not_ended_takes_nothing_from_who_is_offline(
    hub: Hub, tiny_files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = hub.push("someone/model", tiny_files)
    find_model("someone/model").fetch_weights()
    refs = Path(constants.HF_HUB_CACHE) / "models--someone--model/refs/main"
    assert refs.read_text() == old
    weights = weights_of(tiny_files)[:-8] + b"newer..."
    new = hub.push("someone/model", tiny_files | {"model.safetensors": weights})
    found = find_model("someone/model")
    assert found.folder.name == new
    assert refs.read_text() == old
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert find_model("someone/model").folder.name == old
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    found.fetch_weights()
    assert refs.read_text() == new
    found.follow_branch()


def test_a_cache_that_may_only_be_read_is_no_error(
    hub: Hub, tiny_files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push("someone/model", tiny_files)
    found = find_model("someone/model")

    def read_only(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", read_only)
    found.follow_branch()


# --- refusals ------------------------------------------------------------------------------------


def test_weights_are_refused_offline_and_the_small_files_too(
    hub: Hub, tiny_files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push("someone/model", tiny_files)
    found = find_model("someone/model", files=["config.json"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE is set: unset it to download"):
        found.fetch_weights()
    with pytest.raises(ModelNotFoundError, match="not all of it is in"):
        found.fetch_small_files()


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("someone/nothing", "someone/nothing: "),
        ("someone/nothing@v2", "someone/nothing@v2: "),
        *[
            (short, f"{short} ({aliases()[short]}): ")
            for short in ("qwen3:0.6b", "qwen3:4b", "qwen3-coder-next", "llama3.2:1b", "qwen2.5:7b")
        ],
    ],
)
def test_a_repository_that_is_not_there_is_named_and_may_be_private(
    hub: Hub, name: str, start: str
) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        find_model(name)
    assert str(caught.value).startswith(start)
    assert re.search("does not have it, or it is private: .*HF_TOKEN", str(caught.value))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("nobody/zero", ""),
        ("mlx-comunity/Qwen3-4B-4bit", "mlx-community/Qwen3-4B-4bit"),
        ("mlx-community/Qwen38-27B-4bit", "mlx-community/Qwen3.8-27B-4bit"),
        ("mlx-community/qwen3-4b", "mlx-community/Qwen3-4B-4bit"),
        ("quen/qwen3-embedding-0.6b", "Qwen/Qwen3-Embedding-0.6B"),
        ("someone/model", "someone/models"),
    ],
)
def test_a_repository_that_is_not_there_may_be_private_or_misspelt(
    name: str, near: str, hub: Hub
) -> None:
    hub.push("someone/models", {"config.json": b"{}", "model.safetensors": b""})
    find_model("someone/models")
    with pytest.raises(ModelNotFoundError) as caught:
        find_model(name)
    assert re.search("does not have it, or it is private: .*HF_TOKEN", str(caught.value))
    assert str(caught.value).endswith(f"; did you mean {near}?" if near else "`hf auth login`")


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
    "a head above": listed(CONFIG, path="mtp/../../../outside/mtp.safetensors"),
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
    monkeypatch.setattr(download, "MAX_LISTING_BYTES", 2 * MIB)
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
