"""The neutral form of a request, into which all APIs translate. This module knows no HTTP, tokens
or templates."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
ANY_OBJECT = {"type": "object", "properties": {}}
# Coding tools put notes that no person has written between these tags, in messages of users.
REMINDER_OPEN, REMINDER_CLOSE = "<system-reminder>", "</system-reminder>"


class Channel(Enum):
    """The part of an answer that a text belongs to."""

    REASONING = "reasoning"
    CONTENT = "content"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    """Unique among the tools; letters, digits and ``_.:/-``."""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of the object of arguments; None: any object."""
    strict: bool = False
    """Whether arguments must satisfy the schema even where no call is required."""
    deferred: bool = False
    """Whether the prompt describes the tool only where the conversation loads it."""
    searches: bool = False
    """Whether its calls are searches for tools."""
    namespace: str | None = None
    """The client's group of tools."""
    own_name: str | None = None
    """The client's name of it within the namespace."""

    @property
    def client_name(self) -> tuple[str | None, str]:
        """The namespace, and the name within it."""
        return self.namespace, self.own_name or self.name

    @property
    def described(self) -> dict[str, Any]:
        """The tool's description as chat templates take it."""
        described = {} if self.description is None else {"description": self.description}
        parameters = ANY_OBJECT if self.parameters is None else self.parameters
        function = {"name": self.name, **described, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may, must or must not call."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str | None = None
    """The tool that must be called, with "named" alone."""
    allowed: frozenset[str] | None = None
    """With "auto" and "required": the names that may be called; None: all."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that was made."""

    id: str
    name: str
    arguments: str
    """As the model wrote them: a JSON object, unless the model erred."""
    written: str | None = None
    """The whole call as the model wrote it, with tags, where that is known."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message."""

    role: Role
    text: str = ""
    reasoning: str = ""
    """An assistant's, before the text."""
    tool_calls: tuple[ToolCall, ...] = ()
    """An assistant's, after the text."""
    tool_call_id: str | None = None
    """The call that a tool's result answers."""

    @property
    def is_a_persons(self) -> bool:
        """Whether a person speaks here: the turn is no tool's result, and has more than
        reminders."""
        first, *others = self.text.split(REMINDER_OPEN)
        outside_reminders = [first, *(other.partition(REMINDER_CLOSE)[2] for other in others)]
        return self.role == "user" and any(map(str.strip, outside_reminders))


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The form of the whole answer behind its reasoning."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: Any = None
    """json_schema: the schema, a dict or a bool. regex: the pattern. choice: a list of strings.
    grammar: its text, Lark or GBNF. json_object: None."""
    param: str = "response_format"
    """The wire's name of the field that sets it, for errors."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """How much the model may reason before it answers."""

    enabled: bool | None = None
    """None leaves it to the model's template."""
    budget: int | None = None
    """Tokens; None: no limit but the answer's own."""
    effort: str | None = None
    """For templates that take an effort."""
    budget_is_efforts: bool = False
    """Whether the budget was derived from the effort."""


TemplateArguments = tuple[tuple[str, str | float | bool], ...]
"""Names and values."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation to be answered, and how."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    output: OutputFormat | None = None
    thinking: Thinking = Thinking()
    continues: bool = False
    """Whether the last turn, an assistant's, is the beginning of the answer."""
    template_arguments: TemplateArguments = ()
    """Further arguments of the model's template, by its own names."""

    def __post_init__(self) -> None:
        assert not self.continues or self.turns[-1].role == "assistant"

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the model may know: none where it must not call. Where only some may be
        called it still sees all, so that prompts begin alike."""
        return () if self.tool_choice.mode == "none" else self.tools

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """The offered tools that the prompt begins with: those that are not deferred. If all are,
        the first: templates explain calls only beside a tool."""
        offered = self.offered_tools
        return tuple(tool for tool in offered if not tool.deferred) or offered[:1]

    @property
    def turns_after_person(self) -> int | None:
        """Number of turns behind the newest one of a person; None without one."""
        turns = enumerate(reversed(self.turns))
        return next((number for number, turn in turns if turn.is_a_persons), None)

    @property
    def must_call(self) -> bool:
        """Whether the answer must be calls."""
        return self.tool_choice.mode in ("required", "named")

    @property
    def max_calls(self) -> int | None:
        """Maximum number of calls; None: no limit."""
        is_one = self.tool_choice.mode == "named" or not self.parallel_tool_calls
        return 1 if is_one else None

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        choice = self.tool_choice
        names = choice.allowed if choice.name is None else {choice.name}
        return tuple(tool for tool in self.offered_tools if names is None or tool.name in names)
