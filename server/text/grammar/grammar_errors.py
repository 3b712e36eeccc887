"""Errors of grammars. Of the request, their messages quote only places in a schema."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import quote

# Limits of the list of keywords that are not enforced: its length, and the length of each place.
MAX_LISTED, MAX_PLACE_CHARS = 16, 256


class GrammarError(ValueError):
    """Raised if a grammar cannot be enforced. The text names the schema keyword or the limit."""

    def __init__(self, message: str, param: str | None = None, keyword: str = "") -> None:
        """``param`` is the field of the request that causes the error. ``keyword`` is the keyword
        of the schema. ``message`` continues after the keyword, as in "is not supported"."""
        super().__init__(message)
        self.param = param
        self.keyword = keyword
        self.place = ""
        """The place of the keyword in its schema, as a JSON pointer within a URI (RFC 6901)."""

    def __str__(self) -> str:
        at = f" at {self.place}" if self.place else ""
        return f"{self.keyword}{at} {super().__str__()}".strip()


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Leaves out keywords that a grammar cannot enforce, unless the client asked for strictness."""

    strict: bool = True
    probes: bool = False
    """Whether llguidance has refused the whole grammar, so that each keyword must be tested."""
    not_enforced: list[str] = field(default_factory=list)
    """The keywords left out, each with its place."""

    @contextmanager
    def at(self, place: str, keyword: str = "schema") -> Iterator[None]:
        """List the keyword of a GrammarError. If strict, raise the error with its place."""
        try:
            yield
        except GrammarError as error:
            error.keyword = error.keyword or keyword
            error.place = error.place or place[:MAX_PLACE_CHARS]
            if self.strict:
                raise
            if len(self.not_enforced) < MAX_LISTED:
                self.not_enforced.append(f"{error.keyword} at {error.place}")


STRICT = Relaxation()


def pointer_step(name: str) -> str:
    """Escape a name as one step of a JSON pointer within a URI."""
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="~$")


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


UNUSABLE = "cannot be used: "
# The message of a pattern's parser: the pattern, a mark below the fault, and fixed words.
PATTERN_FAULT = re.compile(r"regex parse error:\n    .*\n    ( *)\^+\nerror: (.*)")


def meaning(complaint: str) -> str:
    """Translate llguidance's message, which may quote the request, to fixed words."""
    if fault := PATTERN_FAULT.search(complaint):
        return f"a pattern {UNUSABLE}{fault[2]}, at character {len(fault[1]) + 1}"
    return _translate(complaint, MEANINGS) or limit_of(complaint) or "it is not valid"


def limit_of(complaint: str) -> str | None:
    """Translate llguidance's message about a limit. Return None for any other message."""
    return _translate(complaint, LIMITS)


def _translate(complaint: str, meanings: tuple[tuple[str, str], ...]) -> str | None:
    return next((text for pattern, text in meanings if re.search(pattern, complaint)), None)
