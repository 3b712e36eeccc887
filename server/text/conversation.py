"""The neutral form of a request, into which every API translates its own."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
ANY_OBJECT = {"type": "object", "properties": {}}
# Coding tools put notes between these tags into users' messages. No person wrote them.
REMINDER_OPEN, REMINDER_CLOSE = "<system-reminder>", "</system-reminder>"


class Channel(Enum):
    """A part of an answer."""

    REASONING = "reasoning"
    CONTENT = "content"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    """Unique among the tools. Characters: letters, digits and ``_.:/-``."""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments' object; None: any object."""
    strict: bool = False
    """Whether arguments must satisfy the schema even if no call is required."""
    deferred: bool = False
    """Whether the prompt describes the tool only after the conversation has loaded it."""
    searches: bool = False
    """Whether the tool searches for deferred tools."""
    namespace: str | None = None
    """The client's name of a group of tools."""
    own_name: str | None = None
    """The tool's name within its namespace."""

    @property
    def client_name(self) -> tuple[str | None, str]:
        return self.namespace, self.own_name or self.name

    @property
    def described(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        described = {} if self.description is None else {"description": self.description}
        parameters = ANY_OBJECT if self.parameters is None else self.parameters
        function = {"name": self.name, **described, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may, must or must not call."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str | None = None
    """The tool that must be called; only with mode "named"."""
    allowed: frozenset[str] | None = None
    """With "auto" and "required": names of the tools that may be called; None: all tools."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an earlier answer."""

    id: str
    name: str
    arguments: str
    """As the model wrote them: a JSON object, unless the model made a mistake."""
    written: str | None = None
    """The whole call as the model wrote it, with its tags; None if unknown."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message."""

    role: Role
    text: str = ""
    reasoning: str = ""
    """Only in an assistant's turn, before the text."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Only in an assistant's turn, after the text."""
    tool_call_id: str | None = None
    """Id of the call that this turn, a tool's result, answers."""

    @property
    def is_a_persons(self) -> bool:
        """Whether a person wrote this turn: a user's turn with text outside reminders."""
        first, *others = self.text.split(REMINDER_OPEN)
        outside_reminders = [first, *(other.partition(REMINDER_CLOSE)[2] for other in others)]
        return self.role == "user" and any(map(str.strip, outside_reminders))


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The form that the whole answer must have, after its reasoning."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: Any = None
    """For json_schema a dict or bool, for choice a list of str, for json_object None, else str."""
    param: str = "response_format"
    """The API's name of the field that sets the form, for errors."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """How much the model may reason before it answers."""

    enabled: bool | None = None
    """None: the model's template decides."""
    budget: int | None = None
    """In tokens; None: only the answer's own limit."""
    effort: str | None = None
    """Passed to templates that take an effort."""
    budget_is_efforts: bool = False
    """Whether the budget was derived from the effort."""


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
    """Whether the last turn, an assistant's, is the beginning of the answer."""
    template_arguments: TemplateArguments = ()
    """Further arguments of the model's template, by the template's names."""

    def __post_init__(self) -> None:
        assert not self.continues or self.turns[-1].role == "assistant"

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the model may see: none if it must not call. If only some may be called it
        still sees all, so that prompts keep a common prefix."""
        return () if self.tool_choice.mode == "none" else self.tools

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """The offered tools that are not deferred. If all are deferred, the first one: templates
        explain calls only if there is a tool."""
        offered = self.offered_tools
        return tuple(tool for tool in offered if not tool.deferred) or offered[:1]

    @property
    def turns_after_person(self) -> int | None:
        """Number of turns after the newest one by a person; None without such a turn."""
        turns = enumerate(reversed(self.turns))
        return next((number for number, turn in turns if turn.is_a_persons), None)

    @property
    def must_call(self) -> bool:
        return self.tool_choice.mode in ("required", "named")

    @property
    def max_calls(self) -> int | None:
        """None: no limit."""
        is_one = self.tool_choice.mode == "named" or not self.parallel_tool_calls
        return 1 if is_one else None

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        choice = self.tool_choice
        names = choice.allowed if choice.name is None else {choice.name}
        return tuple(tool for tool in self.offered_tools if names is None or tool.name in names)
