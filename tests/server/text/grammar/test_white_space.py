"""The API document's sentence on the white space of JSON is what a grammar takes."""

from pathlib import Path

import pytest

from server.text.tokenizer import Tokenizer
from tests.server.text.grammars import of_schema, takes

API = Path(__file__).parents[4] / "server" / "protocol" / "README.md"
SAID = (
    "Between its parts JSON may have one space or one tab, or a new line and up to 24 spaces and "
    "tabs of indentation"
)
ALLOWED = ("", " ", "\t", "\n", "\r\n", "\n" + 24 * " ", "\n" + 12 * " \t")
REFUSED = ("  ", "\t\t", " \t", " \n", "\n\n", "\r", "\n" + 25 * " ", "\n" + 25 * "\t", "\f")


def test_the_document_says_so() -> None:
    assert SAID in " ".join(API.read_text().split())


@pytest.mark.parametrize("place", ['{{{}"a":1}}', '{{"a"{}:1}}', '{{"a":{}1}}', '{{"a":1{}}}'])
async def test_json_has_the_white_space_that_the_document_says(
    tokenizer: Tokenizer, place: str
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    constraint = await of_schema(tokenizer, schema)
    for space in ALLOWED:
        assert takes(constraint, tokenizer, place.format(space)), repr(space)
    for space in REFUSED:
        assert not takes(constraint, tokenizer, place.format(space)), repr(space)
