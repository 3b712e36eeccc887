import json
from typing import Any

import pytest
from pydantic import ValidationError

from server.config import LimitsSection
from server.protocol.completions.request import CompletionRequest
from server.protocol.wire_errors import ApiError, from_validation


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
