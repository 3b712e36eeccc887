"""Schemas of many kinds, whose answers end even where a model draws tokens at random."""

from typing import Any

Schema = dict[str, Any]


def text(most: int, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def closed(properties: Schema, *optional: str, **more: Any) -> Schema:
    """Return the schema of an object of these properties and no others."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **more,
    }


def several(items: Schema, least: int, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


PERSON = closed(
    {
        "name": text(12, minLength=1),
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": text(30, pattern="^[a-z]{1,8}@[a-z]{1,8}\\.(org|net)$"),
        "nickname": {"anyOf": [text(8), {"type": "null"}]},
    },
    "nickname",
)
NESTED = closed({"a": closed({"b": closed({"c": closed({"d": {"type": "boolean"}})}, "c")})})
ENUMS = closed(
    {
        "colour": {"enum": ["red", "green", "blue"]},
        "mixed": {"enum": [1, 2.5, True, None, "one", [1, {"two": 2}], {}]},
        "exactly": {"const": {"version": 3, "name": "fixed"}},
    }
)
BOUNDED_ARRAYS = closed(
    {
        "two_to_four": several({"type": "integer", "minimum": -5, "maximum": 5}, 2, 4),
        "matrix": several(several({"type": "number", "minimum": 0, "maximum": 1}, 2, 2), 2, 2),
        "none": several({"type": "null"}, 0, 0),
    }
)
# One child at most: with two, trees at random may grow faster than they end.
TREE: Schema = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": closed(
            {"label": text(6), "children": several({"$ref": "#/$defs/node"}, 0, 1)}, "children"
        )
    },
}
LIST: Schema = closed(
    {"value": {"type": "integer"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}
)
EVEN_ODD: Schema = {
    "$ref": "#/definitions/even",
    "definitions": {
        "even": {"anyOf": [{"const": "end"}, closed({"odd": {"$ref": "#/definitions/odd"}})]},
        "odd": {"anyOf": [{"const": "end"}, closed({"even": {"$ref": "#/definitions/even"}})]},
    },
}
UNICODE = closed(
    {
        "名前": text(8),
        "größe": {"enum": ["klein", "groß", "😀", "مرحبا", "e\u0301"]},
        'quote"\\\n': {"type": "boolean"},
        "letters": text(10, pattern="^[\u0430-\u044f]{1,5}$"),
    }
)
FORMATS = closed(
    {
        "id": {"type": "string", "format": "uuid"},
        "address": {"type": "string", "format": "ipv4"},
        "when": {"type": "string", "format": "time", "maxLength": 24},
    }
)
NUMBERS = closed(
    {
        "quarter": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 2},
        "third": {"type": "integer", "multipleOf": 3, "minimum": -30, "maximum": 30},
        "open": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
        "any": {"type": "number"},
        "big": {"type": "integer", "minimum": 10**12, "maximum": 10**15},
    }
)
UNION: Schema = {
    "anyOf": [
        closed({"kind": {"const": "circle"}, "radius": {"type": "integer"}}),
        closed({"kind": {"const": "square"}, "side": {"type": "integer"}}),
        {"type": "string", "enum": ["point"]},
    ]
}
TAGGED: Schema = {
    "oneOf": [
        closed({"kind": {"const": "a"}, "x": {"type": "boolean"}}),
        closed({"kind": {"const": "b"}, "y": text(4)}),
    ]
}
MERGED: Schema = {
    "allOf": [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"properties": {"a": {"maximum": 9, "minimum": 0}, "b": text(5)}, "required": ["b"]},
    ],
    "properties": {"a": True, "b": True},
    "unevaluatedProperties": True,
    "maxProperties": 2,
}
MAP: Schema = {
    "type": "object",
    "patternProperties": {"^[a-z]{1,4}$": {"type": "integer"}},
    "additionalProperties": False,
    "maxProperties": 3,
}
OPEN_MAP: Schema = {
    "type": "object",
    "properties": {"known": {"type": "integer"}},
    "required": ["known"],
    # Bounded, as keys of additionalProperties cannot be.
    "patternProperties": {"^x[a-z]{0,5}$": {"type": "boolean"}},
    "additionalProperties": False,
    "maxProperties": 3,
}
OPTIONAL = closed({name: {"type": "boolean"} for name in "abcdefgh"}, *"abcdefgh")
TUPLE: Schema = {
    "type": "array",
    "prefixItems": [{"type": "integer"}, text(3), {"type": "null"}],
    "items": {"type": "boolean"},
    "minItems": 2,
    "maxItems": 5,
}
SCALAR: Schema = {"type": ["integer", "boolean", "null"]}
LENGTHS = several(text(9, minLength=3), 1, 3)
INVOICE = closed(
    {
        "number": text(8, pattern="^[A-Z]{2}-[0-9]{4}$"),
        "lines": several(
            closed(
                {
                    "item": text(10),
                    "count": {"type": "integer", "minimum": 1, "maximum": 99},
                    "price": {"type": "number", "minimum": 0, "maximum": 1000},
                    "tags": several({"enum": ["new", "used", "gift"]}, 0, 2),
                },
                "tags",
            ),
            1,
            2,
        ),
        "paid": {"type": "boolean"},
    }
)

SCHEMAS: dict[str, Schema] = {
    "person": PERSON,
    "nested": NESTED,
    "enums": ENUMS,
    "bounded arrays": BOUNDED_ARRAYS,
    "tree": TREE,
    "linked list": LIST,
    "mutual recursion": EVEN_ODD,
    "unicode": UNICODE,
    "formats": FORMATS,
    "numbers": NUMBERS,
    "anyOf": UNION,
    "oneOf": TAGGED,
    "allOf": MERGED,
    "map": MAP,
    "open map": OPEN_MAP,
    "optional": OPTIONAL,
    "tuple": TUPLE,
    "scalar": SCALAR,
    "lengths": LENGTHS,
    "invoice": INVOICE,
}
# Objects of arguments that both formats of calls can hold.
TOOLS: dict[str, Schema] = {
    "greet": PERSON,
    "descend": NESTED,
    "choose": ENUMS,
    "measure": BOUNDED_ARRAYS,
    "translate": closed({"text": text(9, minLength=2), "größe": UNICODE["properties"]["größe"]}),
    "bill": INVOICE,
    "toggle": OPTIONAL,
    "plant": closed(
        {"tree": {"$ref": "#/$defs/node"}, "note": text(9)}, "note", **{"$defs": TREE["$defs"]}
    ),
    "ping": closed({}),
    "guess": closed({"it": {"type": ["string", "null", "boolean"], "maxLength": 6}}),
}
