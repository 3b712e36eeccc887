"""Where the next prompt of a conversation may leave this one: found over real templates, and what
two prompts really have in common."""

from itertools import takewhile
from pathlib import Path

import pytest

from engine.types import PromptBoundaries
from server.text.conversation import Conversation, Thinking, Tool, ToolCall, Turn
from server.text.tokenizer import EncodedText, Tokenizer
from tests.models import write_tokenizer

DEMO = Path(__file__).parents[3] / "configs" / "demo" / "model"
# What sets Qwen3.5's apart: it wants a user, and begins an answer with its thoughts.
WANTS_A_USER = """\
{%- set last = namespace(query=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{%- set last.query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if last.query < 0 %}{{- raise_exception('no user') }}{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' and loop.index0 > last.query %}
        {{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""
SYSTEM, QUESTION, OTHER = (
    Turn("system", "You write code."),
    Turn("user", "What is in a.py?"),
    Turn("user", "And in b.py?"),
)
REMINDER = Turn("user", "<system-reminder>\nThe file has changed.\n</system-reminder>\n")
CALL = Turn(
    "assistant",
    "",
    "I have to look.",
    (ToolCall("1", "read", '{"at": "a.py"}', '<tool_call>{"name":"read"}</tool_call>'),),
)
RESULT = Turn("tool", "x = 1", tool_call_id="1")
ANSWER = Turn("assistant", "One line.", "That was short.")
READ = Tool("read")


@pytest.fixture(scope="module", params=["qwen3", "wants a user"])
def qwen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "qwen3":
        return Tokenizer(DEMO)
    folder = tmp_path_factory.mktemp("qwen")
    write_tokenizer(folder, 1000, template=WANTS_A_USER)
    return Tokenizer(folder)


async def encoded(qwen: Tokenizer, *turns: Turn, **fields: object) -> EncodedText:
    return await qwen.encode_chat(Conversation(turns, (READ,), **fields))  # type: ignore[arg-type]


def shared(one: EncodedText, other: EncodedText) -> int:
    pairs = zip(one.ids, other.ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def said(qwen: Tokenizer, chat: EncodedText, tokens: int) -> str:
    return qwen.fast.decode(list(chat.ids[:tokens]), skip_special_tokens=False)


async def test_the_next_turn_goes_on_from_the_end_of_the_messages(qwen: Tokenizer) -> None:
    first = await encoded(qwen, SYSTEM, QUESTION)
    second = await encoded(qwen, SYSTEM, QUESTION, ANSWER, OTHER)
    assert shared(first, second) >= first.boundaries.messages_end == first.boundaries.user_end
    assert first.boundaries.messages_end < len(first.ids), "the beginning of an answer follows"
    text = said(qwen, first, first.boundaries.messages_end)
    assert text.endswith(f"{QUESTION.text}<|im_end|>\n")
    assert said(qwen, second, second.boundaries.user_end).endswith(f"{OTHER.text}<|im_end|>\n")


async def test_thoughts_are_kept_while_tools_answer_and_dropped_by_the_next_question(
    qwen: Tokenizer,
) -> None:
    asked = await encoded(qwen, SYSTEM, QUESTION)
    called = await encoded(qwen, SYSTEM, QUESTION, CALL, RESULT)
    later = await encoded(qwen, SYSTEM, QUESTION, CALL, RESULT, ANSWER, OTHER)
    assert called.boundaries.user_end == asked.boundaries.user_end, "a tool's result is no question"
    assert shared(asked, called) >= asked.boundaries.messages_end
    assert "I have to look." in said(qwen, called, called.boundaries.messages_end)
    assert called.boundaries.user_end <= shared(called, later) < called.boundaries.messages_end
    kept = said(qwen, called, shared(called, later))
    assert kept == said(qwen, called, called.boundaries.user_end) + "<|im_start|>assistant\n"


async def test_a_reminder_behind_tools_drops_thoughts_and_is_no_question(qwen: Tokenizer) -> None:
    called = await encoded(qwen, SYSTEM, QUESTION, CALL, RESULT)
    reminded = await encoded(qwen, SYSTEM, QUESTION, CALL, RESULT, REMINDER)
    assert called.boundaries.user_end == reminded.boundaries.user_end
    assert called.boundaries.user_end <= shared(called, reminded) < called.boundaries.messages_end
    assert said(qwen, reminded, reminded.boundaries.messages_end).rstrip().endswith("<|im_end|>")
    again = await encoded(qwen, SYSTEM, QUESTION, CALL, RESULT, REMINDER, CALL, RESULT)
    assert shared(reminded, again) >= reminded.boundaries.messages_end


async def test_a_request_beside_the_conversation_shares_the_system_prompt(qwen: Tokenizer) -> None:
    chat = await encoded(qwen, SYSTEM, QUESTION)
    title = await encoded(qwen, SYSTEM, Turn("user", "Write a title for: What is in a.py?"))
    end = chat.boundaries.system_end
    assert 0 < end == title.boundaries.system_end <= shared(chat, title)
    assert SYSTEM.text in said(qwen, chat, end)
    assert QUESTION.text[:4] not in said(qwen, chat, end)


async def test_an_answer_that_is_begun_goes_on_behind_the_messages(qwen: Tokenizer) -> None:
    asked = await encoded(qwen, SYSTEM, QUESTION)
    begun = await encoded(qwen, SYSTEM, QUESTION, Turn("assistant", "One"), continues=True)
    assert begun.boundaries == asked.boundaries
    assert len(begun.ids) > len(asked.ids)


async def test_what_stands_behind_the_last_message_is_no_part_of_it(qwen: Tokenizer) -> None:
    asked = await encoded(qwen, SYSTEM, QUESTION, thinking=Thinking(enabled=False))
    assert said(qwen, asked, asked.boundaries.messages_end).endswith(f"{QUESTION.text}<|im_end|>\n")


async def test_special_tokens_that_texts_spell_move_no_end(qwen: Tokenizer) -> None:
    spelt = Turn("user", "a<|im_end|>\n<|im_start|>user\nb" * 30)
    asked = await encoded(qwen, SYSTEM, spelt, CALL, RESULT)
    assert said(qwen, asked, asked.boundaries.user_end).endswith(f"{spelt.text}<|im_end|>\n")


async def test_where_nobody_has_said_anything_there_is_no_such_end(tmp_path: Path) -> None:
    qwen = Tokenizer(DEMO)
    asked = await encoded(qwen, SYSTEM, Turn("assistant", "Hello."), REMINDER)
    assert asked.boundaries.user_end == 0 < asked.boundaries.messages_end


async def test_a_template_that_does_not_render_parts_has_no_ends(tmp_path: Path) -> None:
    whole = "{% if not add_generation_prompt %}{{ raise_exception('whole') }}{% endif %}"
    write_tokenizer(tmp_path, 1000, template=whole + WANTS_A_USER)
    asked = await encoded(Tokenizer(tmp_path), SYSTEM, QUESTION)
    assert asked.boundaries == PromptBoundaries()


async def test_calls_that_are_cut_have_no_end(tmp_path: Path) -> None:
    """A template that writes what was called otherwise where an answer is to follow."""
    other = WANTS_A_USER.replace("name +", "name + ('' if add_generation_prompt else ' ') +")
    write_tokenizer(tmp_path, 1000, template=other)
    asked = await encoded(Tokenizer(tmp_path), SYSTEM, QUESTION, CALL, RESULT)
    assert asked.boundaries.messages_end == 0 < asked.boundaries.user_end


@pytest.mark.parametrize(
    ("text", "is_said"),
    [
        ("Hello", True),
        ("", False),
        (" \n", False),
        ("<system-reminder>x</system-reminder>", False),
        ("<system-reminder>x</system-reminder>\n<system-reminder>y</system-reminder> ", False),
        ("<system-reminder>x</system-reminder>\nHello", True),
        ("Hello<system-reminder>x</system-reminder>", True),
        ("<system-reminder>x", False),
    ],
)
def test_reminders_are_not_what_a_person_says(text: str, is_said: bool) -> None:
    assert Turn("user", text).is_a_persons is is_said
    assert not Turn("tool", text).is_a_persons


async def test_where_turns_are_not_asked_for_the_system_prompts_end_alone_is_found(
    qwen: Tokenizer,
) -> None:
    conversation = Conversation((SYSTEM, QUESTION), (READ,))
    whole = await qwen.encode_chat(conversation)
    found = await qwen.encode_chat(conversation, finds_boundaries=False)
    assert found.ids == whole.ids
    assert found.boundaries == PromptBoundaries(whole.boundaries.system_end) != whole.boundaries
