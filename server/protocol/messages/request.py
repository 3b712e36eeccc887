"""POST /v1/messages and /v1/messages/count_tokens: the requests' fields, and their conversion."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from server.config import LimitsSection
from server.protocol.chat.request import Budget, Effort, TemplateFields, thinking
from server.protocol.chat.tools import PlacedTool, collect_tools, read_tool_choice, with_loaded
from server.protocol.common import (
    MANY_STOPS,
    CachedFields,
    ListOf,
    SamplingFields,
    StructureFields,
    Whole,
    WireModel,
)
from server.protocol.fields import refused
from server.protocol.unsupported import Unsupported
from server.protocol.wire_errors import check_count, invalid, quoted
from server.text.conversation import (
    Conversation,
    OutputFormat,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    Turn,
)

# Prefixes of the types of tools that Anthropic's servers run. The model does not see such tools.
SEARCH_TOOLS = "tool_search_tool_"
SERVER_TOOLS = (
    *("web_search_", "web_fetch_", "code_execution_", "mcp_toolset", "advisor_"),
    SEARCH_TOOLS,
)


class OfferedTool(WireModel):
    """A tool that the client offers. This server knows no parameters of Anthropic's own tools."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: Any = None

    def tool(self, place: str) -> Tool:
        if self.type not in (None, "custom"):
            raise invalid(
                f"A tool of type {quoted(self.type or '')} is not supported: describe it with an "
                "input_schema.",
                place,
            )
        if self.name is None:
            raise invalid("This tool has no name.", f"{place}.name")
        strict, deferred = bool(self.strict), bool(self.defer_loading)
        return Tool(self.name, self.description, self.input_schema, strict, deferred)


class OfferedChoice(WireModel):
    """The client's choice whether the model may, must or must not call tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def read(self, tools: tuple[Tool, ...]) -> ToolChoice:
        required = self.type in ("any", "tool")
        choice = read_tool_choice("required" if required else self.type, tools)
        if self.type != "tool":
            return choice
        if self.name not in {tool.name for tool in tools}:
            raise invalid(
                "tool_choice names a tool that is not among the tools.", "tool_choice.name"
            )
        return ToolChoice("named", self.name)


def read_custom_tools(
    tools: Sequence[OfferedTool], added: Iterable[tuple[OfferedTool, str]]
) -> tuple[Tool, ...]:
    """Return the tools that the client runs. ``added`` are tools that messages define, each with
    the name of its field, for error messages. Raises ApiError."""
    placed = ((tool, f"tools[{number}]") for number, tool in enumerate(tools))
    searched = any((tool.type or "").startswith(SEARCH_TOOLS) for tool in tools)
    return collect_tools(with_loaded(_read(placed), _read(added), searched=searched))


def _read(tools: Iterable[tuple[OfferedTool, str]]) -> list[PlacedTool]:
    own = ((tool, place) for tool, place in tools if not (tool.type or "").startswith(SERVER_TOOLS))
    return [(tool.tool(place), f"{place}.name") for tool, place in own]


# Claude Code's prompt begins with this line. It differs each time, so the cache would never match.
BILLING = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*")
FAILED = "Error: "
# The types of content blocks that this server reads. The class Unsupported handles all other types.
READ = frozenset(
    {
        *("text", "thinking", "redacted_thinking", "compaction", "image", "document"),
        *("tool_use", "tool_result", "search_result", "tool_reference", "tool_addition"),
    }
)


class Source(WireModel):
    """The source of an image or a document. Only text sources are read."""

    type: str | None = None
    data: str | None = None
    content: "str | ListOf[Block] | None" = None

    def text_for_model(self, place: str, unsupported: Unsupported) -> str | None:
        if self.type == "text":
            return self.data
        if self.type != "content" or self.content is None:
            return None
        return joined_text(self.content, f"{place}.content", unsupported)


class AddedTool(WireModel):
    """A tool that the client offers from this message on, by name or by definition."""

    name: str | None = None
    definition: OfferedTool | None = None


class Block(WireModel):
    """A part of a message or of a block. Unknown fields are ignored."""

    type: str
    text: str | None = None
    source: Source | str | None = None
    title: str | None = None
    content: "str | ListOf[Block] | None" = None
    tool_name: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | list[Any] | str | None = None
    """A call's arguments. Agents also send back arguments that are no JSON object."""
    tool_use_id: str | None = None
    is_error: bool | None = None
    tool: AddedTool | None = None
    cache_control: Any = None

    @model_validator(mode="before")
    @classmethod
    def _type_alone(cls, block: Any) -> Any:
        """Keep only ``type`` of a block whose type is not in READ: other fields are unknown."""
        kind = block.get("type") if isinstance(block, dict) else None
        return {"type": kind} if isinstance(kind, str) and kind not in READ else block

    def text_for_model(self, place: str, unsupported: Unsupported) -> str:
        """Return the block's text, or a note for the model in place of an image or a file."""
        if self.type == "text":
            return self.text or ""
        if self.type == "document" and isinstance(self.source, Source):
            text = self.source.text_for_model(f"{place}.source", unsupported)
            if text is not None:
                return text
        if self.type in ("search_result", "compaction"):
            text = joined_text(self.content or "", f"{place}.content", unsupported)
            heading = f"{self.title or ''}\n{self.source or ''}\n"
            return text if self.type == "compaction" else f"{heading}{text}\n"
        if self.type == "tool_reference" and self.tool_name is not None:
            return unsupported.loaded(self.tool_name)
        if self.type == "tool_addition":
            tool = self.tool or AddedTool()
            name = tool.name if tool.definition is None else tool.definition.name
            if name is None:
                return unsupported.leave_out(self.type, place)
            return unsupported.loaded(name)
        return unsupported.note(self.type, place)

    @property
    def marks_cache(self) -> bool:
        parts = self.content if isinstance(self.content, list) else []
        return self.cache_control is not None or any(part.marks_cache for part in parts)

    def call(self, place: str) -> ToolCall:
        """Return a tool_use block as a ToolCall, with the arguments as JSON. Raises ApiError."""
        if self.name is None:
            raise invalid("The tool has no name.", f"{place}.name")
        given = self.input or {}
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return ToolCall(self.id or "", self.name, arguments)

    def result(self, place: str, unsupported: Unsupported) -> Turn:
        """Return a tool_result block as a Turn. The text of an error begins with "error"."""
        text = joined_text(self.content or "", f"{place}.content", unsupported)
        if self.is_error and not text.lower().startswith("error"):
            text = FAILED + text
        return Turn("tool", text, tool_call_id=self.tool_use_id)


class InputMessage(WireModel):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | ListOf[Block]

    def added_tools(self, place: str) -> Iterator[tuple[OfferedTool, str]]:
        """Yield the tools that the message defines, each with the name of its field for errors."""
        for number, block in enumerate(self.content if isinstance(self.content, list) else ()):
            if block.tool is not None and block.tool.definition is not None:
                yield block.tool.definition, f"{place}.content[{number}].tool.definition"

    def turns(self, place: str, unsupported: Unsupported) -> list[Turn]:
        """Return the message as turns. A user's message becomes one turn per tool result, and one
        turn per text between tool results. Raises ApiError."""
        if self.role == "system":
            text = "\n\n".join(system_texts(self.content, f"{place}.content", unsupported))
            return [Turn("system", text)] if text else []
        if isinstance(self.content, str):
            return [Turn(self.role, self.content)]
        blocks = [(f"{place}.content[{n}]", block) for n, block in enumerate(self.content)]
        return (
            _heard(blocks, unsupported) if self.role == "user" else [_spoken(blocks, unsupported)]
        )


def system_texts(content: str | Sequence[Block], place: str, unsupported: Unsupported) -> list[str]:
    """Return the texts of a system prompt without lines that match BILLING. Raises ApiError."""
    blocks = [content] if isinstance(content, str) else _texts(content, place, unsupported)
    texts = [text[head.end() :] if (head := BILLING.match(text)) else text for text in blocks]
    return [text for text in texts if text]


def joined_text(content: str | Sequence[Block], place: str, unsupported: Unsupported) -> str:
    return content if isinstance(content, str) else "".join(_texts(content, place, unsupported))


def _texts(blocks: Sequence[Block], place: str, unsupported: Unsupported) -> list[str]:
    return [
        block.text_for_model(f"{place}[{number}]", unsupported)
        for number, block in enumerate(blocks)
    ]


def _heard(blocks: list[tuple[str, Block]], unsupported: Unsupported) -> list[Turn]:
    """Return the turns of a user's message, which are tool results and texts."""
    turns: list[Turn] = []
    texts: list[str] = []
    for place, block in blocks:
        if block.type != "tool_result":
            texts.append(block.text_for_model(place, unsupported))
            continue
        if texts:
            turns.append(Turn("user", "".join(texts)))
            texts = []
        turns.append(block.result(place, unsupported))
    return [*turns, Turn("user", "".join(texts))] if texts or not turns else turns


def _spoken(blocks: list[tuple[str, Block]], unsupported: Unsupported) -> Turn:
    reasoning, texts, calls = [], [], []
    for place, block in blocks:
        if block.type == "thinking":
            reasoning.append(block.thinking or "")
        elif block.type == "tool_use":
            calls.append(block.call(place))
        # Only Anthropic can decrypt redacted_thinking blocks.
        elif block.type != "redacted_thinking":
            texts.append(block.text_for_model(place, unsupported))
    return Turn("assistant", "".join(texts), "\n\n".join(reasoning), tuple(calls))


Length = Annotated[Whole, Field(ge=1, le=2**31 - 1)]
SCHEMA_PARAM = "output_config.format.schema"


class ThinkingConfig(WireModel):
    """Whether and how long to reason. ``display`` is ignored, because reasoning is always sent."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Budget | None = None


class JsonFormat(WireModel):
    """A JSON schema that the whole answer must match."""

    type: Literal["json_schema"]
    schema_: dict[str, object] | bool = Field(alias="schema")


class OutputConfig(WireModel):
    """The effort of reasoning, and the format of the answer."""

    effort: Effort | None = None
    format: JsonFormat | None = None


class ConversationFields(StructureFields):
    """Fields that define the prompt, the reasoning or the format of the answer."""

    messages: Annotated[ListOf[InputMessage], Field(min_length=1)]
    system: str | ListOf[Block] | None = None
    tools: ListOf[OfferedTool] | None = None
    tool_choice: OfferedChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: TemplateFields | None = None

    def conversation(self, limits: LimitsSection, unsupported: Unsupported) -> Conversation:
        added = [
            tool
            for number, message in enumerate(self.messages)
            for tool in message.added_tools(f"messages[{number}]")
        ]
        tools = read_custom_tools(self.tools or [], added)
        unsupported.offer(tools)
        choice = self.tool_choice or OfferedChoice(type="auto")
        return Conversation(
            turns=self._turns(limits.max_messages, unsupported),
            tools=tools,
            tool_choice=choice.read(tools),
            parallel_tool_calls=choice.disable_parallel_tool_use is not True,
            output=self._output(),
            thinking=self._thinking(),
            continues=self.messages[-1].role == "assistant",
            template_arguments=(self.chat_template_kwargs or TemplateFields()).others,
        )

    def _turns(self, max_messages: int, unsupported: Unsupported) -> tuple[Turn, ...]:
        check_count(len(self.messages), max_messages, "messages")
        system = system_texts(self.system or "", "system", unsupported)
        turns = [Turn("system", text) for text in system]
        for number, message in enumerate(self.messages):
            turns += message.turns(f"messages[{number}]", unsupported)
        return tuple(turns)

    def _output(self) -> OutputFormat | None:
        form = (self.output_config or OutputConfig()).format
        own = None if form is None else OutputFormat("json_schema", form.schema_, SCHEMA_PARAM)
        return self.output_format(own)

    def _thinking(self) -> Thinking:
        """Return the settings of reasoning. An explicit switch or budget overrides an effort."""
        thinking_field = self.thinking
        if thinking_field is not None and thinking_field.type in ("disabled", "between_tools"):
            return Thinking(False)
        effort = (self.output_config or OutputConfig()).effort
        if thinking_field is not None and thinking_field.type == "enabled":
            return thinking(effort, enabled=True, budget=thinking_field.budget_tokens)
        arguments = self.chat_template_kwargs or TemplateFields()
        enabled = arguments.enable_thinking
        return thinking(effort, enabled=self.enable_thinking if enabled is None else enabled)


class MessagesRequest(ConversationFields, SamplingFields):
    """The body of POST /v1/messages."""

    refused_fields = refused("sampling", "structure", "messages")
    stop_param: ClassVar[str] = "stop_sequences"
    stops_factor: ClassVar[int] = MANY_STOPS

    max_tokens: Length
    stop_sequences: ListOf[str] | None = None
    cache_control: Any = None

    @property
    def counts_cache(self) -> bool:
        """True if input_tokens must exclude cached tokens: the client marks blocks to be cached, or
        wants a cache report. Other clients may read input_tokens as the whole prompt's count."""
        contents = [self.system, *(message.content for message in self.messages)]
        blocks = [block for content in contents if isinstance(content, list) for block in content]
        marks = [self, *(self.tools or ())]
        return (
            bool(self.cache_report)
            or any(each.cache_control is not None for each in marks)
            or any(block.marks_cache for block in blocks)
        )

    @property
    def asked_length(self) -> tuple[int | None, str]:
        return self.max_tokens, "max_tokens"

    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop_sequences or ())


class CountTokensRequest(ConversationFields, CachedFields):
    """The body of POST /v1/messages/count_tokens. Other fields of a request are ignored."""
