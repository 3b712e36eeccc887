import re
from typing import Any

import pytest

from server.text.calls.argument_types import STRING, as_json
from server.text.grammar.grammar_errors import GrammarError, Relaxation
from server.text.grammar.xml_values import (
    READS_AS,
    JsonText,
    Parameter,
    RawText,
    lark_string,
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


def test_references_to_strings_are_followed() -> None:
    definitions = {"a/b": STRING_OF_3, "c~d": {"$ref": "#/$defs/a~1b"}}
    assert forms({"$ref": "#/$defs/c~0d"}, **{"$defs": definitions}) == forms(STRING_OF_3)
    both = {"$ref": "#/$defs/c~0d", "minLength": 2}
    assert forms(both, **{"$defs": definitions}) == [RawText(("/(?s:.{0,3})/", "/(?s:.{2,})/"))]


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


def test_a_number_stays_one_for_those_who_read_float64() -> None:
    assert forms({"type": "number"}) == [
        JsonText({"minimum": -(2**53), "maximum": 2**53, "type": "number"})
    ]
    (bounded,) = forms({"type": "number", "maximum": 3})
    assert bounded.schema["maximum"] == 3
    assert forms({"const": 1.5}) == [JsonText({"const": 1.5})]


@pytest.mark.parametrize(
    ("schema", "terms"),
    [
        ({"const": "a"}, ['("a")']),
        ({"enum": ["a", 'b"\n']}, ['("a" | "b\\"\\n")']),
        ({"type": "string", "pattern": "b+"}, ["/(?s:.*)(?:b+)(?s:.*)/"]),
        ({"type": "string", "pattern": "^b+$"}, ["/(?:b+)/"]),
        ({"type": "string", "pattern": "^[$^]\\$"}, ["/(?:[$^]\\$)(?s:.*)/"]),
        ({"type": "string", "pattern": "\\d/(a|b)$"}, ["/(?s:.*)(?:[0-9]\\/(a|b))/"]),
        ({"type": "string", "format": "date"}, []),
        ({"allOf": [STRING_OF_3, {"type": "string"}, True]}, ["/(?s:.{0,3})/"]),
    ],
)
def test_what_a_schema_says_of_a_string_holds_for_its_raw_text(
    schema: Any, terms: list[str]
) -> None:
    assert forms(schema) == [RawText(tuple(terms))]


@pytest.mark.parametrize("pattern", ["^a|b$", "a|b$", "a^b", "a$b", "(^a)"])
def test_patterns_with_anchors_within_are_refused(pattern: str) -> None:
    assert "pattern" in of_value({"type": "string", "pattern": pattern})


def test_branches_beside_other_keywords_are_refused_for_strings() -> None:
    schema = {"anyOf": [{"maxLength": 3}, {"minLength": 5}], "type": "string", "pattern": "a"}
    assert of_value(schema).startswith("anyOf at #/properties/a beside others")


# --- both --------------------------------------------------------------------------------------


STRING_OR_NULL = [
    RawText(("/(?s:.{0,3})/", f"~/{READS_AS['null']}/")),
    RawText(("/null/",)),
]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["string", "null"], "maxLength": 3},
        {"anyOf": [STRING_OF_3, {"type": "null"}]},
        {"oneOf": [{"type": "null"}, False, {"$ref": "#/$defs/text"}], "type": ["string", "null"]},
        {"anyOf": [{"$ref": "#/$defs/text"}, {"$ref": "#/$defs/nothing"}]},
    ],
)
def test_a_string_or_null_is_raw_text_that_does_not_read_as_null(schema: Any) -> None:
    definitions = {
        "text": STRING_OF_3,
        "nothing": {"$ref": "#/$defs/null"},
        "null": {"type": "null"},
    }
    assert forms(schema, **{"$defs": definitions}) == STRING_OR_NULL


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


def test_lark_strings_have_no_raw_control_characters() -> None:
    assert lark_string('a"\n\x7fé') == '"a\\"\\n\\u007fé"'
