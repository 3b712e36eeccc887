"""The native backends, through the protocol alone."""

import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvcache.backend
from kvcache.backend import (
    BackendFailedError,
    NativeBackend,
    PageBackend,
    Segment,
    dense_backend,
    posix_backend,
    raise_descriptor_limit,
    system_mapping_limit,
)
from kvcache.layout import Group, KVShape, dense_layout, paged_layout

SHAPE = KVShape(num_layers=2, kv_heads=1, head_dim=64, itemsize=4)
WAIT_S = 10.0


def paged_group() -> Group:
    return paged_layout(
        SHAPE, max_tokens=128, heap_bytes=4 * 4 * 16384, system_page_bytes=16384, page_bytes=16384
    ).group


def dense_group() -> Group:
    return dense_layout(SHAPE, max_tokens=128, system_page_bytes=16384).group


def ready(make: Callable[[Group], PageBackend], group: Group) -> PageBackend:
    backend = make(group)
    assert backend.add_heap()
    assert backend.add_buffer()
    return backend


def test_a_mapped_buffer_can_be_planned() -> None:
    backend = ready(posix_backend, paged_group())
    assert backend.map(0, 0, 0, 2, 2)
    assert len(backend.row_table([Segment(0, 0, 5), Segment(0, 100, 1)])) == 6
    assert backend.address_range(0).mapped_tokens == 128


def test_a_row_without_memory_cannot_be_planned() -> None:
    backend = ready(posix_backend, paged_group())
    assert backend.map(0, 0, 0, 0, 1)
    with pytest.raises(IndexError, match="segment of mapped tokens"):
        backend.row_table([Segment(0, 64, 1)])


def test_tickets_rise_and_complete() -> None:
    backend = ready(posix_backend, paged_group())
    assert backend.map(0, 0, 0, 0, 2)
    first = backend.unmap(0, 0, 2)
    second = backend.release(0, 0, 4)
    assert second == first + 1
    assert backend.wait(second, WAIT_S)
    assert backend.completed_ticket() == second


def test_posix_heaps_cost_nothing_until_they_are_written() -> None:
    backend = ready(posix_backend, paged_group())
    assert backend.map(0, 0, 0, 0, 2)
    assert backend.committed_bytes() == 0


def test_a_dense_heap_is_charged_in_full_from_the_moment_it_is_mapped() -> None:
    group = dense_group()
    backend = ready(dense_backend, group)
    assert backend.committed_bytes() == 0
    assert backend.map(0, 0, 0, 0, 1)
    assert backend.committed_bytes() == group.heap_bytes
    assert backend.wait(backend.unmap(0, 0, 1), WAIT_S)
    assert backend.committed_bytes() == group.heap_bytes
    assert backend.wait(backend.release(0, 0, 1), WAIT_S)
    assert backend.committed_bytes() == 0


def test_a_failed_memory_operation_ends_the_engine() -> None:
    backend = ready(posix_backend, paged_group())
    ticket = backend.unmap(0, 0, 1)  # nothing is mapped there: a bug, reported by its thread
    assert backend.wait(ticket, WAIT_S)
    with pytest.raises(BackendFailedError, match="block 0 is not mapped"):
        backend.completed_ticket()


def test_a_refused_system_call_is_weather() -> None:
    def refuse(*_: object) -> None:
        raise OSError(12, "no memory")

    backend = NativeBackend(
        "refusing",
        paged_group(),
        refuse,  # type: ignore[arg-type]
        refuse,  # type: ignore[arg-type]
        releases_blocks=True,
        mapping_limit=None,
    )
    assert not backend.add_heap()
    assert not backend.add_buffer()


def test_a_refused_mapping_is_weather(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def map(self, *_: object) -> None:
            raise OSError(12, "no memory")

    backend = ready(posix_backend, paged_group())
    monkeypatch.setattr(backend, "_ranges", [Refusing()])
    assert not backend.map(0, 0, 0, 0, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits mappings")
def test_linux_names_its_limit_of_mappings_less_a_reserve() -> None:
    limit = system_mapping_limit()
    assert limit is not None
    assert limit + kvcache.backend.SPARE_MAPPINGS == int(
        Path("/proc/sys/vm/max_map_count").read_text()
    )


def test_elsewhere_nobody_counts_mappings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kvcache.backend, "MAX_MAP_COUNT_FILE", tmp_path / "missing")
    assert system_mapping_limit() is None


def test_the_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    raise_descriptor_limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard
