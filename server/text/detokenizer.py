"""Decode token ids to text one by one. The text consists of whole characters."""

from codecs import getincrementaldecoder
from collections.abc import Sequence

from server.text.tokenizer import EncodedText, Tokenizer


class Detokenizer:
    """Decodes the tokens of an answer. The joined texts of ``feed`` and ``flush`` equal the text
    that the tokenizer decodes from all ids together, except near bytes that form no character."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        with_tags: bool = False,
        with_special: bool = False,
        continues: bool = False,
    ) -> None:
        """``with_tags`` keeps the tags around reasoning and calls. ``with_special`` keeps all
        special tokens. ``continues`` keeps a leading space, because the answer continues a text."""
        self.chars = 0
        """The number of characters that ``feed`` has returned."""
        self.offset = 0
        """The number of characters before the first character of the token that was fed last."""
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
        # If a U+FFFD replaces an earlier incomplete character, the token begins after the U+FFFD.
        self.offset += len(text) - (not self._decoder.getstate()[0])
        text += self._decoder.decode(raw[1:])
        self._is_whole = not self._decoder.getstate()[0]
        self.chars += len(text)
        return text

    def flush(self) -> str:
        """Return U+FFFD if the last character is incomplete, and else ""."""
        return self._decoder.decode(b"", final=True)


def decoded_text(tokenizer: Tokenizer, ids: Sequence[int]) -> EncodedText:
    """Decode ids to text with special tokens. A long list takes long, so use a thread for it."""
    detokenizer = Detokenizer(tokenizer, with_special=True)
    pieces, offsets = list[str](), list[int]()
    for token_id in ids:
        pieces.append(detokenizer.feed(token_id))
        offsets.append(detokenizer.offset)
    return EncodedText("".join([*pieces, detokenizer.flush()]), tuple(ids), tuple(offsets))
