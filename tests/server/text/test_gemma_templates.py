"""Templates in which users and the model take turns, as Gemma's do, get every conversation so."""

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvcache.child import Child
from server.text.chat_template import ChatTemplate
from server.text.conversation import Conversation, Turn
from server.text.tokenizer import Tokenizer
from tests.models import TEMPLATE, write_tokenizer
from tests.templates import GEMMA_2_TEMPLATE, GEMMA_3_TEMPLATE

USER, BYE = Turn("user", "Hello"), Turn("user", "Bye")
BRIEF, LATE = Turn("system", "Be brief."), Turn("system", "Late.")
SAID = Turn("assistant", "Hi.")
OPENS = "{%- for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }}|{% endfor %}"
BOTH = pytest.mark.parametrize("template", [GEMMA_2_TEMPLATE, GEMMA_3_TEMPLATE], ids=["2", "3"])


@pytest.fixture
def made(tmp_path: Path) -> Any:
    def make(template: str) -> ChatTemplate:
        write_tokenizer(tmp_path, 1000, template=template)
        return Tokenizer(tmp_path).template

    return make


@BOTH
def test_it_is_usable_and_knows_no_tools(made: Any, template: str) -> None:
    its = made(template)
    with closing(Child()) as process:
        assert its.try_out(process) == ""
    assert (its.tool_format, its.knows_thoughts) == (None, False)
    assert its.wants_turns
    assert not made(TEMPLATE).wants_turns


@BOTH
@pytest.mark.parametrize(
    ("turns", "messages"),
    [
        ((USER,), ["user\nHello"]),
        ((BRIEF, USER), ["user\nBe brief.\n\nHello"]),
        ((BRIEF,), ["user\nBe brief."]),
        ((BRIEF, LATE, USER, SAID, BYE), ["user\nBe brief.\n\nLate.\n\nHello", "model\nHi.",
                                          "user\nBye"]),
        ((USER, BYE, SAID, SAID, USER), ["user\nHello\n\nBye", "model\nHi.\n\nHi.", "user\nHello"]),
        ((USER, LATE), ["user\nHello\n\nLate."]),
        ((USER, SAID, LATE, BYE), ["user\nHello", "model\nHi.", "user\nLate.\n\nBye"]),
        ((SAID, USER), ["user", "model\nHi.", "user\nHello"]),
        ((BRIEF, SAID, USER), ["user\nBe brief.", "model\nHi.", "user\nHello"]),
    ],
)  # fmt: skip
def test_users_and_the_model_take_turns(
    made: Any, template: str, turns: tuple[Turn, ...], messages: list[str]
) -> None:
    prompt, ends = made(template).render(Conversation(turns))
    found = re.findall(r"<start_of_turn>((?s:.*?))<end_of_turn>\n", prompt)
    assert [one.strip() for one in found] == messages
    assert prompt[: ends.messages] + "<start_of_turn>model\n" == prompt


@BOTH
def test_a_persons_message_ends_where_it_was_joined_with_others(made: Any, template: str) -> None:
    prompt, ends = made(template).render(Conversation((USER, SAID, BYE, USER)))
    assert prompt[: ends.person].endswith("Bye\n\nHello<end_of_turn>\n")


def test_a_template_that_leaves_system_messages_out_gets_them_from_users(made: Any) -> None:
    assert made(OPENS).render(Conversation((BRIEF, USER)))[0] == "user:Be brief.\n\nHello|"
