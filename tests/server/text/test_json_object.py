from typing import Any

import pytest

from server.text.json_object import json_object


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{}", {}),
        (' {"a": [1, "é", null]}\n', {"a": [1, "é", None]}),
        ('{"a": "line\nbreak"}', {"a": "line\nbreak"}),
        ('{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
    ],
)
def test_an_object_is_read(text: str, value: dict[str, Any]) -> None:
    assert json_object(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", "null", '"a"', '{"a": "\\ud800"}', "[" * 5_000, '{"a":' * 5_000, "9" * 5_000],
)
def test_what_is_no_object_or_could_not_be_sent_is_none(text: str) -> None:
    assert json_object(text) is None
