import time
from pathlib import Path

import pytest

from server.text.detokenizer import Detokenizer, decoded_text
from server.text.tokenizer import EncodedText, Tokenizer
from tests.models import SPECIAL_TOKENS, write_tokenizer
from tests.server.harness import decoded, ids_of

MANY = 20_000


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    (found,) = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte])]
    return found


def test_a_character_comes_out_when_its_last_byte_is_there(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    fed = [detokenizer.feed(i) for i in ids_of(tokenizer, "é😀!")]
    assert fed == ["", "é", "", "", "", "😀", "!"]
    assert detokenizer.flush() == ""


def test_half_a_character_at_the_end_becomes_a_replacement_character(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    ids = ids_of(tokenizer, "a😀")[:-1]
    assert [detokenizer.feed(i) for i in ids] == ["a", "", "", ""]
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"
    assert detokenizer.flush() == ""


def test_special_tokens_are_no_text_and_other_added_tokens_are(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    ids = ids_of(tokenizer, "<|im_start|><think>a</think><|im_end|>")
    assert len(ids) == 5
    assert "".join(detokenizer.feed(i) for i in ids) == "<think>a</think>"


@pytest.mark.parametrize(
    ("with_tags", "text"), [(False, "a{}b"), (True, "<think>a</think><tool_call>{}</tool_call>b")]
)
def test_tags_that_are_special_are_text_where_they_are_read(
    tmp_path: Path, with_tags: bool, text: str
) -> None:
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    write_tokenizer(tmp_path, 1000, special=(*SPECIAL_TOKENS, *tags), plain=())
    strict = Tokenizer(tmp_path)
    detokenizer = Detokenizer(strict, with_tags=with_tags)
    ids = ids_of(strict, "<think>a</think><tool_call>{}</tool_call>b<|im_end|>")
    assert "".join(detokenizer.feed(i) for i in ids) == text


def test_an_id_without_a_token_is_no_text(tokenizer: Tokenizer) -> None:
    assert Detokenizer(tokenizer).feed(tokenizer.vocab_size + 7) == ""


@pytest.mark.parametrize(
    ("tokens", "offsets"),
    [
        ("a b", [0, 1, 2]),
        ("é!", [0, 0, 1]),
        ("a😀b", [0, 1, 1, 1, 1, 2]),
        # What never becomes a character is replaced by one, and counts from where it began.
        (b"\xc3!", [0, 1]),
        (b"\xc3\xc3\xa9!", [0, 1, 1, 2]),
        (b"\xe0\x80!", [0, 1, 2]),
        (b"\xf0\x9f", [0, 0]),
    ],
)
def test_a_token_begins_in_the_character_that_its_first_byte_belongs_to(
    tokenizer: Tokenizer, tokens: str | bytes, offsets: list[int]
) -> None:
    raw = tokens.encode() if isinstance(tokens, str) else tokens
    detokenizer = Detokenizer(tokenizer)
    found = []
    for byte in raw:
        detokenizer.feed(byte_token(tokenizer, byte))
        found.append(detokenizer.offset)
    assert found == offsets


def test_a_token_that_is_no_text_begins_where_the_text_has_come_to(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    ids = ids_of(tokenizer, "a<|im_end|><think>b")
    offsets = []
    for token in [*ids, tokenizer.vocab_size + 7]:
        detokenizer.feed(token)
        offsets.append(detokenizer.offset)
    assert offsets == [0, 1, 1, 8, 9]
    assert detokenizer.chars == 9


def test_all_tokens_of_a_prompt_are_text(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "<|im_start|>é<think>😀")[:-1]
    assert decoded_text(tokenizer, ids) == EncodedText(
        "<|im_start|>é<think>\N{REPLACEMENT CHARACTER}",
        tuple(ids),
        (0, 12, 12, 13, 20, 20, 20),
    )
    assert decoded_text(tokenizer, []) == EncodedText("", (), ())


@pytest.mark.parametrize("text", ["é", "<|im_start|>", "w500"])
def test_a_token_costs_the_same_however_many_came_before(tokenizer: Tokenizer, text: str) -> None:
    # The first byte of é, again and again, never becomes a character.
    token = ids_of(tokenizer, text)[0]
    detokenizer = Detokenizer(tokenizer)
    started = time.perf_counter()
    pieces = [detokenizer.feed(token) for _ in range(MANY)]
    # A detokenizer that decodes what is incomplete over and over takes half a minute.
    assert time.perf_counter() - started < 5.0
    assert "".join(pieces) + detokenizer.flush() == decoded(tokenizer, [token] * MANY)
