"""POST /v1/chat/completions: the fields of a request, and their conversion to a Conversation."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from server.config import LimitsSection
from server.protocol.chat.tools import (
    AsWord,
    WireTool,
    WireToolChoice,
    read_tool_choice,
    read_tools,
)
from server.protocol.common import (
    Count,
    ListOf,
    LogprobFields,
    OpenAISamplingFields,
    StructureFields,
    TemplateValue,
    Whole,
    WireModel,
)
from server.protocol.fields import refused
from server.protocol.unsupported import Unsupported
from server.protocol.wire_errors import check_count, invalid, quoted
from server.text.conversation import Conversation, TemplateArguments, Thinking, ToolCall, Turn

NOT_CONTINUED = "Only the assistant's message can be continued, and only as the last one."


class ContinuationFields(WireModel):
    """vLLM's fields of a request whose answer continues the last message. A client may set
    ``prefix`` in that message instead."""

    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    def continues(self, last: Turn, *, marked: bool, needs_prompt: bool = True) -> bool:
        """Return True if the answer continues the last message. ``marked``: the message has
        ``prefix``. ``needs_prompt``: an answer will be generated. Raises ApiError."""
        if not (marked or self.continue_final_message):
            if needs_prompt and self.add_generation_prompt is False:
                raise invalid(
                    "add_generation_prompt: false is only supported with continue_final_message: "
                    "the answer is the assistant's next turn.",
                    "add_generation_prompt",
                )
            return False
        if last.role != "assistant":
            raise invalid(NOT_CONTINUED, "continue_final_message")
        if self.add_generation_prompt:
            raise invalid(
                "A message that is continued is no new one: add_generation_prompt must be false, "
                "or left out.",
                "add_generation_prompt",
            )
        return True


TEXT_PARTS = ("text", "input_text", "output_text")
ROLES: dict[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class ContentPart(WireModel):
    """A part of a message's content: as in vLLM, an object or a string. ``text`` may be null."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, part: Any) -> Any:
        return {"type": "text", "text": part} if isinstance(part, str) else part

    @property
    def is_text(self) -> bool:
        return self.type in (*TEXT_PARTS, "refusal")

    def text_for_model(self, place: str, unsupported: Unsupported) -> str:
        if not self.is_text:
            return unsupported.note(self.type, place)
        return (self.refusal if self.type == "refusal" else self.text) or ""


def content_text(content: str | Sequence[ContentPart], place: str, unsupported: Unsupported) -> str:
    """Return content as one text. ``place`` names the content in errors. Raises ApiError."""
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        texts.append(part.text_for_model(f"{place}[{number}]", unsupported))
    return "".join(texts)


class PredictedPart(WireModel):
    """A part of a prediction's content."""

    type: Literal["text"]
    text: str


class Prediction(WireModel):
    """Content that the client expects in the answer, such as a file that it wants changed."""

    type: Literal["content"]
    content: str | ListOf[PredictedPart]

    @property
    def text(self) -> str:
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class CalledFunction(WireModel):
    """A function's name and the arguments of a call."""

    name: str
    arguments: str | dict[str, Any] | None = None

    def to_call(self, call_id: str) -> ToolCall:
        """Return a ToolCall. Arguments that a client sent as an object are written as JSON text."""
        arguments = self.arguments or ""
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(call_id, self.name, arguments)


class MadeCall(WireModel):
    """A tool call in an earlier answer."""

    id: str | None = None
    type: str | None = None
    function: CalledFunction | None = None


class AudioReference(WireModel):
    """Audio in an earlier answer, which came from another server: this server makes no audio."""

    id: str | None = None


class Message(WireModel):
    """One message of a conversation. ``name`` and unknown fields are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | ListOf[ContentPart] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_call_id: str | None = None
    tool_calls: ListOf[MadeCall] | None = None
    function_call: CalledFunction | None = None
    audio: AudioReference | None = None
    prefix: bool | None = None
    """True if the answer continues this message, which must be the last message."""

    def turn(self, place: str, unsupported: Unsupported) -> Turn:
        if self.audio is not None:
            raise invalid("Audio is not supported: this model reads text.", f"{place}.audio")
        return Turn(
            ROLES[self.role],
            self._text(place, unsupported),
            self.reasoning_content or self.reasoning or "",
            self._calls(place),
            self.tool_call_id,
        )

    def _text(self, place: str, unsupported: Unsupported) -> str:
        if self.content is None:
            return self.refusal or ""
        return content_text(self.content, f"{place}.content", unsupported)

    def _calls(self, place: str) -> tuple[ToolCall, ...]:
        calls = []
        for number, call in enumerate(self.tool_calls or ()):
            if call.function is None:
                raise invalid(
                    f"A call of type {quoted(call.type or '')} is not supported: only functions "
                    "can be called.",
                    f"{place}.tool_calls[{number}]",
                )
            calls.append(call.function.to_call(call.id or ""))
        if self.function_call is not None:
            calls.append(self.function_call.to_call(""))
        return tuple(calls)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Budget = Annotated[Whole, Field(ge=0, le=2**31 - 1)]
# The maximum number of reasoning tokens for each effort. Efforts from "high" on have no maximum.
EFFORT_TOKENS: dict[Effort, int] = {"minimal": 512, "low": 2048, "medium": 8192}


class TemplateFields(WireModel):
    """Arguments of the model's chat template, which defines the arguments' names."""

    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, TemplateValue] = Field(init=False)
    enable_thinking: bool | None = None

    @property
    def others(self) -> TemplateArguments:
        """All arguments that are set, except ``enable_thinking``."""
        given = self.__pydantic_extra__
        return tuple((name, value) for name, value in given.items() if value is not None)


class ReasoningField(WireModel):
    """OpenRouter's field for the length of reasoning. A request for a summary has no effect."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Budget | None = None


class ThinkingFields(WireModel):
    """All fields with which clients of different APIs limit or disable reasoning."""

    reasoning: ReasoningField | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Budget | None = None
    thinking_budget: Budget | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: TemplateFields | None = None

    @property
    def template_arguments(self) -> TemplateArguments:
        return (self.chat_template_kwargs or TemplateFields()).others

    @property
    def effort(self) -> Effort | None:
        return (self.reasoning and self.reasoning.effort) or self.reasoning_effort

    def thinking(self) -> Thinking:
        """Return the settings of reasoning. An explicit switch or budget overrides an effort."""
        arguments = self.chat_template_kwargs or TemplateFields()
        reasoning = self.reasoning or ReasoningField()
        enabled = (arguments.enable_thinking, self.enable_thinking, reasoning.enabled)
        budgets = (self.thinking_token_budget, self.thinking_budget, reasoning.max_tokens)
        return thinking(
            self.effort,
            enabled=next((each for each in enabled if each is not None), None),
            budget=next((each for each in budgets if each is not None), None),
        )


def thinking(
    effort: Effort | None, *, enabled: bool | None = None, budget: int | None = None
) -> Thinking:
    """Return the reasoning settings for an effort, which ``enabled`` and ``budget`` override."""
    if effort is not None:
        enabled = effort != "none" if enabled is None else enabled
        if effort != "none":
            stands_for_it = budget is None
            budget = EFFORT_TOKENS.get(effort) if budget is None else budget
            return Thinking(enabled, budget, effort, stands_for_it)
    return Thinking(enabled, budget)


class ChatRequest(
    ContinuationFields, ThinkingFields, StructureFields, LogprobFields, OpenAISamplingFields
):
    """The body of POST /v1/chat/completions."""

    refused_fields = refused("sampling", "structure", "chat")
    length_param = "max_completion_tokens"

    messages: Annotated[ListOf[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    return_token_ids: bool | None = None
    tools: ListOf[WireTool] | None = None
    tool_choice: Annotated[str | WireToolChoice | None, AsWord] = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None

    def check(self, limits: LimitsSection) -> None:
        super().check(limits)
        check_count(len(self.messages), limits.max_messages, "messages")
        self.check_logprobs()

    def conversation(self, limits: LimitsSection, unsupported: Unsupported) -> Conversation:
        conversation = read_conversation(
            self.messages, self.tools, self.tool_choice, limits, unsupported
        )
        continues = self.continues(conversation.turns[-1], marked=conversation.continues)
        return replace(
            conversation,
            continues=continues,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            output=self.output_format(),
            thinking=self.thinking(),
            template_arguments=self.template_arguments,
            prediction="" if self.prediction is None else self.prediction.text,
        )


def read_conversation(
    messages: Sequence[Message],
    tools: list[WireTool] | None,
    tool_choice: str | WireToolChoice | None,
    limits: LimitsSection,
    unsupported: Unsupported,
) -> Conversation:
    offered = read_tools(tools or [])
    for number, message in enumerate(messages, start=1):
        if message.prefix and (number < len(messages) or message.role != "assistant"):
            raise invalid(NOT_CONTINUED, f"messages[{number - 1}].prefix")
    return Conversation(
        turns=tuple(
            message.turn(f"messages[{n}]", unsupported) for n, message in enumerate(messages)
        ),
        tools=offered,
        tool_choice=read_tool_choice(tool_choice, offered),
        continues=bool(messages[-1].prefix),
    )
