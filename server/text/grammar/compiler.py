"""Wishes -> constraints: compiled off the event loop, within limits, and kept for the next."""

import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from engine.types import TokenConstraint
from server.text.grammar.constraints import GrammarConstraint
from server.text.grammar.error import GrammarError, meaning
from server.text.grammar.lazy_calls import LazyCalls
from server.text.grammar.text import TOOLS_PARAM, grammar_text
from server.text.grammar.thoughts import ThinkingStart, ThoughtConstraint
from server.text.grammar.vocabulary import Vocabulary, VocabularyError
from server.text.grammar.wish import Wish as Wish

T = TypeVar("T")
THREADS = 2
# The grammar engine recurses along references and rules, up to the limits of what is compiled.
STACK_BYTES = 256 * 1024**2
# About 2 KiB each, in every request that has the grammar.
MAX_LEXER_STATES = 50_000


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """How much a wish may cost."""

    max_bytes: int
    """Of schemas, patterns and grammars of one request, as JSON."""
    max_compile_s: float
    max_cached: int
    """Compiled grammars that are kept for requests that wish the same."""
    max_mask_s: float
    """Processor time that one mask may take."""


class GrammarCompiler:
    """Makes constraints of wishes."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], limits: GrammarLimits) -> None:
        """vocabulary: called once, when the first wish comes; may raise VocabularyError."""
        self._make_vocabulary = vocabulary
        self._limits = limits
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._executor: ThreadPoolExecutor | None = None

    async def compile(self, wish: Wish) -> TokenConstraint | None:
        """The constraint of an answer; None where there is nothing to hold it to.

        Raises GrammarError that names what cannot be enforced, and the request's field.
        """
        if not _is_bound(wish) and not _is_budgeted(wish):
            return None
        vocabulary = await self._run(self._load)
        making = self._run(lambda: self._constraint(wish, vocabulary))
        try:
            return await asyncio.wait_for(making, self._limits.max_compile_s)
        except TimeoutError as error:
            limit = self._limits.max_compile_s
            raise GrammarError(f"it cannot be compiled within {limit:g} s", _param(wish)) from error

    def close(self) -> None:
        """Lets the threads end."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._executor is None:
            self._executor = deep_threads()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    # --- the compiling threads ------------------------------------------------------------------

    def _load(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = self._make_vocabulary()
                except VocabularyError as error:
                    raise GrammarError(f"no form of answers can be enforced: {error}") from error
            return self._vocabulary

    def _constraint(self, wish: Wish, vocabulary: Vocabulary) -> TokenConstraint:
        answer = self._answer(wish, vocabulary) if _is_bound(wish) else None
        if answer is not None and wish.thinking is ThinkingStart.SAYING:
            return answer
        return ThoughtConstraint(answer, vocabulary, wish.thinking, wish.thinking_budget)

    def _answer(self, wish: Wish, vocabulary: Vocabulary) -> TokenConstraint:
        self._check_bytes(wish)
        is_lazy = not wish.must_call and wish.output is None
        text = grammar_text(wish, vocabulary.tokens, is_lazy)
        constraint = self._compile(text, vocabulary, _param(wish))
        return LazyCalls(constraint, vocabulary) if is_lazy else constraint

    def _check_bytes(self, wish: Wish) -> None:
        values = [tool.parameters for tool in wish.tools]
        values += [wish.output.value] if wish.output is not None else []
        try:
            # Halves of characters become escapes, as JSON's other users have it.
            size = len(json.dumps(values, allow_nan=False))
        except (ValueError, RecursionError) as error:
            raise GrammarError("it is not JSON, or nested too deeply", _param(wish)) from error
        if size > self._limits.max_bytes:
            message = f"it has more than {self._limits.max_bytes} bytes"
            raise GrammarError(message, _param(wish))

    def _compile(self, text: str, vocabulary: Vocabulary, param: str) -> GrammarConstraint:
        with self._lock:
            matcher = self._compiled.pop(text, None)
        if matcher is None:
            matcher = compiled(text, vocabulary, param)
        copy = matcher.deep_copy()
        with self._lock:
            self._compiled[text] = matcher
            while len(self._compiled) > self._limits.max_cached:
                self._compiled.popitem(last=False)
        return GrammarConstraint(copy, vocabulary.words, self._limits.max_mask_s)


def deep_threads() -> ThreadPoolExecutor:
    """Threads with a stack for the grammar engine."""
    executor = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
    all_here = threading.Barrier(THREADS + 1)
    before = threading.stack_size(STACK_BYTES)
    try:
        for _ in range(THREADS):
            executor.submit(all_here.wait)
        all_here.wait()
    finally:
        threading.stack_size(before)
    return executor


def compiled(text: str, vocabulary: Vocabulary, param: str) -> LLMatcher:
    """A matcher that has made its first mask. Raises GrammarError."""
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(vocabulary.engine, text, log_level=0, limits=limits)
    row = np.zeros(vocabulary.words, np.uint32)
    if not matcher.is_error():
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    if matcher.is_error():
        raise GrammarError(meaning(matcher.get_error()), param)
    return matcher


def _is_bound(wish: Wish) -> bool:
    """Whether an answer has a form. Where calls may be made, a strict tool gives it one."""
    strict = any(tool.strict for tool in wish.tools)
    return wish.output is not None or bool(wish.tools and (wish.must_call or strict))


def _is_budgeted(wish: Wish) -> bool:
    return wish.thinking_budget is not None and wish.thinking is not ThinkingStart.SAYING


def _param(wish: Wish) -> str:
    """The request's field that a fault is of, as far as can be said."""
    return TOOLS_PARAM if wish.output is None or wish.must_call else wish.output.param
