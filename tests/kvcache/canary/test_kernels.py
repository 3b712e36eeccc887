"""Kernels that are right pass; any wrong operation is named."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

import metal_ext
from kvcache.canary.kernels import MAX_TOKENS, KernelTrial, kernel_specs, name_of
from kvcache.canary.report import Step
from kvcache.canary.trial import attempt, small_layout
from kvcache.layout import KVFormat, KVShape, KVSpec
from kvcache.metal_backend import metal_backend
from kvcache.native_backends import PosixBackend
from kvcache.substrates import Substrate
from tests.kvcache.canary.backends import Liar, RowsLiar
from tests.kvcache.metal_double import RopeTable, install

SHAPE = KVShape.uniform(1, KVSpec(2, 64))


def tried(substrate: Substrate, shape: KVShape, backend: Callable[[Any], Any]) -> list[Step]:
    layout = small_layout(substrate, shape, max_tokens=MAX_TOKENS, system_page_bytes=4096)
    trial = KernelTrial(backend(layout.groups[0]), layout, on_gpu=substrate.on_gpu)
    return attempt(trial.actions(), lambda _: None)


def on_cpu(group: Any) -> Any:
    return PosixBackend(group, metal_ext.CpuWorkers(2))


def test_every_width_and_every_kind_of_number_is_tried() -> None:
    assert [name_of(shape) for shape in kernel_specs(on_gpu=False)] == [
        f"{kind} x {width}" for width in (64, 128, 256) for kind in ("bfloat16", "float32")
    ]
    assert "float16 x 128" in [name_of(shape) for shape in kernel_specs(on_gpu=True)]


@pytest.mark.parametrize("shape", [SHAPE, KVShape.uniform(1, KVSpec(2, 128, KVFormat.FLOAT32))])
def test_the_cpus_kernels_are_right(shape: KVShape) -> None:
    steps = tried(Substrate.POSIX, shape, on_cpu)
    assert [step.name for step in steps] == ["map", "chunk", "decode", "project", "end"]
    assert all(step.passed for step in steps), steps[-1]


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        KVShape.uniform(1, KVSpec(2, 64, KVFormat.FLOAT32)),
        KVShape.uniform(1, KVSpec(2, 64, KVFormat.FLOAT16)),
    ],
)
@pytest.mark.parametrize("substrate", [Substrate.SPARSE, Substrate.PAGED, Substrate.METAL_DENSE])
def test_a_gpus_kernels_are_tried_with_norm_and_rope_in_one(
    monkeypatch: pytest.MonkeyPatch, shape: KVShape, substrate: Substrate
) -> None:
    device = install(monkeypatch)

    def make(group: Any) -> Any:
        return metal_backend(substrate.setting, group, max_buffers=3, release_heaps=False)

    steps = tried(substrate, shape, make)
    assert all(step.passed for step in steps), steps[-1]
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

    steps = tried(Substrate.POSIX, SHAPE, make)
    assert (steps[-1].name, steps[-1].passed) == (step, False)
    assert "at most; 0.06 is allowed" in steps[-1].said


def test_a_number_that_is_kept_wrong_by_one_bit_is_noticed() -> None:
    def make(group: Any) -> Any:
        backend = on_cpu(group)

        def nudge(region: mx.array) -> mx.array:
            return region + mx.abs(region) / 128

        return Liar(
            backend, rows=lambda segments: RowsLiar(backend.rows(segments), "region", nudge)
        )

    steps = tried(Substrate.POSIX, SHAPE, make)
    assert (steps[-1].name, steps[-1].passed) == ("chunk", False)
    assert "what is kept is not what was given" in steps[-1].said


def test_a_projection_that_is_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    project = metal_ext.project_append

    def off(*arguments: Any) -> Any:
        changed = list(arguments)
        changed[5] = RopeTable([1.01 * its for its in changed[5].frequencies])
        return project(*changed)

    monkeypatch.setattr(metal_ext, "project_append", off)

    def make(group: Any) -> Any:
        return metal_backend("sparse", group, max_buffers=3, release_heaps=False)

    steps = tried(Substrate.SPARSE, KVShape.uniform(1, KVSpec(2, 64, KVFormat.FLOAT32)), make)
    assert (steps[-1].name, steps[-1].passed) == ("project", False)


WIDE = KVShape.uniform(1, KVSpec(2, 128, KVFormat.FLOAT32))


@pytest.mark.parametrize("substrate", [Substrate.SPARSE, Substrate.PAGED, Substrate.METAL_DENSE])
def test_states_are_tried_where_heads_have_the_width_of_a_gpus_kernels(
    monkeypatch: pytest.MonkeyPatch, substrate: Substrate
) -> None:
    device = install(monkeypatch)

    def make(group: Any) -> Any:
        return metal_backend(substrate.setting, group, max_buffers=3, release_heaps=False)

    steps = tried(substrate, WIDE, make)
    assert all(step.passed for step in steps), steps[-1]
    assert [step.name for step in steps][:3] == ["map", "states", "chunk"]
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
        return metal_backend("sparse", group, max_buffers=3, release_heaps=False)

    steps = tried(Substrate.SPARSE, WIDE, make)
    assert (steps[-1].name, steps[-1].passed) == ("states", False)


def test_a_gate_that_is_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    swiglu = metal_ext.swiglu
    monkeypatch.setattr(metal_ext, "swiglu", lambda gate, up: swiglu(up, gate))

    def make(group: Any) -> Any:
        return metal_backend("sparse", group, max_buffers=3, release_heaps=False)

    steps = tried(Substrate.SPARSE, SHAPE, make)
    assert (steps[-1].name, steps[-1].passed) == ("gate", False)


@pytest.mark.parametrize(
    ("name", "answer", "step"),
    [("add_heap", False, "map"), ("map", False, "map"), ("shut_down", False, "end")],
)
def test_a_system_that_refuses_is_noticed(name: str, answer: bool, step: str) -> None:
    def make(group: Any) -> Any:
        return Liar(on_cpu(group), **{name: lambda *_, **__: answer})

    steps = tried(Substrate.POSIX, SHAPE, make)
    assert (steps[-1].name, steps[-1].passed) == (step, False)
