"""The whole engine on each kind of backend: the tokens that it says on the CPU's own."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.build import build_engine, plan_engine
from engine.config import EngineConfig
from engine.machine import MachineMemory
from engine.models.checkpoint import read_checkpoint
from engine.models.forward import Forward
from engine.step.drafts import Drafter
from engine.step.loop import EngineLoop
from engine.step.runner import ModelRunner
from engine.types import PromptBoundaries, SamplingParams
from kvcache.backends.choice import KVBackend, KVBackendChoice
from tests.engine.models.hybrids import MIXED, write_hybrid
from tests.engine.models.parity import Parity, judge
from tests.engine.models.test_forward import YARN
from tests.engines import CONFIG, Answers, request_of, run_dry
from tests.families import (
    GEMMA3,
    GPT_OSS,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
)
from tests.metal.graph import _standin
from tests.metal.graph.stage import take_mistakes
from tests.models import SMALL, ModelSpec, write_model
from tests.reference import load_reference

SPEC = replace(SMALL, num_hidden_layers=3, num_attention_heads=6, head_dim=64)
MIB = 1 << 20
ROOMY, TIGHT = 64 * MIB, 2 * MIB
TWO_AT_ONCE = 6 * MIB  # for whose states there are slots
CONFIGURED = replace(
    CONFIG,
    page_bytes=None,
    heap_bytes=MIB,
    max_model_len=512,
    max_num_batched_tokens=128,
    step_time_target_ms=1e6,
    prefix_keep_s=1000.0,
    residency_keep_s=60.0,
)
# What each backend can be: whether memory is mapped while steps run.
MODES = [
    (KVBackend.SPARSE, False),
    pytest.param(KVBackend.SPARSE, True, id="sparse-beside-steps-nightly"),
    (KVBackend.PAGED, True),
    (KVBackend.METAL_DENSE, True),
]
# Of gated delta nets, as the GPU's kernels know them.
HEADS: dict[str, Any] = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
# Blocks have 32 tokens, so that sequences go around a ring of six of them two times and more.
WINDOWED = replace(SPEC, num_attention_heads=8, num_key_value_heads=4)
SHORT_STEPS = replace(CONFIGURED, max_model_len=2048, max_num_batched_tokens=64)
COMMON, NEW_TOKENS, FORKED = 200, 40, 3
LENGTHS = (1, 31, 32, 33, 100, 250)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("engine"), SPEC, seed=5)


def said(
    folder: Path,
    kv_backend: KVBackend,
    budget: int,
    *,
    bold: bool = True,
    system: bool = False,
    configured: EngineConfig = CONFIGURED,
    drafter: Callable[[EngineLoop], Drafter] | None = None,
    lengths: Sequence[int] = LENGTHS,
    prompts: dict[int, list[int]] | None = None,
) -> tuple[dict[int, list[int]], int, int]:
    """What an engine says to prompts of which half begin alike; how many tokens it found computed,
    and how often it ran out of memory. bold: whether memory is mapped while steps run. system:
    whether it is told that what is alike is a system prompt. drafter: makes its drafts. lengths: of
    what the prompts do not share. prompts: takes them, by the number of the request."""
    rng = np.random.default_rng(1)
    common = rng.integers(0, SPEC.vocab_size, COMMON).tolist()
    # On the CPU that is asked first, steps do not overlap.
    config = replace(
        configured,
        kv_backend=kv_backend.setting,  # type: ignore[arg-type]
        kv_budget_bytes=budget,
        overlap=kv_backend.on_gpu,
    )
    machine = MachineMemory(8 << 30, 4 << 30, 1 << 30)
    choice = KVBackendChoice(kv_backend, ("as the check wants it",), maps_while_running=bold)
    _standin.allow_maps_beside_commands(bold and kv_backend is KVBackend.SPARSE)
    plan = plan_engine(config, read_checkpoint(folder), machine, choice)
    has_ring = any(group.has_ring for group in plan.memory.layout.groups)
    assert has_ring == (configured is SHORT_STEPS and kv_backend is KVBackend.SPARSE)
    answers = Answers.empty()
    resident = _standin.residency()["buffers"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.build.compute_device", lambda _: mx.Device(mx.cpu))
        loop = build_engine(plan, config, lambda *_: None, answers)
    if drafter is not None:
        loop._scheduler.drafter = drafter(loop)
    if kv_backend.on_gpu:
        read = read_by(loop)
        assert _standin.residency()["buffers"] - resident >= len(read) > 20
    for number, length in enumerate(lengths):
        own = rng.integers(0, SPEC.vocab_size, length).tolist()
        prompt = tuple([*common, *own] if number % 2 else own)
        if prompts is not None:
            prompts[10 * number] = [*prompt]
        greedy = SamplingParams(NEW_TOKENS, temperature=0.0)
        known = COMMON if system and number % 2 else 0
        answers_to_it = 2 if number == FORKED else 1
        params = [greedy] * answers_to_it
        ends = PromptBoundaries(known)
        loop.mailbox.put(request_of(10 * number, prompt, *params, boundaries=ends))
    run_dry(loop)
    counters = loop._scheduler.counters
    found, preempted = counters.cached_prompt_tokens, counters.preemptions
    loop.close()
    _standin.allow_maps_beside_commands(False)
    return answers.tokens, found, preempted


def read_by(loop: EngineLoop) -> Sequence[mx.array]:
    """The weights."""
    runner = loop._runner
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner._model, Forward)
    return runner._model.weights


@cache
def right(
    folder: Path, *, system: bool = False, configured: EngineConfig = CONFIGURED
) -> dict[int, list[int]]:
    """What the CPU's own engine says."""
    return said(folder, KVBackend.POSIX, ROOMY, system=system, configured=configured)[0]


@pytest.mark.parametrize("budget", [ROOMY, TIGHT])
@pytest.mark.parametrize(("kind", "bold"), MODES)
def test_greedy_answers_are_those_of_the_cpu(
    folder: Path,
    kind: KVBackend,
    bold: bool,
    budget: int,
    report: list[str],
) -> None:
    before = _standin.counts()
    tokens, found, preempted = said(folder, kind, budget, bold=bold)
    done = {name: count - before[name] for name, count in _standin.counts().items()}
    assert tokens == right(folder)
    forked = COMMON + LENGTHS[FORKED]  # which a fork shares, or has copied
    assert (found > forked) == (not kind.is_dense)
    assert take_mistakes() == []
    report.append(
        f"engine, {kind}, {'' if bold else 'at mapping points, '}{budget // MIB} MiB: "
        f"{sum(map(len, tokens.values()))} tokens as on the CPU, {found} found computed, "
        f"{preempted} preempted; {done['commands']} commands, "
        f"{done['encoders']} encoders, {done['barriers']} barriers, {done['waits']} fences"
    )


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields: dict[str, Any] = {"model_type": "qwen2", "architectures": [], "rope_scaling": YARN}
    spec = replace(SPEC, num_attention_heads=2, num_key_value_heads=1)
    return write_model(tmp_path_factory.mktemp("biased"), spec, seed=5, **fields)


@pytest.mark.parametrize(("kind", "bold"), MODES)
def test_so_are_those_of_heads_with_biases_without_norms_and_of_another_rope(
    biased: Path, kind: KVBackend, bold: bool
) -> None:
    assert said(biased, kind, ROOMY, bold=bold)[0] == right(biased)
    assert take_mistakes() == []


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("hybrid"), SPEC, gain=3.0, **HEADS)


@pytest.mark.parametrize("budget", [ROOMY, TWO_AT_ONCE])
@pytest.mark.parametrize(("kind", "bold"), MODES)
def test_so_are_those_of_a_model_with_recurrent_layers(
    hybrid: Path, kind: KVBackend, bold: bool, budget: int, report: list[str]
) -> None:
    before = _standin.counts()["commands"]
    tokens, found, preempted = said(hybrid, kind, budget, bold=bold, system=True)
    assert tokens == right(hybrid, system=True)
    assert len({token for its in tokens.values() for token in its}) > NEW_TOKENS
    assert (found > 0) == (not kind.is_dense)
    assert take_mistakes() == []
    report.append(
        f"engine with states, {kind}, {'' if bold else 'at mapping points, '}{budget // MIB} MiB: "
        f"{sum(map(len, tokens.values()))} tokens as on the CPU, {found} found computed, "
        f"{preempted} preempted; {_standin.counts()['commands'] - before} commands"
    )


@pytest.fixture(scope="module", params=[GEMMA3, GPT_OSS], ids=["Gemma 3", "gpt-oss"])
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windowed")
    return write_hybrid(folder, WINDOWED, gain=3.0, seed=5, **request.param)


@pytest.mark.parametrize(("kind", "bold"), MODES)
def test_so_are_those_of_models_with_windows_around_the_rings_of_their_addresses(
    windowed: Path, kind: KVBackend, bold: bool
) -> None:
    tokens, found, _ = said(windowed, kind, ROOMY, bold=bold, configured=SHORT_STEPS)
    assert tokens == right(windowed, configured=SHORT_STEPS)
    assert len({token for its in tokens.values() for token in its}) > NEW_TOKENS
    assert (found > COMMON + LENGTHS[FORKED]) == (not kind.is_dense)
    assert take_mistakes() == []


# Heads, their groups, recurrences and experts as published, but fewer, and a quarter of the hidden
# size.
A3B = replace(
    SPEC, num_hidden_layers=2, hidden_size=512, num_attention_heads=8, num_key_value_heads=1,
    head_dim=256,
)  # fmt: skip
HYBRID: dict[str, Any] = HEADS | {"full_attention_interval": 2}
SHARED: dict[str, Any] = HYBRID | {
    "num_experts": 12,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
PUBLISHED: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "Qwen3.6-27B": (replace(A3B, num_attention_heads=6, intermediate_size=1088), HYBRID),
    "Qwen3-30B-A3B": (
        replace(A3B, head_dim=128),
        QWEN3_MOE | {"num_experts": 12, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "Qwen3.6-35B-A3B": (A3B, QWEN3_5_MOE | SHARED | {"num_experts_per_tok": 8}),
    "Qwen3-Coder-Next": (A3B, QWEN3_NEXT | SHARED | {"num_experts_per_tok": 10}),
}


@pytest.mark.parametrize(
    "name", PUBLISHED, ids=lambda name: name + "-nightly" * (name != "Qwen3.6-35B-A3B")
)
def test_published_models_say_what_mlx_lm_does(
    name: str, tmp_path: Path, report: list[str]
) -> None:
    """Prompts by MLX's products, and answers by quire's own."""
    spec, fields = PUBLISHED[name]
    how = MIXED | {"dtype": "float32", "gain": 3.0, "seed": 5}
    folder = write_hybrid(tmp_path, spec, **how | fields)
    prompts, found = dict[int, list[int]](), Parity()
    tokens, *_ = said(folder, KVBackend.SPARSE, ROOMY, lengths=(1, 3), prompts=prompts)
    model = load_reference(read_checkpoint(folder))
    for number, answer in tokens.items():
        prompt = prompts[number // 10 * 10]
        logits = model(mx.array([[*prompt, *answer[:-1]]]))[0, len(prompt) - 1 :]
        judge(found, np.array(logits.astype(mx.float32)), answer)
    assert found.faults == 0
    assert len({token for its in tokens.values() for token in its}) > NEW_TOKENS
    report.append(f"{name}: {sum(map(len, tokens.values()))} tokens as mlx-lm's")
