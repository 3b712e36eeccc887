"""Finds tokens that are likely to follow: in the client's prediction, or earlier in the text."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

# Drafts follow this many tokens that occurred before. Shorter matches are rarely kept.
MATCH_TOKENS = 8
# As above, for a prediction, most of whose tokens are expected to come.
PREDICTION_MATCH_TOKENS = 4
# The longest part of a text that is read at once, in about 2 ms.
READ_AT_ONCE = 8192
# The most places of a text that are found, in 256 KiB. Newer ones replace older ones.
INDEXED_PLACES = 1 << 16


class TextIndex:
    """Finds an earlier occurrence of a text's last tokens. The text may grow."""

    def __init__(self, size: int) -> None:
        """``size`` is the number of tokens that must be equal."""
        self._size = size
        self._read = size - 1
        self._ends = array("i")
        """The newest end of an occurrence, by the hash of its tokens. Most requests never need this
        table: it is made when the text is first read."""

    def extend(self, text: Sequence[int], end: int) -> None:
        """Read more of the text, up to position ``end``, but not too much at once."""
        end = min(end, self._read + READ_AT_ONCE)
        self._ends = self._ends or array("i", [0]) * INDEXED_PLACES
        for place in range(self._read + 1, end + 1):
            self._ends[hash(tuple(text[place - self._size : place])) % INDEXED_PLACES] = place
        self._read = max(self._read, end)

    def find(self, text: Sequence[int], tokens: Sequence[int]) -> int | None:
        """Return the end of the newest occurrence in the text of the last of ``tokens``, or
        None."""
        last = tuple(tokens[-self._size :])
        end = self._ends[hash(last) % INDEXED_PLACES]
        return end if tuple(text[end - len(last) : end]) == last else None


@dataclass(slots=True)
class DraftTexts:
    """The texts that an answer's drafts are taken from."""

    prediction: tuple[int, ...]
    _own: TextIndex = field(default_factory=lambda: TextIndex(MATCH_TOKENS))
    _predicted: TextIndex = field(default_factory=lambda: TextIndex(PREDICTION_MATCH_TOKENS))
    _place: int | None = 0
    """The position in the prediction of the answer's next token, or None after the answer has left
    the prediction."""
    _read: int = 0
    """The number of the answer's tokens that were compared with the prediction."""

    def likely_next(self, tokens: list[int], num_prompt: int, count: int) -> tuple[int, ...]:
        """Return up to ``count`` tokens that are likely to follow ``tokens``, of which the first
        ``num_prompt`` are the prompt."""
        if self.prediction:
            self._follow(tokens, num_prompt)
            if self._place is not None:
                return self.prediction[self._place : self._place + count]
        self._own.extend(tokens, len(tokens) - 1)
        end = self._own.find(tokens, tokens)
        return () if end is None else tuple(tokens[end : end + count])

    def _follow(self, tokens: list[int], num_prompt: int) -> None:
        self._predicted.extend(self.prediction, len(self.prediction))
        for end in range(num_prompt + self._read + 1, len(tokens) + 1):
            token, place = tokens[end - 1], self._place
            if place is not None and self.prediction[place : place + 1] == (token,):
                self._place = place + 1
            else:
                first = max(num_prompt, end - PREDICTION_MATCH_TOKENS)
                self._place = self._predicted.find(self.prediction, tokens[first:end])
        self._read = len(tokens) - num_prompt
