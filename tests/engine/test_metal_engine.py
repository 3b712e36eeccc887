"""Whole engines on a Metal device of plain Python: the fused projection, the end of a step, and the
ordered end of everything."""

import asyncio
import gc
import logging
import re
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import pytest

import engine.build
from engine.build import build_engine, plan_engine
from engine.client import EngineClient
from engine.machine import MachineMemory
from engine.messages import SetMemoryPressure, Stop
from engine.models.checkpoint import Checkpoint, read_checkpoint
from engine.models.forward import Forward
from engine.models.mlx_ops import MlxOps
from engine.models.tensors import AttentionTensors
from engine.models.weights import load_model
from engine.step.draft_check import TOO_SMALL, DraftCheck
from engine.step.loop import Emit, EngineLoop
from engine.step.plan import Outcome, StepPlan
from engine.step.runner import ModelRunner, ModelStep
from engine.types import Drafting, EngineFailedError, FinishReason, Request, SamplingParams
from kvcache.backends.choice import KVBackend, KVBackendChoice
from kvcache.backends.faults import FaultMemory, GPUFailure
from kvcache.layout import LayoutError
from tests.engine.hybrid_schedules import Foretold, NotedHead
from tests.engine.models.forwards import prompt as random_prompt
from tests.engine.models.hybrids import QWEN3_5_MOE, write_hybrid
from tests.engine.models.test_forward import LLAMA3, YARN
from tests.engines import CONFIG, Answers, Scripted, every_third, greedy, run_dry, started, steps
from tests.families import GEMMA2, GEMMA3, GPT_OSS
from tests.kvcache.backends.test_gpu_failures import TEXTS as METALS_TEXTS
from tests.kvcache.managers import epochs_of, full_group
from tests.kvcache.metal_double import NO_MEMORY, Device, install
from tests.models import SMALL, write_model
from tests.reference import load_reference

SPEC = replace(SMALL, num_hidden_layers=2, head_dim=64)
DELTA_DIMS: dict[str, Any] = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
DRAFTED = replace(SPEC, num_hidden_layers=3)
WITH_HEAD: dict[str, Any] = {"gain": 3.0, "head": "mtp"} | DELTA_DIMS
METAL = "[METAL] Command buffer execution failed: "
KINDS = (KVBackend.SPARSE, KVBackend.PAGED, KVBackend.METAL_DENSE)
MACHINE = MachineMemory(1 << 32, 1 << 32, 1 << 30, on_gpu=True)
GPU = replace(
    CONFIG,
    page_bytes=None,
    heap_bytes=1 << 20,
    kv_budget_bytes=None,
    max_model_len=512,
    idle_release_s=0.0,
    prefix_keep_s=1000.0,
)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A Metal device whose kernels run on the CPU."""
    monkeypatch.setattr(engine.build, "compute_device", lambda _: mx.Device(mx.cpu))
    return install(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("metal"), SPEC, seed=5)


def metal_loop(
    folder: Path,
    kv_backend: KVBackend,
    emit: Emit,
    *,
    releases_heaps: bool = False,
    maps_while_running: bool = True,
    **changes: Any,
) -> EngineLoop:
    """changes: fields of EngineConfig."""
    choice = KVBackendChoice(
        kv_backend, (), maps_while_running=maps_while_running, releases_heaps=releases_heaps
    )
    config = replace(GPU, **changes)
    plan = plan_engine(config, read_checkpoint(folder), MACHINE, choice)
    return build_engine(plan, config, lambda *_: None, emit, b"key")


def metal_client(folder: Path) -> EngineClient:
    return started(lambda emit: metal_loop(folder, KVBackend.SPARSE, emit))


def check_answers(
    loop: EngineLoop, answers: Answers, folder: Path, prompts: dict[int, list[int]]
) -> None:
    for number, prompt in prompts.items():
        loop.mailbox.put(greedy(number, prompt, 6))
    run_dry(loop)
    for number, prompt in prompts.items():
        check_answer(folder, prompt, answers.tokens[number], 6)


def check_answer(folder: Path, prompt: list[int], answer: list[int], count: int) -> None:
    """mlx-lm's own forward says each token after those before it."""
    logits = reference(folder)(mx.array([[*prompt, *answer[:-1]]]))[0, len(prompt) - 1 :]
    assert logits.argmax(axis=-1).tolist() == answer
    assert len(answer) == count


@cache
def reference(folder: Path) -> Any:
    return load_reference(read_checkpoint(folder), stored=True)


@pytest.mark.parametrize("kv_backend", KINDS)
def test_greedy_answers_equal_mlx_lms_on_every_kind(
    device: Device, folder: Path, kv_backend: KVBackend
) -> None:
    answers = Answers.empty()
    loop = metal_loop(folder, kv_backend, answers)
    prompts = {1: list(range(7)), 2: list(range(100)), 3: [9] * 70}
    check_answers(loop, answers, folder, prompts)
    assert {"project_append", "decode_attention", "multiply_gated"} < set(device.calls)
    assert "append" not in device.calls
    loop.mailbox.put(greedy(4, prompts[2], 6))
    run_dry(loop)
    assert answers.tokens[4] == answers.tokens[2]
    assert (loop._scheduler.counters.cached_prompt_tokens > 0) != kv_backend.is_dense
    loop.close()
    assert device.kv_backends[0].ended


@pytest.mark.parametrize(
    ("model_type", "scaling"), [("qwen2", LLAMA3), ("llama", YARN), ("qwen3", YARN)]
)
def test_heads_without_norms_and_of_any_rope_are_appended_by_the_same_kernel(
    device: Device, tmp_path: Path, model_type: str, scaling: dict[str, Any]
) -> None:
    fields: dict[str, Any] = {"model_type": model_type, "architectures": []}
    spec = replace(SPEC, num_key_value_heads=1, num_attention_heads=2)
    folder = write_model(tmp_path, spec, seed=5, rope_scaling=scaling, **fields)
    answers = Answers.empty()
    loop = metal_loop(folder, KVBackend.SPARSE, answers)
    prompts = {1: list(range(7)), 2: list(range(100))}
    check_answers(loop, answers, folder, prompts)
    assert {"project_append", "decode_attention", "multiply_gated"} < set(device.calls)
    assert "append" not in device.calls
    loop.close()


@pytest.mark.parametrize("kv_backend", KINDS)
def test_states_of_recurrent_layers_are_kept_and_shared_as_on_a_cpu(
    device: Device, tmp_path: Path, kv_backend: KVBackend
) -> None:
    answers, folder = Answers.empty(), write_hybrid(tmp_path, gain=3.0, **DELTA_DIMS)
    loop = metal_loop(folder, kv_backend, answers, overlap=True)
    prompts = {1: list(range(7)), 2: list(range(100)), 3: [9] * 70}
    check_answers(loop, answers, folder, prompts)
    loop.mailbox.put(greedy(4, prompts[2], 6))
    run_dry(loop)
    assert answers.tokens[4] == answers.tokens[2]
    assert (loop._scheduler.counters.cached_prompt_tokens > 0) != kv_backend.is_dense
    made, slots = device.kv_backends[0], loop._kv._layout.shape.slot
    assert made.slots is not None
    assert slots is not None
    assert made.slots.slot_bytes == slots.slot_bytes
    loop._kv.release_idle_memory()  # which gives no slot back
    loop.close()


@pytest.mark.parametrize("shared", [64, 128], ids=["as large as the others", "larger"])
@pytest.mark.parametrize("bits", [3, 4])
def test_a_mixture_of_few_tokens_is_one_operation(
    device: Device, tmp_path: Path, shared: int, bits: int
) -> None:
    """If there are kernels for the experts' format."""
    fields = QWEN3_5_MOE | DELTA_DIMS | {"shared_expert_intermediate_size": shared}
    folder = write_hybrid(tmp_path, gain=3.0, bits=bits, group_size=64, **fields)
    answers = Answers.empty()
    loop = metal_loop(folder, KVBackend.SPARSE, answers)
    check_answers(loop, answers, folder, {1: list(range(7)), 2: list(range(100)), 3: [9] * 3})
    assert ("mixture" in device.calls) == (bits == 4)
    loop.close()


def drafting(loop: EngineLoop, answers: dict[int, list[int]]) -> None:
    """Let an engine draft what its answers will be, with mistakes, and run the head as well."""
    loop._scheduler.drafter = Foretold(answers, Random(1), 0.3, NotedHead(loop))


@pytest.mark.parametrize("kv_backend", KINDS)
def test_drafts_and_passes_of_a_head_change_no_answer(
    device: Device, tmp_path: Path, kv_backend: KVBackend
) -> None:
    answers, folder = Answers.empty(), write_hybrid(tmp_path, DRAFTED, **WITH_HEAD)
    loop = metal_loop(folder, kv_backend, answers, overlap=True)
    for first in (0, 10):
        if first:
            drafting(loop, {first + number: its for number, its in answers.tokens.items()})
        for number, length in enumerate((7, 100)):
            loop.mailbox.put(greedy(first + number, random_prompt(length, number), 60))
        run_dry(loop)
    for number in range(2):
        assert len(set(answers.tokens[number])) > 20
        assert answers.tokens[10 + number] == answers.tokens[number]
    assert 30 < loop._scheduler.counters.accepted_tokens < loop._scheduler.counters.drafted_tokens
    loop.close()


@pytest.mark.parametrize("kv_backend", KINDS)
@pytest.mark.parametrize("fields", [GEMMA2, GEMMA3, GPT_OSS], ids=lambda its: its["model_type"])
def test_windows_sinks_and_softcaps_are_mlx_lms_over_prompts_of_several_windows(
    device: Device, tmp_path: Path, fields: dict[str, Any], kv_backend: KVBackend
) -> None:
    spec = replace(SPEC, num_hidden_layers=4)
    answers, folder = Answers.empty(), write_hybrid(tmp_path, spec, gain=2.0, **fields)
    loop = metal_loop(folder, kv_backend, answers)
    has_rings = [group.has_ring for group in loop._kv._layout.groups]
    assert any(has_rings) == (kv_backend is KVBackend.SPARSE)
    prompts = {n: random_prompt(length, n) for n, length in enumerate((1, 39, 40, 41, 90, 160))}
    check_answers(loop, answers, folder, prompts)
    loop.close()


def test_a_gpu_makes_slots_as_sequences_need_them(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(slot: int) -> int:
        if made.slots is not None and slot not in made.slots.made:
            raise NO_MEMORY
        return before.committed_bytes

    answers = Answers.empty()
    loop = metal_loop(write_hybrid(tmp_path, **DELTA_DIMS), KVBackend.SPARSE, answers)
    (made,), before = device.kv_backends, loop._kv.stats().slots
    assert 0 < before.committed_bytes < before.slots * before.slot_bytes
    for refuses in (True, False):
        with monkeypatch.context() as patch:
            if refuses:
                patch.setattr(made, "commit_slot", refuse)
            for number in range(8 * refuses, 8 * refuses + 8):
                loop.mailbox.put(greedy(number, [number] * 70, 4))
            run_dry(loop)
        grown = loop._kv.stats().slots.committed_bytes > before.committed_bytes
        assert grown != refuses, "what is refused is taken from the cache"
    assert set(answers.finished.values()) == {FinishReason.LENGTH}
    loop.close()


def test_a_gpu_has_all_of_the_next_step_before_the_one_in_flight_is_read(
    device: Device, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that a constraint holds, all up to their logits."""
    answers = Answers.empty()
    loop = metal_loop(folder, KVBackend.SPARSE, answers, overlap=True)
    submit_graph, read = ModelStep.submit_graph, ModelStep.read
    steps: list[ModelStep] = []
    given: list[int] = []

    def watched_graph(step: ModelStep) -> None:
        submit_graph(step)
        if step not in steps:
            steps.append(step)

    def watched_read(step: ModelStep) -> Sequence[Outcome]:
        given.append(len(steps))
        return read(step)

    monkeypatch.setattr(ModelStep, "submit_graph", watched_graph)
    monkeypatch.setattr(ModelStep, "read", watched_read)
    loop.mailbox.put(greedy(1, [1, 2, 3], 5))
    params = SamplingParams(5, temperature=0.0, frequency_penalty=0.1)
    constraint = Scripted(every_third(SPEC.vocab_size))
    loop.mailbox.put(Request((4, 5), (params,), request_id=2, constraint=constraint))
    run_dry(loop)
    check_answer(folder, [1, 2, 3], answers.tokens[1], 5)
    assert len(answers.tokens[2]) == 5
    assert given == [2, 3, 4, 5, 5], "steps, whenever one was read"
    loop.close()


@pytest.mark.parametrize("equal", [True, False])
def test_a_gpu_drafts_only_where_that_changes_no_bits(
    device: Device, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    equal: bool,
) -> None:  # fmt: skip
    def by_rows(ops: MlxOps, states: mx.array) -> mx.array:
        return states * 0 + (0 if equal else len(states))

    monkeypatch.setattr(MlxOps, "norm", by_rows)
    caplog.set_level(logging.INFO)
    loop = metal_loop(folder, KVBackend.SPARSE, Answers.empty(), drafts=True)
    loop.mailbox.put(greedy(1, [1, 2, 3], 5))
    run_dry(loop)
    text = "drafts are off, because they would change answers: 8 rows together have other bits"
    assert (text in caplog.text) != equal
    assert loop.stats.drafting is (Drafting.RESTING if equal else Drafting.OFF)
    loop.close()


ROWS_FAULT = "8 rows together have other bits than one by one"


@pytest.mark.parametrize(
    ("fault", "heads"),
    [("", [True, True]), (ROWS_FAULT, [True, False, False]), (TOO_SMALL, [True, False] * 2)],
)
def test_a_head_whose_drafts_would_change_answers_is_left_out_and_the_next_start_knows_it(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, heads: list[bool],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """But a cache that is too small to compare proves nothing. heads: of the loaded models."""
    folder = write_model(tmp_path, SPEC, head="mtp")
    found, models = list[bool](), list[weakref.ref[Any]]()

    def load(checkpoint: Checkpoint, *how: Any) -> Forward:
        assert not any(ops() for ops in models), "there is memory for one model"
        found.append(checkpoint.spec.draft is not None)
        model = load_model(checkpoint, *how)
        models.append(weakref.ref(model.ops))
        return model

    monkeypatch.setattr(engine.build, "load_model", load)
    by_rows = fault == ROWS_FAULT
    monkeypatch.setattr(MlxOps, "norm", lambda _, states: states * 0 + by_rows * len(states))
    if fault == TOO_SMALL:
        monkeypatch.setattr(DraftCheck, "fault", lambda *_: fault)
    caplog.set_level(logging.INFO)
    for _ in range(2):
        loop = metal_loop(folder, KVBackend.SPARSE, Answers.empty(), drafts=True)
        assert len(loop._kv._layout.shape.layers) == 2 + (not fault)
        loop.close()
        del loop
        gc.collect()
    assert found == heads
    told = caplog.text.count(f"drafts of tokens (they might change answers: {fault})")
    assert told == 2 * bool(fault), "once in each start"


def test_heaps_stay_however_idle_the_engine_is(device: Device, folder: Path) -> None:
    loop = metal_loop(folder, KVBackend.SPARSE, Answers.empty())
    loop.mailbox.put(greedy(1, list(range(100)), 4))
    run_dry(loop)
    for _ in range(4):
        loop.run_once()
    stats = loop._kv.stats()
    assert stats.kept_heaps == stats.num_heaps > 0
    assert stats.committed_bytes == stats.num_heaps * full_group(loop._kv).group.heap_bytes
    charged = stats.capacity_bytes - stats.free_bytes + stats.free_slack_bytes
    assert stats.committed_bytes == charged, "the books say that it is kept"


@pytest.mark.parametrize(
    ("kv_backend", "maps_while_running", "overlap", "releases"),
    [
        (KVBackend.SPARSE, True, False, False),
        (KVBackend.SPARSE, False, False, True),
        (KVBackend.SPARSE, False, True, True),
        (KVBackend.SPARSE, True, True, True),
        (KVBackend.PAGED, True, True, True),
    ],
)
def test_fault_25_a_warning_ends_neither_prefixes_nor_company(
    device: Device, folder: Path, kv_backend: KVBackend, maps_while_running: bool, overlap: bool,
    releases: bool,
) -> None:  # fmt: skip
    answers = Answers.empty()
    loop = metal_loop(
        folder, kv_backend, answers, releases_heaps=releases, maps_while_running=maps_while_running,
        overlap=overlap, idle_release_s=1000.0, free_slack_bytes=1 << 30,
    )  # fmt: skip
    for number in range(2, 5):
        loop.mailbox.put(greedy(number, [number] * 400, 4))
    run_dry(loop)
    loop._kv.evict_prefixes()  # which leaves free heaps
    prompt = list(range(300))
    loop.mailbox.put(greedy(1, prompt, 4))
    run_dry(loop)
    freed: list[bool] = []
    loop._runner.release_cache = lambda: freed.append(True)  # type: ignore[method-assign]
    before = loop._kv.stats()
    shared = 3 * (len(prompt) // before.block_tokens * before.block_tokens)
    for level, company in ((1, 3), (2, 1), (0, 3)):
        cached = loop._scheduler.counters.cached_prompt_tokens
        loop.mailbox.put(SetMemoryPressure(level))
        for tail in range(3):
            loop.mailbox.put(greedy(10 * level + 10 + tail, [*prompt, tail], 8))
        assert max(loop._scheduler.num_running for _ in steps(loop)) == company, level
        after, lost = loop._kv.stats(), releases and level != 1
        assert (after.committed_bytes < before.committed_bytes) == releases, "free heaps go"
        assert (after.evicted_blocks > before.evicted_blocks) == lost
        if not lost:
            assert loop._scheduler.counters.cached_prompt_tokens - cached == shared
        assert len(freed) == (level != 1), "MLX's cache goes back when it is critical"
        for tail in range(3):
            check_answer(folder, [*prompt, tail], answers.tokens[10 * level + 10 + tail], 8)
    loop.close()


def test_a_failed_step_is_given_up_and_the_next_request_is_right(
    device: Device, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("out of luck")

    answers = Answers.empty()
    loop = metal_loop(folder, KVBackend.SPARSE, answers)
    with monkeypatch.context() as patch:
        patch.setattr("engine.step.runner.sample", broken)
        loop.mailbox.put(greedy(1, [1, 2, 3], 5))
        while 1 not in answers.finished:
            loop.run_once()
    assert device.calls[-1] == "abandon"
    loop.mailbox.put(greedy(2, [1, 2, 3], 5))
    run_dry(loop)
    assert answers.finished == {1: FinishReason.ERROR, 2: FinishReason.LENGTH}
    check_answer(folder, [1, 2, 3], answers.tokens[2], 5)
    loop.close()


@pytest.mark.parametrize(
    ("fault", "waiting_fails"),
    [("nobody knows", True), (f"{METAL}Internal Error", False), (f"{METAL}Internal Error", True)],
)
def test_fault_09_a_step_whose_device_is_lost_ends_the_engine_and_is_never_complete(
    device: Device, folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str, waiting_fails: bool
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError(fault)

    loop = metal_loop(folder, KVBackend.SPARSE, Answers.empty())
    monkeypatch.setattr("engine.step.runner.sample", broken)
    if waiting_fails:
        monkeypatch.setattr(mx, "synchronize", broken)
    loop.mailbox.put(greedy(1, [1, 2, 3], 5))
    with pytest.raises(EngineFailedError, match="the device"):
        loop.run_once()
    issued, completed = epochs_of(loop._kv)
    assert completed < issued
    assert loop._kv.stats().live_bytes > 0, "nobody gets what it may still write"


def test_a_mapping_that_fails_while_serving_ends_the_engine_and_is_remembered(
    device: Device, folder: Path
) -> None:
    answers = Answers.empty()
    client = metal_client(folder)
    assert not client.kv_backend_failed
    device.mapper_failure = "2 mapping operations of a sparse buffer, batch 7"
    loop = client._loop
    assert loop is not None
    loop.mailbox.put(greedy(1, [1, 2, 3], 5))
    client._thread.join(20.0)
    assert client.kv_backend_failed
    assert client.busy_since is None, "who ends is not hanging"
    assert not client.alive
    (said,) = FaultMemory(KVBackend.SPARSE).found()
    assert "serving failed: the Metal backend failed: 2 mapping operations" in said
    assert answers.finished == {}


def test_a_step_that_hangs_behind_a_mapping_that_failed_is_a_fault_of_the_kv_backend(
    device: Device, folder: Path
) -> None:
    client = metal_client(folder)
    loop, thread = client._loop, client._thread
    assert loop is not None
    assert loop._kv.backend_fault() is None
    device.mapper_failure = "1 mapping operations of a sparse buffer, batch 3"
    client.declare_dead()
    assert client.kv_backend_failed
    assert not client.alive
    assert "batch 3" in FaultMemory(KVBackend.SPARSE).found()[0]
    assert client.failure == "the engine has ended"
    loop.mailbox.put(Stop())
    thread.join(20.0)


@pytest.mark.parametrize("fault", ["no memory", f"{METAL}Internal Error"])
def test_fault_09_a_pass_of_a_head_for_drafts_that_fails_ends_the_engine_and_is_given_up(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError(fault)

    folder = write_hybrid(tmp_path, DRAFTED, **WITH_HEAD)
    loop = metal_loop(folder, KVBackend.SPARSE, Answers.empty())
    drafting(loop, {1: [1] * 50})
    monkeypatch.setattr("engine.step.draft_head.sample", broken)
    loop.mailbox.put(greedy(1, [1, 2, 3], 50))
    error = EngineFailedError if fault.startswith(METAL) else RuntimeError
    with pytest.raises(error, match=re.escape(fault)):
        run_dry(loop)
    assert bool(device.kv_backends[0].open_epochs) == fault.startswith(METAL), "it may still run"
    loop.close()


@pytest.mark.parametrize("place", ["_build", "submit_graph", "_outcomes"])
@pytest.mark.parametrize("failure", GPUFailure)
async def test_fault_09_a_gpu_that_fails_tells_clients_what_to_do_and_the_next_engine_is_gentler(
    device: Device, folder: Path, monkeypatch: pytest.MonkeyPatch, failure: GPUFailure, place: str
) -> None:
    client = metal_client(folder)
    client.attach()
    words = next(text for text, kind in METALS_TEXTS.items() if kind is failure)

    def broken(*_: object) -> None:
        raise RuntimeError(f"{METAL}{words}.")

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner if place == "_build" else ModelStep, place, broken)
        (stream,) = client.submit(Request((1, 2), (SamplingParams(5),)))
        (event,) = await stream.next_batch(20.0)
        assert event.message == f"the engine has ended: {failure.advice}"
        await asyncio.to_thread(client._thread.join, 20.0)
    assert client.kv_backend_failed == (failure is GPUFailure.KV_MEMORY)
    assert bool(FaultMemory(KVBackend.SPARSE).found()) == client.kv_backend_failed
    loop = metal_loop(folder, KVBackend.PAGED, Answers.empty())
    shorter = GPU.step_time_target_ms / 1000 / loop._scheduler.budget.target_s
    assert shorter == (4 if "shorter" in failure.advice else 1)
    fewer = GPU.max_num_batched_tokens / loop._scheduler._max_batched_tokens
    assert fewer == (2 if "fewer" in failure.advice else 1)
    loop.close()


def test_the_engine_ends_its_memory_on_its_own_thread(device: Device, folder: Path) -> None:
    client = metal_client(folder)
    assert client.stop(20.0)
    assert device.kv_backends[0].ended


def test_a_device_that_does_not_answer_at_the_end_is_told_of(
    device: Device, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = metal_loop(folder, KVBackend.SPARSE, Answers.empty())
    device.silent = True
    with caplog.at_level(logging.ERROR):
        loop.close()
    assert "its memory is left to the system" in caplog.text


def test_an_engine_that_cannot_be_built_leaves_nothing_mapped(
    device: Device, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(EngineLoop, "warm_up", broken)
    with pytest.raises(RuntimeError, match="no luck"):
        metal_loop(folder, KVBackend.SPARSE, Answers.empty())
    assert device.kv_backends[0].ended


def test_heads_that_the_kernels_do_not_know_are_refused_with_a_way_out(tiny_model: Path) -> None:
    choice = KVBackendChoice(KVBackend.SPARSE, ())
    with pytest.raises(LayoutError, match=r"head_dim is 32, .* 64, 128, 256: .*--kv-backend posix"):
        plan_engine(GPU, read_checkpoint(tiny_model), MACHINE, choice)


def test_metal_computes_what_is_stored(folder: Path) -> None:
    choice = KVBackendChoice(KVBackend.SPARSE, ())
    plan = plan_engine(GPU, read_checkpoint(folder), MACHINE, choice)
    assert plan.arithmetic == "stored"
    assert plan.memory.layout.groups[0].page_bytes in (16384, 65536, 262144)


def test_each_kv_backend_computes_where_its_memory_is() -> None:
    assert engine.build.compute_device(KVBackend.SPARSE) == mx.Device(mx.gpu)
    assert engine.build.compute_device(KVBackend.POSIX) == mx.Device(mx.cpu)


# --- the warm-up, and the rows of steps ----------------------------------------------------------

LARGE: dict[str, Any] = {"max_num_batched_tokens": 2048, "max_model_len": 1024}


def rows_of_steps(monkeypatch: pytest.MonkeyPatch, row_s: float) -> list[tuple[int, ...]]:
    """The rows of each sequence in all steps. A step takes a millisecond and a time for a row."""
    steps: list[tuple[int, ...]] = []
    now, begin = [0.0], ModelRunner.begin

    def watched(runner: ModelRunner, plan: StepPlan, *, overlapped: bool = False) -> Any:
        steps.append(tuple(entry.count for entry in plan.entries))
        now[0] += 1e-3 + row_s * sum(steps[-1])
        return begin(runner, plan, overlapped=overlapped)

    monkeypatch.setattr(ModelRunner, "begin", watched)
    monkeypatch.setattr(engine.build, "EngineLoop", partial(EngineLoop, clock=lambda: now[0]))
    return steps


@pytest.mark.parametrize("kv_backend", KINDS)
def test_the_warm_up_uses_every_variant_of_a_kernel_that_serving_uses(
    device: Device, folder: Path, monkeypatch: pytest.MonkeyPatch, kv_backend: KVBackend
) -> None:
    steps = rows_of_steps(monkeypatch, 1e-4)
    loop = metal_loop(folder, kv_backend, Answers.empty(), **LARGE)
    chunks = {(64,), (512,), (5,), (1,), (9,) * 8, (1,) * 8}
    assert chunks <= set(steps)
    assert (1,) in steps[steps.index((5,)) :], "behind 517 tokens, attention combines partial sums"
    assert ("gather" in device.calls) == (kv_backend is KVBackend.PAGED)
    stats = loop._kv.stats()
    assert (stats.cached_bytes, stats.num_sequences) == (0, 0)
    assert loop._scheduler.counters.prompt_tokens == 0
    loop.close()


@pytest.mark.parametrize(
    ("row_s", "target_ms", "beside", "alone"),
    [
        (1e-4, 100.0, 768, 2048),
        (1e-3, 500.0, 384, 1984),
        (1e-2, 100.0, 32, 32),
        (1e-2, 1000.0, 64, 384),
    ],
)
def test_a_gpus_first_prompts_are_cut_by_measured_steps(
    device: Device, folder: Path, monkeypatch: pytest.MonkeyPatch, row_s: float, target_ms: float,
    beside: int, alone: int,
) -> None:  # fmt: skip
    steps = rows_of_steps(monkeypatch, row_s)
    loop = metal_loop(
        folder, KVBackend.SPARSE, Answers.empty(), **LARGE, step_time_target_ms=target_ms
    )
    assert max(map(sum, steps)) * row_s < max(1.0, 5e-3 * target_ms), "the display is not held up"
    budget = loop._scheduler.budget
    assert (budget.tokens, budget.alone) == (beside, alone)
    steps.clear()
    loop.mailbox.put(greedy(1, list(range(400)), 2))
    run_dry(loop)
    assert steps[0] == (min(alone, 400),)
    loop.close()


def test_steps_of_prompts_beside_decoding_are_whole_tiles_of_the_gpu(
    device: Device, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short a step is to be."""
    steps = rows_of_steps(monkeypatch, 1e-4)
    loop = metal_loop(folder, KVBackend.PAGED, Answers.empty(), step_time_target_ms=1e-3)
    steps.clear()
    loop.mailbox.put(greedy(1, list(range(5)), 40))
    loop.mailbox.put(greedy(2, list(range(300)), 1))
    run_dry(loop)
    rows = [sum(step) for step in steps if max(step) > 1]
    assert len(rows) > 5
    assert {count % 32 for count in rows[1:-1]} == {0}
    assert rows[-2] == 32
    loop.close()


@pytest.mark.parametrize("changes", [
    {"max_model_len": 2}, {"max_model_len": 40}, {"max_num_batched_tokens": 1},
    {"max_num_batched_tokens": 33}, {"max_num_seqs": 1},
], ids=str)  # fmt: skip
def test_small_limits_are_warmed_up_as_well(
    device: Device, folder: Path, changes: dict[str, Any]
) -> None:
    loop = metal_loop(folder, KVBackend.PAGED, Answers.empty(), **changes)
    most = changes.get("max_num_batched_tokens", 64)
    assert 1 <= loop._scheduler.budget.tokens <= loop._scheduler.budget.alone <= most
    loop.close()


@pytest.mark.parametrize("recurrent", [False, True])
def test_mlx_has_what_k_and_v_and_states_leave_of_the_working_set(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recurrent: bool
) -> None:
    limits: list[int] = []
    monkeypatch.setattr(mx, "set_memory_limit", limits.append)
    folder = write_hybrid(tmp_path, **DELTA_DIMS) if recurrent else write_model(tmp_path, SPEC)
    loop = metal_loop(folder, KVBackend.SPARSE, Answers.empty(), headroom_bytes=1 << 30)
    kept_bytes = loop._kv.stats().capacity_bytes
    if (slots := device.kv_backends[0].slots) is not None:
        kept_bytes += slots.count * slots.slot_bytes
    assert limits == [MACHINE.total_bytes - kept_bytes]
    loop.close()


def test_signals_that_came_late_are_told(device: Device, folder: Path) -> None:
    loop = metal_loop(folder, KVBackend.SPARSE, Answers.empty())
    device.kv_backends[0].late_signals = 3
    run_dry(loop)
    assert loop.stats.kv is not None
    assert loop.stats.kv.late_signals == 3
    loop.close()


# --- K and V in float16 -------------------------------------------------------------------------


@pytest.mark.parametrize("gain", [1.0, 1e5])
def test_keys_and_values_that_could_exceed_float16_are_refused_at_the_start(
    device: Device, tmp_path: Path, gain: float
) -> None:
    folder = write_hybrid(tmp_path, gain=gain, dtype="bfloat16", **DELTA_DIMS)
    metal_loop(folder, KVBackend.SPARSE, Answers.empty(), kv_dtype="bfloat16").close()
    refused = pytest.raises(RuntimeError, match=r"up to \d+, and float16 .* --kv-dtype auto")
    with refused if gain > 1 else nullcontext():
        metal_loop(folder, KVBackend.SPARSE, Answers.empty(), kv_dtype="float16").close()


@pytest.mark.parametrize("fields", [{}, {"model_type": "qwen2", "architectures": []}])
@pytest.mark.parametrize("bits", [None, 4])
def test_no_key_and_no_value_exceeds_the_bound(
    device: Device, tmp_path: Path, fields: dict[str, Any], bits: int | None
) -> None:
    how: dict[str, Any] = {"dtype": "bfloat16", "bits": bits, "gain": 3.0} | fields
    checkpoint = read_checkpoint(write_model(tmp_path, SPEC, seed=5, **how))
    ops = load_model(checkpoint, lambda *_: None, None).ops
    assert isinstance(ops, MlxOps)
    for name, vector in ops._vectors.items():
        ops._vectors[name] = vector * 4
    for name, stored in ops._matrices.items():
        if stored.bias is not None:
            ops._matrices[name] = replace(stored, bias=stored.bias * 1e4)
    largest = 0.0
    for at in checkpoint.tensors.layers:
        assert isinstance(at.mixer, AttentionTensors)
        for matrix in at.mixer.queries_keys_values[1:]:
            # For each number, the x that lies along its row of weights.
            stored = ops._matrices[matrix.name]
            rows = stored.dequantized(mx.arange(len(stored.weight)))
            rows *= ops._vectors[at.mixer_norm.name]
            made = ops._multiply(ops._normed(rows.astype(mx.bfloat16), at.mixer_norm), matrix)
            if at.mixer.key_norm is not None and matrix.name.endswith("k_proj"):
                made = ops._normed(made.reshape(-1, SPEC.head_dim), at.mixer.key_norm)
            largest = max(largest, float(mx.abs(made).max()))
    assert largest <= 1.02 * ops.kv_bound() <= 20 * largest
