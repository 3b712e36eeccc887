"""The types of a conversation, into which every API translates its requests."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
ANY_OBJECT = {"type": "object", "properties": {}}
# Coding tools put notes between these tags into users' messages. No person wrote the notes.
REMINDER_OPEN, REMINDER_CLOSE = "<system-reminder>", "</system-reminder>"


class Channel(Enum):
    """A part of an answer: the reasoning, or the content after it."""

    REASONING = "reasoning"
    CONTENT = "content"


THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
# The beginnings of an answer's messages in Harmony, the format of gpt-oss.
ANALYSIS_OPEN, FINAL_OPEN = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"


def first_channel_of(prompt: str, begun: str = "") -> Channel | None:
    """Return the channel in which an answer begins, or None if the model decides. The end of
    ``prompt`` may open or close reasoning. ``begun`` is the client's beginning of the answer."""
    ending = prompt.rstrip()
    if ending.endswith((THINK_CLOSE, FINAL_OPEN)):
        return Channel.CONTENT
    if ending.endswith((THINK_OPEN, ANALYSIS_OPEN)):
        return Channel.REASONING
    return Channel.CONTENT if begun else None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    """The name. It is unique among the tools, and consists of letters, digits and ``_.:/-``."""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON Schema of the arguments. None allows any object."""
    strict: bool = False
    """True if the arguments must satisfy the schema even in a call that is not required."""
    deferred: bool = False
    """True if the prompt omits the tool. A message of the conversation may load the tool later."""
    searches: bool = False
    """True if the model calls this tool to search for tools that the prompt omits."""
    namespace: str | None = None
    """The name of the group to which the client has assigned the tool."""
    own_name: str | None = None
    """The tool's name within ``namespace``."""

    @property
    def client_name(self) -> tuple[str | None, str]:
        return self.namespace, self.own_name or self.name

    @property
    def described(self) -> dict[str, Any]:
        """The tool's description in the JSON form that chat templates expect."""
        described = {} if self.description is None else {"description": self.description}
        parameters = ANY_OBJECT if self.parameters is None else self.parameters
        function = {"name": self.name, **described, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The rule for calls: whether the model may, must or must not call tools, and which tools."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str | None = None
    """The name of the tool that must be called. It is set only in mode "named"."""
    allowed: frozenset[str] | None = None
    """The names of tools that may be called in mode "auto" or "required". None means all tools."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an earlier answer."""

    id: str
    name: str
    arguments: str
    """The arguments as the model wrote them: a JSON object, unless the model made a mistake."""
    written: str | None = None
    """The whole call as the model wrote it, including tags, or None if unknown."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: Role
    text: str = ""
    reasoning: str = ""
    """The reasoning before the text. Only an assistant's turn has reasoning."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tool calls after the text. Only an assistant's turn has tool calls."""
    tool_call_id: str | None = None
    """The id of the call whose result is in ``text``. Only a tool's turn has this id."""

    @property
    def is_a_persons(self) -> bool:
        """True if a person wrote this turn: a user's turn with text outside reminder tags."""
        first, *others = self.text.split(REMINDER_OPEN)
        outside_reminders = [first, *(other.partition(REMINDER_CLOSE)[2] for other in others)]
        return self.role == "user" and any(map(str.strip, outside_reminders))


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The format that all text of the answer after the reasoning must have."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: Any = None
    """A schema (dict or bool), a list of allowed texts, a regex or grammar as text, or None."""
    param: str = "response_format"
    """The API's name for the field that sets the format, used in error messages."""
    strict: bool = True
    """Whether to refuse a schema that cannot be enforced completely."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """The limits of the model's reasoning before an answer."""

    enabled: bool | None = None
    """True if the model must reason, False if it must not, None if the template decides."""
    budget: int | None = None
    """The maximum number of reasoning tokens. None means no limit but the answer's length."""
    effort: str | None = None
    """The reasoning effort that the request names. Some chat templates have an argument for it."""
    budget_is_efforts: bool = False
    """True if ``budget`` was derived from ``effort``."""


TemplateArguments = tuple[tuple[str, str | float | bool], ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation to answer, with the rules for its answer."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    output: OutputFormat | None = None
    thinking: Thinking = Thinking()
    continues: bool = False
    """True if the last turn is an assistant's and the model continues this turn."""
    template_arguments: TemplateArguments = ()
    """Further arguments of the chat template, as pairs of name and value."""
    prediction: str = ""
    """A text that the client expects in the answer. It changes the speed, not the answer."""

    def __post_init__(self) -> None:
        assert not self.continues or self.turns[-1].role == "assistant"

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """All tools, or none if the model must not call. Tools that ``tool_choice`` does not allow
        are included, so that prompts keep a common prefix."""
        return () if self.tool_choice.mode == "none" else self.tools

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """The offered tools whose ``deferred`` is False. If there are none, the first tool is
        shown, because templates explain calls only if there is a tool."""
        offered = self.offered_tools
        return tuple(tool for tool in offered if not tool.deferred) or offered[:1]

    @property
    def turns_after_person(self) -> int | None:
        """The number of turns after a person's newest turn, or None if there is no such turn."""
        turns = enumerate(reversed(self.turns))
        return next((number for number, turn in turns if turn.is_a_persons), None)

    @property
    def must_call(self) -> bool:
        return self.tool_choice.mode in ("required", "named")

    @property
    def max_calls(self) -> int | None:
        """The maximum number of calls in the answer. None means no limit."""
        is_one = self.tool_choice.mode == "named" or not self.parallel_tool_calls
        return 1 if is_one else None

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        choice = self.tool_choice
        names = choice.allowed if choice.name is None else {choice.name}
        return tuple(tool for tool in self.offered_tools if names is None or tool.name in names)
