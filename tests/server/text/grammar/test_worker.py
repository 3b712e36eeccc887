"""The worker estimates grammars, and refuses those that would hold up this process."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from kvcache.child import Cause, Child, Limits
from server.text.conversation import OutputFormat, Tool
from server.text.grammar import worker as module
from server.text.grammar.constraint_spec import ConstraintSpec, spec_json
from server.text.grammar.estimate import CostEstimate, estimate_cost, read_tokens
from server.text.grammar.vocabulary import GrammarTokenizer
from server.text.grammar.worker import GrammarLimits, GrammarsFullError, GrammarWorker
from server.text.tokenizer import Tokenizer
from tests.server.harness import eventually
from tests.server.text.grammars import vocabulary

MIB = 1024**2
LIMITS = GrammarLimits(max_compile_s=0.3, max_memory_bytes=1024 * MIB, max_mask_s=10.0)


def form(kind: Any, value: Any = None) -> str:
    return spec_json(ConstraintSpec(OutputFormat(kind, value)), 2**20)


SIMPLE = form("choice", ["a", "b"])
# Seconds of processor time, and half a GiB.
BOMB = form("regex", "z1|" + "(ab|cd)*" * 12000)


def bomb(number: int) -> str:
    """Each one another form."""
    return form("regex", f"z{number}|" + "(ab|cd)*" * 12000)


@pytest.fixture(scope="module")
def read(tokenizer: Tokenizer) -> GrammarTokenizer:
    return GrammarTokenizer(vocabulary(tokenizer))


@pytest.fixture(autouse=True)
def as_nice_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other work a form would wait for its turn for longer than it may."""
    monkeypatch.setattr(module, "QUICK_NICE", 0)
    monkeypatch.setattr(module, "SLOW_NICE", 0)


@pytest.fixture
async def made(read: GrammarTokenizer) -> AsyncIterator[GrammarWorker]:
    worker = GrammarWorker(read.text, read.facts, LIMITS)
    yield worker
    await worker.close()


def children() -> list[psutil.Process]:
    """Processes that this one has started, and theirs."""
    return psutil.Process().children(recursive=True)


async def test_what_can_be_enforced_comes_back_as_a_grammar_with_its_cost(
    made: GrammarWorker,
) -> None:
    estimate = await made.estimate(SIMPLE)
    assert estimate.refusal is None
    assert json.loads(estimate.grammar)["grammars"]
    assert 0 <= estimate.memory_bytes < 8 * MIB


async def test_what_cannot_be_enforced_comes_back_with_its_reason(made: GrammarWorker) -> None:
    estimate = await made.estimate(form("json_schema", {"not": {"a": 1}}))
    assert (estimate.refusal, estimate.param) == ("not at # is not supported", "response_format")
    tool = Tool("a", parameters={"not": {"a": 1}}, strict=True)
    calls = ConstraintSpec(tools=(tool,), must_call=True)
    assert (await made.estimate(spec_json(calls, 2**20))).param == "tools"


async def test_processor_time_has_an_end_whatever_takes_it(made: GrammarWorker) -> None:
    started = time.monotonic()
    estimate = await made.estimate(BOMB)
    assert estimate.refusal == "it cannot be compiled within 0.3 s"
    assert time.monotonic() - started < module.IDLE_S
    assert (await made.estimate(SIMPLE)).refusal is None


ITSELF = {"$ref": "#"}
# Schemas of equal branches that refer to themselves, and how many take long or leave too many ways.
REPEATED: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "itself": (lambda n: {"anyOf": [ITSELF] * n}, 1024),
    "branches in branches": (lambda n: {"anyOf": [{"anyOf": [ITSELF] * 8}] * n}, 128),
    "a definition": (
        lambda n: {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * n}}, "$ref": "#/$defs/a"},
        2048,
    ),
    "arrays": (lambda n: {"anyOf": [{"type": "array", "items": ITSELF}] * n}, 512),
    "objects": (lambda n: {"anyOf": [{"type": "object", "properties": {"a": ITSELF}}] * n}, 256),
}


@pytest.mark.parametrize("name", REPEATED)
async def test_many_equal_branches_are_judged_as_one(read: GrammarTokenizer, name: str) -> None:
    schema, times = REPEATED[name]
    made = GrammarWorker(read.text, read.facts, replace(LIMITS, max_compile_s=1.0))
    one, many = [await made.estimate(form("json_schema", schema(n))) for n in (1, times)]
    await made.close()
    assert (many.refusal, many.grammar) == (one.refusal, one.grammar)


async def test_memory_that_was_taken_between_two_looks_counts(read: GrammarTokenizer) -> None:
    made = GrammarWorker(read.text, read.facts, replace(LIMITS, max_memory_bytes=1))
    estimate = await made.estimate(form("choice", [f"word {n}" for n in range(500)]))
    await made.close()
    assert estimate.refusal == "it takes more than 1 bytes of memory"


async def test_nobody_waits_for_forms_that_take_long(made: GrammarWorker) -> None:
    """Bombs would keep all threads of a pool for as long as they last."""
    assert (await made.estimate(SIMPLE)).refusal is None
    bombs = [asyncio.create_task(made.estimate(bomb(number))) for number in range(3)]
    await asyncio.sleep(0)
    estimate = await made.estimate(form("choice", ["c"]))
    assert estimate.refusal is None
    assert not all(task.done() for task in bombs)
    assert all(estimate.refusal for estimate in await asyncio.gather(*bombs))


@pytest.mark.parametrize(("limit", "value"), [("SLOW_WAITING", 1), ("TURN_LIMIT_S", 0.05)])
async def test_of_forms_that_take_long_few_may_wait_and_none_for_long(
    read: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch, limit: str, value: float
) -> None:
    monkeypatch.setattr(module, limit, value)
    worker = GrammarWorker(read.text, read.facts, replace(LIMITS, max_compile_s=1.0))
    bombs = [worker.estimate(bomb(number)) for number in range(3)]
    found = await asyncio.gather(*bombs, return_exceptions=True)
    await worker.close()
    refused = [one for one in found if isinstance(one, CostEstimate) and one.refusal]
    busy = [one for one in found if isinstance(one, GrammarsFullError)]
    assert (len(refused) + len(busy), min(len(refused), len(busy))) == (3, 1)


class Starved(Child):
    """Gets no time of a processor."""

    def call(self, limits: Limits, work: Any, *arguments: Any) -> Any:
        raise limits.to_error(Cause.WALL)


async def test_who_gets_no_processor_is_to_come_back(
    read: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Child", Starved)
    with pytest.raises(GrammarsFullError):
        await GrammarWorker(read.text, read.facts, LIMITS).estimate(SIMPLE)


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_after_the_end_of_the_process_another_one_estimates(
    read: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUICK_CPU_S", 5.0)
    monkeypatch.setattr(module, "QUICK_WALL_S", 20.0)
    made = GrammarWorker(read.text, read.facts, replace(LIMITS, max_compile_s=5.0))
    try:
        before = children()
        task = asyncio.create_task(made.estimate(BOMB))
        await eventually(lambda: len(children()) > len(before) + 1)
        new = [child for child in children() if child not in before]
        with capture_logs() as entries:
            # A forked process outlives the other one, and would tell its estimate.
            for child in sorted(new, key=lambda child: child.ppid() != os.getpid()):
                child.kill()
                await eventually(partial(has_ended, child))
            with pytest.raises(GrammarsFullError):
                await task
        assert "judges grammars has failed: its process ended with -9" in entries[0]["event"]
        assert (await made.estimate(SIMPLE)).refusal is None
    finally:
        await made.close()


async def test_who_has_left_leaves_no_trace(made: GrammarWorker) -> None:
    before = len(children())
    task = asyncio.create_task(made.estimate(BOMB))
    await eventually(lambda: len(children()) > before + 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await made.estimate(SIMPLE)).refusal is None


async def test_a_worker_without_work_is_no_process(
    read: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.05)
    made = GrammarWorker(read.text, read.facts, LIMITS)
    before = len(children())
    for _ in range(2):
        assert (await made.estimate(SIMPLE)).refusal is None
        while len(children()) > before:
            await asyncio.sleep(0.01)
    await made.close()


async def test_a_worker_without_work_closes_and_estimates_nothing(
    read: GrammarTokenizer,
) -> None:
    worker = GrammarWorker(read.text, read.facts, LIMITS)
    await worker.close()
    with pytest.raises(GrammarsFullError):
        await worker.estimate(SIMPLE)


def test_a_grammar_that_is_refused_costs_nothing(read: GrammarTokenizer) -> None:
    tokens = read_tokens(read.text.decode(), asdict(read.facts))
    estimate = estimate_cost(tokens, form("regex", "("), 10.0)
    assert estimate.refusal
    assert not estimate.memory_bytes
