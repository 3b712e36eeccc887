"""POST /v1/responses: the fields of a request, and their conversion to a Conversation."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Annotated

from pydantic import ConfigDict, Field

from engine.types import SamplingParams
from server.config import LimitsSection
from server.protocol.answers import Json
from server.protocol.chat.request import ContinuationFields, ReasoningField, ThinkingFields
from server.protocol.chat.tools import AsWord, read_tool_choice
from server.protocol.common import (
    IN_MEMORY,
    MAX_TOP_LOGPROBS,
    Count,
    ListOf,
    OpenAISamplingFields,
    StructureFields,
    Whole,
    WireModel,
)
from server.protocol.fields import refused
from server.protocol.responses.items import (
    Input,
    Item,
    LoadedToolsItem,
    Placed,
    ReferenceItem,
    check_begun,
    is_begun,
    read_input,
    turns,
)
from server.protocol.responses.tools import (
    FlatTool,
    FlatToolChoice,
    OtherTool,
    functions,
    read_flat_tools,
    tool_choice_object,
    tool_object,
)
from server.protocol.unsupported import Unsupported
from server.protocol.wire_errors import check_count, invalid, quoted
from server.text.conversation import Conversation, OutputFormat, Turn

MAX_METADATA = 16
Metadata = Annotated[dict[str, str], Field(max_length=MAX_METADATA)]
# Fields without effect, which the response repeats.
REPEATED = ("max_tool_calls", "safety_identifier", "prompt_cache_key")
LOGPROBS = "message.output_text.logprobs"
PACKED_THOUGHTS = "reasoning.encrypted_content"
DEFAULT_FORMAT_NAME = "answer"
NOTHING = "There is nothing to answer."


class ResponsesReasoning(ReasoningField):
    """OpenAI's fields of reasoning."""

    context: str | None = None
    mode: str | None = None

    def check(self) -> None:
        """Raise ApiError for unsupported values that would change the answer."""
        if self.context not in (None, "auto"):
            raise invalid(
                "Only auto is supported: the model's template says which thoughts it is shown.",
                "reasoning.context",
            )
        if self.mode not in (None, "standard"):
            raise invalid("Only standard is supported: use effort.", "reasoning.mode")


class TextFormat(WireModel):
    """The format of the answer. The model does not see a schema's name."""

    type: str
    name: str | None = None
    strict: bool | None = None
    schema_: Json | None = Field(default=None, alias="schema")

    def output(self) -> OutputFormat | None:
        match self.type:
            case "text":
                return None
            case "json_object":
                return OutputFormat("json_object", None, "text.format")
            case "json_schema":
                if self.schema_ is None:
                    raise invalid("This format has no schema.", "text.format.schema")
                param, strict = "text.format.schema", self.strict is True
                return OutputFormat("json_schema", self.schema_, param, strict)
        raise invalid(f"A format {quoted(self.type)} is not supported.", "text.format.type")

    def object(self) -> Json:
        if self.schema_ is None:
            return {"type": self.type}
        name = self.name or DEFAULT_FORMAT_NAME
        return {
            "type": self.type,
            "name": name,
            "schema": self.schema_,
            "strict": bool(self.strict),
        }


class TextField(WireModel):
    """The format and the verbosity of the answer."""

    format: TextFormat | None = None
    verbosity: str | None = None
    """Ignored, because the served models were not trained on verbosity."""

    def object(self) -> Json:
        text_format = self.format or TextFormat(type="text")
        verbosity = {} if self.verbosity is None else {"verbosity": self.verbosity}
        return {"format": text_format.object(), **verbosity}


class ResponsesRequest(ContinuationFields, ThinkingFields, StructureFields, OpenAISamplingFields):
    """The body of POST /v1/responses."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [{"required": ["input"]}, {"required": ["previous_response_id"]}]
        }
    )
    refused_fields = refused("sampling", "structure", "chat", "responses")
    length_param = "max_output_tokens"
    turns_param = "input"

    input: Input | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    include: ListOf[str] | None = None
    max_output_tokens: Count | None = None
    top_logprobs: Whole | None = Field(default=None, ge=0)
    tools: ListOf[FlatTool] | None = None
    tool_choice: Annotated[str | FlatToolChoice | None, AsWord] = None
    parallel_tool_calls: bool | None = None
    reasoning: ResponsesReasoning | None = None
    text: TextField | None = None

    def check(self, limits: LimitsSection) -> None:
        super().check(limits)
        if self.n not in (None, 1):
            raise invalid("A response is one answer.", "n")
        if self.input in (None, []) and self.previous_response_id is None:
            raise invalid(NOTHING, "input")
        if (self.top_logprobs or 0) > MAX_TOP_LOGPROBS:
            raise invalid(f"top_logprobs may be at most {MAX_TOP_LOGPROBS}.", "top_logprobs")
        if self.reasoning is not None:
            self.reasoning.check()

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs or LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        return None

    @property
    def packs_reasoning(self) -> bool:
        """True if reasoning must also be sent as one opaque string."""
        return PACKED_THOUGHTS in (self.include or ())

    @property
    def referenced(self) -> list[str]:
        """The ids of the stored items in the input."""
        return [item.id for item in self.input or () if isinstance(item, ReferenceItem)]

    def items(self, stored: Callable[[str], Item | None], unsupported: Unsupported) -> list[Placed]:
        return [] if self.input is None else read_input(self.input, stored, unsupported)

    def conversation(
        self,
        history: Sequence[Item],
        items: Sequence[Placed],
        limits: LimitsSection,
        unsupported: Unsupported,
    ) -> Conversation:
        """Return the conversation. ``history`` has earlier responses' items. Raises ApiError."""
        check_count(len(history) + len(items), limits.max_messages, "items", "input")
        placed = [*(("history", item) for item in history), *items]
        loads = [(place, item) for place, item in placed if isinstance(item, LoadedToolsItem)]
        loaded = chain.from_iterable(
            functions(item.tools, f"{place}.tools") for place, item in loads
        )
        tools = read_flat_tools(self.tools or [], loaded)
        # Instructions of earlier responses do not apply any more.
        instructions = (Turn("system", self.instructions),) if self.instructions else ()
        check_begun(items)
        merged = turns(placed, unsupported)
        if not merged:
            raise invalid(NOTHING, "input")
        continues = self.continues(merged[-1], marked=is_begun(placed[-1][1]))
        text_format = None if self.text is None else self.text.format
        return Conversation(
            turns=(*instructions, *merged),
            tools=tools,
            tool_choice=read_tool_choice(self.tool_choice, tools),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            output=self.output_format(text_format.output() if text_format else None),
            thinking=self.thinking(),
            continues=continues,
            template_arguments=self.template_arguments,
        )

    def repeated(self, conversation: Conversation, params: SamplingParams) -> Json:
        """Return the request's fields that the response repeats. Unset fields have defaults."""
        choice: str | Json = "auto"
        if isinstance(self.tool_choice, str):
            choice = self.tool_choice
        elif self.tool_choice is not None:
            choice = tool_choice_object(conversation.tool_choice, conversation.tools)
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.asked_length[0],
            "metadata": self.metadata or {},
            "parallel_tool_calls": conversation.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_retention": IN_MEMORY if self.stays_in_memory else None,
            "reasoning": {"effort": self.effort, "summary": None},
            "store": self.store is not False,
            "temperature": params.temperature,
            "text": (self.text or TextField()).object(),
            "tool_choice": choice,
            "tools": [
                tool_object(tool) for tool in self.tools or () if not isinstance(tool, OtherTool)
            ],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "truncation": "disabled",
            "service_tier": "default",
            **{name: (self.model_extra or {}).get(name) for name in REPEATED},
            "background": False,
        }
