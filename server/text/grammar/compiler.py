"""Compile constraint specs: judged by another process, compiled in this one, and kept for the
next."""

import asyncio
import hashlib
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engine.types import TokenConstraint
from server.text.conversation import Channel
from server.text.grammar.constraint_spec import ConstraintSpec, form_json
from server.text.grammar.constraints import (
    CompiledGrammar,
    GrammarConstraint,
    LazyCalls,
    ReasoningConstraint,
)
from server.text.grammar.grammar_errors import GrammarError
from server.text.grammar.judge import GrammarLimits, Judge
from server.text.grammar.matcher import LEXER_BYTES, deep_threads, new_matcher
from server.text.grammar.vocabulary import GrammarTokenizer, Vocabulary, VocabularyError
from server.text.newest import Newest

# What is known not to be enforceable costs next to nothing to keep.
MAX_REFUSALS = 1024


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a grammar cannot be enforced."""

    message: str
    param: str | None


class GrammarCache:
    """Keep the newest grammars and refusals, by a digest of their spec.

    A grammar's bytes count until no answer has it any more, kept or not.
    """

    def __init__(self, max_bytes: int, max_grammars: int) -> None:
        """max_bytes: of all grammars together. max_grammars: that are kept."""
        self._max_bytes = max_bytes
        self._grammars: Newest[bytes, CompiledGrammar] = Newest(max_grammars)
        self._refusals: Newest[bytes, Refusal] = Newest(MAX_REFUSALS)
        self._counted_bytes = 0
        # Answers end on other threads, which can do nothing but append.
        self._freed: deque[int] = deque()

    @property
    def used_bytes(self) -> int:
        while self._freed:
            self._counted_bytes -= self._freed.popleft()
        return self._counted_bytes

    def get(self, digest: bytes) -> CompiledGrammar | Refusal | None:
        grammar = self._grammars.find(digest)
        if grammar is None:
            return self._refusals.find(digest)
        if grammar.is_spent:
            self._grammars.pop(digest)
            return None
        return grammar

    def reserve(self, memory_bytes: int) -> bool:
        """Count memory for another grammar. Kept ones that no answer has give way, the oldest
        first. False where answers have too many."""
        while self.used_bytes + memory_bytes > self._max_bytes:
            if not self._grammars.pop_oldest():
                return False
        self._counted_bytes += memory_bytes
        return True

    def release(self, memory_bytes: int) -> None:
        """Give back what was counted for a grammar that was not made."""
        self._counted_bytes -= memory_bytes

    def keep(self, digest: bytes, grammar: CompiledGrammar) -> None:
        """Keep a grammar, for which memory was counted, for later requests."""
        weakref.finalize(grammar, self._freed.append, grammar.memory_bytes).atexit = False
        self._grammars.keep(digest, grammar)

    def forget(self) -> None:
        """Keep no grammar any longer; answers that have one go on."""
        while self._grammars.pop_oldest():
            pass

    def refuse(self, digest: bytes, refusal: Refusal) -> None:
        self._refusals.keep(digest, refusal)


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
        if answer is not None and spec.first_channel is Channel.CONTENT:
            return answer
        return ReasoningConstraint(
            answer, self._vocabulary, spec.first_channel, spec.thinking_budget
        )

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
