"""Errors of grammars. Their messages never quote the request."""

import re
from collections.abc import Iterator
from contextlib import contextmanager


class GrammarError(ValueError):
    """Raised if a grammar cannot be enforced. The text names the schema keyword or the limit."""

    def __init__(self, message: str, param: str | None = None) -> None:
        """``param`` is the field of the request that causes the error."""
        super().__init__(message)
        self.param = param


class UnfitBeginningError(ValueError):
    """Raised if a grammar forbids the text with which the client has begun the answer."""


@contextmanager
def errors_of(param: str) -> Iterator[None]:
    """Add the name of a request's field to grammar errors that name no field."""
    try:
        yield
    except GrammarError as error:
        error.param = error.param or param
        raise


# Patterns of llguidance's messages, each with a text for clients. The first match counts.
MEANINGS = (
    (r"^NoExtension", "no answer can satisfy it"),
    (r"oneOf", "oneOf is not supported where more than one branch may match; anyOf is"),
    (r"min/maxProperties|minProperties", "minProperties is not supported beside optional ones"),
    (r"disjoint|overlap", "patternProperties that overlap are not supported"),
    (
        r"\$ref|Anchor|[Rr]eference|Resource|Pointer|Definition|circular|stack level",
        "$ref cannot be followed",
    ),
    (r"allOf", "allOf cannot be merged here"),
    (r"Unsatisfiable|unsatisfiable", "no answer can satisfy it"),
    (r"(integer|float) range", "a range of numbers is too wide or too fine"),
    (r"look-?around", "look-arounds in a pattern are not supported"),
    (r"[Rr]egex|Regex", "a pattern cannot be used"),
    (r"nested|recursion", "it is nested too deeply"),
)
# Patterns of llguidance's messages about limits, each with a text for clients.
LIMITS = (
    (r"items; max is|Too many items", "it leaves too many ways to go on at once"),
    (r"too (large|big|complex|many)|limit|fuel", "it is too large"),
)


def meaning(complaint: str) -> str:
    """Translate llguidance's message, which may quote the request, to a fixed text."""
    return _translate(complaint, MEANINGS) or limit_of(complaint) or "it is not valid"


def limit_of(complaint: str) -> str | None:
    """Translate llguidance's message about a limit. Return None for any other message."""
    return _translate(complaint, LIMITS)


def _translate(complaint: str, meanings: tuple[tuple[str, str], ...]) -> str | None:
    return next((text for pattern, text in meanings if re.search(pattern, complaint)), None)
