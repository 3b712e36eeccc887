"""Read answers in Harmony, the format of gpt-oss: messages with headers, in three channels.

An answer goes on after ``<|start|>assistant``, and is written without these line breaks::

    <|channel|>analysis<|message|>The reasoning.<|end|>
    <|start|>assistant<|channel|>commentary<|message|>A text before calls.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>The answer.<|return|>

The recipient may also come before the channel. Format: github.com/openai/harmony, docs/format.md.

Models write faulty headers, at which other parsers fail (openai/harmony#38, vllm#32587). Here any
header has a meaning, and no header becomes text. A call needs a recipient that is one of the tools.
Text is for people in the channel ``final``, and in ``commentary`` or without a channel if it has no
recipient. All else is reasoning: messages to tools that nobody offers, and unknown channels."""

import re

from server.text.calls.hermes import JsonMender
from server.text.calls.tool_format import is_called, new_call_id
from server.text.calls.written import Remember, WrittenCall
from server.text.conversation import Channel, Tool
from server.text.pieces import AnswerPiece, TextPiece, ToolCallArguments, ToolCallStart

NAMES = ("start", "channel", "constrain", "message", "end", "call", "return")
TOKENS = tuple(f"<|{name}|>" for name in NAMES)
# The pipeline reads each of these tokens as a sign, a lone surrogate. A text that only spells a
# token has none, because no decoded text contains surrogates.
SIGNS = {token: chr(0xD800 + number) for number, token in enumerate(TOKENS)}
SPELLED = str.maketrans({sign: token for token, sign in SIGNS.items()})
START, CHANNEL, CONSTRAIN, MESSAGE, *_ = SIGNS.values()
SIGN = re.compile(f"([{START}-{SIGNS[TOKENS[-1]]}])")
# The last two tokens end an answer.
ANSWER_ENDS = TOKENS[-2:]
RECIPIENT = re.compile(rf"\bto=([^\s{START}-\udfff]+)")
CHANNEL_NAME = re.compile(rf"{CHANNEL}\W*(analysis|commentary|final)")
FUNCTIONS = "functions."
ANSWERER = "assistant"
# A header is far shorter. Of a longer one, or of text between messages, the end is read.
MAX_HEADER_CHARS = 1024
BETWEEN_MESSAGES = "\n\n"


class HarmonyCall:
    """Reads a call's arguments, which it repairs as they stream in. A text that is no object stays
    as it is."""

    def __init__(self, index: int, name: str, header: str) -> None:
        """``header`` comes after the token that starts the message."""
        self.start = ToolCallStart(index, new_call_id(), name)
        self._json = JsonMender()
        self._is_object: bool | None = None
        """It is None before the first visible character."""
        self._told: list[str] = []
        self._text = [f"{START}{ANSWERER}{header.removeprefix(ANSWERER)}{MESSAGE}"]

    def feed(self, text: str) -> list[AnswerPiece]:
        self._text.append(text)
        if self._is_object is None:
            text = text.lstrip()
            self._is_object = text.startswith("{") if text else None
        if not self._is_object:
            return self._tell(text)
        return self._tell(
            "".join(self._json.feed(each) for each in text if not self._json.is_whole)
        )

    def finish(self, *, cut: bool) -> list[AnswerPiece]:
        """Return the last pieces. If the answer was cut off (``cut``), repair nothing."""
        if self._is_object:
            return self._tell(self._json.unread if cut else self._json.end())
        return self._tell("{}" if self._is_object is None and not cut else "")

    @property
    def is_whole(self) -> bool:
        """True if the arguments are a complete object."""
        return bool(self._is_object) and self._json.is_whole

    @property
    def written(self) -> WrittenCall:
        """The complete call, whose text has signs in place of tokens."""
        start, text = self.start, "".join([*self._text, SIGNS["<|call|>"]])
        return WrittenCall(start.id, start.name, "".join(self._told), text)

    def _tell(self, arguments: str) -> list[AnswerPiece]:
        self._told.append(arguments)
        return [ToolCallArguments(self.start.index, arguments)] if arguments else []


class HarmonyMessages:
    """Reads an answer's messages: a stage of the pipeline, in place of Reasoning and Calls.

    Texts of several messages in one channel are kept apart by a blank line."""

    def __init__(
        self,
        tools: tuple[Tool, ...],
        first_channel: Channel | None,
        max_calls: int | None = None,
        remember: Remember | None = None,
    ) -> None:
        """``first_channel`` is the channel of the message that the prompt has opened, or None if
        the answer begins with a header. ``remember`` stores each complete call."""
        self.count = 0
        """The number of complete calls up to now."""
        self._tools = tools
        self._max_calls = max_calls
        self._remember = remember
        self._header = ""
        self._channel = first_channel
        """The channel of the open message. It is None in headers and calls."""
        self._call: HarmonyCall | None = None
        self._used = {first_channel}
        self._before = ""
        """The text before the first text of the open message."""

    @property
    def in_header(self) -> bool:
        return self._channel is None and self._call is None

    @property
    def is_open(self) -> bool:
        """True while the model is reasoning."""
        return self._channel is Channel.REASONING

    @property
    def done(self) -> bool:
        """True if the answer has the last call that is allowed. Further text is ignored."""
        return self.count == self._max_calls

    @property
    def ended_with_calls(self) -> bool:
        """At the answer's end, True if the answer has calls and the last call is complete."""
        return self.count > 0 and self._call is None

    def feed(self, piece: AnswerPiece) -> list[AnswerPiece]:
        assert isinstance(piece, TextPiece)
        pieces: list[AnswerPiece] = []
        for part in SIGN.split(piece.text):
            if self.done:
                break
            pieces += self._take_sign(part) if SIGN.match(part) else self._take_text(part)
        return pieces

    def finish(self, *, cut: bool) -> list[AnswerPiece]:
        """Return the last pieces. ``cut`` is True if the answer was cut off."""
        if self._call is None:
            return []
        return self._end_message() if self._call.is_whole else self._call.finish(cut=cut)

    def _take_sign(self, sign: str) -> list[AnswerPiece]:
        if self.in_header and sign == MESSAGE:
            return self._begin_message()
        if self.in_header:
            self._header += sign
        if self.in_header or sign in (MESSAGE, CONSTRAIN):
            return []
        # A message without an end ends where the next header begins.
        self._header = sign
        return self._end_message()

    def _end_message(self) -> list[AnswerPiece]:
        call, self._call, self._channel = self._call, None, None
        if call is None:
            return []
        self.count += 1
        pieces = call.finish(cut=False)
        if self._remember is not None:
            self._remember(call.written)
        return pieces

    def _begin_message(self) -> list[AnswerPiece]:
        header = self._header.rpartition(START)[2]
        recipient, channel = RECIPIENT.search(header), CHANNEL_NAME.search(header)
        if recipient is not None:
            name = recipient[1].removeprefix(FUNCTIONS)
            if is_called(name, self._tools):
                self._call = HarmonyCall(self.count, name, header)
                return [self._call.start]
        is_plain = CHANNEL not in header and header.strip() in ("", ANSWERER)
        named = "commentary" if is_plain else channel and channel[1]
        is_shown = named == "final" or (named == "commentary" and recipient is None)
        self._channel = Channel.CONTENT if is_shown else Channel.REASONING
        self._before = BETWEEN_MESSAGES if self._channel in self._used else ""
        return []

    def _take_text(self, text: str) -> list[AnswerPiece]:
        if self._call is not None:
            return self._call.feed(text)
        if self._channel is None:
            self._header = (self._header + text)[-MAX_HEADER_CHARS:]
            return []
        if not text:
            return []
        self._used.add(self._channel)
        text, self._before = self._before + text, ""
        return [TextPiece(self._channel, text)]
