"""What a folder of records keeps, refuses, evicts and gives back."""

import errno
import math
import os
import random
import shutil
import stat
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvcache.tier import index
from kvcache.tier import store as product
from kvcache.tier.index import DAY_S, HOUR_S, LAYOUT, SLOT_S, Record
from kvcache.tier.store import (
    ModelSummary,
    ReadResult,
    RecordStore,
    System,
    TierLimits,
    WriteFailure,
    usual_held_bytes,
)
from tests.kvcache.tier.records import (
    NBYTES,
    ROOMY,
    Clock,
    FailingSystem,
    books_are_exact,
    check,
    files,
    kept,
    key,
    path_of,
    read,
    record,
    write,
)


def test_records_are_found_and_read_after_a_restart(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "deep" / "tier", ROOMY)
    assert write(store, *map(record, range(5))) == 5 * NBYTES
    assert write(store, *map(record, range(7))) == 2 * NBYTES
    assert read(store, 9) is ReadResult.GONE
    store.close()
    store.close()
    again = RecordStore(tmp_path / "deep" / "tier", ROOMY)
    assert kept(again, range(9)) == list(range(7))
    one = again.find(key(3))
    assert one is not None
    assert replace(one, checksum=0) == record(3)
    books_are_exact(again, tmp_path / "deep" / "tier")
    again.close()


def test_a_broken_record_reads_as_broken_whichever_byte_it_is_and_is_gone(tmp_path: Path) -> None:
    store = RecordStore(tmp_path, ROOMY)
    for place in range(NBYTES):
        write(store, record(1), record(2))
        path = path_of(tmp_path, 1)
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        assert read(store, 1) is ReadResult.BROKEN
        assert not path.exists()
        assert read(store, 1) is ReadResult.GONE
        books_are_exact(store, tmp_path)


@pytest.mark.parametrize("how", ["shorter", "longer", "a link"])
def test_a_record_whose_file_is_another_is_broken(tmp_path: Path, how: str) -> None:
    store = RecordStore(tmp_path / "tier", ROOMY)
    write(store, record(1))
    path = path_of(tmp_path / "tier", 1)
    data = path.read_bytes()
    if how == "a link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.write_bytes(data[:-1] if how == "shorter" else data + b"x")
    assert read(store, 1) is ReadResult.BROKEN
    assert not path.is_symlink()
    books_are_exact(store, tmp_path / "tier")


def test_a_record_without_its_file_is_gone(tmp_path: Path) -> None:
    store = RecordStore(tmp_path, ROOMY)
    write(store, record(1), record(2))
    path_of(tmp_path, 1).unlink()
    assert read(store, 1) is ReadResult.GONE
    assert store.find(key(1)) is None
    books_are_exact(store, tmp_path)


def test_what_saves_least_per_byte_and_age_is_evicted_and_of_equals_the_deepest(
    tmp_path: Path,
) -> None:
    clock = Clock()
    store = RecordStore(tmp_path, TierLimits(held=6 * NBYTES), clock=clock)
    write(store, *(record(n, depth=n) for n in (1, 3, 2)))
    write(store, record(4, saves_s=0.1), record(5, saves_s=0.2), record(6, saves_s=5.0))
    clock.now += 100
    store.use([key(4), key(99)])
    gone = []
    for number in range(10, 16):
        before = kept(store, range(10))
        assert write(store, record(number, saves_s=50.0)) == NBYTES
        gone += sorted(set(before) - set(kept(store, range(10))))
        books_are_exact(store, tmp_path)
    assert gone == [5, 3, 2, 1, 6, 4]
    assert kept(store, range(10, 16)) == list(range(10, 16))


@pytest.mark.parametrize("ahead_s", [60.0, HOUR_S, DAY_S, 30 * DAY_S, 1e9])
def test_what_a_clock_ahead_of_time_wrote_is_no_younger_than_all_else(
    tmp_path: Path, ahead_s: float
) -> None:
    clock = Clock()
    clock.now += ahead_s
    store = RecordStore(tmp_path, TierLimits(held=4 * NBYTES), clock=clock)
    write(store, record(1))
    clock.now -= ahead_s
    write(store, record(2), record(3), record(4))
    write(store, record(5))
    assert kept(store, range(9)) == [2, 3, 4, 5]


@pytest.mark.parametrize("most", [0, 1, 3, 9, 10, 11])
def test_a_bound_that_was_lowered_holds_before_the_next_write(tmp_path: Path, most: int) -> None:
    limits = TierLimits(most * NBYTES, per_hour=0)
    writer = RecordStore(tmp_path, ROOMY)
    write(writer, *map(record, range(10)))
    store = RecordStore(tmp_path, limits)
    assert store.summary().held_bytes == 10 * NBYTES, "looking removes nothing"
    store.shrink()
    assert store.held_bytes == min(most, 10) * NBYTES
    writer.refresh()
    books_are_exact(writer, tmp_path)


def test_uses_outlive_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    store = RecordStore(tmp_path, TierLimits(held=2 * NBYTES), clock=clock)
    write(store, record(1, depth=1), record(2))
    clock.now += 10
    store.use([key(1)])
    store.close()
    store = RecordStore(tmp_path, TierLimits(held=2 * NBYTES), clock=clock)
    write(store, record(3))
    assert kept(store, range(4)) == [1, 3]


@pytest.mark.parametrize(
    ("model", "tenant", "left"),
    [
        (None, None, []),
        (b"a" * 16, None, [3, 4]),
        (None, b"x" * 16, [2, 4]),
        (b"a" * 16, b"x" * 16, [2, 3, 4]),
    ],
)
def test_clear_takes_all_or_those_of_a_model_or_a_tenant(
    tmp_path: Path, model: bytes | None, tenant: bytes | None, left: list[int]
) -> None:
    store = RecordStore(tmp_path, ROOMY)
    tags = {1: (b"a", b"x"), 2: (b"a", b"y"), 3: (b"b", b"x"), 4: (b"b", b"y")}
    for number, (of, whose) in tags.items():
        write(store, record(number, model=of * 16, tenant=whose * 16))
    gone = 4 - len(left)
    assert store.clear(model, tenant) == (gone, gone * NBYTES)
    assert kept(store, range(9)) == left
    books_are_exact(store, tmp_path)
    assert kept(RecordStore(tmp_path, ROOMY), range(9)) == left


def test_clearing_all_takes_garbage_along(tmp_path: Path) -> None:
    store = RecordStore(tmp_path, ROOMY)
    write(store, record(1))
    shelf = path_of(tmp_path, 1).parent
    (shelf / (shelf.name + 62 * "0")).write_bytes(b"text")
    store.clear()
    assert files(tmp_path) == {}


@pytest.mark.parametrize("records", [0, 1, 2, 5, 40])
def test_clearing_all_leaves_sums_and_the_names_of_running_servers(
    tmp_path: Path, records: int
) -> None:
    running, other = RecordStore(tmp_path, ROOMY), RecordStore(tmp_path, ROOMY)
    running.name_model(b"m" * 16, "running")
    other.name_model(b"o" * 16, "secret")
    other.close()
    write(running, *map(record, range(records)))
    (tmp_path / "notes.txt").write_text("of the user")
    store = RecordStore(tmp_path, ROOMY)
    store.clear()
    names = {each.name for each in tmp_path.iterdir()}
    assert names == {"index", "lock", "records", "notes.txt"}
    assert (tmp_path / "index").stat().st_size == LAYOUT.size * (records > 0)
    assert store.summary().hour_bytes == records * NBYTES
    assert write(running, record(1)) == NBYTES
    assert [one.name for one in store.summary().models] == ["running"]
    assert not (tmp_path / (b"o" * 16).hex()).exists()


@pytest.mark.parametrize("name", ["help.mp3", "0" * 63, "0" * 65, "0" * 63 + "G", "cd" + "0" * 62])
@pytest.mark.parametrize("shelf", ["ab", "Beatles"])
def test_only_what_has_the_name_of_a_record_is_garbage(
    tmp_path: Path, shelf: str, name: str
) -> None:
    store = RecordStore(tmp_path, ROOMY)
    (tmp_path / "records" / shelf).mkdir()
    file = tmp_path / "records" / shelf / name
    file.write_text("of the user")
    store.clear()
    assert file.read_text() == "of the user"


def rated(folder: Path, clock: Clock, **bounds: int) -> RecordStore:
    # Other tests sync.
    return RecordStore(folder, TierLimits(1 << 40, **bounds), clock=clock, system=FailingSystem())


def test_bounds_of_an_hour_and_a_day_hold_over_restarts_and_processes(tmp_path: Path) -> None:
    clock = Clock(1e9 - 1e9 % SLOT_S)
    bounds = {"per_hour": 5 * NBYTES, "per_day": 8 * NBYTES}
    store, other = (rated(tmp_path, clock, **bounds) for _ in range(2))
    assert write(store, *map(record, range(3))) == 3 * NBYTES
    clock.now += SLOT_S
    assert write(other, record(3), record(4)) == 2 * NBYTES
    assert store.delay_of_write(1) == 0, "it has not heard of the other"
    failure = write(store, record(5))
    assert isinstance(failure, WriteFailure)
    assert failure.delay_s == store.delay_of_write(NBYTES) == HOUR_S
    store.clear()
    other.close()
    other = rated(tmp_path, clock, **bounds)
    assert other.delay_of_write(NBYTES) == HOUR_S, "what is removed was written all the same"
    assert other.delay_of_write(4 * NBYTES) == DAY_S
    assert other.delay_of_write(6 * NBYTES) == math.inf
    clock.now += HOUR_S
    assert write(other, *map(record, range(5, 8))) == 3 * NBYTES
    assert other.summary().hour_bytes == 5 * NBYTES
    assert other.summary().day_bytes == 8 * NBYTES
    clock.now += HOUR_S + SLOT_S
    assert other.delay_of_write(NBYTES) == DAY_S - 2 * HOUR_S - SLOT_S
    clock.now += other.delay_of_write(NBYTES) - 1
    assert other.delay_of_write(NBYTES) == 1
    clock.now += 1
    assert write(other, record(20)) == NBYTES


def test_a_burst_is_followed_by_a_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "BURST_BYTES", 10 * NBYTES)
    clock = Clock()
    store = rated(tmp_path, clock, per_second=NBYTES)
    assert write(store, *map(record, range(12))) == 12 * NBYTES, "a full credit takes any batch"
    assert store.delay_of_write(NBYTES) == 3
    clock.now += 2
    assert isinstance(write(store, record(20)), WriteFailure)
    clock.now += 1
    assert write(store, record(20)) == NBYTES
    clock.now += 1000
    assert store.delay_of_write(10 * NBYTES) == 0
    assert write(store, *map(record, range(30, 40))) == 10 * NBYTES
    assert store.delay_of_write(NBYTES) == 1, "credit does not grow beyond the burst"


@pytest.mark.parametrize("jump_s", [-1e9, -DAY_S, -10.0, 10.0, DAY_S, 1e9])
def test_a_clock_that_jumps_forbids_nothing_for_longer_than_a_day(
    tmp_path: Path, jump_s: float
) -> None:
    clock = Clock()
    limits = TierLimits(3 * NBYTES, per_hour=4 * NBYTES, per_day=6 * NBYTES)
    store = RecordStore(tmp_path, limits, clock=clock)
    write(store, *map(record, range(3)))
    clock.now += jump_s
    again = RecordStore(tmp_path, limits, clock=clock)
    for one in (store, again):
        one.use([key(1)])
        assert 0 <= one.delay_of_write(2 * NBYTES) <= HOUR_S + SLOT_S
    clock.now += DAY_S + SLOT_S
    assert write(store, record(3), record(4)) == 2 * NBYTES
    assert len(kept(again, range(9))) == 3
    books_are_exact(store, tmp_path)


@pytest.mark.parametrize("ahead_s", [2 * SLOT_S, HOUR_S, DAY_S, 365 * DAY_S, 1e9])
def test_what_a_clock_ahead_of_time_wrote_binds_new_processes_for_an_hour_and_a_day(
    tmp_path: Path, ahead_s: float
) -> None:
    clock = Clock(1e9 - 1e9 % SLOT_S + ahead_s)
    bounds = {"per_hour": 2 * NBYTES, "per_day": 3 * NBYTES}
    write(rated(tmp_path, clock, **bounds), record(0), record(1))
    clock.now -= ahead_s
    for n in range(24 * 3):
        store = rated(tmp_path, clock, **bounds)
        assert kept(store, range(2)) == [0, 1]
        one, two = (store.delay_of_write(size * NBYTES) for size in (1, 2))
        assert (one, two) == (max(0, HOUR_S - n * 1200 + SLOT_S), DAY_S - n * 1200 + SLOT_S)
        store.close()
        clock.now += 1200


@pytest.mark.parametrize("ahead_s", [26 * HOUR_S, 2 * DAY_S, 30 * DAY_S, 365 * DAY_S, 1e9])
def test_a_look_by_a_clock_ahead_of_time_forgets_nothing_that_was_written(
    tmp_path: Path, ahead_s: float
) -> None:
    clock = Clock(1e9 - 1e9 % SLOT_S)
    store = rated(tmp_path, clock, per_hour=2 * NBYTES)
    write(store, record(0), record(1))
    clock.now += ahead_s
    store.delay_of_write(NBYTES)
    store.summary()
    clock.now -= ahead_s
    assert store.delay_of_write(NBYTES) == HOUR_S + SLOT_S
    assert store.summary().hour_bytes == 2 * NBYTES


def test_more_than_the_folder_holds_is_refused(tmp_path: Path) -> None:
    store = RecordStore(tmp_path, TierLimits(held=3 * NBYTES))
    write(store, record(9))
    assert write(store, *map(record, range(4))) == WriteFailure(
        "the bounds of bytes and rate do not allow it", math.inf
    )
    assert kept(store, range(10)) == [9]


def test_an_index_of_dead_entries_is_compacted_and_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "COMPACT_ENTRIES", 30)
    clock = Clock()
    store, other = (
        RecordStore(tmp_path, TierLimits(held=4 * NBYTES), clock=clock) for _ in range(2)
    )
    largest = 0
    for number in range(60):
        clock.now += 1
        write(store, record(number))
        largest = max(largest, (tmp_path / "index").stat().st_size // LAYOUT.size)
        store.use([key(number - 2)])
    assert largest <= 34
    store.close()
    again = RecordStore(tmp_path, TierLimits(held=4 * NBYTES), clock=clock)
    other.refresh()
    for one in (again, other):
        assert kept(one, range(60)) == [56, 57, 58, 59]
        assert one._books.last_use[key(57)] == one._books.last_use[key(59)]
        assert one.summary().hour_bytes == 60 * NBYTES
        books_are_exact(one, tmp_path)


@pytest.mark.parametrize("records", [1, 2, 5, 9, 10])
def test_an_index_does_not_grow_while_records_are_only_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: int
) -> None:
    monkeypatch.setattr(index, "COMPACT_ENTRIES", 20)
    clock = Clock()
    write(RecordStore(tmp_path, ROOMY, clock=clock), *map(record, range(records)))
    for _ in range(40):
        clock.now += 1
        store = RecordStore(tmp_path, ROOMY, clock=clock, system=FailingSystem())
        assert set(store._books.last_use.values()) <= {clock.now - 1}
        store.use([key(n) for n in range(records)])
        store.close()
        assert (tmp_path / "index").stat().st_size <= (22 + records) * LAYOUT.size
    books_are_exact(RecordStore(tmp_path, ROOMY, clock=clock), tmp_path)


def test_all_modes_are_private_and_looser_ones_are_tightened(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    write(RecordStore(folder, ROOMY), record(1))
    RecordStore(folder, ROOMY).name_model(b"m" * 16, "model")
    for path in (folder, folder / "records", folder / "index", folder / "lock"):
        path.chmod(0o777)
    RecordStore(folder, ROOMY)
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("what", ["", "records", "index", "lock"])
def test_links_are_refused(tmp_path: Path, what: str) -> None:
    folder, elsewhere = tmp_path / "tier", tmp_path / "elsewhere"
    RecordStore(folder, ROOMY).close()
    (folder / what).rename(elsewhere)
    (folder / what).symlink_to(elsewhere)
    with pytest.raises((RuntimeError, OSError), match=r"and no link|symbolic link|Not a directory"):
        RecordStore(folder, ROOMY)


def test_a_link_in_place_of_a_shelf_takes_no_record(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "tier", ROOMY)
    (tmp_path / "elsewhere").mkdir()
    path_of(tmp_path / "tier", 1).parent.symlink_to(tmp_path / "elsewhere")
    assert isinstance(write(store, record(1)), WriteFailure)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_what_is_no_folder_of_the_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"file must be .* remove it, or name another place"):
        RecordStore(tmp_path / "file", ROOMY)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(RuntimeError, match="of your own"):
        RecordStore(tmp_path, ROOMY)


def everything(folder: Path) -> dict[Path, tuple[int, float, bytes | bool]]:
    return {
        each: (each.lstat().st_mode, each.lstat().st_mtime, each.is_file() and each.read_bytes())
        for each in (folder, *folder.rglob("*"))
    }


@pytest.mark.parametrize(
    "names",
    [
        ["notes.txt"],
        [".hidden"],
        ["records/Beatles/help.mp3"],
        ["records/ab/" + "ab" * 32],
        ["index"],
        ["lock"],
        ["index.new"],
        ["ab" * 16],
        ["records/Beatles/help.mp3", "index", "lock"],
    ],
)
@pytest.mark.parametrize("text", ["an index of songs\n" * 99, "x", "\0" * 4])
def test_a_folder_of_the_users_own_files_is_refused_and_left_as_it_is(
    tmp_path: Path, names: list[str], text: str
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (1, 1))
    tmp_path.chmod(0o755)
    before = everything(tmp_path)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"not of quire's prefixes: name a new or an empty"):
            RecordStore(tmp_path, ROOMY)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("fails", [False, True])
def test_a_macs_backup_leaves_the_folder_out(tmp_path: Path, fails: bool) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> None:
        commands.append(command)
        if fails:
            raise FileNotFoundError

    system = System()
    system.platform, system.run = "darwin", run
    for _ in range(2):
        RecordStore(tmp_path / "tier", ROOMY, system=system).close()
    assert commands == [["/usr/bin/tmutil", "addexclusion", str(tmp_path / "tier")]]
    system.platform = "linux"
    RecordStore(tmp_path / "other", ROOMY, system=system).close()
    assert len(commands) == 1


def test_a_folder_holds_a_tenth_of_the_disk_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1000 * NBYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert usual_held_bytes(tmp_path / "not" / "yet") == 100 * NBYTES
    write(RecordStore(tmp_path, ROOMY), *map(record, range(10)))
    assert usual_held_bytes(tmp_path) == 101 * NBYTES
    free = 1 << 50
    assert usual_held_bytes(tmp_path) == 16 << 30


def test_a_summary_names_models(tmp_path: Path) -> None:
    clock = Clock()
    store = RecordStore(tmp_path, ROOMY, clock=clock)
    write(store, record(1), record(2), record(3, model=b"n" * 16))
    store.name_model(b"m" * 16, "a long name")
    store.name_model(b"m" * 16, "größer")
    (tmp_path / (b"n" * 16).hex()).symlink_to(tmp_path / (b"m" * 16).hex())
    clock.now += 50
    store.use([key(2)])
    summary = store.summary()
    assert summary.models == [
        ModelSummary(b"m" * 16, "größer", 2, 2 * NBYTES, clock.now),
        ModelSummary(b"n" * 16, "", 1, NBYTES, clock.now - 50),
    ]
    assert (summary.held_bytes, summary.limit_bytes) == (3 * NBYTES, ROOMY.held)


def test_verify_removes_what_is_broken(tmp_path: Path) -> None:
    store, other = (RecordStore(tmp_path, ROOMY) for _ in range(2))
    write(other, *map(record, range(4)))
    path_of(tmp_path, 1).write_bytes(b"?" * NBYTES)
    path_of(tmp_path, 2).unlink()
    assert store.verify(check) == {
        ReadResult.OK: [key(0), key(3)],
        ReadResult.BROKEN: [key(1)],
        ReadResult.GONE: [key(2)],
        ReadResult.FAILED: [],
    }
    books_are_exact(store, tmp_path)


@pytest.mark.parametrize("seed", range(8))
def test_any_life_keeps_what_a_dictionary_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Two stores share the folder. What is evicted leaves the model; nothing else may differ."""
    monkeypatch.setattr(index, "COMPACT_ENTRIES", 50)
    chance, clock, limits = random.Random(seed), Clock(time.time()), TierLimits(held=20 * NBYTES)

    def opened() -> RecordStore:
        return RecordStore(tmp_path, limits, clock=clock, system=FailingSystem())

    stores, model, evicted = [opened(), opened()], dict[bytes, Record](), 0
    for _ in range(150):
        clock.now += chance.choice([0, 1, 100, 5000, -5000])
        which = chance.randrange(2)
        store = stores[which]
        some = [
            record(n, nbytes=chance.randrange(3 * NBYTES), tenant=bytes([n % 3]) * 16)
            for n in chance.sample(range(60), chance.randrange(5))
        ]
        match chance.randrange(6):
            case 0 | 1 | 2:
                new = {one.key: one for one in some if one.key not in model}
                assert write(store, *some) == sum(one.nbytes for one in new.values())
                model |= new
                gone = model.keys() - store._books.records.keys()
                evicted += len(gone)
                model = {name: one for name, one in model.items() if name not in gone}
            case 3:
                store.use([one.key for one in some])
            case 4:
                if chance.random() < 0.3:
                    tenant = bytes([chance.randrange(3)]) * 16
                    store.clear(tenant=tenant)
                    model = {name: o for name, o in model.items() if o.tenant != tenant}
            case 5:
                store.close()
                stores[which] = store = opened()
        store.refresh()
        assert {o.key: replace(o, checksum=0) for o in store._books.records.values()} == model
        assert store.summary().held_bytes <= limits.held
    books_are_exact(store, tmp_path)
    assert evicted > 5


@pytest.mark.parametrize("past_cache", [product.PAST_CACHE, (48, 1)])
@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.ENOTSUP])
@pytest.mark.parametrize("refuses", ["nothing", "the file system", "the memory"])
def test_records_are_read_past_the_systems_cache_where_that_is_allowed(
    tmp_path: Path, past_cache: tuple[int, int], refusal: int, refuses: str
) -> None:
    system, states = System(), [0]

    def change(file: int, command: int, value: int) -> None:
        assert command == past_cache[0]
        if refuses == "the file system":
            raise OSError(refusal, os.strerror(refusal))
        states.append(value)

    def checksum(file: int, nbytes: int) -> int:
        if refuses == "the memory" and states[-1]:
            raise OSError(refusal, os.strerror(refusal))
        return check(file, nbytes)

    vars(system).update(fcntl=change, past_cache=past_cache)
    store = RecordStore(tmp_path, ROOMY, system=system)
    write(store, record(1))
    assert store.read(key(1), checksum) is ReadResult.OK
    past = past_cache[1]
    expected = {"nothing": [past], "the file system": [], "the memory": [past, 0]}
    assert states == [0, *expected[refuses]]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ESTALE, errno.ENXIO, errno.EIO])
def test_a_disk_that_fails_is_read_once_and_a_file_that_fails_is_removed(
    tmp_path: Path, code: int
) -> None:
    store, tries = RecordStore(tmp_path, ROOMY), []
    write(store, record(1))

    def fail(file: int, nbytes: int) -> int:
        tries.append(file)
        raise OSError(code, os.strerror(code))

    is_of_file = code == errno.EIO
    assert store.read(key(1), fail) is (ReadResult.BROKEN if is_of_file else ReadResult.FAILED)
    assert len(tries) == 1
    assert (store.find(key(1)) is None) == is_of_file
