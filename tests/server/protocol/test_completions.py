import json
from typing import Any

import pytest
from pydantic import ValidationError

from server.config import LimitsSection
from server.protocol.completions import CompletionRequest
from server.protocol.errors import ApiError, from_validation


def request(**given: Any) -> CompletionRequest:
    return CompletionRequest.model_validate_json(json.dumps({"prompt": "Hello"} | given))


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["Hello"]}, "prompt"),
        ({"prompt": [[1]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"echo": 1}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
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
        {"logprobs": 5, "echo": False, "suffix": "", "best_of": 1},
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
