"""The pipeline that turns the tokens of one answer into deltas.

Four stages follow each other: Detokenize makes characters of tokens, Reasoning splits the reasoning
off, Calls finds tool calls, and Stop ends the answer at a stop string. In Harmony, HarmonyMessages
does the work of the second and the third. Each stage holds back what later text may change until
its ``finish``. The deltas are the same wherever the text is cut."""

from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from re import Match
from types import MappingProxyType

from engine.types import (
    DraftReport,
    FinishReason,
    PrefixReport,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)
from server.text.calls.hermes import HermesCall
from server.text.calls.tool_format import CALL_CLOSE, CALL_OPEN, OPENERS, OPENING, ToolFormat
from server.text.calls.written import Remember, WrittenCall
from server.text.calls.xml import XmlCall
from server.text.conversation import THINK_CLOSE, THINK_OPEN, Channel, Tool, first_channel_of
from server.text.harmony import HarmonyMessages
from server.text.pieces import (
    AnswerPiece,
    Delta,
    TextPiece,
    TokenReport,
    ToolCallArguments,
    ToolCallStart,
    join_pieces,
)
from server.text.tokenizer import EncodedText, Tokenizer

# A client may begin an answer with an unfinished call, which is recognised up to this length.
MAX_BEGUN_CHARS = 1024


class GenerationError(Exception):
    """Raised if a fault of the engine ended a request. The message may be sent to the client."""


@dataclass(frozen=True, slots=True)
class ParseOptions:
    """Rules for parsing the answer to a chat."""

    prompt: str
    """The rendered prompt. Its end shows if the model is already reasoning."""
    tools: tuple[Tool, ...] = ()
    """The tools that may be called. Without tools, calls are content."""
    tool_format: ToolFormat = ToolFormat.HERMES
    max_calls: int | None = None
    """The number of calls after which the answer ends. None means no limit."""
    remember: Remember | None = field(default=None, compare=False)
    """A function that stores each complete call."""
    begun: str = ""
    """The beginning of the answer that the client has written. No piece contains it."""

    @property
    def first_channel(self) -> Channel | None:
        return first_channel_of(self.prompt, self.begun)

    @property
    def begun_content(self) -> str:
        """The beginning of the content that the client has written, or "" if it is reasoning."""
        return self.begun if self.first_channel is Channel.CONTENT else ""


class TextPipeline:
    """Turns the token events of one answer into deltas."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        stop: tuple[str, ...] = (),
        options: ParseOptions | None = None,
        index: int = 0,
    ) -> None:
        """Without ``options``, the whole answer is content. ``index`` is the answer's index."""
        self._reasoning: Reasoning | HarmonyMessages | None = None
        self._calls: Calls | HarmonyMessages | None = None
        is_harmony = options is not None and options.tool_format is ToolFormat.HARMONY
        if options is not None and is_harmony:
            self._reasoning = self._calls = HarmonyMessages(
                options.tools, options.first_channel, options.max_calls, options.remember
            )
        elif options is not None:
            self._reasoning = Reasoning(options)
            self._calls = Calls(options) if options.tools else None
        self._detokenize = Detokenize(
            tokenizer,
            with_tags=options is not None,
            signs=tokenizer.signs if is_harmony else MappingProxyType({}),
            continues=options is None or bool(options.begun),
        )
        self._stop = Stop(stop)
        stages = dict.fromkeys((self._reasoning, self._calls, self._stop))
        self._stages = [stage for stage in stages if stage is not None]
        self._params = params
        self._index = index
        self._begun = False
        self._held: list[TokenReport] = []
        """Content tokens with log-probabilities whose text is held back."""
        self._num_calls = 0
        """The number of complete calls, whose tokens have left ``_held``."""
        self._finish_reason: str | None = None
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.prefix: PrefixReport | None = None
        self.drafts: DraftReport | None = None

    @property
    def finished(self) -> bool:
        return self._finish_reason is not None

    def feed(self, events: list[TokenEvent]) -> Delta:
        """Take in events and return the new part of the answer. Ignore events after the answer's
        end. Raises GenerationError."""
        pieces: list[AnswerPiece] = []
        tokens: list[TokenReport] = []
        ids: list[int] = []
        scored: tuple[TokenLogprobs | None, ...] = ()
        for event in events:
            if event.finish in (FinishReason.ERROR, FinishReason.ABORTED):
                raise GenerationError(event.message or "the request was aborted")
            self._begun = True
            self.prefix = self.prefix or event.prefix
            self.drafts = event.drafts or self.drafts
            scored = event.prompt_logprobs or scored
            if event.token_id is None:
                assert self._params.max_tokens == 0, "only a fault comes without a token"
            else:
                ids.append(event.token_id)
                pieces += self._take_token(event.token_id, event.logprobs, tokens)
            if event.finish is not None or self._ended:
                pieces += self._end(event.finish)
                break
        return self._delta(pieces, tokens, tuple(ids), scored)

    def finish(self) -> Delta:
        """End an answer whose time is over, as at its maximum length. Return the last delta. Raises
        GenerationError if requested prompt log-probabilities are missing."""
        if self._params.prompt_logprobs is not None and not self._begun:
            raise GenerationError("the time of the request was over before it was read")
        return self._delta(self._end(FinishReason.LENGTH), [])

    def _delta(
        self,
        pieces: list[AnswerPiece],
        tokens: list[TokenReport],
        ids: tuple[int, ...] = (),
        scored: tuple[TokenLogprobs | None, ...] = (),
    ) -> Delta:
        reason, stop_string = self._finish_reason, self._stop.matched
        joined = join_pieces(pieces)
        return Delta(joined, tokens, reason, self._index, stop_string, ids, scored, self.prefix)

    @property
    def _ended(self) -> bool:
        """True if a stop string or the last allowed call has ended the answer."""
        return self._stop.matched is not None or (self._calls is not None and self._calls.done)

    def _take_token(
        self, token_id: int, logprobs: TokenLogprobs | None, tokens: list[TokenReport]
    ) -> list[AnswerPiece]:
        """Feed a token to the stages. Add it to ``tokens`` if it has log-probabilities and belongs
        to no header."""
        thinking = self._reasoning is not None and self._reasoning.is_open
        in_header = self._in_header
        self.completion_tokens += 1
        self.reasoning_tokens += thinking
        if token_id in self._params.stop_token_ids and token_id not in self._detokenize.signs:
            # A stop token is no part of the answer, but raw completions report its logprobs.
            if logprobs is not None and self._reasoning is None:
                tokens.append(TokenReport(token_id, logprobs, self._detokenize.chars))
            return []
        pieces = _text(Channel.CONTENT, self._detokenize.feed(token_id))
        for stage in self._stages:
            pieces = [new for piece in pieces for new in stage.feed(piece)]
        if logprobs is not None and not in_header and not self._in_header:
            tokens.append(TokenReport(token_id, logprobs, self._detokenize.offset))
            self._held += [] if thinking else tokens[-1:]
        return self._with_tokens(pieces)

    @property
    def _in_header(self) -> bool:
        return isinstance(self._reasoning, HarmonyMessages) and self._reasoning.in_header

    def _end(self, finish: FinishReason | None) -> list[AnswerPiece]:
        """Finish all stages and return the last pieces. ``finish`` is the engine's reason."""
        stopped = self._ended or finish is FinishReason.STOP
        pieces = _text(Channel.CONTENT, self._detokenize.finish())
        for stage in self._stages:
            pieces = [new for piece in pieces for new in stage.feed(piece)]
            pieces += stage.finish(cut=not stopped)
        has_calls = self._calls is not None and self._calls.ended_with_calls
        if self._stop.matched is not None:
            has_calls = self._stop.has_calls  # calls after a stop string do not count
        self._finish_reason = "length"
        if stopped or self._ended:
            self._finish_reason = "tool_calls" if has_calls else "stop"
        return self._with_tokens(pieces)

    def _with_tokens(self, pieces: list[AnswerPiece]) -> list[AnswerPiece]:
        """Return the pieces. The first text piece gets the tokens whose text was held back."""
        if self._calls is not None and self._calls.count > self._num_calls:
            self._num_calls = self._calls.count
            # The tokens in _held belong to a call. Only the last may also have text after the call.
            self._held = self._held[-1:] if pieces else []
        if not pieces or not self._held:
            return pieces
        first, held = pieces[0], tuple(self._held)
        self._held.clear()
        if not isinstance(first, TextPiece):
            return pieces
        return [replace(first, tokens=held), *pieces[1:]]


class Detokenize:
    """Decodes tokens to whole characters. The joined texts of ``feed`` and ``finish`` equal the
    text that the tokenizer decodes from all ids, except near bytes that form no character."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        with_tags: bool = False,
        with_special: bool = False,
        signs: Mapping[int, str] = MappingProxyType({}),
        continues: bool = False,
    ) -> None:
        """``with_tags`` keeps the tags around reasoning and calls. ``with_special`` keeps all
        special tokens. ``signs`` replaces tokens by one character each. ``continues`` keeps a
        leading space, because the answer continues a text."""
        self.chars = 0
        """The number of characters that ``feed`` has returned."""
        self.offset = 0
        """The number of characters before the first character of the token that was fed last."""
        self._tokenizer = tokenizer
        self.signs = signs
        tags = tokenizer.special_tag_ids if with_tags else frozenset[int]()
        self._hidden = frozenset[int]() if with_special else tokenizer.special_ids - tags
        # The UTF-8 decoder holds the bytes of one character at most, so a token's cost is constant.
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")
        self._is_whole = True
        self._drops_space = tokenizer.drops_space and not continues

    def feed(self, token_id: int) -> str:
        """Take in a token and return the text that it completes, which may be empty."""
        self.offset = self.chars
        if token_id in self.signs:
            self._is_whole = True
            return self.finish() + self.signs[token_id]
        raw = b"" if token_id in self._hidden else self._tokenizer.token_bytes(token_id)
        if not raw:
            return ""
        if self._drops_space:
            self._drops_space = False
            raw = raw.removeprefix(b" ")
        if self._is_whole and raw.isascii():
            self.chars += len(raw)
            return raw.decode("ascii")
        text = self._decoder.decode(raw[:1])
        # If a U+FFFD replaces an earlier incomplete character, the token begins after the U+FFFD.
        self.offset += len(text) - (not self._decoder.getstate()[0])
        text += self._decoder.decode(raw[1:])
        self._is_whole = not self._decoder.getstate()[0]
        self.chars += len(text)
        return text

    def finish(self) -> str:
        """Return U+FFFD if the last character is incomplete, and else ""."""
        return self._decoder.decode(b"", final=True)


def decoded_text(tokenizer: Tokenizer, ids: Sequence[int]) -> EncodedText:
    """Decode ids to text with special tokens. A long list takes long, so use a thread for it."""
    detokenize = Detokenize(tokenizer, with_special=True)
    pieces, offsets = list[str](), list[int]()
    for token_id in ids:
        pieces.append(detokenize.feed(token_id))
        offsets.append(detokenize.offset)
    return EncodedText("".join([*pieces, detokenize.finish()]), tuple(ids), tuple(offsets))


class Reasoning:
    """Splits ``<think>...</think>`` off the beginning of an answer.

    White space around the tags is dropped. If neither the prompt nor the answer has an opening tag,
    the answer is content. Without a closing tag, the text after the opening tag is reasoning."""

    def __init__(self, options: ParseOptions) -> None:
        self._channel = options.first_channel
        self._begun = self._channel is Channel.CONTENT or bool(options.begun.strip())
        """True after the first visible character of the channel."""
        self._held = ""

    @property
    def is_open(self) -> bool:
        """True while the model is reasoning."""
        return self._channel is Channel.REASONING

    def feed(self, piece: AnswerPiece) -> list[AnswerPiece]:
        assert isinstance(piece, TextPiece)
        self._held += piece.text
        return self._advance(final=False)

    def finish(self, *, cut: bool) -> list[AnswerPiece]:
        del cut  # Reasoning without an end stays reasoning.
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        if self._channel is None:
            text = self._held.lstrip()
            if not text.startswith(THINK_OPEN) and THINK_OPEN.startswith(text) and not final:
                return pieces
            self._channel = Channel.CONTENT
            if text.startswith(THINK_OPEN):
                self._channel = Channel.REASONING
                self._held = text[len(THINK_OPEN) :]
            else:
                self._begun = True
        if self._channel is Channel.REASONING:
            pieces += self._take_reasoning(final)
        if self._channel is Channel.CONTENT:
            text, self._held = self._held, ""
            pieces += self._piece(Channel.CONTENT, text)
        return pieces

    def _take_reasoning(self, final: bool) -> list[AnswerPiece]:
        reasoning, closed, rest = self._held.partition(THINK_CLOSE)
        if closed:
            pieces = self._piece(Channel.REASONING, reasoning.rstrip())
            self._held, self._channel, self._begun = rest, Channel.CONTENT, False
            return pieces
        end = len(reasoning) - (0 if final else longest_beginning(reasoning, THINK_CLOSE))
        certain = reasoning[:end].rstrip()
        self._held = reasoning[len(certain) :]
        return self._piece(Channel.REASONING, certain)

    def _piece(self, channel: Channel, text: str) -> list[AnswerPiece]:
        text = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(text)
        return _text(channel, text)


class Calls:
    """Finds calls in the content, and at the end of the reasoning, where some models write them.

    Calls in the reasoning that content follows are a draft, and stay reasoning."""

    def __init__(self, options: ParseOptions) -> None:
        self._content = ContentCalls(options)
        self._drafts = DraftCalls(options)

    @property
    def count(self) -> int:
        return self._content.count

    @property
    def done(self) -> bool:
        """True if the answer has the last call that is allowed. Further text is ignored."""
        return self._content.done

    @property
    def ended_with_calls(self) -> bool:
        """At the answer's end, True if the answer has calls and the last call is complete."""
        return self.done or (self.count > 0 and not self._content.is_in_call)

    def feed(self, piece: AnswerPiece) -> list[AnswerPiece]:
        assert isinstance(piece, TextPiece)
        if piece.channel is Channel.REASONING:
            return _text(Channel.REASONING, self._drafts.feed(piece.text))
        reasoning, _ = self._drafts.finish(cut=True)
        return _text(Channel.REASONING, reasoning) + self._content.feed(piece.text)

    def finish(self, *, cut: bool) -> list[AnswerPiece]:
        """Return the last pieces. ``cut`` is True if the answer was cut off."""
        reasoning, calls = self._drafts.finish(cut=cut)
        pieces = _text(Channel.REASONING, reasoning) + self._content.feed(calls)
        return pieces + self._content.finish(cut=cut)


class ContentCalls:
    """Finds calls in content. White space between calls, and the line break that templates write
    before a call, are dropped."""

    def __init__(self, options: ParseOptions) -> None:
        self.count = 0
        """The number of complete calls up to now."""
        self._options = options
        self._is_xml = options.tool_format is ToolFormat.XML
        self._call: HermesCall | XmlCall | None = None
        self._call_pieces: list[AnswerPiece] = []
        self._call_text = ""
        self._opener = ""
        self._held = ""
        self._space = ""
        begun = options.begun_content
        self._has_content = bool(begun.strip())
        """True if the content since the last call has more than white space."""
        self._begins_line = not begun or (self._is_xml and begun.endswith("\n"))
        """True if the text that is held back begins a line."""

    @property
    def is_in_call(self) -> bool:
        """True if the text that was fed ends within a possible call."""
        return self._call is not None

    @property
    def done(self) -> bool:
        return self.count == self._options.max_calls

    def feed(self, text: str) -> list[AnswerPiece]:
        self._held += text
        return self._advance(final=False)

    def finish(self, *, cut: bool) -> list[AnswerPiece]:
        return self._advance(final=True, cut=cut)

    def _advance(self, *, final: bool, cut: bool = True) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        while not self.done:
            if self._call is None:
                pieces += self._take_text(final)
            if self._call is None:
                break
            pieces += self._take_call(self._call, final, cut)
            if self._call is not None:
                break
        return pieces

    def _take_text(self, final: bool) -> list[AnswerPiece]:
        """Take text up to the next call. Return content that later text cannot change."""
        opening = first_opening(self._options.tool_format, self._held, self._begins_line)
        if opening is not None:
            place, self._opener = opening.start(1), opening[1]
            text = self._before_a_call(self._held[:place])
            self._space = self._held[len(text) : place]
            self._held = self._held[place + len(self._opener) :]
            self._call, self._call_text, self._call_pieces = self._new_call(), self._opener, []
            return self._text(text)
        text = self._held
        if not final:
            keep = longest_beginning(text, *OPENERS)
            text = self._before_a_call(text[: len(text) - keep])
        self._held = self._held[len(text) :]
        return self._text(text)

    def _take_call(self, call: HermesCall | XmlCall, final: bool, cut: bool) -> list[AnswerPiece]:
        fed, self._held = self._held, ""
        pieces = call.feed(fed)
        if final and call.rest is None:
            pieces += call.finish(cut=cut)
        self._call_text += fed
        self._call_pieces += pieces
        if call.complete and self.count + 1 == self._options.max_calls:
            self._remember(call.unread if call.rest is None else call.rest, call.closing)
            self.count += 1
        elif call.rest is not None:
            self._call, self._held = None, call.rest
            if call.started:
                self._remember(call.rest, "")
                self.count += 1
                self._has_content, self._begins_line = False, True
            else:
                pieces += self._text(self._space + self._opener)
                self._begins_line = False
        return pieces

    def _remember(self, unread: str, closing: str) -> None:
        """Store the call for later prompts, unless its closing tag is missing. ``unread`` is the
        text after the call. ``closing`` ends a call whose answer ends before the closing tag."""
        text = self._call_text[: len(self._call_text) - len(unread)]
        text += "" if text.endswith(CALL_CLOSE) else closing
        if self._options.remember is None or not text.endswith(CALL_CLOSE):
            return
        start, *arguments = join_pieces(self._call_pieces)
        assert isinstance(start, ToolCallStart)
        written = "".join(part.text for part in arguments if isinstance(part, ToolCallArguments))
        self._options.remember(WrittenCall(start.id, start.name, written, text))

    def _new_call(self) -> HermesCall | XmlCall:
        tools, tool_format = self._options.tools, self._options.tool_format
        if self._is_xml:
            return XmlCall(self.count, tools, self._opener)
        return HermesCall(self.count, tools, tool_format)

    def _before_a_call(self, text: str) -> str:
        """Return the text without white space at the end that belongs to the next call."""
        return text.removesuffix("\n") if self._has_content or text.strip() else ""

    def _text(self, text: str) -> list[AnswerPiece]:
        if self.count and not self._has_content:
            text = text.lstrip()
        self._has_content = self._has_content or bool(text.strip())
        # Text that is sent never ends with a line break, so no new line begins after sent text.
        self._begins_line = self._begins_line and not text
        return _text(Channel.CONTENT, text)


class DraftCalls:
    """Holds back the end of the reasoning if it may be calls."""

    def __init__(self, options: ParseOptions) -> None:
        self._options = ParseOptions("", options.tools, options.tool_format)
        self._held = ""
        self._begins_line = True
        self._trial: ContentCalls | None = None
        """Reads the text that is held back, from the opening tag of a call on."""

    def feed(self, text: str) -> str:
        """Take in reasoning. Return the part that cannot belong to calls at the reasoning's end."""
        self._held += text
        certain = ""
        while True:
            if self._trial is None:
                opening = first_opening(self._options.tool_format, self._held, self._begins_line)
                end = len(self._held) - longest_beginning(self._held, *OPENERS)
                end = end if opening is None else opening.start(1)
                certain += self._take(len(self._held[:end].rstrip()))
                if opening is None:
                    return certain
                self._trial, text = ContentCalls(self._options), self._held
            if not _has_text(self._trial.feed(text)):
                return certain
            # This tag does not begin a call, but a later tag may begin a call.
            self._trial = None
            certain += self._take(len(self._held) - len(self._held.lstrip()) + 1)

    def finish(self, *, cut: bool) -> tuple[str, str]:
        """Return the rest of the reasoning, and the text of calls at the reasoning's end. If the
        answer was cut off (``cut``), the text of calls is empty."""
        trial, held = self._trial, self._take(len(self._held))
        self._trial = None
        if cut or trial is None or _has_text(trial.finish(cut=True)) or trial.is_in_call:
            return held, ""
        return "", held

    def _take(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._begins_line = self._begins_line and not text
        return text


class Stop:
    """Ends the answer before a stop string in the content. Holds back text that may begin one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops)
        self._stops = stops
        self._held = ""
        self.has_calls = False
        """True if a call came before the stop string."""
        self.matched: str | None = None
        """The stop string that has ended the answer, or None while there is none."""

    def feed(self, piece: AnswerPiece) -> list[AnswerPiece]:
        if self.matched is not None:
            return []
        if not isinstance(piece, TextPiece) or piece.channel is Channel.REASONING:
            self.has_calls = self.has_calls or isinstance(piece, ToolCallStart)
            return [*self.finish(cut=False), piece]
        held = self._held + piece.text
        places = [(held.find(stop), stop) for stop in self._stops]
        matches = [(place + len(stop), place, stop) for place, stop in places if place >= 0]
        if matches:
            # Choose the stop string that ends first, so that cuts of the fed texts do not matter.
            _, place, self.matched = min(matches)
            self._held = ""
            return _text(Channel.CONTENT, held[:place])
        keep = longest_beginning(held, *self._stops)
        self._held = held[len(held) - keep :]
        return _text(Channel.CONTENT, held[: len(held) - keep])

    def finish(self, *, cut: bool) -> list[AnswerPiece]:
        del cut  # The beginning of a stop string is content in any case.
        rest, self._held = self._held, ""
        return _text(Channel.CONTENT, rest)


def ends_in_call(text: str, tools: tuple[Tool, ...], tool_format: ToolFormat) -> bool:
    """Return True if a text ends within a possible call. Texts may be long, so the search reads
    only the last opening tag and ``MAX_BEGUN_CHARS`` after it."""
    *_, last = (0, *(each.start(1) for each in OPENING[tool_format].finditer(text)))
    calls = ContentCalls(ParseOptions("", tools, tool_format))
    if CALL_CLOSE not in text[last:]:
        calls.feed(text[last : last + MAX_BEGUN_CHARS])
    return calls.is_in_call


def first_opening(tool_format: ToolFormat, text: str, begins_line: bool) -> Match[str] | None:
    """Return the first place at which a call may begin. An opening tag other than CALL_OPEN must
    begin a line."""
    openings = OPENING[tool_format].finditer(text)
    return next((o for o in openings if o[1] == CALL_OPEN or o.start() or begins_line), None)


def longest_beginning(text: str, *starts: str) -> int:
    """Return the length of the longest end of ``text`` that could grow to one of ``starts``."""
    longest = 0
    for each in starts:
        place = text.find(each[0], max(0, len(text) - len(each) + 1))
        while place >= 0 and not each.startswith(text[place:]):
            place = text.find(each[0], place + 1)
        if place >= 0:
            longest = max(longest, len(text) - place)
    return longest


def _text(channel: Channel, text: str) -> list[AnswerPiece]:
    return [TextPiece(channel, text)] if text else []


def _has_text(pieces: list[AnswerPiece]) -> bool:
    return any(isinstance(piece, TextPiece) for piece in pieces)
