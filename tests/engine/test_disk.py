"""Prefixes on disk, by whole engines one after the other."""

import errno
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from engine.messages import Abort, Stop
from engine.step.token_budget import TokenBudget
from engine.types import PrefixReport, SamplingParams, TokenEvent
from kvcache.backends.backend import file_checksum
from kvcache.block_hashes import PrefixSalt
from kvcache.manager import KVCacheManager
from kvcache.sequences import PromptBoundaries
from kvcache.stats import DiskStats, MissReason
from kvcache.tier import tier
from kvcache.tier.store import Check, ReadResult, RecordStore, System, TierLimits
from kvcache.user_folders import prefixes_folder
from tests.engines import CONFIG, built_loop, request_of, run_dry
from tests.families import GEMMA3, GPT_OSS, HYBRID, QWEN3_MOE
from tests.models import write_model

SALT = PrefixSalt(b"somebody", may_be_written=True)
PROMPT = tuple(number % 300 for number in range(203))
CACHE = replace(
    CONFIG, page_bytes=None, kv_budget_bytes=None, drafts=True, prefix_keep_s=1000.0, overlap=True
)


@pytest.fixture(autouse=True)
def slow_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiny models seem to compute slowly, or else reading them would never pay."""
    monkeypatch.setattr(TokenBudget, "seconds", lambda _, start, end: float(end - start))


@dataclass(frozen=True)
class Life:
    """What one engine answered."""

    tokens: tuple[tuple[int, ...], ...]
    prefixes: tuple[PrefixReport, ...]
    disk: DiskStats

    @property
    def cached(self) -> tuple[int, ...]:
        return tuple(prefix.cached_tokens for prefix in self.prefixes)


class Engine:
    """One life of an engine, step by step."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.events: list[TokenEvent] = []
        self.loop = built_loop(folder, replace(CACHE, **changes), self.events.extend)

    def ask(
        self, number: int, prompt: tuple[int, ...], salt: PrefixSalt = SALT, **ends: int
    ) -> None:
        params, boundaries = SamplingParams(12, temperature=0.0), PromptBoundaries(**ends)
        request = request_of(number, prompt, params, salt=salt, boundaries=boundaries)
        self.loop.mailbox.put(request)

    def run(self, *, until: Callable[[], bool]) -> None:
        """Take steps until something is so."""
        end = time.monotonic() + 20
        while not until():
            assert time.monotonic() < end, "it takes too long"
            if not self.loop.run_once():
                time.sleep(0.001)

    def tokens(self, number: int) -> tuple[int, ...]:
        mine = (each for each in self.events if each.request_id == number)
        return tuple(each.token_id for each in mine if each.token_id is not None)

    def end(self) -> Life:
        self.loop.mailbox.put(Stop())
        self.loop.run()
        self.loop.close()
        prefixes = {e.request_id: e.prefix for e in self.events if e.prefix is not None}
        numbers = sorted(prefixes)
        tokens = tuple(self.tokens(number) for number in numbers)
        return Life(tokens, tuple(prefixes[n] for n in numbers), self.loop.stats.disk)


def live(
    folder: Path,
    prompts: Iterable[tuple[int, ...]] = (PROMPT,),
    salt: PrefixSalt = SALT,
    *,
    system_end: int = 0,
    **changes: Any,
) -> Life:
    """Start an engine, let it answer prompts one after the other, and end it."""
    engine = Engine(folder, **changes)
    for number, prompt in enumerate(prompts, 1):
        engine.ask(number, prompt, salt, system_end=system_end)
        run_dry(engine.loop)
    return engine.end()


KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense with a head": {"head": "mtp"},
    "mixture": QWEN3_MOE,
    "windows": GEMMA3,
    "windows with sinks": GPT_OSS,
    "hybrid": HYBRID,
    "hybrid with a head": HYBRID | {"head": "mtp"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_outlives_its_engine(kind: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", gain=3.0, **KINDS[kind])
    first = live(folder)
    assert first.cached == (0,)
    assert first.disk.written_bytes
    second = live(folder)
    assert second.tokens == first.tokens
    size = 16
    assert len(PROMPT) - second.cached[0] <= 4 * size
    assert second.disk.read_bytes
    assert not second.disk.written_bytes, "all was written before"
    with closing(RecordStore(prefixes_folder(None), TierLimits(1 << 30))) as store:
        results = store.verify(file_checksum)
    assert results.pop(ReadResult.OK)
    assert not any(results.values()), "all kinds of records have one kind of checksum"


OTHERS: dict[str, tuple[dict[str, Any], PrefixSalt, dict[str, Any]]] = {
    "tenant": ({}, PrefixSalt(b"other", may_be_written=True), {}),
    "salt of a client": ({}, PrefixSalt(b"somebody", b"own", may_be_written=True), {}),
    "request that stays in memory": ({}, PrefixSalt(b"somebody"), {}),
    "model": ({"seed": 1}, SALT, {}),
    "RoPE": ({"rope_theta": 500.0}, SALT, {}),
    "dtype of K and V": ({}, SALT, {"kv_dtype": "bfloat16"}),
    "size of pages": ({}, SALT, {"page_bytes": 8192}),
    "instruction set": ({}, SALT, {"instruction_set": "sse2"}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_another_finds_nothing(other: str, tmp_path: Path) -> None:
    fields, salt, changes = OTHERS[other]
    assert live(write_model(tmp_path / "model", gain=3.0)).disk.written_bytes
    folder = write_model(tmp_path / "other", gain=3.0, **fields)
    second = live(folder, salt=salt, **changes)
    assert (second.cached, second.disk.read_bytes) == ((0,), 0)
    assert second.tokens == live(folder, disk_bytes=0, **changes).tokens


def test_a_request_that_stays_in_memory_is_not_written(tiny_model: Path) -> None:
    life = live(tiny_model, salt=PrefixSalt(b"somebody"))
    assert (life.disk.written_bytes, life.disk.pending_writes) == (0, 0)


@pytest.mark.parametrize("kind", ["dense", "windows", "hybrid with a head"])
def test_a_conversation_goes_on_after_a_restart(kind: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", gain=3.0, **KINDS[kind])
    first = live(folder)
    longer = (*PROMPT, *first.tokens[0], *range(50, 90))
    second = live(folder, [longer])
    assert second.cached[0] > len(PROMPT) - 32
    assert second.tokens == live(folder, [longer], disk_bytes=0).tokens


def fails(store: RecordStore, key: bytes, check: Check) -> ReadResult:
    return ReadResult.FAILED


def is_damaged(store: RecordStore, key: bytes, check: Check) -> ReadResult:
    (file,) = store._path.glob(f"records/*/{key.hex()}")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    return READ(store, key, check)


def is_gone(store: RecordStore, key: bytes, check: Check) -> ReadResult:
    for file in store._path.glob(f"records/*/{key.hex()}"):
        file.unlink()
    return READ(store, key, check)


def is_slow(store: RecordStore, key: bytes, check: Check) -> ReadResult:
    time.sleep(0.2)
    return READ(store, key, check)


READ = RecordStore.read
DISKS: dict[Callable[[RecordStore, bytes, Check], ReadResult], MissReason] = {
    fails: MissReason.DISK_FAILED,
    is_damaged: MissReason.DISK_FAILED,
    is_gone: MissReason.DISK_FAILED,
    is_slow: MissReason.DISK_LATE,
}


@pytest.mark.parametrize("kind", ["dense", "windows", "hybrid with a head"])
@pytest.mark.parametrize("disk", DISKS, ids=lambda disk: disk.__name__)
def test_a_bad_disk_costs_no_token(
    disk: Callable[[RecordStore, bytes, Check], ReadResult],
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write_model(tmp_path / "model", gain=3.0, **KINDS[kind])
    first = live(folder)
    monkeypatch.setattr(RecordStore, "read", disk)
    if disk is is_slow:
        monkeypatch.setattr(TokenBudget, "seconds", lambda _, start, end: 0.001 * (end - start))
    second = live(folder)
    assert second.tokens == first.tokens
    assert second.prefixes[0].miss is DISKS[disk]
    assert second.disk.failures > 0 or disk is is_slow


def test_where_computing_is_faster_nothing_is_read(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = live(tiny_model)
    monkeypatch.setattr(TokenBudget, "seconds", lambda _, start, end: 1e-6 * (end - start))
    second = live(tiny_model)
    assert second.tokens == first.tokens
    assert (second.prefixes[0].miss, second.disk.read_bytes) == (MissReason.DISK_SLOWER, 0)


def test_answers_go_on_and_end_while_a_disk_never_answers(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, released = live(tiny_model), threading.Event()
    monkeypatch.setattr(tier, "END_LIMIT_S", 0.05)
    monkeypatch.setattr(RecordStore, "read", lambda *_: released.wait(30) and ReadResult.FAILED)
    engine = Engine(tiny_model)
    engine.ask(1, PROMPT)
    engine.ask(2, PROMPT[1:])
    engine.run(until=lambda: len(engine.tokens(2)) == 12)
    assert not engine.tokens(1), "it waits for the disk"
    assert engine.loop.stats.disk.waiting_reads == 1
    monkeypatch.setattr(TokenBudget, "seconds", lambda _, start, end: 0.0)
    assert engine.loop._kv._tier is not None
    for wait in engine.loop._kv._tier._waits.values():
        wait.deadline_s = 0.0
    engine.run(until=lambda: len(engine.tokens(1)) == 12)
    life = engine.end()
    released.set()
    assert life.tokens[0] == first.tokens[0]
    assert life.prefixes[0].miss is MissReason.DISK_LATE


@pytest.mark.parametrize("may_end", [True, False])
def test_a_prompt_that_waits_for_memory_of_a_transfer_is_no_step_that_hangs(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, may_end: bool
) -> None:
    engine = Engine(tiny_model)
    monkeypatch.setattr(KVCacheManager, "open", lambda *_, **__: None)
    monkeypatch.setattr(KVCacheManager, "transfers_may_end", may_end)
    monkeypatch.setattr(KVCacheManager, "recovering", True)
    engine.ask(1, PROMPT)
    for _ in range(3):
        engine.loop.run_once()
    assert (engine.loop.busy_since is None) == may_end
    engine.end()


def test_prompts_with_one_prefix_read_it_once(tiny_model: Path) -> None:
    first = live(tiny_model)
    engine = Engine(tiny_model)
    for number in (1, 2, 3):
        engine.ask(number, PROMPT)
    run_dry(engine.loop)
    life = engine.end()
    assert life.tokens == first.tokens * 3
    assert life.disk.read_bytes == live(tiny_model).disk.read_bytes


@pytest.mark.parametrize("prompts", [8, 9, 10, 12, 15, 16])
def test_all_prompts_that_come_together_are_read(tiny_model: Path, prompts: int) -> None:
    several = [(number, *PROMPT[:64]) for number in range(1, 1 + prompts)]
    first = live(tiny_model, several)
    engine = Engine(tiny_model, max_num_seqs=16)
    for number, prompt in enumerate(several, 1):
        engine.ask(number, prompt)
    run_dry(engine.loop)
    life = engine.end()
    assert life.tokens == first.tokens
    assert life.cached == (64,) * prompts


def test_an_abort_ends_the_wait_for_records(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(tiny_model)
    released = threading.Event()
    monkeypatch.setattr(RecordStore, "read", lambda *_: released.wait(30) and ReadResult.FAILED)
    engine = Engine(tiny_model)
    engine.ask(1, PROMPT)
    engine.run(until=lambda: bool(engine.loop.stats.disk.waiting_reads))
    engine.loop.mailbox.put(Abort(1))
    engine.run(until=lambda: not engine.loop.stats.disk.waiting_reads)
    released.set()
    engine.run(until=lambda: not engine.loop._kv.recovering)
    assert engine.end().disk.read_bytes == 0


@pytest.mark.parametrize("kind", ["dense", "hybrid with a head"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_nothing_costs_no_token(
    kind: str, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(error, "weather")

    folder = write_model(tmp_path / "model", gain=3.0, **KINDS[kind])
    plain = live(folder, [PROMPT, PROMPT[1:], PROMPT], disk_bytes=0)
    engine = Engine(folder)
    monkeypatch.setattr(System, "fsync", staticmethod(refuse))
    for number, prompt in enumerate([PROMPT, PROMPT[1:], PROMPT], 1):
        engine.ask(number, prompt)
        run_dry(engine.loop)
    life = engine.end()
    assert life.tokens == plain.tokens
    assert life.disk.written_bytes == 0
    assert life.disk.failures == 1, "it rests after a failure"


def test_only_the_newest_end_of_a_conversation_is_written_and_only_once_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "model", gain=3.0, **HYBRID)
    engine, now = Engine(folder), [1000.0]
    written_by = engine.loop._kv._tier
    assert written_by is not None
    monkeypatch.setattr(written_by, "_clock", lambda: now[0])
    prompt = PROMPT
    for turn in range(1, 4):
        engine.ask(turn, prompt, system_end=100)
        run_dry(engine.loop)
        prompt = (*prompt, *engine.tokens(turn), *range(turn, turn + 30))
        now[0] += tier.IDLE_END_S / 2
    slot = engine.loop._kv.stats().slots.slot_bytes

    def states() -> list[int]:
        """Return the positions whose states are written."""
        engine.loop.run_once()
        engine.run(until=lambda: not written_by.is_writing(now[0]))
        return sorted(
            r.depth for r in written_by._store._books.records.values() if r.nbytes == slot
        )

    size = engine.loop.stats.kv.block_tokens  # type: ignore[union-attr]
    assert states() == [100 // size * size]
    now[0] += tier.IDLE_END_S
    assert len(states()) <= 3
    assert states()[-1] > len(PROMPT) + 60
    engine.end()
