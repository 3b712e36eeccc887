"""Decode token ids to text as it grows, in whole characters."""

from codecs import getincrementaldecoder
from collections.abc import Sequence

from server.text.tokenizer import EncodedText, Tokenizer


class Detokenizer:
    """The text of one answer. The results of ``feed`` and ``flush`` join to the tokenizer's
    decoding of all ids, without special tokens. Only beside a broken character of byte tokens this
    keeps more."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        with_tags: bool = False,
        with_special: bool = False,
        continues: bool = False,
    ) -> None:
        """with_tags: keep tags around reasoning and calls, even special ones. with_special: keep
        all special tokens. continues: whether another text comes before, so that a leading space
        stays."""
        self.chars = 0
        """Characters so far."""
        self.offset = 0
        """The newest token's offset: the characters before the one that it begins in."""
        self._tokenizer = tokenizer
        tags = tokenizer.special_tag_ids if with_tags else frozenset[int]()
        self._hidden = frozenset[int]() if with_special else tokenizer.special_ids - tags
        # The decoder keeps the bytes of one character at most, so that the cost of a token does not
        # grow.
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")
        self._is_whole = True
        self._drops_space = tokenizer.drops_space and not continues

    def feed(self, token_id: int) -> str:
        """Take in a token and return the text that it completes; "" while a character is
        incomplete."""
        self.offset = self.chars
        raw = b"" if token_id in self._hidden else self._tokenizer.token_bytes(token_id)
        if not raw:
            return ""
        if self._drops_space:
            self._drops_space = False
            raw = raw.removeprefix(b" ")
        if self._is_whole and raw.isascii():
            self.chars += len(raw)
            return raw.decode("ascii")
        text = self._decoder.decode(raw[:1])
        # The first byte belongs to the incomplete character, or to the one that it completed.
        self.offset += len(text) - (not self._decoder.getstate()[0])
        text += self._decoder.decode(raw[1:])
        self._is_whole = not self._decoder.getstate()[0]
        self.chars += len(text)
        return text

    def flush(self) -> str:
        """Return the rest: an incomplete character as U+FFFD."""
        return self._decoder.decode(b"", final=True)


def decoded_text(tokenizer: Tokenizer, ids: Sequence[int]) -> EncodedText:
    """Decode ids, with special tokens as text. Long lists take too long for the event loop."""
    detokenizer = Detokenizer(tokenizer, with_special=True)
    pieces, offsets = list[str](), list[int]()
    for token_id in ids:
        pieces.append(detokenizer.feed(token_id))
        offsets.append(detokenizer.offset)
    return EncodedText("".join([*pieces, detokenizer.flush()]), tuple(ids), tuple(offsets))
