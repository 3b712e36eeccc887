"""A value is set in JSON with comments, and every other character stays."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.cli.launch.jsonc import NotJsonError, has_member, set_member

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from(["a", "b", "c", 'q"', "\\"]), values, max_size=4)


@given(
    objects,
    st.lists(st.sampled_from(["a", "b", 'q"']), min_size=1, max_size=3),
    values,
    st.sampled_from([None, 2]),
)
def test_of_any_json_only_the_member_changes(
    old: dict[str, object], path: list[str], value: object, indent: int | None
) -> None:
    text = json.dumps(old, indent=indent)
    new = json.loads(set_member(text, tuple(path), value))
    assert has_member(json.dumps(new), tuple(path))
    expected = json.loads(text)
    place = expected
    for name in path[:-1]:
        if not isinstance(place.get(name), dict):
            place[name] = {}
        place = place[name]
    place[path[-1]] = json.loads(json.dumps(value))
    assert new == expected


@pytest.mark.parametrize(
    ("text", "new"),
    [
        ("", '{\n  "a": {\n    "b": 1\n  }\n}\n'),
        ("// none\n", '// none\n{\n  "a": {\n    "b": 1\n  }\n}\n'),
        ("{}", '{\n  "a": {\n    "b": 1\n  }}'),
        ('{"a": /* c */ {"b": 2 /* d */,},}', '{"a": /* c */ {"b": 1 /* d */,},}'),
        ('{"a": {"c": [1, {"b": 2},], },}', '{"a": {\n    "b": 1,"c": [1, {"b": 2},], },}'),
        ('{"a": 7}', '{"a": {\n    "b": 1\n  }}'),
        ('{// "a": {\n}', '{\n  "a": {\n    "b": 1\n  }// "a": {\n}'),
    ],
)
def test_comments_and_last_commas_stay(text: str, new: str) -> None:
    assert set_member(text, ("a", "b"), 1) == new


def test_members_are_found_below_objects_alone() -> None:
    assert has_member('{"a": {"b": null}}', ("a", "b"))
    assert not has_member('{"a": {"b": null}}', ("a", "c"))
    assert not has_member('{"a": [1]}', ("a", "b"))
    assert not has_member("", ("a",))


@pytest.mark.parametrize(
    "text",
    [
        *('{"a"', '{"a" 1}', '{"a": }', '{"a": "x}', '{"a": 1 "b": 2}', '{"a": 1]', "{a: 1}"),
        *('{"\\x": 1}', "{} {}", '{"a": [1 2]}', "[" * 300, '{"a": {"b" 1}}', "{,}"),
    ],
)
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(NotJsonError, match=r"^line 1 is no JSON$"):
        set_member(text, ("a", "b"), 1)
