"""Keywords that are enforced by means of others: what is allowed stays the same."""

from typing import Any

import pytest

from server.text.grammar.grammar_errors import GrammarError, Relaxation
from server.text.grammar.schemas import check_schema
from server.text.tokenizer import Tokenizer
from tests.server.text.grammars import of_schema, takes

COLOURS = {"title": "Colour", "type": "string", "enum": ["red", "green"]}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "n": {}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]}
PLACES = {
    "properties": {"a": {"enum": ["x"]}, "b": {"$ref": "#/properties/a"}},
    "prefixItems": [{"$ref": "#/prefixItems/1"}, {"type": "null"}],
    "components": {"s/~ é": {"type": "boolean"}},
}


def array(**fields: Any) -> dict[str, Any]:
    return {"type": "array", "uniqueItems": True, **fields}


def names(propertyNames: Any, **fields: Any) -> dict[str, Any]:  # noqa: N803
    return {"type": "object", "propertyNames": propertyNames, **fields}


def one_of(*branches: Any, **fields: Any) -> dict[str, Any]:
    return {"oneOf": list(branches), **fields}


SCHEMAS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (array(items=COLOURS), ["[]", '["green","red"]'], ['["red","red"]', '["blue"]']),
    (array(items=COLOURS, minItems=2), ['["red", "green"]'], ["[]", '["red"]']),
    (array(items={"$ref": "#/$defs/a"}, **{"$defs": {"a": COLOURS}}), ['["red"]'], ['["a"]']),
    (array(items={"type": "boolean"}), ["[true,false]"], ["[true,true]"]),
    (array(items={"anyOf": [{"type": "null"}, {"const": 1}]}), ["[1,null]"], ["[1,1]"]),
    (array(items={"enum": [1, 1, "1", True]}), ['[1,true,"1"]'], ["[1,1]"]),
    (array(items={"enum": [1, "a"], "type": ["integer"]}), ["[1]"], ['["a"]']),
    (array(maxItems=1), ["[]", '["any"]'], ["[1,1]"]),
    (
        array(items={"enum": [*range(19)]}, maxItems=2),
        ["[18,3]"],
        ["[3,3]", "[1,2,3]"],
    ),
    (names(COLOURS), ["{}", '{"red": 1, "green": 2}'], ['{"blue": 1}', '{"red":1,"red":1}']),
    (
        names(COLOURS, properties={"red": {"const": 1}, "blue": {}}, additionalProperties=False),
        ["{}", '{"red": 1}'],
        ['{"red": 2}', '{"blue": 1}', '{"green": 1}'],
    ),
    (
        names(COLOURS, additionalProperties={"type": "null"}, required=["green"]),
        ['{"green": null}', '{"red": null, "green": null}'],
        ["{}", '{"green": 1}'],
    ),
    (names({"anyOf": [{"const": "a"}, {"const": 2}]}), ['{"a": 1}'], ['{"2": 1}', '{"b": 1}']),
    (names({"pattern": "^k[0-9]$"}), ['{"k1": 1}'], ['{"k": 1}']),
    (names({"minLength": 2, "maxLength": 3}), ['{"é\\n": 1}', '{"abc": 1}'], ['{"a": 1}']),
    (names({"minLength": 1}, additionalProperties=COLOURS), ['{"a": "red"}'], ['{"": "red"}']),
    (names({}), ['{"": 1}'], ["[]"]),
    (names({"type": "string"}, properties={"a": {}}), ['{"b": 1}'], ["1"]),
    ({"properties": {"a": {"not": {}}}, "type": "object"}, ['{"b": 1}'], ['{"a": 1}']),
    ({"type": "number", "maximum": 1.7976931348623157e308}, ["-1e9", "6.02e23"], ['"1"']),
    ({"type": "number", "minimum": -(10**400), "maximum": 10**309}, ["1"], ["null"]),
    ({**PLACES, "$ref": "#/properties/b", "type": "string"}, ['"x"'], ['"y"']),
    ({**PLACES, "type": "array"}, ["[null]"], ["[1]"]),
    ({**PLACES, "$ref": "#/components/s~1~0%20%C3%A9"}, ["true"], ["1"]),
    (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
        ['{"a": {"a": {}}}'],
        ['{"a": 1}', '{"a": {"b": 1}}'],
    ),
    (
        one_of({"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, **{"$defs": {"a": CAT, "b": DOG}}),
        ['{"kind": "cat", "n": 1}', '{"kind": "dog"}'],
        ['{"kind": "cow"}', "{}"],
    ),
]


@pytest.mark.parametrize(("schema", "texts", "others"), SCHEMAS)
async def test_a_keyword_allows_what_it_says_and_nothing_else(
    tokenizer: Tokenizer, schema: dict[str, Any], texts: list[str], others: list[str]
) -> None:
    constraint = await of_schema(tokenizer, schema)
    assert [text for text in texts if not takes(constraint, tokenizer, text)] == []
    assert [text for text in others if takes(constraint, tokenizer, text)] == []


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (array(items={"type": "string"}), "uniqueItems at # is supported only for a few values"),
        (array(items={"enum": [1.5, 2]}), "uniqueItems at #"),
        (array(items={"enum": ["\n"]}), "uniqueItems at #"),
        (array(items={"anyOf": 1}), "anyOf at #/items has a value"),
        (array(items={"enum": [*range(300)]}), "uniqueItems at #"),
        (array(items={"enum": [*range(9)]}), "uniqueItems at # is supported only where"),
        (array(items=COLOURS, minItems=3), "uniqueItems at # leaves no array"),
        ({"uniqueItems": True, "items": COLOURS}, "uniqueItems at #"),
        (names({"format": "uuid"}), "propertyNames at # is supported only with"),
        (names(False), "propertyNames at # is supported only with"),
        (names({"minLength": 1, "pattern": "a"}), "propertyNames at # is supported only with"),
        (names({"minLength": 1}, properties={"a": {}}), "propertyNames at # is not supported"),
        (names(COLOURS, patternProperties={"r": {}}), "propertyNames at # is not supported"),
        ({"properties": {"p": {"$ref": "#/nowhere"}}}, "$ref at #/properties/p cannot be followed"),
        ({"prefixItems": [{}], "items": {"$ref": "#/prefixItems/1"}}, "$ref at #/items cannot"),
        ({"prefixItems": [{}], "items": {"$ref": "#/prefixItems/x"}}, "$ref at #/items cannot"),
        ({"items": {"$ref": "#anchor"}}, "$ref at #/items is supported within the schema only"),
    ],
)
def test_what_cannot_be_rewritten_is_refused(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(GrammarError) as caught:
        check_schema(schema)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("items", [{"anyOf": 1}, {"enum": [[]]}, {"$ref": "#/items"}, 5, True])
def test_what_cannot_be_rewritten_is_left_out(items: Any) -> None:
    relaxation = Relaxation(strict=False)
    assert check_schema(array(items=items), relaxation)["type"] == "array"
    assert "uniqueItems at #" in relaxation.not_enforced


@pytest.mark.parametrize(
    "branches",
    [
        [CAT, CAT],
        [CAT, {**DOG, "required": []}],
        [CAT, {**DOG, "type": ["object", "null"]}],
        [CAT, {**DOG, "properties": {"kind": {"type": "string"}}}],
        [CAT, {"$ref": "#/$defs/self"}],
    ],
)
def test_one_of_stays_where_branches_may_overlap(branches: list[Any]) -> None:
    definitions = {"self": {"$ref": "#/$defs/self"}}
    assert "anyOf" not in check_schema(one_of(*branches, **{"$defs": definitions}))
    assert "oneOf" in check_schema(one_of(CAT, DOG, anyOf=[{}]))
    assert check_schema(one_of(CAT, DOG)) == {"anyOf": [CAT, DOG]}
