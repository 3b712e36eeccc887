"""A model's tokenizer: encode conversations and texts in threads, and decode ids to bytes."""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import Decoder
from tokenizers.pre_tokenizers import ByteLevel

from engine.types import NO_BOUNDARIES, PromptBoundaries
from server.config import PromptsSection
from server.text.calls.tool_format import CALL_CLOSE, CALL_OPEN
from server.text.chat_template import ChatTemplate, PromptEnds
from server.text.conversation import THINK_CLOSE, THINK_OPEN, Conversation
from server.text.encoder import Encoder, SpecialTokens, in_groups, pieces_of, tokens_within
from server.text.harmony import ANSWER_ENDS, SIGNS
from server.text.template_trial import TimeLimit
from server.text.tokenizer_files import TOKENIZER_FILE, TokenizerError, read_tokenizer

# The name of a token that stands for one byte of a character.
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# SentencePiece's decoder replaces characters, decodes bytes, joins tokens, and drops a space.
SENTENCE_PIECE = re.compile(r"(Replace )*(ByteFallback )?(Fuse (Strip )?)?")
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


# Maps each character of byte-level BPE's alphabet to its byte. Printable Latin-1 bytes are written
# as they are, and the others, in their order, from U+0100 on (openai/gpt-2, encoder.py).
ALPHABET = sorted(ByteLevel.alphabet())
BYTE_OF = dict(zip(ALPHABET, sorted(range(256), key=lambda i: chr(i) not in ALPHABET), strict=True))


@dataclass(frozen=True, slots=True)
class TokenDecoder:
    """The rules of a ``tokenizer.json`` that decode each token alone. Only the decoding of a
    leading space depends on other tokens. Format: huggingface.co/docs/tokenizers, Components."""

    is_byte_level: bool = False
    """True if tokens are written in the alphabet of byte-level BPE."""
    has_byte_tokens: bool = False
    """True if a token such as ``<0x0A>`` stands for a byte."""
    replacements: tuple[tuple[str, str], ...] = ()
    """Pairs of a string in tokens and the text that replaces the string."""
    drops_space: bool = False
    """True if decoding drops a leading space of the whole text."""

    def bytes_of(self, token: str) -> bytes:
        """Return a token's bytes, which may end within a character."""
        if self.is_byte_level and all(character in BYTE_OF for character in token):
            return bytes(BYTE_OF[character] for character in token)
        if self.has_byte_tokens and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        for sign, text in self.replacements:
            token = token.replace(sign, text)
        return token.encode()


def read_decoder(decoder: Decoder | None, file: Path) -> TokenDecoder:
    """Read the decoder in ``file``. Raises TokenizerError if it decodes several tokens as one."""
    state = {"decoders": []} if decoder is None else json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state.get("decoders", [state])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenDecoder(is_byte_level=True)
    signs = [step for step in steps if step["type"] == "Replace"]
    if (
        not kinds
        or not SENTENCE_PIECE.fullmatch("".join(f"{kind} " for kind in kinds))
        or ("Strip" in kinds and STRIP not in steps)
        or not all(step["pattern"].get("String") for step in signs)
    ):
        raise TokenizerError(
            f"{file}: the decoder is {json.dumps(steps, ensure_ascii=False)}; quire serves "
            "ByteLevel, and SentencePiece's Replace, ByteFallback, Fuse, Strip"
        )
    return TokenDecoder(
        has_byte_tokens="ByteFallback" in kinds,
        replacements=tuple((step["pattern"]["String"], step["content"]) for step in signs),
        drops_space="Strip" in kinds,
    )


TAGS = frozenset({THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE})
PROMPTS = PromptsSection()


class TextTooLongError(ValueError):
    """Raised for a text that has more tokens than are allowed."""

    def __init__(self, tokens: int, number: int = 0) -> None:
        """``tokens`` is an estimate. ``number`` is the text's index in the request."""
        super().__init__(f"text {number} is too long")
        self.tokens = tokens
        self.number = number


class TextsTooLongError(ValueError):
    """Raised if the texts of one request together have more tokens than are allowed."""


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A prompt's text and its tokens."""

    text: str
    ids: tuple[int, ...]
    offsets: tuple[int, ...] = ()
    """For each token, the number of characters before it. Empty unless requested."""
    boundaries: PromptBoundaries = NO_BOUNDARIES
    """The lengths of the prefixes that other prompts may share."""
    begun: str = ""
    """The end of ``text`` that the client has written as the beginning of the answer."""

    @property
    def opening(self) -> str:
        return self.text.removesuffix(self.begun)


class Tokenizer:
    """A model's tokenizer and chat template."""

    def __init__(self, path: Path, settings: PromptsSection = PROMPTS) -> None:
        """``path`` is the model's folder. ``settings`` may allow special tokens in messages."""
        files = read_tokenizer(path)
        self.fast: FastTokenizer = files.fast
        # The file may set padding and truncation, which would silently change prompts.
        self.fast.no_padding()
        self.fast.no_truncation()
        self._encoder = Encoder(self.fast)
        self.end_ids: tuple[int, ...] = () if files.end_id is None else (files.end_id,)
        """The id of the token that ends an answer, if the tokenizer names an end token."""
        added = self.fast.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_tag_ids = frozenset(i for i in self.special_ids if added[i].content in TAGS)
        """The ids of tags around reasoning and calls, if the tokenizer declares them special."""
        self.signs = {i: SIGNS[added[i].content] for i in added if added[i].content in SIGNS}
        """The sign of each token that structures answers in Harmony, by the token's id."""
        guarded = (
            () if settings.interpret_special_tokens else self.special_ids - self.special_tag_ids
        )
        self._special_tokens = SpecialTokens(added[i].content for i in sorted(guarded))
        self.template = ChatTemplate(files, self._special_tokens)
        ends = ANSWER_ENDS if self.template.is_harmony else ()
        self.answer_end_ids = frozenset(i for i in added if added[i].content in ends)
        """The ids of tokens that end answers in the template's format, whatever the files say."""
        vocabulary = self.fast.get_vocab(with_added_tokens=True)
        if not self.fast.get_vocab(with_added_tokens=False):
            raise TokenizerError(f"{path / TOKENIZER_FILE}: it has no tokens")
        self.vocab_size = 1 + max(vocabulary.values())
        decoder = read_decoder(self.fast.decoder, path / TOKENIZER_FILE)
        self.drops_space = decoder.drops_space
        # A dict and not a list, because there may be large gaps between ids.
        self._bytes = {i: decoder.bytes_of(token) for token, i in vocabulary.items()}

    async def encode_chat(
        self,
        conversation: Conversation,
        max_prompt_tokens: int | None = None,
        *,
        add_generation_prompt: bool = True,
        finds_boundaries: bool = True,
        max_template_s: float = inf,
    ) -> EncodedText:
        """Encode a conversation as a prompt. ``finds_boundaries`` computes ``boundaries``, which
        doubles the rendering time. Raises TemplateError, or TextTooLongError if the prompt surely
        has more than ``max_prompt_tokens`` tokens."""

        limit = TimeLimit(max_template_s)

        def encode() -> EncodedText:
            rendered = self._rendered(
                conversation, limit, add_generation_prompt, finds_boundaries=finds_boundaries
            )
            self._check_length(rendered[0], max_prompt_tokens)
            return self._encode_rendered(*rendered)

        return await limit.run(encode)

    async def count_chat(
        self, conversation: Conversation, max_prompt_tokens: int, *, max_template_s: float
    ) -> int:
        """Count a prompt's tokens. A count far above the maximum is approximate."""
        limit = TimeLimit(max_template_s)

        def count() -> int:
            rendered = self._rendered(conversation, limit, finds_boundaries=False)
            if self._encoder.estimate_beyond(rendered[0], max_prompt_tokens) is not None:
                return self._encoder.count(rendered[0])
            return len(self._encode_rendered(*rendered).ids)

        return await limit.run(count)

    async def encode_text(
        self,
        text: str,
        max_tokens: int | None = None,
        *,
        add_special_tokens: bool = False,
        offsets: bool = False,
    ) -> EncodedText:
        """Encode a text. Special tokens in the text take effect. ``add_special_tokens`` adds tokens
        around it. Raises TextTooLongError if the text has far more than ``max_tokens`` tokens."""

        def encode() -> EncodedText:
            self._check_length([text], max_tokens)
            (encoding,) = self._encoder.encode([text], offsets=offsets, ends=add_special_tokens)
            begins = tuple(begin for begin, _ in encoding.offsets) if offsets else ()
            return EncodedText(text, tuple(encoding.ids), begins)

        return await asyncio.to_thread(encode)

    async def encode_prediction(self, text: str, max_tokens: int) -> tuple[int, ...]:
        """Return the first ``max_tokens`` tokens of a text that an answer may contain. Special
        tokens in the text are read as in messages."""
        if not text:
            return ()

        def encode() -> tuple[int, ...]:
            pieces = pieces_of(self._special_tokens.guarded_text(text))
            return self._encoder.first_ids(pieces, max_tokens)

        return await asyncio.to_thread(encode)

    async def encode_texts(
        self, texts: Sequence[str], max_tokens: int, max_total: int, *, ends: bool
    ) -> list[tuple[int, ...]]:
        """Encode texts for embeddings. ``ends`` adds the end token, whose hidden state is the
        embedding. Raises TextTooLongError if a text has far more than ``max_tokens`` tokens, and
        TextsTooLongError if all texts together have more than ``max_total`` tokens."""

        def encode() -> list[tuple[int, ...]]:
            for number, text in enumerate(texts):
                self._check_length([text], max_tokens, number)
            ids: list[tuple[int, ...]] = []
            total = 0
            for group in in_groups(texts):
                encodings = self._encoder.encode(group, ends=ends)
                ids += [tuple(encoding.ids) for encoding in encodings]
                total += sum(map(len, encodings))
                if total > max_total:
                    raise TextsTooLongError
            return ids

        return await asyncio.to_thread(encode)

    def _check_length(self, pieces: list[str], max_tokens: int | None, number: int = 0) -> None:
        """Raise TextTooLongError if the text has far more than ``max_tokens`` tokens."""
        if max_tokens is not None:
            estimate = self._encoder.estimate_beyond(pieces, max_tokens)
            if estimate is not None:
                raise TextTooLongError(estimate, number)

    def _rendered(
        self,
        conversation: Conversation,
        limit: TimeLimit,
        add_generation_prompt: bool = True,
        *,
        finds_boundaries: bool,
    ) -> tuple[list[str], PromptEnds, str]:
        """Return the prompt, cut where messages spell special tokens, the ends of its parts, and
        its end that the client has begun."""
        prompt, ends = self.template.render(
            conversation,
            add_generation_prompt=add_generation_prompt,
            finds_boundaries=finds_boundaries,
            limit=limit,
        )
        begun = self.template.begun(conversation, prompt, limit=limit)
        ends = PromptEnds(*(sum(map(len, pieces_of(prompt[:end]))) for end in ends))
        prompt += begun.opening + self._special_tokens.guarded_text(begun.text)
        return pieces_of(prompt), ends, begun.text

    def _encode_rendered(self, pieces: list[str], ends: PromptEnds, begun: str) -> EncodedText:
        ids: list[int] = []
        tokens = [0] * len(ends)
        start = 0
        for group in in_groups(pieces):
            encodings = self._encoder.encode(group, offsets=start < max(ends))
            for piece, encoding in zip(group, encodings, strict=True):
                ids += encoding.ids
                for number, end in enumerate(ends):
                    if start < end:
                        tokens[number] += tokens_within(encoding, end - start)
                start += len(piece)
        text, boundaries = "".join(pieces), PromptBoundaries(*tokens)
        return EncodedText(text, tuple(ids), (), boundaries, begun)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, which may end within a character, or b"" for an unknown id."""
        return self._bytes.get(token_id, b"")
