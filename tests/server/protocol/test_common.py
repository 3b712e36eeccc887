import asyncio
import json
from random import Random
from typing import Any

import pytest
from pydantic import ValidationError
from structlog.contextvars import get_contextvars

from engine.types import SamplingParams
from server.config import LimitsSection
from server.protocol import common as module
from server.protocol.common import (
    MAX_CACHE_SALT_CHARS,
    MAX_LOGIT_BIASES,
    MAX_SEED,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_TOKEN_IDS,
    MIN_TEMPERATURE,
    MIN_TOP_P,
    BodyLimits,
    OpenAISamplingFields,
    ResponseOptions,
    StructureFields,
    bind_request_id,
    current_request_id,
    new_request_id,
)
from server.protocol.wire_errors import ApiError
from server.text.conversation import OutputFormat

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


MIB = 1024**2


async def refusal(body: bytes, values: int, containers: int = MIB) -> ApiError | None:
    try:
        await BodyLimits(8 * MIB, values, containers).check(body)
    except ApiError as error:
        return error
    return None


def counted(value: Any) -> tuple[int, int, int]:
    """Values, containers and names, by looking at each. Nothing in a list counts as one value."""
    if not isinstance(value, dict | list):
        return 1, 0, 0
    parts = [counted(part) for part in (value.values() if isinstance(value, dict) else value)]
    values, containers, names = (sum(part[which] for part in parts) for which in range(3))
    return 1 + max(1, values), 1 + containers, names + len(value) * isinstance(value, dict)


def anything(rng: Random, depth: int = 5) -> Any:
    """A value with texts that look like JSON."""
    texts = ["", ",", '[{"', '\\"', "\\", '\\\\",[', "é\ud800"]
    if depth == 0 or rng.random() < 0.3:
        return rng.choice([7, None, rng.choice(texts), rng.choice(texts) * 9])
    if rng.random() < 0.5:
        return [anything(rng, depth - 1) for _ in range(rng.randrange(6))]
    return {rng.choice(texts) + str(n): anything(rng, depth - 1) for n in range(rng.randrange(6))}


@pytest.mark.parametrize("seed", range(40))
async def test_values_are_counted_outside_of_texts_wherever_the_body_is_cut(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 1 + seed % 7)
    rng = Random(seed)
    value = [anything(rng) for _ in range(8)]
    body = json.dumps(value).encode() + b" " * 4000
    values, *most = counted(value)
    assert await refusal(body, values, max(most)) is None
    assert await refusal(body, values - 1) is not None
    assert await refusal(body, MIB, max(most) - 1) is not None


async def test_what_is_small_is_not_looked_at() -> None:
    assert await refusal(b"[" * 200, values=100, containers=100) is None
    assert await refusal(b"[" * 201, values=100, containers=100) is not None


async def test_a_body_says_which_limit_it_is_beyond() -> None:
    bodies = {
        "more than 10 values": b"[" + b"0," * 100 + b"0]",
        "more than 50 lists and objects": b"[" + b"[]," * 100 + b"0]",
        "objects, or names in them": b"{" + b'"k": 0,' * 50 + b'"k": 0}',
    }
    for says, body in bodies.items():
        error = await refusal(body, 10 if "10" in says else MIB, 50)
        assert error is not None
        assert (error.status, error.code) == (400, "too_many_values")
        assert says in error.message
    with pytest.raises(ApiError) as caught:
        await BodyLimits(10, 10, 10).check(b"0" * 11)
    assert (caught.value.status, caught.value.code) == (413, "body_too_large")


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TEXT = json.dumps(SCHEMA)


def read(**given: Any) -> OutputFormat | None:
    return StructureFields.model_validate_json(json.dumps(given)).output_format()


def named(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", **fields}}


def schema(param: str, *, strict: bool = True) -> OutputFormat:
    return OutputFormat("json_schema", SCHEMA, param, strict)


PLACE = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"type": "text"}, None),
        ({"type": "text", "schema": SCHEMA}, None),
        ({"type": "json_object"}, OutputFormat("json_object")),
        ({"type": "json_object", "schema": SCHEMA}, schema("response_format.schema", strict=False)),
        (named(schema=SCHEMA), schema(PLACE, strict=False)),
        (named(schema=SCHEMA, strict=False, description="d"), schema(PLACE, strict=False)),
        (named(schema=SCHEMA, strict=True), schema(PLACE)),
        ({"type": "json_schema", "schema": SCHEMA}, schema("response_format.schema", strict=False)),
        (named(), OutputFormat("json_object")),
        (named(schema=None, strict=None), OutputFormat("json_object")),
        (named(schema=True, strict=True), OutputFormat("json_schema", True, PLACE)),
    ],
)
def test_a_response_format_is_read(asked: dict[str, Any], found: OutputFormat | None) -> None:
    assert read(response_format=asked) == found


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("json", SCHEMA, schema("P")),
        ("json", TEXT, schema("P")),
        ("json", "true", OutputFormat("json_schema", True, "P")),
        ("regex", "a+", OutputFormat("regex", "a+", "P")),
        ("choice", ["a", "b"], OutputFormat("choice", ["a", "b"], "P")),
        ("grammar", "start: X", OutputFormat("grammar", "start: X", "P")),
    ],
)
def test_both_forms_of_other_servers_are_read(name: str, value: Any, found: OutputFormat) -> None:
    guided, structured = read(**{f"guided_{name}": value}), read(structured_outputs={name: value})
    assert guided == OutputFormat(found.kind, found.value, f"guided_{name}")
    assert structured == OutputFormat(found.kind, found.value, f"structured_outputs.{name}")


def test_any_object_may_be_asked_for() -> None:
    found = OutputFormat("json_object", None, "structured_outputs.json_object")
    assert read(structured_outputs={"json_object": True}) == found


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"response_format": None, "structured_outputs": None, "guided_json": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False, "structural_tag": None}},
    ],
)
def test_nothing_is_asked_for_where_nothing_is_said(given: dict[str, Any]) -> None:
    assert read(**given) is None


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": "[" * 5_000}, "guided_json"),
        ({"guided_json": f'{{"enum": [{"1, " * 40_000}1]}}'}, "guided_json"),
        ({"structured_outputs": {"json": "no"}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": {"a": 1}}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "guided_grammar": "b"}, "guided_grammar"),
    ],
)
def test_what_cannot_be_read_or_is_said_twice_is_refused(given: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**given)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": "json_object"},
        {"response_format": {}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "text"}}},
        {"guided_choice": []},
        {"guided_choice": [1]},
        {"guided_regex": 5},
        {"guided_json": 5},
        {"structured_outputs": "json"},
    ],
)
def test_a_value_of_the_wrong_type_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        read(**given)


def test_every_request_has_an_id_of_its_own() -> None:
    ids = {new_request_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(name.startswith("req_") for name in ids)


@pytest.mark.parametrize("given", ["a", "A-b_9", "x" * 64, "req_0123"])
async def test_a_plain_id_of_the_client_is_taken(given: str) -> None:
    assert bind_request_id([(b"X-Request-Id", given.encode())]) == given
    assert current_request_id() == given


@pytest.mark.parametrize(
    "given",
    [b"", b"x" * 65, b"a b", b"a\n", b"a\r\nx: y", b"a/b", b"\xff", "é".encode(), b"a,b", b"a=b"],
)
async def test_threat_22_any_other_id_of_the_client_is_not(given: bytes) -> None:
    assert bind_request_id([(b"x-request-id", given)]).startswith("req_")


async def test_threat_22_two_ids_are_none() -> None:
    twice = [(b"x-request-id", b"a"), (b"x-request-id", b"a")]
    assert bind_request_id(twice).startswith("req_")


async def test_the_log_carries_the_id_of_the_request_that_is_answered() -> None:
    async def answer(name: bytes) -> tuple[str, dict[str, object]]:
        bind_request_id([(b"x-request-id", name)])
        await asyncio.sleep(0)
        return current_request_id(), get_contextvars()

    for name, found in zip("ab", await asyncio.gather(answer(b"a"), answer(b"b")), strict=True):
        assert found == (name, {"request_id": name})


async def test_where_there_is_no_request_there_is_a_new_id_every_time() -> None:
    from structlog.contextvars import clear_contextvars

    clear_contextvars()
    assert current_request_id() != current_request_id()
