"""What comes out of the pipeline for answers in Harmony, however their tokens are cut and come."""

import json
import re
from pathlib import Path
from random import Random
from typing import cast

import pytest

from engine.types import FinishReason, SamplingParams, TokenEvent, TokenLogprobs
from server.text.calls.tool_format import ToolFormat
from server.text.conversation import Channel, Tool
from server.text.harmony import ANSWER_ENDS, SIGNS, TOKENS
from server.text.pieces import AnswerPiece, Delta, TextPiece, ToolCallArguments, ToolCallStart
from server.text.pipeline import ParseOptions, TextPipeline
from server.text.tokenizer import Tokenizer
from tests.models import SPECIAL_TOKENS, write_tokenizer
from tests.server.text.calling import SpelledTokens, call, joined, pieces_of, said, thought
from tests.templates import HARMONY_TEMPLATE

TOOLS = (Tool("look"), Tool("python"))
PROMPT = "<|start|>assistant"
TOKEN = re.compile("(" + "|".join(map(re.escape, TOKENS)) + ")")
THINKS = "<|channel|>analysis<|message|>Hm ÷ 東.<|end|>"
NEXT = "<|start|>assistant"
CALLS = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
HEADERS = {
    "<|channel|>analysis": Channel.REASONING,
    "<|channel|>analysis to=browser.search code": Channel.REASONING,
    "<|channel|>commentary to=functions.write json": Channel.REASONING,
    "<|channel|>commentary": Channel.CONTENT,
    "<|channel|>final": Channel.CONTENT,
    "<|channel|>final <|constrain|>json": Channel.CONTENT,
    CALLS.removesuffix("<|message|>"): None,
    " to=functions.look<|channel|>commentary json": None,
}
"""The channel of each header's message, or None for a call's."""
WORDS = ("Hm ÷ 東. ", "日本 😀", "<|", "|>", "assistant", "analysis", " to=functions.look")
LEAKS = re.compile("[\ud800-\udfff]|assistant|analysis|commentary|final|functions|json")


def cut_at(text: str, rng: Random, most: int) -> list[bytes]:
    """A text as bytes of tokens: Harmony's in whole, all else in pieces of up to ``most`` bytes."""
    parts = list[bytes]()
    for piece in TOKEN.split(text):
        rest = piece.encode()
        while rest:
            size = len(rest) if piece in SIGNS else rng.randint(1, most)
            parts.append(rest[:size])
            rest = rest[size:]
    return parts


def deltas_of(
    text: str | list[bytes],
    *,
    tools: tuple[Tool, ...] = TOOLS,
    prompt: str = PROMPT,
    begun: str = "",
    stop: tuple[str, ...] = (),
    max_calls: int | None = None,
    finish: FinishReason = FinishReason.STOP,
    ends: bool = True,
    rng: Random | None = None,
    most: int = 3,
    logprobs: TokenLogprobs | None = None,
) -> list[Delta]:
    """What comes of an answer, or of the bytes of its tokens. ends: whether tokens that end answers
    are stop tokens."""
    rng = rng or Random(0)
    parts = cut_at(text, rng, most) if isinstance(text, str) else text
    tokenizer = SpelledTokens(parts)
    stops = {n for n, part in enumerate(parts) if part.decode(errors="replace") in ANSWER_ENDS}
    params = SamplingParams(max_tokens=1000, stop_token_ids=frozenset(stops if ends else ()))
    options = ParseOptions(prompt, tools, ToolFormat.HARMONY, max_calls, begun=begun)
    pipeline = TextPipeline(cast(Tokenizer, tokenizer), params, stop, options)
    last = len(parts) - 1
    events = [TokenEvent(1, n, finish if n == last else None, logprobs) for n in range(len(parts))]
    deltas = list[Delta]()
    while events and not pipeline.finished:
        some = rng.randint(1, 3)
        deltas.append(pipeline.feed(events[:some]))
        events = events[some:]
    return deltas


def test_in_a_thousand_random_answers_and_splits_no_header_becomes_text() -> None:
    rng = Random(7)
    for _ in range(1000):
        text, pieces, calls = "", list[AnswerPiece](), 0
        for header in rng.choices([*HEADERS], k=rng.randint(1, 5)):
            channel, body = HEADERS[header], "".join(rng.choices(WORDS, k=rng.randint(1, 6)))
            if channel is None:
                body = json.dumps({"at": body}, ensure_ascii=False)
                pieces += call(calls, "look", body)
                calls += 1
            else:
                before = [piece.channel for piece in pieces if isinstance(piece, TextPiece)]
                pieces.append(TextPiece(channel, "\n\n" * (channel in before) + body))
            text += f"{NEXT if text else ''}{header}<|message|>{body}<|end|>"
        deltas = deltas_of(text, rng=rng, most=rng.choice((1, 2, 5, 40)))
        assert pieces_of(deltas) == joined(pieces)
        assert deltas[-1].finish == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_wherever_an_answer_ends_nothing_of_a_header_is_told(finish: FinishReason) -> None:
    text = f"{THINKS}{NEXT}{CALLS}" + '{"at": "b"}<|end|>'
    text += f"{NEXT}<|channel|>final<|message|>Yes.<|return|>"
    parts = cut_at(text, Random(0), 1)
    for length in range(1, len(parts)):
        beginning = b"".join(parts[:length]).decode(errors="replace")
        pieces = pieces_of(deltas_of(beginning, finish=finish, most=1))
        texts = [piece.text for piece in pieces if not isinstance(piece, ToolCallStart)]
        assert not LEAKS.search("".join(texts).replace("\ufffd", ""))


@pytest.mark.parametrize(
    ("header", "pieces"),
    [
        # Models write these forms, which the format does not have.
        ("<|channel|>commentary to=functions.look<|constrain|>json", call(0, "look", "{}")),
        ("<|channel|>analysis to=functions.look code", call(0, "look", "{}")),
        ("<|channel|>commentary<|channel|>commentary to=look json", call(0, "look", "{}")),
        ("<|channel|>commentary to=functions.look<|channel|>commentary", call(0, "look", "{}")),
        (" to=functions.look<|channel|>commentary <|constrain|>json", call(0, "look", "{}")),
        (" to=functions.look", call(0, "look", "{}")),
        (" to=python code", call(0, "python", "{}")),
        ("<|channel|>commentary to=functions.python ", call(0, "python", "{}")),
        # The request has no such tools. A tool's result is not part of the answer.
        ("<|channel|>commentary to=functions.write json", [thought("{}")]),
        ("<|channel|>analysis to=browser.search code", [thought("{}")]),
        ("<|end|><|start|>functions.look to=assistant<|channel|>commentary", [thought("{}")]),
        ("<|end|><|start|>user", [thought("{}")]),
        # Channels that do not exist, or are misspelled.
        ("<|channel|>??", [thought("{}")]),
        ("<|channel|>We need to look", [thought("{}")]),
        ("<|channel|>commentary 2?", [said("{}")]),
        ("<|channel|>——commentary", [said("{}")]),
        ("<|channel|>analysis<|channel|>final", [thought("{}")]),
        ("<|channel|> final", [said("{}")]),
        ("<|channel|>final <|constrain|>json", [said("{}")]),
        ("", [said("{}")]),
        ("assistant", [said("{}")]),
        # What is written before a header is lost.
        ("Hello<|start|>assistant<|channel|>final", [said("{}")]),
        ("<|end|><|channel|>final", [said("{}")]),
        ("x" * 5000 + "<|channel|>final", [said("{}")]),
    ],
)
def test_any_header_has_a_meaning(header: str, pieces: list[AnswerPiece]) -> None:
    deltas = deltas_of(f"{header}<|message|>{{}}<|return|>", most=40)
    assert pieces_of(deltas) == pieces
    assert deltas[-1].finish == ("stop" if len(pieces) == 1 else "tool_calls")


def test_without_tools_nothing_is_a_call() -> None:
    deltas = deltas_of(f"{CALLS}{{}}<|call|>", tools=())
    assert (pieces_of(deltas), deltas[-1].finish) == ([thought("{}")], "stop")


def test_a_text_that_spells_tokens_is_a_text() -> None:
    spelled = "".join(TOKENS)
    letters = [bytes([byte]) for byte in spelled.encode()]
    deltas = deltas_of([b"<|channel|>", b"final", b"<|message|>", *letters])
    assert pieces_of(deltas) == [said(spelled)]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (f"{THINKS}{NEXT}{THINKS}", [thought("Hm ÷ 東.\n\nHm ÷ 東.")]),
        (
            f"<|channel|>commentary<|message|>One.<|end|>{NEXT}{THINKS}"
            f"{NEXT}<|channel|>final<|message|>Two.<|end|>",
            [said("One."), thought("Hm ÷ 東."), said("\n\nTwo.")],
        ),
        (f"<|channel|>final<|message|><|end|>{NEXT}{THINKS}", [thought("Hm ÷ 東.")]),
        ("<|channel|>final<|message|>One.<|channel|>analysis<|message|>Two.", [
            said("One."), thought("Two."),
        ]),
        ("<|channel|>final<|message|>O<|message|>n<|constrain|>e.", [said("One.")]),
    ],
)  # fmt: skip
def test_messages_are_kept_apart(text: str, pieces: list[AnswerPiece]) -> None:
    assert pieces_of(deltas_of(text)) == pieces


@pytest.mark.parametrize(
    ("body", "told", "when_cut"),
    [
        ("", "{}", ""),
        (" \n", "{}", ""),
        (' {"at": "a"} \n', '{"at": "a"}', '{"at": "a"}'),
        ('{"at": "a\n', '{"at": "a\\n"}', '{"at": "a\\n'),
        ('{"at": tru', '{"at": "tru"}', '{"at": tru'),
        ('{"at": 1}, {"at": 2}', '{"at": 1}', '{"at": 1}'),
        ("print(1)", "print(1)", "print(1)"),
        ("[1]", "[1]", "[1]"),
    ],
)
def test_arguments_are_repaired_as_others_are(body: str, told: str, when_cut: str) -> None:
    whole = told == when_cut and told.startswith("{")
    for end, finish, text, reason in (
        ("<|call|>", FinishReason.STOP, told, "tool_calls"),
        ("", FinishReason.STOP, told, "tool_calls" if whole else "stop"),
        ("", FinishReason.LENGTH, when_cut, "length"),
    ):
        deltas = deltas_of(CALLS + body + end, finish=finish)
        assert pieces_of(deltas) == call(0, "look", text)
        assert deltas[-1].finish == reason


def test_arguments_come_as_the_model_writes_them() -> None:
    deltas = deltas_of(f'{CALLS}{{"at": "abc"}}<|call|>', most=1)
    told = [p.text for d in deltas for p in d.pieces if isinstance(p, ToolCallArguments)]
    assert len(told) > 4


@pytest.mark.parametrize(("most", "names"), [(None, ["look", "python"]), (1, ["look"])])
def test_an_answer_may_go_on_behind_a_call_and_ends_with_the_last_that_is_allowed(
    most: int | None, names: list[str]
) -> None:
    text = f"{CALLS}{{}}<|call|>{NEXT} to=python<|message|>{{}}<|call|>"
    deltas = deltas_of(text, max_calls=most, ends=False)
    found = [piece.name for piece in pieces_of(deltas) if isinstance(piece, ToolCallStart)]
    assert (found, deltas[-1].finish) == (names, "tool_calls")


def test_a_call_that_is_cut_off_behind_another_is_none() -> None:
    text = f"{CALLS}{{}}<|call|>{NEXT}{CALLS}" + '{"at": '
    deltas = deltas_of(text, ends=False, finish=FinishReason.LENGTH)
    assert deltas[-1].finish == "length"
    assert pieces_of(deltas) == [*call(0, "look", "{}"), *call(1, "look", '{"at": ')]


@pytest.mark.parametrize(
    ("opening", "begun", "pieces"),
    [
        ("<|channel|>final<|message|>", "On", [said("Yes.")]),
        ("<|channel|>analysis<|message|>", "", [thought("Yes.")]),
    ],
)
def test_an_answer_goes_on_in_the_message_that_the_prompt_opens(
    opening: str, begun: str, pieces: list[AnswerPiece]
) -> None:
    deltas = deltas_of("Yes.<|return|>", prompt=PROMPT + opening, begun=begun)
    assert pieces_of(deltas) == pieces


def test_a_stop_string_counts_in_what_people_read() -> None:
    text = f"<|channel|>analysis<|message|>STOP<|end|>{NEXT}<|channel|>final<|message|>Yes STOP no"
    deltas = deltas_of(text, stop=("STOP",))
    assert pieces_of(deltas) == [thought("STOP"), said("Yes ")]
    assert (deltas[-1].stop_string, deltas[-1].finish) == ("STOP", "stop")


def test_tokens_of_headers_have_no_probabilities() -> None:
    text = f"{THINKS}{NEXT}<|channel|>final<|message|>Yes.<|end|>{NEXT}<|channel|>final<|message|>"
    deltas = deltas_of(f"{text}Two", most=1, logprobs=TokenLogprobs(-1.0, ()))
    reported = [report for delta in deltas for report in delta.tokens]
    assert len(reported) == len("Hm ÷ 東.".encode()) + len("Yes.Two")
    pieces = [piece for piece in pieces_of(deltas) if isinstance(piece, TextPiece)]
    assert [(piece.channel, len(piece.tokens)) for piece in pieces] == [
        (Channel.REASONING, 0), (Channel.CONTENT, len("Yes.Two")),
    ]  # fmt: skip


def test_a_character_that_a_message_leaves_unfinished_is_replaced() -> None:
    final, beginning = [b"<|channel|>", b"final", b"<|message|>"], "é".encode()[:1]
    assert pieces_of(deltas_of([*final, beginning, b"<|end|>"])) == [said("\ufffd")]
    assert pieces_of(deltas_of([*final, beginning, b"<|end|>", *final, b"x"])) == [
        said("\ufffd\n\nx")
    ]


def test_a_models_tokenizer_tells_the_tokens_and_which_of_them_end_an_answer(
    tmp_path: Path,
) -> None:
    write_tokenizer(tmp_path, 400, template=HARMONY_TEMPLATE, special=(*SPECIAL_TOKENS, *TOKENS))
    tokenizer = Tokenizer(tmp_path)
    assert [*tokenizer.signs.values()] == [*SIGNS.values()]
    ends = {tokenizer.fast.id_to_token(number) for number in tokenizer.answer_end_ids}
    assert ends == set(ANSWER_ENDS)
    write_tokenizer(tmp_path, 400, special=(*SPECIAL_TOKENS, *TOKENS))
    assert Tokenizer(tmp_path).answer_end_ids == frozenset()
