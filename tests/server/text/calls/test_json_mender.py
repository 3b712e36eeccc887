import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.calls.json_mender import JsonMender

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), VALUES)
SLIPS = st.lists(
    st.tuples(
        st.integers(0, 200), st.integers(0, 3), st.text("{}[]:,\"'\\u \nTrue1-.é", max_size=3)
    ),
    max_size=6,
)


def mended(text: str) -> str:
    """The object that a text, or its beginning, is taken for."""
    mender, written = JsonMender(), ""
    for character in text:
        written += mender.feed(character)
        if mender.is_whole:
            return written
    return written + mender.end()


@given(OBJECTS, st.sampled_from([None, 1]), st.booleans())
def test_what_is_valid_comes_out_as_it_went_in(
    value: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert mended(text) == text


@given(OBJECTS, SLIPS)
def test_what_comes_out_is_valid_whatever_goes_in(
    value: dict[str, Any], slips: list[tuple[int, int, str]]
) -> None:
    text = json.dumps(value, ensure_ascii=False)
    for place, cut, more in slips:
        text = text[:place] + more + text[place + cut :]
    assert isinstance(json.loads(mended("{" + text.removeprefix("{"))), dict)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"at"', {"at": None}),
        ('{"at":', {"at": None}),
        ('{"at", "b": 1}', {"at": None, "b": 1}),
        ('{"a": 1,', {"a": 1}),
        ('{"a": [1, 2, ], "b": 2}', {"a": [1, 2], "b": 2}),
        ('{"a": [1,, 2]}', {"a": [1, 2]}),
        ('{"a": 1 "b": 2}', {"a": 1, "b": 2}),
        ('{"a": ["x" "y" {} []]}', {"a": ["x", "y", {}, []]}),
        ('{"a" 1}', {"a": 1}),
        ('{"a": [1, {"b": 2}', {"a": [1, {"b": 2}]}),
        ('{"a": [1, 2}', {"a": [1, 2]}),
        ('{"a": 1], "b": 2}', {"a": 1, "b": 2}),
        ('{"a": 1, {"b": 2}}', {"a": 1, "": {"b": 2}}),
        ("{'a': 'it\\'s \"x\"', 'b': True}", {"a": 'it\'s "x"', "b": True}),
        ('{"a": "it\'s"}', {"a": "it's"}),
        (r'{"a": "\d+\.\w"}', {"a": r"\d+\.\w"}),
        (r'{"a": "C:\users\u00"}', {"a": r"C:\users\u00"}),
        ('{"a": "x\\', {"a": "x\\"}),
        ('{"a": "x\ny\t"', {"a": "x\ny\t"}),
        ("{a: None, b: NaN, c: -.5, d: it's}", {"a": None, "b": "NaN", "c": -0.5, "d": "it's"}),
    ],
)
def test_slips_of_models_are_mended(text: str, value: dict[str, Any]) -> None:
    assert json.loads(mended(text)) == value
