"""However an answer is cut into steps, its text is the same, whole, and free of stop strings."""

import asyncio
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine.types import FinishReason, TokenEvent
from server.text.conversation import THINK_CLOSE as CLOSE
from server.text.conversation import THINK_OPEN as OPEN
from server.text.conversation import Channel
from server.text.pieces import AnswerPiece, Delta, TextPiece, join_pieces
from server.text.pipeline import ParseOptions, TextPipeline
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.models import write_sentencepiece_tokenizer, write_tokenizer
from tests.server.harness import decoded, ids_of
from tests.server.streams import prepared, said, token
from tests.server.text.calling import PARAMS, deltas_of, pieces_of

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
PLAIN = "<|im_start|>assistant\n"
OPENED = PLAIN + f"{OPEN}\n"
CLOSED = PLAIN + f"{OPEN}\n\n{CLOSE}\n\n"
EXAMPLES = settings(max_examples=200)

# No surrogates: no text has them.
characters = st.characters(codec="utf-8", exclude_characters=REPLACEMENT)
texts = st.text(st.one_of(st.sampled_from("aé€😀 \n"), characters), max_size=40)
spellings = [" the", "▁", "é", "😀", "<|im_end|>", "<think>", "<0x0A>", "  "]
words = st.lists(st.one_of(st.sampled_from(spellings), characters), max_size=20).map("".join)
# Few letters, so that stop strings overlap with the text, with each other and with themselves.
letters = st.text("abc", max_size=30)
stops = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)
fragments = [
    OPEN,
    CLOSE,
    "<",
    "</",
    "think",
    ">",
    "</thi",
    " ",
    "\n",
    "\N{NO-BREAK SPACE}",
    "a",
    "é",
]
answers = st.lists(st.sampled_from(fragments), max_size=20).map("".join)
cuts = st.lists(st.integers(0, 60), max_size=12)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, VOCAB)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    pairs = {}
    for kind in ("Llama 2", "Gemma"):
        folder = tmp_path_factory.mktemp("tokenizer")
        write_sentencepiece_tokenizer(folder, leading_space=kind == "Llama 2")
        pairs[kind] = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    return pairs


def cut(text: str, places: list[int]) -> list[str]:
    """Cut the text into pieces, some of them empty."""
    ends = sorted(min(place, len(text)) for place in places)
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def texts_in(deltas: list[Delta]) -> list[str]:
    return ["".join(p.text for p in d.pieces if isinstance(p, TextPiece)) for d in deltas]


def texts_of(
    tokenizer: Tokenizer, ids: list[int], options: ParseOptions | None = None
) -> list[str]:
    """The new text of each token, and what comes with the end."""
    pipeline = TextPipeline(tokenizer, PARAMS, (), options)
    return texts_in([*(pipeline.feed([token(each)]) for each in ids), pipeline.finish()])


# --- characters ------------------------------------------------------------------------------


@given(ids=st.lists(st.integers(0, VOCAB + 5), max_size=60))
@EXAMPLES
def test_fault_14_any_tokens_one_by_one_are_the_text_of_all_at_once(
    tokenizer: Tokenizer, ids: list[int]
) -> None:
    texts = texts_of(tokenizer, ids)
    assert "".join(texts) == decoded(tokenizer, ids)
    for text in texts:
        text.encode()  # half of a surrogate pair could not be


@given(text=texts)
@EXAMPLES
def test_fault_14_no_broken_character_is_ever_sent(tokenizer: Tokenizer, text: str) -> None:
    *sent, last = texts_of(tokenizer, ids_of(tokenizer, text))
    assert ("".join(sent), last) == (text, "")
    assert not any(REPLACEMENT in piece for piece in sent)


@given(text=words, kind=st.sampled_from(["Llama 2", "Gemma"]), start=st.integers(0, 20))
@EXAMPLES
def test_fault_14_a_sentencepiece_text_one_by_one_is_what_transformers_decode(
    sentencepiece: dict[str, tuple[Tokenizer, Any]], text: str, kind: str, start: int
) -> None:
    tokenizer, theirs = sentencepiece[kind]
    ids = ids_of(tokenizer, text)
    # An answer begins with any character, and with a space that is none of its own.
    while ids[start:] and 0x80 <= tokenizer.token_bytes(ids[start])[0] < 0xC0:
        start += 1
    found = "".join(texts_of(tokenizer, ids[start:], ParseOptions(CLOSED)))
    assert found == theirs.decode(ids[start:], skip_special_tokens=True)


# --- stop strings ----------------------------------------------------------------------------


def before_the_first_stop(text: str, stops: tuple[str, ...]) -> str | None:
    """Return the text before the stop string that is complete first; None without any."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return None


@given(text=letters, stops=stops, places=cuts)
@EXAMPLES
def test_fault_15_the_text_before_the_first_stop_string_is_sent_and_no_part_of_it(
    text: str, stops: tuple[str, ...], places: list[int]
) -> None:
    wanted = before_the_first_stop(text, stops)
    deltas = deltas_of(cut(text, places), stop=stops)
    sent = "".join(texts_in(deltas))
    if wanted is None:
        assert (sent, deltas[-1].stop_string) == (text, None)
    else:
        assert sent == wanted
        assert deltas[-1].stop_string in stops


@given(text=letters, stops=stops)
@EXAMPLES
def test_no_more_is_held_back_than_may_begin_a_stop_string(
    text: str, stops: tuple[str, ...]
) -> None:
    sent = ""
    for end, delta in enumerate(deltas_of(text, stop=stops)[: len(text)], start=1):
        if delta.finish is not None:
            return
        sent += "".join(texts_in([delta]))
        held = text[len(sent) : end]
        assert not held or any(other.startswith(held) for other in stops)


# --- thoughts --------------------------------------------------------------------------------


def split_at_once(prompt: str, text: str) -> list[TextPiece]:
    """Split thoughts and answer by a pattern of the whole text."""
    pattern = {
        PLAIN: rf"\s*{OPEN}(?P<thought>.*?)(?:{CLOSE}(?P<answer>.*))?",
        OPENED: rf"(?P<thought>.*?)(?:{CLOSE}(?P<answer>.*))?",
    }.get(prompt)
    found = pattern and re.fullmatch(pattern, text, re.DOTALL)
    if not found:
        return [TextPiece(Channel.CONTENT, text)] if text else []
    thought, answer = found["thought"].strip(), (found["answer"] or "").lstrip()
    parts = [(Channel.REASONING, thought), (Channel.CONTENT, answer)]
    return [TextPiece(channel, text) for channel, text in parts if text]


@given(prompt=st.sampled_from([PLAIN, OPENED, CLOSED]), text=answers, places=cuts)
@EXAMPLES
def test_thoughts_are_split_off_wherever_the_text_is_cut(
    prompt: str, text: str, places: list[int]
) -> None:
    deltas = deltas_of(cut(text, places), ParseOptions(prompt))
    assert pieces_of(deltas) == [*split_at_once(prompt, text)]


# --- all of them -----------------------------------------------------------------------------


async def sent_in_steps(
    tokenizer: Tokenizer, steps: list[list[TokenEvent]], stops: tuple[str, ...], chat: str | None
) -> tuple[list[AnswerPiece], str | None, int]:
    """Return all pieces of an answer, its end, and how many of its tokens were taken."""
    choices, _ = prepared(tokenizer, steps, stop=stops, chat=chat)
    deltas = [delta async for step in choices.steps(1.0) for delta in step]
    pieces = join_pieces([piece for delta in deltas for piece in delta.pieces])
    return pieces, deltas[-1].finish, choices.usage.completion_tokens


@given(
    text=st.lists(st.sampled_from([*fragments, "😀", "abc"]), min_size=1, max_size=20).map("".join),
    stops=st.lists(st.sampled_from(["abc", "ca", "é", "😀a", CLOSE, "\n"]), max_size=3).map(tuple),
    chat=st.sampled_from([None, PLAIN, OPENED, CLOSED]),
    places=cuts,
)
@EXAMPLES
def test_an_answer_is_the_same_however_its_tokens_come_in_steps(
    tokenizer: Tokenizer, text: str, stops: tuple[str, ...], chat: str | None, places: list[int]
) -> None:
    events = said(tokenizer, text, FinishReason.LENGTH)
    ends = sorted({min(place, len(events) - 1) for place in places})
    steps = [events[a:b] for a, b in zip([0, *ends], [*ends, len(events)], strict=True)]
    pieces, finish, taken = asyncio.run(sent_in_steps(tokenizer, steps, stops, chat))
    assert (pieces, finish, taken) == asyncio.run(sent_in_steps(tokenizer, [events], stops, chat))
    *thoughts, last = split_at_once(chat or CLOSED, text) or [TextPiece(Channel.CONTENT, "")]
    content = last.text if last.channel is Channel.CONTENT else ""
    wanted = before_the_first_stop(content, stops)
    if wanted is not None:
        last = replace(last, text=wanted)
    assert pieces == [*thoughts, *([last] if last.text else [])]
    assert finish == ("length" if wanted is None else "stop")
