"""Which wheels of MLX's Metal side are told of, on which systems and chips."""

import importlib.metadata
import platform
import sys
from pathlib import Path

import pytest

from kvcache.canary.wheel import wheel_tag, wheel_warning

OLD, NEW = "py3-none-macosx_15_0_arm64", "py3-none-macosx_26_0_arm64"


@pytest.mark.parametrize(
    ("tag", "system", "processor", "words"),
    [
        (OLD, "26.4", "Apple M5 Pro", "no kernels for this chip's neural accelerators"),
        (OLD, "16.0", "Apple M5", "SYSTEM_VERSION_COMPAT=0 make setup"),
        (OLD, "27.0", "Apple M6", "the one for macOS 15"),
        (OLD, "26.4", "unknown", "the one for macOS 15"),
        (NEW, "26.1", "Apple M5", "made for 26.2 and later, and this is 26.1"),
        (NEW, "26", "Apple M5", "this is 26"),
        (NEW, "26.2", "Apple M5", ""),
        (NEW, "16.0", "Apple M5", ""),
        (OLD, "26.4", "Apple M4 Max", ""),
        (OLD, "15.6", "Apple M5", ""),
        ("", "26.4", "Apple M5", ""),
        (OLD, "", "Apple M5", ""),
    ],
)
def test_a_build_that_does_not_suit_system_and_chip_is_told_of(
    tag: str, system: str, processor: str, words: str
) -> None:
    said = wheel_warning(processor, tag, system)
    assert words in said
    assert bool(said) == bool(words)


def test_the_tag_is_that_of_the_wheel_which_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = tmp_path / "mlx_metal-0.32.4.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: mlx-metal\nVersion: 0.32.4\n")
    (installed / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: {OLD}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert wheel_tag() == OLD
    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.4", ("", "", ""), "arm64"))
    assert "the one for macOS 15" in wheel_warning("Apple M5")
    (installed / "WHEEL").write_text("nothing\n")
    assert wheel_tag() == ""


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has it")
def test_without_the_wheel_there_is_nothing_to_tell() -> None:
    assert wheel_tag() == ""
    assert wheel_warning("Apple M5") == ""
