"""Chat template and encoding, off the event loop; token ids back to text and bytes."""

import asyncio
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast


class TokenizerError(ValueError):
    """A model folder without a tokenizer that can be used; names the file."""


class TemplateError(ValueError):
    """A conversation that the model's template cannot render."""


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A conversation as a prompt."""

    text: str
    ids: tuple[int, ...]
    system_tokens: int
    """Leading ids that belong to the leading system messages: other conversations that begin with
    the same messages begin with these ids."""


class Tokenizer:
    """A model's tokenizer and chat template."""

    def __init__(self, path: Path) -> None:
        """path: the model's folder. Nothing is downloaded and no code of the model is run."""
        try:
            loaded = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            # Whatever transformers stumbles over is what these files hold.
            raise TokenizerError(
                f"{path}: its tokenizer.json and tokenizer_config.json make no tokenizer"
            ) from error
        if not isinstance(loaded, PreTrainedTokenizerFast):
            raise TokenizerError(f"{path / 'tokenizer.json'}: the file does not exist")
        self._template = loaded
        self.fast: FastTokenizer = loaded.backend_tokenizer
        self.eos_token_id: int | None = loaded.eos_token_id
        added = self.fast.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        vocabulary = self.fast.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values())
        self.longest_token_bytes = max(len(self.token_bytes(i)) for i in vocabulary.values())

    @property
    def has_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self._template.chat_template is not None

    async def encode_chat(
        self, messages: list[dict[str, Any]], enable_thinking: bool | None
    ) -> EncodedChat:
        """A conversation as a prompt. Raises TemplateError."""
        return await asyncio.to_thread(self._encode_chat, messages, enable_thinking)

    async def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text; special tokens in it are recognised, none are added."""
        return await asyncio.to_thread(lambda: tuple(self._encode(text).ids))

    def _encode_chat(
        self, messages: list[dict[str, Any]], enable_thinking: bool | None
    ) -> EncodedChat:
        arguments = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        try:
            prompt = self._render(messages, add_generation_prompt=True, **arguments)
        except Exception as error:
            # The template is the model's own program: whatever it raises, the input was not for it.
            raise TemplateError("the model's chat template cannot render these messages") from error
        encoding = self._encode(prompt)
        shared = common_chars(self._system_text(messages, arguments), prompt)
        return EncodedChat(prompt, tuple(encoding.ids), tokens_within(encoding, shared))

    def _system_text(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
        """The leading system messages as a prompt of their own; empty where there are none, or
        where the template wants more than those."""
        system = list(takewhile(lambda message: message["role"] == "system", messages))
        if not system:
            return ""
        try:
            return self._render(system, add_generation_prompt=False, **arguments)
        except Exception:
            return ""

    def _render(self, messages: list[dict[str, Any]], **arguments: Any) -> str:
        text: str = self._template.apply_chat_template(messages, tokenize=False, **arguments)
        return text

    def _encode(self, text: str) -> Encoding:
        # encode_batch lets other threads run; encode does not.
        return self.fast.encode_batch([text], add_special_tokens=False)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which need not be whole characters; none for an unknown id."""
        token = self.fast.id_to_token(token_id)
        if token is None:
            return b""
        if all(character in BYTE_OF for character in token):
            return bytes(BYTE_OF[character] for character in token)
        return token.encode()


def common_chars(one: str, other: str) -> int:
    """How many characters both begin with."""
    lengths = range(1, min(len(one), len(other)) + 1)
    return bisect_left(lengths, True, key=lambda length: one[:length] != other[:length])


def tokens_within(encoding: Encoding, chars: int) -> int:
    """How many leading tokens end within the first ``chars`` characters of the text."""

    def end(index: int) -> int:
        # Encoding.offsets would list them all. Padding, behind the text, has no place in it.
        place = encoding.token_to_chars(index)
        return chars + 1 if place is None else place[1]

    return bisect_right(range(len(encoding)), chars, key=end)


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes every byte as a visible character: printable Latin-1 as itself, the
    others, in order, from U+0100 up (openai/gpt-2, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF = _byte_alphabet()
