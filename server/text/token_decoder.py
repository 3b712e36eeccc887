"""Bytes of tokens, as the decoder of a ``tokenizer.json`` makes them of each token alone.

Kinds of decoders and what they do: huggingface.co/docs/tokenizers, Components, Decoders.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import Decoder

# A byte of a character that is no token.
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
BYTE_LEVEL = "ByteLevel"
# SentencePiece's: signs for spaces, byte tokens, and a space at the beginning of a text.
SENTENCE_PIECE = re.compile(r"(Replace )*(ByteFallback )?(Fuse (Strip )?)?")
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class DecoderError(ValueError):
    """A decoder whose text of a token depends on the tokens around it; says what it is."""


@dataclass(frozen=True, slots=True)
class TokenDecoder:
    """A decoder whose text, but for its beginning, is what the tokens say one after the other."""

    is_byte_level: bool = False
    """Whether tokens are written in the alphabet of byte-level BPE."""
    has_byte_tokens: bool = False
    """Whether ``<0x0A>`` is a byte."""
    replacements: tuple[tuple[str, str], ...] = ()
    """What stands in tokens, and what it stands for."""
    drops_space: bool = False
    """Whether a space at the beginning of a text is no part of it."""

    def bytes_of(self, token: str) -> bytes:
        """Return the bytes of a token, which need not be whole characters."""
        if self.is_byte_level and all(character in BYTE_OF for character in token):
            return bytes(BYTE_OF[character] for character in token)
        if self.has_byte_tokens and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        for sign, text in self.replacements:
            token = token.replace(sign, text)
        return token.encode()


def read_decoder(decoder: Decoder | None) -> TokenDecoder:
    """Return what a tokenizer's decoder does. Raises DecoderError."""
    state = {"decoders": []} if decoder is None else json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state.get("decoders", [state])
    kinds = [step["type"] for step in steps]
    if kinds == [BYTE_LEVEL]:
        return TokenDecoder(is_byte_level=True)
    signs = [step for step in steps if step["type"] == "Replace"]
    if (
        not kinds
        or not SENTENCE_PIECE.fullmatch("".join(f"{kind} " for kind in kinds))
        or ("Strip" in kinds and STRIP not in steps)
        or not all(step["pattern"].get("String") for step in signs)
    ):
        raise DecoderError(json.dumps(steps, ensure_ascii=False))
    return TokenDecoder(
        has_byte_tokens="ByteFallback" in kinds,
        replacements=tuple((step["pattern"]["String"], step["content"]) for step in signs),
        drops_space="Strip" in kinds,
    )


def _byte_alphabet() -> dict[str, int]:
    """Return the alphabet of byte-level BPE, which writes every byte as a visible character:
    printable Latin-1 as itself, the others, in order, from U+0100 up (openai/gpt-2, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF = _byte_alphabet()
