"""``quire bench``: a model of random weights is measured by the engine that serves it."""

import itertools
import json
import re
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.client import EngineClient, TokenStream
from engine.figures import EngineStats
from engine.types import FinishReason, TokenEvent
from server.cli import bench
from tests.models import write_embedding_model
from tests.server.commands import ENGINE, MODEL, Run, one_sentence


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MEASURE_S", 0.05)
    monkeypatch.setattr(bench, "PROMPTS", (8, 32, 200))
    for name, value in {
        "CACHE__KV_BUDGET": "8MiB",
        "CACHE__HEAP_SIZE": "1MiB",
        "ENGINE__MAX_NUM_SEQS": "4",
        "ENGINE__MAX_MODEL_LEN": "128",
        "ENGINE__THREADS": "1",
    }.items():
        monkeypatch.setenv(f"QUIRE_{name}", value)


def test_one_line_is_there_to_be_shared(quire: Run, tiny_model: Path) -> None:
    result = quire("bench", tiny_model)
    assert result.exit_code == 0, result.output
    number = r"[\d.]+"
    assert re.fullmatch(
        rf".+, 1 threads, {number} GiB: {tiny_model.name}: prompt \d+ tokens/s \(32 tokens\), "
        rf"decode {number} / {number} tokens/s at 1 / 4 streams, peak memory {number} \w+; "
        r"quire [\w.]+\n",
        result.stdout,
    ), result.stdout


def test_json_has_the_same_figures(
    quire: Run, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "SHORT_PROMPT_S", 0.0)
    (line,) = quire("bench", tiny_model, "--json").stdout.splitlines()
    figures = json.loads(line)
    assert figures["prompt_tokens"] == 8, "after a slow prompt no longer one is tried"
    assert list(figures["decode_tokens_per_s"]) == ["1", "4"]
    assert all(rate > 0 for rate in figures["decode_tokens_per_s"].values())
    assert figures["prompt_tokens_per_s"] > 0
    unit = 1 if sys.platform == "darwin" else 1024
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    assert figures["peak_memory_bytes"] == pytest.approx(peak_bytes, rel=0.2)
    assert set(figures) >= {"chip", "memory_bytes", "model", "quire", "mlx_peak_bytes"}
    assert figures["planned"]["weights_bytes"] > 0
    assert figures["drafting"] in ("drafting", "resting")
    assert set(figures["command_buffers_per_step"].values()) == {0.0}, "a CPU has none"


@pytest.mark.parametrize(
    ("steps", "buffers", "per_step"), [(10, 70, 7), (8, 328, 41), (4, 2, 0.5), (1, 1, 1), (0, 3, 3)]
)
def test_command_buffers_are_counted_for_each_step(
    quire: Run, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, steps: int, buffers: int,
    per_step: float,
) -> None:  # fmt: skip
    stats = (EngineStats(steps=n * steps, command_buffers=n * buffers) for n in itertools.count())
    monkeypatch.setattr(EngineClient, "stats", property(lambda _: next(stats)))
    figures = json.loads(quire("bench", tiny_model, "--json").stdout)
    assert figures["command_buffers_per_step"] == {"1": per_step, "4": per_step}


def test_a_model_of_vectors_is_refused(quire: Run, tmp_path: Path) -> None:
    folder = write_embedding_model(tmp_path / "embedder")
    line = one_sentence(quire("bench", folder), MODEL)
    assert line.endswith("it makes vectors, and answers are what is measured")


@pytest.mark.parametrize(
    "batches", [[[]], [[TokenEvent(1, None, FinishReason.ERROR, message="no luck")]]]
)
def test_an_engine_that_fails_or_hangs_is_told(
    quire: Run, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, batches: Any
) -> None:
    async def next_batches(*_: object) -> Any:
        return batches

    monkeypatch.setattr(TokenStream, "next_batches", staticmethod(next_batches))
    line = one_sentence(quire("bench", tiny_model), ENGINE)
    assert line == "quire: the engine has failed, or hangs: see the log"
