"""Make the engine's prompt of a conversation. All chat APIs share this step."""

import asyncio
from dataclasses import dataclass, replace

import structlog

from engine.types import PrefixSalt, TokenConstraint
from server.chat.generation import Prompt
from server.chat.service import Service, new_seed
from server.protocol.common import SamplingFields, answer_length
from server.protocol.wire_errors import (
    MAX_NAME_CHARS,
    ApiError,
    ContextOverflowError,
    grammars_full,
    invalid,
    quoted,
)
from server.text.answer_parser import ParseOptions
from server.text.calls.parser import ends_in_call
from server.text.calls.tool_format import ToolFormat
from server.text.chat_template import ChatTemplate, TemplateError
from server.text.conversation import Conversation, Tool
from server.text.grammar.compiler import GrammarMemoryError
from server.text.grammar.constraint_spec import ConstraintSpec, ThinkingStart
from server.text.grammar.grammar_errors import GrammarError, UnfitBeginningError
from server.text.grammar.judge import JudgeBusyError
from server.text.pieces import Channel
from server.text.reasoning_cache import Recalled
from server.text.tokenizer import EncodedChat, TextTooLongError

CALL_BEGUN = "A call cannot be begun for the model, only its thoughts and what it says."

log = structlog.get_logger("quire")


@dataclass(frozen=True, slots=True)
class ChatSpec:
    """A request for an answer to a conversation, whatever API it came by."""

    conversation: Conversation
    sampling: SamplingFields
    """The sampling fields of the request."""
    max_tokens: int | None = None
    """The longest answer; None and -1: as long as fits."""
    max_tokens_param: str = "max_tokens"
    """The wire's name of that, for errors."""
    logprobs: int | None = None
    """How many alternatives to report with each token; None: not even its own probability."""
    turns_param: str = "messages"
    """The wire's name of the conversation, for errors."""


async def chat_prompt(service: Service, chat: ChatSpec, key: str) -> Prompt:
    """Make the engine's prompt. key: the request's API key; prefixes are shared within a key.

    Raises ApiError that names what cannot be done; 429 where places were taken in the meantime.
    """
    conversation, sampling, param = chat.conversation, chat.sampling, chat.turns_param
    form = _tool_format(service, conversation, param)
    salt = service.salts.salt(key, sampling.cache_salt)
    async with service.encoding:
        service.check_room(sampling.response_options.choices, key=key)
        known = await _recalled(service, conversation, salt)
        encoded = await _fitting(service, known.conversation, param)
    options = ParseOptions(
        encoded.opening,
        conversation.offered_tools,
        form,
        conversation.max_calls,
        service.written_calls.remember,
        encoded.begun,
    )
    _check_no_call_begun(conversation, options, param)
    params = sampling.sampling_params(
        max_tokens=answer_length(
            chat.max_tokens, len(encoded.ids), service.max_model_len, chat.max_tokens_param
        ),
        logprobs=chat.logprobs,
        vocab_size=service.client.limits.vocab_size,
        defaults=service.model.defaults,
        stop_token_ids=service.model.stop_token_ids,
        fallback_seed=new_seed(),
    )
    return Prompt(
        encoded.ids,
        params,
        sampling.stop_strings(),
        options,
        choices=sampling.response_options.choices,
        salt=salt,
        system_tokens=encoded.system_tokens,
        priority=sampling.priority or 0,
        constraint=await _constraint(service, chat, options),
        new_recorder=known.new_recorder,
    )


async def encode_conversation(
    service: Service,
    conversation: Conversation,
    param: str,
    salt: PrefixSalt,
    *,
    add_generation_prompt: bool = True,
) -> EncodedChat:
    """Make the prompt of a conversation, also where it does not fit. param: the wire's name of it.
    salt: of the request. add_generation_prompt: whether an answer is to follow. Raises ApiError for
    what cannot be rendered."""
    _tool_format(service, conversation, param)
    async with service.encoding:
        known = await _recalled(service, conversation, salt)
        return await _encode(
            service, known.conversation, param, None, add_generation_prompt=add_generation_prompt
        )


async def count_tokens_of(
    service: Service, conversation: Conversation, param: str, salt: PrefixSalt
) -> int:
    """Count the tokens of a conversation's prompt, roughly where they are far more than fit. param:
    the wire's name of it. salt: of the request. Raises ApiError for what cannot be rendered."""
    _tool_format(service, conversation, param)
    async with service.encoding:
        known = await _recalled(service, conversation, salt)
        try:
            return await service.tokenizer.count_chat(
                known.conversation,
                service.max_model_len,
                max_template_s=service.config.limits.max_template_s,
            )
        except TemplateError as error:
            raise _not_rendered(error, param) from error


def _tool_format(service: Service, conversation: Conversation, param: str) -> ToolFormat:
    """Return how calls will be written. Raises ApiError where the model cannot chat or call; and
    for what its template does not take, or no prompt can end with."""
    template = service.tokenizer.template
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
            "This model's chat template knows no tools, or none whose calls can be read.", "tools"
        )
    _check_arguments(template, conversation)
    _check_begun(conversation, param)
    return template.tool_format or ToolFormat.HERMES


def _check_begun(conversation: Conversation, param: str) -> None:
    """Raise ApiError for the beginning of an answer that no prompt can end with."""
    if not conversation.continues:
        return
    if len(conversation.turns) == 1:
        raise invalid("There is nothing before the answer that is begun.", param)
    if conversation.turns[-1].tool_calls:
        raise invalid(CALL_BEGUN, param)


def _check_no_call_begun(conversation: Conversation, options: ParseOptions, param: str) -> None:
    """Raise ApiError where the begun answer ends within a call, or must be one."""
    if options.begun_content and conversation.must_call:
        raise invalid("An answer that must be a call cannot be begun with a text.", param)
    if options.tools and ends_in_call(options.begun_content, options.tools, options.tool_format):
        raise invalid(CALL_BEGUN, param)


def _check_arguments(template: ChatTemplate, conversation: Conversation) -> None:
    """Raise ApiError for arguments that the template would not read."""
    for name, _ in conversation.template_arguments:
        if name not in template.arguments:
            taken = ", ".join(sorted(template.arguments)) or "none"
            raise invalid(
                f"This model's chat template does not take {quoted(name)}. What it takes: {taken}.",
                f"chat_template_kwargs.{name[:MAX_NAME_CHARS]}",
            )


async def _recalled(service: Service, conversation: Conversation, salt: PrefixSalt) -> Recalled:
    """Add the model's reasoning, and its calls as it wrote them, where they are known."""

    def both() -> Recalled:
        known = service.reasoning_cache.recalled(conversation, salt)
        return replace(known, conversation=service.written_calls.recalled(known.conversation))

    return await asyncio.to_thread(both)


async def _fitting(service: Service, conversation: Conversation, param: str) -> EncodedChat:
    """Encode the prompt. Raises ApiError where it does not fit; says so where it would without
    tools."""
    try:
        encoded = await _encode(service, conversation, param, service.max_model_len)
        service.check_prompt(encoded.ids, param)
    except ContextOverflowError as error:
        tools = conversation.offered_tools
        if not tools:
            raise
        try:
            bare = await _fitting(service, replace(conversation, tools=()), param)
        except ContextOverflowError:
            raise error from None
        they = f"the definitions of its {len(tools)} tools"
        if error.tokens is None:
            raise error.because(f"Without {they} it would fit: offer fewer.") from error
        share = error.tokens - len(bare.ids)
        raise error.because(f"Of these {they} are {share}: offer fewer.") from error
    return encoded


async def _encode(
    service: Service,
    conversation: Conversation,
    param: str,
    most_tokens: int | None,
    *,
    add_generation_prompt: bool = True,
) -> EncodedChat:
    """Encode the prompt; what cannot have so few tokens is refused before the work of encoding."""
    try:
        return await service.tokenizer.encode_chat(
            conversation,
            most_tokens,
            add_generation_prompt=add_generation_prompt,
            max_template_s=service.config.limits.max_template_s,
        )
    except TemplateError as error:
        raise _not_rendered(error, param) from error
    except TextTooLongError as error:
        raise ContextOverflowError(None, service.max_model_len, param) from error


def _not_rendered(error: TemplateError, param: str) -> ApiError:
    log.warning("the chat template failed", reason=error.reason)
    return invalid(f"{error}.", param)


async def _constraint(
    service: Service, chat: ChatSpec, options: ParseOptions
) -> TokenConstraint | None:
    """Compile the constraint of the answer. Raises ApiError for what cannot be enforced."""
    spec = constraint_spec_of(chat.conversation, options)
    try:
        constraint = await service.grammars.compile(spec, options.begun_content)
    except UnfitBeginningError as error:
        raise invalid(
            f"The answer that is begun does not fit its form ({spec.param}).", chat.turns_param
        ) from error
    except GrammarError as error:
        raise invalid(f"This form cannot be enforced: {error}.", error.param) from error
    except (JudgeBusyError, GrammarMemoryError) as error:
        raise grammars_full(service.config.limits.retry_after_s) from error
    if constraint is not None and chat.sampling.ignore_eos:
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


START = {
    Channel.CONTENT: ThinkingStart.SAYING,
    Channel.REASONING: ThinkingStart.THINKING,
    None: ThinkingStart.OPEN,
}
