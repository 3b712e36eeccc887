"""Chat template and encoding, off the event loop; token ids back to text and bytes."""

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from server.conversation import Conversation
from server.text.calls.tool_format import CALL_CLOSE, CALL_OPEN
from server.text.calls.written import WrittenCalls
from server.text.chat_template import ChatTemplate
from server.text.parser import CLOSE, OPEN
from server.text.time_limit import TimeLimit

TAGS = frozenset({OPEN, CLOSE, CALL_OPEN, CALL_CLOSE})


class TokenizerError(ValueError):
    """A model folder without a tokenizer that can be used; names the file."""


class TextTooLongError(ValueError):
    """A text that has more tokens than are allowed, whatever they are."""


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A text and its tokens."""

    text: str
    ids: tuple[int, ...]
    offsets: tuple[int, ...]
    """For each of the ids: the characters before the one that it begins in."""


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A conversation as a prompt."""

    text: str
    ids: tuple[int, ...]
    system_tokens: int
    """Leading ids that belong to the leading system messages: other conversations that begin with
    the same messages begin with these ids."""
    begun: str = ""
    """What the text ends with of an answer that is begun: of its thoughts, or of what it says."""

    @property
    def opening(self) -> str:
        """The text before that."""
        return self.text.removesuffix(self.begun)


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
        self.template = ChatTemplate(loaded)
        self.fast: FastTokenizer = loaded.backend_tokenizer
        # What a maker's last program left switched on would change prompts without a word.
        self.fast.no_padding()
        self.fast.no_truncation()
        self.eos_token_id: int | None = loaded.eos_token_id
        added = self.fast.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_tag_ids = frozenset(i for i in self.special_ids if added[i].content in TAGS)
        """Of tags around thoughts and calls that some makers declare special."""
        vocabulary = self.fast.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values())
        # Looked up for every token that is said: 7 MB for 150,000 of them.
        self._bytes = [self._bytes_of(i) for i in range(self.vocab_size)]
        self.longest_token_bytes = max(map(len, self._bytes))

    async def encode_chat(
        self,
        conversation: Conversation,
        max_prompt_tokens: int | None = None,
        written_calls: WrittenCalls | None = None,
        *,
        add_generation_prompt: bool = True,
        max_template_s: float = inf,
    ) -> EncodedChat:
        """A conversation as a prompt, to which an answer is generated unless
        ``add_generation_prompt`` is False. written_calls: those that the prompt repeats as they
        were. max_template_s: what the chat template may take.

        Raises TemplateError; TextTooLongError, before the work of encoding, for what cannot have
        ``max_prompt_tokens`` or less.
        """

        limit = TimeLimit(max_template_s)

        def encode() -> EncodedChat:
            known = written_calls.recalled(conversation) if written_calls else conversation
            return self._encode_chat(known, max_prompt_tokens, add_generation_prompt, limit)

        return await limit.run(encode)

    async def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text; special tokens in it are recognised, none are added."""
        return (await self.encode_text(text)).ids

    async def encode_text(self, text: str, *, add_special_tokens: bool = False) -> EncodedText:
        """A text and its tokens. add_special_tokens: with those that the tokenizer puts around one;
        special tokens in the text are recognised in any case."""
        return await asyncio.to_thread(self._encode_text, text, add_special_tokens)

    async def encode_texts(self, texts: Sequence[str], *, ends: bool) -> list[tuple[int, ...]]:
        """Ids of texts for their vectors. ends: with what the tokenizer itself adds, the token at
        the end whose state is the vector."""

        def encode() -> list[tuple[int, ...]]:
            encodings = self.fast.encode_batch(list(texts), add_special_tokens=ends)
            return [tuple(encoding.ids) for encoding in encodings]

        return await asyncio.to_thread(encode)

    def _encode_chat(
        self,
        conversation: Conversation,
        most: int | None,
        add_generation_prompt: bool,
        limit: TimeLimit,
    ) -> EncodedChat:
        prompt, shared_chars = self.template.render(
            conversation, add_generation_prompt=add_generation_prompt, limit=limit
        )
        begun = self.template.begun(conversation, prompt, limit=limit)
        prompt += begun.opening + begun.text
        if most is not None and len(prompt.encode()) > most * self.longest_token_bytes:
            raise TextTooLongError
        encoding = self._encode(prompt)
        system_tokens = tokens_within(encoding, shared_chars)
        return EncodedChat(prompt, tuple(encoding.ids), system_tokens, begun.text)

    def _encode_text(self, text: str, add_special_tokens: bool) -> EncodedText:
        encoding = self._encode(text, add_special_tokens)
        return EncodedText(text, tuple(encoding.ids), tuple(begin for begin, _ in encoding.offsets))

    def _encode(self, text: str, add_special_tokens: bool = False) -> Encoding:
        # encode_batch lets other threads run; encode does not.
        return self.fast.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which need not be whole characters; none for an unknown id."""
        return self._bytes[token_id] if token_id < self.vocab_size else b""

    def _bytes_of(self, token_id: int) -> bytes:
        token = self.fast.id_to_token(token_id)
        if token is None:
            return b""
        if all(character in BYTE_OF for character in token):
            return bytes(BYTE_OF[character] for character in token)
        return token.encode()


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
