import json
from typing import Any

import pytest

from server.text.calls.argument_types import ALL_TYPES, argument_types, as_json


def types(schema: Any, **root: Any) -> set[str]:
    parameters = {"type": "object", "properties": {"a": schema}, **root}
    return set(argument_types(parameters, "a"))


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", "b"]}, {"string"}),
        ({"enum": [1, 1.5, None, True, {}, []]}, set(ALL_TYPES) - {"string"}),
        ({"const": "a"}, {"string"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        ({"oneOf": [{"type": "string"}, {"const": 5}]}, {"string", "integer"}),
        ({"type": "string", "enum": ["a", 5]}, {"string"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, {"string"}),
    ],
)
def test_a_schema_says_what_an_argument_may_be(schema: Any, found: set[str]) -> None:
    assert types(schema) == found


@pytest.mark.parametrize(
    "schema",
    [
        {}, True, None, {"description": "anything"}, {"type": "date"}, {"type": 5}, {"enum": "a"},
        {"anyOf": {}}, {"allOf": 5}, {"$ref": 5}, {"$ref": "#/nowhere"}, {"$ref": "other.json"},
        {"$ref": "#/properties/a"}, {"allOf": [{"type": "string"}, {"type": "null"}]},
    ],
)  # fmt: skip
def test_a_schema_that_does_not_say_allows_everything(schema: Any) -> None:
    assert types(schema) == ALL_TYPES


@pytest.mark.parametrize("parameters", [None, {}, {"properties": []}, {"properties": {"b": {}}}])
def test_an_argument_without_a_schema_may_be_anything(parameters: Any) -> None:
    assert argument_types(parameters, "a") == ALL_TYPES


def test_references_within_the_schema_are_followed() -> None:
    names = {"x~y/z": {"type": "string"}, "pair": {"$ref": "#/$defs/x~0y~1z"}}
    assert types({"$ref": "#/$defs/pair"}, **{"$defs": names}) == {"string"}


STRING_OR_NULL = {"string", "null"}


@pytest.mark.parametrize(
    ("text", "allowed", "value"),
    [
        ("5", {"integer"}, 5), (" 5\n", {"integer"}, 5), ("5", {"number"}, 5),
        ("5.5", {"number"}, 5.5), ("5.0", {"integer"}, 5), ("5.0", {"boolean"}, "5.0"),
        ("5.5", {"integer"}, "5.5"), ("1e999", {"number"}, "1e999"),
        ("1e999", {"integer"}, "1e999"), ("NaN", {"number"}, "NaN"), ("true", {"boolean"}, True),
        ("False", {"boolean"}, False), ("null", STRING_OR_NULL, None),
        ("None", STRING_OR_NULL, None), ("nothing", STRING_OR_NULL, "nothing"),
        ('"quoted"', STRING_OR_NULL, '"quoted"'), ("5", STRING_OR_NULL, "5"),
        ("null", {"integer"}, "null"), ("[1, 2]", {"array"}, [1, 2]),
        ('{"é": [1]}', {"object"}, {"é": [1]}),
        # As Python writes it, or nearly; where a string could stand, it is one.
        ("{'a': 1}", {"object"}, {"a": 1}), ("['a', 'b']", {"array"}, ["a", "b"]),
        ("{'a': True, \"b\": [None, False]}", {"object", "null"}, {"a": True, "b": [None, False]}),
        ("('a', 1.5)", {"array"}, ["a", 1.5]), ("{1: 'é'}", {"object"}, {"1": "é"}),
        ("[1, 2,]", {"array"}, [1, 2]), (r"['\d']", {"array"}, [r"\d"]),
        ("['a']", {"object"}, "['a']"), ("['a']", {"array", "string"}, "['a']"),
        ("[a]", {"array"}, "[a]"), ("{'a'}", {"object"}, "{'a'}"),
        (r"['\ud800']", {"array"}, r"['\ud800']"), ("[len('a')]", {"array"}, "[len('a')]"),
        ("[1e999, 'a']", {"array"}, "[1e999, 'a']"), ("(" * 5_000, {"array"}, "(" * 5_000),
        ("['a'" + ",1" * 40_000 + "]", {"array"}, "['a'" + ",1" * 40_000 + "]"),
        ('{"t": "one\ntwo\t"}', {"object"}, {"t": "one\ntwo\t"}),
        ('["one\ntwo"]', {"array", "string"}, '["one\ntwo"]'),
        # No number of JSON's, at any depth.
        ("[NaN, 1]", {"array"}, "[NaN, 1]"), ('{"v": -Infinity}', {"object"}, '{"v": -Infinity}'),
        ('{"v": "a\nb", "w": Infinity}', {"object"}, '{"v": "a\nb", "w": Infinity}'),
        ("inf", {"number"}, "inf"), ("TRUE", {"boolean"}, True), ("fALSE", {"boolean"}, False),
        ("NULL", {"null", "integer"}, None), ("TRUE", {"string", "boolean"}, "TRUE"),
        ("yes", {"boolean"}, "yes"), (".5", {"number"}, 0.5), ("-.5", {"number"}, -0.5),
        ("5.", {"number"}, 5.0), ("+3", {"integer"}, 3), ("+3", {"number", "null"}, 3),
        ("+3.0", {"integer"}, 3), ("007", {"integer"}, 7),
        ("+12345678901234567890", {"integer"}, 12345678901234567890), (".5", {"integer"}, ".5"),
        (".5", {"string", "number"}, ".5"), ("five", {"integer"}, "five"), ("[1", {"array"}, "[1"),
        ("[" * 5_000, {"array"}, "[" * 5_000), ("", {"integer"}, ""),
        ('a "b"\n', {"integer"}, 'a "b"\n'),
    ],
)  # fmt: skip
def test_a_value_becomes_json_of_its_type_or_a_string(
    text: str, allowed: set[str], value: Any
) -> None:
    written = as_json(text, frozenset(allowed))
    assert written.encode()
    found = json.loads(written, parse_constant=pytest.fail)
    assert (type(found), found) == (type(value), value)
