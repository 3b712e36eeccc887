from typing import Any

import pytest

from server.text.json_object import MAX_VALUES, json_object


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


def test_an_object_of_too_many_values_is_none() -> None:
    def listed(value: str, count: int) -> str:
        return f'{{"a": [{", ".join([value] * count)}]}}'

    assert json_object(listed("1", MAX_VALUES - 2)) is not None
    for value in ("1", "[]", '{"b": 1}'):
        assert json_object(listed(value, MAX_VALUES)) is None
    assert json_object(listed('"[,{\\", "', 1 + MAX_VALUES // 2)) is not None, "texts are one value"
    assert json_object('{"a": "' + "," * 2 * MAX_VALUES + '"}') is not None
