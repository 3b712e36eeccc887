"""Compiles and caches constraints of answers, after another process has estimated their cost."""

import asyncio
import hashlib
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from engine.types import TokenConstraint
from server.text.calls.tool_format import ToolFormat
from server.text.conversation import Channel
from server.text.grammar.constraint_spec import ConstraintSpec, spec_json, spec_of_json
from server.text.grammar.constraints import (
    AnalysisBudget,
    CompiledGrammar,
    GrammarConstraint,
    LazyCalls,
    ReasoningConstraint,
)
from server.text.grammar.grammar_errors import GrammarError
from server.text.grammar.matcher import LEXER_BYTES, deep_threads, new_matcher
from server.text.grammar.vocabulary import GrammarTokenizer, Vocabulary, VocabularyError
from server.text.grammar.worker import GrammarLimits, GrammarsFullError, GrammarWorker
from server.text.newest import Newest

# Maximum number of cached refusals, which take almost no memory.
MAX_REFUSALS = 1024


class GrammarCache:
    """Caches the newest grammars and refusals by a digest of their ConstraintSpec. A grammar's
    bytes count as used while the cache or an answer uses the grammar."""

    def __init__(self, max_bytes: int, max_grammars: int) -> None:
        """``max_bytes`` limits all grammars' size, ``max_grammars`` the number of cached ones."""
        self._max_bytes = max_bytes
        self._grammars: Newest[bytes, CompiledGrammar] = Newest(max_grammars)
        self._refusals: Newest[bytes, GrammarError] = Newest(MAX_REFUSALS)
        self._counted_bytes = 0
        # Sizes of freed grammars. Other threads, which free grammars, only append sizes here.
        self._freed: deque[int] = deque()

    @property
    def used_bytes(self) -> int:
        while self._freed:
            self._counted_bytes -= self._freed.popleft()
        return self._counted_bytes

    def get(self, digest: bytes) -> CompiledGrammar | GrammarError | None:
        grammar = self._grammars.find(digest)
        if grammar is None:
            return self._refusals.find(digest)
        if grammar.is_spent:
            self._grammars.pop(digest)
            return None
        return grammar

    def reserve(self, memory_bytes: int) -> bool:
        """Reserve memory, by dropping cached grammars if needed. Return False if that fails."""
        while self.used_bytes + memory_bytes > self._max_bytes:
            if not self._grammars.pop_oldest():
                return False
        self._counted_bytes += memory_bytes
        return True

    def release(self, memory_bytes: int) -> None:
        """Free the memory that was reserved for a grammar, because it was not compiled."""
        self._counted_bytes -= memory_bytes

    def keep(self, digest: bytes, grammar: CompiledGrammar) -> None:
        weakref.finalize(grammar, self._freed.append, grammar.memory_bytes).atexit = False
        self._grammars.keep(digest, grammar)

    def forget(self) -> None:
        """Drop all cached grammars. Running answers continue with their own grammars."""
        while self._grammars.pop_oldest():
            pass

    def refuse(self, digest: bytes, refusal: GrammarError) -> None:
        self._refusals.keep(digest, refusal)


THREADS = 2
# Seconds that a grammar waits until other answers end and free memory, and the polling interval.
MEMORY_WAIT_S, MEMORY_POLL_S = 30.0, 0.02


class GrammarCompiler:
    """Turns the ConstraintSpec of a request into a constraint on the engine's tokens."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        worker: Callable[[GrammarTokenizer], GrammarWorker],
        limits: GrammarLimits,
    ) -> None:
        """``worker`` makes the estimator of costs when the tokenizer is read."""
        self._vocabulary = vocabulary
        self._make_worker = worker
        self._limits = limits
        self._loaded: _Loaded | None = None
        self._cache = GrammarCache(limits.max_kept_bytes, limits.max_kept)
        self._reserving = asyncio.Lock()
        self._making: dict[bytes, asyncio.Task[CompiledGrammar | GrammarError]] = {}

    def load(self) -> str:
        """Read the tokenizer. A large one blocks all threads for a second, so a server does this
        before it listens. If all grammars will be refused, return the reason, and else ""."""
        try:
            self._load()
        except GrammarError as error:
            return str(error)
        _ = self._vocabulary.thinking_masks, self._vocabulary.calling_masks  # computes both
        return ""

    async def compile(
        self, spec: ConstraintSpec, begun: str = "", grammar: CompiledGrammar | None = None
    ) -> TokenConstraint | None:
        """Compile an answer's constraint, or return None if any text is allowed. ``begun`` is the
        beginning of the answer, if the client has written one. ``grammar`` is the result of
        ``self.grammar``, if the caller has it. Raises GrammarError if the format is unsupported,
        UnfitBeginningError if ``begun`` violates the format, and GrammarsFullError if too many
        grammars wait, or running answers use all memory for grammars."""
        if not spec.has_grammar and not spec.has_budget:
            return None
        grammar = grammar or await self.grammar(spec)
        answer = None if grammar is None else await self._answer(spec, begun, grammar)
        if spec.tool_format is ToolFormat.HARMONY and spec.has_budget:
            return AnalysisBudget(answer, self._vocabulary, spec)
        if spec.tool_format is ToolFormat.HARMONY or spec.first_channel is Channel.CONTENT:
            return answer
        return ReasoningConstraint(
            answer, self._vocabulary, spec.first_channel, spec.thinking_budget
        )

    async def close(self) -> None:
        """End the worker process. The next grammar starts another worker."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.threads.shutdown(wait=False, cancel_futures=True)
            await loaded.worker.close()

    async def _answer(
        self, spec: ConstraintSpec, begun: str, grammar: CompiledGrammar
    ) -> TokenConstraint:
        constraint = GrammarConstraint(grammar, self._vocabulary.words, self._limits.max_mask_s)
        if spec.is_lazy:
            return LazyCalls(constraint, self._vocabulary)
        return await self._after(constraint, begun) if begun else constraint

    def forget(self) -> None:
        self._cache.forget()

    async def _after(self, constraint: GrammarConstraint, begun: str) -> GrammarConstraint:
        """Return a constraint on the text after ``begun``, which contains no special tokens."""
        loaded = self._load()

        def after() -> GrammarConstraint:
            ids = loaded.tokenizer.engine.tokenize_bytes(begun.encode())
            return constraint.after(ids, self._limits.max_compile_s)

        return await asyncio.get_running_loop().run_in_executor(loaded.threads, after)

    async def grammar(self, spec: ConstraintSpec) -> CompiledGrammar | None:
        """Return the grammar of a spec, or None if the spec has none. Raises what ``compile``
        raises, except UnfitBeginningError."""
        if not spec.has_grammar:
            return None
        spec_text = await asyncio.to_thread(spec_json, spec, self._limits.max_spec_bytes)
        digest = hashlib.sha256(spec_text.encode()).digest()
        grammar = self._cache.get(digest)
        if grammar is None:
            grammar = await self._compile_once(digest, spec_text)
        if isinstance(grammar, GrammarError):
            raise GrammarError(str(grammar), grammar.param or spec.param)
        return grammar

    async def _compile_once(self, digest: bytes, spec_text: str) -> CompiledGrammar | GrammarError:
        """Compile a grammar once for all requests that need it, even if the first is cancelled."""
        making = self._making.get(digest)
        if making is None:
            making = self._making[digest] = asyncio.create_task(self._make(digest, spec_text))
            making.add_done_callback(lambda task: self._end_making(digest, task))
        return await asyncio.shield(making)

    def _end_making(
        self, digest: bytes, task: "asyncio.Task[CompiledGrammar | GrammarError]"
    ) -> None:
        del self._making[digest]
        # Read the error, because asyncio logs errors that are never read.
        _ = task.cancelled() or task.exception()

    async def _make(self, digest: bytes, spec_text: str) -> CompiledGrammar | GrammarError:
        loaded = self._load()
        estimate = await loaded.worker.estimate(spec_text)
        if estimate.refusal is not None:
            spec, left_out = spec_of_json(spec_text).without_schemas()
            if left_out:
                spec_text = spec_json(spec, self._limits.max_spec_bytes)
                estimate = await loaded.worker.estimate(spec_text)
                estimate = replace(estimate, not_enforced=[*left_out])
        if estimate.refusal is not None:
            refusal = GrammarError(estimate.refusal, estimate.param)
            self._cache.refuse(digest, refusal)
            return refusal
        memory_bytes = estimate.memory_bytes + LEXER_BYTES
        await self._reserve(memory_bytes)
        try:
            matcher = await asyncio.get_running_loop().run_in_executor(
                loaded.threads, new_matcher, loaded.tokenizer.engine, estimate.grammar
            )
        except BaseException:
            self._cache.release(memory_bytes)
            raise
        grammar = CompiledGrammar(matcher, memory_bytes, tuple(estimate.not_enforced))
        self._cache.keep(digest, grammar)
        return grammar

    async def _reserve(self, memory_bytes: int) -> None:
        """Reserve memory, for one grammar at a time. Raises GrammarsFullError after a timeout."""
        try:
            async with asyncio.timeout(MEMORY_WAIT_S), self._reserving:
                # Poll, because other threads free grammars, and cannot set an event of this loop.
                while not self._cache.reserve(memory_bytes):  # noqa: ASYNC110
                    await asyncio.sleep(MEMORY_POLL_S)
        except TimeoutError as error:
            raise GrammarsFullError from error

    def _load(self) -> "_Loaded":
        if self._loaded is None:
            try:
                tokenizer = GrammarTokenizer(self._vocabulary)
            except VocabularyError as error:
                raise GrammarError(f"no form of answers can be enforced: {error}") from error
            self._loaded = _Loaded(tokenizer, self._make_worker(tokenizer), deep_threads(THREADS))
        return self._loaded


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The tokenizer in llguidance's form, and the worker and the threads that use it."""

    tokenizer: GrammarTokenizer
    worker: GrammarWorker
    threads: ThreadPoolExecutor
