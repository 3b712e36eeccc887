"""Prepares a tokenizer for grammars: its form for llguidance, ids of tags, and token masks."""

import json
from collections.abc import Iterable
from functools import cached_property

import numpy as np
from llguidance import LLTokenizer

from server.text.calls.tool_format import CALL_CLOSE, CALL_OPEN
from server.text.conversation import THINK_CLOSE, THINK_OPEN
from server.text.grammar.text import TokenizerFacts
from server.text.harmony import TOKENS
from server.text.tokenizer import Tokenizer

WORD_BITS = 32
ADDED_TOKENS = '"added_tokens":'
# Line breaks that models write after a closing tag of reasoning.
LINE_BREAKS = ("\n", "\n\n")


class VocabularyError(ValueError):
    """Raised if llguidance cannot read a tokenizer."""


class Vocabulary:
    """The tokens of tags, and masks of allowed tokens, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, size: int, stop_ids: frozenset[int]) -> None:
        """``size`` is the number of the model's logits. A token in ``stop_ids`` ends an answer."""
        self.size = size
        self.stop_ids = frozenset(i for i in stop_ids if i < tokenizer.vocab_size)
        self._tokenizer = tokenizer
        self.open_id: int | None = tokenizer.fast.token_to_id(THINK_OPEN)
        self.close_ids = self.tokens(THINK_CLOSE)
        self.signs = tokenizer.signs
        self.after_analysis = self.tokens("<|end|><|start|>assistant<|channel|>")
        breaks = map(self.tokens, LINE_BREAKS)
        self.line_breaks = frozenset(ids[0] for ids in breaks if len(ids) == 1)

    def __deepcopy__(self, _: object) -> "Vocabulary":
        return self  # copies of constraints share it

    def engine_text(self) -> str:
        """Write the tokenizer as JSON for llguidance. Raises VocabularyError.

        Added tokens become special and get names that occur in no text, so that a grammar allows
        added tokens only by id. Otherwise strings in a grammar could match a token's own name, and
        llguidance would take text that spells the name for the token."""
        fast = self._tokenizer.fast
        if fast.get_vocab_size(with_added_tokens=True) != self._tokenizer.vocab_size:
            raise VocabularyError("the ids of the model's tokenizer have gaps")
        if not self.stop_ids:
            raise VocabularyError("the model has no token that ends an answer")
        text = fast.to_str()
        start = text.index(ADDED_TOKENS) + len(ADDED_TOKENS)
        added, end = json.JSONDecoder().raw_decode(text, start)
        rest = text[end:]
        for token in added:
            name = f"\ue000{token['id']}\ue001"
            # Some tokenizers also list added tokens among the ordinary tokens.
            own = json.dumps(token["content"], ensure_ascii=False)
            rest = rest.replace(f"{own}:{token['id']}", f'"{name}":{token["id"]}', 1)
            token |= {"content": name, "special": True}
        return text[:start] + json.dumps(added) + rest

    @property
    def names(self) -> dict[str, int]:
        """``{text of an added token: id of the token}``."""
        added = self._tokenizer.fast.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items()}

    @property
    def words(self) -> int:
        return -(-self.size // WORD_BITS)

    @cached_property
    def thinking_masks(self) -> list[np.ndarray]:
        """The masks during reasoning. Mask n applies after the first n bytes of the closing tag."""
        return self._masks_before(THINK_CLOSE.encode(), may_stop=False)

    @cached_property
    def calling_masks(self) -> list[np.ndarray]:
        """The masks outside calls. Mask n applies after the first n bytes of the opening tag."""
        return self._masks_before(CALL_OPEN.encode(), may_stop=True)

    def tokens(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a tag. There is only one id if the tag is a token."""
        return tuple(self._tokenizer.fast.encode(text, add_special_tokens=False).ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def _masks_before(self, tag: bytes, *, may_stop: bool) -> list[np.ndarray]:
        """Return masks that forbid tokens that complete the tag and go on after it. Mask n, uint32
        ``[words]``, applies after n bytes of the tag. The tag must not repeat its first byte."""
        texts = [self.token_bytes(i) for i in range(self._tokenizer.vocab_size)]
        free = np.zeros(self.words * WORD_BITS, bool)
        free[: len(texts)] = True
        if not may_stop:
            free[list(self.stop_ids)] = False
        # In such a token, the last byte of the tag comes before the last byte of the token.
        beyond = [(i, text) for i, text in enumerate(texts) if tag[-1:] in text[:-1]]
        free[[i for i, text in beyond if tag in text[:-1]]] = False
        masks = []
        for matched in range(len(tag)):
            rest, allowed = tag[matched:], free.copy()
            longer = [i for i, text in beyond if text.startswith(rest) and len(text) > len(rest)]
            allowed[longer] = False
            masks.append(np.packbits(allowed, bitorder="little").view(np.uint32))
        return masks


class GrammarTokenizer:
    """A tokenizer in llguidance's form. Making a large one blocks other threads for a second."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        text = vocabulary.engine_text()
        stop_ids = sorted(vocabulary.stop_ids)
        try:
            self.engine = LLTokenizer(text, vocabulary.size, stop_ids)
        except ValueError as error:
            raise VocabularyError("the model's tokenizer does not work on bytes") from error
        self.text = text.encode()
        """The tokenizer as JSON, for the worker process."""
        tags = {tag: list(vocabulary.tokens(tag)) for tag in (CALL_OPEN, CALL_CLOSE, *TOKENS)}
        self.facts = TokenizerFacts(vocabulary.size, stop_ids, tags, vocabulary.names)


def set_bits(row: np.ndarray, ids: Iterable[int]) -> None:
    """Also allow the tokens ``ids`` in the mask ``row``."""
    for i in ids:
        row[i // WORD_BITS] |= np.uint32(1 << i % WORD_BITS)
