"""Whatever a grammar allows satisfies its schema, for schemas at random of every keyword."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from server.text.conversation import OutputFormat
from server.text.grammar.constraint_spec import ConstraintSpec
from server.text.grammar.grammar_errors import GrammarError
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.models import write_tokenizer
from tests.server.text.grammars import compiler, text_of, wander
from tests.structured.schemas import Schema

LEAVES = ("string", "integer", "number", "boolean", "null", "enum", "const", "types")
INNER = ("array", "tuple", "object", "map", "union", "all", "reference")
MAX_DEPTH = 3
PATTERNS = (
    "^[a-c]*$", "[0-9]", "^a", "b$", "^(ab|c)+$", "\u00e9", "^.{1,3}$", "^\\w+$", "^[^a]*$", "a|b",
)  # fmt: skip
KEY_PATTERNS = ("^[a-c]{1,3}$", "^x", "z$", "[0-9]")
NAMES = ("a", "b", "ab", "\u00e9", 'a"b', "x-1", "0", " ", "A\n")
VALUES: tuple[Any, ...] = (
    1, "a", None, True, 2.5, [1, 2], {"k": "v"}, "\u00e9\n", -3, 0.1, 100_000, "", [], {},
)  # fmt: skip


class RandomSchemas:
    """Draws schemas; one seed is one row of them."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._definitions: dict[str, Schema] = {}

    def draw(self) -> Schema:
        """Return a schema whose answers are short; some cannot be satisfied."""
        self._definitions = {}
        schema = self._any(0)
        return {**schema, "$defs": self._definitions} if self._definitions else schema

    def _any(self, depth: int) -> Schema:
        kind = self._rng.choice(LEAVES + INNER if depth < MAX_DEPTH else LEAVES)
        schema: Schema = getattr(self, f"_{kind}")(depth)
        return schema

    def _string(self, _: int) -> Schema:
        rng = self._rng
        schema: Schema = {"type": "string", "maxLength": rng.randint(0, 8)}
        if rng.random() < 0.3:
            return schema | {"pattern": rng.choice(PATTERNS)}
        return schema | ({"minLength": rng.randint(0, schema["maxLength"])} if coin(rng) else {})

    def _integer(self, _: int) -> Schema:
        return {"type": "integer", **self._bounds()}

    def _number(self, _: int) -> Schema:
        return {"type": "number", **self._bounds()}

    def _bounds(self) -> Schema:
        rng = self._rng
        schema: Schema = {}
        for bound in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if rng.random() < 0.35:
                schema[bound] = rng.choice([rng.randint(-9, 9), round(rng.uniform(-9, 9), 2)])
        return schema | ({"multipleOf": rng.choice([2, 3, 0.5])} if rng.random() < 0.15 else {})

    def _boolean(self, _: int) -> Schema:
        return {"type": "boolean"}

    def _null(self, _: int) -> Schema:
        return {"type": "null"}

    def _enum(self, _: int) -> Schema:
        return {"enum": self._rng.sample(VALUES, self._rng.randint(1, 4))}

    def _const(self, _: int) -> Schema:
        return {"const": self._rng.choice(VALUES)}

    def _types(self, _: int) -> Schema:
        kinds = self._rng.sample(["string", "integer", "null", "boolean"], 2)
        return {"type": kinds, "maxLength": 3, "minimum": self._rng.randint(-3, 3)}

    def _array(self, depth: int) -> Schema:
        most = self._rng.randint(0, 3)
        least = {"minItems": self._rng.randint(0, most)} if coin(self._rng) else {}
        return {"type": "array", "items": self._any(depth + 1), "maxItems": most, **least}

    def _tuple(self, depth: int) -> Schema:
        first = [self._any(depth + 1) for _ in range(self._rng.randint(1, 3))]
        rest = self._rng.choice([False, self._any(depth + 1)])
        return {"type": "array", "prefixItems": first, "items": rest, "maxItems": 4}

    def _object(self, depth: int) -> Schema:
        rng = self._rng
        names = rng.sample(NAMES, rng.randint(0, 4))
        required = [name for name in names if coin(rng)]
        schema = {
            "type": "object",
            "properties": {name: self._any(depth + 1) for name in names},
            "required": required,
            "additionalProperties": False,
        }
        if len(required) == len(names) and coin(rng):
            schema |= {"additionalProperties": self._any(depth + 1)}
            schema |= {"maxProperties": len(names) + rng.randint(0, 2)}
            schema |= {"minProperties": len(names)}
        return schema

    def _map(self, depth: int) -> Schema:
        return {
            "type": "object",
            "patternProperties": {self._rng.choice(KEY_PATTERNS): self._any(depth + 1)},
            "additionalProperties": self._rng.choice([False, {"type": "null"}]),
            "maxProperties": self._rng.randint(0, 2),
        }

    def _union(self, depth: int) -> Schema:
        keyword = self._rng.choice(["anyOf", "anyOf", "oneOf"])
        return {keyword: [self._any(depth + 1) for _ in range(self._rng.randint(1, 3))]}

    def _all(self, depth: int) -> Schema:
        first = self._any(depth + 1)
        part = {name: value for name, value in first.items() if coin(self._rng)}
        return {"allOf": [first, self._rng.choice([part, self._any(depth + 1)])]}

    def _reference(self, depth: int) -> Schema:
        name = f"d{len(self._definitions)}"
        self._definitions[name] = {}
        self._definitions[name] = self._any(depth + 1)
        return {"$ref": f"#/$defs/{name}", **({"title": "t"} if coin(self._rng) else {})}


def coin(rng: Random) -> bool:
    return rng.random() < 0.5


SCHEMAS = 200
MOST_TOKENS = 2000


@pytest.mark.parametrize("seed", range(3))
async def test_answers_at_random_satisfy_schemas_at_random(tmp_path: Path, seed: int) -> None:
    write_tokenizer(tmp_path, VOCAB)
    tokenizer = Tokenizer(tmp_path)
    made, schemas, rng = compiler(tokenizer), RandomSchemas(seed), Random(seed)
    judged = 0
    for _ in range(SCHEMAS):
        schema = schemas.draw()
        try:
            constraint = await made.compile(ConstraintSpec(OutputFormat("json_schema", schema)))
        except GrammarError:
            continue
        assert constraint is not None
        tokens = wander(constraint, tokenizer, rng, MOST_TOKENS)
        if tokens is not None:
            value = json.loads(text_of(tokenizer, tokens))
            found = [error.message for error in Draft202012Validator(schema).iter_errors(value)]
            assert not found, (schema, value)
            judged += 1
    assert judged > SCHEMAS / 2
