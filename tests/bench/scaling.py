"""How quire and its peers grow: with streams, with the prompt, and with what lies in the cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.compare import (
    Case,
    Seen,
    compare_round,
    facts,
    nothing_seen,
    rate_rows,
    ttft_rows,
)
from tests.bench.contest import Contest
from tests.bench.models import SERVING, write_endless_model
from tests.bench.overhead import StepTimes, measure_steps
from tests.bench.plot import Curve
from tests.bench.programs import mlx_lm_server, quire
from tests.bench.rounds import Part, Rounds
from tests.bench.table import Figures, Row

STREAMS = (1, 2, 4, 8, 16, 32, 64)
STREAM_PROMPT_TOKENS, STREAM_ANSWER_TOKENS = 86, 64
PROMPT_TOKENS = (32, 128, 512, 2048, 8192, 16384)
PROMPT_ANSWER_TOKENS = 4
CACHED_BLOCKS = (10, 100, 1000, 10_000, 100_000)
CACHED_SEQUENCES = 64
MAX_LOAD_S = 300.0


@dataclass(frozen=True, slots=True)
class Axes:
    """How far each goes."""

    streams: Sequence[int] = STREAMS
    prompt_tokens: Sequence[int] = PROMPT_TOKENS
    cached_blocks: Sequence[int] = CACHED_BLOCKS
    cached_sequences: int = CACHED_SEQUENCES


def run_scaling(
    rounds: Rounds,
    requests_per_stream: int,
    folder: Path,
    contest: Contest,
    axes: Axes = Axes(),  # noqa: B008  a frozen value
) -> Part:
    """On a 2-layer model. folder: where it goes.

    Raises BrokenError when a server dies or an answer is not whole.
    """
    model = write_endless_model(folder / "scaling", SERVING)
    by_streams = [
        Case(n, STREAM_PROMPT_TOKENS, STREAM_ANSWER_TOKENS, requests_per_stream, MAX_LOAD_S)
        for n in axes.streams
    ]
    by_prompt = [Case(1, n, PROMPT_ANSWER_TOKENS, 1, MAX_LOAD_S) for n in axes.prompt_tokens]
    seen = nothing_seen()
    steps: dict[int, list[StepTimes]] = {n: [] for n in axes.cached_blocks}
    most = max(axes.streams)
    ours = quire(model, contest.threads)
    with contest.servers(ours, mlx_lm_server(model, most)) as servers:
        labels = [server.label for server in servers]
        for number in rounds:
            compare_round(seen, servers, [*by_streams, *by_prompt], number, contest.seeds)
    for _ in range(len(seen[labels[0], by_streams[0]].ttft_ms)):
        for blocks, times in steps.items():
            times.append(measure_steps(model, contest.threads, axes.cached_sequences, blocks))
    rows = rate_rows("scaling", seen, labels, by_streams, lambda *_: None)
    rows += ttft_rows(
        seen, labels, by_prompt, lambda *_: None, lambda case: f"prompt of {case.prompt_tokens}"
    )
    rows += _cached_rows(steps, axes.cached_sequences)
    curves = _curves(seen, labels, by_streams, by_prompt)
    curves.append(_cached_curve(steps, axes.cached_sequences))
    return Part(rows, facts("scaling", seen, by_streams), curves)


def _cached_rows(steps: dict[int, list[StepTimes]], sequences: int) -> list[Row]:
    return [
        Row.lower_is_better(
            f"scaling, {sequences} sequences beside {blocks} cached blocks",
            "us/seq",
            [one.ours / sequences for one in times],
            ("model", [one.model / sequences for one in times]),
        )
        for blocks, times in steps.items()
    ]


def _curves(
    seen: Seen, labels: Sequence[str], by_streams: Sequence[Case], by_prompt: Sequence[Case]
) -> list[Curve]:
    streams = [case.streams for case in by_streams]
    prompts = [case.prompt_tokens for case in by_prompt]

    def lines(cases: Sequence[Case], of: str) -> dict[str, list[Figures]]:
        return {
            label: [Figures.of(getattr(seen[label, case], of)) for case in cases]
            for label in labels
        }

    ttft = "time to first token (ms)"
    return [
        Curve("rate", "streams", "tokens per second", streams, lines(by_streams, "tokens_per_s")),
        Curve("first text", "streams", ttft, streams, lines(by_streams, "ttft_ms")),
        Curve("one prompt", "tokens of the prompt", ttft, prompts, lines(by_prompt, "ttft_ms")),
    ]


def _cached_curve(steps: dict[int, list[StepTimes]], sequences: int) -> Curve:
    lines = {
        "scheduler and cache": [Figures.of([t.ours for t in times]) for times in steps.values()],
        "model": [Figures.of([t.model for t in times]) for times in steps.values()],
    }
    return Curve(
        f"a step of {sequences} sequences", "cached blocks", "microseconds", list(steps), lines
    )
