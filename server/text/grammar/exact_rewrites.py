"""Rewrite what llguidance does not know, or takes long for, into what allows the same answers."""

import json
import math
from itertools import permutations
from typing import Any

from server.text.grammar.grammar_errors import GrammarError
from server.text.json_object import follow

# finite_values lists up to MAX_VALUES values, and unique_items up to MAX_ARRAYS arrays.
MAX_VALUES, MAX_ARRAYS = 256, 400
MAX_REFERENCES = 8
ANNOTATIONS = {"$comment", "default", "deprecated", "description", "examples", "id", "title"}
ARRAY_KEYWORDS = {"type", "items", "minItems", "maxItems"}
ALL_VALUES: dict[object, list[Any]] = {"boolean": [False, True], "null": [None]}
ALTERNATIVES = ({"anyOf"}, {"oneOf"})
NAMES_OF = {bool: ["boolean"], int: ["integer", "number"], str: ["string"], type(None): ["null"]}


def distinct(schemas: list[Any]) -> list[Any]:
    """Leave out repeated schemas. llguidance's time grows with the cube of their number if they
    refer to themselves."""
    return list({json.dumps(schema): schema for schema in schemas}.values())


def finite_values(schema: Any, root: Any) -> list[Any] | None:
    """Return all values that a schema allows, or None if there are many or some are not scalars."""
    constraints = _resolved(schema, root)
    (parts,) = constraints.values() if set(constraints) in ALTERNATIVES else ([constraints],)
    if not isinstance(parts, list):
        return None
    values: dict[tuple[type, Any], Any] = {}
    for part in parts:
        own = _own_values(_constraints(part))
        if own is None or len(own) + len(values) > MAX_VALUES:
            return None
        values |= {(type(value), value): value for value in own}
    return list(values.values())


def _constraints(schema: Any) -> dict[str, Any]:
    """Return a schema without its annotations."""
    fields = schema.items() if isinstance(schema, dict) else ()
    return {keyword: value for keyword, value in fields if keyword not in ANNOTATIONS}


def _resolved(schema: Any, root: Any) -> dict[str, Any]:
    """Return a schema without annotations, or the target if the schema is only a reference."""
    constraints = _constraints(schema)
    for _ in range(MAX_REFERENCES):
        if set(constraints) == {"$ref"}:
            constraints = _constraints(follow(constraints["$ref"], root))
    return constraints


def _own_values(schema: dict[str, Any]) -> list[Any] | None:
    match schema:
        case {"const": value, **others}:
            values = [value]
        case {"enum": list(values), **others}:
            pass
        case {"type": str(kind), **others} if kind in ALL_VALUES:
            values = ALL_VALUES[kind]
        case _:
            return None
    types = others.pop("type", ["boolean", "integer", "null", "string"])
    if others or not all(map(_is_plain, values)):
        return None
    types = types if isinstance(types, list) else [types]
    return [value for value in values if any(name in types for name in NAMES_OF[type(value)])]


def _is_plain(value: Any) -> bool:
    return value.isprintable() if isinstance(value, str) else type(value) in NAMES_OF


def unique_items(schema: dict[str, Any], values: list[Any] | None) -> None:
    """Replace uniqueItems by all arrays of different ``values``. Raises GrammarError."""
    low, high = schema.get("minItems", 0), schema.get("maxItems", math.inf)
    if high <= 1:
        return
    if values is None or schema.get("type") != "array" or schema.keys() - ARRAY_KEYWORDS:
        raise GrammarError("is supported only for a few values")
    lengths = range(low, min(len(values), high) + 1)
    if sum(math.perm(len(values), length) for length in lengths) > MAX_ARRAYS:
        raise GrammarError(f"is supported only where it leaves up to {MAX_ARRAYS} arrays")
    arrays = [list(array) for length in lengths for array in permutations(values, length)]
    if not arrays:
        raise GrammarError("leaves no array that is long enough")
    schema.clear()
    schema["enum"] = arrays


def close_names(schema: dict[str, Any], names: Any, values: list[Any] | None) -> None:
    """Replace propertyNames, whose value is ``names``. ``values`` are all names that it allows, or
    None if they cannot be listed. Raises GrammarError."""
    own, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    constraints = {True: {}, False: {"type": "null"}}[names] if isinstance(names, bool) else names
    kind, lengths = constraints.get("type", "string"), constraints.keys() - {"type"}
    if not lengths and kind == "string":
        return
    if "patternProperties" in schema or (own and values is None):
        raise GrammarError("is not supported beside other names")
    if values is not None:
        all_names = dict.fromkeys([*own, *(name for name in values if isinstance(name, str))])
        schema["properties"] = {
            name: own.get(name, rest) if name in values else False for name in all_names
        }
    elif kind == "string" and lengths == {"pattern"}:
        schema["patternProperties"] = {constraints["pattern"]: rest}
    elif kind == "string" and lengths <= {"minLength", "maxLength"}:
        low, high = constraints.get("minLength", 0), constraints.get("maxLength", "")
        schema["patternProperties"] = {f"^(?s:.{{{low},{high}}})$": rest}
    else:
        raise GrammarError("is supported only with an enum, a pattern or lengths")
    schema["additionalProperties"] = False


def are_disjoint(branches: list[Any], root: Any) -> bool:
    """Return True if the value of one required property shows which branch an object matches."""
    required = []
    for branch in branches:
        match _resolved(branch, root):
            case {"type": "object", "required": list(names), "properties": dict(properties)}:
                required.append({name: properties[name] for name in properties if name in names})
            case _:
                return False
    for name in set(required[0]).intersection(*required[1:]):
        values = [finite_values(properties[name], root) for properties in required]
        pairs = [(type(value), value) for own in values for value in own or (None, None)]
        if len(pairs) == len(set(pairs)):
            return True
    return False
