"""The neutral form of a request, that all APIs translate into.

Nothing here knows HTTP, tokens or templates, and nothing of ours is imported.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
ANY_OBJECT = {"type": "object", "properties": {}}
# Coding tools put what nobody has said between these, in messages of users.
REMINDER_OPEN, REMINDER_CLOSE = "<system-reminder>", "</system-reminder>"


class Channel(Enum):
    """What a piece of text belongs to: the reasoning or the content."""

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
    """Whether arguments must satisfy the schema also where nobody asked for the call."""
    deferred: bool = False
    """Whether the model reads of it where the conversation loads it, and not before."""
    searches: bool = False
    """Whether its calls are searches for tools, which a client may tell from others."""
    namespace: str | None = None
    """The client's group of tools that it belongs to."""
    own_name: str | None = None
    """What the client calls it within its namespace."""

    @property
    def client_name(self) -> tuple[str | None, str]:
        """Its namespace, and its name within that."""
        return self.namespace, self.own_name or self.name

    @property
    def described(self) -> dict[str, Any]:
        """The object that describes it, as chat templates take it."""
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
    """As the model wrote them: JSON, of an object, unless the model got it wrong."""
    written: str | None = None
    """All of the call as the model wrote it, tags and all, where that is known."""


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
    """Which call a tool answers."""

    @property
    def is_a_persons(self) -> bool:
        """Whether a person says something here: it is no tool's result, and not only reminders."""
        first, *others = self.text.split(REMINDER_OPEN)
        said = [first, *(other.partition(REMINDER_CLOSE)[2] for other in others)]
        return self.role == "user" and any(map(str.strip, said))


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What the whole answer, after its reasoning, must be."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: Any = None
    """json_schema: the schema, a dict or a bool. regex: the pattern. choice: a list of strings.
    grammar: its text, Lark or GBNF. json_object: None."""
    param: str = "response_format"
    """The wire's name of the field that it came from, for errors."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """How much the model may think before it answers."""

    enabled: bool | None = None
    """None leaves it to the model's template."""
    budget: int | None = None
    """Tokens; None: no limit but the answer's own."""
    effort: str | None = None
    """Where one is asked for: for templates that know efforts."""
    budget_is_efforts: bool = False
    """Whether the budget stands for the effort."""


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
    """Whether the last turn, which is the assistant's, is the beginning of the answer."""
    template_arguments: TemplateArguments = ()
    """Further arguments of the model's template, by its own names for them."""

    def __post_init__(self) -> None:
        """Check that only the assistant's turn is continued."""
        assert not self.continues or self.turns[-1].role == "assistant"

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the model may know: none where it must not call any.

        Where only some may be called it is told of all, so that prompts begin alike.
        """
        return () if self.tool_choice.mode == "none" else self.tools

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """The offered tools that the prompt begins with: those that are not deferred. Where all
        are, the first: templates say how to call only beside a tool."""
        offered = self.offered_tools
        return tuple(tool for tool in offered if not tool.deferred) or offered[:1]

    @property
    def turns_after_person(self) -> int | None:
        """How many turns follow the newest one of a person; None where there is none."""
        turns = enumerate(reversed(self.turns))
        return next((number for number, turn in turns if turn.is_a_persons), None)

    @property
    def must_call(self) -> bool:
        """Whether nothing but calls is an answer."""
        return self.tool_choice.mode in ("required", "named")

    @property
    def max_calls(self) -> int | None:
        """How many calls the answer may have: one, where one tool is asked for by its name."""
        is_one = self.tool_choice.mode == "named" or not self.parallel_tool_calls
        return 1 if is_one else None

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        choice = self.tool_choice
        names = choice.allowed if choice.name is None else {choice.name}
        return tuple(tool for tool in self.offered_tools if names is None or tool.name in names)
