"""Families of requests: one for each field, and each production of what the field may hold.

The fields are read from the server's OpenAPI schema. All of it is a function of that schema and a
seed: the same seed gives the same bodies.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, zip_longest
from pathlib import Path
from random import Random
from typing import Any

from tests.abuse.clients import request
from tests.fuzz.languages import SLOT, grown, put, read

Json = dict[str, Any]
BODY_BYTES = 2**23
"""``limits.max_body_bytes``."""
GRAMMAR_BYTES = 2**20
"""Four times MAX_SPEC_BYTES: whether the limit holds is seen, too."""
HEAD_BYTES = 2**17
"""Twice MAX_HEADER_BYTES."""
FIRST_SIZE, LAST_SIZE = 16, 2**40
"""The last one is for numbers, whose text does not grow."""
TURNS = 3
"""Fields that have all productions between them."""
LANGUAGES = read()
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
ORDINARY: dict[str, Json] = {path: json.loads(text) for path, text in _TABLES["ordinary"].items()}
VALUES: dict[str, list[Json]] = {name: json.loads(text) for name, text in _TABLES["values"].items()}
PLACES: dict[str, list[list[str]]] = _TABLES["places"]


@dataclass(frozen=True, slots=True)
class Family:
    """Requests that differ in their size n alone."""

    name: str
    group: str
    path: str
    body: str = ""
    """Both are templates."""
    limit_bytes: int = BODY_BYTES
    method: str = "POST"

    def data(self, n: int) -> bytes:
        """The body of size n, or the path where there is none."""
        return grown(self.body or self.path, n)

    def request(self, data: bytes) -> bytes:
        """All that is sent."""
        path, body = (self.path, data) if self.body else (data.decode("latin-1"), b"")
        return request(self.method, path, {"Connection": "close"}, body)

    def sizes(self) -> Iterator[tuple[int, bytes]]:
        """Doubling sizes with their data, up to the limit."""
        n, data = FIRST_SIZE, b""
        while 2 * len(data) <= self.limit_bytes and n <= LAST_SIZE:
            data = self.data(n)
            yield n, data
            n *= 2


# --- fields from the schema ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Field:
    """A place in the body of a route, and what the schema wants there."""

    route: str
    name: str
    schema: Json
    frame: str
    """The body, with a slot for the field's value."""

    @property
    def kind(self) -> str:
        """The same for fields that are read alike, be they of different routes."""
        schema = {key: value for key, value in self.schema.items() if key != "title"}
        return re.sub(r"schemas/\w+\.", "", json.dumps(schema))


class Fields:
    """A walk over an OpenAPI schema."""

    def __init__(self, openapi: Json) -> None:
        self._paths = openapi["paths"]
        self._shared = openapi["components"]["schemas"]

    def all(self) -> Iterator[Field]:
        """Every field of every body, from the outside to the inside."""
        for route, operations in self._paths.items():
            if "post" in operations:
                content = operations["post"]["requestBody"]["content"]
                whole = content["application/json"]["schema"] | {"name": route}
                top = Field(route, "", whole, SLOT)
                yield from self._within(top, whole, ORDINARY[route], [])

    def _within(self, field: Field, branch: Json, base: Json, around: list[str]) -> Iterator[Field]:
        """The fields of an object, which is one branch of the field. around: names of objects."""
        around = [*around, branch.get("name", "")]
        for key, schema in branch["properties"].items():
            frame = put(field.frame, _text(base | {key: SLOT}))
            yield from self._at(Field(field.route, f"{field.name}.{key}", schema, frame), around)

    def _at(self, field: Field, around: list[str]) -> Iterator[Field]:
        yield field
        for branch in self.branches(field.schema):
            if "items" in branch:
                frame = put(field.frame, f"[{SLOT}]")
                inner = Field(field.route, field.name + "[]", branch["items"], frame)
                yield from self._at(inner, around)
            elif "properties" in branch and branch.get("name") not in around:
                yield from self._within(field, branch, next(self.values(branch)), around)

    def branches(self, schema: Json) -> Iterator[Json]:
        """What a value may be, without null; with the names of what was referred to."""
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            schema = self._shared[name] | {"name": name.rpartition(".")[2]}
        alternatives = schema.get("anyOf") or schema.get("oneOf")
        if alternatives and "properties" not in schema:
            for alternative in alternatives:
                yield from self.branches(alternative)
        elif schema.get("type") != "null":
            yield schema

    def values(self, schema: Json) -> Iterator[Any]:
        """Small valid values, at least one: one for each branch, and each word of an enum."""
        small = {"string": "a", "integer": 1, "number": 1, "boolean": True}
        for branch in self.branches(schema):
            if branch.get("name") in VALUES:
                yield from VALUES[branch["name"]]
            elif "const" in branch or "enum" in branch:
                yield from branch.get("enum", [branch.get("const")])
            elif "properties" in branch:
                needed = branch.get("required", [])
                yield {key: next(self.values(branch["properties"][key])) for key in needed}
            elif "items" in branch:
                yield [next(self.values(branch["items"]))]
            else:
                yield small.get(branch.get("type", ""), {})

    def due(self, schema: Json, strings: Sequence[str]) -> Iterator[str]:
        """What a field is there for: strings, numbers, many elements or keys, and one wrong."""
        for branch in self.branches(schema):
            if branch.get("type") == "string" and not {"enum", "const"} & branch.keys():
                yield from strings
            if branch.get("type") in ("integer", "number"):
                yield from ("№", "1«0»", "0.«1»")
            for one in map(_text, self.values(branch["items"]) if "items" in branch else ()):
                yield from (f"[«{one},»{one}]", f'[«{one},»{{"wrong":[]}}]')
            if isinstance(inner := branch.get("additionalProperties"), dict):
                one = _text(next(self.values(inner)))
                yield from (f'{{«"§":{one},»"0":{one}}}', f'{{«"§":{one},»"0":[]}}')


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace(f'"{SLOT}"', SLOT)


# --- families ------------------------------------------------------------------------------------


def families(openapi: Json) -> list[Family]:
    """All of them, by names of their own."""
    fields = list(Fields(openapi).all())
    made = [
        *_of_fields(Fields(openapi), fields),
        *_of_bodies(fields),
        *_of_languages(),
        *_of_heads(),
    ]
    return list({family.name: family for family in made}.values())


def _of_fields(walk: Fields, fields: list[Field]) -> Iterator[Family]:
    """In every field what it is there for, and other JSON, most of it in one field of each kind.

    Fields of several routes that are the same get each production on one of the routes, by turns.
    The first field of a name gets all strings; else some of the productions, by turns, are enough.
    """
    strings = [text for _, text in LANGUAGES["strings"].productions()]
    others = [text for _, text in LANGUAGES["json"].productions() if _is_closed(text)]
    same: dict[str, list[Field]] = {}
    for field in fields:
        same.setdefault(field.name + field.kind, []).append(field)
    seen = set()
    for turn, alike in enumerate(same.values()):
        name, kind = alike[0].name.rpartition(".")[2], alike[0].kind
        part = slice(turn % TURNS, None, TURNS)
        wanted = list(walk.due(alike[0].schema, strings[part] if name in seen else strings))
        wanted += [others[turn % len(others)]] if kind in seen else others[part]
        seen |= {name, kind}
        for field, text in zip(cycle(alike), wanted, strict=False):
            body = put(field.frame, text)
            yield Family(f"{field.route}{field.name} {text}", "fields", field.route, body)


def _is_closed(text: str) -> bool:
    return all(text.count(a) == text.count(b) for a, b in ("[]", "{}"))


def _of_bodies(fields: list[Field]) -> Iterator[Family]:
    """Bodies that are no objects, that have too many keys, or that end too early."""
    for route, ordinary in ORDINARY.items():
        rest = _text(ordinary)
        texts = [text for _, text in LANGUAGES["json"].productions()]
        texts += [text[: text.rindex("»") + 1] for text in texts if "»" in text]
        names = [field.name[1:] for field in fields if field.route == route]
        texts += [f'{{«"{name}":null,»{rest[1:]}' for name in names if name.isidentifier()]
        texts += [f'{{«"k§":{one},»{rest[1:]}' for one in ("0", "[]", '"a"')]
        # What is no text stands beside much that must be looked through for its place.
        texts += [f'{{"k":"\\ud800","v":[«{one},»{one}],{rest[1:]}' for one in ("0", "[]", '"a"')]
        texts += [f"«{space}»{rest}" for space in (" ", "\n", "\ufeff", "\0")]
        texts += [f"{rest}«{space}»" for space in (" ", "}", "[", "�")]
        yield from (Family(f"{route} {text}", "bodies", route, text) for text in texts)


def _placed(language: str, place: int, name: str, text: str) -> Family:
    route, changes = PLACES[language][place]
    quoted = text if language == "schema" else _text(text)
    body = put(_text(ORDINARY[route] | json.loads(changes)), quoted)
    field = "+".join(json.loads(changes))
    return Family(f"{route}.{field} {language} {name}", language, route, body, GRAMMAR_BYTES)


def _of_languages() -> Iterator[Family]:
    for language in PLACES:
        for number, (name, text) in enumerate(LANGUAGES[language].productions()):
            for place in (0, 1 + number % (len(PLACES[language]) - 1)):
                yield _placed(language, place, name, text)


def _of_heads() -> Iterator[Family]:
    """Odd ids, queries and headers: requests without bodies."""
    for method, frame, units in _TABLES["heads"]:
        for text in (put(frame, unit).replace("⏎", "\r\n") for unit in units.split()):
            yield Family(f"{method} {text!r}", "heads", text, "", HEAD_BYTES, method)


# --- orders and mixtures -------------------------------------------------------------------------


def in_order(known: list[Family], seed: int) -> list[Family]:
    """Shuffled, with one of each group after the other, so that a beginning is a sample of all."""
    groups: dict[str, list[Family]] = {}
    for family in Random(seed).sample(known, len(known)):
        groups.setdefault(family.group, []).append(family)
    rounds = zip_longest(*(groups[group] for group in sorted(groups)))
    return [family for one in rounds for family in one if family]


def mixture(openapi: Json, number: int) -> Family:
    """A family of productions that are drawn: side by side, or one in another."""
    draw = Random(number)
    name = f"mixture {number}"
    language = draw.choice([*PLACES, "json"])
    text = LANGUAGES[language].mixed(draw)
    if language == "json":
        field = draw.choice(list(Fields(openapi).all()))
        return Family(name, "mixtures", field.route, put(field.frame, text))
    made = _placed(language, draw.randrange(len(PLACES[language])), "", text)
    return Family(name, "mixtures", made.path, made.body, GRAMMAR_BYTES)
