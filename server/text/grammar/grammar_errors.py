"""Grammar errors: why a constraint cannot be enforced, without repeating the request."""

import re
from collections.abc import Iterator
from contextlib import contextmanager


class GrammarError(ValueError):
    """A form that cannot be enforced. The message names the keyword or the limit, and nothing that
    came with the request; it is fit for clients."""

    def __init__(self, message: str, param: str | None = None) -> None:
        """param: the request's field that has the form."""
        super().__init__(message)
        self.param = param


class UnfitBeginningError(ValueError):
    """A begun answer that the form does not allow."""


@contextmanager
def errors_of(param: str) -> Iterator[None]:
    """Name the request's field in grammar errors that name none."""
    try:
        yield
    except GrammarError as error:
        error.param = error.param or param
        raise


# What the grammar engine says, and what that means. The first that matches counts.
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
# The same where it has come to its limits.
LIMITS = (
    (r"items; max is|Too many items", "it leaves too many ways to go on at once"),
    (r"too (large|big|complex|many)|limit|fuel", "it is too large"),
)


def meaning(complaint: str) -> str:
    """Translate the grammar engine's complaint to fixed words: it may quote the request."""
    return _translated(complaint, MEANINGS) or limit_of(complaint) or "it is not valid"


def limit_of(complaint: str) -> str | None:
    """Translate a complaint about a limit; None for another complaint."""
    return _translated(complaint, LIMITS)


def _translated(complaint: str, meanings: tuple[tuple[str, str], ...]) -> str | None:
    return next((text for pattern, text in meanings if re.search(pattern, complaint)), None)
