"""Reduces a JSON Schema to the keywords that llguidance enforces, or refuses the schema.

llguidance ignores unknown keywords. So an unsupported keyword that could constrain an answer is
refused by name if the client asked for strictness, and otherwise left out and listed. Keywords
without effect are dropped. References may lead to any place of a schema, so they are rewritten."""

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from server.text.grammar.exact_rewrites import (
    are_disjoint,
    close_names,
    distinct,
    finite_values,
    unique_items,
)
from server.text.grammar.grammar_errors import STRICT, GrammarError, Relaxation, pointer_step
from server.text.grammar.matcher import MAX_LEXER_STATES
from server.text.grammar.probing import OTHERS, mend
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
        """Count the patterns that one value must match, in ``schema`` and in its $ref's target."""
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
SCHEMA, COUNT = (dict, bool), (int,)
TYPES_OF_VALUES: dict[tuple[type[Any], ...], tuple[str, ...]] = {
    (str,): ("$ref", "format", "pattern"),
    (str, list): ("type",),
    (list,): ("allOf", "anyOf", "enum", "oneOf", "prefixItems", "required"),
    (dict,): ("patternProperties", "properties"),
    SCHEMA: ("additionalItems", "additionalProperties", "propertyNames"),
    (*SCHEMA, list): ("items",),
    COUNT: ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"),
    (int, float): ("maximum", "minimum", "multipleOf"),
    (int, float, bool): ("exclusiveMaximum", "exclusiveMinimum"),
    (bool,): ("uniqueItems",),
    (object,): ("const",),
}
VALUES = {name: types for types, names in TYPES_OF_VALUES.items() for name in names}
REFUSED = frozenset(
    {
        "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired",
        "dependentSchemas", "else", "if", "maxContains", "minContains", "not", "then",
        "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
# With these values a refused keyword constrains nothing. Schema generators write such values.
ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "not": (False,),
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
COUNTS = frozenset(TYPES_OF_VALUES[COUNT])
PATTERNS = frozenset({"pattern", "patternProperties"})
SUBSCHEMAS = frozenset({"items", "additionalItems", "additionalProperties", "propertyNames"})
LITERALS = frozenset({"const", "enum", "required"})
SUBSCHEMA_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
REPEATABLE = frozenset({"allOf", "anyOf"})
SUBSCHEMA_MAPS = frozenset({"properties", "patternProperties"})
# The largest number: llguidance computes in float64, which is exact up to here.
LARGEST_EXACT = 2**53
# An exclusive bound of at most LARGEST_CLOSED becomes an inclusive bound that differs by BESIDE.
BESIDE = 1e-9
LARGEST_CLOSED = 10**6
# Control characters that llguidance cannot write in strings.
REFUSED_CONTROLS = frozenset({*map(chr, range(32)), "\x7f"} - set("\b\f\n\r\t"))
# Limits of a schema. llguidance recurses, and its time grows with the square of the properties.
MAX_DEPTH = 50
MAX_SUBSCHEMAS = 5000
MAX_PROPERTIES = 1000
MAX_COUNT = 10**9
REPEAT = re.compile(r"\{([0-9]*)(?:,([0-9]*))?\}")


Schema = dict[str, Any] | bool


def check_schema(schema: Any, relaxation: Relaxation = STRICT, place: str = "#") -> dict[str, Any]:
    """Return the schema with only the keywords that are enforced. ``place`` is the beginning of the
    JSON pointers by which errors name parts of the schema. Raises GrammarError."""
    check_patterns(schema)  # before llguidance reads any part
    cleaned = _Checker(schema, relaxation, place).clean_root()
    if cleaned is False:
        raise GrammarError("no answer can satisfy it")
    return {} if isinstance(cleaned, bool) else cleaned


@dataclass(slots=True)
class _Checker:
    """Checks and reduces a schema in one pass."""

    root: Any
    relaxation: Relaxation
    place: str
    subschemas: int = 0
    names: dict[str, str] = field(default_factory=dict)
    """Maps each $ref to the name of the definition that its target becomes."""
    waiting: list[str] = field(default_factory=list)
    """References whose targets have not been checked and reduced yet."""

    def clean_root(self) -> Schema:
        cleaned = self.clean(self.root, 0, self.place)
        definitions: dict[str, Schema] = {}
        while self.waiting:
            reference = self.waiting.pop()
            place = self.place.removesuffix("#") + quote(reference, safe="#/%~$")
            target = follow(reference, self.root)
            definitions[self.names[reference]] = self.clean(target, 1, place)
        if definitions and isinstance(cleaned, dict):
            cleaned["$defs"] = definitions
        return cleaned

    def clean(self, schema: Any, depth: int, place: str) -> Schema:
        with self.relaxation.at(place):
            if isinstance(schema, bool):
                return schema
            if not isinstance(schema, dict):
                raise GrammarError("must be an object")
            self.subschemas += 1
            if depth > MAX_DEPTH:
                raise GrammarError(f"is nested more than {MAX_DEPTH} deep")
            if self.subschemas > MAX_SUBSCHEMAS:
                raise GrammarError(f"has more than {MAX_SUBSCHEMAS} parts")
            if depth and "$id" in schema:
                raise GrammarError("is not supported but at the top", keyword="$id")
            return schema.get("not") not in (True, {}) and self._reduce(schema, depth, place)
        return True

    def _reduce(self, schema: dict[str, Any], depth: int, place: str) -> Schema:
        cleaned: dict[str, Any] = {}
        for keyword, value in schema.items():
            with self.relaxation.at(place, keyword):
                if keyword in REFUSED and value not in ASKS_NOTHING.get(keyword, ()):
                    raise GrammarError("is not supported")
                if keyword in VALUES:
                    value = _typed(keyword, value)
                    if _is_always_true(keyword, value):
                        continue
                    _check(keyword, value)
                    cleaned[keyword] = self._subschemas(keyword, value, depth + 1, place)
        for keyword in OTHERS.keys() & schema.keys() - cleaned.keys():
            cleaned.pop(OTHERS[keyword], None)
        if cleaned.get("format") not in FORMATS:
            cleaned.pop("format", None)
        _close_bounds(cleaned)
        with self.relaxation.at(place, "minProperties"):
            _check_count(cleaned)
        return self._rewrite(schema, cleaned, place)

    def _rewrite(self, schema: dict[str, Any], cleaned: dict[str, Any], place: str) -> Schema:
        branches = cleaned.get("oneOf") and "anyOf" not in cleaned and schema["oneOf"]
        if branches and are_disjoint(branches, self.root):
            cleaned["anyOf"] = cleaned.pop("oneOf")
        names, unique = cleaned.pop("propertyNames", True), cleaned.pop("uniqueItems", False)
        with self.relaxation.at(place, "propertyNames"):
            close_names(cleaned, names, finite_values(schema.get("propertyNames"), self.root))
        with self.relaxation.at(place, "uniqueItems"):
            if unique:
                unique_items(cleaned, finite_values(schema.get("items"), self.root))
        if self.relaxation.probes:
            return mend(cleaned, self.relaxation, place)
        return cleaned

    def _subschemas(self, keyword: str, value: Any, depth: int, place: str) -> Any:
        place = f"{place}/{keyword}"
        if keyword == "$ref":
            return self._definition(value)
        if keyword in SUBSCHEMA_MAPS:
            if len(value) > MAX_PROPERTIES:
                raise GrammarError(f"has more than {MAX_PROPERTIES} entries")
            return {
                name: self.clean(part, depth, f"{place}/{pointer_step(name)}")
                for name, part in value.items()
            }
        if keyword in SUBSCHEMA_LISTS and isinstance(value, list):
            parts = [self.clean(part, depth, f"{place}/{n}") for n, part in enumerate(value)]
            return distinct(parts) if keyword in REPEATABLE else parts
        return self.clean(value, depth, place) if keyword in SUBSCHEMAS else value

    def _definition(self, reference: str) -> str:
        if follow(reference, self.root) is None:
            raise GrammarError("cannot be followed")
        if reference not in self.names:
            self.names[reference] = str(len(self.names))
            self.waiting.append(reference)
        return f"#/$defs/{self.names[reference]}"


def _check_count(schema: dict[str, Any]) -> None:
    if schema.get("minProperties", 0) > len(set(schema.get("required", ()))) + 1:
        # llguidance would count two additional properties with the same name as two.
        del schema["minProperties"]
        raise GrammarError("is supported up to one more than are required")


def _is_always_true(keyword: str, value: Any) -> bool:
    """Return whether a bound allows every float64."""
    bound = value if keyword == "maximum" else -value if keyword == "minimum" else 0
    return bound >= sys.float_info.max


def _close_bounds(schema: dict[str, Any]) -> None:
    """Turn exclusive integer bounds into inclusive ones, because llguidance allows the number of an
    exclusive bound if the other bound is less than 1 away."""
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
        raise GrammarError("has a value that is not valid")
    if keyword in COUNTS and not 0 <= value <= MAX_COUNT:
        raise GrammarError(f"is not between 0 and {MAX_COUNT}")
    return value


def _check(keyword: str, value: Any) -> None:
    """Raise GrammarError if a keyword's value is not supported."""
    named = [value] if isinstance(value, str) else value
    if keyword == "type" and not all(isinstance(n, str) and n in TYPES for n in named):
        raise GrammarError("names a type that JSON does not have")
    if keyword == "format" and value in REFUSED_FORMATS:
        raise GrammarError(f"{value} is not supported")
    if keyword == "$ref" and not re.match("#(/|$)", value):
        raise GrammarError("is supported within the schema only")
    if keyword == "enum" and not value:
        raise GrammarError("has no values")
    if keyword == "required" and not all(isinstance(name, str) for name in value):
        raise GrammarError("must be a list of names")
    for pattern in named if keyword in PATTERNS else ():
        check_repeats(pattern, keyword)
    if keyword in LITERALS or not isinstance(value, str | list | dict):
        _check_literal(value, 0)
    if keyword in SUBSCHEMA_MAPS:
        _check_literal(list(value), 0)


def check_repeats(pattern: str, keyword: str = "it") -> None:
    """Raise GrammarError if a pattern or a grammar repeats one of its parts too often."""
    for counts in REPEAT.findall(pattern):
        # Count the digits first, because converting a very long number is slow.
        if any(len(count) > 9 or int(count or 0) > MAX_LEXER_STATES for count in counts):
            message = f"has a repeat of more than {MAX_LEXER_STATES}"
            raise GrammarError(message, keyword=keyword)


def _check_literal(value: Any, depth: int) -> None:
    """Raise GrammarError if llguidance cannot write a value exactly."""
    if depth > MAX_DEPTH:
        raise GrammarError(f"is nested more than {MAX_DEPTH} deep")
    if isinstance(value, str) and not REFUSED_CONTROLS.isdisjoint(value):
        raise GrammarError("has control characters that are not supported")
    if isinstance(value, int | float) and not -LARGEST_EXACT <= value <= LARGEST_EXACT:
        raise GrammarError("has a number that is too large to be exact")
    if isinstance(value, dict):
        _check_literal(list(value), depth)
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            _check_literal(part, depth + 1)
