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
        f"installed: {self_test.MENDED}"
    )


def test_an_extension_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(metal_ext, "_ext")
    monkeypatch.setitem(sys.modules, "metal_ext._ext", None)
    with pytest.raises(ImportError) as caught:
        self_test.require_matching_versions()
    assert str(caught.value).startswith(
        f"the native extension cannot be loaded with mlx {_ext.MLX_VERSION} ("
    )
    assert str(caught.value).endswith(f"): {self_test.MENDED}")
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
        self_test.require_matching_versions()
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
        self_test.require_matching_versions()
