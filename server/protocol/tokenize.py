"""POST /tokenize (text or conversation -> token ids) and POST /detokenize (token ids -> text)."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from server.config import LimitsSection
from server.protocol.chat.request import (
    ContinuationFields,
    Message,
    ThinkingFields,
    read_conversation,
)
from server.protocol.chat.tools import AsWord, WireTool, WireToolChoice
from server.protocol.common import CachedFields, ListOf, RequestFields, TokenIds
from server.protocol.fields import refused
from server.protocol.unsupported import Unsupported
from server.protocol.wire_errors import check_count, invalid
from server.text.conversation import Conversation


class TokenizeRequest(ContinuationFields, ThinkingFields, CachedFields):
    """The body of POST /tokenize: ``prompt`` (vLLM), ``content`` (llama.cpp) or ``messages``."""

    refused_fields = refused("tokenize")

    prompt: str | None = None
    content: str | None = None
    messages: Annotated[ListOf[Message], Field(min_length=1)] | None = None
    tools: ListOf[WireTool] | None = None
    tool_choice: Annotated[str | WireToolChoice | None, AsWord] = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self, limits: LimitsSection) -> None:
        super().check(limits)
        if sum(one is not None for one in (self.prompt, self.content, self.messages)) != 1:
            raise invalid("One of prompt, content and messages must be there, and no more.")
        if self.tools and self.messages is None:
            raise invalid("tools need messages.", "tools")
        if self.continue_final_message and self.messages is None:
            raise invalid("There is no message to be continued.", "continue_final_message")
        if self.add_special_tokens and self.messages is not None:
            raise invalid("The template writes the special tokens.", "add_special_tokens")
        check_count(len(self.messages or ()), limits.max_messages, "messages")

    @property
    def text(self) -> str | None:
        return self.content if self.prompt is None else self.prompt

    def conversation(self, limits: LimitsSection, unsupported: Unsupported) -> Conversation:
        conversation = read_conversation(
            self.messages or (), self.tools, self.tool_choice, limits, unsupported
        )
        return replace(
            conversation,
            thinking=self.thinking(),
            template_arguments=self.template_arguments,
            continues=self.continues(
                conversation.turns[-1], marked=conversation.continues, needs_prompt=False
            ),
        )


class DetokenizeRequest(RequestFields):
    """The body of POST /detokenize."""

    tokens: TokenIds
