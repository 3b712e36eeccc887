"""Token ids -> text as it grows: whole characters only."""

from codecs import getincrementaldecoder
from collections.abc import Sequence

from server.text.tokenizer import EncodedText, Tokenizer


class Detokenizer:
    """Text of one answer. What ``feed`` and ``flush`` return, joined, is what the tokenizer decodes
    from all ids at once, without special tokens; but that it keeps the whole characters beside a
    broken one of byte tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        with_tags: bool = False,
        with_special: bool = False,
        continues: bool = False,
    ) -> None:
        """with_tags: whether tags around reasoning and calls are text although they are special.
        with_special: whether all special tokens are. continues: whether another text comes before,
        so that a space at the beginning belongs to it."""
        self.chars = 0
        """Characters that have come out."""
        self.offset = 0
        """Where the newest token begins: the characters before the one that it begins in."""
        self._tokenizer = tokenizer
        tags = tokenizer.special_tag_ids if with_tags else frozenset[int]()
        self._hidden = frozenset[int]() if with_special else tokenizer.special_ids - tags
        # It keeps the bytes of one character at most, so that a token costs the same however many
        # came before it.
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")
        self._is_whole = True
        self._drops_space = tokenizer.drops_space and not continues

    def feed(self, token_id: int) -> str:
        """Take in a token, and return the text that it completes; empty while a character is
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
        # The first byte belongs to what is incomplete now, or to the character that it completed.
        self.offset += len(text) - (not self._decoder.getstate()[0])
        text += self._decoder.decode(raw[1:])
        self._is_whole = not self._decoder.getstate()[0]
        self.chars += len(text)
        return text

    def flush(self) -> str:
        """Return the rest: an incomplete character as U+FFFD."""
        return self._decoder.decode(b"", final=True)


def decoded_text(tokenizer: Tokenizer, ids: Sequence[int]) -> EncodedText:
    """Decode ids, special tokens as they are written. Where there are many it takes longer than the
    event loop can wait."""
    detokenizer = Detokenizer(tokenizer, with_special=True)
    pieces, offsets = list[str](), list[int]()
    for token_id in ids:
        pieces.append(detokenizer.feed(token_id))
        offsets.append(detokenizer.offset)
    return EncodedText("".join([*pieces, detokenizer.flush()]), tuple(ids), tuple(offsets))
