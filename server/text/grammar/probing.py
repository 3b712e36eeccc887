"""Find the keywords of a schema that llguidance refuses."""

import json
import re
from typing import Any

from llguidance import LLMatcher

from server.text.grammar.exact_rewrites import distinct
from server.text.grammar.grammar_errors import UNUSABLE, GrammarError, Relaxation, meaning

# Keywords that are left out on trial, the likeliest cause first. All others are tried later.
SUSPECTS = ("oneOf", "pattern", "minProperties", "patternProperties", "allOf", "$ref", "required")
# Without the first keyword of a pair, the second would cover all parts, so leave out both.
OTHERS = {
    "properties": "additionalProperties",
    "patternProperties": "additionalProperties",
    "prefixItems": "items",
    "items": "additionalItems",
}


# In a schema as JSON, the names of the definitions that it refers to.
REFERENCE = re.compile(r'"\$ref": "#/\$defs/(\d+)"')


def mend(schema: dict[str, Any], relaxation: Relaxation, place: str) -> dict[str, Any]:
    """Return the schema without keywords that llguidance refuses. Its parts are already mended.
    Raises GrammarError if the schema must be strict."""

    def fault_of(schema: dict[str, Any]) -> str:
        # Each definition is tested on its own, so all definitions count as true here.
        definitions = dict.fromkeys(REFERENCE.findall(json.dumps(schema)), True)
        grammar = {"grammars": [{"json_schema": {**schema, "$defs": definitions}}]}
        return LLMatcher.validate_grammar(json.dumps(grammar), None)

    while fault := fault_of(schema):
        # The loop ends at the latest with the empty schema, which llguidance accepts.
        known = [keyword for keyword in SUSPECTS if keyword in schema]
        ways = [(name, _without(name, schema)) for name in dict.fromkeys([*known, *schema])]
        keyword, rest = next((way for way in ways if not fault_of(way[1])), ways[0])
        if keyword == "pattern":  # without slashes, as llguidance would escape and count them
            fault = fault_of({keyword: schema[keyword].replace("/", "%")}) or fault
        with relaxation.at(place, keyword):
            raise GrammarError(f"{UNUSABLE}{meaning(fault).rpartition(UNUSABLE)[2]}")
        schema = rest
    return schema


def _without(keyword: str, schema: dict[str, Any]) -> dict[str, Any]:
    rest = {name: schema[name] for name in schema if name not in (keyword, OTHERS.get(keyword))}
    if keyword == "oneOf" and "anyOf" not in schema:
        rest["anyOf"] = distinct(schema["oneOf"])
    return rest
