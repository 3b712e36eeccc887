"""Turn a chat's conversation into a prompt, and into a constraint on the tokens of the answer."""

import asyncio
from dataclasses import dataclass, replace

import structlog

from engine.types import Drafting, PrefixSalt, TokenConstraint
from server.chat.admission import Admission
from server.chat.generation import Prompt
from server.chat.served_model import PromptRules
from server.config import LimitsSection
from server.protocol.common import SamplingFields
from server.protocol.wire_errors import (
    MAX_NAME_CHARS,
    ApiError,
    ContextOverflowError,
    come_back,
    invalid,
    quoted,
)
from server.text.calls.tool_format import ToolFormat
from server.text.calls.written import WrittenCalls
from server.text.chat_template import ChatTemplate, TemplateError
from server.text.conversation import Channel, Conversation
from server.text.grammar.compiler import GrammarCompiler
from server.text.grammar.constraint_spec import ConstraintSpec
from server.text.grammar.grammar_errors import GrammarError, UnfitBeginningError
from server.text.grammar.worker import GrammarsFullError
from server.text.pipeline import ParseOptions, ends_in_call
from server.text.reasoning_cache import ReasoningCache, Recalled
from server.text.tokenizer import EncodedText, TextTooLongError, Tokenizer


async def compiled_constraint(
    grammars: GrammarCompiler, conversation: Conversation, options: ParseOptions, turns_param: str
) -> tuple[TokenConstraint | None, tuple[str, ...]]:
    """Return two things: the compiled constraint of an answer, or None if any text is allowed; and
    the keywords of schemas that the constraint does not enforce. Raises ApiError."""
    spec = constraint_spec_of(conversation, options)
    try:
        grammar = await grammars.grammar(spec)
        constraint = await grammars.compile(spec, options.begun_content, grammar)
    except UnfitBeginningError as error:
        raise invalid(
            f"The answer that is begun does not fit its form ({spec.param}).", turns_param
        ) from error
    except GrammarError as error:
        raise invalid(f"This form cannot be enforced: {error}.", error.param) from error
    except GrammarsFullError as error:
        message = "Too many forms of answers are being compiled or in use"
        raise come_back(429, message, "grammars_full") from error
    return constraint, () if grammar is None else grammar.not_enforced


def constraint_spec_of(conversation: Conversation, options: ParseOptions) -> ConstraintSpec:
    tools = conversation.callable_tools
    choice = conversation.tool_choice
    if choice.mode == "auto" and choice.allowed is not None:
        # Restrict calls to the allowed names, without enforcing the schemas of arguments.
        tools = tuple(
            tool if tool.strict else replace(tool, strict=True, parameters=None) for tool in tools
        )
    if options.begun_content and conversation.output is not None:
        tools = ()  # the client has begun an answer of this format, which is no call
    start = options.first_channel
    if conversation.thinking.enabled is False:
        start = Channel.CONTENT
    return ConstraintSpec(
        conversation.output,
        tools,
        options.tool_format,
        must_call=conversation.must_call,
        parallel=conversation.max_calls is None,
        first_channel=start,
        thinking_budget=conversation.thinking.budget,
    )


CALL_BEGUN = "A call cannot be begun for the model, only its thoughts and what it says."

log = structlog.get_logger("quire")


@dataclass(frozen=True, slots=True)
class ChatPrompts:
    """Makes prompts from conversations, and counts their tokens."""

    tokenizer: Tokenizer
    rules: PromptRules
    admission: Admission
    grammars: GrammarCompiler
    written_calls: WrittenCalls
    reasoning_cache: ReasoningCache
    encoding: asyncio.Semaphore
    """Limits the number of prompts that are encoded at a time. A request that has waited here
    checks again that the engine has room, so that no prompt is encoded only to be refused."""
    limits: LimitsSection

    async def prompt(
        self, conversation: Conversation, wire: SamplingFields, salt: PrefixSalt
    ) -> Prompt:
        """Return the prompt of a chat of any API. Raises ApiError (400, 429 or 503)."""
        param = wire.turns_param
        conversation, tool_format = self._check(conversation, param)
        async with self.encoding:
            self.admission.check_answers(salt.tenant, wire.response_options.choices)
            known = await self._recall(conversation, salt)
            encoded = await self._encode_fitting(known.conversation, param)
            drafts = self.admission.client.stats.drafting is not Drafting.OFF
            prediction_ids = await self.tokenizer.encode_prediction(
                conversation.prediction if drafts else "", self.rules.max_model_len
            )
        options = ParseOptions(
            encoded.opening,
            conversation.offered_tools,
            tool_format,
            1 if tool_format is ToolFormat.LLAMA else conversation.max_calls,
            self.written_calls.remember,
            encoded.begun,
        )
        _check_no_call_begun(conversation, options, param)
        request = self.rules.request(wire, encoded, salt)
        constraint, not_enforced = await compiled_constraint(
            self.grammars, conversation, options, param
        )
        if constraint is not None and wire.ignore_eos:
            raise invalid(
                "An answer of a given form, or with a budget of thoughts, has an end of its own.",
                "ignore_eos",
            )
        request = replace(request, constraint=constraint, prediction_ids=prediction_ids)
        return Prompt(request, wire.stop_strings(), options, known.new_recorder, not_enforced)

    async def encode(
        self,
        conversation: Conversation,
        param: str,
        salt: PrefixSalt,
        *,
        add_generation_prompt: bool = True,
    ) -> EncodedText:
        """Encode a conversation of any length. Raises ApiError if the template fails."""
        conversation, _ = self._check(conversation, param)
        async with self.encoding:
            known = await self._recall(conversation, salt)
            return await self._encode(
                known.conversation, param, None, add_generation_prompt=add_generation_prompt
            )

    async def count_tokens(self, conversation: Conversation, param: str, salt: PrefixSalt) -> int:
        """Count a conversation's tokens. A count far above the limit is approximate."""
        conversation, _ = self._check(conversation, param)
        async with self.encoding:
            known = await self._recall(conversation, salt)
            try:
                return await self.tokenizer.count_chat(
                    known.conversation,
                    self.rules.max_model_len,
                    max_template_s=self.limits.max_template_s,
                )
            except TemplateError as error:
                raise _not_rendered(error, param) from error

    def _check(self, conversation: Conversation, param: str) -> tuple[Conversation, ToolFormat]:
        """Return two things: the conversation, whose effort is now a template argument; and the
        format of tool calls. Raises ApiError if the chat template does not support the chat."""
        template = self.tokenizer.template
        if not template.exists:
            raise invalid("This model has no chat template; use /v1/completions.", param)
        if template.unusable:
            raise invalid(
                f"This model's chat template is not used, because {template.unusable}; use "
                "/v1/completions.",
                param,
            )
        if conversation.offered_tools and template.tool_format is None:
            raise invalid(
                "This model's chat template knows no tools, or none whose calls can be read.",
                "tools",
            )
        _check_arguments(template, conversation)
        _check_begun(conversation, param)
        return template.with_effort(conversation), template.tool_format or ToolFormat.HERMES

    async def _recall(self, conversation: Conversation, salt: PrefixSalt) -> Recalled:
        """Add cached reasoning that the client omits, and each call's cached original text."""

        def both() -> Recalled:
            known = self.reasoning_cache.recall(conversation, salt)
            return replace(known, conversation=self.written_calls.recall(known.conversation))

        return await asyncio.to_thread(both)

    async def _encode_fitting(self, conversation: Conversation, param: str) -> EncodedText:
        """Encode the prompt. If it is too long, raise an ApiError that tells the tools' length."""
        try:
            encoded = await self._encode(conversation, param, self.rules.max_model_len)
            self.rules.check_prompt(encoded.ids, param)
        except ContextOverflowError as error:
            tools = conversation.shown_tools
            if not tools:
                raise
            try:
                bare = await self._encode_fitting(replace(conversation, tools=()), param)
            except ContextOverflowError:
                raise error from None
            raise error.because_of_tools(len(tools), error.tokens - len(bare.ids)) from error
        return encoded

    async def _encode(
        self,
        conversation: Conversation,
        param: str,
        most_tokens: int | None,
        *,
        add_generation_prompt: bool = True,
    ) -> EncodedText:
        """Encode the prompt. Raises ApiError, before encoding, if the prompt is surely too long."""
        try:
            return await self.tokenizer.encode_chat(
                conversation,
                most_tokens,
                add_generation_prompt=add_generation_prompt,
                finds_boundaries=self.rules.engine.keeps_states,
                max_template_s=self.limits.max_template_s,
            )
        except TemplateError as error:
            raise _not_rendered(error, param) from error
        except TextTooLongError as error:
            raise ContextOverflowError(
                error.tokens, self.rules.max_model_len, param, estimated=True
            ) from error


def _check_begun(conversation: Conversation, param: str) -> None:
    """Raise ApiError if the message to continue has calls, or is the only message."""
    if not conversation.continues:
        return
    if len(conversation.turns) == 1:
        raise invalid("There is nothing before the answer that is begun.", param)
    if conversation.turns[-1].tool_calls:
        raise invalid(CALL_BEGUN, param)


def _check_no_call_begun(conversation: Conversation, options: ParseOptions, param: str) -> None:
    """Raise ApiError if the client has begun the answer with a call, or with text instead of a
    required call."""
    if options.begun_content and conversation.must_call:
        raise invalid("An answer that must be a call cannot be begun with a text.", param)
    if options.tools and ends_in_call(options.begun_content, options.tools, options.tool_format):
        raise invalid(CALL_BEGUN, param)


def _check_arguments(template: ChatTemplate, conversation: Conversation) -> None:
    for name, _ in conversation.template_arguments:
        if name not in template.arguments:
            taken = ", ".join(sorted(template.arguments)) or "none"
            raise invalid(
                f"This model's chat template does not take {quoted(name)}. What it takes: {taken}.",
                f"chat_template_kwargs.{name[:MAX_NAME_CHARS]}",
            )


def _not_rendered(error: TemplateError, param: str) -> ApiError:
    log.warning("the chat template failed", reason=error.reason)
    return invalid(f"{error}.", param)
