"""The Metal backend and the views over it, on a device of plain Python."""

import itertools
from contextlib import AbstractContextManager
from tempfile import TemporaryFile
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import metal_ext
from kvcache.backends.backend import BackendFailedError, PageBackend, Releases, Segment
from kvcache.backends.choice import KVBackend
from kvcache.backends.faults import Act, FaultMemory
from kvcache.backends.metal import MetalBackend
from kvcache.layout import KVLayout, KVShape, KVSpec, dense_layout, paged_layout
from kvcache.manager import KVCacheManager
from kvcache.views import layer_regions
from tests.kvcache.managers import join, manager
from tests.kvcache.metal_double import Device, MistakeError, attention, install

KINDS = ("sparse", "paged", "dense")
SPEC = KVSpec(2, 64)
SHAPE = KVShape.uniform(2, SPEC)
TOKENS = 64  # of a block: 16 KiB pages
WAIT_S = 10.0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A Metal device for the test."""
    return install(monkeypatch)


def layout(kind: str) -> KVLayout:
    if kind == "dense":
        return dense_layout(SHAPE, max_tokens=256, system_page_bytes=16384)
    return paged_layout(
        SHAPE, max_tokens=256, heap_bytes=4 * 4 * 16384, system_page_bytes=16384, page_bytes=16384
    )


def ready(
    kind: str = "sparse", *, release_heaps: bool = False, maps_while_running: bool = True
) -> PageBackend:
    backend = MetalBackend(
        kind,
        layout(kind).groups[0],
        max_buffers=3,
        release_heaps=release_heaps,
        maps_while_running=maps_while_running,
    )
    assert backend.add_heap()
    assert backend.add_buffer()
    return backend


def write(backend: PageBackend, buffer: int, number: float, count: int = 3) -> None:
    """Puts that number into the first rows of a buffer, in all regions."""
    rows = backend.rows([Segment(buffer, 0, count)])
    values = mx.full((count, SPEC.kv_heads, SPEC.head_dim), number)
    layers = layer_regions(layout(backend.name))
    token = mx.zeros((1,))
    mx.eval(
        rows.end([rows.append(token, layer, values, values, values, None)[0] for layer in layers])
    )


def first_rows(
    backend: PageBackend, buffer: int, tokens: int, layer: int, kind: str, count: int = 1
) -> Any:
    """The rows of a region that a step of its last ``count`` rows sees."""
    rows = backend.rows([Segment(buffer, tokens - count, count)])
    regions = layer_regions(layout(backend.name))[layer]
    found = rows.region(mx.zeros((1,)), regions, kind, 0)
    mx.eval(rows.end([found]))
    return np.array(found.astype(mx.float32))


# --- what a backend promises --------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_metal_backend_says_what_it_is(device: Device, kind: str) -> None:
    backend = ready(kind)
    assert backend.name == kind
    assert backend.shares_blocks == (kind != "dense")
    assert backend.releases is (Releases.ARENA if kind == "dense" else Releases.NOTHING)
    assert backend.zeroes_blocks
    assert (backend.mapping_limit, backend.heap_limit) == (None, None)
    may = Releases.ARENA if kind == "dense" else Releases.IDLE
    assert ready(kind, release_heaps=True).releases is may


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_back_in_every_region(device: Device, kind: str) -> None:
    backend = ready(kind)
    assert backend.map(0, 0, 0, 0, 1, writable=True)
    write(backend, 0, 5.0)
    for layer, name in itertools.product(range(2), ("keys", "values")):
        assert (first_rows(backend, 0, 3, layer, name, count=2) == 5.0).all()
    assert set(device.calls) == {"append", "gather" if kind == "paged" else "region_view"}
    device.calls.clear()
    for layer, name in itertools.product(range(2), ("keys", "values")):
        assert (first_rows(backend, 0, 3, layer, name) == 5.0).all()
    assert set(device.calls) == {"gather"}, "a view of a row that is decoded may be too early"


def test_a_block_can_be_read_in_many_buffers_and_written_in_one(device: Device) -> None:
    backend = ready()
    assert backend.add_buffer()
    assert backend.map(0, 0, 0, 3, 1, writable=True)
    write(backend, 0, 5.0, TOKENS)
    assert backend.map(1, 0, 0, 3, 1, writable=False)
    assert backend.map(1, 1, 0, 2, 1, writable=True)
    assert (first_rows(backend, 1, TOKENS + 1, 1, "values")[:TOKENS] == 5.0).all()
    with pytest.raises(RuntimeError, match="would write a sealed block"):
        write(backend, 1, 6.0)


@pytest.mark.parametrize("kind", ["sparse", "paged"])
def test_a_block_passes_through_a_file_and_is_shared(device: Device, kind: str) -> None:
    backend = ready(kind)
    assert backend.add_buffer()
    assert backend.map(0, 0, 0, 0, 1, writable=True)
    assert backend.map(0, 1, 0, 1, 1, writable=True)
    write(backend, 0, 7.0, TOKENS)
    with TemporaryFile() as file:
        total = backend.write_block(0, 0, file.fileno(), 0)
        assert backend.read_block(0, 1, file.fileno(), 0) == total
        assert backend.map(1, 0, 0, 1, 1, writable=False)
        with pytest.raises(RuntimeError, match="block 0 is read-only"):
            backend.read_block(1, 0, file.fileno(), 0)
        with pytest.raises(RuntimeError, match="block 1 is not mapped"):
            backend.write_block(1, 1, file.fileno(), 0)
    assert backend.map(1, 1, 0, 2, 1, writable=True)
    assert (first_rows(backend, 1, TOKENS + 1, 1, "values")[:TOKENS] == 7.0).all()


def test_a_block_is_copied_on_the_mappers_thread_and_counted(device: Device) -> None:
    backend = ready()
    assert backend.add_buffer()
    assert backend.map(0, 0, 0, 0, 1, writable=True)
    assert backend.map(1, 0, 0, 1, 1, writable=True)
    write(backend, 0, 7.0)
    backend.copy_block(0, 0, 1, 0, tokens=3)
    assert (first_rows(backend, 1, 3, 1, "values") == 7.0).all()
    assert backend.copied_bytes == 3 * SHAPE.bytes_per_token


def test_a_block_that_is_mapped_again_holds_zeros(device: Device) -> None:
    backend = ready()
    assert backend.map(0, 0, 0, 0, 1, writable=True)
    write(backend, 0, 7.0)
    assert backend.wait(backend.unmap(0, 0, 1), WAIT_S)
    ticket = backend.map_ahead(0, 0, 0, 0, 1)
    assert backend.wait(ticket, WAIT_S)
    assert not backend.refused(ticket)
    assert (first_rows(backend, 0, 3, 0, "keys") == 0.0).all()


def test_the_first_act_of_each_kind_is_guarded_and_no_other(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded: list[Act] = []
    intent = FaultMemory.intent

    def seen(self: FaultMemory, act: Act) -> AbstractContextManager[None]:
        guarded.append(act)
        return intent(self, act)

    monkeypatch.setattr(FaultMemory, "intent", seen)
    backend = ready(release_heaps=True)
    for _ in range(3):
        assert backend.map(0, 0, 0, 0, 1, writable=True)
        assert backend.wait(backend.map_ahead(0, 1, 0, 1, 1), WAIT_S)
        assert backend.wait(backend.unmap(0, 0, 2), WAIT_S)
        assert backend.wait(backend.release(0, 0, 4), WAIT_S)
    assert guarded == [Act.MAP, Act.UNMAP, Act.RELEASE]
    assert FaultMemory(KVBackend.SPARSE).found() == ()


def test_a_first_act_that_fails_is_remembered_of_its_kv_backend(device: Device) -> None:
    device.silent = True
    with pytest.raises(BackendFailedError, match="the first mapping took over"):
        ready("paged").map_ahead(0, 0, 0, 0, 1)
    (said,) = FaultMemory(KVBackend.PAGED).found()
    assert "the first mapping failed: the first mapping took over 20 s" in said
    assert FaultMemory(KVBackend.SPARSE).found() == ()


def test_a_heap_is_charged_in_full_from_when_it_is_made_and_kept(device: Device) -> None:
    backend = ready()
    assert backend.map(0, 0, 0, 0, 1, writable=True)
    assert backend.committed_bytes() == layout("sparse").groups[0].heap_bytes
    assert backend.wait(backend.unmap(0, 0, 1), WAIT_S)
    with pytest.raises(AssertionError, match="heaps are kept"):
        backend.release(0, 0, 4)


def test_an_arena_is_charged_in_full_from_the_start(device: Device) -> None:
    backend = MetalBackend("dense", layout("dense").groups[0], max_buffers=3, release_heaps=True)
    assert backend.committed_bytes() == 3 * layout("dense").groups[0].heap_bytes
    its = layout("dense")
    kv = manager(its, backend, budget_bytes=3 * its.groups[0].heap_bytes)
    kv.check_invariants()
    stats = kv.stats()
    assert (stats.num_heaps, stats.kept_heaps) == (3, 3)
    assert stats.free_slack_bytes == stats.capacity_bytes == stats.committed_bytes


def test_a_heap_is_released_where_the_machine_may(device: Device) -> None:
    backend = ready(release_heaps=True)
    assert backend.map(0, 0, 0, 0, 1, writable=True)
    assert backend.wait(backend.unmap(0, 0, 1), WAIT_S)
    assert backend.wait(backend.release(0, 0, 4), WAIT_S)
    assert backend.committed_bytes() == 0


# --- mapping points -----------------------------------------------------------------------------


def at_points(*, release_heaps: bool = False) -> PageBackend:
    """One that has mapped and unmapped before."""
    backend = ready(release_heaps=release_heaps, maps_while_running=False)
    assert backend.add_buffer()
    assert backend.map(0, 0, 0, 0, 1, writable=True)
    backend.unmap(0, 0, 1)
    backend.finish_mappings()
    return backend


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bold", [False, True])
def test_only_sparse_buffers_wait_for_mapping_points(device: Device, kind: str, bold: bool) -> None:
    backend = ready(kind, maps_while_running=bold)
    assert backend.maps_while_running == (bold or kind != "sparse")
    assert device.kv_backends[0].maps_beside_steps == backend.maps_while_running
    assert backend.map(0, 0, 0, 0, 1, writable=True)
    backend.finish_mappings()
    write(backend, 0, 5.0)
    assert device.kv_backends[0].finished == (0 if backend.maps_while_running else 2)


def test_all_of_a_mapping_point_is_waited_for_at_once(device: Device) -> None:
    backend = at_points()
    (kv_backend,) = device.kv_backends
    before = kv_backend.finished
    for block in range(3):
        assert backend.map(0, block, 0, block, 1, writable=True)
    assert backend.map(1, 0, 0, 3, 1, writable=True)
    with pytest.raises(MistakeError, match="before mappings are finished"):
        write(backend, 0, 5.0)
    backend.finish_mappings()
    assert kv_backend.finished == before + 1
    write(backend, 0, 5.0)
    backend.copy_block(0, 0, 1, 0, tokens=3)
    write(backend, 1, 6.0)
    backend.finish_mappings()  # of the copy
    backend.finish_mappings()
    assert kv_backend.finished == before + 2
    with pytest.raises(AssertionError, match="nothing is mapped while steps run"):
        backend.map_ahead(0, 3, 0, 3, 1)


def test_while_a_step_runs_nothing_is_mapped(device: Device) -> None:
    backend = at_points()
    assert backend.map(0, 0, 0, 0, 1, writable=True)
    backend.finish_mappings()
    rows = backend.rows([Segment(0, 0, 1)])
    with pytest.raises(MistakeError, match="mapped while a step is in flight"):
        backend.map(1, 0, 0, 1, 1, writable=True)
    rows.cancel()


def test_a_heap_that_has_its_memory_again_is_mapped_without_a_refusal(device: Device) -> None:
    backend = at_points(release_heaps=True)
    assert backend.commit_heap(0), "it has it"
    backend.release(0, 0, 4)
    backend.finish_mappings()
    assert backend.committed_bytes() == 0
    device.refuses = True
    assert not backend.commit_heap(0)
    with pytest.raises(AssertionError, match="without memory"):
        backend.map(0, 0, 0, 0, 1, writable=True)
    device.refuses = False
    assert backend.commit_heap(0)
    assert backend.committed_bytes() == layout("sparse").groups[0].heap_bytes
    device.refuses = True
    assert backend.map(0, 0, 0, 0, 1, writable=True)
    with pytest.raises(BackendFailedError, match="a heap that has its memory"):
        backend.finish_mappings()


def test_a_mapping_point_that_never_ends_is_a_failure(device: Device) -> None:
    backend = at_points()
    assert backend.map(0, 0, 0, 0, 1, writable=True)
    device.silent = True
    with pytest.raises(BackendFailedError, match="mapping took over 20 s"):
        backend.finish_mappings()
    device.failure = "no answer"
    with pytest.raises(BackendFailedError, match="no answer"):
        backend.finish_mappings()


def test_the_first_mapping_is_guarded_until_it_is_finished(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = ready(maps_while_running=False)
    (kv_backend,) = device.kv_backends
    found: list[int] = []
    real = kv_backend.finish_mappings

    def finish(mapper: Any) -> int:
        found.append(len(FaultMemory(KVBackend.SPARSE)._files()))
        return int(real(mapper))

    monkeypatch.setattr(kv_backend, "finish_mappings", finish)
    assert backend.map(0, 0, 0, 0, 1, writable=True)
    assert backend.map(0, 1, 0, 1, 1, writable=True)
    backend.finish_mappings()
    assert found == [1, 0]


# --- weather and failure ------------------------------------------------------------------------


def test_what_the_device_refuses_is_weather(device: Device) -> None:
    backend = ready()
    device.refuses = True
    assert not backend.add_heap()
    assert not backend.add_buffer()
    assert not backend.map(0, 0, 0, 0, 1, writable=True)
    ticket = backend.map_ahead(0, 0, 0, 0, 1)
    assert backend.refused(ticket)
    device.refuses = False
    assert backend.map(0, 0, 0, 0, 1, writable=True)


def test_no_more_buffers_are_made_than_were_planned(device: Device) -> None:
    backend = ready()
    assert backend.add_buffer()
    assert backend.add_buffer()
    assert not backend.add_buffer()


@pytest.mark.parametrize("fault", ["failure", "mapper_failure"])
def test_a_device_or_a_mapper_that_failed_ends_the_engine(device: Device, fault: str) -> None:
    backend = ready()
    setattr(device, fault, "no answer")
    with pytest.raises(BackendFailedError, match="no answer"):
        backend.completed_ticket()
    with pytest.raises(BackendFailedError, match="no answer"):
        backend.map(0, 0, 0, 0, 1, writable=True)


def test_a_mapping_that_never_completes_is_a_failure_and_not_a_mapping(device: Device) -> None:
    backend = ready()
    device.silent = True
    with pytest.raises(BackendFailedError, match="mapping took over 20 s"):
        backend.map(0, 0, 0, 0, 1, writable=True)


def test_a_device_that_lacks_something_is_refused_by_name(device: Device) -> None:
    device.said["missing_for_sparse"] = ["the device makes no Metal 4 command queue"]
    with pytest.raises(RuntimeError, match="no Metal 4 command queue"):
        ready()


# --- the end ------------------------------------------------------------------------------------


def test_the_end_waits_for_the_mapper_and_then_ends_the_kv_backend(device: Device) -> None:
    backend = ready()
    assert backend.map(0, 0, 0, 0, 1, writable=True)
    assert backend.shut_down()
    assert device.kv_backends[0].ended


def test_a_mapper_that_does_not_answer_leaves_the_kv_backend_alone(device: Device) -> None:
    backend = ready()
    backend.map_ahead(0, 0, 0, 0, 1)
    device.silent = True
    assert not backend.shut_down()
    assert not device.kv_backends[0].ended


def test_a_step_that_was_never_ended_is_no_ordered_end(device: Device) -> None:
    backend = ready()
    assert backend.map(0, 0, 0, 0, 1, writable=True)
    rows = backend.rows([Segment(0, 0, 1)])
    assert not backend.shut_down()
    rows.cancel()
    assert backend.shut_down()


def test_a_gpu_that_failed_is_not_asked_any_more(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("command buffer execution failed")

    backend = ready()
    monkeypatch.setattr(mx, "synchronize", fail)
    assert not backend.shut_down()
    assert not device.kv_backends[0].ended


# --- the views ----------------------------------------------------------------------------------


def cache(kind: str) -> KVCacheManager:
    its = layout(kind)
    backend = MetalBackend(
        kind, its.groups[0], max_buffers=8, release_heaps=False, maps_while_running=True
    )
    return manager(its, backend, budget_bytes=8 * its.groups[0].heap_bytes)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"window": 8, "sinks": mx.array([-1.0, 0.0, 1.0, 2.0])},
        {"window": 1000, "sinks": mx.array([-1.0, 0.0, 1.0, 2.0])},
        {"window": 8, "softcap": 1.5},
        {"softcap": 1.5},
    ],
    ids=lambda how: " ".join(how),
)
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_rows_and_chunks_see_exactly_their_own_past(
    device: Device, kind: str, how: dict[str, Any]
) -> None:
    kv, softmax = cache(kind), metal_ext.Softmax(0.125, **how)
    rng = np.random.default_rng(3)
    past: dict[int, list[mx.array]] = {1: [], 2: []}
    assert join(kv, 1, 100)
    assert join(kv, 2, 100)
    for plan in ([(1, 0, 9)], [(1, 9, 1), (2, 0, 30)], [(1, 10, 1), (2, 30, 1)], [(2, 31, 40)]):
        for seq, start, count in plan:
            assert kv.reserve(seq, start + count)
        views = kv.views(plan)
        rows = sum(count for _, _, count in plan)
        queries, keys, values = (
            mx.array(rng.normal(size=(rows, heads, 64))).astype(mx.bfloat16) for heads in (4, 2, 2)
        )
        first = 0
        for seq, _, count in plan:
            past[seq].append(mx.stack([keys, values])[:, first : first + count])
            first += count
        views.append(1, keys, keys, values, None)
        got = views.attend(1, queries, softmax)
        mx.eval(views.step_end([got]))
        assert got.dtype == mx.bfloat16
        first = 0
        for seq, start, count in plan:
            all_keys, all_values = (
                its.transpose(1, 0, 2).astype(mx.float32)
                for its in mx.concatenate(past[seq], axis=1)
            )
            for row in range(count):
                seen = slice(0, start + row + 1)
                asked = queries[first + row].astype(mx.float32)
                want = attention(asked, all_keys[:, seen], all_values[:, seen], softmax)
                assert mx.allclose(got[first + row], want, atol=0.02).item()
            first += count
        for seq, _, count in plan:
            kv.commit(seq, [0] * count)
        kv.step_completed(views.epoch)
        kv.check_invariants()
    assert {"append", "decode_attention"} < set(device.calls)


def test_norm_rope_and_append_are_one_operation(device: Device) -> None:
    kv = cache("sparse")
    assert join(kv, 1, 10)
    assert kv.reserve(1, 4)
    views = kv.views([(1, 0, 4)])
    keys, queries = mx.random.normal((4, 2, 64)), mx.random.normal((4, 4, 64))
    weight = mx.full((64,), 2.0)
    rope = metal_ext.RopeTable([1e4 ** (-i / 32) for i in range(32)])
    how = metal_ext.QKTransform((weight, weight, 1e-6), rope)
    turned = views.append(0, queries, keys, keys, how)
    mx.eval(views.step_end([turned]))
    assert turned.shape == queries.shape
    normed = mx.fast.rms_norm(queries[:1], weight, 1e-6)
    assert mx.allclose(turned[:1], normed).item(), "the angle of position 0 is 0"
    assert not mx.allclose(turned[1:2], mx.fast.rms_norm(queries[1:2], weight, 1e-6)).item()
    assert device.calls == ["project_append"]


def test_a_wide_head_keeps_no_scores(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    attention = mx.fast.scaled_dot_product_attention

    def noted(*arrays: mx.array, force_fused: bool = False, **how: Any) -> mx.array:
        asked.append(force_fused)
        return attention(*arrays, **how)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    for head_dim, count in ((256, 9), (256, 8), (128, 9)):
        shape = KVShape.uniform(1, KVSpec(1, head_dim))
        its = paged_layout(
            shape, max_tokens=64, heap_bytes=65536, system_page_bytes=16384, page_bytes=16384
        )
        backend = MetalBackend("sparse", its.groups[0], max_buffers=1, release_heaps=False)
        assert backend.add_heap()
        assert backend.add_buffer()
        assert backend.map(0, 0, 0, 0, 1, writable=True)
        backend.finish_mappings()
        rows, (layer,) = backend.rows([Segment(0, 0, count)]), layer_regions(its)
        queries = mx.ones((count, 2, head_dim))
        rows.chunk_attention(mx.zeros((1,)), layer, queries, 0, metal_ext.Softmax(1.0))
    assert asked == [True, False, False]


def test_a_step_that_failed_is_given_up_on_the_device(device: Device) -> None:
    kv = cache("sparse")
    assert join(kv, 1, 10)
    assert kv.reserve(1, 4)
    views = kv.views([(1, 0, 4)])
    views.cancel()
    assert device.calls == ["abandon"]
    assert not device.kv_backends[0].open_epochs
