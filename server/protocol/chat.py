"""POST /v1/chat/completions: the request as it comes in, and the answer as it goes out."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from server.config import LimitsSection
from server.protocol.common import Count, SamplingFields, Unsupported, WireModel
from server.protocol.errors import invalid, quoted


class TextPart(WireModel):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Message(WireModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def text(self, place: str) -> str:
        """The content as one string. Raises ApiError for parts that are not text."""
        if isinstance(self.content, str):
            return self.content
        texts = []
        for number, part in enumerate(self.content or []):
            if part.type not in ("text", "input_text", "output_text") or part.text is None:
                raise invalid(
                    f"Content of type {quoted(part.type)} is not supported: this model reads text.",
                    f"{place}.content[{number}]",
                )
            texts.append(part.text)
        return "".join(texts)


class TemplateArguments(WireModel):
    """Arguments of the chat template that a request may set; others are refused by name."""

    model_config = ConfigDict(extra="forbid")

    enable_thinking: bool | None = None


class ResponseFormat(WireModel):
    """How the answer should look."""

    type: str


class ChatRequest(SamplingFields):
    """The body of a request. Fields that would change the answer and are not supported are here
    to be refused; those that cannot change it (metadata, user, ...) are ignored."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    chat_template_kwargs: TemplateArguments | None = None
    reasoning_effort: str | None = None
    response_format: ResponseFormat | None = None
    tool_choice: Any = None
    tools: Unsupported = None
    functions: Unsupported = None
    audio: Unsupported = None
    web_search_options: Unsupported = None

    def check(self, limits: LimitsSection) -> None:
        """What the types cannot say."""
        super().check(limits)
        if len(self.messages) > limits.max_messages:
            raise invalid(
                f"There are {len(self.messages)} messages; at most {limits.max_messages} are read.",
                "messages",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs needs logprobs: true.", "top_logprobs")
        if (self.top_logprobs or 0) > limits.max_top_logprobs:
            raise invalid(f"top_logprobs may be at most {limits.max_top_logprobs}.", "top_logprobs")
        if self.response_format is not None and self.response_format.type != "text":
            raise invalid(
                f"response_format {quoted(self.response_format.type)} is not supported.",
                "response_format",
            )
        if self.tool_choice not in (None, "none", "auto"):
            raise invalid("tool_choice is not supported.", "tool_choice")

    @property
    def asked_length(self) -> tuple[int | None, str]:
        """The longest answer that is wanted, and the field that says so."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return self.max_tokens, "max_tokens"

    @property
    def enable_thinking(self) -> bool | None:
        """Whether the model may think first; None leaves it to the template."""
        arguments = self.chat_template_kwargs
        if arguments is not None and arguments.enable_thinking is not None:
            return arguments.enable_thinking
        return False if self.reasoning_effort == "none" else None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates want them: one system message, first."""
        system: list[str] = []
        turns: list[dict[str, Any]] = []
        for number, message in enumerate(self.messages):
            text = message.text(f"messages[{number}]")
            if message.role in ("system", "developer") and not turns:
                system.append(text)
                continue
            turn: dict[str, Any] = {"role": message.role, "content": text}
            if message.role == "developer":
                turn["role"] = "system"
            reasoning = message.reasoning_content or message.reasoning
            if reasoning:
                turn["reasoning_content"] = reasoning
            if message.tool_calls:
                turn["tool_calls"] = message.tool_calls
            turns.append(turn)
        if system:
            turns.insert(0, {"role": "system", "content": "\n\n".join(system)})
        return turns
