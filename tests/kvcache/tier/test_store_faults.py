"""Whatever is killed, fails or is damaged, no wrong bytes are read, and the books are exact."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kvcache.tier import index
from kvcache.tier import store as product
from kvcache.tier.index import LAYOUT
from kvcache.tier.store import REST_S, ReadResult, RecordStore, System, WriteFailure
from tests.kvcache.tier.records import (
    FAILING,
    NBYTES,
    ROOMY,
    SMALL,
    Clock,
    FailingSystem,
    books_are_exact,
    check,
    files,
    fill,
    kept,
    key,
    path_of,
    read,
    record,
    write,
)

ROOT = Path(__file__).parents[3]
LATER_S = 7200.0


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.kvcache.tier.records", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_writer_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    output, _ = start("kill", tmp_path / "tier", 200, 1).communicate(timeout=120)
    assert int(output) > 20, "kills in the midst of a batch leave garbage"


def test_processes_share_a_folder_and_a_bound(tmp_path: Path) -> None:
    store = RecordStore(tmp_path, SMALL)
    writers = [start("write", tmp_path, first, 60) for first in (0, 500)]
    while any(writer.poll() is None for writer in writers):
        store.refresh()
        assert store.summary().held_bytes <= SMALL.held
        for one in list(store._books.records):
            assert store.read(one, check) in (ReadResult.OK, ReadResult.GONE)
    assert [writer.wait() for writer in writers] == [0, 0]
    for writer in writers:
        writer.communicate()
    store.refresh()
    assert store.summary().hour_bytes == 2 * 120 * NBYTES
    books_are_exact(store, tmp_path)


def live(folder: Path, system: FailingSystem, clock: Clock) -> list[RecordStore]:
    """A small life with all that can fail, in which the first failure is the system's."""
    opened: list[RecordStore] = []
    with suppress(OSError):
        store = RecordStore(folder, SMALL, clock=clock, system=system)
        opened.append(store)
        write(store, *map(record, range(4)))
        store.use([key(2)])
        write(store, *map(record, range(4, 13)))
        clock.now += REST_S
        path_of(folder, 12).write_bytes(b"x") if path_of(folder, 12).exists() else None
        read(store, 12)
        read(store, 3)
        write(store, *(record(n, tenant=b"u" * 16) for n in (20, 21)))
        store.name_model(b"m" * 16, "model")
        store.refresh()
        store.clear(tenant=b"u" * 16)
    return opened


@pytest.mark.parametrize("kind", FAILING)
def test_a_first_opening_may_end_at_any_call(tmp_path: Path, kind: str) -> None:
    for n in range(1000):
        folder, system = tmp_path / str(n), FailingSystem()
        system.fail(kind, n, stays=True)
        with suppress(OSError):
            RecordStore(folder, SMALL, system=system).close()
        again = RecordStore(folder, SMALL)
        assert write(again, record(1)) == NBYTES
        again.close()
        if not system.has_failed:
            break


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("kind", FAILING)
def test_any_call_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, stays: bool
) -> None:
    monkeypatch.setattr(index, "COMPACT_ENTRIES", 12)
    for n in range(1000):
        folder, system, clock = tmp_path / str(n), FailingSystem(), Clock(time.time())
        # A torn tail of an earlier life, so that something is cut.
        write(RecordStore(folder, SMALL, clock=clock, system=system), record(30), record(31))
        with (folder / "index").open("ab") as file:
            file.write(b"torn")
        system.fail(kind, n, stays=stays)
        opened = live(folder, system, clock)
        if not system.has_failed:
            break
        system.fail("", 0)
        clock.now += LATER_S
        for store in opened:
            store.refresh()
            store.read(key(12), check)  # it was damaged, which a failure may have hidden
            for one in list(store._books.records):
                assert store.read(one, check) is ReadResult.OK
            assert write(store, record(40)) == NBYTES
            assert read(store, 40) is ReadResult.OK
            store.close()
        again = RecordStore(folder, SMALL, clock=clock, system=system)
        again.read(key(12), check)
        books_are_exact(again, folder)
        again.close()
    assert n > 0, "something has failed"


def test_a_failed_write_leaves_nothing_and_rests(tmp_path: Path) -> None:
    clock = Clock(time.time())
    store = RecordStore(tmp_path, ROOMY, clock=clock)
    write(store, record(1))

    def is_full(file: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    failure = store.write([(record(2), fill(record(2))), (record(3), is_full)])
    assert isinstance(failure, WriteFailure)
    assert "No space left" in failure.reason
    assert str(tmp_path) in failure.reason
    books_are_exact(store, tmp_path)
    clock.now += REST_S / 2
    assert store.delay_of_write(1) == failure.delay_s / 2 == REST_S / 2
    assert isinstance(write(store, record(2)), WriteFailure)
    assert read(store, 1) is ReadResult.OK
    clock.now += REST_S / 2
    assert write(store, record(2)) == NBYTES
    clock.now -= 10 * REST_S
    assert store.delay_of_write(1) == 0, "a clock that jumps back does not prolong a rest"


@pytest.mark.parametrize("kind", ["", "write", "fsync", "flock", "open"])
@pytest.mark.parametrize("filled", [0, 1, 4])
@pytest.mark.parametrize("before", [0, 2])
def test_what_a_failed_batch_has_filled_counts_as_written(
    tmp_path: Path, kind: str, filled: int, before: int
) -> None:
    """The index takes an entry of it, or the process counts it alone."""
    clock, system = Clock(time.time()), FailingSystem()
    store = RecordStore(tmp_path, ROOMY, clock=clock, system=system)
    write(store, *map(record, range(100, 100 + before)))

    def fail(file: int) -> int:
        os.write(file, b"half")
        system.fail(kind, 0, stays=True)
        raise OSError(errno.ENOSPC, "No space left on device")

    expected = before * NBYTES
    for first in range(0, 50, 10):
        batch = [(one, fill(one)) for one in map(record, range(first, first + filled))]
        result = store.write([*batch, (record(99), fail)])
        assert isinstance(result, WriteFailure)
        assert "No space left" in result.reason
        system.fail("", 0)
        clock.now += REST_S
        # An entry that was not synced may stand all the same.
        expected += (filled * NBYTES + 4) * (2 if kind == "fsync" else 1)
        assert store.summary().hour_bytes == expected
    books_are_exact(store, tmp_path) if kind in ("", "write", "fsync") else None
    again = RecordStore(tmp_path, ROOMY, clock=clock)
    if kind == "":
        assert again.summary().hour_bytes == expected
    write(again, record(1))
    with again._locked():
        again._replace_index((tmp_path / "index").read_bytes())
    assert store.summary().hour_bytes == expected + NBYTES, "a new index makes it forget nothing"


def test_a_reading_that_the_system_refuses_fails_and_keeps_the_record(tmp_path: Path) -> None:
    system = FailingSystem()
    store = RecordStore(tmp_path, ROOMY, system=system)
    write(store, record(1))
    system.fail("open", 0, errno.EMFILE)
    assert read(store, 1) is ReadResult.FAILED
    assert read(store, 1) is ReadResult.OK


@pytest.mark.parametrize("harm", ["random", "zeros", "text", "torn", "none", "no lock"])
def test_a_folder_of_ours_is_used_whatever_its_index_has(tmp_path: Path, harm: str) -> None:
    few(tmp_path)
    (tmp_path / "notes.txt").write_text("of the user")
    index = tmp_path / "index"
    match harm:
        case "none":
            index.unlink()
        case "no lock":
            (tmp_path / "lock").unlink()
        case _:
            other = {"random": bytes(range(256)) * 9, "zeros": bytes(999), "torn": b"x"}
            index.write_bytes(other.get(harm, b"an index of songs\n" * 99))
    store = RecordStore(tmp_path, ROOMY)
    assert write(store, record(9)) == NBYTES
    assert read(store, 9) is ReadResult.OK
    store.close()
    assert (tmp_path / "notes.txt").read_text() == "of the user"


def few(folder: Path) -> bytes:
    """Return an index of four entries: three records, of which one is removed."""
    store = RecordStore(folder, ROOMY, system=FailingSystem())
    write(store, *map(record, range(3)))
    store._remove([record(1)])
    store.close()
    return (folder / "index").read_bytes()


def test_any_byte_of_the_index_may_be_flipped(tmp_path: Path) -> None:
    data = few(tmp_path)
    assert len(data) == 4 * LAYOUT.size
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 0x10
        (tmp_path / "index").write_bytes(flipped)
        store = RecordStore(tmp_path, ROOMY, system=FailingSystem())
        entry = place // LAYOUT.size
        left = set(kept(store, range(3)))
        assert left == {0: {2}, 1: {0, 2}, 2: {0}, 3: {0, 1, 2}}[entry]
        for number in left:
            expected = ReadResult.GONE if number == 1 else ReadResult.OK
            assert read(store, number) is expected
        store.close()


def test_a_torn_tail_of_any_length_is_cut(tmp_path: Path) -> None:
    data = few(tmp_path)
    for length in range(len(data)):
        (tmp_path / "index").write_bytes(data[:length])
        store = RecordStore(tmp_path, ROOMY, system=FailingSystem())
        whole = length // LAYOUT.size
        assert kept(store, range(3)) == list(range(whole))
        assert (tmp_path / "index").stat().st_size == whole * LAYOUT.size
        write(store, record(9))
        store.close()
        again = RecordStore(tmp_path, ROOMY, system=FailingSystem())
        assert read(again, 9) is ReadResult.OK
        again.close()


def test_an_index_of_another_format_is_emptied_with_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few(tmp_path)
    monkeypatch.setattr(index, "FORMAT", 2)
    store = RecordStore(tmp_path, ROOMY)
    assert kept(store, range(3)) == []
    books_are_exact(store, tmp_path)
    assert write(store, record(1)) == NBYTES
    books_are_exact(RecordStore(tmp_path, ROOMY), tmp_path)


def test_old_garbage_goes_when_a_store_opens(tmp_path: Path) -> None:
    clock = Clock(time.time())
    store = RecordStore(tmp_path, ROOMY, clock=clock)
    write(store, record(1))
    garbage = path_of(tmp_path, 1).with_name(key(1).hex()[:2] + 62 * "0")
    garbage.write_bytes(b"text")
    clock.now += 3500
    RecordStore(tmp_path, ROOMY, clock=clock).close()
    assert garbage.exists()
    clock.now += 200
    (tmp_path / "records" / "stray").write_bytes(b"no folder")
    RecordStore(tmp_path, ROOMY, clock=clock).close()
    (tmp_path / "records" / "stray").unlink()
    books_are_exact(store, tmp_path)


def test_a_file_that_is_being_filled_is_nobodys_garbage(tmp_path: Path) -> None:
    """Others open the folder, clear it, and write the same record."""
    clock = Clock(time.time())
    store = RecordStore(tmp_path, ROOMY, clock=clock)
    write(store, record(2))

    def slowly(file: int) -> int:
        other = RecordStore(tmp_path, ROOMY, clock=Clock(clock.now + LATER_S))
        assert other.clear() == (1, NBYTES)
        assert write(other, record(1)) == 0
        other.close()
        return fill(record(1))(file)

    assert store.write([(record(1), slowly)]) == NBYTES
    assert kept(store, range(9)) == [1]
    books_are_exact(store, tmp_path)


def test_the_bound_holds_where_others_write_meanwhile(tmp_path: Path) -> None:
    store, other = (RecordStore(tmp_path, SMALL) for _ in range(2))
    write(store, *map(record, range(8)))

    def slowly(file: int) -> int:
        assert write(other, record(20), record(21)) == 2 * NBYTES
        return fill(record(30))(file)

    assert store.write([(record(30), slowly)]) == NBYTES
    assert store.summary().held_bytes == SMALL.held
    books_are_exact(store, tmp_path)


def test_what_another_process_has_mended_is_not_removed(tmp_path: Path) -> None:
    """A reader meets the damage after the record was written anew, with another checksum."""
    reader, writer = (RecordStore(tmp_path, ROOMY) for _ in range(2))
    write(writer, record(1))
    reader.refresh()
    writer.clear()
    assert writer.write([(record(1, depth=5), fill(record(1)))]) == NBYTES
    assert reader.read(key(1), lambda file, nbytes: 0) is ReadResult.BROKEN
    assert kept(reader, range(3)) == [1]
    books_are_exact(reader, tmp_path)


def test_a_leftover_without_an_entry_is_written_over(tmp_path: Path) -> None:
    store = RecordStore(tmp_path, ROOMY)
    write(store, record(1))
    (tmp_path / "index").write_bytes(b"")
    store.refresh()
    assert kept(store, range(3)) == []
    assert files(tmp_path) != {}
    assert write(store, record(1)) == NBYTES
    books_are_exact(store, tmp_path)


def test_threads_share_a_store(tmp_path: Path) -> None:
    store, errors = RecordStore(tmp_path, SMALL), list[object]()

    def work(first: int) -> None:
        for number in range(first, first + 15):
            if not isinstance(write(store, record(number), record(number + 10)), int):
                errors.append(number)
            store.use([key(number)])
            if read(store, number) not in (ReadResult.OK, ReadResult.GONE):
                errors.append(number)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 5, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    books_are_exact(store, tmp_path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("n", [0, 1])
def test_records_can_be_removed_from_a_full_disk(tmp_path: Path, code: int, n: int) -> None:
    """An entry that says so finds room once their files are gone."""
    system = FailingSystem()
    store = RecordStore(tmp_path, SMALL, system=system)
    write(store, *map(record, range(10)))
    system.fail(("write", "fsync")[n], 0, code)
    assert store.clear() == (10, 10 * NBYTES)
    assert system.has_failed
    assert not files(tmp_path)
    books_are_exact(store, tmp_path)
    write(store, record(1))
    system.fail("write", 0, errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        store.clear()


def test_a_lock_that_another_process_keeps_is_waited_for_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "LOCK_LIMIT_S", 0.02)
    store = RecordStore(tmp_path, ROOMY)
    write(store, record(1))
    with (tmp_path / "lock").open() as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="has held its lock for"):
            RecordStore(tmp_path, ROOMY)
        result = write(store, record(2))
        assert isinstance(result, WriteFailure)
        assert "another process has held its lock" in result.reason
        assert read(store, 1) is ReadResult.OK, "reading needs no lock"
        store.use([key(1)])
        store.close()
    books_are_exact(RecordStore(tmp_path, ROOMY), tmp_path)


@pytest.mark.parametrize("how", ["removed", "renamed", "emptied", "a file", "no lock"])
@pytest.mark.parametrize("is_used_again", [True, False])
def test_a_folder_that_was_removed_meanwhile_keeps_nothing_and_harms_no_newcomer(
    tmp_path: Path, how: str, is_used_again: bool
) -> None:
    folder = tmp_path / "tier"
    store = RecordStore(folder, ROOMY)
    write(store, *map(record, range(4)))
    if how == "emptied":
        shutil.rmtree(folder / "records")
        for each in list(folder.iterdir()):
            each.unlink()
    elif how == "no lock":
        (folder / "lock").unlink()
    else:
        folder.rename(tmp_path / "away")
        if how == "a file":
            folder.touch()
    newcomer = None
    if is_used_again and how != "a file":
        newcomer = RecordStore(folder, ROOMY)
        write(newcomer, *map(record, range(6)))
    result = write(store, record(8))
    assert isinstance(result, WriteFailure)
    assert "the folder was removed: start again to use a new one" in result.reason
    assert kept(store, range(9)) == []
    assert read(store, 1) is ReadResult.GONE
    store.close()
    if newcomer is not None:
        assert kept(newcomer, range(9)) == list(range(6))
        books_are_exact(newcomer, folder)


def test_a_folder_that_comes_back_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    store = RecordStore(folder, ROOMY)
    write(store, *map(record, range(4)))
    folder.rename(tmp_path / "away")
    store.refresh()
    assert kept(store, range(9)) == []
    (tmp_path / "away").rename(folder)
    store.refresh()
    assert kept(store, range(9)) == list(range(4))
    books_are_exact(store, folder)


def test_records_are_found_while_a_new_index_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "COMPACT_ENTRIES", 10)
    system, seen = System(), list[list[int]]()
    store, other = RecordStore(tmp_path, ROOMY, system=system), RecordStore(tmp_path, ROOMY)
    write(other, *map(record, range(3)))
    store.refresh()
    for _ in range(8):
        other.use([key(1)])
        write(other, record(9, model=b"o" * 16))
        other.clear(b"o" * 16)

    def look(*arguments: int) -> bytes:
        seen.append(kept(store, range(9)))
        return os.pread(*arguments)

    vars(system).update(pread=look)
    store.refresh()
    assert seen
    assert all(each == [0, 1, 2] for each in seen)
    books_are_exact(store, tmp_path)
