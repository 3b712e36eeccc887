import subprocess
import sys
import threading
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import metal_ext
from metal_ext import blas
from tests.metal_ext.programs import output_of, run_program

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="a Mac's MLX multiplies fast itself")

MULTIPLY = """
    import metal_ext
    import mlx.core as mx
    import numpy as np
    a, b = (np.random.default_rng(s).normal(size=(65, 65)).astype(np.float32) for s in (1, 2))
    product = np.array(mx.array(a) @ mx.array(b))
    assert np.allclose(product, a @ b, atol=1e-4)
    blas = metal_ext.fast_blas
    print("none" if blas is None else blas.calls)
"""


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


@on_linux
def test_a_float32_product_goes_through_the_fast_blas() -> None:
    fast = metal_ext.fast_blas
    assert fast is not None
    for times in (1, 2):
        before = fast.calls
        mx.eval([mx.ones((8, 64)) @ mx.ones((64, 64)) for _ in range(times)])
        assert fast.calls == before + times
    assert fast.name == "OpenBLAS"


@on_linux
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_products_are_right_however_their_factors_lie(rows: int) -> None:
    assert metal_ext.fast_blas is not None
    before = metal_ext.fast_blas.calls
    draw = np.random.default_rng(rows)
    a, b = draw.normal(size=(rows, 70)), draw.normal(size=(70, 51))
    left, right = (mx.array(x.astype(np.float32)) for x in (a, b))
    flipped_left, flipped_right = (mx.contiguous(x.T).T for x in (left, right))
    for x in (left, flipped_left):
        for y in (right, flipped_right):
            assert np.allclose(np.array(x @ y), a @ b, atol=1e-4)
            added = mx.addmm(mx.ones((rows, 51)), x, y, alpha=0.5, beta=2.0)
            assert np.allclose(np.array(added), 2 + a @ b / 2, atol=1e-4)
    assert metal_ext.fast_blas.calls >= before + 8


@on_linux
def test_the_default_is_the_fast_blas_and_mlx_turns_it_off() -> None:
    assert int(output_of(MULTIPLY)) >= 1
    assert int(output_of(MULTIPLY, QUIRE_BLAS="openblas")) >= 1
    assert output_of(MULTIPLY, QUIRE_BLAS="mlx") == "none"


def test_an_unknown_choice_is_an_error_that_names_it() -> None:
    says = last_line(run_program("import metal_ext", QUIRE_BLAS="fast"))
    assert says == "ImportError: QUIRE_BLAS is 'fast'; it must be openblas or mlx"


@on_linux
def test_mlx_before_us_is_an_error_because_its_products_are_bound() -> None:
    says = last_line(run_program("import mlx.core\nimport metal_ext"))
    assert says == "ImportError: import metal_ext before mlx: its BLAS must be loaded first"
    assert output_of("import mlx.core\nimport metal_ext\nprint('ok')", QUIRE_BLAS="mlx") == "ok"


@on_linux
def test_a_library_that_was_not_built_is_an_error_that_says_what_to_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(blas.CHOICE_VARIABLE, raising=False)
    monkeypatch.setattr(blas, "__file__", str(tmp_path / "blas.py"))
    monkeypatch.setattr(sys, "path", ["", str(tmp_path)])
    with pytest.raises(ImportError, match=r"libquire_blas\.so was not built: run `make setup`"):
        blas.load()


def test_the_library_is_found_beside_the_sources_first_and_then_on_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sources, installed = tmp_path / "sources", tmp_path / "installed"
    for folder in (sources, installed / "metal_ext"):
        folder.mkdir(parents=True)
        (folder / blas.LIBRARY).touch()
    monkeypatch.setattr(blas, "__file__", str(sources / "blas.py"))
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), str(installed)])
    assert blas.library_path() == sources / blas.LIBRARY
    (sources / blas.LIBRARY).unlink()
    assert blas.library_path() == installed / "metal_ext" / blas.LIBRARY


def test_a_mac_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(blas.CHOICE_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas.load() is None


SHAPES = [(1, 64, 1024), (3, 5, 7), (16, 64, 1024), (40, 100, 700), (700, 64, 33), (900, 40, 900)]


@on_linux
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_right_and_has_the_same_bits_on_any_number_of_threads(
    shape: tuple[int, int, int],
) -> None:
    assert metal_ext.fast_blas is not None
    m, k, n = shape
    draw = np.random.default_rng(m)
    a, b = draw.normal(size=(m, k)), draw.normal(size=(n, k))
    left, right = (mx.array(x.astype(np.float32)) for x in (a, b))
    found = []
    for threads in (1, 2, 5, 5):
        metal_ext.fast_blas.use(metal_ext.CpuWorkers(threads))
        found.append(np.array(left @ right.T))
    assert np.allclose(found[0], a @ b.T, atol=1e-4 * np.sqrt(k))
    assert all((found[0] == other).all() for other in found[1:])


@on_linux
def test_products_of_several_threads_share_the_workers() -> None:
    assert metal_ext.fast_blas is not None
    metal_ext.fast_blas.use(metal_ext.CpuWorkers(2))
    right = np.random.default_rng(1).normal(size=(300, 900)).astype(np.float32)
    wrong: list[int] = []

    def multiply(seed: int) -> None:
        stream = mx.new_thread_local_stream(mx.cpu)
        a = np.random.default_rng(seed).normal(size=(64, 300)).astype(np.float32)
        for _ in range(20):
            product = mx.matmul(mx.array(a), mx.array(right), stream=stream)
            if not np.allclose(np.array(product), a @ right, atol=1e-3):
                wrong.append(seed)

    threads = [threading.Thread(target=multiply, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@on_linux
def test_workers_live_as_long_as_products_find_them() -> None:
    assert "5 helpers, 64.0" in last_line(
        run_program(
            """
            import gc, os
            import metal_ext, mlx.core as mx
            before = len(os.listdir("/proc/self/task"))
            metal_ext._ext.multiply_on(metal_ext.CpuWorkers(6))
            gc.collect()
            helpers = len(os.listdir("/proc/self/task")) - before
            product = (mx.ones((64, 64)) @ mx.ones((64, 900)))[0, 0].item()
            raise SystemExit(f"{helpers} helpers, {product}")
            """
        )
    )


@on_linux
def test_mlxs_own_blas_takes_no_workers() -> None:
    says = last_line(
        run_program(
            "import metal_ext\nmetal_ext._ext.multiply_on(metal_ext.CpuWorkers(1))",
            QUIRE_BLAS="mlx",
        )
    )
    assert "MLX multiplies with its own BLAS" in says
