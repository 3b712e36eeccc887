"""Unsupported fields that would change the answer. A request that sets such a field is refused.

fields.toml lists these fields. The wire models define the accepted fields. All other fields are
ignored. FIELDS.md lists those that clients send. A field that is null counts as missing."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.protocol.wire_errors import invalid

TABLES = tomllib.loads(Path(__file__).with_name("fields.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class RefusedField:
    """A field of a request's body that makes the server refuse the request."""

    name: str
    remedy: str
    harmless: tuple[Any, ...] = ()
    """The accepted values. If True is not among them, false, 0, "" and [] are accepted, too."""

    def is_harmless(self, value: Any) -> bool:
        wants_true = any(harmless is True for harmless in self.harmless)
        return value is None or value in self.harmless or not (value or wants_true)


RefusedFields = tuple[RefusedField, ...]


def refused(*tables: str) -> RefusedFields:
    """Return the fields in tables of fields.toml. A later table replaces a field of an earlier one,
    or with ``false`` removes it."""
    fields: dict[str, Any] = {}
    for table in tables:
        fields |= TABLES[table]
    listed = {name: rule if isinstance(rule, list) else [rule] for name, rule in fields.items()}
    return tuple(
        RefusedField(name, rule[0], tuple(rule[1:])) for name, rule in listed.items() if rule[0]
    )


def check_refused(fields: RefusedFields, given: dict[str, Any]) -> None:
    """Raise ApiError (400) for the first refused field that is set in ``given``."""
    for field in fields:
        if not field.is_harmless(given.get(field.name)):
            raise invalid(f"{field.name} is not supported: {field.remedy}.", field.name)
