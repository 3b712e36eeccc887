"""Every way in which the extension and MLX can fail to fit, each said in one sentence."""

import importlib.metadata
import sys

import mlx.core as mx
import pytest

import metal_ext
from metal_ext import _ext, self_test
from tests.metal_ext.programs import run_program

# What a program does to be another MLX than the one that was built against.
OTHER_MLX = """
    import importlib.metadata
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.0.1" if name == "mlx" else version(name)
    import metal_ext
"""


def test_what_was_built_fits_what_is_installed() -> None:
    self_test.require_matching_versions()
    assert importlib.metadata.version("mlx") == _ext.MLX_VERSION


def test_another_mlx_is_named_with_the_one_that_was_built_for() -> None:
    done = run_program(OTHER_MLX)
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1] == (
        f"ImportError: the native extension was built for mlx {_ext.MLX_VERSION}, but mlx 0.0.1 is "
        "installed: run `make setup`"
    )


def test_an_extension_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(metal_ext, "_ext")
    monkeypatch.setitem(sys.modules, "metal_ext._ext", None)
    with pytest.raises(ImportError) as caught:
        self_test.require_matching_versions()
    assert str(caught.value).startswith(
        f"the native extension cannot be loaded with mlx {_ext.MLX_VERSION} ("
    )
    assert str(caught.value).endswith("): run `make setup`")
    assert isinstance(caught.value.__cause__, ImportError)


def test_arrays_that_cannot_pass_between_the_two_are_said_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OtherArray:
        """What nanobind of another version takes an array for."""

    monkeypatch.setattr(mx, "zeros", lambda shape: OtherArray())
    with pytest.raises(ImportError, match=r"different versions of nanobind.*run `make setup`$"):
        self_test.require_matching_versions()
