import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.types import PrefixSalt
from server.conversation import Conversation, OutputFormat, Thinking, Tool, ToolChoice, Turn
from server.generation import Prompt
from server.prompting import Asked, chat_prompt, count_tokens_of, encode_conversation, wish_of
from server.protocol.common import SamplingFields
from server.protocol.errors import ApiError
from server.service import Service
from server.text.answer_parser import Reading
from server.text.calls.tool_format import ToolFormat
from server.text.grammar.wish import ThinkingStart, Wish
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.models import XML_TEMPLATE, write_tokenizer
from tests.server.harness import Engine, make_service, start_engine, talk

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK, READ = Tool("look", parameters=SCHEMA), Tool("read", strict=True)
HERMES = ToolFormat.HERMES
CLOSED = "<think>\n\n</think>\n\n"


def prompt(service: Service, conversation: Conversation, **fields: Any) -> Prompt:
    """What the engine gets. fields: of the request, by OpenAI's names."""
    sampling = SamplingFields.model_validate(fields)
    asked = Asked(conversation, sampling, sampling.max_tokens)

    async def made() -> Prompt:
        try:
            return await chat_prompt(service, asked, "key")
        finally:
            await service.grammars.close()

    return asyncio.run(made())


def refusal(service: Service, conversation: Conversation, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        prompt(service, conversation, **fields)
    assert caught.value.status == 400
    return caught.value


@pytest.fixture(scope="module")
def own_engine() -> Iterator[Engine]:
    started = start_engine()
    yield started
    started.stop()


# --- prompts ---------------------------------------------------------------------------------


def test_a_conversation_becomes_a_prompt(service: Service, tokenizer: Tokenizer) -> None:
    asked = talk(Turn("system", "Be brief."), Turn("user", "Hello"))
    text, _ = tokenizer.template.render(asked)
    found = prompt(service, asked, max_tokens=5, stop=["a"], n=2, priority=-3, seed=7)
    assert tokenizer.fast.decode(list(found.ids), skip_special_tokens=False) == text
    assert found.reading == Reading(text)
    assert (found.stop, found.choices, found.priority) == (("a",), 2, -3)
    assert (found.params.max_tokens, found.params.seed) == (5, 7)
    assert 0 < found.system_tokens < len(found.ids)
    assert found.constraint is None


def test_tools_and_how_they_are_called_go_with_the_prompt(service: Service) -> None:
    asked = talk(tools=(LOOK, READ), parallel_tool_calls=False)
    reading = prompt(service, asked).reading
    assert reading is not None
    assert (reading.tools, reading.tool_format, reading.max_calls) == ((LOOK, READ), HERMES, 1)
    asked = talk(tools=(LOOK,), tool_choice=ToolChoice("none"))
    reading = prompt(service, asked).reading
    assert reading is not None
    assert (reading.tools, reading.max_calls) == ((), None)


def test_prefixes_are_shared_with_the_same_key_and_salt(service: Service) -> None:
    def salt(**fields: Any) -> PrefixSalt:
        return prompt(service, talk(), **fields).salt

    assert salt() == salt()
    assert salt(cache_salt="a") == salt(cache_salt="a") != salt()


def test_the_model_decides_how_calls_are_written(own_engine: Engine, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB, template=XML_TEMPLATE)
    service = make_service(own_engine.client, Tokenizer(tmp_path))
    reading = prompt(service, talk(tools=(LOOK,))).reading
    assert reading is not None
    assert reading.tool_format is ToolFormat.XML


def test_a_model_that_knows_no_tools_refuses_them(own_engine: Engine, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB, template="{{ messages[0].content }}")
    service = make_service(own_engine.client, Tokenizer(tmp_path))
    assert refusal(service, talk(tools=(LOOK,))).param == "tools"
    assert prompt(service, talk()).reading == Reading("Hello")
    without = talk(tools=(LOOK,), tool_choice=ToolChoice("none"))
    assert prompt(service, without).reading == Reading("Hello")


def test_errors_name_the_fields_of_their_own_api(service: Service) -> None:
    too_long = talk(Turn("user", "x" * 400))
    asked = Asked(too_long, SamplingFields(), 5, "max_output_tokens", turns_param="input")
    with pytest.raises(ApiError) as caught:
        asyncio.run(chat_prompt(service, asked, ""))
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    asked = Asked(talk(), SamplingFields(), 0, "max_output_tokens", turns_param="input")
    with pytest.raises(ApiError) as caught:
        asyncio.run(chat_prompt(service, asked, ""))
    assert caught.value.param == "max_output_tokens"


def test_a_prompt_is_encoded_as_it_would_be_also_where_it_does_not_fit(service: Service) -> None:
    for asked in (talk(), talk(Turn("system", "Be brief."), tools=(LOOK,))):
        text, _ = service.tokenizer.template.render(asked)
        encoded = asyncio.run(encode_conversation(service, asked, "messages"))
        assert encoded.ids == asyncio.run(service.tokenizer.encode_text(text)).ids
        assert asyncio.run(count_tokens_of(service, asked, "messages")) == len(encoded.ids)
    too_long = talk(Turn("user", "x" * 10 * service.max_model_len))
    encoded = asyncio.run(encode_conversation(service, too_long, "messages"))
    assert len(encoded.ids) > 10 * service.max_model_len


# --- what the answer is held to ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "wish"),
    [
        (talk(), Wish()),
        (talk(tools=(LOOK, READ)), Wish(tools=(LOOK, READ))),
        (
            talk(tools=(LOOK, READ), tool_choice=ToolChoice("required")),
            Wish(tools=(LOOK, READ), must_call=True),
        ),
        (
            talk(tools=(LOOK, READ), tool_choice=ToolChoice("named", "look")),
            Wish(tools=(LOOK,), must_call=True, parallel=False),
        ),
        (
            talk(
                tools=(LOOK, READ),
                tool_choice=ToolChoice("required", allowed=frozenset({"look"})),
                parallel_tool_calls=False,
            ),
            Wish(tools=(LOOK,), must_call=True, parallel=False),
        ),
        (
            talk(
                tools=(LOOK, READ, Tool("write")),
                tool_choice=ToolChoice("auto", allowed=frozenset({"look", "read"})),
            ),
            Wish(tools=(Tool("look", strict=True), READ)),
        ),
        (talk(tools=(LOOK,), tool_choice=ToolChoice("none")), Wish()),
        (
            talk(output=OutputFormat("regex", "a+"), thinking=Thinking(budget=5)),
            Wish(OutputFormat("regex", "a+"), thinking_budget=5),
        ),
    ],
)
def test_what_is_asked_becomes_what_the_answer_is_held_to(asked: Conversation, wish: Wish) -> None:
    assert wish_of(asked, Reading(CLOSED)) == wish


@pytest.mark.parametrize(
    ("prompt", "enabled", "start"),
    [
        ("assistant\n", None, ThinkingStart.OPEN),
        ("assistant\n", True, ThinkingStart.OPEN),
        ("assistant\n", False, ThinkingStart.SAYING),
        ("assistant\n<think>\n", None, ThinkingStart.THINKING),
        (CLOSED, None, ThinkingStart.SAYING),
        (CLOSED, True, ThinkingStart.SAYING),
    ],
)
def test_the_form_of_an_answer_holds_after_its_thoughts(
    prompt: str, enabled: bool | None, start: ThinkingStart
) -> None:
    assert wish_of(talk(thinking=Thinking(enabled)), Reading(prompt)).thinking is start


def test_an_answer_of_a_form_is_held_to_it(service: Service) -> None:
    for asked in (
        talk(output=OutputFormat("choice", ["a", "b"])),
        talk(tools=(LOOK,), tool_choice=ToolChoice("required")),
        talk(thinking=Thinking(budget=3)),
    ):
        assert prompt(service, asked).constraint is not None
        assert refusal(service, asked, ignore_eos=True).param == "ignore_eos"
    assert prompt(service, talk(tools=(LOOK,)), ignore_eos=True).constraint is None


def test_a_form_that_cannot_be_enforced_is_refused_by_its_field(service: Service) -> None:
    asked = talk(output=OutputFormat("regex", "(", "guided_regex"))
    error = refusal(service, asked)
    assert error.param == "guided_regex"
    assert "cannot be enforced" in error.message
