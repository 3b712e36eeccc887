from typing import Any

import pytest

from server.text.grammar.grammar_errors import GrammarError
from server.text.grammar.merged_patterns import MAX_PATTERNS, check_patterns

MOST = MAX_PATTERNS


def patterns(count: int) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": f"a{{{number}}}.*b"} for number in range(count)]


def chain(length: int, **more: Any) -> dict[str, Any]:
    """Each part refers to the next one."""
    parts = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}", **more} for n in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{length}": {"type": "string"}}}


def circle(length: int) -> dict[str, Any]:
    parts = {
        f"d{n}": {"$ref": f"#/$defs/d{(n + 1) % length}", "pattern": "a"} for n in range(length)
    }
    return {"$defs": parts, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"pattern": "a"},
        {"allOf": patterns(MOST)},
        {"anyOf": patterns(100)},
        {"properties": {str(n): part for n, part in enumerate(patterns(100))}},
        {"properties": {"pattern": {}, "allOf": {}, "$ref": {}, "anyOf": {}}},
        {"prefixItems": patterns(100)},
        {"const": {"allOf": [1, "a", None]}},
        {"$ref": "#/nowhere/at/all"},
        {"$ref": "#/type/x", "type": "string"},
        chain(MOST, pattern="a"),
        chain(4000),
        circle(MOST),
    ],
)
def test_as_many_as_people_write_are_let_pass(schema: Any) -> None:
    check_patterns(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": patterns(MOST + 1)},
        {"pattern": "a", "allOf": patterns(MOST)},
        {"pattern": "a", "items": {"allOf": patterns(MOST + 1)}},
        {"allOf": [{"anyOf": [part, {}]} for part in patterns(MOST + 1)]},
        {
            "allOf": [
                {"allOf": patterns(MOST // 2 + 1)},
                {"oneOf": [{"allOf": patterns(MOST // 2)}]},
            ]
        },
        {"allOf": [{"$ref": "#/$defs/a~1~0b"}] * (MOST + 1), "$defs": {"a/~b": {"pattern": "a"}}},
        chain(MOST + 1, pattern="a"),
        chain(4000, pattern="a"),
        circle(MOST + 1),
    ],
)
def test_more_are_refused(schema: Any) -> None:
    with pytest.raises(GrammarError, match="pattern is supported up to 8 times for one value"):
        check_patterns(schema)


def test_nesting_that_cannot_be_followed_is_refused() -> None:
    schema: dict[str, Any] = {"pattern": "a"}
    parts = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}]} for n in range(4000)}
    schema = {"allOf": [{"$ref": "#/$defs/d0"}], "$defs": {**parts, "d4000": schema}}
    with pytest.raises(GrammarError, match="nested too deeply"):
        check_patterns(schema)
