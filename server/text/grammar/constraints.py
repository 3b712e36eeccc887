"""Follow a grammar as a TokenConstraint, and find tags among tokens."""

import time
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from engine.errors import FormLimitError
from server.text.grammar.cache import CompiledGrammar
from server.text.grammar.grammar_errors import GrammarError, UnfitBeginningError, limit_of, meaning

READ_TOGETHER = 16  # tokens
# Of an answer's masks, those that may take too long: the collector may run on the engine's thread
# meanwhile, and its time is no form's fault.
SLOW_MASKS_SPARED = 1


class ConstraintError(RuntimeError):
    """A grammar that does not go on as it should; the message has none of the answer."""


class GrammarConstraint:
    """Allow what a grammar allows.

    A token that was accepted is taken in when the next mask is asked for: that is while the device
    computes, and until then nobody has to know.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        words: int,
        max_mask_s: float,
        start: LLMatcher | None = None,
    ) -> None:
        """words: of a mask. max_mask_s: the second mask that takes more processor time ends the
        request. start: where answers begin, if not where the grammar does."""
        self._grammar = grammar
        self._start = start or grammar.matcher
        self._matcher = self._start.deep_copy()
        self._max_mask_s = max_mask_s
        self._slow_masks = 0
        # Asking for an array's address takes longer than copying it.
        self._mask = np.empty(words, np.uint32)
        self._address, self._bytes = self._mask.ctypes.data, self._mask.nbytes
        self._accepted: list[int] = []

    def fill_mask(self, row: np.ndarray) -> bool:
        """See TokenConstraint. Raises ConstraintError, and FormLimitError."""
        started_s = time.thread_time()
        self._take_in()
        self._matcher.unsafe_compute_mask_ptr(self._address, self._bytes)
        # A matcher with an error would let the answer end.
        self._check("allows no token")
        self._slow_masks += time.thread_time() - started_s > self._max_mask_s
        if self._slow_masks > SLOW_MASKS_SPARED:
            raise FormLimitError(f"tokens of it take more than {self._max_mask_s:g} s")
        row[:] = self._mask
        return True

    def accept(self, token_id: int) -> None:
        """See TokenConstraint. What it does not allow is found with the next mask."""
        self._accepted.append(token_id)

    @property
    def complete(self) -> bool:
        """Whether nothing can follow any more. Raises as ``fill_mask`` does."""
        self._take_in()
        return bool(self._matcher.is_stopped())

    def _take_in(self) -> None:
        for token_id in self._accepted:
            self._matcher.consume_token(token_id)
            self._check("does not allow the token")
        self._accepted.clear()

    def _check(self, fault: str) -> None:
        """fault: of a grammar that cannot go on without having come to its limits."""
        if self._matcher.is_error():
            self._grammar.is_spent = True
            limit = limit_of(self._matcher.get_error())
            raise FormLimitError(limit) if limit else ConstraintError(f"the grammar {fault}")

    def copy(self) -> "GrammarConstraint":
        return GrammarConstraint(self._grammar, self._mask.size, self._max_mask_s, self._start)

    def after(self, token_ids: Sequence[int], max_s: float) -> "GrammarConstraint":
        """Return a constraint for answers that have begun with these tokens.

        max_s: processor time that reading them may take. Raises UnfitBeginningError where they are
        not allowed, and GrammarError where they are too much.
        """
        start = self._start.deep_copy()
        ends_s = time.thread_time() + max_s
        # The engine's own loop over all of them would let nobody else run.
        for place in range(0, len(token_ids), READ_TOGETHER):
            some = token_ids[place : place + READ_TOGETHER]
            taken = start.try_consume_tokens(list(some))
            if start.is_error():
                raise GrammarError(meaning(start.get_error()))
            if taken < len(some):
                raise UnfitBeginningError
            if time.thread_time() > ends_s:
                raise GrammarError(f"the answer that is begun takes more than {max_s:g} s")
        return GrammarConstraint(self._grammar, self._mask.size, self._max_mask_s, start)


class TagWatch:
    """Find a tag in a text that comes in pieces."""

    def __init__(self, tag: bytes) -> None:
        """tag: its first byte must not come again in it."""
        self._tag = tag
        self.matched = 0
        """How many bytes of the tag the text ends with."""

    def feed(self, text: bytes) -> bool:
        """Take in text, and return whether it completes the tag."""
        window = self._tag[: self.matched] + text
        if self._tag in window:
            return True
        start = window.rfind(self._tag[:1])
        self.matched = len(window) - start if start >= 0 else 0
        if not self._tag.startswith(window[len(window) - self.matched :]):
            self.matched = 0
        return False
