"""Kernels that are right pass; any wrong operation is named."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

import metal_ext
from kvcache.kv_backends import KVBackend
from kvcache.layout import KVFormat, KVShape, KVSpec
from kvcache.metal_backend import MetalBackend
from kvcache.native_backends import PosixBackend
from kvcache.selftest.kernels import KernelChecks, kernel_specs, name_of, product_checks
from kvcache.selftest.kv_backend import MAX_TOKENS, run_checks, small_layout
from kvcache.selftest.run import Result
from tests.kvcache.metal_double import RopeTable, install
from tests.kvcache.selftest.backends import Liar, RowsLiar

SHAPE = KVShape.uniform(1, KVSpec(2, 64))


def tried(kv_backend: KVBackend, shape: KVShape, backend: Callable[[Any], Any]) -> list[Result]:
    layout = small_layout(kv_backend, shape, max_tokens=MAX_TOKENS, system_page_bytes=4096)
    checks = KernelChecks(backend(layout.groups[0]), layout, on_gpu=kv_backend.on_gpu)
    return run_checks(checks.checks(), lambda _: None)


def on_cpu(group: Any) -> Any:
    return PosixBackend(group, metal_ext.CpuWorkers(2))


def test_every_width_and_every_kind_of_number_is_tried() -> None:
    assert [name_of(shape) for shape in kernel_specs(on_gpu=False)] == [
        f"{kind} x {width}" for width in (64, 128, 256) for kind in ("bfloat16", "float32")
    ]
    assert "float16 x 128" in [name_of(shape) for shape in kernel_specs(on_gpu=True)]


@pytest.mark.parametrize("shape", [SHAPE, KVShape.uniform(1, KVSpec(2, 128, KVFormat.FLOAT32))])
def test_the_cpus_kernels_are_right(shape: KVShape) -> None:
    results = tried(KVBackend.POSIX, shape, on_cpu)
    assert [step.name for step in results] == ["map", "chunk", "decode", "project", "end"]
    assert all(step.passed for step in results), results[-1]


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        KVShape.uniform(1, KVSpec(2, 64, KVFormat.FLOAT32)),
        KVShape.uniform(1, KVSpec(2, 64, KVFormat.FLOAT16)),
    ],
)
@pytest.mark.parametrize("kv_backend", [KVBackend.SPARSE, KVBackend.PAGED, KVBackend.METAL_DENSE])
def test_a_gpus_kernels_are_tried_with_norm_and_rope_in_one(
    monkeypatch: pytest.MonkeyPatch, shape: KVShape, kv_backend: KVBackend
) -> None:
    device = install(monkeypatch)

    def make(group: Any) -> Any:
        return MetalBackend(kv_backend.setting, group, max_buffers=3, release_heaps=False)

    results = tried(kv_backend, shape, make)
    assert all(step.passed for step in results), results[-1]
    assert {"project_append", "swiglu"} < set(device.calls)


@pytest.mark.parametrize(
    ("operation", "step"), [("chunk_attention", "chunk"), ("decode_attention", "decode")]
)
def test_attention_that_is_off_is_noticed(operation: str, step: str) -> None:
    def make(group: Any) -> Any:
        backend = on_cpu(group)
        return Liar(
            backend,
            rows=lambda segments: RowsLiar(
                backend.rows(segments), operation, lambda out: out + 0.1
            ),
        )

    results = tried(KVBackend.POSIX, SHAPE, make)
    assert (results[-1].name, results[-1].passed) == (step, False)
    assert "at most; 0.06 is allowed" in results[-1].text


def test_a_number_that_is_kept_wrong_by_one_bit_is_noticed() -> None:
    def make(group: Any) -> Any:
        backend = on_cpu(group)

        def nudge(region: mx.array) -> mx.array:
            return region + mx.abs(region) / 128

        return Liar(
            backend, rows=lambda segments: RowsLiar(backend.rows(segments), "region", nudge)
        )

    results = tried(KVBackend.POSIX, SHAPE, make)
    assert (results[-1].name, results[-1].passed) == ("chunk", False)
    assert "what is kept is not what was given" in results[-1].text


def test_a_projection_that_is_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    project = metal_ext.project_append

    def off(*arguments: Any) -> Any:
        changed = list(arguments)
        changed[5] = RopeTable([1.01 * its for its in changed[5].frequencies])
        return project(*changed)

    monkeypatch.setattr(metal_ext, "project_append", off)

    def make(group: Any) -> Any:
        return MetalBackend("sparse", group, max_buffers=3, release_heaps=False)

    results = tried(KVBackend.SPARSE, KVShape.uniform(1, KVSpec(2, 64, KVFormat.FLOAT32)), make)
    assert (results[-1].name, results[-1].passed) == ("project", False)


WIDE = KVShape.uniform(1, KVSpec(2, 128, KVFormat.FLOAT32))


@pytest.mark.parametrize("kv_backend", [KVBackend.SPARSE, KVBackend.PAGED, KVBackend.METAL_DENSE])
def test_states_are_tried_where_heads_have_the_width_of_a_gpus_kernels(
    monkeypatch: pytest.MonkeyPatch, kv_backend: KVBackend
) -> None:
    device = install(monkeypatch)

    def make(group: Any) -> Any:
        return MetalBackend(kv_backend.setting, group, max_buffers=3, release_heaps=False)

    results = tried(kv_backend, WIDE, make)
    assert all(step.passed for step in results), results[-1]
    assert [step.name for step in results][:3] == ["map", "states", "chunk"]
    assert device.calls.count("gated_delta") == 3


@pytest.mark.parametrize("what", ["state", "output"])
def test_a_recurrence_that_is_off_is_noticed(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    install(monkeypatch)
    recur = metal_ext.gated_delta

    def off(*arguments: Any) -> Any:
        token, qkv, *rest = arguments
        if what == "state":  # which later rows alone show
            qkv = qkv.at[-1:].add(0.2)
        token, made = recur(token, qkv, *rest)
        return token, made if what == "state" else made + 0.1

    monkeypatch.setattr(metal_ext, "gated_delta", off)

    def make(group: Any) -> Any:
        return MetalBackend("sparse", group, max_buffers=3, release_heaps=False)

    results = tried(KVBackend.SPARSE, WIDE, make)
    assert (results[-1].name, results[-1].passed) == ("states", False)


def test_a_gate_that_is_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    swiglu = metal_ext.swiglu
    monkeypatch.setattr(metal_ext, "swiglu", lambda gate, up: swiglu(up, gate))

    def make(group: Any) -> Any:
        return MetalBackend("sparse", group, max_buffers=3, release_heaps=False)

    results = tried(KVBackend.SPARSE, SHAPE, make)
    assert (results[-1].name, results[-1].passed) == ("gate", False)


@pytest.mark.parametrize(
    ("name", "answer", "step"),
    [("add_heap", False, "map"), ("map", False, "map"), ("shut_down", False, "end")],
)
def test_a_system_that_refuses_is_noticed(name: str, answer: bool, step: str) -> None:
    def make(group: Any) -> Any:
        return Liar(on_cpu(group), **{name: lambda *_, **__: answer})

    results = tried(KVBackend.POSIX, SHAPE, make)
    assert (results[-1].name, results[-1].passed) == (step, False)


PRODUCTS = ("multiply 1", "multiply 8", "multiply 64")
EXPERTS = ("experts 8", "experts 8 in order", "experts 128", "experts 128 in order")


def test_this_machines_products_are_right() -> None:
    results = run_checks(product_checks(), lambda _: None)
    assert [step.name for step in results] == [*PRODUCTS, *EXPERTS]
    assert all(step.passed for step in results), results[-1]
    assert all(step.figures["greatest_difference"] < 1e-4 for step in results)


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_kernel_that_is_compiled_wrong_is_noticed(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = mx.quantized_matmul

    def wrong(inputs: mx.array, *rest: mx.array, **how: object) -> mx.array:
        out = right(inputs, *rest, **how)  # type: ignore[arg-type]
        if len(inputs) != rows:
            return out
        # The last of the columns that a group of threads computes.
        return mx.where(mx.arange(out.shape[1]) % 64 == 63, mx.zeros_like(out), out)

    monkeypatch.setattr(mx, "quantized_matmul", wrong)
    step = run_checks(product_checks(), lambda _: None)[-1]
    assert (step.name, step.passed) == (f"multiply {rows}", False)
    assert "of the greatest result; 0.02 is allowed" in step.text


@pytest.mark.parametrize("step", EXPERTS)
def test_a_wrong_kernel_for_experts_is_noticed(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = mx.gather_qmm

    def wrong(inputs: mx.array, *rest: mx.array, sorted_indices: bool, **how: Any) -> mx.array:
        experts = how["rhs_indices"]
        if step == f"experts {len(inputs)}{' in order' * sorted_indices}":
            # The last pair of a tile takes another expert's matrix.
            places = mx.arange(len(inputs))
            how["rhs_indices"] = mx.where(places == 7, (experts + 1) % 16, experts)
        return right(inputs, *rest, sorted_indices=sorted_indices, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(mx, "gather_qmm", wrong)
    result = run_checks(product_checks(), lambda _: None)[-1]
    assert (result.name, result.passed) == (step, False)
