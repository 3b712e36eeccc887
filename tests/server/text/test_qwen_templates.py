"""Templates that are made like those of Qwen's hybrids and coders are read as their makers mean."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvcache.child import Child
from server.text.calls.tool_format import ToolFormat
from server.text.conversation import (
    Channel,
    Conversation,
    Thinking,
    Tool,
    ToolCall,
    Turn,
    first_channel_of,
)
from server.text.pieces import TextPiece, ToolCallArguments, ToolCallStart
from server.text.pipeline import ParseOptions
from server.text.tokenizer import Tokenizer
from tests.models import write_tokenizer
from tests.server.harness import talk
from tests.server.text.calling import deltas_of, pieces_of
from tests.templates import CODER_TEMPLATE, HYBRID_TEMPLATE

USER = Turn("user", "Hello")
LOOK = Tool("look", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}}})
BOTH = pytest.mark.parametrize("template", [HYBRID_TEMPLATE, CODER_TEMPLATE], ids=["35", "coder"])
CALLS = (
    ToolCall("1", "look", '{"at": "a\\nb", "n": [1], "deep": {"x": null}, "yes": 1.5}'),
    ToolCall("2", "wait", "{}"),
)
WRITTEN = (
    "<tool_call>\n<function=look>\n<parameter=at>\na\nb\n</parameter>\n"
    "<parameter=n>\n[1]\n</parameter>\n"
    '<parameter=deep>\n{"x": null}\n</parameter>\n'
    "<parameter=yes>\n1.5\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=wait>\n</function>\n</tool_call>"
)


@pytest.fixture
def made(tmp_path: Path) -> Any:
    def make(template: str) -> Tokenizer:
        write_tokenizer(tmp_path, 1000, template=template)
        return Tokenizer(tmp_path)

    return make


@BOTH
def test_they_are_usable_and_call_tools_in_tags(made: Any, template: str) -> None:
    its = made(template).template
    with closing(Child()) as process:
        assert its.try_out(process) == ""
    assert its.tool_format is ToolFormat.XML
    assert its.knows_thoughts == (template == HYBRID_TEMPLATE)


@pytest.mark.parametrize(
    ("template", "enabled", "begins", "ending"),
    [
        (HYBRID_TEMPLATE, None, Channel.REASONING, "assistant\n<think>\n"),
        (HYBRID_TEMPLATE, True, Channel.REASONING, "assistant\n<think>\n"),
        (HYBRID_TEMPLATE, False, Channel.CONTENT, "assistant\n<think>\n\n</think>\n\n"),
        (CODER_TEMPLATE, None, None, "assistant\n"),
        (CODER_TEMPLATE, False, None, "assistant\n"),
    ],
)
def test_the_prompt_tells_what_an_answer_begins_with(
    made: Any, template: str, enabled: bool | None, begins: Channel | None, ending: str
) -> None:
    prompt, _ = made(template).template.render(talk(USER, thinking=Thinking(enabled)))
    assert prompt.endswith(ending)
    assert first_channel_of(prompt) is begins


@pytest.mark.parametrize(
    ("template", "said", "reasoning"),
    [
        (HYBRID_TEMPLATE, "Hm.\n</think>\n\nSure.\n\n", "Hm."),
        (CODER_TEMPLATE, "Sure.\n", ""),
    ],
    ids=["35", "coder"],
)
def test_an_answer_is_taken_apart(made: Any, template: str, said: str, reasoning: str) -> None:
    its = made(template).template
    prompt, _ = its.render(talk(USER, tools=(LOOK,)))
    options = ParseOptions(prompt, (LOOK, Tool("wait")), its.tool_format)
    pieces = pieces_of(deltas_of(said + WRITTEN, options))
    texts = {
        channel: "".join(
            piece.text
            for piece in pieces
            if isinstance(piece, TextPiece) and piece.channel is channel
        )
        for channel in Channel
    }
    assert (texts[Channel.REASONING], texts[Channel.CONTENT].strip()) == (reasoning, "Sure.")
    names = [piece.name for piece in pieces if isinstance(piece, ToolCallStart)]
    assert names == ["look", "wait"]
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, ToolCallArguments))
    assert arguments == '{"at": "a\\nb", "n": [1], "deep": {"x": null}, "yes": 1.5}{}'


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (HYBRID_TEMPLATE, f"<think>\nHm.\n</think>\n\nSure.\n\n{WRITTEN}"),
        (CODER_TEMPLATE, f"Sure.\n{WRITTEN}"),
    ],
    ids=["35", "coder"],
)
def test_what_a_model_said_is_rendered_as_it_said_it(made: Any, template: str, said: str) -> None:
    turns = (
        Turn("system", "Be brief."),
        USER,
        Turn("assistant", "Sure.", "Hm.", CALLS),
        Turn("tool", "7", tool_call_id="1"),
        Turn("tool", "8", tool_call_id="2"),
    )
    prompt, _ = made(template).template.render(Conversation(turns, (LOOK,)))
    assert f"<|im_start|>assistant\n{said}<|im_end|>\n" in prompt
    results = "\n<tool_response>\n7\n</tool_response>\n<tool_response>\n8\n</tool_response>"
    assert f"<|im_start|>user{results}<|im_end|>\n<|im_start|>assistant\n" in prompt


@BOTH
def test_a_call_whose_text_is_known_stands_as_the_model_wrote_it(made: Any, template: str) -> None:
    wrote = "<tool_call><function=look><parameter=at>\na\n</parameter></function></tool_call>"

    def asked(written: str | None) -> Conversation:
        call = ToolCall("1", "look", '{"at": "a"}', written)
        return talk(USER, Turn("assistant", "Sure.", tool_calls=(call,)), Turn("tool", "7"))

    its = made(template).template
    (plain, _), (found, _) = its.render(asked(None)), its.render(asked(wrote))
    begin, end = plain.index("<tool_call>"), plain.index("</tool_call>") + len("</tool_call>")
    assert found == plain[:begin] + wrote + plain[end:]


@pytest.mark.parametrize(
    ("template", "turn", "opening", "begun"),
    [
        (HYBRID_TEMPLATE, Turn("assistant", "Once"), "<think>\n\n</think>\n\n", "Once"),
        (HYBRID_TEMPLATE, Turn("assistant", "Once", "Hm."), "<think>\nHm.\n</think>\n\n", "Once"),
        (HYBRID_TEMPLATE, Turn("assistant", reasoning="Hm."), "<think>\n", "Hm."),
        (CODER_TEMPLATE, Turn("assistant", "Once"), "", "Once"),
    ],
)
async def test_a_begun_answer_goes_on_behind_the_thoughts_that_the_prompt_opens(
    made: Any, template: str, turn: Turn, opening: str, begun: str
) -> None:
    found = await made(template).encode_chat(Conversation((USER, turn), continues=True))
    assert found.opening.endswith("<|im_start|>assistant\n" + opening)
    assert (found.begun, found.text) == (begun, found.opening + begun)


@BOTH
@pytest.mark.parametrize(
    "turns",
    [
        (Turn("system", "Be brief."),),
        (Turn("assistant", tool_calls=CALLS[1:]), Turn("tool", "7", tool_call_id="2")),
    ],
)
def test_nobody_need_ask(made: Any, template: str, turns: tuple[Turn, ...]) -> None:
    prompt, ends = made(template).template.render(Conversation(turns, (LOOK,)))
    assert turns[-1].text in prompt
    assert 0 < ends.messages <= len(prompt)


@BOTH
def test_system_messages_stand_first_whoever_sends_them_later(made: Any, template: str) -> None:
    its = made(template).template
    asked = Conversation((Turn("system", "Be brief."), USER, Turn("system", "Three."), USER))
    role = "system" if its.takes_late_system else "user"
    assert f"<|im_start|>{role}\nThree.<|im_end|>\n" in its.render(asked)[0]
    assert its.takes_late_system == (template == CODER_TEMPLATE)
