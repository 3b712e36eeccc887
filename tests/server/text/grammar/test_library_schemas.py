"""Schemas as pydantic and zod write them for ordinary types."""

import enum
import json
import re
import uuid
from datetime import date
from decimal import Decimal
from random import Random
from typing import Annotated, Any, Literal

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field, TypeAdapter

from server.text.conversation import OutputFormat
from server.text.grammar.constraint_spec import ConstraintSpec
from server.text.tokenizer import Tokenizer
from tests.server.text.grammars import compiler, left_out, text_of, wander


class Colour(enum.Enum):
    RED, GREEN = "red", "green"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=0, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    friend: "Cat | Dog | None" = Field(None, discriminator="kind")


TYPES: dict[Any, list[str]] = {
    set[Colour]: [],
    frozenset[bool]: [],
    set[Literal["a", 1, None]]: [],
    dict[Colour, bool]: [],
    dict[Literal["a", "b"], int]: [],
    dict[Annotated[str, Field(min_length=1, max_length=2)], bool]: [],
    Annotated[Cat | Dog, Field(discriminator="kind")]: [],
    tuple[int, Colour]: [],
    Decimal | None: [],
    date | uuid.UUID: [],
    set[str]: ["uniqueItems at #"],
    dict[uuid.UUID, bool]: ["propertyNames at #"],
    re.Pattern: ["format at #"],
}
COLOURS = {"type": "string", "enum": ["red", "green"]}
LOOK = r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?$"
LARGEST = 1.7976931348623157e308
OF_ZOD: list[tuple[dict[str, Any], list[str]]] = [
    (
        {
            "type": "object",
            "propertyNames": COLOURS,
            "additionalProperties": {"type": "boolean"},
            "required": ["red", "green"],
        },
        [],
    ),
    ({"type": "number", "minimum": -LARGEST, "maximum": LARGEST}, []),
    ({"type": "object", "properties": {"a": {"not": {}}}, "additionalProperties": False}, []),
    ({"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}]}, []),
    ({"type": "string", "format": "hostname", "pattern": LOOK}, ["pattern at #"]),
    ({"type": "number", "maximum": 3.4028234663852886e38}, ["maximum at #"]),
]
ALL = [(TypeAdapter(kind).json_schema(), left) for kind, left in TYPES.items()] + OF_ZOD


def float64(text: str) -> float:
    """Read a number as those do that round 1e999 to the largest one."""
    return max(-LARGEST, min(float(text), LARGEST))


@pytest.mark.parametrize(("schema", "left"), ALL)
async def test_each_is_served_and_valid_where_all_is_enforced(
    tokenizer: Tokenizer, schema: dict[str, Any], left: list[str]
) -> None:
    spec = ConstraintSpec(OutputFormat("json_schema", schema, strict=False))
    made = compiler(tokenizer)
    constraint = await made.compile(spec)
    assert constraint is not None
    assert [*await left_out(made, spec)] == left
    for seed in range(3):
        tokens = wander(constraint, tokenizer, Random(seed), 200)
        if tokens is not None and not left:
            value = json.loads(text_of(tokenizer, tokens), parse_float=float64)
            Draft202012Validator(schema).validate(value)
