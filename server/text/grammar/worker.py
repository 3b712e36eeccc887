"""Makes another process, the worker, estimate a grammar's cost before this process compiles it.

Two queues keep simple ConstraintSpecs from waiting for others that take seconds to compile::

    spec --> quick queue: at most QUICK_CPU_S of processor time --> estimate
                 | exceeded
                 +--> slow queue, one at a time: at most max_compile_s --> estimate

A spec that waits too long or gets too little processor time is refused, with a hint to retry."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from engine.config import GRAMMAR_BYTES
from server.config import LimitsSection
from server.text.grammar.fork_server import (
    DIED,
    LENGTH,
    OVER_MEMORY,
    OVER_TIME,
    STARVED,
    CostEstimate,
)
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
COMMAND = (sys.executable, "-P", "-m", "server.text.grammar.fork_server")

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


class WorkerBusyError(Exception):
    """Raised if the worker has no room for a ConstraintSpec now."""


class GrammarWorker:
    """Gets estimates of costs from a worker process, which it starts and ends as needed."""

    def __init__(self, tokenizer: bytes, facts: TokenizerFacts, limits: GrammarLimits) -> None:
        self._tokenizer = tokenizer
        self._facts = facts
        self._limits = limits
        slow_cpu_s = limits.max_compile_s
        quick_cpu_s, slow_wall_s = min(QUICK_CPU_S, slow_cpu_s), max(SLOW_WALL_S, 2 * slow_cpu_s)
        self._quick = _Queue(QUICK_AT_ONCE, QUICK_WAITING, quick_cpu_s, QUICK_WALL_S, QUICK_NICE)
        self._slow = _Queue(SLOW_AT_ONCE, SLOW_WAITING, slow_cpu_s, slow_wall_s, SLOW_NICE)
        self._starting = asyncio.Lock()
        self._process: _Process | None = None
        self._closed = False

    async def estimate(self, spec_text: str) -> CostEstimate:
        """Estimate a ConstraintSpec's cost. Raises WorkerBusyError if the worker has no room."""
        async with self._quick.turn():
            answer = await self._ask(spec_text, self._quick)
        if answer.get("ended") in (OVER_TIME, STARVED):
            async with self._slow.turn():
                answer = await self._ask(spec_text, self._slow)
        if answer.get("ended") == STARVED:
            raise WorkerBusyError
        return self._read(answer)

    async def close(self) -> None:
        self._closed = True
        if self._process is not None:
            await self._process.close()

    async def _ask(self, spec_text: str, queue: "_Queue") -> dict[str, Any]:
        process = await self._running_process()
        request = {
            "spec": spec_text,
            "cpu_s": queue.cpu_s,
            "wall_s": queue.wall_s,
            "memory_bytes": self._limits.max_memory_bytes,
            "max_mask_s": self._limits.max_mask_s,
            "nice": queue.nice,
        }
        return await process.ask(request)

    async def _running_process(self) -> "_Process":
        async with self._starting:
            if self._closed:
                raise WorkerBusyError
            if self._process is None or self._process.is_over:
                self._process = await _Process.start(self._tokenizer, self._facts)
            return self._process

    def _read(self, answer: dict[str, Any]) -> CostEstimate:
        limits = self._limits
        estimate = CostEstimate(**json.loads(answer.get("estimate", "{}")))
        ended = answer.get("ended")
        if ended == OVER_MEMORY or estimate.memory_bytes > limits.max_memory_bytes:
            return CostEstimate(
                refusal=f"it takes more than {limits.max_memory_bytes} bytes of memory"
            )
        if ended == OVER_TIME:
            return CostEstimate(refusal=f"it cannot be compiled within {limits.max_compile_s:g} s")
        if ended == DIED:
            return CostEstimate(refusal="it is nested too deeply, or too large")
        return estimate


class _Queue:
    """A queue of ConstraintSpecs that run or wait."""

    def __init__(self, at_once: int, waiting: int, cpu_s: float, wall_s: float, nice: int) -> None:
        """``cpu_s`` and ``wall_s`` limit the processor time and the wall time of each spec."""
        self.cpu_s = cpu_s
        self.wall_s = wall_s
        self.nice = nice
        self._turns = asyncio.Semaphore(at_once)
        self._room = at_once + waiting

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until a spec may run. Raises WorkerBusyError if too many wait, or on a timeout."""
        if not self._room:
            raise WorkerBusyError
        self._room -= 1
        try:
            await self._acquire()
            try:
                yield
            finally:
                self._turns.release()
        finally:
            self._room += 1

    async def _acquire(self) -> None:
        try:
            async with asyncio.timeout(TURN_LIMIT_S):
                await self._turns.acquire()
        except TimeoutError as error:
            raise WorkerBusyError from error


class _Process:
    """A running worker process (fork server), and the requests that it has not answered yet."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._into, self._out = process.stdin, process.stdout
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._last_number = 0
        self.is_over = False
        """True if the worker takes no more requests."""
        self._idle: asyncio.TimerHandle | None = None
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, tokenizer: bytes, facts: TokenizerFacts) -> "_Process":
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            json.dumps(asdict(facts)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        started = cls(process)
        started._into.write(LENGTH.pack(len(tokenizer)))
        started._into.write(tokenizer)
        return started

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for the answer. Raises WorkerBusyError if the worker ends."""
        self._rest()
        self._last_number = number = self._last_number + 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        frame = json.dumps(request | {"number": number}).encode()
        self._into.write(LENGTH.pack(len(frame)) + frame)
        return await answer

    async def close(self) -> None:
        self._end()
        await self._listening

    def _end(self) -> None:
        """Close the worker's input, which makes the worker end."""
        self._rest()
        self.is_over = True
        self._into.close()

    def _rest(self) -> None:
        """Cancel the timer that ends an idle worker."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    async def _listen(self) -> None:
        """Deliver the worker's answers until it ends. Drop answers to cancelled requests."""
        with suppress(asyncio.IncompleteReadError):
            while True:
                (length,) = LENGTH.unpack(await self._out.readexactly(LENGTH.size))
                answer: dict[str, Any] = json.loads(await self._out.readexactly(length))
                with suppress(asyncio.InvalidStateError):
                    self._waiting.pop(answer["number"]).set_result(answer)
                if not self._waiting:
                    self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._end)
        self.is_over = True
        code = await self._process.wait()
        if code:
            log.warning(f"the process that judges grammars has ended with {code}")
        for waiting in self._waiting.values():
            with suppress(asyncio.InvalidStateError):
                waiting.set_exception(WorkerBusyError())
