import ctypes
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from metal_ext.environment import (
    LARGER_BUFFERS,
    PROCESSOR,
    RESIDENCY_VARIABLE,
    prepare,
    processor_name,
)
from tests.metal_ext.programs import output_of

OPS, MB = LARGER_BUFFERS


@pytest.mark.parametrize(
    ("platform", "before", "after"),
    [("darwin", {}, "20"), ("darwin", {RESIDENCY_VARIABLE: "7"}, "7"), ("linux", {}, None)],
)
def test_a_mac_leaves_room_for_our_residency_sets_unless_told_otherwise(
    platform: str, before: dict[str, str], after: str | None
) -> None:
    environment = dict(before)
    prepare(environment, platform)
    assert environment.get(RESIDENCY_VARIABLE) == after


@pytest.mark.parametrize(
    ("processor", "larger"),
    [
        ("Apple M1", True),
        ("Apple M2 Ultra", True),
        ("Apple M4 Max", True),
        ("Apple M5", False),
        ("Apple M10 Pro", False),
        ("Intel(R) Core(TM) i7", False),
        ("", False),
    ],
)
def test_command_buffers_are_larger_on_an_m1_to_an_m4(processor: str, larger: bool) -> None:
    environment: dict[str, str] = {}
    prepare(environment, "darwin", lambda: processor)
    assert (environment.get(OPS), environment.get(MB)) == (
        ("200", "100") if larger else (None, None)
    )


def test_command_buffers_are_as_large_as_the_user_says() -> None:
    environment = {MB: "40"}
    prepare(environment, "darwin", lambda: "Apple M1")
    assert (environment[OPS], environment[MB]) == ("200", "40")
    environment = {}
    prepare(environment, "linux", lambda: "Apple M1")
    assert environment == {}


def test_the_processor_is_named_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(name: bytes, into: ctypes.Array[ctypes.c_char], *_: object) -> int:
        assert name == PROCESSOR
        into.value = b"Apple M3 Pro"
        return 0

    def library(call: Callable[..., int] | None) -> None:
        found = SimpleNamespace() if call is None else SimpleNamespace(sysctlbyname=call)
        monkeypatch.setattr(ctypes, "CDLL", lambda _: found)

    library(told)
    assert processor_name() == "Apple M3 Pro"
    library(lambda *_: -1)
    assert processor_name() == ""
    library(None)
    assert processor_name() == ""


def test_it_is_set_before_mlx_is_imported() -> None:
    assert (
        output_of("""
        import os, sys
        sys.platform = "darwin"
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name == "mlx.core":
                    print(os.environ.get("MLX_RESIDENCY_SET_MAX_PCT"))
        sys.meta_path.insert(0, Finder())
        import metal_ext
    """)
        == "20"
    )
