from typing import Any

import pytest
from pydantic import ValidationError

from server.protocol.messages.request import InputMessage, joined_text, system_texts
from server.protocol.unsupported import Unsupported
from server.protocol.wire_errors import ApiError
from server.text.conversation import ToolCall, Turn

UNSUPPORTED = Unsupported("refuse", "images.messages")
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.a1b; cch=0f1e2;"
MARK = {"cache_control": {"type": "ephemeral"}}


def turns(role: str, content: Any) -> list[Turn]:
    message = InputMessage.model_validate({"role": role, "content": content})
    return message.turns("messages[3]", UNSUPPORTED)


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content, **more}


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_text_may_come_whole_or_in_blocks(role: Any) -> None:
    assert turns(role, "Hello") == turns(role, [text("Hello", **MARK)]) == [Turn(role, "Hello")]


def test_all_that_an_assistant_did_is_one_turn() -> None:
    content = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "cipher"},
        text("Let me"),
        text(" look."),
        {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "Grüße", "n": [1, 2.5]}},
        {"type": "tool_use", "name": "wait", "input": None},
    ]
    calls = (
        ToolCall("t1", "look", '{"at": "Grüße", "n": [1, 2.5]}'),
        ToolCall("", "wait", "{}"),
    )
    assert turns("assistant", content) == [Turn("assistant", "Let me look.", "Hm.", calls)]
    assert turns("assistant", []) == [Turn("assistant")]


def test_several_thoughts_stay_apart() -> None:
    content = [{"type": "thinking", "thinking": said} for said in ("One.", None, "Two.")]
    assert turns("assistant", content)[0].reasoning == "One.\n\n\n\nTwo."


def test_results_of_tools_and_what_the_user_says_keep_their_order() -> None:
    content = [
        text("Before."),
        result("sunny"),
        result([text("22"), text(" degrees")], tool_use_id="t2"),
        text("And"),
        text(" now?"),
    ]
    assert turns("user", content) == [
        Turn("user", "Before."),
        Turn("tool", "sunny", tool_call_id="t1"),
        Turn("tool", "22 degrees", tool_call_id="t2"),
        Turn("user", "And now?"),
    ]
    assert turns("user", [result(None)]) == [Turn("tool", "", tool_call_id="t1")]
    assert turns("user", []) == [Turn("user", "")]


@pytest.mark.parametrize(
    ("failed", "said", "heard"),
    [
        (True, "no such file", "Error: no such file"),
        (True, "error 5", "error 5"),
        (False, "no such file", "no such file"),
        (None, "no such file", "no such file"),
    ],
)
def test_a_result_that_is_an_error_says_so(failed: bool | None, said: str, heard: str) -> None:
    assert turns("user", [result(said, is_error=failed)])[0].text == heard


def test_blocks_of_a_system_prompt_are_paragraphs() -> None:
    assert turns("system", [text("One."), text(""), text("Two.")]) == [
        Turn("system", "One.\n\nTwo.")
    ]
    assert turns("system", "") == []


@pytest.mark.parametrize(
    ("system", "left"),
    [
        (f"{BILLING}\n\nBe brief.\nVery.", ["Be brief.\nVery."]),
        (f"\n{BILLING}", []),
        ("Be brief.", ["Be brief."]),
        (f"Be brief.\n{BILLING}", [f"Be brief.\n{BILLING}"]),
        ("", []),
    ],
)
def test_billing_is_no_part_of_a_system_prompt(system: str, left: list[str]) -> None:
    assert system_texts(system, "system", UNSUPPORTED) == left
    found = turns("system", [text(system)])
    assert found == [Turn("system", said) for said in left]


@pytest.mark.parametrize(
    ("role", "block", "place"),
    [
        ("user", {"type": "image", "source": {}}, "messages[3].content[0]"),
        ("user", {"type": "document", "source": {}}, "messages[3].content[0]"),
        ("user", {"type": "tool_use", "name": "look"}, "messages[3].content[0]"),
        ("user", result([text("a"), {"type": "image"}]), "messages[3].content[0].content[1]"),
        ("assistant", result("a"), "messages[3].content[0]"),
        ("assistant", {"type": "server_tool_use", "name": "x"}, "messages[3].content[0]"),
        ("assistant", {"type": "tool_use", "input": {}}, "messages[3].content[0].name"),
        ("system", {"type": "thinking", "thinking": "x"}, "messages[3].content[0]"),
    ],
)
def test_what_no_prompt_can_have_is_refused_by_its_place(
    role: str, block: dict[str, Any], place: str
) -> None:
    with pytest.raises(ApiError) as caught:
        turns(role, [block])
    assert (caught.value.status, caught.value.param) == (400, place)


@pytest.mark.parametrize(
    ("role", "block", "left_out"),
    [
        ("user", {"type": "tool_use", "id": "t1", "name": "look", "input": {}}, "tool_use"),
        ("user", {"type": "thinking", "thinking": "Hm.", "signature": "x"}, "thinking"),
        ("user", {"type": "redacted_thinking", "data": "cipher"}, "redacted_thinking"),
        ("assistant", result("sunny"), "tool_result"),
        ("system", {"type": "thinking", "thinking": "Hm."}, "thinking"),
        ("user", result([{"type": "tool_use", "name": "look"}]), "tool_use"),
        ("user", result([result("sunny")]), "tool_result"),
        ("user", {"type": "text"}, None),
        ("assistant", {"type": "text", "text": None}, None),
    ],
)
def test_a_block_where_it_cannot_stand_ends_no_session(
    role: str, block: dict[str, Any], left_out: str | None
) -> None:
    unsupported = Unsupported("refuse", "images.messages", "messages")
    message = InputMessage.model_validate({"role": role, "content": [block, text("Go on.")]})
    assert message.turns("messages[3]", unsupported)[-1] == Turn(message.role, "Go on.")
    assert unsupported.left_out == ({left_out: 1} if left_out else {})


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ('{"at": "a"}', '{"at": "a"}'),
        ('{"at": ', '{"at": '),
        ("", "{}"),
        (["a", 1], '["a", 1]'),
        ([], "{}"),
        ({"at": {"ö": None}}, '{"at": {"ö": null}}'),
    ],
)
def test_a_call_may_have_had_any_arguments(given: Any, arguments: str) -> None:
    block = {"type": "tool_use", "id": "t1", "name": "look", "input": given}
    call = ToolCall("t1", "look", arguments)
    assert turns("assistant", [block]) == [Turn("assistant", tool_calls=(call,))]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "x"},
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"text": "x"}]},
        {"role": "user", "content": ["x"]},
    ],
)
def test_what_is_no_message_is_none(message: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        InputMessage.model_validate(message)


def test_content_of_text_is_joined() -> None:
    assert joined_text("a", "here", UNSUPPORTED) == "a"
    assert joined_text([], "here", UNSUPPORTED) == ""
