import os
from tempfile import TemporaryFile

import mlx.core as mx
import pytest

import metal_ext
from kvcache.backends.choice import KVBackend
from kvcache.backends.new import new_backends, new_states
from kvcache.layout import KVShape, KVSpec, StateSpec, dense_layout, paged_layout
from tests.kvcache.metal_double import install

SHAPE = KVShape.uniform(1, KVSpec(1, 64))
PAGED = paged_layout(
    SHAPE, max_tokens=128, heap_bytes=65536, system_page_bytes=16384, page_bytes=16384
).groups[0]
DENSE = dense_layout(SHAPE, max_tokens=128, system_page_bytes=16384).groups[0]


@pytest.mark.parametrize("kind", list(KVBackend))
def test_every_kv_backend_gets_what_does_its_work(
    monkeypatch: pytest.MonkeyPatch, kind: KVBackend
) -> None:
    workers, weight = metal_ext.CpuWorkers(1), mx.zeros((1,))
    if kind.on_gpu:
        device = install(monkeypatch)
    (backend,) = new_backends(
        kind,
        [DENSE if kind.is_dense else PAGED],
        max_buffers=4,
        release_heaps=True,
        workers=None if kind.on_gpu else workers,
        residency_keep_s=7.0,
        weights=[weight],
    )
    assert backend.name == kind.setting
    assert backend.shares_blocks != kind.is_dense
    kept = backend.releases.keeps_heaps
    assert kept == (kind is KVBackend.METAL_DENSE)
    if kind.on_gpu:
        (made,) = device.kv_backends
        assert made.max_ranges == 4
        assert (made.residency_keep_s, made.held) == (7.0, [weight])


@pytest.mark.parametrize("kind", list(KVBackend))
def test_states_lie_where_k_and_v_do(monkeypatch: pytest.MonkeyPatch, kind: KVBackend) -> None:
    workers = None if kind.on_gpu else metal_ext.CpuWorkers(1)
    if kind.on_gpu:
        device = install(monkeypatch)
    (backend,) = new_backends(
        kind,
        [DENSE if kind.is_dense else PAGED],
        max_buffers=4,
        release_heaps=False,
        workers=workers,
    )
    layout = KVShape(SHAPE.layers, (StateSpec(1, 1, 128, 128, tail_rows=3),)).slot
    assert layout is not None
    assert new_states(None, 0, backend, workers) is None
    states = new_states(layout, 5, backend, workers)
    assert states is not None
    assert states.num_slots == 5
    assert states.commit(1)
    assert states.commit(4)
    with TemporaryFile() as file:
        file.truncate(2 * 2 * layout.slot_bytes)
        zeros = states.write_record(1, file.fileno(), 0)
        os.pwrite(file.fileno(), b"state", 100)
        total = states.read_record(4, file.fileno(), 0)
        assert total == states.write_record(4, file.fileno(), 2 * layout.slot_bytes)
        assert states.write_record(1, file.fileno(), 0) == zeros != total
    if kind.on_gpu:
        slots = device.kv_backends[0].slots
        assert slots is not None
        assert (slots.count, slots.slot_bytes) == (5, layout.slot_bytes)
        states.release([0, 4])  # nothing is given back
    else:
        with pytest.raises(AssertionError, match="workers"):
            new_states(layout, 5, backend, None)


def test_a_cpu_without_workers_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="workers"):
        new_backends(KVBackend.POSIX, [PAGED], max_buffers=1, release_heaps=False, workers=None)
