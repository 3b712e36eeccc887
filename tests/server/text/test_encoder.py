import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from server.text import encoder as module
from server.text.conversation import Turn
from server.text.encoder import (
    ESCAPE,
    MARK,
    Encoder,
    SpecialTokens,
    in_groups,
    pieces_of,
    tokens_within,
)
from server.text.tokenizer import TextsTooLongError, TextTooLongError, Tokenizer
from tests.models import write_tokenizer
from tests.server.harness import talk


async def test_what_is_too_long_whatever_its_tokens_are_is_not_encoded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_CHARS", 50)
    monkeypatch.setattr(module, "GROUP_CHARS", 100)
    long = talk(Turn("user", "x" * 1000))
    tokens = len((await tokenizer.encode_chat(long)).ids)
    for fits in (tokens, int(tokens / 1.9)):  # it will be refused when its tokens are known
        assert len((await tokenizer.encode_chat(long, fits)).ids) == tokens
    encoded: list[int] = []
    encode = Encoder.encode

    def counted(encoder: Encoder, texts: list[str], **how: Any) -> Any:
        encoded.append(sum(map(len, texts)))
        return encode(encoder, texts, **how)

    monkeypatch.setattr(Encoder, "encode", counted)
    with pytest.raises(TextTooLongError) as caught:
        await tokenizer.encode_chat(long, 300)
    assert caught.value.tokens == 1030, "estimated, and rounded"
    assert max(encoded) <= 100
    assert 600 < sum(encoded) <= 700
    assert await tokenizer.count_chat(long, 300, max_template_s=9) == tokens
    with pytest.raises(TextTooLongError):
        await tokenizer.encode_text("x" * 1000, 300)
    with pytest.raises(TextTooLongError) as caught:
        await tokenizer.encode_texts(["a", "x" * 1000], 300, 9999, ends=False)
    assert caught.value.number == 1
    with pytest.raises(TextsTooLongError):
        await tokenizer.encode_texts(["x" * 100] * 3, 300, 299, ends=False)
    assert max(encoded) <= 100


async def test_only_the_beginning_of_a_long_prediction_is_encoded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_CHARS", 50)
    monkeypatch.setattr(module, "GROUP_CHARS", 100)
    encoded: list[str] = []
    encode = Encoder.encode

    def noted(encoder: Encoder, texts: list[str], **how: Any) -> Any:
        encoded.extend(texts)
        return encode(encoder, texts, **how)

    monkeypatch.setattr(Encoder, "encode", noted)
    text = "".join(map(chr, range(33, 123))) * 100
    ids = await tokenizer.encode_prediction(text, 130)
    assert ids == tuple(tokenizer.fast.encode(text[:130], add_special_tokens=False).ids)
    assert "".join(encoded) == text[:200]


def test_a_token_counts_when_it_ends_within_the_characters(tokenizer: Tokenizer) -> None:
    encoding = tokenizer.fast.encode_batch(["é<think>a"], add_special_tokens=False)[0]
    # Two bytes of one character, a token of seven characters, a letter.
    assert [tokens_within(encoding, chars) for chars in (0, 1, 2, 7, 8, 9)] == [0, 2, 2, 2, 3, 4]


def test_no_texts_are_no_group() -> None:
    assert list(in_groups([])) == []


PROGRAM = """
import ctypes, random, sys
from pathlib import Path
import psutil
from engine.machine import release_free_memory
from server.text.encoder import Encoder
from server.text.tokenizer import Tokenizer

encoder = Encoder(Tokenizer(Path(sys.argv[1])).fast)
draw = random.Random(0)

def encode(words):
    letters = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=250)) for _ in range(words)]
    for word in letters:
        encoder.encode([word])
    release_free_memory()
    return psutil.Process().memory_info().rss

before = encode(10)
print(encode(10_000) - before)
"""


def test_words_that_nobody_says_again_leave_little_in_memory(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 1000)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path], capture_output=True, text=True, check=True
    )
    assert int(ended.stdout) < 40 * 2**20


END = "<|im_end|>"


@pytest.mark.parametrize(
    ("contents", "text"),
    [
        ((END,), f"a{END}{END}b"),
        ((END,), f"<|im{END}_end|>"),
        (("aa",), "aaaaa"),
        (("ab", "ba"), "aba"),
        (("abc", "bc"), "abcbc"),
        ((END,), f"{MARK}{END}{MARK}{MARK}{ESCAPE}{MARK}"),
        ((END, "x"), "xxx"),
        ((), END),
    ],
)
def test_no_piece_of_a_text_spells_a_token_and_all_of_them_are_the_text(
    contents: tuple[str, ...], text: str
) -> None:
    pieces = pieces_of(SpecialTokens(contents).guarded_text(text))
    assert "".join(pieces) == text
    # One of a single character cannot be cut.
    assert not [one for piece in pieces for one in contents if len(one) > 1 and one in piece]


def test_a_text_without_any_is_one_piece() -> None:
    assert pieces_of(SpecialTokens((END,)).guarded_text("<|im_end")) == ["<|im_end"]


def test_all_texts_of_a_value_are_guarded() -> None:
    value = {END: [END, 1, None, True, {"a": END}]}
    guarded = f"<{MARK}|im_end|>"
    found = SpecialTokens((END,)).guarded(value)
    assert found == {guarded: [guarded, 1, None, True, {"a": guarded}]}
