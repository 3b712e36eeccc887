import json
from typing import Any

import pytest
from pydantic import ValidationError

from engine.types import SamplingParams
from server.config import LimitsSection
from server.protocol.common import (
    MAX_CACHE_SALT_CHARS,
    MAX_LOGIT_BIASES,
    MAX_SEED,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_TOKEN_IDS,
    MIN_TEMPERATURE,
    MIN_TOP_P,
    OpenAISamplingFields,
    ResponseOptions,
)
from server.protocol.wire_errors import ApiError

LIMITS = LimitsSection()
VOCAB = 100


def fields(**given: Any) -> OpenAISamplingFields:
    return OpenAISamplingFields.model_validate_json(json.dumps(given))


def params(defaults: dict[str, Any] | None = None, **given: Any) -> SamplingParams:
    return fields(**given).sampling_params(
        max_tokens=7,
        logprobs=None,
        vocab_size=VOCAB,
        defaults=defaults or {},
        stop_token_ids=frozenset({3}),
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 11),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", True),
        ("max_tokens", -2),
        ("max_tokens", 2**31),
        ("max_tokens", 5.5),
        ("max_tokens", "5"),
        ("logit_bias", [1]),
        ("stop", 5),
        ("stop", ["a", None]),
        ("stream", "yes"),
        ("stream_options", True),
        ("stream_options", {"include_usage": 1}),
        ("model", 5),
        ("n", "1"),
        ("cache_salt", ""),
        ("cache_salt", "x" * (MAX_CACHE_SALT_CHARS + 1)),
        ("cache_salt", 5),
        ("cache_report", 1),
        ("min_tokens", -1),
        ("min_tokens", 1.5),
        ("ignore_eos", 1),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["5"]),
        ("stop_token_ids", 5),
        ("priority", 2**31),
        ("priority", -(2**31)),
        ("priority", "high"),
    ],
)
def test_a_value_of_the_wrong_type_or_size_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        fields(**{field: value})
    assert {problem["loc"][0] for problem in caught.value.errors()} == {field}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"n": LIMITS.max_choices + 1}, "n"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {}, "stream": False}, "stream_options"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": "x" * (MAX_STOP_STRING_CHARS + 1)}, "stop"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop_token_ids": [0] * (MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"logit_bias": {str(i): 0 for i in range(MAX_LOGIT_BIASES + 1)}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": 0, "2": -101}}, "logit_bias"),
        ({"logit_bias": {"1": "5"}}, "logit_bias"),
        ({"logit_bias": {"1": True}}, "logit_bias"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(given: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        fields(**given).check(LIMITS)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "given",
    [
        {"n": 1},
        {"n": LIMITS.max_choices},
        {"cache_salt": "x"},
        {"cache_salt": "é" * MAX_CACHE_SALT_CHARS, "cache_report": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stop": ["a", "b", "c", "d"]},
        {"stop": "x" * MAX_STOP_STRING_CHARS},
        {"stop": []},
        {"metadata": {"a": "b"}, "user": "somebody", "store": False, "unknown": [1]},
        dict.fromkeys(OpenAISamplingFields.model_fields),
    ],
)
def test_what_can_be_done_or_cannot_matter_is_let_pass(given: dict[str, Any]) -> None:
    fields(**given).check(LIMITS)


def test_more_choices_than_allowed_are_refused_with_both_numbers() -> None:
    with pytest.raises(ApiError) as caught:
        fields(n=5).check(LimitsSection(max_choices=4))
    assert caught.value.message == "n is 5; it must be from 1 to 4."


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ResponseOptions()),
        ({"n": None, "stream_options": None, "cache_report": None}, ResponseOptions()),
        ({"n": 3}, ResponseOptions(choices=3)),
        ({"stream_options": {"include_usage": True}}, ResponseOptions(include_usage=True)),
        ({"stream_options": {}, "cache_report": False}, ResponseOptions()),
        ({"cache_report": True}, ResponseOptions(cache_report=True)),
    ],
)
def test_a_request_says_what_its_answer_should_have(
    given: dict[str, Any], expected: ResponseOptions
) -> None:
    assert fields(**given).response_options == expected


@pytest.mark.parametrize(
    ("stop", "strings"),
    [(None, ()), ("a", ("a",)), (["a", "b"], ("a", "b")), ([], ())],
)
def test_stop_strings_come_alone_or_as_a_list(stop: Any, strings: tuple[str, ...]) -> None:
    assert fields(stop=stop).stop_strings() == strings


def test_a_request_that_says_nothing_gets_openais_defaults() -> None:
    assert params(seed=11) == SamplingParams(max_tokens=7, seed=11, stop_token_ids=frozenset({3}))


def test_a_request_that_says_everything_gets_it() -> None:
    asked = params(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "99": 2.5},
        seed=42,
        min_tokens=7,
        stop_token_ids=[5, 99],
    )
    assert asked == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.1,
        logit_bias=((5, -100.0), (99, 2.5)),
        seed=42,
        stop_token_ids=frozenset({3, 5, 99}),
        min_tokens=7,
    )


@pytest.mark.parametrize(
    ("given", "stops"),
    [
        ({}, {3}),
        ({"ignore_eos": False}, {3}),
        ({"ignore_eos": True}, set()),
        ({"ignore_eos": True, "stop_token_ids": [5]}, {5}),
        ({"stop_token_ids": [3, 5]}, {3, 5}),
    ],
)
def test_the_models_own_end_may_be_ignored_and_others_added(
    given: dict[str, Any], stops: set[int]
) -> None:
    assert params(**given).stop_token_ids == stops


@pytest.mark.parametrize(
    "given", [{"min_tokens": 8}, {"stop_token_ids": [VOCAB]}, {"logit_bias": {str(VOCAB): 1}}]
)
def test_what_does_not_fit_the_model_or_the_answer_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        params(**given)
    assert (caught.value.status, caught.value.param) == (400, *given)


def test_the_models_own_defaults_stand_where_the_request_is_silent() -> None:
    defaults = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
    }
    silent = params(defaults, temperature=None)
    assert [getattr(silent, name) for name in defaults] == list(defaults.values())
    spoken = params(defaults, temperature=0, top_k=-1)
    assert (spoken.temperature, spoken.top_k, spoken.top_p) == (0.0, 0, 0.95)


def test_values_that_float32_cannot_compute_with_are_taken_for_the_nearest_that_it_can() -> None:
    tiny = params(temperature=1e-38, top_p=1e-46)
    assert (tiny.temperature, tiny.top_p) == (0.0, MIN_TOP_P)
    assert params(temperature=MIN_TEMPERATURE).temperature == MIN_TEMPERATURE


@pytest.mark.parametrize(
    ("seed", "used"),
    [(0, 0), (-2, 2**64 - 2), (MAX_SEED, MAX_SEED), (7.0, 7)],
)
def test_any_seed_becomes_a_number_without_a_sign(seed: int, used: int) -> None:
    assert params(seed=seed).seed == used


@pytest.mark.parametrize("key", ["100", "-1", "1.0", "x", "", "1" * 11, "\u0661"])
def test_a_bias_of_a_token_that_does_not_exist_is_refused(key: str) -> None:
    with pytest.raises(ApiError) as caught:
        params(logit_bias={key: 1})
    assert (caught.value.status, caught.value.param) == (400, "logit_bias")


@pytest.mark.parametrize("named", [{}, {"seed": -1}, {"seed": -1.0}])
def test_drawn_seeds_differ_and_can_be_sent(named: dict[str, Any]) -> None:
    seeds = {params(**named).seed for _ in range(100)}
    assert len(seeds) == 100
    for seed in seeds:
        assert params(seed=seed).seed == seed
