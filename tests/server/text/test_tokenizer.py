import asyncio
import json
import shutil
from pathlib import Path

import pytest

from server.text.tokenizer import (
    TemplateError,
    Tokenizer,
    TokenizerError,
    common_chars,
    tokens_within,
)
from tests.models import write_tokenizer
from tests.server.harness import ids_of, token_id

HELLO = [{"role": "user", "content": "Hello"}]
START = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, 1000)
    return tmp_path


def change(folder: Path, **settings: object) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


async def test_a_conversation_becomes_the_prompt_of_the_models_template(
    tokenizer: Tokenizer,
) -> None:
    found = await tokenizer.encode_chat(HELLO, None)
    assert found.text == START
    assert tokenizer.fast.decode(list(found.ids), skip_special_tokens=False) == START


@pytest.mark.parametrize(
    ("enable_thinking", "ending"),
    [(None, ""), (True, ""), (False, "<think>\n\n</think>\n\n")],
)
async def test_thinking_is_switched_by_the_template(
    tokenizer: Tokenizer, enable_thinking: bool | None, ending: str
) -> None:
    found = await tokenizer.encode_chat(HELLO, enable_thinking)
    assert found.text == START + ending


# --- what the system messages take -----------------------------------------------------------


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


@pytest.mark.parametrize("text", ["Be brief.", "", "naïve 😀", "a</think>b", "<|im_end|>\n"])
async def test_the_tokens_of_the_system_message_are_those_of_its_part_of_the_prompt(
    tokenizer: Tokenizer, text: str
) -> None:
    head = f"<|im_start|>system\n{text}<|im_end|>\n"
    for ending in ([], HELLO, [*HELLO, system("Later.")]):
        found = await tokenizer.encode_chat([system(text), *ending], None)
        assert found.ids[: found.system_tokens] == await tokenizer.encode(head)


async def test_conversations_with_one_system_message_begin_with_its_tokens(
    tokenizer: Tokenizer,
) -> None:
    one = await tokenizer.encode_chat([system("Be brief."), *HELLO], None)
    other = await tokenizer.encode_chat([system("Be brief."), system("Not."), *HELLO], None)
    assert one.ids[: one.system_tokens] == other.ids[: one.system_tokens]
    assert one.system_tokens < other.system_tokens < len(other.ids)


@pytest.mark.parametrize("messages", [HELLO, [*HELLO, system("Too late.")]])
async def test_a_conversation_that_begins_with_a_user_has_no_system_tokens(
    tokenizer: Tokenizer, messages: list[dict[str, str]]
) -> None:
    assert (await tokenizer.encode_chat(messages, None)).system_tokens == 0


WANTS_A_USER = (
    "{% for m in messages if m.role == 'user' %}{% set ns = m %}{% else %}"
    "{{ raise_exception('no user') }}{% endfor %}{{ messages[0].content }}|"
)
SAYS_THE_LENGTH = "{{ messages | length }}{{ messages[0].content }}"


@pytest.mark.parametrize("template", [WANTS_A_USER, SAYS_THE_LENGTH])
async def test_a_template_that_tells_nothing_about_system_messages_alone_gives_none(
    folder: Path, template: str
) -> None:
    change(folder, chat_template=template)
    found = await Tokenizer(folder).encode_chat([system("Be brief."), *HELLO], None)
    assert found.system_tokens == 0
    assert "Be brief." in found.text


async def test_the_switches_of_the_template_are_those_of_the_prompt(folder: Path) -> None:
    change(
        folder,
        chat_template="{% if not enable_thinking %}/no_think {% endif %}"
        "{% for m in messages %}{{ m.content }}|{% endfor %}",
    )
    found = await Tokenizer(folder).encode_chat([system("Be brief."), *HELLO], False)
    assert found.system_tokens == len("/no_think Be brief.|")


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [("", "", 0), ("", "a", 0), ("ab", "abc", 2), ("abc", "abd", 2), ("é😀x", "é😀y", 2)],
)
def test_texts_are_compared_by_characters(one: str, other: str, common: int) -> None:
    assert common_chars(one, other) == common_chars(other, one) == common


def test_a_token_counts_when_it_ends_within_the_characters(tokenizer: Tokenizer) -> None:
    encoding = tokenizer.fast.encode_batch(["é<think>a"], add_special_tokens=False)[0]
    # Two bytes of one character, a token of seven characters, a letter.
    assert [tokens_within(encoding, chars) for chars in (0, 1, 2, 7, 8, 9)] == [0, 2, 2, 2, 3, 4]


def test_padding_is_no_part_of_a_text(folder: Path) -> None:
    fast = Tokenizer(folder).fast
    fast.enable_padding(length=10)
    encoding = fast.encode_batch(["ab"], add_special_tokens=False)[0]
    assert [tokens_within(encoding, chars) for chars in (1, 2, 99)] == [1, 2, 2]


async def test_special_tokens_of_a_text_are_recognised_and_none_are_added(
    tokenizer: Tokenizer,
) -> None:
    (special,) = await tokenizer.encode("<|im_start|>")
    assert special in tokenizer.special_ids
    assert len(await tokenizer.encode("ab")) == 2
    assert await tokenizer.encode("") == ()


async def test_the_event_loop_goes_on_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    beats = 0
    encoding = asyncio.ensure_future(tokenizer.encode("some words, more words, " * 15_000))
    while not encoding.done():
        await asyncio.sleep(0.001)
        beats += 1
    assert len(await encoding) == 24 * 15_000
    # Encoding on the loop, or while holding the interpreter, leaves one or two.
    assert beats > 10


async def test_a_template_that_fails_is_the_conversations_fault(folder: Path) -> None:
    change(folder, chat_template="{{ raise_exception('no') }}")
    with pytest.raises(TemplateError, match="cannot render these messages"):
        await Tokenizer(folder).encode_chat(HELLO, None)


def test_a_tokenizer_without_a_template_says_so(folder: Path, tokenizer: Tokenizer) -> None:
    change(folder, chat_template=None)
    assert not Tokenizer(folder).has_template
    assert tokenizer.has_template


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


def test_the_longest_token_bounds_what_a_text_can_hold(tokenizer: Tokenizer) -> None:
    assert tokenizer.longest_token_bytes == len(b"<|endoftext|>")


def test_the_end_of_a_turn_is_known(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_id == token_id(tokenizer, "<|im_end|>")


@pytest.mark.parametrize("content", ["{", '{"model": {}}', "[]"])
def test_a_tokenizer_that_cannot_be_read_names_its_folder(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=str(folder)):
        Tokenizer(folder)


def test_a_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(TokenizerError, match=str(folder)):
        Tokenizer(folder)


def test_a_tokenizer_without_its_fast_form_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=str(folder)):
        Tokenizer(folder)


def test_a_tokenizer_that_is_only_python_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    change(folder, tokenizer_class="ByT5Tokenizer", chat_template=None)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: the file does not exist"):
        Tokenizer(folder)
