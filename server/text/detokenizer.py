"""Token ids -> text as it grows: whole characters only."""

from codecs import getincrementaldecoder

from server.text.tokenizer import Tokenizer


class Detokenizer:
    """Text of one answer. What ``feed`` and ``flush`` return, joined, is what the tokenizer decodes
    from all ids at once, without special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # It keeps the bytes of one character at most, so that a token costs the same however many
        # came before it.
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """The text that the token completes; empty while a character is incomplete."""
        if token_id in self._tokenizer.special_ids:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """The rest: an incomplete character as U+FFFD."""
        return self._decoder.decode(b"", final=True)
