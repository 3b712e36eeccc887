import json
from typing import Any

import pytest
from pydantic import ValidationError

from engine.types import TokenLogprobs
from server.config import LimitsSection
from server.protocol.completions import CompletionRequest, Echo, TextAnswer
from server.protocol.wire_errors import ApiError, from_validation
from server.text.pieces import Delta
from server.text.tokenizer import EncodedText
from tests.server.protocol.finished import USAGE, report, text_answer
from tests.server.text.calling import said

PROMPTS = (EncodedText("abc", (0, 3), (0, 1)), EncodedText("é", (1, 2), (0, 0)))
SCORES = (None, TokenLogprobs(-3.0, ((0, -0.5),)))


def answered(answer: TextAnswer, deltas: list[Delta], streamed: bool) -> dict[int, dict[str, Any]]:
    """The choices by their index, put together from chunks or whole."""
    if not streamed:
        for delta in deltas:
            answer.add(delta)
        choices = answer.whole(USAGE)["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        return {choice["index"]: choice for choice in choices}
    found: dict[int, dict[str, Any]] = {}
    for chunk in (chunk for delta in deltas for chunk in answer.chunks(delta)):
        (choice,) = chunk["choices"]
        seen = found.setdefault(choice["index"], choice)
        if seen is not choice:
            assert seen["finish_reason"] is None
            seen["text"] += choice["text"]
            seen["finish_reason"] = choice["finish_reason"]
            more = choice["logprobs"] or {}
            seen["logprobs"] = seen["logprobs"] or {name: [] for name in more} or None
            for name in more:
                seen["logprobs"][name] += more[name]
    return found


@pytest.mark.parametrize("streamed", [True, False])
def test_the_answers_to_several_prompts_are_numbered_prompt_by_prompt(streamed: bool) -> None:
    deltas = [
        Delta([said("a")], index=3, finish="stop"),
        Delta([said("b")], index=0, finish="length"),
        Delta([], index=2, finish="length"),
        Delta([said("c")], index=1),
        Delta([said("d")], index=1, finish="stop"),
    ]
    found = answered(text_answer(prompts=2, choices=2), deltas, streamed)
    assert [found[index]["text"] for index in range(4)] == ["b", "cd", "", "a"]
    finishes = [found[index]["finish_reason"] for index in range(4)]
    assert finishes == ["length", "stop", "length", "stop"]


def test_a_text_has_no_first_chunk_and_says_why_it_ended_with_its_last_text() -> None:
    answer = text_answer()
    assert answer.first_chunks() == []
    (chunk,) = answer.chunks(Delta([said("a"), said("b")], finish="stop"))
    assert chunk["choices"] == [
        {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop"}
    ]


@pytest.mark.parametrize("streamed", [True, False])
def test_log_probabilities_of_a_text_are_parallel_lists(streamed: bool) -> None:
    deltas = [
        Delta([said("abc")], [report(0, -0.5, (3, -0.1)), report(3, -1.0, (3, -1.0), offset=1)]),
        Delta([], []),
        Delta([said("a")], [report(0, -2.0, offset=3)], finish="length"),
    ]
    found = answered(text_answer(), deltas, streamed)[0]
    assert (found["text"], found["finish_reason"]) == ("abca", "length")
    assert found["logprobs"] == {
        "tokens": ["a", "bc", "a"],
        "token_logprobs": [-0.5, -1.0, -2.0],
        "top_logprobs": [{"bc": -0.1, "a": -0.5}, {"bc": -1.0}, {"a": -2.0}],
        "text_offset": [0, 1, 3],
    }


def test_of_tokens_with_the_same_text_the_likeliest_is_told() -> None:
    answer = text_answer()
    (chunk,) = answer.chunks(Delta([], [report(2, -3.0, (1, -1.0), (0, -2.0))]))
    lists = chunk["choices"][0]["logprobs"]
    assert lists["token_logprobs"] == [-3.0]
    assert lists["top_logprobs"] == [{"\N{REPLACEMENT CHARACTER}": -1.0, "a": -2.0}]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("logprobs", [True, False])
def test_a_prompt_stands_before_each_of_its_answers(streamed: bool, logprobs: bool) -> None:
    answer = text_answer(prompts=2, choices=2, echo=Echo(PROMPTS, logprobs))
    deltas = [
        Delta([said("x")], [report(0, -1.0)] * logprobs, index=index, prompt=SCORES)
        for index in (2, 0, 3, 1)
    ]
    deltas += [
        Delta([said("y")], [report(3, -2.0, offset=1)] * logprobs, "length", index)
        for index in range(4)
    ]
    found = answered(answer, deltas, streamed)
    assert [found[index]["text"] for index in range(4)] == ["abcxy", "abcxy", "éxy", "éxy"]
    if not logprobs:
        assert all(choice["logprobs"] is None for choice in found.values())
        return
    assert found[0]["logprobs"] == found[1]["logprobs"]
    assert found[1]["logprobs"] == {
        "tokens": ["a", "bc", "a", "bc"],
        "token_logprobs": [None, -3.0, -1.0, -2.0],
        "top_logprobs": [None, {"a": -0.5, "bc": -3.0}, {"a": -1.0}, {"bc": -2.0}],
        "text_offset": [0, 1, 3, 4],
    }
    assert found[3]["logprobs"]["text_offset"] == [0, 0, 1, 2]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("logprobs", [True, False])
def test_a_prompt_may_be_all_of_the_answer(streamed: bool, logprobs: bool) -> None:
    answer = text_answer(echo=Echo(PROMPTS[:1], logprobs))
    found = answered(answer, [Delta(finish="length", prompt=SCORES)], streamed)[0]
    assert (found["text"], found["finish_reason"]) == ("abc", "length")
    if logprobs:
        assert found["logprobs"]["token_logprobs"] == [None, -3.0]
    else:
        assert found["logprobs"] is None


def test_a_prompt_whose_tokens_were_not_scored_is_not_passed_off_as_scored() -> None:
    answer = text_answer(echo=Echo(PROMPTS[:1], True))
    with pytest.raises(ValueError, match="zip"):
        answer.chunks(Delta([said("x")]))


def test_a_whole_text_without_log_probabilities_has_none() -> None:
    answer = text_answer()
    answer.add(Delta([said("a")], finish="stop"))
    assert answer.whole(USAGE)["choices"][0]["logprobs"] is None


def request(**given: Any) -> CompletionRequest:
    return CompletionRequest.model_validate_json(json.dumps({"prompt": "Hello"} | given))


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": ["Hello", ""]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [None]}, "prompt[0]"),
        ({"prompt": ["Hello", 5]}, "prompt[1]"),
        ({"prompt": [[[1]]]}, "prompt[0][0]"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["x"] * (LimitsSection().max_prompts + 1)}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [2**31]}, "prompt[0]"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"n": LimitsSection().max_choices + 1}, "n"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_by_name(
    given: dict[str, Any], param: str
) -> None:
    with pytest.raises((ApiError, ValidationError)) as caught:
        request(**given).check(LimitsSection())
    error = caught.value
    refusal = from_validation(error) if isinstance(error, ValidationError) else error
    assert isinstance(refusal, ApiError)
    assert (refusal.status, refusal.param) == (400, param)


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": [0, 5]},
        {"prompt": ["x"] * LimitsSection().max_prompts},
        {"prompt": [[1], [2, 3]]},
        {"logprobs": 5, "echo": True, "suffix": "", "best_of": 1},
        {"n": 2, "best_of": 2},
        {name: None for name in CompletionRequest.model_fields if name != "prompt"},
    ],
)
def test_a_request_that_can_be_answered_is_let_pass(given: dict[str, Any]) -> None:
    request(**given).check(LimitsSection())


@pytest.mark.parametrize(("given", "length"), [({}, 16), ({"max_tokens": 5}, 5)])
def test_an_answer_has_openais_length_unless_one_is_named(
    given: dict[str, Any], length: int
) -> None:
    assert request(**given).asked_length == length


@pytest.mark.parametrize("prompt", [[None] * 9, ["x", *[1] * 9], [[1], *["x"] * 9], [[[]] * 9] * 9])
def test_a_prompt_that_is_none_is_left_at_its_first_fault(prompt: list[Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        request(prompt=prompt)
    assert caught.value.error_count() == 1


@pytest.mark.parametrize(
    ("prompt", "prompts", "places"),
    [
        ("Hello", ["Hello"], ["prompt"]),
        ([1, 2], [[1, 2]], ["prompt"]),
        (["Hello"], ["Hello"], ["prompt"]),
        (["a", "b"], ["a", "b"], ["prompt[0]", "prompt[1]"]),
        ([[1], [2, 3]], [[1], [2, 3]], ["prompt[0]", "prompt[1]"]),
    ],
)
def test_prompts_are_one_or_many(prompt: Any, prompts: list[Any], places: list[str]) -> None:
    wire = request(prompt=prompt)
    assert wire.prompts == prompts
    assert [wire.place(number) for number in range(len(prompts))] == places


@pytest.mark.parametrize(
    ("given", "alternatives"),
    [
        ({"logprobs": 3}, None),
        ({"max_tokens": 0}, None),
        ({"echo": True}, None),
        ({"echo": True, "logprobs": 3}, 3),
        ({"echo": True, "logprobs": 0, "max_tokens": 0}, 0),
        ({"echo": True, "max_tokens": 0}, 0),
    ],
)
def test_a_prompt_is_scored_where_it_is_echoed_with_log_probabilities_or_alone(
    given: dict[str, Any], alternatives: int | None
) -> None:
    assert request(**given).prompt_logprobs == alternatives
