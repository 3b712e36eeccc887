"""The native backends, through the protocol alone."""

import ctypes
import itertools
import resource
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

import kvcache.backends.posix
import metal_ext
from kvcache.backends.backend import BackendFailedError, PageBackend, Releases, Segment
from kvcache.backends.posix import (
    MEASURED_EVERY_S,
    NativeStates,
    PosixBackend,
    system_heap_limit,
    system_mapping_limit,
)
from kvcache.layout import Group, KVFormat, KVShape, KVSpec, StateSpec, paged_layout
from kvcache.views import layer_regions
from metal_ext import SYSTEM_PAGE_BYTES

SPEC = KVSpec(1, 64, KVFormat.FLOAT32)
SHAPE = KVShape.uniform(2, SPEC)
WAIT_S = 10.0


PAGED = paged_layout(
    SHAPE, max_tokens=128, heap_bytes=4 * 4 * 16384, system_page_bytes=16384, page_bytes=16384
)
LAYERS = layer_regions(PAGED)


def ready(group: Group) -> PosixBackend:
    backend = PosixBackend(group, metal_ext.CpuWorkers(1))
    assert backend.add_heap()
    assert backend.add_buffer()
    return backend


def write(backend: PageBackend, buffer: int, number: float) -> None:
    """Puts that number into the first three rows of a buffer, in all regions."""
    rows = backend.rows([Segment(buffer, 0, 3)])
    values = mx.full((3, SPEC.kv_heads, SPEC.head_dim), number)
    tokens = [
        rows.append(mx.zeros((1,)), layer, values, values, values, None)[0] for layer in LAYERS
    ]
    mx.eval(rows.end(tokens))


def first_rows(
    backend: PageBackend, buffer: int, tokens: int = 3, layer: int = 0, kind: str = "keys"
) -> NDArray[np.float32]:
    """The first rows of a buffer's region."""
    rows = backend.rows([Segment(buffer, tokens - 1, 1)])
    return np.array(rows.region(mx.zeros((1,)), LAYERS[layer], kind, 0))


def test_a_mapped_buffer_can_be_planned() -> None:
    backend = ready(PAGED.groups[0])
    assert backend.map(0, 0, 0, 2, 2, writable=True)
    backend.rows([Segment(0, 0, 5), Segment(0, 100, 1)])
    assert first_rows(backend, 0, 128).shape == (128, SPEC.kv_heads, SPEC.head_dim)


def test_tickets_rise_and_complete() -> None:
    backend = ready(PAGED.groups[0])
    assert backend.map(0, 0, 0, 0, 2, writable=True)
    first = backend.unmap(0, 0, 2)
    second = backend.release(0, 0, 4)
    assert second == first + 1
    assert backend.wait(second, WAIT_S)
    assert backend.completed_ticket() == second


def test_a_block_can_be_read_in_many_buffers_and_written_in_one() -> None:
    backend = ready(PAGED.groups[0])
    assert backend.shares_blocks
    assert backend.add_buffer()
    assert backend.map(0, 0, 0, 3, 1, writable=True)
    assert backend.map(1, 0, 0, 3, 1, writable=False)
    backend.rows([Segment(0, 0, 64), Segment(1, 0, 64)])
    write(backend, 0, 5.0)
    assert (first_rows(backend, 1) == 5.0).all()
    with pytest.raises(IndexError, match="block 0 is read-only"):
        write(backend, 1, 6.0)


def test_blocks_are_mapped_ahead_with_their_memory() -> None:
    group = PAGED.groups[0]
    backend = ready(group)
    ticket = backend.map_ahead(0, 0, 0, 0, 1)
    assert backend.wait(ticket, WAIT_S)
    assert not backend.refused(ticket)
    assert backend.completed_ticket() == ticket
    backend.rows([Segment(0, 0, group.tokens_per_block)])
    assert backend.committed_bytes() == group.block_bytes


def test_a_copied_block_holds_the_same_rows_in_every_region_and_is_counted() -> None:
    backend = ready(PAGED.groups[0])
    assert backend.add_buffer()
    assert backend.map(0, 0, 0, 0, 2, writable=True)
    assert backend.map(1, 0, 0, 0, 1, writable=False)
    assert backend.map(1, 1, 0, 2, 1, writable=True)
    write(backend, 0, 7.0)
    assert backend.copied_bytes == 0
    backend.copy_block(0, 0, 1, 1, tokens=3)
    for layer, kind in itertools.product(range(2), ("keys", "values")):
        rows = first_rows(backend, 1, 64 + 4, layer, kind)[64:]
        assert (rows[:3] == 7.0).all(), (layer, kind)
        assert (rows[3:] == 0.0).all(), (layer, kind)
    assert backend.copied_bytes == 3 * SHAPE.bytes_per_token
    with pytest.raises(IndexError, match="target block 0 is read-only"):
        backend.copy_block(0, 1, 1, 0, tokens=3)
    assert backend.copied_bytes == 3 * SHAPE.bytes_per_token


def test_layers_of_one_rope_share_its_angles(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[metal_ext.RopeTable] = []
    angles = metal_ext.rope_angles

    def noted(table: metal_ext.RowTable, rope: metal_ext.RopeTable, workers: Any) -> mx.array:
        made.append(rope)
        return angles(table, rope, workers)

    monkeypatch.setattr(metal_ext, "rope_angles", noted)
    backend = ready(PAGED.groups[0])
    assert backend.map(0, 0, 0, 0, 1, writable=True)
    rows, token = backend.rows([Segment(0, 0, 1)]), mx.zeros((1,))
    heads = mx.ones((1, SPEC.kv_heads, SPEC.head_dim))
    one, other = (metal_ext.RopeTable([1.0] * (SPEC.head_dim // 2)) for _ in range(2))
    for layer, rope in itertools.product(LAYERS, (one, other, None)):
        token, _ = rows.append(token, layer, heads, heads, heads, metal_ext.QKTransform(None, rope))
    mx.eval(rows.end([token]))
    assert made == [one, other]


def test_a_cpus_memory_needs_no_order_at_its_end() -> None:
    backend = ready(PAGED.groups[0])
    assert backend.map(0, 0, 0, 0, 1, writable=True)
    backend.rows([Segment(0, 0, 1)]).cancel()
    assert backend.shut_down()


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_mac_charges_shared_memory_by_the_object(
    monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    backend = PosixBackend(PAGED.groups[0], metal_ext.CpuWorkers(1))
    assert backend.releases is (Releases.BLOCKS if platform == "linux" else Releases.HEAPS)


def test_a_cpu_maps_at_any_time_and_memory_comes_with_it() -> None:
    group = PAGED.groups[0]
    backend = ready(group)
    assert backend.maps_while_running
    before = backend.committed_bytes()
    assert backend.commit_heap(0)
    assert backend.committed_bytes() == before
    assert backend.map(0, 0, 0, 0, 1, writable=True)
    backend.finish_mappings()
    write(backend, 0, 3.0)


def test_a_failed_memory_operation_ends_the_engine() -> None:
    backend = ready(PAGED.groups[0])
    ticket = backend.unmap(0, 0, 1)  # nothing is mapped there: a bug, reported by its thread
    assert backend.wait(ticket, WAIT_S)
    with pytest.raises(BackendFailedError, match="block 0 is not mapped"):
        backend.completed_ticket()


def test_a_refused_system_call_is_weather(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise OSError(12, "no memory")

    backend = PosixBackend(PAGED.groups[0], metal_ext.CpuWorkers(1))
    monkeypatch.setattr(backend, "_new_heap", refuse)
    monkeypatch.setattr(backend, "_new_range", refuse)
    assert not backend.add_heap()
    assert not backend.add_buffer()


def test_a_refused_mapping_is_weather(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def map(self, *_: object) -> None:
            raise OSError(12, "no memory")

    backend = ready(PAGED.groups[0])
    monkeypatch.setattr(backend, "_ranges", [Refusing()])
    assert not backend.map(0, 0, 0, 0, 1, writable=True)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits mappings")
def test_linux_names_its_limit_of_mappings_less_a_reserve() -> None:
    limit = system_mapping_limit()
    assert limit is not None
    assert limit + kvcache.backends.posix.SPARE_MAPPINGS == int(
        Path("/proc/sys/vm/max_map_count").read_text()
    )


def test_elsewhere_nobody_counts_mappings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kvcache.backends.posix, "MAX_MAP_COUNT_FILE", tmp_path / "missing")
    assert system_mapping_limit() is None


def test_heaps_leave_half_of_all_open_files_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, resource.RLIM_INFINITY))
    assert PosixBackend(PAGED.groups[0], metal_ext.CpuWorkers(1)).heap_limit == 2048


def test_heaps_are_not_counted_where_open_files_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    assert system_heap_limit() is None


def test_the_memory_of_slots_is_measured_from_time_to_time() -> None:
    slot = KVShape((), (StateSpec(1, 2, 32, 32, tail_rows=3),)).slot
    assert slot is not None
    now = 0.0
    states = NativeStates(slot, 4, metal_ext.CpuWorkers(1), clock=lambda: now)
    assert states.committed_bytes([]) == 0
    for number in (1, 3):
        ctypes.memset(states._address(number), 1, slot.slot_bytes)
    now = MEASURED_EVERY_S / 2
    assert states.committed_bytes([1, 3]) == 0, "asked a moment ago"
    now = MEASURED_EVERY_S
    assert states.committed_bytes([1, 3]) == 2 * slot.slot_bytes
    ctypes.memset(states._address(2), 1, 1)
    states.release([1])
    assert states.committed_bytes([2, 3]) == slot.slot_bytes + SYSTEM_PAGE_BYTES, "at once"


def test_a_block_passes_through_a_file_into_another_buffer(tmp_path: Path) -> None:
    backend = ready(PAGED.groups[0])
    assert backend.add_buffer()
    assert backend.map(0, 0, 0, 0, 1, writable=True)
    assert backend.map(1, 0, 0, 1, 1, writable=True)
    write(backend, 0, 5.0)
    write(backend, 1, 6.0)
    with (tmp_path / "record").open("w+b") as file:
        total = backend.write_block(0, 0, file.fileno(), 0)
        assert backend.read_block(1, 0, file.fileno(), 0) == total
    for layer, kind in itertools.product(range(2), ("keys", "values")):
        assert (first_rows(backend, 1, layer=layer, kind=kind) == 5.0).all()


def test_a_slot_that_was_read_from_a_file_counts_at_once(tmp_path: Path) -> None:
    slot = KVShape((), (StateSpec(1, 2, 32, 32, tail_rows=3),)).slot
    assert slot is not None
    states = NativeStates(slot, 2, metal_ext.CpuWorkers(1), clock=lambda: 0.0)
    assert states.committed_bytes([]) == 0
    with (tmp_path / "record").open("w+b") as file:
        total = states.write_record(0, file.fileno(), 0)
        assert states.read_record(1, file.fileno(), 0) == total
    assert states.committed_bytes([1]) == slot.slot_bytes
