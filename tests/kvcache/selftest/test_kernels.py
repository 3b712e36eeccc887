"""Kernels that are right pass; any wrong operation is named."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import pytest

import metal_ext
from kvcache.backends.choice import KVBackend
from kvcache.backends.metal import MetalBackend
from kvcache.backends.posix import PosixBackend
from kvcache.layout import KVFormat, KVShape, KVSpec
from kvcache.selftest.kernels import (
    KernelChecks,
    kernel_specs,
    name_of,
    product_checks,
)
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


def on_metal(kv_backend: KVBackend) -> Callable[[Any], Any]:
    return partial(MetalBackend, kv_backend.setting, max_buffers=3, release_heaps=False)


def test_every_width_and_every_kind_of_number_is_tried() -> None:
    assert [name_of(shape) for shape in kernel_specs(on_gpu=False)] == [
        f"{kind} x {width}" for width in (64, 128, 256) for kind in ("bfloat16", "float32")
    ]
    assert "float16 x 128" in [name_of(shape) for shape in kernel_specs(on_gpu=True)]


@pytest.mark.parametrize("shape", [SHAPE, KVShape.uniform(1, KVSpec(2, 128, KVFormat.FLOAT32))])
def test_the_cpus_kernels_are_right(shape: KVShape) -> None:
    results = tried(KVBackend.POSIX, shape, on_cpu)
    assert [step.name for step in results] == [
        *("map", "chunk", "decode", "decode again", "project", "project again", "end")
    ]
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

    results = tried(kv_backend, shape, on_metal(kv_backend))
    assert all(step.passed for step in results), results[-1]
    assert {"project_append", "multiply_gated"} < set(device.calls)


@pytest.mark.parametrize(
    ("operation", "lie", "step", "text"),
    [
        ("chunk_attention", lambda out: out + 0.1, "chunk", "at most; 0.06 is allowed"),
        ("decode_attention", lambda out: out + 0.1, "decode", "at most; 0.06 is allowed"),
        # one bit
        ("region", lambda kept: kept + mx.abs(kept) / 128, "chunk", "is not what was given"),
    ],
)
def test_what_is_off_is_noticed(
    operation: str, lie: Callable[[mx.array], mx.array], step: str, text: str
) -> None:
    def make(group: Any) -> Any:
        backend = on_cpu(group)
        return Liar(backend, rows=lambda segments: RowsLiar(backend.rows(segments), operation, lie))

    results = tried(KVBackend.POSIX, SHAPE, make)
    assert (results[-1].name, results[-1].passed) == (step, False)
    assert text in results[-1].text


def test_a_projection_that_is_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    project = metal_ext.project_append

    def off(*arguments: Any) -> Any:
        changed = list(arguments)
        changed[5] = RopeTable([1.01 * its for its in changed[5].frequencies])
        return project(*changed)

    monkeypatch.setattr(metal_ext, "project_append", off)

    shape = KVShape.uniform(1, KVSpec(2, 64, KVFormat.FLOAT32))
    results = tried(KVBackend.SPARSE, shape, on_metal(KVBackend.SPARSE))
    assert (results[-1].name, results[-1].passed) == ("project", False)


WIDE = KVShape.uniform(1, KVSpec(2, 128, KVFormat.FLOAT32))


@pytest.mark.parametrize("kv_backend", [KVBackend.SPARSE, KVBackend.PAGED, KVBackend.METAL_DENSE])
def test_states_are_tried_where_heads_have_the_width_of_a_gpus_kernels(
    monkeypatch: pytest.MonkeyPatch, kv_backend: KVBackend
) -> None:
    device = install(monkeypatch)

    results = tried(kv_backend, WIDE, on_metal(kv_backend))
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

    results = tried(KVBackend.SPARSE, WIDE, on_metal(KVBackend.SPARSE))
    assert (results[-1].name, results[-1].passed) == ("states", False)


def test_a_gated_product_that_is_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    multiply = metal_ext.multiply_gated
    monkeypatch.setattr(metal_ext, "multiply_gated", lambda x, gate, up: multiply(x, up, gate))

    results = tried(KVBackend.SPARSE, SHAPE, on_metal(KVBackend.SPARSE))
    assert (results[-1].name, results[-1].passed) == ("products", False)


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


def test_a_gpu_also_multiplies_by_quires_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    device = install(monkeypatch)
    results = run_checks(product_checks(on_gpu=True), lambda _: None)
    names = [*(f"quire multiplies {n}" for n in (1, 2, 8)), "quire mixes 1", "quire mixes 9"]
    assert [step.name for step in results[7:]] == names
    assert all(step.passed for step in results), results[-1]
    assert device.calls.count("multiply") == 3 + 11
    mixture = metal_ext.mixture
    with monkeypatch.context() as patch:
        patch.setattr(metal_ext, "mixture", lambda x, *rest: mixture(1.1 * x, *rest))
        assert run_checks(product_checks(on_gpu=True), lambda _: None)[-1].name == "quire mixes 1"
    monkeypatch.setattr(metal_ext, "multiply", lambda x, _: [mx.zeros((len(x), 512))])
    assert run_checks(product_checks(on_gpu=True), lambda _: None)[-1].name == "quire multiplies 1"


@pytest.mark.parametrize("step", [*PRODUCTS, *EXPERTS])
def test_a_kernel_that_is_compiled_wrong_is_noticed(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply: Any = mx.quantized_matmul
    choose: Any = mx.gather_qmm

    def wrong(inputs: mx.array, *rest: mx.array, **how: Any) -> mx.array:
        out: mx.array = multiply(inputs, *rest, **how)
        # The last of the columns that a group of threads computes.
        lost = mx.where(mx.arange(out.shape[1]) % 64 == 63, mx.zeros_like(out), out)
        return lost if step == f"multiply {len(inputs)}" else out

    def other(inputs: mx.array, *rest: mx.array, rhs_indices: mx.array, **how: Any) -> mx.array:
        if step == f"experts {len(inputs)}{' in order' * how['sorted_indices']}":
            # The last pair of a tile takes another expert's matrix.
            places = mx.arange(len(inputs))
            rhs_indices = mx.where(places == 7, (rhs_indices + 1) % 16, rhs_indices)
        out: mx.array = choose(inputs, *rest, rhs_indices=rhs_indices, **how)
        return out

    monkeypatch.setattr(mx, "quantized_matmul", wrong)
    monkeypatch.setattr(mx, "gather_qmm", other)
    result = run_checks(product_checks(), lambda _: None)[-1]
    assert (result.name, result.passed) == (step, False)
    assert "of the greatest result; 0.02 is allowed" in result.text
