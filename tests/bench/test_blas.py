import sys

import pytest

from tests.bench import blas
from tests.metal_ext.programs import output_of

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="a Mac's MLX multiplies fast itself")

# Lines and columns around what is cut, and factors in either order of their numbers.
PRODUCTS = """
    import mlx.core as mx
    import numpy as np
    from tests.bench import blas

    for m, k, n in ((1, 64, 1024), (3, 5, 7), (16, 64, 1024), (40, 100, 700), (700, 64, 33)):
        draw = np.random.default_rng(m)
        a, b = (draw.normal(size=size).astype(np.float32) for size in ((m, k), (k, n)))
        for left in (mx.array(a), mx.contiguous(mx.array(a.T)).T):
            for right in (mx.array(b), mx.contiguous(mx.array(b.T)).T):
                assert np.allclose(left @ right, a @ b, atol=1e-4 * np.sqrt(k))
                added = mx.addmm(mx.ones((m, n)), left, right, alpha=0.5, beta=2.0)
                assert np.allclose(added, 2 + a @ b / 2, atol=1e-4 * np.sqrt(k))
    print(blas.calls())
"""


@on_linux
@pytest.mark.parametrize("threads", [1, 3])
def test_float32_products_go_through_it_and_are_right(threads: int) -> None:
    assert int(output_of(PRODUCTS, **blas.environment(threads))) == 5 * 4 * 2


@on_linux
def test_a_process_that_began_without_it_is_begun_again_with_it() -> None:
    says = output_of("""
        from tests.bench import blas
        if __name__ == "__main__":
            print(blas.calls(), flush=True)
            blas.restart_with_it(1)
    """)
    assert says.splitlines() == ["None", "0"]


def test_a_mac_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas.environment(2) == {}
    blas.restart_with_it(2)
