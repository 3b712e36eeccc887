"""Sizes are read whole, wherever they are written."""

from pathlib import Path
from typing import Any

import pytest

from server.config import engine_config, load, parse_size, read_file
from tests.models import TINY, write_config
from tests.server.commands import SETTINGS, Run, one_sentence

GIB = 1024**3
SIZES = [
    ("4GiB", 4 * GIB),
    ("4gib", 4 * GIB),
    ("4 GiB", 4 * GIB),
    (" 4GiB ", 4 * GIB),
    ("4Gi", 4 * GIB),
    ("4.5GiB", 9 * GIB // 2),
    (".5GiB", GIB // 2),
    ("4G", 4_000_000_000),
    ("4GB", 4_000_000_000),
    ("1TiB", 1024 * GIB),
    ("512KiB", 512 * 1024),
    ("65536", 65536),
    ("65536B", 65536),
    ("65536 b", 65536),
    (65536, 65536),
    (4e9, 4_000_000_000),
    ("0", 0),
    ("0.1", 0),
]
NO_SIZES = [
    "4,5GiB",
    "50%",
    "10 GiB 512 MiB",
    "4GiB,512MiB",
    "4 GiB please",
    "8 gigs",
    "lots",
    "GiB",
    "",
    "4..5GiB",
    "4.5.1GiB",
    "0x10",
    "1e9",
    "٤GiB",
    "9" * 50,
    "inf",
    "nan",
    "-1",
    "-4GiB",
    "4GiB\n4GiB",
]


@pytest.mark.parametrize(("written", "in_bytes"), SIZES)
def test_a_size_is_a_number_and_its_unit(written: Any, in_bytes: int) -> None:
    assert parse_size(written) == in_bytes
    assert engine_config(load({}, {"cache": {"heap_size": written}})).heap_bytes == in_bytes


def test_a_size_comes_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "quire.toml"
    file.write_text(
        "[cache]\nkv_budget = '4.5GiB'\nheap_size = 1048576\ndisk = '16GiB'\n[limits]\n"
    )
    monkeypatch.setenv("QUIRE_CACHE__HEADROOM", "4 gib")
    settings = load(read_file(file), {"limits": {"max_body_bytes": "64KiB"}})
    config = engine_config(settings)
    assert (config.kv_budget_bytes, config.heap_bytes) == (9 * GIB // 2, 1048576)
    assert (config.disk_bytes, config.disk_hourly_bytes) == (16 * GIB, 8 * GIB)
    assert (config.headroom_bytes, settings.limits.max_body_bytes) == (4 * GIB, 65536)


@pytest.mark.parametrize("written", NO_SIZES)
def test_what_is_no_size_as_a_whole_is_refused_with_a_right_one(
    written: str, quire: Run, tmp_path: Path
) -> None:
    folder = write_config(tmp_path, TINY)
    line = one_sentence(quire("serve", folder, f"--kv-budget={written}"), SETTINGS)
    assert line.startswith("quire: setting cache.kv_budget: ")
    assert "4.5GiB" in line
