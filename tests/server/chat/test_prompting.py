import asyncio
from pathlib import Path
from typing import Any

import pytest

from server.chat.generation import Prompt
from server.chat.prompting import constraint_spec_of
from server.protocol.common import OpenAISamplingFields
from server.protocol.wire_errors import ApiError
from server.routes.service import Service
from server.text.calls.tool_format import ToolFormat
from server.text.conversation import (
    Channel,
    Conversation,
    Thinking,
    Tool,
    ToolChoice,
)
from server.text.pipeline import ParseOptions
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.models import write_tokenizer
from tests.server.harness import Engine, engine_fixture, make_service, talk

LOOK = Tool("look")


def prompt(service: Service, conversation: Conversation, **fields: Any) -> Prompt:
    """What the engine gets. fields: of the request, by OpenAI's names."""
    wire = OpenAISamplingFields.model_validate(fields)

    async def made() -> Prompt:
        try:
            salt = service.salts.salt("key", wire.cache_salt)
            return await service.prompts.prompt(conversation, wire, salt)
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


# --- what the answer is held to ---------------------------------------------------------------


CLOSED = "<think>\n\n</think>\n\n"


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
