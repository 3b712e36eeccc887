"""What an answer must be like, gathered from all parts of a request that say so."""

import json
from dataclasses import dataclass
from typing import Any

from server.text.calls.tool_format import ToolFormat
from server.text.conversation import Channel, OutputFormat, Tool
from server.text.grammar.grammar_errors import GrammarError

TOOLS_PARAM = "tools"


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """What an answer must be like."""

    output: OutputFormat | None = None
    """The form of an answer that is no call."""
    tools: tuple[Tool, ...] = ()
    """Tools that may be called."""
    tool_format: ToolFormat = ToolFormat.HERMES
    must_call: bool = False
    """Whether nothing but calls is an answer."""
    parallel: bool = True
    """Whether there may be several calls."""
    first_channel: Channel | None = Channel.CONTENT
    """What the answer begins with; None where the model decides."""
    thinking_budget: int | None = None
    """Most tokens of the reasoning; None: no limit."""

    @property
    def has_form(self) -> bool:
        """Whether what is said has a form. Where calls may be made, a strict tool gives it one."""
        strict = any(tool.strict for tool in self.tools)
        return self.output is not None or bool(self.tools and (self.must_call or strict))

    @property
    def is_lazy(self) -> bool:
        """Whether the form is that of calls, which the model need not make, between tags."""
        is_optional = not self.must_call and self.output is None
        return is_optional and self.tool_format is not ToolFormat.LLAMA

    @property
    def has_budget(self) -> bool:
        """Whether reasoning has a budget that ends it."""
        return self.thinking_budget is not None and self.first_channel is not Channel.CONTENT

    @property
    def param(self) -> str:
        """The request's field that a fault of the form is of, as far as can be said."""
        return TOOLS_PARAM if self.output is None or self.must_call else self.output.param


def form_json(spec: ConstraintSpec, max_bytes: int) -> str:
    """Write the form of what is said as JSON: the same for the same form.

    Raises GrammarError, before more than ``max_bytes`` are written, for what is too long, or no
    JSON.
    """
    output = spec.output
    form = {
        "output": None if output is None else [output.kind, output.value, output.param],
        "tools": [[tool.name, tool.parameters, tool.strict] for tool in spec.tools],
        "tool_format": spec.tool_format.value,
        "must_call": spec.must_call,
        "parallel": spec.parallel,
    }
    pieces, size = list[str](), 0
    try:
        # Halves of characters become escapes, as JSON's other users have it.
        for piece in json.JSONEncoder(allow_nan=False).iterencode(form):
            size += len(piece)
            if size > max_bytes:
                raise GrammarError(f"it has more than {max_bytes} bytes", spec.param)
            pieces.append(piece)
    except (ValueError, RecursionError) as error:
        if isinstance(error, GrammarError):
            raise
        raise GrammarError("it is not JSON, or nested too deeply", spec.param) from error
    return "".join(pieces)


def form_of_json(text: str) -> ConstraintSpec:
    """Read what ``form_json`` has written."""
    form: dict[str, Any] = json.loads(text)
    return ConstraintSpec(
        output=None if form["output"] is None else OutputFormat(*form["output"]),
        tools=tuple(
            Tool(name, parameters=parameters, strict=strict)
            for name, parameters, strict in form["tools"]
        ),
        tool_format=ToolFormat(form["tool_format"]),
        must_call=form["must_call"],
        parallel=form["parallel"],
    )
