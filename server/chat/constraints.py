"""What the answer to a conversation is held to: its form, its calls, its budget of thoughts."""

from dataclasses import replace

from engine.types import TokenConstraint
from server.protocol.wire_errors import grammars_full, invalid
from server.text.answer_parser import ParseOptions
from server.text.conversation import Conversation, Tool
from server.text.grammar.compiler import GrammarCompiler, GrammarMemoryError
from server.text.grammar.constraint_spec import ConstraintSpec, ThinkingStart
from server.text.grammar.grammar_errors import GrammarError, UnfitBeginningError
from server.text.grammar.judge import JudgeBusyError
from server.text.pieces import Channel

START = {
    Channel.CONTENT: ThinkingStart.SAYING,
    Channel.REASONING: ThinkingStart.THINKING,
    None: ThinkingStart.OPEN,
}


async def compiled_constraint(
    grammars: GrammarCompiler,
    conversation: Conversation,
    options: ParseOptions,
    *,
    ignores_eos: bool,
    turns_param: str,
) -> TokenConstraint | None:
    """Compile the constraint of the answer; None where anything may be said. options: how it is
    taken apart. ignores_eos: whether the request wants an answer without end. turns_param: the
    wire's name of the conversation. Raises ApiError for what cannot be enforced."""
    spec = constraint_spec_of(conversation, options)
    try:
        constraint = await grammars.compile(spec, options.begun_content)
    except UnfitBeginningError as error:
        raise invalid(
            f"The answer that is begun does not fit its form ({spec.param}).", turns_param
        ) from error
    except GrammarError as error:
        raise invalid(f"This form cannot be enforced: {error}.", error.param) from error
    except (JudgeBusyError, GrammarMemoryError) as error:
        raise grammars_full() from error
    if constraint is not None and ignores_eos:
        raise invalid(
            "An answer of a given form, or with a budget of thoughts, has an end of its own.",
            "ignore_eos",
        )
    return constraint


def constraint_spec_of(conversation: Conversation, options: ParseOptions) -> ConstraintSpec:
    """Return what the answer must be like. options: how it is taken apart."""
    tools = conversation.callable_tools
    choice = conversation.tool_choice
    if choice.mode == "auto" and choice.allowed is not None:
        tools = tuple(_only_named(tool) for tool in tools)
    if options.begun_content and conversation.output is not None:
        tools = ()  # what is begun is the answer of that form, and no call
    start = START[options.first_channel]
    if conversation.thinking.enabled is False:
        start = ThinkingStart.SAYING
    return ConstraintSpec(
        conversation.output,
        tools,
        options.tool_format,
        must_call=conversation.must_call,
        parallel=conversation.max_calls is None,
        thinking=start,
        thinking_budget=conversation.thinking.budget,
    )


def _only_named(tool: Tool) -> Tool:
    """Return the tool so that calls are held to its name, even where its schema is not enforced."""
    return tool if tool.strict else replace(tool, strict=True, parameters=None)
