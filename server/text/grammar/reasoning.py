"""Constrain models that reason before they answer: only the number of tokens is limited in the
reasoning."""

from enum import Enum

import numpy as np

from engine.types import TokenConstraint
from server.text.grammar.constraint_spec import ThinkingStart
from server.text.grammar.constraints import TagWatch
from server.text.grammar.vocabulary import Vocabulary, set_bits
from server.text.parser import CLOSE, OPEN

OPEN_TAG, CLOSE_TAG = OPEN.encode(), CLOSE.encode()


class Phase(Enum):
    """How far an answer has come."""

    BEGINNING = 0
    THINKING = 1
    BREAKING = 2
    """Behind the closing tag, where line breaks may follow that are no part of the answer."""
    SAYING = 3


START = {
    ThinkingStart.SAYING: Phase.SAYING,
    ThinkingStart.THINKING: Phase.THINKING,
    ThinkingStart.OPEN: Phase.BEGINNING,
}


class ReasoningConstraint:
    """Leave reasoning free until its closing tag, or until its budget of tokens is spent: then the
    constraint writes the tag. After it the answer's own constraint holds, if there is one.

    With one, reasoning cannot end the answer, and the tag that closes it is a token's last text.
    """

    def __init__(
        self,
        answer: TokenConstraint | None,
        vocabulary: Vocabulary,
        start: ThinkingStart,
        budget: int | None,
    ) -> None:
        """budget: tokens of the reasoning, without its tags; None: no limit."""
        self._answer = answer
        self._vocabulary = vocabulary
        self._start = start
        self._budget = budget
        self._phase = START[start]
        if answer is not None and vocabulary.open_id is None and start is ThinkingStart.OPEN:
            self._phase = Phase.SAYING  # without a token for it the tag cannot be told from text
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

    def copy(self) -> "ReasoningConstraint":
        answer = None if self._answer is None else self._answer.copy()
        return ReasoningConstraint(answer, self._vocabulary, self._start, self._budget)

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
