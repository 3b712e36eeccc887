"""Count how many patterns one string must match at once.

The grammar engine looks whether any string matches them all, which takes twice as long with every
further one, without a limit of its own: 16 take a tenth of a second, 24 half a minute.
"""

from collections.abc import Iterator
from typing import Any

from server.text.grammar.grammar_errors import GrammarError
from server.text.json_object import follow

MAX_PATTERNS = 8
ALTERNATIVES = ("anyOf", "oneOf")


def check_patterns(schema: Any) -> None:
    """Raise GrammarError for a schema with more patterns on one string than can be merged."""
    counter = _Counter(schema)
    try:
        most = max(map(counter.count, _parts(schema)), default=0)
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error
    if most > MAX_PATTERNS:
        raise GrammarError(f"pattern is supported up to {MAX_PATTERNS} times for one value")


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the schema and all that is in it; maps of schemas, too, in which nothing is counted."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


class _Counter:
    """Count patterns that hold for one value; each part of a schema is visited once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, int] = {}

    def count(self, schema: Any) -> int:
        """Count patterns of a part of the schema, with those of what it refers to."""
        chain = []
        # Chains of references are as long as a schema: they are followed without recursion.
        while isinstance(schema, dict) and id(schema) not in self._known:
            self._known[id(schema)] = 0  # until it is known: a chain may be a circle
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
