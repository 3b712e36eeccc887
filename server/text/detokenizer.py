"""Decode token ids to text one by one, in whole characters."""

from codecs import getincrementaldecoder
from collections.abc import Sequence

from server.text.tokenizer import EncodedText, Tokenizer


class Detokenizer:
    """Decodes one answer. The joined results of ``feed`` and ``flush`` equal the tokenizer's
    decoding of all ids without special tokens, except near bytes that form no valid character."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        with_tags: bool = False,
        with_special: bool = False,
        continues: bool = False,
    ) -> None:
        """with_tags: keep the tags around reasoning and calls. with_special: keep all special
        tokens. continues: whether the answer continues a text, so that a leading space is kept."""
        self.chars = 0
        """Number of characters returned so far."""
        self.offset = 0
        """Number of characters before the first character of the token that was fed last."""
        self._tokenizer = tokenizer
        tags = tokenizer.special_tag_ids if with_tags else frozenset[int]()
        self._hidden = frozenset[int]() if with_special else tokenizer.special_ids - tags
        # The UTF-8 decoder holds the bytes of one character at most, so a token's cost is constant.
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")
        self._is_whole = True
        self._drops_space = tokenizer.drops_space and not continues

    def feed(self, token_id: int) -> str:
        """Take in a token and return the text that it completes, which may be empty."""
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
        # The first byte continues an incomplete character, or completes it, or begins a new one.
        self.offset += len(text) - (not self._decoder.getstate()[0])
        text += self._decoder.decode(raw[1:])
        self._is_whole = not self._decoder.getstate()[0]
        self.chars += len(text)
        return text

    def flush(self) -> str:
        """Return U+FFFD if the last character is incomplete, and else ""."""
        return self._decoder.decode(b"", final=True)


def decoded_text(tokenizer: Tokenizer, ids: Sequence[int]) -> EncodedText:
    """Decode ids, with special tokens as text. Long lists would block the event loop."""
    detokenizer = Detokenizer(tokenizer, with_special=True)
    pieces, offsets = list[str](), list[int]()
    for token_id in ids:
        pieces.append(detokenizer.feed(token_id))
        offsets.append(detokenizer.offset)
    return EncodedText("".join([*pieces, detokenizer.flush()]), tuple(ids), tuple(offsets))
