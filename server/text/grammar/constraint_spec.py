"""Describes the constraint of an answer, collected from all fields of a request."""

import json
from dataclasses import dataclass, replace
from typing import Any

from server.text.calls.tool_format import ToolFormat
from server.text.conversation import Channel, OutputFormat, Tool
from server.text.grammar.grammar_errors import MAX_LISTED, GrammarError

TOOLS_PARAM = "tools"


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """Everything in a request that constrains the answer."""

    output: OutputFormat | None = None
    """The format of an answer without tool calls."""
    tools: tuple[Tool, ...] = ()
    tool_format: ToolFormat = ToolFormat.HERMES
    must_call: bool = False
    parallel: bool = True
    first_channel: Channel | None = Channel.CONTENT
    """The channel (reasoning or content) with which the answer begins, or None if unknown."""
    thinking_budget: int | None = None
    """Maximum number of reasoning tokens, or None for no limit."""

    @property
    def has_grammar(self) -> bool:
        """True if a grammar constrains the content. Optional calls need one if a tool is strict."""
        strict = any(tool.strict for tool in self.tools)
        return self.output is not None or bool(self.tools and (self.must_call or strict))

    @property
    def is_lazy(self) -> bool:
        """True if the grammar constrains only optional calls, each after its opening tag."""
        is_optional = not self.must_call and self.output is None
        return is_optional and self.tool_format in (ToolFormat.HERMES, ToolFormat.XML)

    @property
    def opened(self) -> Channel | None:
        """The channel of the message that the grammar begins in, or None if it begins in a header.
        Only in Harmony the grammar is of the whole answer, and else of its content."""
        return self.first_channel if self.tool_format is ToolFormat.HARMONY else Channel.CONTENT

    @property
    def has_budget(self) -> bool:
        """True if the thinking budget can apply, since the answer may begin with reasoning."""
        return self.thinking_budget is not None and self.first_channel is not Channel.CONTENT

    @property
    def param(self) -> str:
        """The field of the request from which the grammar is made, for error messages."""
        return TOOLS_PARAM if self.output is None or self.must_call else self.output.param

    def without_schemas(self) -> tuple["ConstraintSpec", tuple[str, ...]]:
        """Remove schemas that need not be enforced. Return the new spec and the schemas' places."""
        if not self.must_call:
            output = self.output
            if output is None or output.strict or output.kind != "json_schema":
                return self, ()
            is_object = isinstance(output.value, dict) and output.value.get("type") == "object"
            value = {"type": "object"} if is_object else True
            return replace(self, output=replace(output, value=value)), ("schema at #",)
        left = [tool for tool in self.tools if not tool.strict and tool.parameters is not None]
        tools = (replace(tool, parameters=None) if tool in left else tool for tool in self.tools)
        places = tuple(f"schema at {tool.name}#" for tool in left)
        return replace(self, tools=tuple(tools)), places[:MAX_LISTED]


def spec_json(spec: ConstraintSpec, max_bytes: int) -> str:
    """Write as JSON all fields on which the grammar depends. Raises GrammarError if this fails."""
    output = spec.output
    form = {
        "output": None
        if output is None
        else [output.kind, output.value, output.param, output.strict],
        "tools": [[tool.name, tool.parameters, tool.strict] for tool in spec.tools],
        "tool_format": spec.tool_format.value,
        "must_call": spec.must_call,
        "parallel": spec.parallel,
        "opened": None if spec.opened is None else spec.opened.value,
    }
    pieces, size = list[str](), 0
    try:
        # The encoder escapes lone surrogates, which UTF-8 cannot encode.
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


def spec_of_json(text: str) -> ConstraintSpec:
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
        first_channel=None if form["opened"] is None else Channel(form["opened"]),
    )
