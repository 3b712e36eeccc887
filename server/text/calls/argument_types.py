"""Find JSON types that a tool's schema allows, for call formats that do not quote strings."""

import ast
import json
import warnings
from contextlib import suppress
from typing import Any

from server.text.json_object import follow, has_many_values

ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
STRING = frozenset({"string"})
MAX_DEPTH = 16
INFINITY = float("inf")
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
SCALARS = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string"}
JSON_WORDS = {"true": True, "false": False, "null": None}


def argument_types(parameters: dict[str, Any] | None, name: str) -> frozenset[str]:
    """Return the argument's JSON types in the schema, or all types if the schema names none."""
    properties = (parameters or {}).get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    return _types(schema, parameters, MAX_DEPTH)


def _types(schema: Any, root: Any, depth: int) -> frozenset[str]:
    if not isinstance(schema, dict) or depth == 0:
        return ALL_TYPES
    types = ALL_TYPES
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        known = frozenset(each for each in named if isinstance(each, str)) & ALL_TYPES
        types &= known or ALL_TYPES
    if "const" in schema:
        types &= {_type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        types &= {_type_of(value) for value in schema["enum"]}
    if isinstance(schema.get("$ref"), str):
        types &= _types(follow(schema["$ref"], root), root, depth - 1)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            branches = [_types(branch, root, depth - 1) for branch in schema[keyword]]
            types &= frozenset().union(*branches)
    if isinstance(schema.get("allOf"), list):
        types = types.intersection(*(_types(part, root, depth - 1) for part in schema["allOf"]))
    return types or ALL_TYPES


def _type_of(value: Any) -> str:
    return "object" if isinstance(value, dict) else SCALARS.get(type(value), "array")


def as_json(text: str, types: frozenset[str]) -> str:
    """Write an argument's text as JSON of one of ``types``, or as a JSON string if that fails."""
    quoted = json.dumps(text, ensure_ascii=False)
    if types == STRING:
        return quoted
    written = text.strip()
    written = PYTHON_WORDS.get(written, written)
    try:
        value = json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        if "string" in types:
            return quoted
        try:
            value = _lenient_value(written, types)
            written = json.dumps(value, ensure_ascii=False, allow_nan=False)
            written.encode()
        except (ArithmeticError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
            return quoted
    kind = _type_of(value)
    if kind == "number" and "number" not in types and value.is_integer():
        return str(int(value)) if "integer" in types else quoted
    if kind == "integer" and "number" in types:
        kind = "number"
    is_other = kind == "string" or kind not in types or value in (INFINITY, -INFINITY)
    return quoted if is_other else written


def _lenient_value(text: str, types: frozenset[str]) -> Any:
    """Read a value in faulty JSON or in Python's syntax. Raises the errors of Python's parsers."""
    if text.lower() in JSON_WORDS:
        return JSON_WORDS[text.lower()]
    if types & {"integer", "number"}:
        for number in (int, float):
            with suppress(ValueError):
                return number(text)
    if not text.startswith(("[", "{", "(")) or has_many_values(text):
        raise ValueError("it is no list and no object, or too large")
    with suppress(ValueError):
        return json.loads(text, strict=False, parse_constant=_refuse)
    with warnings.catch_warnings(action="ignore"):
        return ast.literal_eval(text)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
