"""Keywords that llguidance refuses: named with their places, or left to the model."""

from dataclasses import replace
from typing import Any

import pytest

from server.text.calls.tool_format import ToolFormat
from server.text.conversation import OutputFormat, Tool
from server.text.grammar.constraint_spec import ConstraintSpec
from server.text.grammar.grammar_errors import MAX_LISTED, MAX_PLACE_CHARS
from server.text.tokenizer import Tokenizer
from tests.server.text.grammars import compiler, left_out, refusal, takes

BAD = {"type": "string", "pattern": "^(?!x)a$"}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "name": BAD}}
LOOK = "look-around, including look-ahead and look-behind, is not supported, at character 2"
UNABLE = "cannot be used: "
# A schema, the keyword with its place, why, and an answer that only the rest of the schema allows.
SCHEMAS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"type": "string", "pattern": "(a"}, "pattern at #", f"{UNABLE}unclosed group", '"b"'),
    ({"items": [{}, BAD]}, "pattern at #/items/1", UNABLE + LOOK, '[1,"b"]'),
    ({"properties": {"a/é": BAD}}, "pattern at #/properties/a~1%C3%A9", LOOK, '{"a/é": "b"}'),
    ({"anyOf": [{"const": 1}, {"allOf": [BAD]}]}, "pattern at #/anyOf/1/allOf/0", LOOK, '"b"'),
    ({"$ref": "#/$defs/node", "$defs": {"node": NODE}}, "pattern at #/$defs/node/pr", LOOK, "{}"),
    (
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        "oneOf at #",
        "oneOf is not supported where more than one branch may match",
        "1.5",
    ),
    (
        {"oneOf": [{"type": "integer"}, {"type": "number"}], "anyOf": [{"const": 1}, {"const": 2}]},
        "oneOf at #",
        UNABLE,
        "1",
    ),
    (
        {"patternProperties": {"a": {"const": 1}, "b": {}}, "additionalProperties": False},
        "patternProperties at #",
        "patternProperties that overlap",
        '{"c": 1}',
    ),
    ({"minimum": 3, "maximum": 2, "type": "integer"}, "minimum at #", "no answer can", "1"),
    (
        {"properties": {"a": {"$ref": "#/properties/b"}}},
        "$ref at #/properties/a",
        "cannot be followed",
        '{"a": 1}',
    ),
    ({"properties": {"a": {"uniqueItems": True}}}, "uniqueItems at #/properties/a", "is", "{}"),
    ({"items": 5}, "items at #", "has a value that is not valid", "[1]"),
    ({"items": {"properties": 5, "additionalProperties": False}}, "properties", "has", '[{"a":1}]'),
    ({"items": {"$id": "a", "$ref": "#/x"}}, "$id at #/items", "is not supported but", "[1]"),
    ({"minProperties": 2, "type": "object"}, "minProperties at #", "is supported up to", "{}"),
    ({"enum": ["\x01"], "type": "string"}, "enum at #", "has control characters", '"a"'),
    ({"if": {}, "type": "null"}, "if at #", "is not supported", "null"),
    ({"maximum": 3.5e38, "type": "number"}, "maximum at #", "has a number that is too", "1"),
]


def spec_of(schema: Any, *, strict: bool) -> ConstraintSpec:
    return ConstraintSpec(OutputFormat("json_schema", schema, strict=strict))


@pytest.mark.parametrize(("schema", "place", "why", "_"), SCHEMAS)
async def test_a_strict_schema_is_refused_with_keyword_and_place(
    tokenizer: Tokenizer, schema: dict[str, Any], place: str, why: str, _: str
) -> None:
    message = str(await refusal(tokenizer, spec_of(schema, strict=True)))
    assert message.startswith(place)
    assert why in message


@pytest.mark.parametrize(("schema", "place", "_", "text"), SCHEMAS)
async def test_the_rest_of_other_schemas_is_enforced(
    tokenizer: Tokenizer, schema: dict[str, Any], place: str, _: str, text: str
) -> None:
    made, spec = compiler(tokenizer), spec_of(schema, strict=False)
    constraint = await made.compile(spec)
    (left,) = await left_out(made, spec)
    assert left.startswith(place)
    assert constraint is not None
    assert takes(constraint, tokenizer, text)
    assert not takes(constraint, tokenizer, "[[")


@pytest.mark.parametrize("tool_format", ToolFormat)
async def test_tools_are_relaxed_one_by_one(tokenizer: Tokenizer, tool_format: ToolFormat) -> None:
    bad = {"type": "object", "properties": {"a": {"items": BAD, "type": "array"}}}
    tools = Tool("f", parameters=bad), Tool("g", parameters={"type": "object", "if": {}})
    spec = ConstraintSpec(tools=tools, must_call=True, tool_format=tool_format)
    made = compiler(tokenizer)
    await made.compile(spec)
    places = ("pattern at f#/properties/a/items", "if at g#")
    assert await left_out(made, spec) == places
    strict = replace(spec, tools=(replace(tools[0], strict=True), tools[1]))
    assert str(await refusal(tokenizer, strict)).startswith(places[0])
    optional = replace(spec, must_call=False)
    assert await left_out(made, optional) == (), "nothing is enforced"


WIDE = {"type": "object", "properties": {f"p{n}": {} for n in range(500)}}


@pytest.mark.parametrize("schema", [False, WIDE, {"allOf": [BAD] * 9}, {"not": True}])
async def test_where_nothing_of_a_schema_can_be_enforced_json_is(
    tokenizer: Tokenizer, schema: Any
) -> None:
    made, spec = compiler(tokenizer), spec_of(schema, strict=False)
    constraint = await made.compile(spec)
    assert await left_out(made, spec) == ("schema at #",)
    assert constraint is not None
    assert takes(constraint, tokenizer, "{}")
    assert takes(constraint, tokenizer, "[]") is (schema is not WIDE)
    calls = ConstraintSpec(tools=(Tool("f", None, {"allOf": [BAD] * 9}), Tool("g")), must_call=True)
    assert await made.compile(calls)
    assert await left_out(made, calls) == ("schema at f#",)


async def test_lists_and_places_have_a_length(tokenizer: Tokenizer) -> None:
    made = compiler(tokenizer)
    properties: dict[str, Any] = {f"{n}" * 999: {"if": {}} for n in range(10, 99)}
    spec = spec_of({"type": "object", "properties": properties}, strict=False)
    left = await left_out(made, spec)
    assert len(left) == MAX_LISTED
    assert max(map(len, left)) == len("if at ") + MAX_PLACE_CHARS


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(a", "unclosed group, at character 1"),
        ("a/b/[c", "unclosed character class, at character 5"),
        ("\\/é/a{2", "unclosed counted repetition, at character 6"),
        ("x[z-a]", "invalid character class range, the start must be <= the end, at character 3"),
        ("ab\\1", "backreferences are not supported, at character 3"),
        ("a(?!b)", "look-around, including look-ahead and look-behind, is not supported, at char"),
        ("\\bfoo", "look-arounds in a pattern are not supported"),
    ],
)
async def test_a_bad_pattern_is_refused_in_the_engines_words(
    tokenizer: Tokenizer, pattern: str, why: str
) -> None:
    error = await refusal(tokenizer, ConstraintSpec(OutputFormat("regex", pattern)))
    assert str(error).startswith(f"pattern cannot be used: {why}")
