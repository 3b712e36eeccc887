"""Render a conversation as a prompt's text with the chat template in the model's folder."""

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar

import jinja2
from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.meta import find_undeclared_variables

from kvcache.child import Cause, Child, LimitError
from server.text.calls.tool_format import ToolFormat, tool_format
from server.text.calls.written import CallMarks, MarkError
from server.text.conversation import (
    ANALYSIS_OPEN,
    FINAL_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    Channel,
    Conversation,
    Thinking,
    Tool,
    ToolCall,
    Turn,
    first_channel_of,
)
from server.text.encoder import SpecialTokens
from server.text.harmony import SPELLED, START
from server.text.json_object import json_object
from server.text.template_sandbox import Generation, Message, render_template
from server.text.template_trial import (
    ANSWER,
    LIMITS,
    SYSTEM,
    USER,
    TimeLimit,
    TimeUp,
    fault_of,
    render_all,
)
from server.text.tokenizer_files import TokenizerFiles

NO_REASONING = f"{THINK_OPEN}\n\n{THINK_CLOSE}\n\n"
LINE = "\n"
# The end of a message in Harmony, and the beginning of the next one.
NEXT_MESSAGE = "<|end|><|start|>assistant"
HARMONY_CALL = "<|start|>assistant", "<|call|>"


@dataclass(frozen=True, slots=True)
class BegunAnswer:
    """The beginning of an answer that the client has written and the model continues."""

    opening: str = ""
    """The text before ``text``: the tags of reasoning, and the reasoning if it is finished."""
    text: str = ""
    """The text that the model continues: content, or reasoning that the client has not finished."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """The reasoning and the content of one assistant's message."""

    reasoning: str | None
    is_over: bool
    """True if the reasoning has ended."""
    content: str


def begun_answer(turn: Turn, prompt: str, *, closed: str, thinks: bool) -> BegunAnswer:
    """Return the beginning of the answer in ``turn``, with the reasoning tags that the model would
    have written after ``prompt``. ``closed`` is the text, such as an empty pair of tags, that comes
    before content without reasoning. ``thinks`` is False if the model must not reason."""
    parts, start = _parts(turn), first_channel_of(prompt)
    if start is Channel.CONTENT or not thinks:
        parts = _Parts(None, True, parts.content)
    if parts.reasoning is None and not parts.content:
        return BegunAnswer()
    if parts.reasoning is None and start is not Channel.REASONING:
        return BegunAnswer("" if start is Channel.CONTENT else closed, parts.content)
    reasoning = parts.reasoning or ""
    opening = "" if prompt.endswith(LINE) else LINE
    if start is None:
        opening = THINK_OPEN + LINE
    if not parts.is_over:
        return BegunAnswer(opening, reasoning.lstrip(LINE))
    closing = f"{LINE}{THINK_CLOSE}{LINE}{LINE}"
    return BegunAnswer(f"{opening}{reasoning.strip(LINE)}{closing}", parts.content)


def _parts(turn: Turn) -> _Parts:
    """Return a message's reasoning and content. Some clients put both into the text, with tags."""
    text = turn.text.lstrip()
    if turn.reasoning or not text.startswith(THINK_OPEN):
        return _Parts(turn.reasoning or None, bool(turn.text), turn.text)
    reasoning, close, content = text.removeprefix(THINK_OPEN).partition(THINK_CLOSE)
    return _Parts(reasoning, bool(close), content.lstrip(LINE))


def begun_messages(turn: Turn) -> BegunAnswer:
    """Return the beginning of the answer in ``turn`` in Harmony, as messages."""
    if not turn.text:
        return BegunAnswer(ANALYSIS_OPEN if turn.reasoning else "", turn.reasoning)
    before = f"{ANALYSIS_OPEN}{turn.reasoning}{NEXT_MESSAGE}" if turn.reasoning else ""
    return BegunAnswer(before + FINAL_OPEN, turn.text)


# Variables that a template always gets, and the names of parameters of transformers' functions.
SUPPLIED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
    | {"self", "conversation", "conversations", "chat_template", "continue_final_message"}
    | {"sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "padding", "truncation", "kwargs"}
    | {"max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"}
    # gpt-oss's own tools, a browser and Python, would have to run here.
    | {"builtin_tools"}
)


def template_arguments(texts: Iterable[str], special_tokens: Iterable[str]) -> frozenset[str]:
    """Return the names of the variables that the templates ``texts`` expect from outside, except
    variables of transformers and ``special_tokens``. Skip a template with a syntax error."""
    environment = Environment(autoescape=True, extensions=["jinja2.ext.loopcontrols", Generation])
    variables: set[str] = set()
    for text in texts:
        try:
            tree = environment.parse(text)
        except TemplateSyntaxError:
            continue
        variables |= find_undeclared_variables(tree) & _unset_variables(tree, set())
    return frozenset(variables - environment.globals.keys() - SUPPLIED - set(special_tokens))


def _unset_variables(node: nodes.Node, known: set[str]) -> set[str]:
    """Return the variables that a template's node reads before setting them. Add the variables that
    the node sets to ``known``."""
    if isinstance(node, nodes.Name):
        if node.ctx == "load":
            return {node.name} - known
        known.add(node.name)
    if isinstance(node, nodes.Macro):
        known = known.copy()  # a macro's parameters are local to the macro
    parts = list(node.iter_child_nodes())
    if isinstance(node, nodes.Assign):
        parts.reverse()
    return set().union(*(_unset_variables(part, known) for part in parts))


GuardedT = TypeVar("GuardedT")
# EFFORT_NAMES are names that templates give to the argument for the reasoning effort. EFFORTS are
# the values in ascending order.
EFFORT_NAMES = ("reasoning_effort", "effort", "thinking_effort")
EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
HARMONY_EFFORTS = ("low", "medium", "high")
MARK = "A message in the middle."
STRANGE = "\U0010fffc"  # a private-use character, with which no real message begins
# Templates treat a user's message between these tags as the result of a tool.
RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"
MAX_WORDS_CHARS = 200
REFUSED = "chats, messages and responses are refused; /v1/completions works"


class PromptEnds(NamedTuple):
    """Lengths, in characters, of prefixes that other prompts may share. 0 is an unknown length."""

    system: int
    """The length of the tools and first system messages, which other conversations may share."""
    person: int
    """The length up to the end of the newest message by a person. The conversation's next prompt
    may differ after this message, because templates omit old reasoning."""
    messages: int
    """The length of all messages, without the text with which the template begins the answer."""


class TemplateError(ValueError):
    """Raised for a conversation that the model's chat template cannot render."""

    def __init__(self, message: str, reason: str) -> None:
        """``reason`` is the cause as written to the log, without text of the conversation."""
        super().__init__(message)
        self.reason = reason


class ChatTemplate:
    """Runs a model's chat template, which is a foreign program, in a sandbox."""

    def __init__(self, files: TokenizerFiles, special_tokens: SpecialTokens) -> None:
        """``special_tokens`` puts marks into special tokens in messages, so that they stay text."""
        self._files = files
        self._special_tokens = special_tokens
        text = files.template(for_tools=True)
        self.exists = text is not None
        self.tool_format = tool_format(text or "")
        """The format in which the template shows tool calls, or None if it shows no tool calls."""
        self.text = text or ""
        self.is_harmony = self.tool_format is ToolFormat.HARMONY
        """True if the template writes messages in Harmony, the format of gpt-oss."""
        tags = (THINK_OPEN, THINK_CLOSE)
        self.knows_thoughts = self.is_harmony or any(tag in self.text for tag in tags)
        """True if the template is in Harmony, or contains ``<think>`` or ``</think>``."""
        self.unusable = ""
        """The reason why this process must not run the template, or "" if it may run."""

    def try_out(self, process: Child) -> str:
        """Render test conversations in another process. Return a warning for the operator or ""."""
        if not self.exists:
            return f"the model has no chat template: {REFUSED}"
        try:
            fault = process.call(LIMITS, render_all, self._texts, dict(self._files.special_tokens))
        except LimitError as error:
            fault = str(error)
            if error.cause is not Cause.NOT_RUN:
                self.unusable = fault
                return f"the model's chat template is not used, because {fault}: {REFUSED}"
        if fault:
            return (
                f"the model's chat template has failed with a plain conversation ({fault}): "
                "chats that it cannot render are refused; /v1/completions works"
            )
        if not self.keeps_marks:
            return (
                "the model's chat template does not write texts as they are: special tokens that "
                "they spell are interpreted"
            )
        return ""

    @cached_property
    def takes_late_system(self) -> bool:
        """True if the template renders a system message after other messages."""
        talk = [USER, ANSWER, {"role": "system", "content": MARK}, USER]
        return MARK in self._render_or_nothing(talk)

    @cached_property
    def takes_system(self) -> bool:
        """True if the template renders a system message."""
        return MARK in self._render_or_nothing([{"role": "system", "content": MARK}, USER])

    @cached_property
    def wants_turns(self) -> bool:
        """True if the template refuses a message after another one of the same role."""
        return bool(self._render_or_nothing([USER])) and not self._render_or_nothing([USER, USER])

    @cached_property
    def takes_several_calls(self) -> bool:
        """True if the template renders all calls of a message."""
        return MARK in self._render_or_nothing(_calling("look", MARK))

    @cached_property
    def takes_text_beside_thoughts(self) -> bool:
        """True if the template renders a message with reasoning, text and a call."""
        _, calling, result = _calling("look")
        full = calling | {"content": "Hello", "reasoning_content": "Hello"}
        return bool(self._render_or_nothing([USER, full, result]))

    @cached_property
    def needs_descriptions(self) -> bool:
        """True if the template renders only tools with a description."""
        form = {"type": "object", "properties": {}}
        tools = Tool("look", "Looks.", form), Tool("look", None, form)
        told, bare = (self._render_or_nothing([USER], tools=[each.described]) for each in tools)
        return bool(told) and not bare

    @cached_property
    def takes_no_user(self) -> bool:
        """True if the template renders a conversation without a user's message."""
        return bool(self._render_or_nothing([SYSTEM, ANSWER]))

    @cached_property
    def keeps_marks(self) -> bool:
        """True if rendering preserves the marks that ``SpecialTokens`` puts into messages."""
        guarded = "".join(map(self._special_tokens.guarded_text, self._special_tokens.contents))
        prompt = self._render_or_nothing([{"role": "user", "content": guarded}])
        return not prompt or guarded in prompt

    def _render_or_nothing(self, messages: list[Message], **arguments: Any) -> str:
        """Render messages as a prompt. Return "" if the template raises an error."""
        try:
            return self._render(messages, add_generation_prompt=True, **arguments)
        except Exception:
            return ""

    @cached_property
    def arguments(self) -> frozenset[str]:
        """Names of the arguments that the template takes besides the conversation."""
        return template_arguments(self._texts, self._files.special_tokens)

    def with_effort(self, conversation: Conversation) -> Conversation:
        """Add the reasoning effort, or the nearest effort that the template names, to the arguments
        of the template. Return the conversation unchanged if the template takes no effort."""
        thinking, given = conversation.thinking, dict(conversation.template_arguments)
        if self.is_harmony and thinking.enabled is False:
            # These models always reason.
            thinking = Thinking(effort=EFFORTS[0])
            conversation = replace(conversation, thinking=thinking)
        name = next((name for name in EFFORT_NAMES if name in self.arguments), None)
        if thinking.effort is None or name is None or name in given:
            return conversation
        spelled = [effort for effort in EFFORTS if re.search(f"['\"]{effort}['\"]", self.text)]
        place = EFFORTS.index(thinking.effort)
        known = HARMONY_EFFORTS if self.is_harmony else spelled if len(spelled) > 1 else EFFORTS
        given[name] = min(known, key=lambda effort: abs(EFFORTS.index(effort) - place))
        budget = None if thinking.budget_is_efforts else thinking.budget
        return replace(
            conversation,
            thinking=replace(thinking, budget=budget),
            template_arguments=tuple(given.items()),
        )

    def render(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        finds_boundaries: bool = True,
        limit: TimeLimit | None = None,
    ) -> tuple[str, PromptEnds]:
        """Return the prompt and the lengths of the prefixes that other prompts may share. A last
        message that the model continues is omitted. Special tokens in messages get marks. If
        ``finds_boundaries`` is False, only the system's prefix is measured, which costs less."""
        if conversation.continues:
            conversation = replace(conversation, turns=conversation.turns[:-1], continues=False)
        arguments = _arguments(conversation) | {"add_generation_prompt": add_generation_prompt}
        try:
            with limit or nullcontext():
                return self._rendered(conversation, arguments, finds_boundaries=finds_boundaries)
        except TimeUp:
            message = "the model's chat template takes too long to render these messages"
            raise TemplateError(message, "it takes longer than limits.max_template_s") from None
        except Exception as error:
            # The template is a foreign program: any error means that the conversation is refused.
            message = "the model's chat template cannot render these messages"
            words = " ".join(str(error).split())[:MAX_WORDS_CHARS].rstrip(".")
            if type(error) is jinja2.TemplateError and words:
                message += ": " + "".join(filter(str.isprintable, words))
            own = isinstance(error, jinja2.TemplateSyntaxError) or str(error) in self.text
            raise TemplateError(message, fault_of(error, with_message=own)) from error

    def begun(
        self, conversation: Conversation, prompt: str, *, limit: TimeLimit | None = None
    ) -> BegunAnswer:
        """Return the beginning of the answer that the client has written. Special tokens that the
        reasoning in its opening spells get marks. Raises TemplateError."""
        if not conversation.continues:
            return BegunAnswer()
        turn, thinking = conversation.turns[-1], conversation.thinking
        guarded = self._special_tokens.guarded_text
        if self.is_harmony:
            return begun_messages(replace(turn, reasoning=guarded(turn.reasoning)))
        if not self.knows_thoughts:
            return BegunAnswer(text=turn.text)
        closed = ""
        if turn.text and first_channel_of(prompt) is None:
            silent = replace(conversation, thinking=Thinking(enabled=False))
            other, _ = self.render(silent, finds_boundaries=False, limit=limit)
            if first_channel_of(other) is Channel.CONTENT:
                closed = other.removeprefix(prompt) if other.startswith(prompt) else NO_REASONING
        thinks = thinking.enabled is not False
        begun = begun_answer(turn, prompt, closed=closed, thinks=thinks)
        return replace(begun, opening=guarded(begun.opening))

    def _rendered(
        self, conversation: Conversation, arguments: dict[str, Any], *, finds_boundaries: bool
    ) -> tuple[str, PromptEnds]:
        if self.wants_turns or not self.takes_system:
            turns = in_turns(conversation.turns, keeps_system=self.takes_system)
            conversation = replace(conversation, turns=turns)
        if not self.takes_several_calls:
            conversation = replace(conversation, turns=with_calls_apart(conversation.turns))
        if not self.takes_text_beside_thoughts:
            conversation = replace(conversation, turns=with_text_in_thoughts(conversation.turns))
        for tool in arguments.get("tools", ()) if self.needs_descriptions else ():
            tool["function"].setdefault("description", "")
        arguments, marks = self._guarded(arguments), self._new_marks()
        late = self.takes_late_system
        alone = self.takes_no_user
        messages = self._guarded(template_messages(conversation, late, alone, marks))
        try:
            # Replace each call by the model's own text of it, if this text is known.
            written = self._render(messages, **arguments)
            prompt = marks.replace(written)
        except Exception:
            if not marks:
                raise
            # The template fails with marks, or moves or drops some, so render without marks.
            marks = self._new_marks()
            messages = self._guarded(template_messages(conversation, late, alone))
            prompt = written = self._render(messages, **arguments)
        system = list(takewhile(lambda message: message["role"] == "system", messages))
        after = conversation.turns_after_person
        person = 0 if after is None else len(messages) - after
        counts = (len(system), person, len(messages)) if finds_boundaries else (len(system), 0, 0)
        # Counts are often equal. The set avoids a second rendering of the same prefix.
        ends = {n: self._end_of(messages[:n], written, marks, arguments) for n in set(counts)}
        return prompt, PromptEnds(*(ends[n] for n in counts))

    def _end_of(
        self, part: list[Message], written: str, marks: CallMarks, arguments: dict[str, Any]
    ) -> int:
        """Return the length, in characters, of the prompt's prefix with only the messages ``part``,
        or 0 for an unknown length. ``written`` is the prompt with marks in place of calls."""
        try:
            end = common_chars(self._part_text(part, arguments), written)
            return len(marks.replace(written[:end], is_whole=False))
        except MarkError:
            return 0

    def _new_marks(self) -> CallMarks:
        if not self.is_harmony:
            return CallMarks(self._guarded)
        return CallMarks(lambda text: self._guarded(text).translate(SPELLED), HARMONY_CALL)

    def _guarded(self, value: GuardedT) -> GuardedT:
        guarded: GuardedT = self._special_tokens.guarded(value) if self.keeps_marks else value
        return guarded

    @property
    def _texts(self) -> list[str]:
        texts = (self._files.template(), self._files.template(for_tools=True))
        return list(dict.fromkeys(text for text in texts if text is not None))

    def _part_text(self, part: list[Message], arguments: dict[str, Any]) -> str:
        """Render only the messages ``part``. Return "" without messages, or if rendering fails."""
        # Some templates need a user's message after the system message.
        for more in ((), ({"role": "user", "content": STRANGE},)) if part else ():
            with suppress(Exception):
                return self._render([*part, *more], **arguments | {"add_generation_prompt": False})
        return ""

    def _render(self, messages: list[Message], **arguments: Any) -> str:
        text = self._files.template(for_tools="tools" in arguments)
        if text is None:
            raise ValueError("the model has no chat template for these messages")
        return render_template(text, messages, **{**self._files.special_tokens, **arguments})


def _arguments(conversation: Conversation) -> dict[str, Any]:
    """Return the template's arguments besides the messages. An unset argument is omitted, because a
    template may treat False differently."""
    arguments: dict[str, Any] = dict(conversation.template_arguments)
    if conversation.thinking.enabled is not None:
        arguments["enable_thinking"] = conversation.thinking.enabled
    if tools := conversation.shown_tools:
        arguments["tools"] = [tool.described for tool in tools]
    return arguments


def with_calls_apart(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Split each message with several calls, so that each call precedes its own result."""
    apart, rest = list[Turn](), deque(turns)
    while rest:
        turn = rest.popleft()
        apart.append(replace(turn, tool_calls=turn.tool_calls[:1]))
        if turn.tool_calls[1:]:
            results = list(takewhile(lambda result: result.tool_call_id is not None, rest))
            for call in turn.tool_calls:
                if call is not turn.tool_calls[0]:
                    apart.append(Turn("assistant", tool_calls=(call,)))
                own = [result for result in results if result.tool_call_id == call.id]
                apart += own
                for result in own:
                    results.remove(result)
                    rest.remove(result)
    return tuple(apart)


def in_turns(turns: Sequence[Turn], *, keeps_system: bool) -> tuple[Turn, ...]:
    """Join neighbouring messages of the same role, and make the first message after the system's a
    user's. Later system messages become users', and all of them unless ``keeps_system``."""
    joined: list[Turn] = []
    for turn in turns:
        before = joined[-1] if joined else None
        begins = before is None or before.role == "system"
        if turn.role == "system" and not (keeps_system and begins):
            turn = replace(turn, role="user")
        if begins and turn.role not in ("system", "user"):
            joined.append(Turn("user"))
        elif before is not None and before.role == turn.role and _is_plain(before, turn):
            text = f"{joined.pop().text}\n\n{turn.text}"
            turn = replace(turn, text=text, reasoning=before.reasoning + turn.reasoning)
        joined.append(turn)
    return tuple(joined)


def _is_plain(*turns: Turn) -> bool:
    """Return True if the turns are neither calls nor results."""
    return not any(turn.tool_calls or turn.tool_call_id for turn in turns)


def with_text_in_thoughts(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Append the text of each message with reasoning and calls to the reasoning."""
    return tuple(
        replace(turn, text="", reasoning=f"{turn.reasoning}\n\n{turn.text}")
        if turn.text and turn.reasoning and turn.tool_calls
        else turn
        for turn in turns
    )


def template_messages(
    conversation: Conversation,
    takes_late_system: bool,
    takes_no_user: bool = True,
    marks: CallMarks | None = None,
) -> list[Message]:
    """Return the conversation's turns as messages for a template. The first system turns become one
    message. If ``takes_late_system`` is False, later system turns become user messages. If
    ``takes_no_user`` is False and no user message exists, a lone system message becomes one;
    otherwise an empty one is added. ``marks`` replaces calls whose original text is known."""
    leading = list(takewhile(lambda turn: turn.role == "system", conversation.turns))
    messages = [_message(turn, marks) for turn in conversation.turns[len(leading) :]]
    for message in messages:
        if message["role"] == "system" and not takes_late_system:
            message["role"] = "user"
    if leading:
        system = "\n\n".join(turn.text for turn in leading)
        messages.insert(0, {"role": "system", "content": system})
    if not takes_no_user and not any(map(_is_question, messages)):
        if len(messages) == len(leading[:1]):
            messages[0]["role"] = "user"
        else:
            messages.insert(len(leading[:1]), {"role": "user", "content": ""})
    return messages


def _is_question(message: Message) -> bool:
    text = message["content"].strip()
    is_result = text.startswith(RESULT_OPEN) and text.endswith(RESULT_CLOSE)
    return message["role"] == "user" and not is_result


def _message(turn: Turn, marks: CallMarks | None) -> Message:
    message: Message = {"role": turn.role, "content": turn.text}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [_call(call, marks) for call in turn.tool_calls]
    if turn.tool_call_id is not None:
        message["tool_call_id"] = turn.tool_call_id
    return message


def _calling(*names: str) -> list[Message]:
    """Return a conversation with a call of each function, and the results."""
    turns = [Turn("tool", tool_call_id=name) for name in names]
    calls = tuple(ToolCall(name, name, "{}") for name in names)
    return [USER, *(_message(turn, None) for turn in (Turn("assistant", tool_calls=calls), *turns))]


def _call(call: ToolCall, marks: CallMarks | None) -> Message:
    if marks is not None and call.written is not None:
        mark = marks.add(call.written)
        function: Message = {"name": mark, "arguments": {}}
        if call.written[0] == START:
            # In Harmony, a result repeats the name of its call.
            function = {"name": call.name, "arguments": {mark: ""}}
    else:
        function = {"name": call.name, "arguments": arguments_object(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def arguments_object(text: str) -> dict[str, Any]:
    """Parse arguments that a client sent. Text that is no JSON object becomes one argument."""
    if not text.strip():
        return {}
    arguments = json_object(text)
    return {"arguments": text} if arguments is None else arguments


def common_chars(one: str, other: str) -> int:
    """Return the length of the two texts' longest common prefix."""
    lengths = range(1, min(len(one), len(other)) + 1)
    return bisect_left(lengths, True, key=lambda length: one[:length] != other[:length])
