import json
from typing import Any

import pytest
from pydantic import ValidationError

from server.protocol.common import StructureFields
from server.protocol.wire_errors import ApiError
from server.text.conversation import OutputFormat

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TEXT = json.dumps(SCHEMA)


def read(**given: Any) -> OutputFormat | None:
    return StructureFields.model_validate_json(json.dumps(given)).output_format()


def named(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", **fields}}


def schema(param: str) -> OutputFormat:
    return OutputFormat("json_schema", SCHEMA, param)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"type": "text"}, None),
        ({"type": "text", "schema": SCHEMA}, None),
        ({"type": "json_object"}, OutputFormat("json_object")),
        ({"type": "json_object", "schema": SCHEMA}, schema("response_format.schema")),
        (named(schema=SCHEMA), schema("response_format.json_schema.schema")),
        (
            named(schema=SCHEMA, strict=False, description="d"),
            schema("response_format.json_schema.schema"),
        ),
        ({"type": "json_schema", "schema": SCHEMA}, schema("response_format.schema")),
        (named(), OutputFormat("json_object")),
        (named(schema=None, strict=None), OutputFormat("json_object")),
        (
            named(schema=True),
            OutputFormat("json_schema", True, "response_format.json_schema.schema"),
        ),
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
