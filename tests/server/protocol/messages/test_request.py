import json
from typing import Any

import pytest
from pydantic import ValidationError

from server.config import LimitsSection
from server.protocol.messages.request import (
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    OfferedChoice,
    OfferedTool,
    joined_text,
    read_custom_tools,
    system_texts,
)
from server.protocol.unsupported import Unsupported
from server.protocol.wire_errors import ApiError
from server.text.conversation import (
    Conversation,
    OutputFormat,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    Turn,
)

LIMITS = LimitsSection(max_messages=3)
HELLO = [{"role": "user", "content": "Hello"}]
UNSUPPORTED = Unsupported("refuse", "images.messages")
SCHEMA: dict[str, Any] = {"type": "object"}
FORMAT = {"format": {"type": "json_schema", "schema": SCHEMA}}


def request(**given: Any) -> MessagesRequest:
    body = {"max_tokens": 5, "messages": HELLO} | given
    return MessagesRequest.model_validate_json(json.dumps(body))


def conversation(**given: Any) -> Conversation:
    return request(**given).conversation(LIMITS, UNSUPPORTED)


def refusal(**given: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        conversation(**given)
    assert caught.value.status == 400
    return caught.value


def test_the_least_that_can_be_asked() -> None:
    asked = request()
    assert (asked.max_tokens, asked.stop_strings()) == (5, ())
    assert conversation() == Conversation((Turn("user", "Hello"),), tool_choice=ToolChoice("none"))


def test_the_system_prompt_comes_first_and_may_come_again() -> None:
    messages = [*HELLO, {"role": "system", "content": "Now in French."}, *HELLO]
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    assert conversation(system=system, messages=messages).turns == (
        Turn("system", "Be brief."),
        Turn("system", "Be kind."),
        Turn("user", "Hello"),
        Turn("system", "Now in French."),
        Turn("user", "Hello"),
    )
    assert conversation(system="Be brief.").turns[0] == Turn("system", "Be brief.")


@pytest.mark.parametrize("given", [{}, {"max_tokens": None}])
@pytest.mark.parametrize("missing", ["max_tokens", "messages"])
def test_what_must_be_there_is_named(given: dict[str, Any], missing: str) -> None:
    body: dict[str, Any] = {"max_tokens": 5, "messages": HELLO}
    del body[missing]
    with pytest.raises(ValidationError) as caught:
        MessagesRequest.model_validate(body | {k: v for k, v in given.items() if k == missing})
    assert caught.value.errors()[0]["loc"] == (missing,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", 2**31),
        ("messages", []),
        ("messages", "Hello"),
        ("stop_sequences", "a"),
        ("thinking", {"type": "perhaps"}),
        ("thinking", {"type": "enabled", "budget_tokens": -1}),
        ("tool_choice", "auto"),
        ("output_config", {"effort": "huge"}),
        ("output_config", {"format": {"type": "text"}}),
        ("chat_template_kwargs", {"other": [1]}),
        ("temperature", 2.5),
    ],
)
def test_a_value_that_cannot_be_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        request(**{name: value})
    assert caught.value.errors()[0]["loc"][0] == name


def test_the_assistants_last_message_is_the_beginning_of_the_answer() -> None:
    assert conversation(messages=[*HELLO, {"role": "assistant", "content": "Well"}]).continues
    assert not conversation().continues


def test_too_many_messages_and_tools_are_refused() -> None:
    assert refusal(messages=HELLO * 4).param == "messages"
    assert refusal(tools=[{"name": f"f{n}"} for n in range(257)]).param == "tools"


def test_tools_and_their_choice_are_read() -> None:
    found = conversation(
        tools=[{"name": "look", "input_schema": SCHEMA}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    assert found.tools == (Tool("look", parameters=SCHEMA),)
    assert found.tool_choice == ToolChoice("required")
    assert found.parallel_tool_calls is False
    assert conversation(tools=[{"name": "look"}]).tool_choice == ToolChoice("auto")


@pytest.mark.parametrize(
    ("given", "thinks"),
    [
        ({}, Thinking()),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, Thinking()),
        ({"thinking": {"type": "disabled"}}, Thinking(False)),
        ({"thinking": {"type": "between_tools"}}, Thinking(False)),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, Thinking(True, 1024)),
        ({"thinking": {"type": "enabled"}}, Thinking(True)),
        ({"output_config": {"effort": "low"}}, Thinking(True, 2048)),
        ({"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}}, Thinking(True)),
        (
            {
                "output_config": {"effort": "low"},
                "thinking": {"type": "enabled", "budget_tokens": 9},
            },
            Thinking(True, 9),
        ),
        ({"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}}, Thinking(False)),
        ({"enable_thinking": False}, Thinking(False)),
        ({"enable_thinking": False, "output_config": {"effort": "medium"}}, Thinking(False, 8192)),
        ({"chat_template_kwargs": {"enable_thinking": True}}, Thinking(True)),
        (
            {"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True},
            Thinking(False),
        ),
        ({"enable_thinking": False, "thinking": {"type": "enabled"}}, Thinking(True)),
    ],
)
def test_how_much_is_thought_is_said_in_many_ways(given: dict[str, Any], thinks: Thinking) -> None:
    found = conversation(**given).thinking
    assert (found.enabled, found.budget) == (thinks.enabled, thinks.budget)


def test_an_answer_may_have_a_schema() -> None:
    asked = OutputFormat("json_schema", SCHEMA, "output_config.format.schema")
    assert conversation(output_config=FORMAT).output == asked
    assert conversation(output_config={"effort": "low"}).output is None
    regex = {"structured_outputs": {"regex": "a+"}}
    assert conversation(**regex).output == OutputFormat("regex", "a+", "structured_outputs.regex")
    assert refusal(**regex, output_config=FORMAT).param == "structured_outputs.regex"


def test_stop_sequences_have_their_own_name_in_errors() -> None:
    asked = request(stop_sequences=["a", "b"] * 7)
    asked.check(LimitsSection())
    assert asked.stop_strings() == ("a", "b") * 7
    for wrong in ([""], ["a"] * 513):
        with pytest.raises(ApiError) as caught:
            request(stop_sequences=wrong).check(LimitsSection())
        assert caught.value.param == "stop_sequences"


def test_a_count_is_of_the_same_conversation_and_needs_no_length() -> None:
    body = {"messages": HELLO, "system": "Be brief.", "tools": [{"name": "look"}]}
    counted = CountTokensRequest.model_validate(body).conversation(LIMITS, UNSUPPORTED)
    assert counted == conversation(**body)
    CountTokensRequest.model_validate(body | {"max_tokens": "many", "n": 5})


SCHEMA_TOOL = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK, WAIT = Tool("look"), Tool("wait")


def read(*tools: dict[str, Any]) -> tuple[Tool, ...]:
    return read_custom_tools([OfferedTool.model_validate(tool) for tool in tools], ())


def chosen(tools: tuple[Tool, ...], **choice: Any) -> ToolChoice:
    return OfferedChoice.model_validate(choice).read(tools)


def test_tools_keep_their_order_and_all_that_is_said_of_them() -> None:
    look = {"name": "look", "description": "Looks.", "input_schema": SCHEMA_TOOL, "strict": True}
    marked = {"name": "wait", "type": "custom", "cache_control": {"type": "ephemeral"}}
    assert read(look, marked) == (Tool("look", "Looks.", SCHEMA_TOOL, True), Tool("wait"))
    assert read() == ()


@pytest.mark.parametrize(
    "kind",
    [
        "web_search_20250305",
        "web_fetch_20250910",
        "code_execution_20250825",
        "tool_search_tool_regex_20251119",
        "mcp_toolset",
        "advisor_20260301",
    ],
)
def test_what_anthropics_servers_run_is_left_out(kind: str) -> None:
    assert read({"type": kind, "name": "look"}, {"name": "look"}) == (LOOK,)
    with pytest.raises(ApiError) as caught:
        chosen(read({"type": kind, "name": "look"}), type="tool", name="look")
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "bash_20250124", "name": "bash"}], "tools[0]"),
        ([{"type": "computer_toolset_20260801"}], "tools[0]"),
        ([{"type": "", "name": "f"}], "tools[0]"),
        ([{"input_schema": SCHEMA_TOOL}], "tools[0].name"),
        ([{"name": "a b"}], "tools[0].name"),
        ([{"name": "f"}, {"name": "f"}], "tools[1].name"),
        ([{"name": f"f{n}"} for n in range(257)], "tools"),
    ],
)
def test_a_tool_that_cannot_be_offered_is_refused_by_its_place(tools: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(*tools)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        ({"type": "auto"}, ToolChoice("auto")),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "tool", "name": "wait"}, ToolChoice("named", "wait")),
    ],
)
def test_a_choice_is_one_of_four(choice: dict[str, Any], read: ToolChoice) -> None:
    assert chosen((LOOK, WAIT), **choice) == read


def test_without_tools_nothing_is_called() -> None:
    assert chosen((), type="auto") == chosen((), type="none") == ToolChoice("none")
    for choice in ({"type": "any"}, {"type": "tool", "name": "look"}):
        with pytest.raises(ApiError) as caught:
            chosen((), **choice)
        assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("name", [None, "LOOK"])
def test_a_tool_that_is_not_there_cannot_be_chosen(name: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        chosen((LOOK,), type="tool", name=name)
    assert caught.value.param == "tool_choice.name"


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
