"""Compile constraint specs: judged by another process, compiled in this one, and kept for the
next."""

import asyncio
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from engine.types import TokenConstraint
from server.text.calls.tool_format import CALL_OPEN
from server.text.grammar.cache import CompiledGrammar, GrammarCache, Refusal
from server.text.grammar.constraint_spec import ConstraintSpec, ThinkingStart, form_json
from server.text.grammar.constraints import GrammarConstraint, TagWatch
from server.text.grammar.grammar_errors import GrammarError
from server.text.grammar.judge import GrammarLimits, Judge
from server.text.grammar.matcher import LEXER_BYTES, deep_threads, new_matcher
from server.text.grammar.reasoning import ReasoningConstraint
from server.text.grammar.vocabulary import GrammarTokenizer, Vocabulary, VocabularyError

OPEN_TAG = CALL_OPEN.encode()


class LazyCalls:
    """Watch for the opening tag of a call; from there on its grammar holds, until it is over."""

    def __init__(self, call: GrammarConstraint, vocabulary: Vocabulary) -> None:
        """call: what follows the opening tag, up to and with the closing one."""
        self._call = call
        self._vocabulary = vocabulary
        self._open = TagWatch(OPEN_TAG)
        self._running: GrammarConstraint | None = None

    def fill_mask(self, row: np.ndarray) -> bool:
        if self._running is not None:
            return self._running.fill_mask(row)
        np.copyto(row, self._vocabulary.calling_masks[self._open.matched])
        return True

    def accept(self, token_id: int) -> None:
        if self._running is None:
            if self._open.feed(self._vocabulary.token_bytes(token_id)):
                self._running = self._call.copy()
            return
        self._running.accept(token_id)
        if self._running.complete:
            self._running = None
            self._open = TagWatch(OPEN_TAG)

    def copy(self) -> "LazyCalls":
        return LazyCalls(self._call, self._vocabulary)


THREADS = 2
# Whose memory is in use waits for answers to end: so long, and looks so often.
MEMORY_WAIT_S, MEMORY_POLL_S = 30.0, 0.02


class GrammarMemoryError(Exception):
    """The memory for grammars is in use."""


class GrammarCompiler:
    """Compile constraint specs into constraints."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        judge: Callable[[GrammarTokenizer], Judge],
        limits: GrammarLimits,
    ) -> None:
        """judge: called once, when there is something to judge."""
        self._vocabulary = vocabulary
        self._make_judge = judge
        self._limits = limits
        self._loaded: _Loaded | None = None
        self._cache = GrammarCache(limits.max_kept_bytes, limits.max_kept)
        self._reserving = asyncio.Lock()
        self._making: dict[bytes, asyncio.Task[CompiledGrammar | Refusal]] = {}

    def load(self) -> str:
        """Read the tokenizer, which takes a second for a large one and lets nobody else run: a
        server does it before it listens. Returns why forms of answers will be refused, or nothing.
        """
        try:
            self._load()
        except GrammarError as error:
            return str(error)
        _ = self._vocabulary.thinking_masks, self._vocabulary.calling_masks  # they are kept
        return ""

    async def compile(self, spec: ConstraintSpec, begun: str = "") -> TokenConstraint | None:
        """Compile the constraint of an answer; None where there is nothing to hold it to. begun:
        the content that it has begun with.

        Raises GrammarError that names what cannot be enforced, and the request's field;
        UnfitBeginningError where the form does not allow what was begun; JudgeBusyError and
        GrammarMemoryError where there is no room for it now.
        """
        if not spec.has_form and not spec.has_budget:
            return None
        answer = await self._answer(spec, begun) if spec.has_form else None
        if answer is not None and spec.thinking is ThinkingStart.SAYING:
            return answer
        return ReasoningConstraint(answer, self._vocabulary, spec.thinking, spec.thinking_budget)

    async def close(self) -> None:
        """End the process that judges. The next form begins anew."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.threads.shutdown(wait=False, cancel_futures=True)
            await loaded.judge.close()

    async def _answer(self, spec: ConstraintSpec, begun: str) -> TokenConstraint:
        grammar = await self._grammar(spec)
        constraint = GrammarConstraint(grammar, self._vocabulary.words, self._limits.max_mask_s)
        if spec.is_lazy:
            return LazyCalls(constraint, self._vocabulary)
        return await self._after(constraint, begun) if begun else constraint

    def forget(self) -> None:
        """Keep no compiled form any longer: nobody has asked for one for long."""
        self._cache.forget()

    async def _after(self, constraint: GrammarConstraint, begun: str) -> GrammarConstraint:
        """Return the constraint where the form goes on. A text that spells an added token is text
        to it."""
        loaded = self._load()

        def after() -> GrammarConstraint:
            ids = loaded.tokenizer.engine.tokenize_bytes(begun.encode())
            return constraint.after(ids, self._limits.max_compile_s)

        return await asyncio.get_running_loop().run_in_executor(loaded.threads, after)

    async def _grammar(self, spec: ConstraintSpec) -> CompiledGrammar:
        form = await asyncio.to_thread(form_json, spec, self._limits.max_form_bytes)
        digest = hashlib.sha256(form.encode()).digest()
        found = self._cache.get(digest)
        if found is None:
            found = await self._made(digest, form)
        if isinstance(found, Refusal):
            raise GrammarError(found.message, found.param or spec.param)
        return found

    async def _made(self, digest: bytes, form: str) -> CompiledGrammar | Refusal:
        """Return what becomes of a form, found out once for all who ask meanwhile, and also when
        the first of them leaves."""
        making = self._making.get(digest)
        if making is None:
            making = self._making[digest] = asyncio.create_task(self._make(digest, form))
            making.add_done_callback(lambda made: self._end_making(digest, made))
        return await asyncio.shield(making)

    def _end_making(self, digest: bytes, made: "asyncio.Task[CompiledGrammar | Refusal]") -> None:
        del self._making[digest]
        # It has been looked at, also where nobody waits any more.
        _ = made.cancelled() or made.exception()

    async def _make(self, digest: bytes, form: str) -> CompiledGrammar | Refusal:
        loaded = self._load()
        verdict = await loaded.judge.verdict(form)
        if verdict.refusal is not None:
            refusal = Refusal(verdict.refusal, verdict.param)
            self._cache.refuse(digest, refusal)
            return refusal
        memory_bytes = verdict.memory_bytes + LEXER_BYTES
        await self._reserve(memory_bytes)
        try:
            matcher = await asyncio.get_running_loop().run_in_executor(
                loaded.threads, new_matcher, loaded.tokenizer.engine, verdict.grammar
            )
        except BaseException:
            self._cache.release(memory_bytes)
            raise
        grammar = CompiledGrammar(matcher, memory_bytes)
        self._cache.keep(digest, grammar)
        return grammar

    async def _reserve(self, memory_bytes: int) -> None:
        """Count memory for another grammar, in the order in which it is asked for. Raises
        GrammarMemoryError when no answer gives any back."""
        try:
            async with asyncio.timeout(MEMORY_WAIT_S), self._reserving:
                # Answers end on other threads, which can set no event of this loop.
                while not self._cache.reserve(memory_bytes):  # noqa: ASYNC110
                    await asyncio.sleep(MEMORY_POLL_S)
        except TimeoutError as error:
            raise GrammarMemoryError from error

    def _load(self) -> "_Loaded":
        if self._loaded is None:
            try:
                tokenizer = GrammarTokenizer(self._vocabulary)
            except VocabularyError as error:
                raise GrammarError(f"no form of answers can be enforced: {error}") from error
            self._loaded = _Loaded(tokenizer, self._make_judge(tokenizer), deep_threads(THREADS))
        return self._loaded


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What compiling needs of the tokenizer."""

    tokenizer: GrammarTokenizer
    judge: Judge
    threads: ThreadPoolExecutor
    """Where this process compiles."""
