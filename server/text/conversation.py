"""The form of conversations into which every API translates its requests."""

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


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    """The name, unique among the tools. Its characters are letters, digits and ``_.:/-``."""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments; None allows any object."""
    strict: bool = False
    """Whether arguments must satisfy the schema even in calls that the request does not require."""
    deferred: bool = False
    """Whether the prompt omits the tool until the conversation has loaded it."""
    searches: bool = False
    """Whether the tool is a search for deferred tools."""
    namespace: str | None = None
    """The name of the group to which the client has assigned the tool."""
    own_name: str | None = None
    """The tool's name within its namespace."""

    @property
    def client_name(self) -> tuple[str | None, str]:
        return self.namespace, self.own_name or self.name

    @property
    def described(self) -> dict[str, Any]:
        """The tool's description as chat templates expect it."""
        described = {} if self.description is None else {"description": self.description}
        parameters = ANY_OBJECT if self.parameters is None else self.parameters
        function = {"name": self.name, **described, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may, must or must not call tools, and which tools."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str | None = None
    """The name of the tool that must be called, only with mode "named"."""
    allowed: frozenset[str] | None = None
    """Names of tools that may be called in mode "auto" or "required"; None means all tools."""


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
    """The reasoning before the text, only in an assistant's turn."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tool calls after the text, only in an assistant's turn."""
    tool_call_id: str | None = None
    """The id of the call whose result this turn is, only in a tool's turn."""

    @property
    def is_a_persons(self) -> bool:
        """Whether a person wrote this turn: a user's turn with text outside reminder tags."""
        first, *others = self.text.split(REMINDER_OPEN)
        outside_reminders = [first, *(other.partition(REMINDER_CLOSE)[2] for other in others)]
        return self.role == "user" and any(map(str.strip, outside_reminders))


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The format that the whole answer must have, after its reasoning."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: Any = None
    """A dict or bool for json_schema, a list of str for choice, None for json_object, or str."""
    param: str = "response_format"
    """The API's name for the field that sets the format, used in error messages."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """How much the model may reason before it answers."""

    enabled: bool | None = None
    """Whether the model reasons; None leaves this to the chat template."""
    budget: int | None = None
    """Maximum number of reasoning tokens; None sets no limit but the answer's own."""
    effort: str | None = None
    """The reasoning effort, for templates that have an argument for it."""
    budget_is_efforts: bool = False
    """Whether ``budget`` was derived from ``effort``."""


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
    """Whether the last turn, an assistant's, is the beginning of the wanted answer."""
    template_arguments: TemplateArguments = ()
    """Further arguments of the chat template, as pairs of name and value."""

    def __post_init__(self) -> None:
        assert not self.continues or self.turns[-1].role == "assistant"

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the prompt may describe: none if the model must not call. Even if only
        some may be called, all are described, so that prompts keep a common prefix."""
        return () if self.tool_choice.mode == "none" else self.tools

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """The offered tools that are not deferred. If all are deferred, only the first tool is
        shown, because templates explain calls only if there is a tool."""
        offered = self.offered_tools
        return tuple(tool for tool in offered if not tool.deferred) or offered[:1]

    @property
    def turns_after_person(self) -> int | None:
        """Number of turns after the newest turn by a person, or None without such a turn."""
        turns = enumerate(reversed(self.turns))
        return next((number for number, turn in turns if turn.is_a_persons), None)

    @property
    def must_call(self) -> bool:
        return self.tool_choice.mode in ("required", "named")

    @property
    def max_calls(self) -> int | None:
        """Maximum number of calls in the answer; None means no limit."""
        is_one = self.tool_choice.mode == "named" or not self.parallel_tool_calls
        return 1 if is_one else None

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        choice = self.tool_choice
        names = choice.allowed if choice.name is None else {choice.name}
        return tuple(tool for tool in self.offered_tools if names is None or tool.name in names)
