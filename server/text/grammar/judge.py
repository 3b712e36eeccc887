"""Ask another process what a form costs, before this one pays for it.

There are two lanes, so that nobody's simple form waits for one that takes seconds::

    form --> quick lane: QUICK_CPU_S of processor time at most --> verdict
                 | over
                 +--> slow lane, one at a time: max_compile_s at most --> verdict

Nobody waits longer than a client does: who gets no turn in time, or no processor, is to come back.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import structlog

from engine.config import GRAMMAR_BYTES
from server.config import LimitsSection
from server.text.grammar.fork_server import DIED, LENGTH, OVER_MEMORY, OVER_TIME, STARVED, Verdict
from server.text.grammar.text import TokenizerFacts

MAX_FORM_BYTES = 256 * 1024
# Forms that are judged at once in each lane, and that may wait for their turn.
QUICK_AT_ONCE, QUICK_WAITING = 2, 64
SLOW_AT_ONCE, SLOW_WAITING = 1, 8
QUICK_CPU_S = 0.1
# For a turn, and for the verdict after that.
TURN_LIMIT_S = 20.0
QUICK_WALL_S, SLOW_WALL_S = 2.0, 20.0
# How far they stand back behind the engine.
QUICK_NICE, SLOW_NICE = 5, 15
# The process ends when it has had nothing to judge for so long; the next form starts another.
IDLE_S = 60.0
COMMAND = (sys.executable, "-P", "-m", "server.text.grammar.fork_server")

log = structlog.get_logger("quire")


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What the forms of answers may take."""

    max_compile_s: float
    """Processor time, to compile a form and to read the beginning of an answer."""
    max_form_bytes: int = MAX_FORM_BYTES
    max_memory_bytes: int = 32 * 1024**2
    """Of one form."""
    max_mask_s: float = 0.1
    """Processor time of a token's mask; an answer that needs more for two of them ends."""
    max_kept: int = 64
    max_kept_bytes: int = GRAMMAR_BYTES
    """Of all that are kept, and of all that running answers are held to."""

    @classmethod
    def of(cls, limits: LimitsSection) -> "GrammarLimits":
        """Return the limits of the settings."""
        return cls(limits.max_grammar_compile_s, max_kept=limits.max_cached_grammars)


class JudgeBusyError(Exception):
    """No form can be judged now."""


class Judge:
    """Judge forms for one tokenizer, in a process that runs while it is needed.

    All of it runs on one event loop.
    """

    def __init__(self, tokenizer: bytes, facts: TokenizerFacts, limits: GrammarLimits) -> None:
        """tokenizer: its text."""
        self._tokenizer = tokenizer
        self._facts = facts
        self._limits = limits
        slow_cpu_s = limits.max_compile_s
        quick_cpu_s, slow_wall_s = min(QUICK_CPU_S, slow_cpu_s), max(SLOW_WALL_S, 2 * slow_cpu_s)
        self._quick = _Lane(QUICK_AT_ONCE, QUICK_WAITING, quick_cpu_s, QUICK_WALL_S, QUICK_NICE)
        self._slow = _Lane(SLOW_AT_ONCE, SLOW_WAITING, slow_cpu_s, slow_wall_s, SLOW_NICE)
        self._starting = asyncio.Lock()
        self._process: _Process | None = None
        self._closed = False

    async def verdict(self, form: str) -> Verdict:
        """Return what becomes of a form. Raises JudgeBusyError when there is no room for it."""
        async with self._quick.turn():
            answer = await self._ask(form, self._quick)
        if answer.get("ended") in (OVER_TIME, STARVED):
            async with self._slow.turn():
                answer = await self._ask(form, self._slow)
        if answer.get("ended") == STARVED:
            raise JudgeBusyError
        return self._read(answer)

    async def close(self) -> None:
        """End the process; nothing is judged any more."""
        self._closed = True
        if self._process is not None:
            await self._process.close()

    async def _ask(self, form: str, lane: "_Lane") -> dict[str, Any]:
        process = await self._started()
        request = {
            "form": form,
            "cpu_s": lane.cpu_s,
            "wall_s": lane.wall_s,
            "memory_bytes": self._limits.max_memory_bytes,
            "max_mask_s": self._limits.max_mask_s,
            "nice": lane.nice,
        }
        return await process.ask(request)

    async def _started(self) -> "_Process":
        async with self._starting:
            if self._closed:
                raise JudgeBusyError
            if self._process is None or self._process.is_over:
                self._process = await _Process.start(self._tokenizer, self._facts)
            return self._process

    def _read(self, answer: dict[str, Any]) -> Verdict:
        limits = self._limits
        verdict = Verdict.of_json(answer["verdict"]) if "verdict" in answer else Verdict()
        ended = answer.get("ended")
        if ended == OVER_MEMORY or verdict.memory_bytes > limits.max_memory_bytes:
            return Verdict(refusal=f"it takes more than {limits.max_memory_bytes} bytes of memory")
        if ended == OVER_TIME:
            return Verdict(refusal=f"it cannot be compiled within {limits.max_compile_s:g} s")
        if ended == DIED:
            return Verdict(refusal="it is nested too deeply, or too large")
        return verdict


class _Lane:
    """Forms of one kind: those that are judged now, and those that wait."""

    def __init__(self, at_once: int, waiting: int, cpu_s: float, wall_s: float, nice: int) -> None:
        """cpu_s, wall_s: that each form may take."""
        self.cpu_s = cpu_s
        self.wall_s = wall_s
        self.nice = nice
        self._turns = asyncio.Semaphore(at_once)
        self._room = at_once + waiting

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn. Raises JudgeBusyError where too many wait already, or for too long."""
        if not self._room:
            raise JudgeBusyError
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
            raise JudgeBusyError from error


class _Process:
    """A fork server, and those who wait for its answers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._into, self._out = process.stdin, process.stdout
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._last_number = 0
        self.is_over = False
        """Whether it takes no more forms."""
        self._idle: asyncio.TimerHandle | None = None
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, tokenizer: bytes, facts: TokenizerFacts) -> "_Process":
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            facts.to_json(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        started = cls(process)
        started._into.write(LENGTH.pack(len(tokenizer)))
        started._into.write(tokenizer)
        return started

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Hand the process a form, and wait for its verdict. Raises JudgeBusyError when the process
        ends before."""
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
        """Close the process's input: it ends when nobody can ask it any more."""
        self._rest()
        self.is_over = True
        self._into.close()

    def _rest(self) -> None:
        """Cancel the end that was due for an idle process."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    async def _listen(self) -> None:
        """Hand out the process's answers, until it ends.

        Who has left is answered like the others: nothing here depends on when they left.
        """
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
                waiting.set_exception(JudgeBusyError())
