import mlx.core as mx
import pytest

import metal_ext
from kvcache.backend import Releases
from kvcache.layout import KVShape, KVSpec, StateSpec, dense_layout, paged_layout
from kvcache.new_backend import new_backends, new_states
from kvcache.substrates import Substrate
from tests.kvcache.metal_double import install

SHAPE = KVShape.uniform(1, KVSpec(1, 64))
PAGED = paged_layout(
    SHAPE, max_tokens=128, heap_bytes=65536, system_page_bytes=16384, page_bytes=16384
).groups[0]
DENSE = dense_layout(SHAPE, max_tokens=128, system_page_bytes=16384).groups[0]


@pytest.mark.parametrize("substrate", list(Substrate))
def test_every_substrate_gets_what_does_its_work(
    monkeypatch: pytest.MonkeyPatch, substrate: Substrate
) -> None:
    workers, weight = metal_ext.CpuWorkers(1), mx.zeros((1,))
    if substrate.on_gpu:
        device = install(monkeypatch)
    (backend,) = new_backends(
        substrate,
        [DENSE if substrate.is_dense else PAGED],
        max_sequences=4,
        release_heaps=True,
        workers=None if substrate.on_gpu else workers,
        residency_keep_s=7.0,
        weights=[weight],
    )
    assert backend.name == substrate.setting
    assert backend.shares_blocks != substrate.is_dense
    kept = backend.releases is Releases.NOTHING
    assert kept == (substrate is Substrate.METAL_DENSE)
    if substrate.on_gpu:
        # A buffer that is given back need not be unmapped before the next sequence joins.
        (made,) = device.substrates
        assert made.max_ranges == (4 if substrate.is_dense else 8)
        assert (made.residency_keep_s, made.held) == (7.0, [weight])


@pytest.mark.parametrize("substrate", list(Substrate))
def test_states_lie_where_k_and_v_do(monkeypatch: pytest.MonkeyPatch, substrate: Substrate) -> None:
    workers = None if substrate.on_gpu else metal_ext.CpuWorkers(1)
    if substrate.on_gpu:
        device = install(monkeypatch)
    (backend,) = new_backends(
        substrate,
        [DENSE if substrate.is_dense else PAGED],
        max_sequences=4,
        release_heaps=False,
        workers=workers,
    )
    layout = KVShape(SHAPE.layers, (StateSpec(1, 1, 128, 128, tail_rows=3),)).cell
    assert layout is not None
    states = new_states(layout, 5, backend, workers)
    assert states.num_cells == 5
    if substrate.on_gpu:
        cells = device.substrates[0].cells
        assert cells is not None
        assert (cells.count, cells.cell_bytes) == (5, layout.cell_bytes)
        states.release([0, 4])  # nothing is given back
    else:
        with pytest.raises(AssertionError, match="workers"):
            new_states(layout, 5, backend, None)


def test_a_cpu_without_workers_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="workers"):
        new_backends(Substrate.POSIX, [PAGED], max_sequences=1, release_heaps=False, workers=None)
