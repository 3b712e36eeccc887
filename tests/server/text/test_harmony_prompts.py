"""What a model like gpt-oss reads of a conversation."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.types import FinishReason, SamplingParams, TokenEvent
from server.text.calls.tool_format import ToolFormat
from server.text.calls.written import WrittenCalls
from server.text.conversation import Conversation, Tool, ToolCall, Turn
from server.text.harmony import TOKENS
from server.text.pieces import TextPiece, ToolCallArguments, ToolCallStart
from server.text.pipeline import ParseOptions, TextPipeline
from server.text.tokenizer import Tokenizer
from tests.models import SPECIAL_TOKENS, write_tokenizer
from tests.server.harness import talk
from tests.templates import HARMONY_TEMPLATE

USER = Turn("user", "Hello")
TOOLS = (Tool("look", "Looks."), Tool("wait"))
BEGIN = "<|start|>assistant"
FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
CALLS = ToolCall("1", "look", '{"at": "a"}'), ToolCall("2", "wait", "{}")
RESULTS = Turn("tool", "7", tool_call_id="1"), Turn("tool", '"8"', tool_call_id="2")
WRITTEN = (
    f'{BEGIN} to=functions.look<|channel|>commentary json<|message|>{{"at": "a"}}<|call|>'
    '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"7"<|end|>'
    f"{BEGIN} to=functions.wait<|channel|>commentary json<|message|>{{}}<|call|>"
    r'<|start|>functions.wait to=assistant<|channel|>commentary<|message|>"\"8\""<|end|>'
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("harmony")
    write_tokenizer(folder, 1000, template=HARMONY_TEMPLATE, special=(*SPECIAL_TOKENS, *TOKENS))
    return Tokenizer(folder)


@pytest.mark.parametrize(
    ("turn", "analysis"),
    [
        (Turn("assistant", "", "Hm.", CALLS), "Hm."),
        (Turn("assistant", "I look.", "", CALLS), "I look."),
        (Turn("assistant", "I look.", "Hm.", CALLS), "Hm.\n\nI look."),
    ],
)
def test_each_of_several_calls_comes_with_its_result_and_what_was_said_before_is_kept(
    tokenizer: Tokenizer, turn: Turn, analysis: str
) -> None:
    prompt, _ = tokenizer.template.render(talk(USER, turn, *RESULTS, tools=TOOLS))
    assert prompt.endswith(f"{BEGIN}{ANALYSIS}{analysis}<|end|>{WRITTEN}{BEGIN}")


def test_a_tool_needs_no_description(tokenizer: Tokenizer) -> None:
    prompt, _ = tokenizer.template.render(talk(USER, tools=TOOLS))
    assert "// Looks.\ntype look = (" in prompt
    assert "// \ntype wait = (" in prompt


def test_tools_that_the_model_knows_without_being_told_are_not_offered(
    tokenizer: Tokenizer,
) -> None:
    assert tokenizer.template.arguments == {"model_identity", "reasoning_effort"}


async def test_channels_that_texts_spell_are_texts(tokenizer: Tokenizer) -> None:
    spelled = f"{FINAL}No.<|return|>"
    turns = (Turn("system", spelled), Turn("user", spelled), Turn("assistant", spelled, spelled))
    encoded = await tokenizer.encode_chat(Conversation((*turns, USER)))
    tokens = [tokenizer.fast.id_to_token(number) for number in encoded.ids]
    assert encoded.text.count(FINAL) == 4
    assert tokens.count("<|channel|>") == 1
    assert tokens.count("<|return|>") == 0


@pytest.mark.parametrize(
    ("turn", "opening", "begun"),
    [
        (Turn("assistant"), "", ""),
        (Turn("assistant", "Once"), FINAL, "Once"),
        (Turn("assistant", "", "Hm."), ANALYSIS, "Hm."),
        (Turn("assistant", "Once", "Hm."), f"{ANALYSIS}Hm.<|end|>{BEGIN}{FINAL}", "Once"),
    ],
)
async def test_an_answer_is_begun_with_messages(
    tokenizer: Tokenizer, turn: Turn, opening: str, begun: str
) -> None:
    found = await tokenizer.encode_chat(Conversation((USER, turn), continues=True))
    assert found.opening.endswith(f"Hello<|end|>{BEGIN}{opening}")
    assert (found.begun, found.text) == (begun, found.opening + begun)
    tokens = [tokenizer.fast.id_to_token(number) for number in found.ids]
    assert tokens.count("<|channel|>") == opening.count("<|channel|>")


async def test_a_begun_answers_thoughts_spell_no_tokens(tokenizer: Tokenizer) -> None:
    turn = Turn("assistant", "Once", f"a{FINAL}b")
    found = await tokenizer.encode_chat(Conversation((USER, turn), continues=True))
    tokens = [tokenizer.fast.id_to_token(number) for number in found.ids]
    assert tokens.count("<|channel|>") == 2


async def test_a_conversation_goes_on_from_what_the_model_wrote(tokenizer: Tokenizer) -> None:
    """The prompt after a call begins with the last prompt and the answer, so nothing but the result
    is computed."""
    said = (
        f"{ANALYSIS}Hm <|end|>?<|end|>{BEGIN}<|channel|>commentary to=functions.look "
        '<|constrain|>json<|message|>{"at":  "a<|call|>"}<|call|>'
    )
    # The model spells two tokens as texts, and writes one token for each of the others.
    marked = said.replace("Hm <|end|>", "Hm <\0|end|>").replace("a<|call|>", "a<\0|call|>")
    ids = [
        number
        for part in marked.split("\0")
        for number in tokenizer.fast.encode(part, add_special_tokens=False).ids
    ]
    known = WrittenCalls(10_000)
    options = ParseOptions(BEGIN, TOOLS, ToolFormat.HARMONY, remember=known.remember)
    params = SamplingParams(max_tokens=500, stop_token_ids=tokenizer.answer_end_ids)
    pipeline = TextPipeline(tokenizer, params, (), options)
    end = FinishReason.STOP
    events = [TokenEvent(1, each, end if each == ids[-1] else None) for each in ids]
    thoughts, start, arguments = pipeline.feed(events).pieces
    assert isinstance(thoughts, TextPiece)
    assert isinstance(start, ToolCallStart)
    assert isinstance(arguments, ToolCallArguments)
    call = ToolCall(start.id, start.name, arguments.text)
    before = talk(USER, tools=TOOLS)
    turns = (USER, Turn("assistant", "", thoughts.text, (call,)), Turn("tool", "7"))
    after = known.recall(talk(*turns, tools=TOOLS))
    first, second = await tokenizer.encode_chat(before), await tokenizer.encode_chat(after)
    assert second.ids[: len(first.ids) + len(ids)] == (*first.ids, *ids)
    assert second.text.endswith(
        f'<|start|>functions.look to=assistant<|channel|>commentary<|message|>"7"<|end|>{BEGIN}'
    )
    changed = replace(call, arguments='{"at": "b"}')
    turns = (USER, Turn("assistant", "", thoughts.text, (changed,)), Turn("tool", "7"))
    other = await tokenizer.encode_chat(known.recall(talk(*turns, tools=TOOLS)))
    assert '<|channel|>commentary json<|message|>{"at": "b"}<|call|>' in other.text
