"""POST /v1/messages and /v1/messages/count_tokens: the requests as they come in."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from server.config import LimitsSection
from server.protocol.chat.request import Budget, Effort, TemplateFields, thinking
from server.protocol.common import (
    MANY_STOPS,
    CacheSalt,
    ListOf,
    SamplingFields,
    StructureFields,
    Whole,
    WireModel,
)
from server.protocol.fields import (
    ACCOUNT,
    SAMPLING_FIELDS,
    SPEED_ONLY,
    STRUCTURE_FIELDS,
    accepted,
    ignored,
    refused,
)
from server.protocol.messages.blocks import Block, InputMessage, system_texts
from server.protocol.messages.tools import OfferedChoice, OfferedTool, read_offered_tools
from server.protocol.unseen import Unseen
from server.protocol.wire_errors import invalid
from server.text.conversation import Conversation, OutputFormat, Thinking, Turn

OTHER_NAMES = (
    *("max_tokens", "stop", "n", "stream_options", "best_of", "use_beam_search"),
    "return_token_ids",
)


MESSAGES_FIELDS = (
    accepted("max_tokens", "required; more than fit is cut"),
    accepted(
        "messages",
        "all blocks that Claude Code sends, loaded tools included; others are left out; an "
        "assistant's message at the end is continued",
    ),
    accepted("system", "text; billing headers of Claude Code are left out"),
    accepted("stop_sequences", "no part of one is sent"),
    accepted(
        "tools",
        "custom ones, deferred ones where messages load them; Anthropic's server tools are left "
        "out, its others refused",
    ),
    accepted("tool_choice", "auto, any, tool, none; disable_parallel_tool_use"),
    accepted(
        "thinking",
        "enabled, disabled, adaptive (as if it were not there), between_tools (as disabled)",
    ),
    accepted("output_config", "effort: low and medium have budgets; format: json_schema"),
    accepted("enable_thinking", "where thinking does not say it"),
    accepted("chat_template_kwargs", "what the model's template takes; anything else is refused"),
    *(field for field in SAMPLING_FIELDS if field.name not in OTHER_NAMES),
    *STRUCTURE_FIELDS,
    refused("stop", "use stop_sequences"),
    refused("n", "an answer is one message", 1),
    refused("best_of", "an answer is one message", 1),
    refused("use_beam_search", "an answer is one message"),
    refused("max_completion_tokens", "use max_tokens"),
    refused("logprobs", "use /v1/chat/completions"),
    refused("top_logprobs", "use /v1/chat/completions"),
    refused("return_token_ids", "use /v1/chat/completions"),
    refused("output_format", "use output_config"),
    refused("reasoning_effort", "use output_config"),
    refused("thinking_token_budget", "use thinking"),
    refused("thinking_budget", "use thinking"),
    refused("container", "this server runs no code"),
    refused("mcp_servers", "offer their tools as tools"),
    refused("thread", "nothing is stored here: send the whole conversation"),
    ignored("stream_options", "usage is always sent"),
    ignored("cache_control", "prefixes are found by their tokens, and kept while there is room"),
    ignored("context_management", "the prompt is what was sent; nothing is taken out of it"),
    ignored("compaction", "the prompt is what was sent; nothing is taken out of it"),
    ignored("metadata", ACCOUNT),
    ignored("service_tier", SPEED_ONLY),
    ignored("speed", SPEED_ONLY),
    ignored("inference_geo", "the answer is made where the server is"),
    ignored("diagnostics", "use cache_report"),
    ignored("fallbacks", "there is one model"),
    ignored("user_profile_id", ACCOUNT),
    ignored("workspace_id", ACCOUNT),
)


Length = Annotated[Whole, Field(ge=1, le=2**31 - 1)]
SCHEMA_PARAM = "output_config.format.schema"


class ThinkingConfig(WireModel):
    """Whether and how much to think. ``display`` is ignored: thoughts are sent as they are."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Budget | None = None


class JsonFormat(WireModel):
    """A schema for the whole answer."""

    type: Literal["json_schema"]
    schema_: dict[str, object] | bool = Field(alias="schema")


class OutputConfig(WireModel):
    """How much effort an answer is worth, and what form it has."""

    effort: Effort | None = None
    format: JsonFormat | None = None


class ConversationFields(StructureFields):
    """All that becomes part of the prompt, and the form of the answer."""

    model: str | None = None
    messages: Annotated[ListOf[InputMessage], Field(min_length=1)]
    system: str | ListOf[Block] | None = None
    tools: ListOf[OfferedTool] | None = None
    tool_choice: OfferedChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: TemplateFields | None = None

    def conversation(self, limits: LimitsSection, unseen: Unseen) -> Conversation:
        """Return the request in the neutral form. Raises ApiError that names what cannot be part of
        it."""
        added = [
            tool
            for number, message in enumerate(self.messages)
            for tool in message.added_tools(f"messages[{number}]")
        ]
        tools = read_offered_tools(self.tools or [], added)
        unseen.offer(tools)
        choice = self.tool_choice or OfferedChoice(type="auto")
        return Conversation(
            turns=self._turns(limits.max_messages, unseen),
            tools=tools,
            tool_choice=choice.read(tools),
            parallel_tool_calls=choice.disable_parallel_tool_use is not True,
            output=self._output(),
            thinking=self._thinking(),
            continues=self.messages[-1].role == "assistant",
            template_arguments=(self.chat_template_kwargs or TemplateFields()).others,
        )

    def _turns(self, max_messages: int, unseen: Unseen) -> tuple[Turn, ...]:
        if len(self.messages) > max_messages:
            raise invalid(
                f"There are {len(self.messages)} messages; at most {max_messages} are read.",
                "messages",
            )
        system = system_texts(self.system or "", "system", unseen)
        turns = [Turn("system", text) for text in system]
        for number, message in enumerate(self.messages):
            turns += message.turns(f"messages[{number}]", unseen)
        return tuple(turns)

    def _output(self) -> OutputFormat | None:
        found = self.output_format()
        config = self.output_config or OutputConfig()
        if config.format is None:
            return found
        if found is not None:
            raise invalid(
                f"{found.param} and output_config both say what the answer must be.", found.param
            )
        return OutputFormat("json_schema", config.format.schema_, SCHEMA_PARAM)

    def _thinking(self) -> Thinking:
        """Return how much to think. What is said plainly wins over an effort; Anthropic's field
        wins over the others."""
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
    """The body of a request; server/protocol/messages/fields.py says what becomes of each field."""

    rules = MESSAGES_FIELDS
    stop_param: ClassVar[str] = "stop_sequences"
    stops_factor: ClassVar[int] = MANY_STOPS

    max_tokens: Length
    stop_sequences: ListOf[str] | None = None

    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop_sequences or ())


class CountTokensRequest(ConversationFields):
    """The same, of which only the conversation counts, and whose it is."""

    cache_salt: CacheSalt | None = None

    def check(self, limits: LimitsSection) -> None:
        """Check nothing: the types say it all."""
