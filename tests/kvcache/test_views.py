"""Views over the real backends: what is appended is what is attended to."""

import mlx.core as mx
import numpy as np
import pytest

import metal_ext
from kvcache.backends.posix import PosixBackend
from kvcache.layout import KVFormat, KVShape, KVSpec, dense_layout, paged_layout
from kvcache.manager import KVCacheManager
from kvcache.views import layer_regions
from tests.kvcache import managers
from tests.kvcache.managers import full_group, join
from tests.recall import region_of

SHAPE = KVShape.uniform(2, KVSpec(2, 32, KVFormat.FLOAT32))
PAGE = metal_ext.SYSTEM_PAGE_BYTES
QUERY_HEADS = 4
SCALE = 0.25


def manager(shape: KVShape = SHAPE) -> KVCacheManager:
    layout = paged_layout(
        shape, max_tokens=256, heap_bytes=12 * PAGE, system_page_bytes=PAGE, page_bytes=PAGE
    )
    backend = PosixBackend(layout.groups[0], metal_ext.CpuWorkers(2))
    return managers.manager(layout, backend, budget_bytes=64 * layout.groups[0].heap_bytes)


class Reference:
    """All keys and values of some sequences, plainly kept."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)
        self.kept: dict[tuple[int, int, str], np.ndarray] = {}

    def rows(self, count: int, heads: int) -> np.ndarray:
        return self.rng.normal(size=(count, heads, 32)).astype(np.float32)

    def append(self, seq: int, layer: int, kind: str, rows: np.ndarray) -> None:
        old = self.kept.get((seq, layer, kind))
        self.kept[seq, layer, kind] = rows if old is None else np.concatenate([old, rows])

    def attend(self, seq: int, layer: int, start: int, queries: np.ndarray) -> np.ndarray:
        keys, values = (self.kept[seq, layer, kind] for kind in ("keys", "values"))
        out = np.empty_like(queries)
        for row in range(len(queries)):
            end = start + row + 1
            for head in range(QUERY_HEADS):
                kv = head // (QUERY_HEADS // 2)
                scores = keys[:end, kv] @ queries[row, head] * SCALE
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ values[:end, kv] / weights.sum()
        return out


def run_step(kv: KVCacheManager, reference: Reference, plan: list[tuple[int, int, int]]) -> None:
    for seq, start, count in plan:
        assert kv.reserve(seq, start + count)
    views = kv.views(plan)
    for layer in range(len(SHAPE.layers)):
        parts = {
            kind: [reference.rows(count, 2) for _, _, count in plan] for kind in ("keys", "values")
        }
        for kind, arrays in parts.items():
            for (seq, _, _), rows in zip(plan, arrays, strict=True):
                reference.append(seq, layer, kind, rows)
        queries = [reference.rows(count, QUERY_HEADS) for _, _, count in plan]
        asked = views.append(
            layer,
            mx.array(np.concatenate(queries)),
            mx.array(np.concatenate(parts["keys"])),
            mx.array(np.concatenate(parts["values"])),
            None,
        )
        got = np.array(views.attend(layer, asked, metal_ext.Softmax(SCALE)))
        want = np.concatenate(
            [
                reference.attend(seq, layer, start, q)
                for (seq, start, _), q in zip(plan, queries, strict=True)
            ]
        )
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    for seq, _, count in plan:
        kv.commit(seq, [0] * count)
    kv.step_completed(views.epoch)
    kv.check_invariants()


def test_steps_of_decoding_and_chunks_see_exactly_their_own_past() -> None:
    kv, reference = manager(), Reference()
    for seq in (1, 2, 3):
        assert join(kv, seq, 50)
    run_step(kv, reference, [(1, 0, 40)])
    run_step(kv, reference, [(1, 40, 1), (2, 0, 17), (3, 0, 3)])
    run_step(kv, reference, [(1, 41, 1), (2, 17, 1), (3, 3, 1)])
    run_step(kv, reference, [(1, 42, 1), (3, 4, 1), (2, 18, 60)])
    kv.close(2)
    assert join(kv, 4, 30)
    run_step(kv, reference, [(3, 5, 1), (4, 0, 30)])
    run_step(kv, reference, [(1, 43, 20)])


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_a_region_is_the_flat_array_of_a_segments_whole_past(kind: str) -> None:
    kv = manager()
    assert join(kv, 1, 40)
    reference = Reference()
    run_step(kv, reference, [(1, 0, 33)])
    views = kv.views([(1, 33, 1)])
    rows = reference.rows(1, 2)
    views.append(1, mx.array(rows), mx.array(rows), mx.array(rows), None)
    reference.append(1, 1, kind, rows)
    region = region_of(views, 1, kind, 0)
    np.testing.assert_array_equal(np.array(region), reference.kept[1, 1, kind])


@pytest.mark.parametrize("format", KVFormat)
def test_k_and_v_are_kept_as_their_layer_says(format: KVFormat) -> None:
    layout = dense_layout(
        KVShape.uniform(2, KVSpec(2, 32, format)), max_tokens=64, system_page_bytes=PAGE
    )
    assert {str(its.dtype) for its in layer_regions(layout)} == {f"mlx.core.{format.value}"}


def test_evaluating_the_end_of_a_step_runs_every_append() -> None:
    kv = manager()
    assert join(kv, 1, 4)
    assert kv.reserve(1, 4)
    views = kv.views([(1, 0, 4)])
    for layer in range(2):
        keys, values = mx.full((4, 2, 32), 7.0), mx.full((4, 2, 32), 8.0)
        views.append(layer, keys, keys, values, None)
    mx.eval(views.step_end([]))
    rows = full_group(kv).backend.rows(views.segments)
    for regions in kv._layers:
        # By a token that has seen nothing of the step.
        values = rows.region(mx.zeros((1,)), regions, "values", 0)
        assert mx.all(values == 8.0).item()
