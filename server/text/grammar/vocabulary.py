"""What constraints know of a tokenizer: its tokens as the grammar engine wants them, the tags that
models think and call between, and masks of what may come before a tag."""

from collections.abc import Iterable
from functools import cached_property

import numpy as np
from llguidance import LLTokenizer

from server.text.calls.tool_format import CALL_OPEN
from server.text.parser import CLOSE, OPEN
from server.text.tokenizer import Tokenizer

WORD_BITS = 32
# What models write between a closing tag and what they say.
LINE_BREAKS = ("\n", "\n\n")


class VocabularyError(ValueError):
    """A tokenizer that the grammar engine cannot read."""


class Vocabulary:
    """A tokenizer's tokens. Reading them takes a second for a large vocabulary."""

    def __init__(self, tokenizer: Tokenizer, size: int, stop_ids: frozenset[int]) -> None:
        """size: of the model's output, which may be padded. stop_ids: tokens that end an answer.

        Raises VocabularyError.
        """
        fast = tokenizer.fast
        self._tokenizer = tokenizer
        self._size = size
        self._stop_ids = frozenset(i for i in stop_ids if i < tokenizer.vocab_size)
        if fast.get_vocab_size(with_added_tokens=True) != tokenizer.vocab_size:
            raise VocabularyError("the ids of the model's tokenizer have gaps")
        if not self._stop_ids:
            raise VocabularyError("the model has no token that ends an answer")
        try:
            self.engine = LLTokenizer(fast.to_str(), size, sorted(self._stop_ids))
        except ValueError as error:
            raise VocabularyError("the model's tokenizer does not work on bytes") from error
        self.open_id: int | None = fast.token_to_id(OPEN)
        self.close_ids = self.tokens(CLOSE)
        breaks = map(self.tokens, LINE_BREAKS)
        self.line_breaks = frozenset(ids[0] for ids in breaks if len(ids) == 1)

    @property
    def words(self) -> int:
        """Words of a mask."""
        return -(-self._size // WORD_BITS)

    @cached_property
    def thinking_masks(self) -> list[np.ndarray]:
        """What may be thought, by how much of the closing tag is there."""
        return self._masks_before(CLOSE.encode(), may_stop=False)

    @cached_property
    def calling_masks(self) -> list[np.ndarray]:
        """What may be said outside of calls, by how much of the opening tag is there."""
        return self._masks_before(CALL_OPEN.encode(), may_stop=True)

    def tokens(self, text: str) -> tuple[int, ...]:
        """The tokens of a tag: one, where the tokenizer has one for it."""
        return tuple(self._tokenizer.fast.encode(text, add_special_tokens=False).ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The text of a token."""
        return self._tokenizer.token_bytes(token_id)

    def _masks_before(self, tag: bytes, *, may_stop: bool) -> list[np.ndarray]:
        """Masks of all that may be written before a tag and as the tag, but not behind it in the
        same token: element n is for when n bytes of the tag are there. Padding is not allowed.

        uint32 ``[words]`` each. The tag's first byte must not come again in it.
        """
        texts = [self.token_bytes(i) for i in range(self._tokenizer.vocab_size)]
        free = np.zeros(self.words * WORD_BITS, bool)
        free[: len(texts)] = True
        if not may_stop:
            free[list(self._stop_ids)] = False
        # Only tokens with the tag's last byte, and something behind it, can go beyond the tag.
        beyond = [(i, text) for i, text in enumerate(texts) if tag[-1:] in text[:-1]]
        free[[i for i, text in beyond if tag in text[:-1]]] = False
        masks = []
        for matched in range(len(tag)):
            rest, allowed = tag[matched:], free.copy()
            longer = [i for i, text in beyond if text.startswith(rest) and len(text) > len(rest)]
            allowed[longer] = False
            masks.append(np.packbits(allowed, bitorder="little").view(np.uint32))
        return masks


def set_bits(row: np.ndarray, ids: Iterable[int]) -> None:
    """Allows tokens in a mask."""
    for i in ids:
        row[i // WORD_BITS] |= np.uint32(1 << i % WORD_BITS)
