"""What a long prompt does to those who are reading their answers already."""

import asyncio
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tests.bench.compare import Case, run_case
from tests.bench.load import Exchange, gaps, make_prompt, start
from tests.bench.models import INTERFERENCE, TEMPLATE_TOKENS, write_endless_model
from tests.bench.peers import BrokenError, Server
from tests.bench.programs import mlx_lm_server, quire
from tests.bench.rounds import Part, Rounds
from tests.bench.serving import PROMPT_TOKENS
from tests.bench.table import Goal, Row

READERS = 4
READER_TOKENS = 20_000  # more than anybody can read in a run: readers leave when it is over
LONG_PROMPT_TOKENS = 8000
LONG_ANSWER_TOKENS = 8
STEP_TIME_TARGET_MS = 100.0  # the server's default
WORST_OVER_TYPICAL = 3.0
MAX_START_S = 30.0
MAX_RUN_S = 90.0
# Long enough for a median of undisturbed gaps.
CALM_S = 1.0
SETTLE_S = 1.0
WARM_UP_TOKENS = 128
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One run with one server. Milliseconds."""

    longest_gap_ms: float
    median_gap_ms: float
    """While the prompt was worked on."""
    calm_gap_ms: float
    """Before."""
    readers_per_s: float
    """Arrivals of text at one reader while the prompt was worked on."""
    long_ttft_ms: float

    @property
    def allowed_ms(self) -> float:
        """A gap that a reader may have to bear."""
        return WORST_OVER_TYPICAL * max(self.median_gap_ms, STEP_TIME_TARGET_MS)


def run_interference(rounds: Rounds, threads: int, folder: Path) -> Part:
    """Of both servers. folder: where the model goes."""
    model = write_endless_model(folder / "interference", INTERFERENCE)
    programs = [quire(model, threads), mlx_lm_server(model, 2 * READERS)]
    seen: dict[str, list[Disturbance]] = {program.label: [] for program in programs}
    with ExitStack() as stack:
        servers = [stack.enter_context(Server(program, threads)) for program in programs]
        seeds = count(1_000_001)
        for server in servers:
            run_case(server, Case(READERS, PROMPT_TOKENS, WARM_UP_TOKENS, 2), next(seeds))
        for number in rounds:
            for server in servers[:: -1 if number % 2 else 1]:
                seen[server.label].append(_disturb(server, next(seeds)))
    ours, theirs = (seen[program.label] for program in programs)
    facts = [("interference", f"{len(ours)} rounds with {READERS} readers")]
    return Part(_rows(ours, programs[1].label, theirs), facts)


def _disturb(server: Server, seed: int) -> Disturbance:
    try:
        result = asyncio.run(_readers_and_a_long_prompt(server, seed))
    except TimeoutError as error:
        raise BrokenError(f"{server.label}: no end within {MAX_RUN_S:.0f} s") from error
    server.check()
    # Some servers see that a reader has left only when they have written to him in vain.
    time.sleep(SETTLE_S)
    return result


async def _readers_and_a_long_prompt(server: Server, seed: int) -> Disturbance:
    label, target = server.label, server.target
    readers: list[Exchange] = []
    try:
        for index in range(READERS):
            prompt = make_prompt(seed, index, PROMPT_TOKENS - TEMPLATE_TOKENS)
            readers.append(await start(target, prompt, READER_TOKENS))
        await _until(lambda: all(reader.parser.text_times_s for reader in readers), MAX_START_S)
        calm_s = time.perf_counter()
        await asyncio.sleep(CALM_S)
        chars = LONG_PROMPT_TOKENS - TEMPLATE_TOKENS
        long = await start(target, make_prompt(seed, READERS, chars), LONG_ANSWER_TOKENS)
        answer = await long.answer(MAX_RUN_S)
    finally:
        for reader in readers:
            reader.abort()
    if answer.error is not None or answer.ttft_s is None:
        raise BrokenError(f"{label}: the long prompt failed: {answer.error}")
    if answer.prompt_tokens != LONG_PROMPT_TOKENS:
        raise BrokenError(f"{label}: the long prompt has {answer.prompt_tokens} tokens")
    for reader in readers:
        if reader.parser.done or reader.parser.fault is not None:
            raise BrokenError(f"{label}: a reader's answer ended early: {reader.parser.error()}")
    first_s = answer.started_s + answer.ttft_s
    calm = _gaps_within(readers, calm_s, answer.started_s)
    disturbed = _gaps_within(readers, answer.started_s, first_s)
    return Disturbance(
        1e3 * max(disturbed),
        1e3 * statistics.median(disturbed),
        1e3 * statistics.median(calm),
        len(disturbed) / len(readers) / answer.ttft_s,
        1e3 * answer.ttft_s,
    )


def _gaps_within(readers: list[Exchange], from_s: float, until_s: float) -> list[float]:
    """Gaps of all readers that touch the interval. One without an end is as long as the interval:
    a reader who gets nothing waits all the time."""
    result: list[float] = []
    for reader in readers:
        result += touching(reader.parser.text_times_s, from_s, until_s)
    return result


def touching(times_s: list[float], from_s: float, until_s: float) -> list[float]:
    """Lengths of the gaps between arrivals, the last one up to ``until_s``, that overlap the
    interval."""
    before = [t for t in times_s if t <= from_s]
    inside = [t for t in times_s if from_s < t < until_s]
    after = [t for t in times_s if t >= until_s]
    return gaps([*before[-1:], *inside, *(after[:1] or [until_s])])


async def _until(happened: Callable[[], bool], limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        while not happened():
            await asyncio.sleep(POLL_S)


def _rows(ours: list[Disturbance], label: str, theirs: list[Disturbance]) -> list[Row]:
    def figures(of: Callable[[Disturbance], float]) -> tuple[list[float], tuple[str, list[float]]]:
        return [of(one) for one in ours], (label, [of(one) for one in theirs])

    beside = f"beside a prompt of {LONG_PROMPT_TOKENS} tokens"
    lower, higher = Row.lower_is_better, Row.higher_is_better
    longest = lower(f"longest gap {beside}", "ms", *figures(lambda one: one.longest_gap_ms))
    allowed_ms = statistics.median(one.allowed_ms for one in ours)
    return [
        longest.with_goal(Goal.at_most(longest.quire, allowed_ms, "ms")),
        lower(f"median gap {beside}", "ms", *figures(lambda one: one.median_gap_ms)),
        lower("median gap before it", "ms", *figures(lambda one: one.calm_gap_ms)),
        higher(f"texts {beside}", "per reader and s", *figures(lambda one: one.readers_per_s)),
        lower("its time to first token", "ms", *figures(lambda one: one.long_ttft_ms)),
    ]
