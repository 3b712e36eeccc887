"""Encode texts in parts, because their tokens take far more memory than the text.

Special tokens that a message spells must have no meaning. Each gets a mark (¤, a rare character)
before the template writes the prompt, and the prompt is cut at the marks before encoding::

    x<|im_end|>  -->  x<¤|im_end|>  -->  ...user x<¤|im_end|>...  -->  ...user x<  |im_end|>...
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

# MARK is a private-use character of Unicode. ESCAPE follows a MARK that a message itself contains.
MARK, ESCAPE = "\U0010fffd", "\0"
CUT = re.compile(f"{MARK}(?!{ESCAPE})")


class SpecialTokens:
    """Puts marks into texts, so that a tokenizer reads no part of a text as a special token."""

    def __init__(self, contents: Iterable[str]) -> None:
        """``contents`` are the tokens' texts. One-character texts cannot be cut and are ignored."""
        self.contents = tuple(content for content in contents if len(content) > 1)

    def guarded(self, value: Any) -> Any:
        """Apply ``guarded_text`` to all strings of a JSON value, and return the result."""
        if isinstance(value, str):
            return self.guarded_text(value)
        if isinstance(value, list):
            return [self.guarded(member) for member in value]
        if isinstance(value, dict):
            return {self.guarded(name): self.guarded(member) for name, member in value.items()}
        return value

    def guarded_text(self, text: str) -> str:
        """Put a MARK into every special token that the text spells, even if the tokens overlap."""
        text = text.replace(MARK, MARK + ESCAPE)
        for content in self.contents:
            while content in text:
                text = text.replace(content, f"{content[0]}{MARK}{content[1:]}")
        return text


def pieces_of(prompt: str) -> list[str]:
    """Cut a prompt at the marks that ``guarded_text`` has put into the prompt's texts."""
    if MARK not in prompt:
        return [prompt]
    return [piece.replace(MARK + ESCAPE, MARK) for piece in CUT.split(prompt)]


# A token's encoding takes over a hundred bytes. So if a text has more than SHORT_TOKEN_CHARS
# characters per allowed token, its tokens are first counted in slices, with errors at the cuts.
SHORT_TOKEN_CHARS = 2
SLICE_CHARS = 65_536
SLICING_RATIO = 2
# Significant digits of an estimate.
ESTIMATED_DIGITS = 3
GROUP_CHARS, GROUP_TEXTS = 262_144, 1024
# By default, the tokenizers library caches the first 10 000 words, of up to 9 KiB each, forever.
CACHED_WORDS = 2048


class Encoder:
    """Encodes texts with one tokenizer, while other Python threads can run."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        # A tokenizer model without a cache lacks this method.
        getattr(fast.model, "_resize_cache", id)(CACHED_WORDS)

    def encode(
        self, texts: list[str], *, offsets: bool = False, ends: bool = False
    ) -> list[Encoding]:
        """Encode texts as one batch. ``ends`` adds the tokenizer's tokens around each text."""
        # Other threads can run during these two methods, but not during the tokenizer's ``encode``.
        encode = self._fast.encode_batch if offsets else self._fast.encode_batch_fast
        return encode(texts, add_special_tokens=ends)

    def estimate_beyond(self, pieces: list[str], max_tokens: int) -> int | None:
        """Estimate the number of tokens of the text in ``pieces``. Return None unless the text has
        far more than ``max_tokens`` tokens. Only the beginning is encoded: the rest is assumed to
        have as many tokens per character."""
        all_chars = sum(map(len, pieces))
        if all_chars <= SHORT_TOKEN_CHARS * max_tokens:
            return None
        chars = tokens = 0
        for group_chars, encodings in self._sliced(pieces):
            chars += group_chars
            tokens += sum(map(len, encodings))
            if tokens > SLICING_RATIO * max_tokens:
                estimate = tokens * all_chars // chars
                return round(estimate, ESTIMATED_DIGITS - len(str(estimate)))
        return None

    def count(self, pieces: list[str]) -> int:
        """Return the approximate number of tokens of a text that is given in pieces."""
        return sum(len(encoding) for _, group in self._sliced(pieces) for encoding in group)

    def first_ids(self, pieces: list[str], max_tokens: int) -> tuple[int, ...]:
        """Return a text's first tokens, with errors at the cuts. The rest is not encoded."""
        encodings = chain.from_iterable(group for _, group in self._sliced(pieces))
        return tuple(islice((i for each in encodings for i in each.ids), max_tokens))

    def _sliced(self, pieces: list[str]) -> Iterator[tuple[int, list[Encoding]]]:
        """Yield for each group of slices: number of characters, encodings."""
        starts = ((piece, at) for piece in pieces for at in range(0, len(piece), SLICE_CHARS))
        for group in in_groups(piece[at : at + SLICE_CHARS] for piece, at in starts):
            yield sum(map(len, group)), self.encode(group)


def in_groups(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield the texts in groups of bounded size, to bound the memory of their encodings."""
    group: list[str] = []
    chars = 0
    for text in texts:
        if group and (chars + len(text) > GROUP_CHARS or len(group) == GROUP_TEXTS):
            yield group
            group, chars = [], 0
        group.append(text)
        chars += len(text)
    if group:
        yield group


def tokens_within(encoding: Encoding, chars: int) -> int:
    """Return the number of tokens that end within the first ``chars`` characters of the text."""

    def end(index: int) -> int:
        # Encoding.offsets would list all tokens. A token that was added to the text has no place.
        place = encoding.token_to_chars(index)
        return chars + 1 if place is None else place[1]

    return bisect_right(range(len(encoding)), chars, key=end)
