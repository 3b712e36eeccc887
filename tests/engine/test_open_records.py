"""What a start says about prefixes on disk."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from engine.build import open_records
from tests.engines import CONFIG
from tests.kvcache.tier.records import record, write

MIB = 1024**2


def test_a_start_says_where_prefixes_are_kept_and_how_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(CONFIG, disk_folder=str(tmp_path / "prefixes"), disk_bytes=MIB)
    with caplog.at_level("INFO"):
        store = open_records(replace(config, disk_hourly_bytes=5))
    assert store is not None
    store.close()
    assert caplog.messages == [
        f"prefixes on disk: {tmp_path / 'prefixes'}, at most 1.00 MiB, 0 bytes held"
    ]
    assert (store.limits.held, store.limits.per_hour) == (MIB, 5)


def test_without_a_bound_it_is_a_part_of_the_disk(tmp_path: Path) -> None:
    store = open_records(replace(CONFIG, disk_folder=str(tmp_path), disk_bytes=None))
    assert store is not None
    store.close()
    assert 0 < store.limits.held <= 16 * 1024 * MIB


@pytest.mark.parametrize("most", [MIB, 2 * MIB, 3 * MIB, 4 * MIB, 5 * MIB])
def test_a_start_removes_what_is_above_a_bound_that_was_lowered(tmp_path: Path, most: int) -> None:
    config = replace(CONFIG, disk_folder=str(tmp_path), disk_bytes=8 * MIB)
    for bound in (8 * MIB, most):
        store = open_records(replace(config, disk_bytes=bound))
        assert store is not None
        write(
            store, *(record(number, nbytes=MIB // 2) for number in range(12 if bound > most else 0))
        )
        held = store.held_bytes
        store.close()
    assert held == most


@pytest.mark.parametrize(
    ("disk_bytes", "why"),
    [(0, r"cache\.disk is 0"), (1, ".+/file .+: remove it, or .+")],
)
def test_a_start_says_why_none_are_kept(
    disk_bytes: int, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    config = replace(CONFIG, disk_folder=str(tmp_path / "file"), disk_bytes=disk_bytes)
    with caplog.at_level("INFO"):
        assert open_records(config) is None
    (message,) = caplog.messages
    assert re.fullmatch(rf"prefixes on disk: off \({why}\)", message)
