import os
from pathlib import Path

from tests.bench import memory
from tests.bench.memory import Charge, Held, Pair, charge, rollup
from tests.bench.programs import Command
from tests.bench.twenty_turns import Turn

MIB = 1024**2
TEXT = """\
558c77899000-7ffdb591c000 ---p 00000000 00:00 0                          [rollup]
Rss:                3072 kB
Pss:                2048 kB
Pss_Shmem:          1024 kB
Private_Clean:       512 kB
Private_Dirty:      1024 kB
SwapPss:               4 kB
"""


def test_a_rollup_is_read_in_bytes() -> None:
    read = rollup(TEXT)
    assert (read["Rss"], read["Pss"], read["SwapPss"]) == (3 * MIB, 2 * MIB, 4096)
    assert len(read) == 6


def test_memory_files_that_nobody_maps_are_charged_and_mapped_ones_once() -> None:
    read = rollup(TEXT)
    assert Charge.of([read], 0) == Charge(2 * MIB + 4096, 3 * MIB // 2, MIB)
    assert Charge.of([read], MIB) == Charge.of([read], 0), "all of the file is mapped"
    more = Charge.of([read, read], 7 * MIB)
    assert more.shares == 2 * (2 * MIB + 4096) + 5 * MIB
    assert more.private == 3 * MIB + 5 * MIB


def test_this_process_is_charged_for_a_memory_file_before_it_maps_it() -> None:
    before = charge(os.getpid())
    file = os.memfd_create("bench")
    try:
        os.posix_fallocate(file, 0, 64 * MIB)
        after = charge(os.getpid())
    finally:
        os.close(file)
    assert before.shares > MIB
    assert abs(after.shares - before.shares - 64 * MIB) < 8 * MIB
    assert abs(after.private - before.private - 64 * MIB) < 8 * MIB


def held(*mib: int) -> Held:
    charges = [Charge(one * MIB, one * MIB // 2, 5 * MIB) for one in mib]
    return Held(charges, [Turn(2100, 2000, 24, 1.0) for _ in mib], [7.0 * MIB for _ in mib])


def test_ours_should_take_at_most_what_a_peer_takes() -> None:
    ours, peer = (Command(name, "x {port}") for name in ("quire", "other"))
    both = held(300, 320, 310), held(400, 300, 350)
    pair = Pair("K and V in 16 bits", ours, peer, *both)
    rows = memory._rows(pair, 2000, 100 * MIB)
    assert [row.name for row in rows] == [
        "memory with 2000 tokens, K and V in 16 bits",
        "memory above the weights with 2000 tokens, K and V in 16 bits",
        "private memory with 2000 tokens, K and V in 16 bits",
    ]
    assert [(row.quire, row.peer) for row in rows] == [(310, 350), (210, 250), (155, 175)]
    goals = [row.goal and (row.goal.text, row.goal.met) for row in rows]
    assert goals == [("<= 350 MiB", True), ("<= 250 MiB", True), None]
    said = pair.text()
    assert "quire 2000 of 2100 tokens, sharing 5 MiB more with others" in said
    assert said.endswith("quire says 7 MiB of K and V")


def test_the_system_names_files_that_are_open(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as plain:
        plain.write(bytes(4096))
        assert (
            memory._memory_files(os.getpid())
            .keys()
            .isdisjoint({(os.fstat(plain.fileno()).st_dev, os.fstat(plain.fileno()).st_ino)})
        )
