"""Compiled grammars in memory: those that are kept, and those that answers are held to."""

import weakref
from collections import OrderedDict, deque

from llguidance import LLMatcher

# What is known not to be enforceable costs next to nothing to keep.
MAX_REFUSALS = 1024


class CompiledGrammar:
    """A grammar that any number of answers may be held to at once."""

    def __init__(self, matcher: LLMatcher, memory_bytes: int) -> None:
        """matcher: at its beginning; answers get copies of it."""
        self.matcher = matcher
        self.memory_bytes = memory_bytes
        self.is_spent = False
        """Whether an answer has come to its limits: its copies share what they have learnt, so that
        no other one would get on either."""


class Refusal:
    """Why a form cannot be enforced."""

    def __init__(self, message: str, param: str | None) -> None:
        self.message = message
        self.param = param


class GrammarCache:
    """Keep the newest grammars and refusals, by a digest of their form.

    Grammars count until nobody has them any more, kept or not.
    """

    def __init__(self, max_bytes: int, max_grammars: int) -> None:
        """max_bytes: of all grammars together. max_grammars: that are kept."""
        self._max_bytes = max_bytes
        self._max_grammars = max_grammars
        self._grammars: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._refusals: OrderedDict[bytes, Refusal] = OrderedDict()
        self._counted_bytes = 0
        # Answers end on other threads, which can do nothing but append.
        self._freed: deque[int] = deque()

    @property
    def used_bytes(self) -> int:
        while self._freed:
            self._counted_bytes -= self._freed.popleft()
        return self._counted_bytes

    def get(self, digest: bytes) -> CompiledGrammar | Refusal | None:
        """Return what is known of a form."""
        found = self._grammars.get(digest)
        if found is None:
            return self._refusals.get(digest)
        if found.is_spent:
            del self._grammars[digest]
            return None
        self._grammars.move_to_end(digest)
        return found

    def reserve(self, memory_bytes: int) -> bool:
        """Count memory for another grammar. Those that are only kept give way, the oldest first.
        False where answers have too many."""
        while self.used_bytes + memory_bytes > self._max_bytes:
            if not self._grammars:
                return False
            self._grammars.popitem(last=False)
        self._counted_bytes += memory_bytes
        return True

    def release(self, memory_bytes: int) -> None:
        """Give back what was counted for a grammar that was not made."""
        self._counted_bytes -= memory_bytes

    def keep(self, digest: bytes, grammar: CompiledGrammar) -> None:
        """Keep a grammar, for which memory was counted, for the next one who asks."""
        weakref.finalize(grammar, self._freed.append, grammar.memory_bytes).atexit = False
        self._grammars[digest] = grammar
        while len(self._grammars) > self._max_grammars:
            self._grammars.popitem(last=False)

    def forget(self) -> None:
        """Keep no grammar any longer; answers that have one go on."""
        self._grammars.clear()

    def refuse(self, digest: bytes, refusal: Refusal) -> None:
        """Remember why a form cannot be enforced."""
        self._refusals[digest] = refusal
        while len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)
