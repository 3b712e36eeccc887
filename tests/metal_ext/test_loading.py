"""MLX's variables, and every way in which the extension and MLX can fail to fit."""

import ctypes
import importlib.metadata
import sys
from collections.abc import Callable
from types import SimpleNamespace

import mlx.core as mx
import pytest

import metal_ext
from metal_ext import _ext, loading
from metal_ext.loading import (
    LARGER_BUFFERS,
    PROCESSOR,
    RESIDENCY_VARIABLE,
    prepare_environment,
    processor_name,
)
from tests.metal_ext.programs import output_of, run_program

OPS, MB = LARGER_BUFFERS
# What a program does to be another MLX than the one that was built against.
OTHER_MLX = """
    import importlib.metadata
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.0.1" if name == "mlx" else version(name)
    import metal_ext
"""


def test_what_was_built_fits_what_is_installed() -> None:
    loading.require_matching_versions()
    assert importlib.metadata.version("mlx") == _ext.MLX_VERSION


def test_another_mlx_is_named_with_the_one_that_was_built_for() -> None:
    done = run_program(OTHER_MLX)
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1] == (
        f"ImportError: the native extension was built for mlx {_ext.MLX_VERSION}, but mlx 0.0.1 is "
        f"installed: {loading.MENDED}"
    )


def test_an_extension_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(metal_ext, "_ext")
    monkeypatch.setitem(sys.modules, "metal_ext._ext", None)
    with pytest.raises(ImportError) as caught:
        loading.require_matching_versions()
    assert str(caught.value).startswith(
        f"the native extension cannot be loaded with mlx {_ext.MLX_VERSION} ("
    )
    assert str(caught.value).endswith(f"): {loading.MENDED}")
    assert isinstance(caught.value.__cause__, ImportError)


@pytest.mark.parametrize("packaged", [True, False])
def test_an_extension_that_another_mlx_cannot_load_names_the_one_that_it_is_for(
    monkeypatch: pytest.MonkeyPatch, packaged: bool
) -> None:
    """As with MLX 0.32.3 under a module for 0.32.4: a symbol is missing before it can say more."""

    def requires(name: str) -> list[str]:
        if not packaged:
            raise importlib.metadata.PackageNotFoundError(name)
        return ["mlx-lm==0.1", f"mlx[cpu]=={needed}; platform_system == 'Linux'"]

    needed = _ext.MLX_VERSION
    monkeypatch.delattr(metal_ext, "_ext")
    monkeypatch.setitem(sys.modules, "metal_ext._ext", None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
    monkeypatch.setattr(importlib.metadata, "requires", requires)
    with pytest.raises(ImportError) as caught:
        loading.require_matching_versions()
    assert caught.value.name == "metal_ext"
    expected = f"was built for mlx {needed}, but mlx 0.0.1 is" if packaged else "cannot be loaded"
    assert expected in str(caught.value)


def test_arrays_that_cannot_pass_between_the_two_are_said_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OtherArray:
        """What nanobind of another version takes an array for."""

    monkeypatch.setattr(mx, "zeros", lambda shape: OtherArray())
    with pytest.raises(ImportError, match=r"different versions of nanobind.*`make setup`\)$"):
        loading.require_matching_versions()


@pytest.mark.parametrize(
    ("platform", "before", "after"),
    [("darwin", {}, "20"), ("darwin", {RESIDENCY_VARIABLE: "7"}, "7"), ("linux", {}, None)],
)
def test_a_mac_leaves_room_for_our_residency_sets_unless_told_otherwise(
    platform: str, before: dict[str, str], after: str | None
) -> None:
    environment = dict(before)
    prepare_environment(environment, platform)
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
    prepare_environment(environment, "darwin", lambda: processor)
    assert (environment.get(OPS), environment.get(MB)) == (
        ("250", "100") if larger else (None, None)
    )


def test_command_buffers_are_as_large_as_the_user_says() -> None:
    environment = {MB: "40"}
    prepare_environment(environment, "darwin", lambda: "Apple M1")
    assert (environment[OPS], environment[MB]) == ("250", "40")
    environment = {}
    prepare_environment(environment, "linux", lambda: "Apple M1")
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
