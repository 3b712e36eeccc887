import pytest

from server.chat.prompting import constraint_spec_of
from server.text.conversation import Channel, Conversation, OutputFormat, Thinking, Tool, ToolChoice
from server.text.grammar.constraint_spec import ConstraintSpec
from server.text.parser import ParseOptions
from tests.server.harness import talk

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK, READ = Tool("look", parameters=SCHEMA), Tool("read", strict=True)
CLOSED = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("conversation", "spec"),
    [
        (talk(), ConstraintSpec()),
        (talk(tools=(LOOK, READ)), ConstraintSpec(tools=(LOOK, READ))),
        (
            talk(tools=(LOOK, READ), tool_choice=ToolChoice("required")),
            ConstraintSpec(tools=(LOOK, READ), must_call=True),
        ),
        (
            talk(tools=(LOOK, READ), tool_choice=ToolChoice("named", "look")),
            ConstraintSpec(tools=(LOOK,), must_call=True, parallel=False),
        ),
        (
            talk(
                tools=(LOOK, READ),
                tool_choice=ToolChoice("required", allowed=frozenset({"look"})),
                parallel_tool_calls=False,
            ),
            ConstraintSpec(tools=(LOOK,), must_call=True, parallel=False),
        ),
        (
            talk(
                tools=(LOOK, READ, Tool("write")),
                tool_choice=ToolChoice("auto", allowed=frozenset({"look", "read"})),
            ),
            ConstraintSpec(tools=(Tool("look", strict=True), READ)),
        ),
        (talk(tools=(LOOK,), tool_choice=ToolChoice("none")), ConstraintSpec()),
        (
            talk(output=OutputFormat("regex", "a+"), thinking=Thinking(budget=5)),
            ConstraintSpec(OutputFormat("regex", "a+"), thinking_budget=5),
        ),
    ],
)
def test_what_is_asked_becomes_what_the_answer_is_held_to(
    conversation: Conversation, spec: ConstraintSpec
) -> None:
    assert constraint_spec_of(conversation, ParseOptions(CLOSED)) == spec


@pytest.mark.parametrize(
    ("prompt", "enabled", "start"),
    [
        ("assistant\n", None, None),
        ("assistant\n", True, None),
        ("assistant\n", False, Channel.CONTENT),
        ("assistant\n<think>\n", None, Channel.REASONING),
        (CLOSED, None, Channel.CONTENT),
        (CLOSED, True, Channel.CONTENT),
    ],
)
def test_the_form_of_an_answer_holds_after_its_thoughts(
    prompt: str, enabled: bool | None, start: Channel | None
) -> None:
    assert (
        constraint_spec_of(talk(thinking=Thinking(enabled)), ParseOptions(prompt)).first_channel
        is start
    )
