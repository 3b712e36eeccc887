"""Constrains an answer's tokens: to a grammar, to valid calls, and to a budget of reasoning."""

import time
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum

import numpy as np
from llguidance import LLMatcher

from engine.types import FormLimitError, TokenConstraint
from server.text.calls.tool_format import CALL_OPEN
from server.text.conversation import THINK_CLOSE, THINK_OPEN, Channel
from server.text.grammar.constraint_spec import ConstraintSpec
from server.text.grammar.grammar_errors import GrammarError, UnfitBeginningError, limit_of, meaning
from server.text.grammar.vocabulary import Vocabulary, set_bits
from server.text.harmony import HarmonyMessages
from server.text.pieces import TextPiece

READ_TOGETHER = 16  # number of tokens that one call of llguidance reads
# One slow mask (bits of allowed tokens) per answer is tolerated: garbage collection may cause it.
SLOW_MASKS_SPARED = 1


class ConstraintError(RuntimeError):
    """Raised if a grammar fails for another reason than a limit. The text quotes no answer."""


@dataclass(eq=False)
class CompiledGrammar:
    """A compiled grammar, which several answers may use at once."""

    matcher: LLMatcher
    """llguidance's matcher in its initial state. Each answer uses a copy."""
    memory_bytes: int
    not_enforced: tuple[str, ...] = ()
    """The keywords that the grammar does not enforce, with their places."""
    is_spent: bool = False
    """True if a matcher has failed: it may have filled lexer states that all answers share."""


class GrammarConstraint:
    """Allows only a grammar's tokens. Reads accepted tokens later, when it computes a mask."""

    def __init__(
        self,
        grammar: CompiledGrammar,
        words: int,
        max_mask_s: float,
        start: LLMatcher | None = None,
    ) -> None:
        """``words`` is the size of a mask in uint32. The second mask that takes more processor time
        than ``max_mask_s`` ends the request. ``start`` is a matcher that read a begun answer."""
        self._grammar = grammar
        self._start = start or grammar.matcher
        self._matcher = self._start.deep_copy()
        self._max_mask_s = max_mask_s
        self._slow_masks = 0
        # Store the address, because asking numpy for it takes longer than copying a mask.
        self._mask = np.empty(words, np.uint32)
        self._address, self._bytes = self._mask.ctypes.data, self._mask.nbytes
        self._accepted: list[int] = []

    def fill_mask(self, row: np.ndarray) -> bool:
        """Write the mask of allowed tokens to ``row``. Raises ConstraintError, FormLimitError."""
        started_s = time.thread_time()
        self._take_in()
        self._matcher.unsafe_compute_mask_ptr(self._address, self._bytes)
        # Look for an error first, because after an error the mask would allow the answer to end.
        self._check("allows no token")
        self._slow_masks += time.thread_time() - started_s > self._max_mask_s
        if self._slow_masks > SLOW_MASKS_SPARED:
            raise FormLimitError(f"tokens of it take more than {self._max_mask_s:g} s")
        row[:] = self._mask
        return True

    def accept(self, token_id: int) -> None:
        """Store a generated token. If the grammar forbids it, ``fill_mask`` raises an error."""
        self._accepted.append(token_id)

    @property
    def complete(self) -> bool:
        """True if the grammar allows no further token. Raises the errors of ``fill_mask``."""
        self._take_in()
        return bool(self._matcher.is_stopped())

    def _take_in(self) -> None:
        for token_id in self._accepted:
            self._matcher.consume_token(token_id)
            self._check("does not allow the token")
        self._accepted.clear()

    def _check(self, fault: str) -> None:
        """Raise the matcher's error, if any. ``fault`` is the message if no limit is the cause."""
        if self._matcher.is_error():
            self._grammar.is_spent = True
            limit = limit_of(self._matcher.get_error())
            raise FormLimitError(limit) if limit else ConstraintError(f"the grammar {fault}")

    def __deepcopy__(self, _: object) -> "GrammarConstraint":
        copy = GrammarConstraint(self._grammar, self._mask.size, self._max_mask_s, self._matcher)
        copy._accepted = self._accepted.copy()
        copy._slow_masks = self._slow_masks
        return copy

    def after(self, token_ids: Sequence[int], max_s: float) -> "GrammarConstraint":
        """Return a constraint on the text after ``token_ids``, whose reading may take ``max_s`` of
        processor time. Raises UnfitBeginningError or GrammarError."""
        start = self._start.deep_copy()
        ends_s = time.thread_time() + max_s
        # Read a few tokens per call: a call for all tokens would block other threads.
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
    """Finds a tag in a text that arrives in pieces."""

    def __init__(self, tag: bytes) -> None:
        """The first byte of ``tag`` must occur only once in ``tag``."""
        self._tag = tag
        self.matched = 0
        """Number of bytes at the end of the text that are the beginning of the tag."""

    def feed(self, text: bytes) -> bool:
        """Read the next piece of the text. Return True if the tag is complete now."""
        window = self._tag[: self.matched] + text
        if self._tag in window:
            return True
        start = window.rfind(self._tag[:1])
        self.matched = len(window) - start if start >= 0 else 0
        if not self._tag.startswith(window[len(window) - self.matched :]):
            self.matched = 0
        return False


CALL_OPEN_TAG = CALL_OPEN.encode()


class LazyCalls:
    """Allows any text, but constrains each tool call from its opening tag to its end."""

    def __init__(self, call: GrammarConstraint, vocabulary: Vocabulary) -> None:
        """``call`` constrains the text after an opening tag, including the closing tag."""
        self._call = call
        self._vocabulary = vocabulary
        self._open = TagWatch(CALL_OPEN_TAG)
        self._running: GrammarConstraint | None = None

    def fill_mask(self, row: np.ndarray) -> bool:
        if self._running is not None:
            return self._running.fill_mask(row)
        np.copyto(row, self._vocabulary.calling_masks[self._open.matched])
        return True

    def accept(self, token_id: int) -> None:
        if self._running is None:
            if self._open.feed(self._vocabulary.token_bytes(token_id)):
                self._running = deepcopy(self._call)
            return
        self._running.accept(token_id)
        if self._running.complete:
            self._running = None
            self._open = TagWatch(CALL_OPEN_TAG)


OPEN_TAG, CLOSE_TAG = THINK_OPEN.encode(), THINK_CLOSE.encode()


class Phase(Enum):
    """The part of an answer that is being generated."""

    BEGINNING = 0
    THINKING = 1
    BREAKING = 2
    """After the closing tag of reasoning, where line breaks may come before the answer."""
    SAYING = 3


START = {Channel.CONTENT: Phase.SAYING, Channel.REASONING: Phase.THINKING, None: Phase.BEGINNING}


class ReasoningConstraint:
    """Allows any reasoning, and forces its closing tag when the token budget is spent. After the
    reasoning, the constraint ``answer`` applies. If ``answer`` is not None, no token can end the
    reasoning without the closing tag, or contain text after this tag."""

    def __init__(
        self,
        answer: TokenConstraint | None,
        vocabulary: Vocabulary,
        start: Channel | None,
        budget: int | None,
    ) -> None:
        """``budget`` is the maximum number of tokens between the tags. None means no limit."""
        self._answer = answer
        self._vocabulary = vocabulary
        self._budget = budget
        self._phase = START[start]
        if answer is not None and vocabulary.open_id is None and start is None:
            self._phase = Phase.SAYING  # a mask cannot allow an opening tag of several tokens
        self._begun = b""
        self._reasoning_tokens = 0
        self._close = TagWatch(CLOSE_TAG)
        self._forced: list[int] = []

    def fill_mask(self, row: np.ndarray) -> bool:
        if self._phase is Phase.THINKING:
            return self._fill_thinking(row)
        if self._answer is None or not self._answer.fill_mask(row):
            return False
        if self._phase is Phase.BEGINNING and self._vocabulary.open_id is not None:
            set_bits(row, (self._vocabulary.open_id,))
        if self._phase is Phase.BREAKING:
            set_bits(row, self._vocabulary.line_breaks)
        return True

    def accept(self, token_id: int) -> None:
        match self._phase:
            case Phase.BEGINNING:
                self._accept_beginning(token_id)
            case Phase.THINKING:
                self._accept_reasoning(token_id)
            case Phase.BREAKING:
                self._phase = Phase.SAYING
                if token_id not in self._vocabulary.line_breaks:
                    self._say(token_id)
            case _:
                self._say(token_id)

    def _fill_thinking(self, row: np.ndarray) -> bool:
        if self._budget is not None and self._reasoning_tokens >= self._budget:
            self._forced = self._forced or list(self._vocabulary.close_ids)
            row.fill(0)
            set_bits(row, self._forced[:1])
            return True
        if self._answer is None:
            return False
        np.copyto(row, self._vocabulary.thinking_masks[self._close.matched])
        return True

    def _accept_beginning(self, token_id: int) -> None:
        if self._answer is not None and token_id != self._vocabulary.open_id:
            self._phase = Phase.SAYING
            self._say(token_id)
            return
        self._begun += self._vocabulary.token_bytes(token_id)
        text = self._begun.lstrip()
        if text.startswith(OPEN_TAG):
            self._phase = Phase.THINKING
            self._watch(text[len(OPEN_TAG) :])
        elif not OPEN_TAG.startswith(text):
            self._phase = Phase.SAYING

    def _accept_reasoning(self, token_id: int) -> None:
        self._reasoning_tokens += 1
        del self._forced[:1]
        self._watch(self._vocabulary.token_bytes(token_id))

    def _watch(self, text: bytes) -> None:
        if self._close.feed(text):
            self._phase = Phase.BREAKING

    def _say(self, token_id: int) -> None:
        if self._answer is not None:
            self._answer.accept(token_id)


class AnalysisBudget:
    """Ends the reasoning of an answer in Harmony when its token budget is spent: forces the end of
    the message and a header, whose channel is the model's choice among the others. The constraint
    ``answer``, if not None, applies to the whole answer."""

    def __init__(
        self, answer: TokenConstraint | None, vocabulary: Vocabulary, spec: ConstraintSpec
    ) -> None:
        self._answer = answer
        self._vocabulary = vocabulary
        self._spec = spec
        self._left = spec.thinking_budget or 0
        self._messages = HarmonyMessages(spec.tools, spec.first_channel)
        channels = ("final", "commentary") if spec.tools else ("final",)
        names = map(vocabulary.tokens, channels)
        self._names = {first: rest for first, *rest in names}
        """``{first token of a channel's name: its other tokens}``."""
        self._forced: list[Collection[int]] = []
        """The tokens of which one comes next, then of which one comes after it, and so on."""

    def fill_mask(self, row: np.ndarray) -> bool:
        if self._messages.is_open and self._left <= 0 and not self._forced:
            self._forced = [*((each,) for each in self._vocabulary.after_analysis), self._names]
        is_held = self._answer is not None and self._answer.fill_mask(row)
        if not self._forced:
            return is_held
        allowed = np.zeros_like(row)
        set_bits(allowed, self._forced[0])
        row[:] = row & allowed if is_held else allowed
        return True

    def accept(self, token_id: int) -> None:
        if self._answer is not None:
            self._answer.accept(token_id)
        self._left -= self._messages.is_open
        rest = self._names[token_id] if self._forced == [self._names] else ()
        self._forced = [*self._forced[1:], *((each,) for each in rest)]
        text = self._vocabulary.signs.get(token_id)
        text = text or self._vocabulary.token_bytes(token_id).decode(errors="replace")
        self._messages.feed(TextPiece(Channel.CONTENT, text))
