"""Writes grammars for the values in Qwen3-Coder's calls, from each parameter's schema.

Strings are written without quotes, all other values as JSON. If a schema allows strings and other
types, a text is a string unless it is JSON of the other types (see ``argument_types``)."""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from llguidance import regex_to_lark

from server.text.calls.argument_types import STRING, argument_types
from server.text.grammar.grammar_errors import STRICT, GrammarError, Relaxation, pointer_step
from server.text.grammar.schemas import LARGEST_EXACT
from server.text.json_object import follow

MAX_DEPTH = 16
ROOT_KEYWORDS = {"type", "properties", "required", "additionalProperties", "$defs"}
BRANCHES = ("anyOf", "oneOf")
NUMBERS = r"-?[0-9]+(\.[0-9]+)?([eE][+\-]?[0-9]+)?"
SPACE = r"[\s\x1C-\x1F]*"
# By type: a regular expression for all texts that the parser of calls reads as JSON of the type.
READS_AS = {
    "number": f"{SPACE}{NUMBERS}{SPACE}",
    "integer": f"{SPACE}{NUMBERS}{SPACE}",
    "boolean": f"{SPACE}([Tt]rue|[Ff]alse){SPACE}",
    "null": f"{SPACE}(null|None){SPACE}",
    "object": SPACE + r"\{(?s:.*)",
    "array": SPACE + r"\[(?s:.*)",
}
# By type: a regular expression for a value whose schema allows strings as well as this type.
SCALARS = {
    "number": r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?",
    "integer": r"-?(0|[1-9][0-9]{0,14})",
    "boolean": "true|false",
    "null": "null",
}
SCALAR_KEYWORDS = {
    "$ref", "allOf", "anyOf", "exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum",
    "multipleOf", "oneOf",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RawText:
    """A value without quotes: a string, or a scalar of another type where strings are allowed."""

    terms: tuple[str, ...]
    """Lark terminals. The value must match all of them."""


@dataclass(frozen=True, slots=True)
class JsonText:
    """A value that is written as JSON."""

    schema: dict[str, Any]


ValueGrammar = RawText | JsonText


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a tool, and the forms in which a call may contain the parameter."""

    name: str | None
    """The parameter's name. None allows any name."""
    times: Literal["", "?", "*"]
    """The parameter occurs once, at most once ("?"), or any number of times ("*")."""
    values: list[ValueGrammar]


def xml_parameters(
    schema: dict[str, Any], relaxation: Relaxation = STRICT, place: str = "#"
) -> list[Parameter]:
    """Return the parameters of a schema that ``check_schema`` has checked. Raises GrammarError."""
    definitions = {"$defs": schema.get("$defs", {})}
    if schema.keys() - {"$defs"} == {"$ref"}:
        schema = definitions | _resolve(schema["$ref"], schema, MAX_DEPTH)
    for keyword in schema:
        with relaxation.at(place, keyword):
            if keyword not in ROOT_KEYWORDS:
                raise GrammarError("is not supported at the top in this model's calls")
    required = schema.get("required", [])
    others = "patternProperties" in schema or schema.get("additionalProperties", True)
    properties = {**schema.get("properties", {})}
    for name in required:
        properties.setdefault(name, others)
    root = {**schema, "properties": properties}
    if not properties and others is not False:
        return [Parameter(None, "*", _distinguish(_forms(others, root), root))]
    parameters = []
    for name, value in properties.items():
        with relaxation.at(place, "properties"):
            if name != name.strip() or not name or set(name) & set("<>\n"):
                raise GrammarError("has a name that this model's calls cannot hold")
            if value is not False or name in required:
                forms = _distinguish(_forms(True, root), root)
                with relaxation.at(f"{place}/properties/{pointer_step(name)}"):
                    if value is False:
                        raise GrammarError("cannot be satisfied by any answer")
                    forms = _distinguish(_forms(value, root), root)
                parameters.append(Parameter(name, "" if name in required else "?", forms))
    return parameters


def _distinguish(forms: list[ValueGrammar], root: dict[str, Any]) -> list[ValueGrammar]:
    """Exclude from the strings all texts that are JSON of another alternative for the value."""
    if all(isinstance(form, JsonText) for form in forms):
        return [_json_text(form, root) for form in forms if isinstance(form, JsonText)]
    values: list[ValueGrammar] = [form for form in forms if isinstance(form, RawText)]
    schemas = [form.schema for form in forms if isinstance(form, JsonText)]
    pairs = [(kind, schema) for schema in schemas for kind in sorted(_types(schema, root) - STRING)]
    unlike = tuple(f"~/{READS_AS[kind]}/" for kind in sorted({kind for kind, _ in pairs}))
    values = [RawText(form.terms + unlike) for form in values if isinstance(form, RawText)]
    for kind, schema in pairs:
        if kind in SCALARS:
            values.append(RawText((_scalar(kind, schema, root),)))
        else:
            values.append(_json_text(JsonText(schema | {"type": kind}), root))
    return values


def _scalar(kind: str, schema: dict[str, Any], root: dict[str, Any]) -> str:
    """Write a Lark terminal for a number, boolean or null if the value may also be a string."""
    depth = MAX_DEPTH
    while set(schema) - {"type"} == {"$ref"}:
        schema, depth = _resolve(schema["$ref"], root, depth), depth - 1
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        fitting = [json.dumps(value) for value in values if kind in _types({"const": value}, root)]
        return f"({' | '.join(map(lark_string, fitting))})"
    for keyword in schema:
        if keyword in SCALAR_KEYWORDS:
            raise GrammarError(
                "beside strings is not supported in this model's calls", None, keyword
            )
    return f"/{SCALARS[kind]}/"


def _forms(schema: Any, root: dict[str, Any], depth: int = MAX_DEPTH) -> list[ValueGrammar]:
    schema = {} if schema is True else schema
    types = _types(schema, root)
    if "string" not in types:
        return [JsonText(schema)]
    if "$ref" in schema and len(schema) == 1:
        return _forms(_resolve(schema["$ref"], root, depth), root, depth - 1)
    for keyword in BRANCHES:
        if set(schema) - {"type"} == {keyword} and depth:
            branches = [part for part in schema[keyword] if part is not False]
            return [form for part in branches for form in _forms(part, root, depth - 1)]
    if types == STRING:
        return [RawText(tuple(_terms(schema, root, depth)))]
    if "enum" in schema:
        return _forms_of_values(schema, root)
    rest = [JsonText(schema | {"type": kind}) for kind in sorted(types - STRING)]
    return [*rest, RawText(tuple(_terms(schema | {"type": "string"}, root, depth)))]


def _forms_of_values(schema: dict[str, Any], root: dict[str, Any]) -> list[ValueGrammar]:
    strings = [value for value in schema["enum"] if isinstance(value, str)]
    others = [value for value in schema["enum"] if not isinstance(value, str)]
    text = schema | {"type": "string", "enum": strings}
    return [JsonText({"enum": others}), RawText(tuple(_terms(text, root, MAX_DEPTH)))]


def _json_text(form: JsonText, root: dict[str, Any]) -> JsonText:
    """Add the definitions that $ref needs, and bounds for numbers that could be infinite."""
    schema = form.schema
    if "number" in _types(schema, root) and not {"enum", "const"} & set(schema):
        schema = {"minimum": -LARGEST_EXACT, "maximum": LARGEST_EXACT, **schema}
    return JsonText({**{name: root[name] for name in ("$defs",) if name in root}, **schema})


def _types(schema: Any, root: dict[str, Any]) -> frozenset[str]:
    """Return the JSON types that the parser of calls derives from the schema of a value."""
    return argument_types({**root, "properties": {"it": schema}}, "it")


def _resolve(reference: str, root: Any, depth: int) -> dict[str, Any]:
    target = follow(reference, root)
    if not isinstance(target, dict) or not depth:
        raise GrammarError("cannot be followed", keyword="$ref")
    return target


# --- terminals for strings ---------------------------------------------------------------------


def _terms(schema: dict[str, Any], root: dict[str, Any], depth: int) -> list[str]:
    """Write Lark terminals for a schema. A string of this schema must match all of them."""
    terms = []
    for keyword in BRANCHES:
        if keyword in schema:
            raise GrammarError(
                "beside others is not supported in this model's calls", None, keyword
            )
    if "$ref" in schema:
        terms += _terms(_resolve(schema["$ref"], root, depth), root, depth - 1)
    for part in schema.get("allOf", ()):
        terms += _terms(part if isinstance(part, dict) else {}, root, depth - 1)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        terms.append(f"({' | '.join(lark_string(value) for value in values)})")
    if "minLength" in schema or "maxLength" in schema:
        max_length = schema.get("maxLength", "")
        terms.append(f"/(?s:.{{{schema.get('minLength', 0)},{max_length}}})/")
    if "pattern" in schema:
        terms.append(f"/{_whole(schema['pattern'])}/")
    return terms


def lark_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _whole(pattern: str) -> str:
    """Turn a pattern that is searched in a text into a pattern that matches the whole text."""
    inner = pattern.removeprefix("^")
    begins = inner != pattern
    ends = inner.endswith("$") and not inner.endswith("\\$")
    inner = inner.removesuffix("$") if ends else inner
    plain = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", inner)
    if re.search(r"[$^]", plain) or ((begins or ends) and "|" in re.sub(r"\(.*\)", "", plain)):
        message = "with anchors in it is not supported in this model's calls"
        raise GrammarError(message, keyword="pattern")
    before, after = "" if begins else "(?s:.*)", "" if ends else "(?s:.*)"
    return f"{before}(?:{regex_to_lark(inner, 'dw')}){after}"
