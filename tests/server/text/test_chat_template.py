import re
import threading
from pathlib import Path
from typing import Any

import pytest

from kvcache.child import Cause, Child, LimitError
from server.text.calls.tool_format import ToolFormat
from server.text.chat_template import (
    ChatTemplate,
    TemplateError,
    arguments_object,
    common_chars,
)
from server.text.conversation import Conversation, Thinking, Tool, ToolCall, Turn
from server.text.template_trial import TimeLimit
from server.text.tokenizer import Tokenizer
from tests.models import TEMPLATE, XML_TEMPLATE, write_tokenizer
from tests.server.harness import DEADLINE_S, talk
from tests.templates import LLAMA_TEMPLATE

USER = Turn("user", "Hello")
BRIEF = Turn("system", "Be brief.")
LOOK = Tool("look", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}}})
CONTENTS = "{% for m in messages %}{{ m.content }}|{% endfor %}"


@pytest.fixture
def made(tmp_path: Path) -> Any:
    def make(template: Any) -> ChatTemplate:
        write_tokenizer(tmp_path, 1000, template=template)
        return Tokenizer(tmp_path).template

    return make


# --- what the template is told ---------------------------------------------------------------


def test_what_nobody_asked_for_is_not_defined_in_the_template(made: Any) -> None:
    template = made("{{ enable_thinking is defined }} {{ tools is not none }}")
    assert template.render(talk())[0] == "False False"
    asked = talk(tools=(LOOK,), thinking=Thinking(enabled=False))
    assert template.render(asked)[0] == "True True"


def test_tools_are_described_as_openai_does(made: Any) -> None:
    template = made("{{ tools | tojson }}")
    described = (
        '[{"type": "function", "function": {"name": "look", "description": "Looks.", '
        '"parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}}, '
        '{"type": "function", "function": {"name": "wait", '
        '"parameters": {"type": "object", "properties": {}}}}]'
    )
    assert template.render(talk(tools=(LOOK, Tool("wait"))))[0] == described


def test_a_template_for_tools_alone_renders_no_other_conversation(made: Any) -> None:
    template = made([{"name": "tool_use", "template": CONTENTS}])
    assert template.render(talk(tools=(LOOK,)))[0]
    with pytest.raises(TemplateError, match="cannot render these messages"):
        template.render(talk())


def test_a_template_that_is_never_asked_is_never_rendered(made: Any) -> None:
    """Whatever it would do: it is not even read as a template."""
    template = made("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor")
    assert template.exists


def test_a_template_that_does_not_come_to_an_end_is_ended(made: Any) -> None:
    template = made(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    )
    limit = TimeLimit(DEADLINE_S)
    threading.Timer(0.2, limit.end).start()
    with pytest.raises(TemplateError, match="takes too long to render these messages") as caught:
        template.render(talk(), limit=limit)
    assert caught.value.reason == "it takes longer than limits.max_template_s"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ '' }}\n{{ messages[0].a.b }}", "UndefinedError in line 2"),
        ("{{ raise_exception(messages[0].content) }}", "TemplateError in line 1"),
        ("x\n{% if %}", "TemplateSyntaxError in line 2: Expected an expression, got"),
        ("{{ raise_exception('Nobody asks.') }}", "TemplateError in line 1: Nobody asks."),
    ],
)
def test_a_reason_names_the_line_and_repeats_no_message(
    made: Any, template: str, reason: str
) -> None:
    with pytest.raises(TemplateError) as caught:
        made(template).render(talk(Turn("user", "zebra")))
    assert caught.value.reason.startswith(reason)
    assert "zebra" not in caught.value.reason


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('Nobody asks.') }}", ": Nobody asks"),
        ("{{ raise_exception('No ' ~ messages[0].role ~ '!') }}", ": No user!"),
        ("{{ raise_exception('two\\nlines and\\x00\\ttabs \ue000') }}", ": two lines and tabs "),
        ("{{ raise_exception('é' * 9999) }}", ": " + "é" * 200), ("{{ raise_exception('') }}", ""),
        ("{{ messages[0].a.b }}", ""),
    ],
)  # fmt: skip
def test_a_template_that_refuses_messages_says_why(made: Any, template: str, words: str) -> None:
    with pytest.raises(TemplateError) as caught:
        made(template).render(talk())
    assert str(caught.value) == f"the model's chat template cannot render these messages{words}"


@pytest.mark.parametrize(
    ("template", "trial", "said", "unusable"),
    [
        (None, None, "the model has no chat template: chats, messages and", ""),
        (TEMPLATE, "", "", ""),
        (TEMPLATE, "E: no", "has failed with a plain conversation (E: no): ", ""),
        (TEMPLATE, LimitError("x", Cause.NOT_RUN), "failed with a plain conversation (x): ", ""),
        (TEMPLATE, LimitError("too long", Cause.WALL), "is not used, because too long", "too l"),
    ],
)
def test_what_came_of_a_trial_is_said(
    made: Any,
    template: str | None,
    trial: Any,
    said: str,
    unusable: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def call(*_: object) -> Any:
        if isinstance(trial, LimitError):
            raise trial
        return trial

    monkeypatch.setattr(Child, "call", call)
    found = made(template)
    assert said in (told := found.try_out(Child()))
    assert bool(told) == bool(said)
    assert found.unusable.startswith(unusable)
    assert bool(found.unusable) == bool(unusable)


def test_all_of_a_models_templates_are_tried_with_its_own_tokens(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    monkeypatch.setattr(Child, "call", lambda *arguments: asked.append(arguments[3:]))
    several = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    made(several).try_out(Child())
    made("c").try_out(Child())
    assert [texts for texts, _ in asked] == [["a", "b"], ["c"]]
    assert asked[0][1]["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (TEMPLATE, ToolFormat.HERMES), (XML_TEMPLATE, ToolFormat.XML),
        (LLAMA_TEMPLATE, ToolFormat.LLAMA), (CONTENTS, None),
        ({"default": CONTENTS, "tool_use": TEMPLATE}, ToolFormat.HERMES),
        ({"other": CONTENTS}, None),
    ],
)  # fmt: skip
def test_the_template_for_tools_tells_how_calls_are_written(
    made: Any, template: Any, form: ToolFormat | None
) -> None:
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    assert made(template).tool_format is form


CALL = ToolCall("1", "look", "{}")
CALLING, RESULT = Turn("assistant", tool_calls=(CALL,)), Turn("tool", "7", tool_call_id="1")
SAID_RESULT = Turn("user", "<tool_response>\n7\n</tool_response>\n")
ASKED = '{%- if not messages | selectattr("role", "equalto", "user") | list %}{{ x.y }}{% endif %}'
ROLES = "{%- for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"


@pytest.mark.parametrize(
    ("turns", "roles"),
    [
        ((BRIEF,), "user:Be brief.|"), ((BRIEF, Turn("system", "Two.")), "user:Be brief.\n\nTwo.|"),
        ((BRIEF, CALLING, RESULT), "system:Be brief.|user:|assistant:|tool:7|"),
        ((CALLING, RESULT), "user:|assistant:|tool:7|"),
        ((Turn("assistant", "Hi"),), "user:|assistant:Hi|"),
        ((SAID_RESULT,), "user:|user:<tool_response>\n7\n</tool_response>\n|"),
        ((BRIEF, CALLING, Turn("system", "Two.")), "system:Be brief.|assistant:|user:Two.|"),
        ((BRIEF, USER), "system:Be brief.|user:Hello|"),
    ],
)  # fmt: skip
def test_a_template_that_wants_a_question_gets_one(
    made: Any, turns: tuple[Turn, ...], roles: str
) -> None:
    refuses_late = "{%- if messages[1:] | selectattr('role', 'equalto', 'system') | list %}"
    template = made(f"{ASKED}{refuses_late}{{{{ x.y }}}}{{% endif %}}{ROLES}")
    assert not template.takes_no_user
    assert template.render(Conversation(turns))[0] == roles


def test_a_template_that_wants_no_question_gets_none(made: Any) -> None:
    template = made(ROLES)
    assert template.takes_no_user
    assert template.render(Conversation((BRIEF, CALLING)))[0] == "system:Be brief.|assistant:|"


def test_llamas_calls_are_written_back_as_it_writes_them(made: Any) -> None:
    call = ToolCall("1", "look", '{"at": "x"}', written="<tool_call>{}</tool_call>")
    turns = (USER, Turn("assistant", tool_calls=(call,)), Turn("tool", "7", tool_call_id="1"))
    prompt, _ = made(LLAMA_TEMPLATE).render(talk(*turns, tools=(LOOK,)))
    assert (
        '\n\n{"name": "look", "parameters": {"at": "x"}}<|eot_id|><|start_header_id|>tool' in prompt
    )


@pytest.mark.parametrize(
    ("written", "apart"),
    [
        ("u a12 r1 r2 u", "u a1 r1 a2 r2 u"), ("u a12 r2 r1", "u a1 r1 a2 r2"),
        ("u a123 r1 r3", "u a1 r1 a2 a3 r3"), ("a12 u a34 r4 r3", "a1 a2 u a3 r3 a4 r4"),
        ("u a12 r1 r7 r2 u", "u a1 r1 a2 r2 r7 u"), ("u a11 r1 r1", "u a1 r1 r1 a1"),
        ("u a1 r1 a2 r2 u", "u a1 r1 a2 r2 u"), ("a12", "a1 a2"),
    ],
)  # fmt: skip
def test_a_template_that_takes_one_call_at_once_gets_each_with_its_result(
    made: Any, written: str, apart: str
) -> None:
    """u: a question; a12: an answer with calls 1 and 2; r1: a result."""

    def turn(word: str) -> Turn:
        if word == "u":
            return USER
        if word[0] == "r":
            return Turn("tool", word, tool_call_id=word[1:])
        calls = (ToolCall(number, f"f{number}", "{}") for number in word[1:])
        return Turn("assistant", tool_calls=tuple(calls))

    turns = [turn(word) for word in written.split()]
    template = made(LLAMA_TEMPLATE)
    assert made(TEMPLATE).takes_several_calls
    assert not template.takes_several_calls
    prompt, _ = template.render(talk(*turns, tools=(LOOK,)))
    found = re.findall(r"(user)<|\"f(\d)\"|\n\n(r\d)<", prompt)
    assert " ".join(u[:1] or r or f"a{a}" for u, a, r in found) == apart


# --- turns ------------------------------------------------------------------------------------


REFUSES_LATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('too late') }}{% endif %}{{ m.role }}:{{ m.content }}|{% endfor %}"
)
LOSES_LATE = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "{{ m.role }}:{{ m.content }}|{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [REFUSES_LATE, LOSES_LATE])
def test_no_system_message_is_lost(made: Any, template: str) -> None:
    asked = Conversation((BRIEF, USER, Turn("system", "Three.")))
    assert made(template).render(asked)[0] == "system:Be brief.|user:Hello|user:Three.|"


def test_a_tools_answer_names_its_call(made: Any) -> None:
    template = made("{% for m in messages %}{{ m.tool_call_id }}|{% endfor %}")
    assert template.render(talk(USER, Turn("tool", "7", tool_call_id="1")))[0] == "|1|"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", {}),
        (" ", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": "line\nbreak"}', {"a": "line\nbreak"}),
        ('{"a": 1', {"arguments": '{"a": 1'}),
        ("[1]", {"arguments": "[1]"}),
        ('{"a": "\\ud800"}', {"arguments": '{"a": "\\ud800"}'}),
        ("null", {"arguments": "null"}),
        ("[" * 5_000, {"arguments": "[" * 5_000}),
    ],
)
def test_arguments_that_are_no_object_are_shown_as_they_were_written(
    text: str, arguments: dict[str, Any]
) -> None:
    assert arguments_object(text) == arguments


# --- what others begin with as well -----------------------------------------------------------


def test_the_tools_are_shared_like_the_system_message(tokenizer: Tokenizer) -> None:
    one, (shared, *_) = tokenizer.template.render(talk(BRIEF, USER, tools=(LOOK,)))
    other, _ = tokenizer.template.render(talk(BRIEF, Turn("user", "Bye"), tools=(LOOK,)))
    assert '"look"' in one[:shared]
    assert "Be brief." in one[:shared]
    assert one[:shared] == other[:shared]


WANTS_A_USER = (
    "{% for m in messages if m.role == 'user' %}{% set ns = m %}{% else %}"
    "{{ raise_exception('no user') }}{% endfor %}{{ messages[0].content }}|"
)
SAYS_THE_LENGTH = "{{ messages | length }}{{ messages[0].content }}"


def test_a_template_that_tells_nothing_about_system_messages_alone_shares_nothing(
    made: Any,
) -> None:
    prompt, ends = made(SAYS_THE_LENGTH).render(talk(BRIEF, USER))
    assert ends.system == 0
    assert "Be brief." in prompt


def test_a_template_that_wants_a_user_is_given_one_to_find_the_end_of_system_messages(
    made: Any,
) -> None:
    prompt, ends = made(WANTS_A_USER).render(talk(BRIEF, USER))
    assert prompt[: ends.system] == "Be brief.|"


def test_the_switches_of_the_template_are_those_of_the_prompt(made: Any) -> None:
    template = made("{% if not enable_thinking %}/no_think {% endif %}" + CONTENTS)
    _, ends = template.render(talk(BRIEF, USER, thinking=Thinking(enabled=False)))
    assert ends.system == len("/no_think Be brief.|")


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [("", "", 0), ("", "a", 0), ("ab", "abc", 2), ("abc", "abd", 2), ("é😀x", "é😀y", 2)],
)
def test_texts_are_compared_by_characters(one: str, other: str, common: int) -> None:
    assert common_chars(one, other) == common_chars(other, one) == common


# --- calls as the model wrote them -----------------------------------------------------------

WROTE = '<tool_call> {"name":"look","arguments":{"at":"</tool_call>"}}</tool_call>'


def called(written: str | None) -> Conversation:
    """Two calls, of which the text of the second one may be known."""
    calls = (ToolCall("a", "look", "{}"), ToolCall("b", "look", '{"at": "</tool_call>"}', written))
    return talk(USER, Turn("assistant", "Hm.", tool_calls=calls), Turn("user", "<tool_call>"))


def test_a_template_that_does_more_with_calls_than_to_write_them_writes_them(made: Any) -> None:
    for template in (
        TEMPLATE.replace(
            "{{- message.content }}", "{{- message.content }}{{ message.tool_calls }}"
        ),
        TEMPLATE.replace(
            "{%- set call = call.function %}",
            "{%- set call = call.function %}{{ raise_exception('') if call.name != 'look' }}",
        ),
    ):
        chat = made(template)
        assert chat.render(called(WROTE)) == chat.render(called(None))
