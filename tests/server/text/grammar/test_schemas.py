import copy
import json
from typing import Any

import pytest

from server.text.grammar.grammar_errors import GrammarError
from server.text.grammar.schemas import (
    MAX_DEPTH,
    MAX_PATTERNS,
    MAX_PROPERTIES,
    MAX_SUBSCHEMAS,
    check_patterns,
    check_schema,
)


def refused(schema: Any) -> str:
    with pytest.raises(GrammarError) as caught:
        check_schema(schema)
    return str(caught.value)


@pytest.mark.parametrize(
    "keyword",
    [
        "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependencies",
        "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties",
        "$dynamicRef", "$recursiveRef",
    ],
)  # fmt: skip
@pytest.mark.parametrize("depth", [0, 1])
def test_a_keyword_that_would_be_ignored_is_refused_by_its_name(keyword: str, depth: int) -> None:
    schema: Any = {keyword: {"a": {"minLength": 2}}}
    schema = {"properties": {"a/b é": {"items": [{}, schema]}}} if depth else schema
    place = "#/properties/a~1b%20%C3%A9/items/1" if depth else "#"
    assert refused(schema) == f"{keyword} at {place} is not supported"


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": False},
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {}},
        {"unevaluatedProperties": True},
        {"dependentRequired": {}},
        {"$schema": "anything", "$id": "https://example.com/a", "title": "A", "default": 3},
        {"x-guidance": {"lenient": True}},
        {"format": "a note of somebody's", "deprecated": True, "examples": [{"not": 1}]},
        True,
    ],
)
def test_what_asks_for_nothing_is_left_out(schema: Any) -> None:
    assert check_schema(schema) == {}


def test_everything_else_stays_as_it_is() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "not": {"type": ["string", "null"], "minLength": 1, "maxLength": 5, "pattern": "^a"},
            "when": {"type": "string", "format": "date-time"},
            "n": {"minimum": 0, "exclusiveMaximum": 1.5, "multipleOf": 0.5},
            "tuple": {"prefixItems": [{"const": 1}, True], "items": False, "minItems": 2},
            "more": {"items": [{"enum": [1, "a", None, {"if": 1}]}], "additionalItems": False},
            "of": {"anyOf": [{"$ref": "#/$defs/0"}, {"oneOf": [{"type": "null"}]}]},
            "all": {"allOf": [{"maxItems": 3}], "additionalProperties": {"type": "null"}},
        },
        "required": ["not"],
        "patternProperties": {"^x-": {"type": "integer"}},
        "maxProperties": 9,
        "minProperties": 2,
        "$defs": {"0": {"type": "object"}},
    }
    before = copy.deepcopy(schema)
    assert check_schema(schema) == schema == before
    assert list(check_schema(schema)["properties"]) == list(before["properties"]), "in order"


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        ({"exclusiveMinimum": 0}, {"minimum": 1e-9}),
        ({"exclusiveMinimum": -2.0, "minimum": -3}, {"minimum": -2 + 1e-9}),
        ({"exclusiveMinimum": -2, "minimum": 3}, {"minimum": 3}),
        ({"exclusiveMaximum": 5, "maximum": 4}, {"maximum": 4}),
        ({"exclusiveMaximum": 5, "maximum": 9}, {"maximum": 5 - 1e-9}),
        ({"minimum": 3, "exclusiveMinimum": True}, {"minimum": 3 + 1e-9}),
        ({"minimum": 0.5, "exclusiveMinimum": True}, {"exclusiveMinimum": 0.5}),
        ({"exclusiveMinimum": True, "exclusiveMaximum": False}, {}),
        ({"exclusiveMinimum": 10**9}, {"exclusiveMinimum": 10**9}),
    ],
)
def test_exclusive_whole_bounds_become_numbers_beside_them(
    schema: dict[str, Any], closed: dict[str, Any]
) -> None:
    assert check_schema(schema) == closed


def test_whole_numbers_are_counts_however_they_are_written() -> None:
    assert check_schema({"minLength": 2.0}) == {"minLength": 2}
    assert "minLength" in refused({"minLength": 2.5})


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (5, "schema at # must be an object"),
        (None, "schema at # must be an object"),
        (False, "no answer can satisfy it"),
        ({"properties": {"a": 3}}, "schema at #/properties/a must be an object"),
        ({"properties": []}, "properties at # has a value that is not valid"),
        ({"required": "a"}, "required at # has a value"),
        ({"required": [1]}, "required at # must be a list of names"),
        ({"type": "text"}, "type at # names a type"),
        ({"type": [["string"]]}, "type at # names a type"),
        ({"enum": []}, "enum at # has no values"),
        ({"minimum": True}, "minimum at # has a value"),
        ({"minimum": "1"}, "minimum at # has a value"),
        ({"maxItems": -1}, "maxItems at # is not between 0 and"),
        ({"maxItems": 10**12}, "maxItems at # is not between 0 and"),
        ({"maxItems": True}, "maxItems at # has a value"),
        ({"pattern": 3}, "pattern at # has a value"),
        ({"format": "idn-email"}, "format at # idn-email is not supported"),
        ({"$ref": "https://example.com/a"}, "$ref at # is supported within the schema only"),
        ({"$ref": "other.json#/a"}, "$ref at # is supported within the schema only"),
        ({"items": {"$id": "b"}}, "$id at #/items is not supported but at the top"),
        ({"minProperties": 2}, "minProperties at # is supported up to one more than are required"),
        ({"minProperties": 3, "required": ["a", "a"]}, "minProperties at # is supported"),
    ],
)
def test_what_cannot_be_is_refused_by_its_keyword(schema: Any, says: str) -> None:
    assert says in refused(schema)


@pytest.mark.parametrize("keyword", ["const", "enum", "minimum", "multipleOf", "exclusiveMaximum"])
def test_numbers_that_float64_does_not_hold_are_refused(keyword: str) -> None:
    for number in (2**53 + 2, -(2**60), 1e300):
        value = [1, {"a": number}] if keyword == "enum" else number
        assert (
            refused({keyword: value})
            == f"{keyword} at # has a number that is too large to be exact"
        )
    value = [2**53] if keyword == "enum" else 2**53
    assert check_schema({keyword: value}) == {keyword: value}


@pytest.mark.parametrize(
    "schema",
    [
        {"const": "a\x01"},
        {"enum": ["a", ["\x7f"]]},
        {"const": {"\x00": 1}},
        {"properties": {"a\x1f": {}}},
        {"required": ["\x0b"]},
    ],
)
def test_characters_that_cannot_be_written_are_refused(schema: dict[str, Any]) -> None:
    (keyword,) = schema
    assert refused(schema) == f"{keyword} at # has control characters that are not supported"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_depth_size_and_width_have_limits() -> None:
    assert check_schema(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    assert "nested more than" in refused(nested(MAX_DEPTH + 1))
    assert "nested more than" in refused({"const": json.loads("[" * 60 + "]" * 60)})
    many = {f"p{n}": True for n in range(MAX_PROPERTIES + 1)}
    assert (
        refused({"properties": many}) == f"properties at # has more than {MAX_PROPERTIES} entries"
    )
    parts: dict[str, Any] = {"anyOf": [{}] * MAX_SUBSCHEMAS}
    assert (
        refused(parts)
        == f"schema at #/anyOf/{MAX_SUBSCHEMAS - 1} has more than {MAX_SUBSCHEMAS} parts"
    )


def test_errors_hold_nothing_of_the_schema_but_keywords_and_places() -> None:
    secret = "a secret"
    schemas: list[dict[str, Any]] = [
        {"type": secret},
        {"$ref": secret},
        {"required": [secret, 1]},
        {"const": f"{secret}\x01"},
        {"properties": {"a": {"not": {"const": secret}}}},
    ]
    for schema in schemas:
        assert secret not in refused(schema)


MOST = MAX_PATTERNS


def patterns(count: int) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": f"a{{{number}}}.*b"} for number in range(count)]


def chain(length: int, **more: Any) -> dict[str, Any]:
    """Each part refers to the next one."""
    parts = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}", **more} for n in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{length}": {"type": "string"}}}


def circle(length: int) -> dict[str, Any]:
    parts = {
        f"d{n}": {"$ref": f"#/$defs/d{(n + 1) % length}", "pattern": "a"} for n in range(length)
    }
    return {"$defs": parts, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"pattern": "a"},
        {"allOf": patterns(MOST)},
        {"anyOf": patterns(100)},
        {"properties": {str(n): part for n, part in enumerate(patterns(100))}},
        {"properties": {"pattern": {}, "allOf": {}, "$ref": {}, "anyOf": {}}},
        {"prefixItems": patterns(100)},
        {"const": {"allOf": [1, "a", None]}},
        {"$ref": "#/nowhere/at/all"},
        {"$ref": "#/type/x", "type": "string"},
        chain(MOST, pattern="a"),
        chain(4000),
        circle(MOST),
    ],
)
def test_as_many_as_people_write_are_let_pass(schema: Any) -> None:
    check_patterns(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": patterns(MOST + 1)},
        {"pattern": "a", "allOf": patterns(MOST)},
        {"pattern": "a", "items": {"allOf": patterns(MOST + 1)}},
        {"allOf": [{"anyOf": [part, {}]} for part in patterns(MOST + 1)]},
        {
            "allOf": [
                {"allOf": patterns(MOST // 2 + 1)},
                {"oneOf": [{"allOf": patterns(MOST // 2)}]},
            ]
        },
        {"allOf": [{"$ref": "#/$defs/a~1~0b"}] * (MOST + 1), "$defs": {"a/~b": {"pattern": "a"}}},
        chain(MOST + 1, pattern="a"),
        chain(4000, pattern="a"),
        circle(MOST + 1),
    ],
)
def test_more_are_refused(schema: Any) -> None:
    with pytest.raises(GrammarError, match="pattern is supported up to 8 times for one value"):
        check_patterns(schema)


def test_nesting_that_cannot_be_followed_is_refused() -> None:
    schema: dict[str, Any] = {"pattern": "a"}
    parts = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}]} for n in range(4000)}
    schema = {"allOf": [{"$ref": "#/$defs/d0"}], "$defs": {**parts, "d4000": schema}}
    with pytest.raises(GrammarError, match="nested too deeply"):
        check_patterns(schema)
