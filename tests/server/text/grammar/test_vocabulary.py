from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders

from server.text.grammar.vocabulary import (
    GrammarTokenizer,
    VocabularyError,
    set_bits,
)
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.models import write_tokenizer
from tests.server.harness import token_id
from tests.server.text.grammars import MODEL_SIZE, stop_ids, tagged_tokenizer, vocabulary

TAG = b"</think>"


def bits(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_a_tag_is_one_token_where_there_is_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    found = vocabulary(tokenizer)
    assert found.open_id == token_id(tokenizer, "<think>")
    assert found.close_ids == (token_id(tokenizer, "</think>"),)
    assert len(found.tokens("<tool_call>")) == len("<tool_call>")
    assert len(vocabulary(tagged_tokenizer(tmp_path, special=True)).tokens("<tool_call>")) == 1
    assert found.line_breaks == {token_id(tokenizer, "\n")}


def test_masks_have_a_bit_for_each_token_and_none_for_padding(tokenizer: Tokenizer) -> None:
    found = vocabulary(tokenizer)
    assert found.words == MODEL_SIZE // 32
    everything = set(range(VOCAB))
    assert bits(found.thinking_masks[0]) == everything - stop_ids(tokenizer)
    assert bits(found.calling_masks[0]) == everything
    assert len(found.thinking_masks) == len(TAG)


def with_words(folder: Path, *words: str) -> Tokenizer:
    """Replaces the last tokens with others."""
    write_tokenizer(folder, VOCAB)
    file = folder / "tokenizer.json"
    text = file.read_text()
    for number, word in enumerate(words):
        text = text.replace(f'"w{VOCAB - 1 - number}"', f'"{word}"')
    file.write_text(text)
    return Tokenizer(folder)


def test_no_token_goes_beyond_a_tag(tmp_path: Path) -> None:
    tokenizer = with_words(tmp_path, "a</think>b", "k>c", "nk>", "hink>d", "</think>e", "x</think>")
    masks = [bits(mask) for mask in vocabulary(tokenizer).thinking_masks]
    beyond = {word: tokenizer.fast.get_vocab()[word] for word in ("a</think>b", "</think>e")}
    assert all(token not in mask for mask in masks for token in beyond.values())
    tails = {"k>c": TAG.index(b"k"), "hink>d": TAG.index(b"h")}
    for word, place in tails.items():
        token = tokenizer.fast.get_vocab()[word]
        assert [token not in mask for mask in masks] == [n == place for n in range(len(TAG))]
    for word in ("nk>", "x</think>"):
        assert all(tokenizer.fast.get_vocab()[word] in mask for mask in masks)


def test_a_tokenizer_with_gaps_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace(f'"w{VOCAB - 2}": {VOCAB - 2}', f'"w": {VOCAB + 5}'))
    with pytest.raises(VocabularyError, match="gaps"):
        GrammarTokenizer(vocabulary(Tokenizer(tmp_path)))


def test_a_tokenizer_that_does_not_work_on_bytes_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB)
    file = str(tmp_path / "tokenizer.json")
    fast = FastTokenizer.from_file(file)
    fast.decoder = decoders.Fuse()
    fast.save(file)
    with pytest.raises(VocabularyError, match="bytes"):
        GrammarTokenizer(vocabulary(Tokenizer(tmp_path)))


def test_bits_are_set_where_they_belong() -> None:
    row = np.zeros(2, np.uint32)
    set_bits(row, (0, 31, 33))
    assert bits(row) == {0, 31, 33}
