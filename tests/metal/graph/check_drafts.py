"""A head that drafts tokens, in the whole engine on each kind of backend: its passes compute what
they do on the CPU, and no answer changes."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import mlx.core as mx
import numpy as np
import pytest

from engine.build import build_engine, plan_engine
from engine.machine import MachineMemory
from engine.models.checkpoint import read_checkpoint
from engine.models.mlx_ops import FEW_ROWS
from engine.step.draft_check import DraftCheck
from engine.step.loop import EngineLoop
from kvcache.backends.choice import KVBackend, KVBackendChoice
from tests.engine.hybrid_schedules import Deepest, Foretold, NotedHead
from tests.engine.models.hybrids import write_hybrid
from tests.engines import Answers
from tests.metal.graph.check_engine import (
    CONFIGURED,
    HEADS,
    MIB,
    MODES,
    NEW_TOKENS,
    ROOMY,
    SPEC,
    said,
)

SHORT = 4 * MIB  # in which the dense model gives way
# Of the largest logit: float32 over a few layers.
ROUNDING = 1e-3
MANY_ROWS = 128  # in which MLX's kernels for a CPU, in float32, give each the bits of one alone


@pytest.fixture(scope="module", params=[HEADS, {"model_type": "qwen3"}], ids=["hybrid", "dense"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts")
    return write_hybrid(folder, SPEC, gain=3.0, head="mtp", **request.param)


class Way:
    """Drafts answers with mistakes beside the head; or nothing, with as many passes as may be."""

    def __init__(self, answers: dict[int, list[int]] | None = None) -> None:
        self._answers = answers

    def __call__(self, loop: EngineLoop) -> Foretold:
        self.head, self.counters = NotedHead(loop), loop._scheduler.counters
        loop._scheduler._max_draft_rows = MANY_ROWS
        if self._answers is None:
            return Deepest({}, Random(0), 0.0, self.head)
        return Foretold(self._answers, Random(1), 0.3, self.head)


@cache
def right(folder: Path) -> tuple[dict[int, list[int]], NotedHead]:
    """What the CPU says without drafts, and a head that has made all passes there."""
    tokens = said(folder, KVBackend.POSIX, ROOMY, system=True)[0]
    assert len({token for its in tokens.values() for token in its}) > NEW_TOKENS
    for way in (Way(tokens), deepest := Way()):
        assert said(folder, KVBackend.POSIX, ROOMY, system=True, drafter=way)[0] == tokens
    return tokens, deepest.head


@pytest.mark.parametrize("most", [FEW_ROWS, 3 * FEW_ROWS])
def test_up_to_eight_rows_have_the_same_bits(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows are MLX's to multiply, here by its kernels for a CPU."""
    monkeypatch.setattr("engine.build.compute_device", lambda _: mx.Device(mx.cpu))
    config = replace(CONFIGURED, kv_backend="paged", kv_budget_bytes=ROOMY)
    packed = HEADS | {"dtype": "bfloat16", "bits": 4}
    checkpoint = read_checkpoint(write_hybrid(tmp_path, SPEC, gain=3.0, **packed))
    choice = KVBackendChoice(KVBackend.PAGED, ())
    plan = plan_engine(config, checkpoint, MachineMemory(8 << 30, 4 << 30, 1 << 30), choice)
    loop = build_engine(plan, config, lambda *_: None, Answers.empty())
    check = DraftCheck(loop._runner._model, loop._kv, SPEC.vocab_size)  # type: ignore[attr-defined]
    assert bool(check.fault(8, most)) == (most > FEW_ROWS)
    loop.close()


@pytest.mark.parametrize("budget", [ROOMY, SHORT])
@pytest.mark.parametrize(("kind", "bold"), MODES)
def test_passes_are_those_of_the_cpu_and_answers_those_without_drafts(
    folder: Path, kind: KVBackend, bold: bool, budget: int, report: list[str]
) -> None:
    (answers, cpu), way = right(folder), Way(right(folder)[0])
    tokens, found, preempted = said(folder, kind, budget, bold=bold, system=True, drafter=way)
    assert tokens == answers
    kept, drafted = way.counters.accepted_tokens, way.counters.drafted_tokens
    assert NEW_TOKENS < kept < drafted <= len(way.head.logits)
    # Which passes run depends on the company: no sequence drafts while a prompt is computed.
    both = way.head.logits.keys() & cpu.logits.keys()
    assert len(both) > len(way.head.logits) / 2
    for key in both:
        got, want = (np.frombuffer(each.logits[key], np.float32) for each in (way.head, cpu))
        assert np.abs(got - want).max() <= ROUNDING * np.abs(want).max(), key
    report.append(
        f"engine with a head, {kind}, {'' if bold else 'at mapping points, '}{budget // MIB} MiB: "
        f"{len(both)} passes as on the CPU, {kept} of {drafted} drafts kept, {found} "
        f"tokens found computed, {preempted} preempted"
    )
