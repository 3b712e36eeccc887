"""Token ids -> text as it grows: whole characters only."""

from codecs import getincrementaldecoder

from server.text.tokenizer import Tokenizer


class Detokenizer:
    """Text of one answer. What ``feed`` and ``flush`` return, joined, is what the tokenizer decodes
    from all ids at once, without special tokens."""

    def __init__(self, tokenizer: Tokenizer, *, with_tags: bool = False) -> None:
        """with_tags: whether tags around thoughts and calls are text although they are special."""
        self._tokenizer = tokenizer
        tags = tokenizer.special_tag_ids if with_tags else frozenset[int]()
        self._hidden = tokenizer.special_ids - tags
        # It keeps the bytes of one character at most, so that a token costs the same however many
        # came before it.
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """The text that the token completes; empty while a character is incomplete."""
        if token_id in self._hidden:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """The rest: an incomplete character as U+FFFD."""
        return self._decoder.decode(b"", final=True)
