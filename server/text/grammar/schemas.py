"""Reduces a JSON Schema to the keywords that llguidance enforces, or refuses the schema.

llguidance ignores unknown keywords. So every keyword that could constrain an answer is either
supported or refused by name. Only keywords that do not constrain answers are dropped."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from server.text.grammar.grammar_errors import GrammarError
from server.text.grammar.matcher import MAX_LEXER_STATES
from server.text.json_object import follow

MAX_PATTERNS = 8
ALTERNATIVES = ("anyOf", "oneOf")


def check_patterns(schema: Any) -> None:
    """Raise GrammarError if one string must match more than ``MAX_PATTERNS`` patterns.

    llguidance checks that some string matches all patterns, and each further pattern doubles the
    time: 16 patterns take a tenth of a second, and 24 patterns half a minute."""
    counter = _Counter(schema)
    try:
        max_count = max(map(counter.count, _parts(schema)), default=0)
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error
    if max_count > MAX_PATTERNS:
        raise GrammarError(f"pattern is supported up to {MAX_PATTERNS} times for one value")


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the schema and all objects inside it, even those that map names to schemas."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


class _Counter:
    """Counts the patterns that one value must match. Visits each part of a schema once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, int] = {}

    def count(self, schema: Any) -> int:
        """Count the patterns that one value must match, in a part of the schema and its $ref."""
        chain = []
        # References may form chains as long as the schema, so follow them without recursion.
        while isinstance(schema, dict) and id(schema) not in self._known:
            self._known[id(schema)] = 0  # until counted, because references may be circular
            chain.append(schema)
            schema = follow(schema.get("$ref"), self._root)
        count = self._known.get(id(schema), 0)
        for part in reversed(chain):
            count += self._own(part)
            self._known[id(part)] = count
        return count

    def _own(self, schema: dict[str, Any]) -> int:
        count = int(isinstance(schema.get("pattern"), str))
        count += sum(map(self.count, _list(schema.get("allOf"))))
        for keyword in ALTERNATIVES:
            count += max(map(self.count, _list(schema.get(keyword))), default=0)
        return count


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# Supported keywords of JSON Schema 2020-12 and older drafts, with the types of their values.
SCHEMA = (dict, bool)
VALUES: dict[str, tuple[type[Any], ...]] = {
    "$ref": (str,),
    "type": (str, list),
    "enum": (list,),
    "const": (object,),
    "anyOf": (list,),
    "oneOf": (list,),
    "allOf": (list,),
    "items": (*SCHEMA, list),
    "additionalItems": SCHEMA,
    "prefixItems": (list,),
    "minItems": (int,),
    "maxItems": (int,),
    "properties": (dict,),
    "additionalProperties": SCHEMA,
    "patternProperties": (dict,),
    "required": (list,),
    "minProperties": (int,),
    "maxProperties": (int,),
    "minLength": (int,),
    "maxLength": (int,),
    "pattern": (str,),
    "format": (str,),
    "minimum": (int, float),
    "maximum": (int, float),
    "exclusiveMinimum": (int, float, bool),
    "exclusiveMaximum": (int, float, bool),
    "multipleOf": (int, float),
    "$defs": (dict,),
    "definitions": (dict,),
}
REFUSED = frozenset(
    {
        "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired",
        "dependentSchemas", "else", "if", "maxContains", "minContains", "not", "propertyNames",
        "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
    }
)  # fmt: skip
# With these values a refused keyword constrains nothing. Schema generators write such values.
ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}
FORMATS = frozenset(
    {
        "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
    }
)  # fmt: skip
# Formats of JSON Schema that are refused. Unknown formats count as comments, and are ignored.
REFUSED_FORMATS = frozenset(
    {
        "idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex",
        "relative-json-pointer", "uri-reference", "uri-template",
    }
)  # fmt: skip
TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
COUNTS = frozenset(name for name, types in VALUES.items() if types == (int,))
PATTERNS = frozenset({"pattern", "patternProperties"})
SUBSCHEMAS = frozenset({"items", "additionalItems", "additionalProperties"})
PROPERTIES = frozenset({"properties", "patternProperties"})
LITERALS = frozenset({"const", "enum", "required"})
SUBSCHEMA_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
SUBSCHEMA_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
# The largest allowed number. llguidance computes in float64, which is exact up to here.
LARGEST_EXACT = 2**53
# An exclusive bound of at most LARGEST_CLOSED becomes an inclusive bound that differs by BESIDE.
BESIDE = 1e-9
LARGEST_CLOSED = 10**6
# Control characters that llguidance can write in strings.
WRITABLE_CONTROLS = frozenset("\b\f\n\r\t")
# Limits of a schema: llguidance recurses, and takes time with the square of its properties.
MAX_DEPTH = 50
MAX_SUBSCHEMAS = 5000
MAX_PROPERTIES = 1000
MAX_COUNT = 10**9
REPEAT = re.compile(r"\{([0-9]*)(?:,([0-9]*))?\}")


Schema = dict[str, Any] | bool


def check_schema(schema: Any) -> dict[str, Any]:
    """Return the schema with only the keywords that are enforced. Raises GrammarError."""
    cleaned = _Checker().clean(schema, 0)
    if cleaned is False:
        raise GrammarError("no answer can satisfy it")
    check_patterns(cleaned)
    return {} if isinstance(cleaned, bool) else cleaned


@dataclass(slots=True)
class _Checker:
    """Checks and reduces a schema in one pass."""

    subschemas: int = 0

    def clean(self, schema: Any, depth: int) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise GrammarError("a schema must be an object")
        self.subschemas += 1
        if depth > MAX_DEPTH:
            raise GrammarError(f"it is nested more than {MAX_DEPTH} deep")
        if self.subschemas > MAX_SUBSCHEMAS:
            raise GrammarError(f"it has more than {MAX_SUBSCHEMAS} parts")
        if depth and "$id" in schema:
            raise GrammarError("$id is not supported but at the top")
        cleaned = {}
        for keyword, value in schema.items():
            if keyword in REFUSED and value not in ASKS_NOTHING.get(keyword, ()):
                raise GrammarError(f"{keyword} is not supported")
            if keyword in VALUES:
                value = _typed(keyword, value)
                _check(keyword, value)
                cleaned[keyword] = self._subschemas(keyword, value, depth + 1)
        if cleaned.get("format") not in FORMATS:
            cleaned.pop("format", None)
        _close_bounds(cleaned)
        if cleaned.get("minProperties", 0) > len(set(cleaned.get("required", ()))) + 1:
            # llguidance does not consider that two additional properties may have one name.
            raise GrammarError("minProperties is supported up to one more than are required")
        return cleaned

    def _subschemas(self, keyword: str, value: Any, depth: int) -> Any:
        if keyword in SUBSCHEMA_MAPS:
            if len(value) > MAX_PROPERTIES and keyword in PROPERTIES:
                raise GrammarError(f"{keyword} has more than {MAX_PROPERTIES} entries")
            return {name: self.clean(part, depth) for name, part in value.items()}
        if keyword in SUBSCHEMA_LISTS and isinstance(value, list):
            return [self.clean(part, depth) for part in value]
        return self.clean(value, depth) if keyword in SUBSCHEMAS else value


def _close_bounds(schema: dict[str, Any]) -> None:
    """Turn exclusive integer bounds into inclusive bounds, because llguidance allows an exclusive
    bound itself if the other bound is less than 1 away."""
    for inclusive, exclusive, sign in (
        ("minimum", "exclusiveMinimum", 1),
        ("maximum", "exclusiveMaximum", -1),
    ):
        bound = schema.pop(exclusive, False)
        if bound is True:  # in draft 4, true makes the other bound exclusive
            bound = schema.pop(inclusive, False)
        if bound is False:
            continue
        if bound != int(bound) or abs(bound) > LARGEST_CLOSED:
            schema[exclusive] = bound
            continue
        closed = [bound + sign * BESIDE, schema.get(inclusive, -sign * math.inf)]
        schema[inclusive] = max(closed) if sign > 0 else min(closed)


def _typed(keyword: str, value: Any) -> Any:
    types = VALUES[keyword]
    if keyword in COUNTS and isinstance(value, float) and value.is_integer():
        value = int(value)
    is_wrong_bool = isinstance(value, bool) and not {bool, object} & set(types)
    if is_wrong_bool or not isinstance(value, types):
        raise GrammarError(f"{keyword} has a value that is not valid")
    if keyword in COUNTS and not 0 <= value <= MAX_COUNT:
        raise GrammarError(f"{keyword} is not between 0 and {MAX_COUNT}")
    return value


def _check(keyword: str, value: Any) -> None:
    """Raise GrammarError if a keyword's value is not supported."""
    named = [value] if isinstance(value, str) else value
    if keyword == "type" and not all(isinstance(n, str) and n in TYPES for n in named):
        raise GrammarError("type names a type that JSON does not have")
    if keyword == "format" and value in REFUSED_FORMATS:
        raise GrammarError(f"the format {value} is not supported")
    if keyword == "$ref" and not value.startswith("#"):
        raise GrammarError("$ref is supported within the schema only")
    if keyword == "enum" and not value:
        raise GrammarError("enum has no values")
    if keyword == "required" and not all(isinstance(name, str) for name in value):
        raise GrammarError("required must be a list of names")
    for pattern in named if keyword in PATTERNS else ():
        check_repeats(pattern)
    if keyword in LITERALS or not isinstance(value, str | list | dict):
        _check_literal(keyword, value, 0)
    if keyword in SUBSCHEMA_MAPS:
        _check_literal(keyword, list(value), 0)


def check_repeats(pattern: str) -> None:
    """Raise GrammarError if a pattern or a grammar repeats one of its parts too often."""
    for counts in REPEAT.findall(pattern):
        # Count the digits first, because converting a very long number is slow.
        if any(len(count) > 9 or int(count or 0) > MAX_LEXER_STATES for count in counts):
            raise GrammarError(f"a repeat of more than {MAX_LEXER_STATES} is not supported")


def _check_literal(keyword: str, value: Any, depth: int) -> None:
    """Raise GrammarError if llguidance cannot write a keyword's value exactly."""
    if depth > MAX_DEPTH:
        raise GrammarError(f"{keyword} is nested more than {MAX_DEPTH} deep")
    if isinstance(value, str) and any(is_control(character) for character in value):
        raise GrammarError(f"{keyword} has control characters that are not supported")
    if isinstance(value, int | float) and not -LARGEST_EXACT <= value <= LARGEST_EXACT:
        raise GrammarError(f"{keyword} has a number that is too large to be exact")
    if isinstance(value, dict):
        _check_literal(keyword, list(value), depth)
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            _check_literal(keyword, part, depth + 1)


def is_control(character: str) -> bool:
    """Return True if JSON can contain a character only as a numeric escape."""
    return (character < " " or character == "\x7f") and character not in WRITABLE_CONTROLS
