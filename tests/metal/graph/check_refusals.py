"""What an operation refuses, before it touches any memory."""

from collections.abc import Callable

import mlx.core as mx
import pytest

import metal_ext
from metal_ext import (
    AddressRange,
    CopyCounter,
    CpuWorkers,
    Geometry,
    Layer,
    Mapper,
    MetalKVBackend,
    RopeTable,
    RowTable,
)
from tests.metal.graph.stage import KINDS, PAGE, Shape, Stage

ONES = mx.ones((64,))


class Set:
    """A sequence of 5 rows, and a step that adds 2 to it."""

    def __init__(self, kind: str = "sparse") -> None:
        self.stage = Stage(kind, Shape(kept=mx.float32))
        self.one = self.stage.open(64)
        self.stage.step((self.one, 5))
        self.rows = self.stage.rows((self.one, 2))
        self.token, self.layer = self.stage.tokens[0], self.stage.layers[0]
        self.keys = self.stage.shape.numbers(2, 2)
        self.queries = self.stage.shape.numbers(2, 6)

    def append(self, **changes: object) -> object:
        arguments = {
            "token": self.token, "keys": self.keys, "values": self.keys, "rows": self.rows,
            "layer": self.layer, "workers": self.stage.kv_backend,
        }  # fmt: skip
        return metal_ext.append(**(arguments | changes))  # type: ignore[call-overload]

    def decode(self, **changes: object) -> object:
        arguments = {
            "token": self.token, "queries": self.queries, "rows": self.rows, "first_row": 0,
            "layer": self.layer, "kv_heads": 2, "softmax": metal_ext.Softmax(0.1),
            "workers": self.stage.kv_backend,
        }  # fmt: skip
        return metal_ext.decode_attention(**(arguments | changes))  # type: ignore[call-overload]

    def project(self, **changes: object) -> object:
        arguments = {
            "token": self.token, "queries": self.queries, "keys": self.keys, "values": self.keys,
            "norms": (ONES, ONES, 1e-6), "rope": RopeTable([1.0] * 32), "rows": self.rows,
            "layer": self.layer, "kv_backend": self.stage.kv_backend,
        }  # fmt: skip
        return metal_ext.project_append(**(arguments | changes))  # type: ignore[call-overload]

    def gather(self, **changes: object) -> object:
        arguments = {
            "token": self.token, "rows": self.rows, "segment": 0, "first": 0, "tokens": 7,
            "layer": self.layer, "kv_heads": 2, "head_dim": 64, "kv_backend": self.stage.kv_backend,
        }  # fmt: skip
        return metal_ext.gather(**(arguments | changes))  # type: ignore[arg-type]

    def view(self, **changes: object) -> object:
        arguments = {
            "token": self.token, "range": self.one.range, "region": 0, "tokens": 7, "kv_heads": 2,
            "head_dim": 64, "dtype": mx.float32, "kv_backend": self.stage.kv_backend,
        }  # fmt: skip
        return metal_ext.region_view(**(arguments | changes))  # type: ignore[arg-type]

    def copy(self, source: AddressRange, target: AddressRange) -> object:
        return self.stage.kv_backend.copy_block(Mapper(), source, 0, target, 1, 1, CopyCounter())

    def end(self) -> None:
        self.stage.kv_backend.abandon(self.rows)
        self.stage.end()


def on_host() -> AddressRange:
    return AddressRange.sparse(Shape(kept=mx.float32).geometry("sparse"))


def three(heads: int, dim: int = 64, rows: int = 2, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.zeros((rows, heads, dim), dtype)


WRONG: dict[str, tuple[Callable[[Set], object], type[Exception], str]] = {
    "rows of keys": (lambda s: s.append(keys=three(2, rows=3), values=three(2, rows=3)), ValueError,
                     "keys has 3 rows; the row table has 2"),
    "two dimensions": (lambda s: s.append(keys=mx.zeros((2, 128))), ValueError, "2 dimensions"),
    "two shapes": (lambda s: s.append(values=three(1)), ValueError, "different shapes"),
    "two types": (lambda s: s.append(values=three(2, dtype=mx.float16)), ValueError,
                  "keys and values have different types"),
    "integers": (lambda s: s.append(keys=three(2, dtype=mx.int32), values=three(2, dtype=mx.int32)),
                 ValueError, "keys must be float32, float16 or bfloat16"),
    "bytes of a row": (lambda s: s.append(keys=three(1), values=three(1)), ValueError,
                       "region 0 has rows of 512 bytes; these heads need 256"),
    "head_dim": (lambda s: s.append(keys=three(4, 32), values=three(4, 32)), ValueError,
                 "head_dim is 32; the Metal kernels are built for 64, 128 and 256"),
    "a region": (lambda s: s.append(layer=Layer(0, 4, mx.float32)), IndexError,
                 "value_region is 4"),
    "integers kept": (lambda s: s.append(layer=Layer(0, 1, mx.int32)), ValueError, "K and V must"),
    "the CPU's rows": (lambda s: s.append(workers=CpuWorkers(1)), TypeError, "incompatible"),
    "another backend": (lambda s: s.append(workers=Stage("paged").kv_backend), ValueError,
                          "the rows are of another backend"),
    "rows of the table": (lambda s: s.decode(first_row=1), IndexError, r"rows of the table \[1"),
    "heads": (lambda s: s.decode(queries=three(5)), ValueError, "5 query heads cannot share 2"),
    "a weight": (lambda s: s.project(norms=(ONES, ONES[:32], 1e-6)), ValueError,
                 r"k_weight must be \[64\] float32"),
    "a weight's type": (lambda s: s.project(norms=(ONES.astype(mx.float16), ONES, 1e-6)),
                        ValueError, r"q_weight must be \[64\] float32"),
    "too many frequencies": (lambda s: s.project(rope=RopeTable([1.0] * 33)), ValueError,
                             "33 frequencies do not turn heads of 64 dimensions"),
    "another head_dim": (lambda s: s.project(queries=three(6, 128)), ValueError,
                         "a different head_dim"),
    "a segment": (lambda s: s.gather(segment=1), IndexError, r"segments of the table \[1"),
    "tokens to gather": (lambda s: s.gather(tokens=8), IndexError,
                         r"the segment's range \[0, 0 \+ 8"),
    "gathered heads": (lambda s: s.gather(kv_heads=0), IndexError, "kv_heads is 0"),
    "tokens to view": (lambda s: s.view(tokens=10**6), IndexError, "mapped tokens"),
    "a view's shape": (lambda s: s.view(kv_heads=1), ValueError, "do not fill them"),
    "a view on the CPU": (lambda s: s.view(kv_backend=None), ValueError, "memory is a device's"),
    "a step of nothing": (lambda s: metal_ext.step_end([], s.rows, s.stage.kv_backend), ValueError,
                          "step_end needs the arrays"),
    "no rows": (lambda s: s.stage.kv_backend.rows([]), ValueError, "at least one segment"),
    "unmapped rows": (lambda s: s.stage.kv_backend.rows([(s.one.range, 64, 1)]), IndexError,
                      "segment of mapped tokens"),
    "the CPU's table": (lambda s: RowTable([(s.one.range, 0, 1)]), ValueError, "a device's"),
    "a copy out of the CPU's memory": (lambda s: s.copy(on_host(), s.one.range), ValueError,
                                       "the range is not of this backend"),
    "a copy into the CPU's memory": (lambda s: s.copy(s.one.range, on_host()), ValueError,
                                     "the range is not of this backend"),
    "a map without a mapper": (lambda s: s.one.range.map(s.stage.heaps[0], 0, 1, 1, True),
                               ValueError, "a device's"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_it_is_refused_by_name(case: str) -> None:
    call, error, words = WRONG[case]
    made = Set()
    with pytest.raises(error, match=words):
        call(made)
    made.end()


def test_a_row_that_is_decoded_is_not_seen_in_a_view_before_its_step_is_complete() -> None:
    stage = Stage("sparse")
    one, other = stage.open(64), stage.open(64)
    stage.step((one, 5), (other, 5))
    rows, shape = stage.rows((one, 1), (other, 2)), stage.shape

    def view(of: AddressRange) -> mx.array:
        form = (shape.kv_heads, shape.head_dim, shape.kept)
        return metal_ext.region_view(stage.tokens[0], of, 0, 6, *form, stage.kv_backend)

    view(other.range)
    with pytest.raises(RuntimeError, match=r"of which epoch 2 has one row: metal_ext\.gather"):
        view(one.range)
    stage.kv_backend.abandon(rows)
    view(one.range)
    stage.end()


def test_a_paged_region_has_no_view() -> None:
    made = Set("paged")
    with pytest.raises(ValueError, match="a paged region lies in no one array"):
        made.view()
    made.end()


@pytest.mark.parametrize("kind", KINDS)
def test_after_its_end_a_step_takes_nothing_more(kind: str) -> None:
    made = Set(kind)
    late = made.decode()
    mx.eval(metal_ext.step_end([made.token], made.rows, made.stage.kv_backend))
    for again in (
        made.append, made.decode, made.gather, made.project,
        lambda: metal_ext.step_end([made.token], made.rows, made.stage.kv_backend),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="of epoch 2, which has ended"):
            again()
    with pytest.raises(RuntimeError, match="decode_attention runs after the end of its step"):
        mx.eval(late)
    made.stage.end()


def test_steps_end_in_the_order_in_which_they_began() -> None:
    made = Set()
    later = made.stage.rows((made.one, 3))
    token, backend = made.token, made.stage.kv_backend
    with pytest.raises(RuntimeError, match="epoch 3 cannot end before epoch 2"):
        metal_ext.step_end([token], later, backend)
    first = metal_ext.step_end([token], made.rows, backend)
    second = metal_ext.step_end([token], later, backend)
    mx.eval(second)
    assert (first.item(), second.item(), backend.completed_epoch) == (2, 3, 3)
    made.stage.end()


def test_a_step_that_failed_can_be_given_up() -> None:
    made = Set()
    made.append()
    made.stage.kv_backend.abandon(made.rows)
    assert made.stage.kv_backend.completed_epoch == made.rows.epoch == 2
    made.stage.step((made.one, 2))
    assert made.stage.kv_backend.completed_epoch == 3
    made.stage.end()


def test_a_step_whose_end_was_made_can_be_given_up() -> None:
    made = Set()
    end = metal_ext.step_end([made.token], made.rows, made.stage.kv_backend)
    made.stage.kv_backend.abandon(made.rows)
    made.stage.step((made.one, 2))
    with pytest.raises(RuntimeError, match="step_end runs after the end of its step"):
        mx.eval(end)
    made.stage.end()


def test_a_kv_backend_says_what_it_cannot_be() -> None:
    geometry = Shape().geometry("sparse")
    with pytest.raises(ValueError, match="must be sparse, paged or dense"):
        MetalKVBackend("flat", geometry, 1)
    with pytest.raises(IndexError, match="max_ranges is 0"):
        MetalKVBackend("sparse", geometry, 0)
    with pytest.raises(IndexError, match="timeout_s must be greater than 0"):
        MetalKVBackend("sparse", geometry, 1, 0.0)
    with pytest.raises(ValueError, match="a dense range is one block"):
        MetalKVBackend("dense", geometry, 1)
    row = Shape().row_bytes
    uneven = Geometry(
        page_bytes=PAGE,
        tokens_per_block=3 * PAGE // row,
        blocks_per_heap=1,
        blocks_per_range=1,
        region_row_bytes=[row, row],
    )
    with pytest.raises(ValueError, match=r"a paged block has 192 tokens; .* a power of two"):
        MetalKVBackend("paged", uneven, 1)


def test_the_device_is_asked_what_it_can_do() -> None:
    found = metal_ext.metal_capabilities()
    assert found["placement_sparse"] is True
    assert found["missing_for_sparse"] == []
    assert isinstance(found["max_buffer_bytes"], int)
