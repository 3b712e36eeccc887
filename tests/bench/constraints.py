"""The cost of constraints beside the model's own step: streams with and without a schema."""

import asyncio
import statistics
import time
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.build import build_engine, plan_engine
from engine.machine import machine_memory
from engine.models.checkpoint import read_checkpoint
from engine.step.loop import EngineLoop
from engine.types import SamplingParams, TokenConstraint
from server.text.conversation import OutputFormat
from server.text.grammar.compiler import GrammarCompiler
from server.text.grammar.constraint_spec import ConstraintSpec
from server.text.grammar.vocabulary import Vocabulary
from server.text.grammar.worker import GrammarWorker
from server.text.tokenizer import Tokenizer
from tests.bench.models import SERVING, write_endless_model
from tests.bench.table import Goal, Part, Rounds, Row
from tests.engines import CONFIG, ON_CPU, request_of
from tests.server.text.grammars import LIMITS

GIB = 1024**3
STREAMS = 16
MOST_OF_A_STEP = 0.1
PROMPT_TOKENS = 100
MODEL_LEN = 2048
STEPS = 200
WARM_UP_STEPS = 30
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["guest", "member", "owner"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
# No answer comes to an end while it is measured.
SCHEMA = {"type": "array", "items": PERSON, "minItems": 10**6}


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Medians over steps that decode one token of every stream, microseconds per row."""

    free: float
    """A step without constraints."""
    cost: float
    """How much longer the next step, with constraints, takes."""
    grammar: float
    """The part of the cost that masks and accepting the chosen tokens take."""


class Timed:
    """A constraint with a stopwatch, which all constraints of a step share."""

    def __init__(self, constraint: TokenConstraint, seconds: list[float]) -> None:
        self._constraint = constraint
        self._seconds = seconds

    def fill_mask(self, row: np.ndarray) -> bool:
        started_s = time.perf_counter()
        filled = self._constraint.fill_mask(row)
        self._seconds[-1] += time.perf_counter() - started_s
        return filled

    def accept(self, token_id: int) -> None:
        started_s = time.perf_counter()
        self._constraint.accept(token_id)
        self._seconds[-1] += time.perf_counter() - started_s

    def __deepcopy__(self, _: object) -> "Timed":
        return Timed(deepcopy(self._constraint), self._seconds)


def run_constraints(rounds: Rounds, threads: int, folder: Path) -> Part:
    """Run in this process. folder: where the model goes."""
    model = write_endless_model(folder / "constraints", SERVING)
    constraint = asyncio.run(compile_schema(model, SCHEMA))
    times = [_measure(model, threads, constraint) for _ in rounds]
    return Part(rows(times), [("constraints", f"{STEPS} steps a round, fp32, 2 layers")])


async def compile_schema(model: Path, schema: dict[str, Any]) -> TokenConstraint:
    tokenizer, checkpoint = Tokenizer(model), read_checkpoint(model)
    stops = frozenset(checkpoint.eos_token_ids)
    compiler = GrammarCompiler(
        Vocabulary(tokenizer, checkpoint.vocab_size, stops),
        lambda made: GrammarWorker(made.text, made.facts, LIMITS),
        LIMITS,
    )
    constraint = await compiler.compile(ConstraintSpec(OutputFormat("json_schema", schema)))
    await compiler.close()
    assert constraint is not None
    return constraint


def rows(times: list[StepTimes]) -> list[Row]:
    """Return a row for all that constraints cost, and one for the grammar's part of it."""
    step = ("2-layer step", [one.free for one in times])
    name = f"constraints, {STREAMS} streams"
    cost = Row.of(name, "us/row", [one.cost for one in times], step)
    grammar = Row.of(f"{name}, grammar", "us/row", [t.grammar for t in times], step)
    return [cost.with_goal(Goal.at_least(cost.ratio.value, 1 / MOST_OF_A_STEP)), grammar]


def _measure(folder: Path, threads: int, constraint: TokenConstraint) -> StepTimes:
    """Let steps of two engines take turns, so that a busy machine slows both alike."""
    seconds = [0.0]
    free = _engine(folder, threads, None)
    bound = _engine(folder, threads, Timed(constraint, seconds))
    pairs = []
    for _ in range(STEPS):
        seconds.append(0.0)
        pairs.append((_timed(free), _timed(bound)))
    free_s = statistics.median(pair[0] for pair in pairs)
    cost_s = statistics.median(after - before for before, after in pairs)
    figures = (free_s, cost_s, statistics.median(seconds[1:]))
    return StepTimes(*(1e6 * figure / STREAMS for figure in figures))


def _timed(loop: EngineLoop) -> float:
    started_s = time.perf_counter()
    for _ in range(2):  # without overlap, a step is begun, then read
        loop.run_once()
    return time.perf_counter() - started_s


def _engine(model: Path, threads: int, constraint: TokenConstraint | None) -> EngineLoop:
    """Return an engine whose streams are all being answered."""
    config = replace(
        CONFIG,
        page_bytes=None,
        heap_bytes=GIB // 16,
        kv_budget_bytes=GIB,
        free_slack_bytes=GIB // 4,
        max_model_len=MODEL_LEN,
        max_num_seqs=STREAMS,
        max_num_batched_tokens=8192,
        threads=threads,
        check_every_step=False,
    )
    memory = replace(machine_memory(), available_bytes=4 * GIB)
    plan = plan_engine(config, read_checkpoint(model), memory, ON_CPU["posix"])
    loop = build_engine(plan, config, lambda *_: None, lambda _: None)
    for number in range(1, STREAMS + 1):
        prompt = (number, *range(PROMPT_TOKENS - 1))
        params = SamplingParams(MODEL_LEN - PROMPT_TOKENS - 1, seed=number)
        own = deepcopy(constraint)
        loop.mailbox.put(request_of(number, prompt, params, constraint=own))
    while loop.stats.generated_tokens < STREAMS * WARM_UP_STEPS:
        loop.run_once()
    return loop
