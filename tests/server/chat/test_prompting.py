import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.types import NO_SALT, PrefixSalt
from server.chat.generation import Prompt
from server.chat.prompting import ChatSpec, constraint_spec_of
from server.protocol.common import OpenAISamplingFields
from server.protocol.wire_errors import ApiError
from server.routes.service import Service
from server.text.calls.tool_format import ToolFormat
from server.text.conversation import (
    Channel,
    Conversation,
    OutputFormat,
    Thinking,
    Tool,
    ToolChoice,
    Turn,
)
from server.text.grammar.constraint_spec import ConstraintSpec
from server.text.parser import ParseOptions
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.models import XML_TEMPLATE, write_tokenizer
from tests.server.harness import Engine, engine_fixture, make_service, talk

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK, READ = Tool("look", parameters=SCHEMA), Tool("read", strict=True)
HERMES = ToolFormat.HERMES


def prompt(service: Service, conversation: Conversation, **fields: Any) -> Prompt:
    """What the engine gets. fields: of the request, by OpenAI's names."""
    sampling = OpenAISamplingFields.model_validate(fields)
    chat = ChatSpec(conversation, sampling, sampling.max_tokens)

    async def made() -> Prompt:
        try:
            return await service.prompts.prompt(
                chat, service.salts.salt("key", sampling.cache_salt)
            )
        finally:
            await service.grammars.close()

    return asyncio.run(made())


def refusal(service: Service, conversation: Conversation, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        prompt(service, conversation, **fields)
    assert caught.value.status == 400
    return caught.value


own_engine = engine_fixture()


# --- prompts ---------------------------------------------------------------------------------


def test_a_conversation_becomes_a_prompt(service: Service, tokenizer: Tokenizer) -> None:
    conversation = talk(Turn("system", "Be brief."), Turn("user", "Hello"))
    text, _ = tokenizer.template.render(conversation)
    found = prompt(service, conversation, max_tokens=5, stop=["a"], n=2, priority=-3, seed=7)
    assert tokenizer.fast.decode(list(found.ids), skip_special_tokens=False) == text
    assert found.parse_options == ParseOptions(text)
    submission = found.submission
    assert (found.stop, len(submission.params), submission.priority) == (("a",), 2, -3)
    assert (found.params.max_tokens, found.params.seed) == (5, 7)
    assert 0 < submission.system_tokens < len(found.ids)
    assert submission.constraint is None


def test_tools_and_how_they_are_called_go_with_the_prompt(service: Service) -> None:
    conversation = talk(tools=(LOOK, READ), parallel_tool_calls=False)
    parse_options = prompt(service, conversation).parse_options
    assert parse_options is not None
    assert (parse_options.tools, parse_options.tool_format, parse_options.max_calls) == (
        (LOOK, READ),
        HERMES,
        1,
    )
    conversation = talk(tools=(LOOK,), tool_choice=ToolChoice("none"))
    parse_options = prompt(service, conversation).parse_options
    assert parse_options is not None
    assert (parse_options.tools, parse_options.max_calls) == ((), None)


def test_prefixes_are_shared_with_the_same_key_and_salt(service: Service) -> None:
    def salt(**fields: Any) -> PrefixSalt:
        return prompt(service, talk(), **fields).submission.salt

    assert salt() == salt()
    assert salt(cache_salt="a") == salt(cache_salt="a") != salt()


def test_the_model_decides_how_calls_are_written(own_engine: Engine, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB, template=XML_TEMPLATE)
    service = make_service(own_engine.client, Tokenizer(tmp_path))
    parse_options = prompt(service, talk(tools=(LOOK,))).parse_options
    assert parse_options is not None
    assert parse_options.tool_format is ToolFormat.XML


def test_llama_makes_one_call_a_turn(own_engine: Engine, tmp_path: Path) -> None:
    template = """{# {"name": a, "parameters": b} #}{{ messages[0].content }}"""
    write_tokenizer(tmp_path, VOCAB, template=template)
    service = make_service(own_engine.client, Tokenizer(tmp_path))
    found = prompt(service, talk(tools=(LOOK,)))
    assert found.parse_options is not None
    assert (found.parse_options.tool_format, found.parse_options.max_calls) == (ToolFormat.LLAMA, 1)


def test_a_model_that_knows_no_tools_refuses_them(own_engine: Engine, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB, template="{{ messages[0].content }}")
    service = make_service(own_engine.client, Tokenizer(tmp_path))
    assert refusal(service, talk(tools=(LOOK,))).param == "tools"
    assert prompt(service, talk()).parse_options == ParseOptions("Hello")
    without = talk(tools=(LOOK,), tool_choice=ToolChoice("none"))
    assert prompt(service, without).parse_options == ParseOptions("Hello")


def test_errors_name_the_fields_of_their_own_api(service: Service) -> None:
    too_long = talk(Turn("user", "x" * 400))
    chat = ChatSpec(too_long, OpenAISamplingFields(), 5, "max_output_tokens", turns_param="input")
    with pytest.raises(ApiError) as caught:
        asyncio.run(service.prompts.prompt(chat, NO_SALT))
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    chat = ChatSpec(talk(), OpenAISamplingFields(), 0, "max_output_tokens", turns_param="input")
    with pytest.raises(ApiError) as caught:
        asyncio.run(service.prompts.prompt(chat, NO_SALT))
    assert caught.value.param == "max_output_tokens"


def test_a_prompt_is_encoded_as_it_would_be_also_where_it_does_not_fit(service: Service) -> None:
    for conversation in (talk(), talk(Turn("system", "Be brief."), tools=(LOOK,))):
        text, _ = service.tokenizer.template.render(conversation)
        encoded = asyncio.run(service.prompts.encode(conversation, "messages", NO_SALT))
        assert encoded.ids == asyncio.run(service.tokenizer.encode_text(text)).ids
        counted = asyncio.run(service.prompts.count_tokens(conversation, "messages", NO_SALT))
        assert counted == len(encoded.ids)
    too_long = talk(Turn("user", "x" * 10 * service.rules.max_model_len))
    encoded = asyncio.run(service.prompts.encode(too_long, "messages", NO_SALT))
    assert len(encoded.ids) > 10 * service.rules.max_model_len


# --- what the answer is held to ---------------------------------------------------------------


def test_an_answer_of_a_form_is_held_to_it(service: Service) -> None:
    for conversation in (
        talk(output=OutputFormat("choice", ["a", "b"])),
        talk(tools=(LOOK,), tool_choice=ToolChoice("required")),
        talk(thinking=Thinking(budget=3)),
    ):
        assert prompt(service, conversation).submission.constraint is not None
        assert refusal(service, conversation, ignore_eos=True).param == "ignore_eos"
    assert prompt(service, talk(tools=(LOOK,)), ignore_eos=True).submission.constraint is None


def test_a_form_that_cannot_be_enforced_is_refused_by_its_field(service: Service) -> None:
    conversation = talk(output=OutputFormat("regex", "(", "guided_regex"))
    error = refusal(service, conversation)
    assert error.param == "guided_regex"
    assert "cannot be enforced" in error.message


CLOSED = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("conversation", "spec"),
    [
        (talk(), ConstraintSpec()),
        (
            talk(tools=(LOOK, READ)),
            ConstraintSpec(tools=(LOOK, READ)),
        ),
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
