from pathlib import Path

import pytest

from server.text.conversation import Conversation, Thinking, Turn
from server.text.tokenizer import EncodedText, Tokenizer
from tests.models import write_tokenizer

USER = Turn("user", "Hello")
PLAIN = "{% for m in messages %}{{ m.content }}|{% endfor %}"
OPENS = PLAIN + "{# </think> #}<think>"
BREAKS = PLAIN + "{# </think> #}<think>\n{{ '' }}"
CLOSES = PLAIN + "</think>"
# It says it in another place, too.
SILENCED = (
    "{% set silent = enable_thinking is defined and not enable_thinking %}"
    "{{ '/silent ' if silent }}" + PLAIN + "{{ '<think></think>' if silent }}"
)
# It only takes thoughts out of what was said.
STRIPS = PLAIN.replace("m.content", "m.content.split('</think>')[-1]")
THOUGHT = Turn("assistant", "Once", reasoning="Hm.\n")


async def encoded(
    folder: Path, template: str, turn: Turn, enabled: bool | None = None
) -> EncodedText:
    write_tokenizer(folder, 1000, template=template)
    asked = Conversation((USER, turn), continues=True, thinking=Thinking(enabled))
    return await Tokenizer(folder).encode_chat(asked)


@pytest.mark.parametrize(
    ("template", "turn", "opening", "begun"),
    [
        (PLAIN, Turn("assistant", "Once "), "", "Once "),
        (PLAIN, THOUGHT, "", "Once"),
        (PLAIN, Turn("assistant", "<think>Once"), "", "<think>Once"),
        (OPENS, Turn("assistant", "Once"), "<think>\n\n</think>\n\n", "Once"),
        (OPENS, THOUGHT, "<think>\nHm.\n</think>\n\n", "Once"),
        (OPENS, Turn("assistant", reasoning="\nHm.\n"), "<think>\n", "Hm.\n"),
        (OPENS, Turn("assistant"), "<think>", ""),
        (BREAKS, Turn("assistant", "Once"), "<think>\n\n</think>\n\n", "Once"),
        (BREAKS, THOUGHT, "<think>\nHm.\n</think>\n\n", "Once"),
        (BREAKS, Turn("assistant", "<think>\nHm."), "<think>\n", "Hm."),
        (CLOSES, THOUGHT, "</think>", "Once"),
        (CLOSES, Turn("assistant", reasoning="Hm."), "</think>", ""),
        (SILENCED, Turn("assistant", "Once"), "<think>\n\n</think>\n\n", "Once"),
        (STRIPS, Turn("assistant", "Once"), "", "Once"),
        (STRIPS, THOUGHT, "<think>\nHm.\n</think>\n\n", "Once"),
    ],
)
async def test_an_answer_is_begun_as_the_template_lets_answers_begin(
    tmp_path: Path, template: str, turn: Turn, opening: str, begun: str
) -> None:
    found = await encoded(tmp_path, template, turn)
    assert (found.opening, found.begun) == ("Hello|" + opening, begun)
    assert found.text == found.opening + found.begun


async def test_without_thinking_those_that_the_template_opens_are_over(tmp_path: Path) -> None:
    found = await encoded(tmp_path, OPENS, THOUGHT, enabled=False)
    assert found.text == "Hello|<think>\n\n</think>\n\nOnce"
