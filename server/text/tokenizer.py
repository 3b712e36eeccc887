"""Chat template and encoding, off the event loop; token ids back to text and bytes."""

import asyncio
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
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
from server.text.special_tokens import SpecialTokens, pieces_of
from server.text.time_limit import TimeLimit

# Encoding takes a hundred bytes and more for each token. So what has more characters than this for
# each token that is allowed is counted before, in slices; the count may be off by some for each
# slice. Texts are encoded in groups.
SHORT_TOKEN_CHARS = 2
SLICE_CHARS = 65_536
SLICING_RATIO = 2
GROUP_CHARS, GROUP_TEXTS = 262_144, 1024
TAGS = frozenset({OPEN, CLOSE, CALL_OPEN, CALL_CLOSE})


class TokenizerError(ValueError):
    """A model folder without a tokenizer that can be used; names the file."""


class TextTooLongError(ValueError):
    """A text that has more tokens than are allowed, whatever they are."""

    def __init__(self, number: int = 0) -> None:
        """number: of the text, where there are several."""
        super().__init__(f"text {number} is too long")
        self.number = number


class TextsTooLongError(ValueError):
    """Texts that have more tokens than are allowed together."""


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A text and its tokens."""

    text: str
    ids: tuple[int, ...]
    offsets: tuple[int, ...]
    """For each of the ids: the characters before the one that it begins in. Empty where nobody has
    asked for them."""


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

    def __init__(self, path: Path, *, interpret_special_tokens: bool = False) -> None:
        """path: the model's folder. Nothing is downloaded and no code of the model is run.
        interpret_special_tokens: also those that texts of conversations spell."""
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
        self.fast: FastTokenizer = loaded.backend_tokenizer
        # What a maker's last program left switched on would change prompts without a word.
        self.fast.no_padding()
        self.fast.no_truncation()
        self.eos_token_id: int | None = loaded.eos_token_id
        added = self.fast.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_tag_ids = frozenset(i for i in self.special_ids if added[i].content in TAGS)
        """Of tags around thoughts and calls that some makers declare special."""
        guarded = () if interpret_special_tokens else self.special_ids - self.special_tag_ids
        spelt = SpecialTokens(added[i].content for i in sorted(guarded))
        self.template = ChatTemplate(loaded, spelt)
        vocabulary = self.fast.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values())
        # Looked up for every token that is said: 7 MB for 150,000 of them.
        self._bytes = [self._bytes_of(i) for i in range(self.vocab_size)]

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
            prompt, shared_chars = self.template.render(
                known, add_generation_prompt=add_generation_prompt, limit=limit
            )
            pieces = pieces_of(prompt)
            if max_prompt_tokens is not None and self._exceeds(pieces, max_prompt_tokens):
                raise TextTooLongError
            shared_chars = sum(map(len, pieces_of(prompt[:shared_chars])))
            return self._encode_pieces(pieces, shared_chars)

        return await limit.run(encode)

    async def count_chat(
        self,
        conversation: Conversation,
        max_prompt_tokens: int,
        written_calls: WrittenCalls,
        *,
        max_template_s: float,
    ) -> int:
        """How many ids ``encode_chat`` makes of a conversation. What has far more than
        ``max_prompt_tokens`` is counted in slices, which may be off by some for each. Raises
        TemplateError."""
        limit = TimeLimit(max_template_s)

        def count() -> int:
            prompt, _ = self.template.render(written_calls.recalled(conversation), limit=limit)
            pieces = pieces_of(prompt)
            if self._exceeds(pieces, max_prompt_tokens):
                return sum(self._counts(pieces))
            return len(self._encode_pieces(pieces, 0).ids)

        return await limit.run(count)

    async def encode_text(
        self,
        text: str,
        max_tokens: int | None = None,
        *,
        add_special_tokens: bool = False,
        offsets: bool = False,
    ) -> EncodedText:
        """A text and its tokens. add_special_tokens: with those that the tokenizer puts around one;
        special tokens in the text are recognised in any case. offsets: with those.

        Raises TextTooLongError, before the work of encoding, for what has far more tokens than
        ``max_tokens``.
        """

        def encode() -> EncodedText:
            if max_tokens is not None and self._exceeds([text], max_tokens):
                raise TextTooLongError
            (encoding,) = self._encode([text], offsets=offsets, ends=add_special_tokens)
            begins = tuple(begin for begin, _ in encoding.offsets) if offsets else ()
            return EncodedText(text, tuple(encoding.ids), begins)

        return await asyncio.to_thread(encode)

    async def encode_texts(
        self, texts: Sequence[str], max_tokens: int, max_total: int, *, ends: bool
    ) -> list[tuple[int, ...]]:
        """Ids of texts for their vectors. ends: with what the tokenizer itself adds, the token at
        the end whose state is the vector.

        Raises TextTooLongError, before the work of encoding, for one that has far more than
        ``max_tokens``; TextsTooLongError where all together have more than ``max_total``.
        """

        def encode() -> list[tuple[int, ...]]:
            for number, text in enumerate(texts):
                if self._exceeds([text], max_tokens):
                    raise TextTooLongError(number)
            found: list[tuple[int, ...]] = []
            total = 0
            for group in _groups(texts):
                encodings = self._encode(group, ends=ends)
                found += [tuple(encoding.ids) for encoding in encodings]
                total += sum(map(len, encodings))
                if total > max_total:
                    raise TextsTooLongError
            return found

        return await asyncio.to_thread(encode)

    def _encode_pieces(self, pieces: list[str], shared_chars: int) -> EncodedChat:
        """shared_chars: leading ones that belong to the leading system messages."""
        ids: list[int] = []
        shared = begun = 0
        for group in _groups(pieces):
            encodings = self._encode(group, offsets=begun < shared_chars)
            for piece, encoding in zip(group, encodings, strict=True):
                if begun < shared_chars:
                    shared += tokens_within(encoding, shared_chars - begun)
                begun += len(piece)
                ids += encoding.ids
        return EncodedChat("".join(pieces), tuple(ids), shared)

    def _exceeds(self, pieces: list[str], max_tokens: int) -> bool:
        """Whether a text has far more tokens than are allowed."""
        if sum(map(len, pieces)) <= SHORT_TOKEN_CHARS * max_tokens:
            return False
        tokens = 0
        for count in self._counts(pieces):
            tokens += count
            if tokens > SLICING_RATIO * max_tokens:
                return True
        return False

    def _counts(self, pieces: list[str]) -> Iterator[int]:
        """About how many tokens one part of a text after another has."""
        starts = ((piece, at) for piece in pieces for at in range(0, len(piece), SLICE_CHARS))
        for group in _groups(piece[at : at + SLICE_CHARS] for piece, at in starts):
            yield sum(map(len, self._encode(group)))

    def _encode(
        self, texts: list[str], *, offsets: bool = False, ends: bool = False
    ) -> list[Encoding]:
        # Of a batch: for a single text no other thread would run.
        encode = self.fast.encode_batch if offsets else self.fast.encode_batch_fast
        return encode(texts, add_special_tokens=ends)

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


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts, some at a time: what they are encoded to takes memory."""
    group: list[str] = []
    chars = 0
    for text in texts:
        if group and (chars + len(text) > GROUP_CHARS or len(group) == GROUP_TEXTS):
            yield group
            group, chars = [], 0
        group.append(text)
        chars += len(text)
    if group:
        yield group


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes every byte as a visible character: printable Latin-1 as itself, the
    others, in order, from U+0100 up (openai/gpt-2, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF = _byte_alphabet()
