import re
from typing import Any

import pytest

from server.text.calls.argument_types import STRING, as_json
from server.text.grammar.grammar_errors import GrammarError, Relaxation
from server.text.grammar.xml_values import (
    READS_AS,
    JsonText,
    Parameter,
    xml_parameters,
)

STRING_OF_3 = {"type": "string", "maxLength": 3}


def forms(schema: Any, **root: Any) -> list[Any]:
    (parameter,) = xml_parameters({"type": "object", "properties": {"a": schema}, **root})
    return parameter.values


def refused(schema: dict[str, Any]) -> str:
    with pytest.raises(GrammarError) as caught:
        xml_parameters(schema)
    return str(caught.value)


def of_value(schema: Any) -> str:
    return refused({"properties": {"a": schema}})


# --- which parameters --------------------------------------------------------------------------


def test_what_is_required_but_not_described_is_one_of_the_others() -> None:
    schema = {
        "properties": {"a": {}},
        "required": ["b"],
        "additionalProperties": {"type": "integer"},
    }
    first, second = xml_parameters(schema)
    assert (first.name, second.name, second.times) == ("a", "b", "")
    assert second.values == [JsonText({"type": "integer"})]


def test_an_object_that_nobody_describes_has_any_parameters() -> None:
    (parameter,) = xml_parameters({"type": "object"})
    assert (parameter.name, parameter.times) == (None, "*")
    assert xml_parameters({"additionalProperties": False}) == []


def test_a_parameter_that_nothing_satisfies_is_left_out() -> None:
    assert xml_parameters({"properties": {"a": False, "b": {}}})[0].name == "b"
    message = "schema at #/properties/a cannot be satisfied by any answer"
    assert refused({"properties": {"a": False}, "required": ["a"]}) == message


@pytest.mark.parametrize("name", ["a>b", "<a", "a\n", " a", ""])
def test_names_that_the_format_cannot_hold_are_refused(name: str) -> None:
    assert "name" in refused({"properties": {name: {}}})


@pytest.mark.parametrize("keyword", ["anyOf", "allOf", "patternProperties", "enum"])
def test_what_the_format_cannot_enforce_of_the_whole_object_is_refused(keyword: str) -> None:
    assert refused({keyword: []}).startswith(f"{keyword} at # is not supported at the top")


def test_an_object_may_be_a_reference() -> None:
    definitions = {"a": {"type": "object", "properties": {"b": {"type": "null"}}}}
    (parameter,) = xml_parameters({"$ref": "#/$defs/a", "$defs": definitions})
    assert parameter == Parameter("b", "?", [JsonText({"$defs": definitions, "type": "null"})])


LEFT: list[tuple[dict[str, Any], str]] = [
    ({"anyOf": [], "properties": {"a": {}}}, "anyOf at f#"),
    ({"patternProperties": {"a": {}}, "additionalProperties": False}, "patternProperties at f#"),
    ({"properties": {"a>b": {}, "a": {}}}, "properties at f#"),
    ({"properties": {"a": False}, "required": ["a"]}, "schema at f#/properties/a"),
    (
        {"properties": {"a": {"type": "string", "pattern": "a$b"}}},
        "pattern at f#/properties/a",
    ),
    (
        {"properties": {"a": {"anyOf": [{"type": "integer", "minimum": 1}, STRING_OF_3]}}},
        "minimum at f#/properties/a",
    ),
]


@pytest.mark.parametrize(("schema", "left"), LEFT)
def test_what_need_not_be_enforced_is_left_out(schema: dict[str, Any], left: str) -> None:
    relaxation = Relaxation(strict=False)
    (parameter,) = xml_parameters(schema, relaxation, "f#")
    assert parameter.name in ("a", None)
    assert len(parameter.values) == len(forms(True)), "any value"
    assert relaxation.not_enforced == [left]


# --- which forms -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reference", ["#/$defs/none", "#/$defs/a/items", "#/$defs/self", "#/$defs/one"]
)
def test_references_that_lead_nowhere_are_refused(reference: str) -> None:
    definitions = {
        "a": {"items": []},
        "self": {"$ref": "#/$defs/self"},
        "one": {"$ref": "#/$defs/other"},
        "other": {"allOf": [{"$ref": "#/$defs/one"}], "type": "string"},
    }
    schema = {"properties": {"a": {"$ref": reference}}, "$defs": definitions}
    assert refused(schema) == "$ref at #/properties/a cannot be followed"


@pytest.mark.parametrize("pattern", ["^a|b$", "a|b$", "a^b", "a$b", "(^a)"])
def test_patterns_with_anchors_within_are_refused(pattern: str) -> None:
    assert "pattern" in of_value({"type": "string", "pattern": pattern})


def test_branches_beside_other_keywords_are_refused_for_strings() -> None:
    schema = {"anyOf": [{"maxLength": 3}, {"minLength": 5}], "type": "string", "pattern": "a"}
    assert of_value(schema).startswith("anyOf at #/properties/a beside others")


# --- both --------------------------------------------------------------------------------------


@pytest.mark.parametrize("keyword", ["minimum", "multipleOf", "exclusiveMaximum"])
def test_numbers_with_bounds_are_refused_beside_strings(keyword: str) -> None:
    bounded = {"type": "integer", keyword: 3}
    assert of_value({"anyOf": [bounded, STRING_OF_3]}).startswith(
        f"{keyword} at #/properties/a beside strings"
    )
    assert forms({"anyOf": [bounded, {"type": "null"}]}) == [
        JsonText({"anyOf": [bounded, {"type": "null"}]})
    ]


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("12", {"number", "integer"}),
        (" -1.5e+3\n", {"number", "integer"}),
        ("true", {"boolean"}),
        ("False", {"boolean"}),
        ("None", {"null"}),
        ("\x1cnull ", {"null"}),
        ('{"a": 1}', {"object"}),
        (" [", {"array"}),
    ],
)
def test_what_is_kept_from_strings_is_what_the_reader_takes_for_another_type(
    text: str, kinds: set[str]
) -> None:
    assert {k for k, looks in READS_AS.items() if re.fullmatch(looks, text)} == kinds
    for kind in READS_AS:
        read_as_string = as_json(text, STRING | {kind}).startswith('"')
        if not read_as_string:
            assert kind in kinds
