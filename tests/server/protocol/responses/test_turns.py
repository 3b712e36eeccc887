import json
from typing import Any

import pytest

from server.protocol.responses.items import Placed, check_begun, is_begun, read_input, turns
from server.protocol.unsupported import Unsupported
from server.protocol.wire_errors import ApiError
from server.text.conversation import ToolCall, Turn
from tests.server.protocol.responses.test_items import (
    ASKED,
    CALL,
    HEARD,
    INPUT,
    MADE,
    said,
    thought,
)

BEGUN = {"prefix": True}
UNSUPPORTED = Unsupported("refuse", "images.responses", "responses")


def placed(*given: Any) -> list[Placed]:
    return read_input(INPUT.validate_json(json.dumps(given)), lambda _: None, UNSUPPORTED)


def read(*given: Any) -> tuple[Turn, ...]:
    return turns(placed(*given), UNSUPPORTED)


def test_the_items_of_one_turn_are_one_turn() -> None:
    other = CALL | {"call_id": "call_2"}
    assert read(ASKED, thought("Hm."), said("Sure."), CALL, other, HEARD) == (
        Turn("user", "Hello"),
        Turn("assistant", "Sure.", "Hm.", (MADE, ToolCall("call_2", "look", '{"at": 1}'))),
        Turn("tool", "sunny", tool_call_id="call_1"),
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([CALL, HEARD, CALL], [("", "", 1), ("sunny", "", 0), ("", "", 1)]),
        ([said("a"), CALL, said("b")], [("ab", "", 1)]),
        ([said("a"), said("b")], [("a", "", 0), ("b", "", 0)]),
        ([thought("a"), thought("b"), said("c")], [("c", "a\nb", 0)]),
        ([said("a"), thought("b"), said("c")], [("a", "", 0), ("c", "b", 0)]),
        ([CALL, thought("b"), CALL], [("", "", 1), ("", "b", 1)]),
        ([ASKED, ASKED], [("Hello", "", 0), ("Hello", "", 0)]),
        ([HEARD, HEARD], [("sunny", "", 0), ("sunny", "", 0)]),
        ([said("a"), ASKED, said("b")], [("a", "", 0), ("Hello", "", 0), ("b", "", 0)]),
        ([], []),
    ],
)
def test_a_turn_ends_where_another_one_must_have_begun(given: Any, expected: Any) -> None:
    found = [(turn.text, turn.reasoning, len(turn.tool_calls)) for turn in read(*given)]
    assert found == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([said("a") | BEGUN, said("b")], [("ab", "", 0)]),
        (
            [said("a") | BEGUN, said("b") | BEGUN, said("c"), said("d")],
            [("abc", "", 0), ("d", "", 0)],
        ),
        ([thought("a") | BEGUN, thought("b"), said("c")], [("c", "ab", 0)]),
        ([thought("a"), said("b") | BEGUN, CALL], [("b", "a", 1)]),
        ([said("a") | BEGUN, ASKED], [("a", "", 0), ("Hello", "", 0)]),
    ],
)
def test_what_goes_on_with_an_item_is_the_same_turn(given: Any, expected: Any) -> None:
    found = [(turn.text, turn.reasoning, len(turn.tool_calls)) for turn in read(*given)]
    assert found == expected


@pytest.mark.parametrize(
    "given",
    [[said("a") | BEGUN, ASKED], [thought("a") | BEGUN, HEARD], [said("a") | BEGUN, HEARD, CALL]],
)
def test_nobody_else_goes_on_with_an_item(given: Any) -> None:
    with pytest.raises(ApiError) as caught:
        check_begun(placed(*given))
    assert caught.value.param == "input[0].prefix"


def test_only_the_assistant_begins_an_answer() -> None:
    check_begun(placed(said("a") | BEGUN, thought("b") | BEGUN, CALL, HEARD, said("c") | BEGUN))
    assert [is_begun(item) for _, item in placed(said("a") | BEGUN, said("a"), CALL | BEGUN)] == [
        True,
        False,
        False,
    ]
    with pytest.raises(ApiError) as caught:
        read(ASKED | BEGUN)
    assert caught.value.param == "input[0].prefix"
