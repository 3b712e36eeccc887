import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Regex, decoders, normalizers, processors
from tokenizers import Tokenizer as FastTokenizer

from server.text.conversation import Turn
from server.text.pipeline import decoded_text
from server.text.tokenizer import Tokenizer
from server.text.tokenizer_files import TokenizerError
from tests.models import (
    SPECIAL_TOKENS,
    write_embedding_model,
    write_sentencepiece_tokenizer,
    write_tokenizer,
)
from tests.server.harness import ids_of, talk, token_id


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, 1000)
    return tmp_path


def change(folder: Path, **settings: object) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize("text", ["Be brief.", "", "naïve 😀", "a</think>b", "<|im_end|>\n"])
async def test_the_tokens_of_the_system_message_are_those_of_its_part_of_the_prompt(
    tokenizer: Tokenizer, text: str
) -> None:
    head = f"<|im_start|>system\n{text}<|im_end|>\n"
    system, hello = Turn("system", text), Turn("user", "Hello")
    for ending in ((), (hello,), (hello, Turn("system", "Later."))):
        found = await tokenizer.encode_chat(talk(system, *ending))
        system_ids = list(found.ids[: found.boundaries.system_end])
        assert tokenizer.fast.decode(system_ids, skip_special_tokens=False) == head


@pytest.mark.parametrize("text", ["ab", "é<think>😀b", "w500 <|im_start|>", ""])
async def test_the_tokens_of_a_text_begin_where_those_of_their_decoding_do(
    tokenizer: Tokenizer, text: str
) -> None:
    encoded = await tokenizer.encode_text(text, offsets=True)
    assert encoded == decoded_text(tokenizer, encoded.ids)
    assert encoded == replace(await tokenizer.encode_text(text), offsets=encoded.offsets)


async def test_the_tokens_around_a_text_are_added_where_they_are_asked_for(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    end = token_id(tokenizer, "<|endoftext|>")
    tokenizer.fast.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
    )
    plain = await tokenizer.encode_text("ab")
    assert len(plain.ids) == 2
    assert (await tokenizer.encode_text("ab", add_special_tokens=True)).ids == (*plain.ids, end)


async def test_a_text_that_is_normalised_is_known_as_it_was_sent(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    tokenizer.fast.normalizer = normalizers.NFC()
    encoded = await tokenizer.encode_text("ae\N{COMBINING ACUTE ACCENT}b", offsets=True)
    assert encoded.ids == (await tokenizer.encode_text("aéb")).ids
    assert encoded.text == "ae\N{COMBINING ACUTE ACCENT}b"
    assert encoded.offsets == (0, 1, 1, 3)


async def test_texts_for_vectors_end_as_the_tokenizer_says_and_are_never_padded_or_cut(
    tmp_path: Path,
) -> None:
    file = write_embedding_model(tmp_path) / "tokenizer.json"
    loud = FastTokenizer.from_file(str(file))
    loud.enable_padding(length=10)
    loud.enable_truncation(5)
    loud.save(str(file))
    tokenizer = Tokenizer(tmp_path)
    end = token_id(tokenizer, "<|endoftext|>")
    texts = ["a", "abcdefgh"]
    short, long = await tokenizer.encode_texts(texts, 99, 99, ends=True)
    assert (len(short), len(long)) == (2, 9)
    assert short[-1] == long[-1] == end
    bare = await tokenizer.encode_texts(texts, 99, 99, ends=False)
    assert bare == [short[:-1], long[:-1]]
    assert len((await tokenizer.encode_text("abcdefgh")).ids) == 8


async def test_the_event_loop_goes_on_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    beats = 0
    encoding = asyncio.ensure_future(tokenizer.encode_text("some words, more words, " * 15_000))
    while not encoding.done():
        await asyncio.sleep(0.001)
        beats += 1
    assert len((await encoding).ids) == 24 * 15_000
    # Encoding on the loop, or while holding the interpreter, leaves one or two.
    assert beats > 10


def test_the_bytes_of_a_token_need_not_be_characters(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "é ")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"\xc3", b"\xa9", b" "]
    assert tokenizer.token_bytes(token_id(tokenizer, "<think>")) == b"<think>"
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_an_added_token_outside_of_the_byte_alphabet_is_its_own_text(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    token = content["added_tokens"][-1] | {"id": 1000, "content": "two words …"}
    content["added_tokens"].append(token)
    file.write_text(json.dumps(content))
    tokenizer = Tokenizer(folder)
    assert tokenizer.token_bytes(1000) == "two words …".encode()
    assert tokenizer.vocab_size == 1001


SIGNS = decoders.Replace("▁", " ")
DECODERS: list[decoders.Decoder] = [
    decoders.WordPiece(),
    decoders.BPEDecoder(),
    decoders.Metaspace(),
    decoders.Replace(Regex("[▁_]"), " "),
    decoders.Sequence([]),
    decoders.Sequence([decoders.Strip(" ", 1, 0), SIGNS]),
    decoders.Sequence([decoders.Fuse(), SIGNS]),
    decoders.Sequence([SIGNS, decoders.ByteLevel()]),
    decoders.Sequence([SIGNS, decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
    decoders.Sequence([SIGNS, decoders.Fuse(), decoders.Strip("_", 1, 0)]),
]


@pytest.mark.parametrize("decoder", [*DECODERS, None], ids=str)
def test_a_decoder_whose_tokens_have_no_bytes_of_their_own_is_refused(
    tmp_path: Path, decoder: decoders.Decoder | None
) -> None:
    write_sentencepiece_tokenizer(tmp_path)
    file = str(tmp_path / "tokenizer.json")
    fast = FastTokenizer.from_file(file)
    fast.decoder = decoder
    fast.save(file)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: the decoder is \[.*; quire serves"):
        Tokenizer(tmp_path)


def test_tags_that_are_special_are_known(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert not tokenizer.special_tag_ids
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    write_tokenizer(tmp_path, 1000, special=(*SPECIAL_TOKENS, *tags), plain=())
    strict = Tokenizer(tmp_path)
    assert strict.special_tag_ids == {token_id(strict, tag) for tag in tags}
    assert strict.special_tag_ids < strict.special_ids


def test_a_tokenizer_that_is_only_python_is_refused(folder: Path) -> None:
    change(folder, tokenizer_class="ByT5Tokenizer", chat_template=None)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json names another kind"):
        Tokenizer(folder)
