"""Makes another process, the worker, estimate a grammar's cost before this process compiles it.

Two queues keep simple ConstraintSpecs from waiting for others that take seconds to compile::

    spec --> quick queue: at most QUICK_CPU_S of processor time --> estimate
                 | exceeded
                 +--> slow queue, one at a time: at most max_compile_s --> estimate

A spec that waits too long or gets too little processor time is refused, with a hint to retry."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from engine.config import GRAMMAR_BYTES
from kvcache.child import Cause, Child, LimitError, Limits
from server.config import LimitsSection
from server.text.grammar.estimate import CostEstimate, estimate_cost, read_tokens
from server.text.grammar.text import TokenizerFacts

MAX_SPEC_BYTES = 256 * 1024
# For each queue: how many ConstraintSpecs may run at the same time, and how many may wait.
QUICK_AT_ONCE, QUICK_WAITING = 2, 64
SLOW_AT_ONCE, SLOW_WAITING = 1, 8
QUICK_CPU_S = 0.1
# Longest wait of a spec in a queue; then, for each queue, the longest estimate of a spec's cost.
TURN_LIMIT_S = 20.0
QUICK_WALL_S, SLOW_WALL_S = 2.0, 20.0
# Nice values of the worker's children, so that the engine gets processor time first.
QUICK_NICE, SLOW_NICE = 5, 15
# An idle worker ends after this many seconds. The next spec starts another worker.
IDLE_S = 60.0

log = structlog.get_logger("quire")


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of the time and memory that grammars take."""

    max_compile_s: float
    """Processor time for compiling a grammar, or for reading an answer that a client has begun."""
    max_spec_bytes: int = MAX_SPEC_BYTES
    max_memory_bytes: int = 32 * 1024**2
    """Limit of the memory of one grammar."""
    max_mask_s: float = 0.1
    """Limit of the processor time to find the allowed next tokens. An answer may exceed it once."""
    max_kept: int = 64
    max_kept_bytes: int = GRAMMAR_BYTES
    """Limit of the memory of all grammars that are cached or in use."""

    @classmethod
    def of(cls, limits: LimitsSection) -> "GrammarLimits":
        return cls(limits.max_grammar_compile_s, max_kept=limits.max_cached_grammars)


class GrammarsFullError(Exception):
    """Raised if the worker, or the memory for grammars, has no room for a grammar now."""


class GrammarWorker:
    """Gets estimates of costs from a worker process, which it starts and ends as needed."""

    def __init__(self, tokenizer: bytes, facts: TokenizerFacts, limits: GrammarLimits) -> None:
        self._child = Child(prepare=(read_tokens, tokenizer, asdict(facts)))
        self._limits = limits
        cpu_s, memory_bytes = limits.max_compile_s, limits.max_memory_bytes
        quick = Limits(min(QUICK_CPU_S, cpu_s), QUICK_WALL_S, memory_bytes, QUICK_NICE)
        slow = Limits(cpu_s, max(SLOW_WALL_S, 2 * cpu_s), memory_bytes, SLOW_NICE)
        self._quick = _Queue(quick, QUICK_AT_ONCE, QUICK_WAITING)
        self._slow = _Queue(slow, SLOW_AT_ONCE, SLOW_WAITING)
        self._num_estimates = 0
        self._idle: asyncio.TimerHandle | None = None
        self._closed = False

    async def estimate(self, spec_text: str) -> CostEstimate:
        """Estimate a ConstraintSpec's cost. Raises GrammarsFullError if the worker has no room."""
        self._num_estimates += 1
        if self._idle is not None:
            self._idle.cancel()
        try:
            return await self._estimate(spec_text)
        except LimitError as error:
            return self._refuse(error)
        finally:
            self._num_estimates -= 1
            if not self._num_estimates:
                loop = asyncio.get_running_loop()
                self._idle = loop.call_later(IDLE_S, loop.run_in_executor, None, self._child.close)

    async def close(self) -> None:
        self._closed = True
        await asyncio.to_thread(self._child.close)

    async def _estimate(self, spec_text: str) -> CostEstimate:
        if self._closed:
            raise GrammarsFullError
        work = (self._child.call, estimate_cost, spec_text, self._limits.max_mask_s)
        try:
            answer = await self._quick.run(*work)
        except LimitError as error:
            if error.cause not in (Cause.CPU, Cause.WALL):
                raise
            answer = await self._slow.run(*work)
        estimate = CostEstimate(**answer)
        if estimate.memory_bytes > self._limits.max_memory_bytes:
            raise self._slow.limits.to_error(Cause.MEMORY)
        return estimate

    def _refuse(self, error: LimitError) -> CostEstimate:
        """Return the reason of a refusal. Raises GrammarsFullError if a retry may help."""
        reasons = {
            Cause.CPU: f"it cannot be compiled within {self._limits.max_compile_s:g} s",
            Cause.MEMORY: f"it takes more than {self._limits.max_memory_bytes} bytes of memory",
            Cause.DIED: "it is nested too deeply, or too large",
        }
        if error.cause is Cause.NOT_RUN and not self._closed:
            log.warning(f"the process that judges grammars has failed: {error}")
        if error.cause not in reasons:
            raise GrammarsFullError from error
        return CostEstimate(refusal=reasons[error.cause])


class _Queue:
    """A queue of ConstraintSpecs that run or wait."""

    def __init__(self, limits: Limits, at_once: int, waiting: int) -> None:
        """``limits`` are those of each spec."""
        self.limits = limits
        self._turns = asyncio.Semaphore(at_once)
        self._room = waiting
        self._threads = ThreadPoolExecutor(at_once, "grammar worker")

    async def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run ``work`` within limits in a thread. Raises GrammarsFullError if too many specs wait,
        or if this one waits for too long."""
        if not self._room:
            raise GrammarsFullError
        self._room -= 1
        try:
            async with asyncio.timeout(TURN_LIMIT_S):
                await self._turns.acquire()
        except TimeoutError as error:
            raise GrammarsFullError from error
        finally:
            self._room += 1
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._threads, work, self.limits, *arguments)
        # The work goes on until its limits even if the client has left.
        running.add_done_callback(lambda _: self._turns.release())
        return await asyncio.shield(running)
