"""Generate answers: turn prompts into pieces of text, independently of any API's wire format."""

import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from engine.client import TokenStream
from engine.serving import ServingEngine
from engine.types import (
    FinishReason,
    PrefixReport,
    SamplingParams,
    Submission,
    TokenEvent,
    TokenLogprobs,
)
from server.metrics.answer_times import AnswerTimes, Latencies, RequestTimes
from server.protocol.common import current_request_id
from server.text.conversation import Channel
from server.text.detokenizer import Detokenizer
from server.text.parser import AnswerParser, ParseOptions, StopStrings
from server.text.pieces import (
    AnswerPiece,
    Delta,
    TextPiece,
    TokenReport,
    ToolCallStart,
    Usage,
    join_pieces,
)
from server.text.reasoning_cache import ReasoningRecorder
from server.text.tokenizer import Tokenizer


class GenerationError(Exception):
    """Raised if a fault of the engine ended a request. The message may be sent to the client."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for the engine, with the rules for parsing the answers to it."""

    submission: Submission
    stop: tuple[str, ...] = ()
    parse_options: ParseOptions | None = None
    """Rules for parsing a chat's answer. With None, the whole answer is content."""
    new_recorder: Callable[[], ReasoningRecorder] | None = None
    """Makes a recorder of each answer's reasoning. With None, no reasoning is recorded."""
    not_enforced: tuple[str, ...] = ()
    """Keywords of the answer's schema that are not enforced, with their places in the schema."""

    @property
    def ids(self) -> tuple[int, ...]:
        return self.submission.prompt_ids

    @property
    def params(self) -> SamplingParams:
        """The first answer's sampling parameters. Only the seed of later answers differs."""
        return self.submission.params[0]


class Generation:
    """An answer that is being generated."""

    def __init__(
        self,
        stream: TokenStream,
        tokenizer: Tokenizer,
        prompt: Prompt,
        times: AnswerTimes,
        index: int = 0,
    ) -> None:
        self.stream = stream
        self.times = times
        self._index = index
        options = prompt.parse_options
        self._detokenizer = Detokenizer(
            tokenizer,
            with_tags=options is not None,
            continues=options is None or bool(options.begun),
        )
        self._stop = StopStrings(prompt.stop)
        self._parser = None if options is None else AnswerParser(options)
        self._recorder = prompt.new_recorder() if prompt.new_recorder is not None else None
        self._stop_token_ids = prompt.params.stop_token_ids
        self._held: list[TokenReport] = []
        """Content tokens whose text is held back, because the text may begin a stop string."""
        self._calls = 0
        self._has_calls = False
        self._max_tokens = prompt.params.max_tokens
        self._scores_prompt = prompt.params.prompt_logprobs is not None
        self._begun = False
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.prefix: PrefixReport | None = None
        self.finished = False

    def take(self, events: list[TokenEvent]) -> Delta:
        """Return the new part of the answer, from ``events``. Raises GenerationError."""
        pieces: list[AnswerPiece] = []
        tokens: list[TokenReport] = []
        scored: tuple[TokenLogprobs | None, ...] = ()
        ids: tuple[int, ...] = ()
        for event in events:
            if event.finish in (FinishReason.ERROR, FinishReason.ABORTED):
                raise GenerationError(event.message or "the request was aborted")
            self._begun = True
            self.prefix = self.prefix or event.prefix
            scored = event.prompt_logprobs or scored
            pieces += self._with_tokens(self._split(self._take_token(event, tokens)))
            ids += () if event.token_id is None else (event.token_id,)
            if event.finish is not None or self._cut:
                delta = self._end(event.finish, pieces, tokens)
                break
        else:
            self._note(pieces)
            delta = Delta(join_pieces(pieces), tokens, None, self._index)
        return self._deliver(replace(delta, prompt=scored, token_ids=ids, prefix=self.prefix))

    def _deliver(self, delta: Delta) -> Delta:
        if self.prefix is not None:
            self.times.cached_tokens = self.prefix.cached_tokens
        self.times.delivered(self.completion_tokens, delta.finish)
        return delta

    def cut_off(self) -> Delta:
        """End an answer whose time is over; treat it like an answer of maximum length. Return the
        last delta. Raises GenerationError if requested prompt log-probabilities are missing."""
        if self._scores_prompt and not self._begun:
            raise GenerationError("the time of the request was over before it was read")
        return self._deliver(self._end(FinishReason.LENGTH, [], []))

    def _held_back(self, *, cut: bool) -> list[AnswerPiece]:
        """Return the pieces of the text that was held back as a possible stop string or tag."""
        pieces = self._split(self._detokenizer.flush())
        if self._parser is not None:
            pieces += self._before_stop(self._parser.flush(cut=cut))
        return pieces + self._content(self._stop.flush())

    def _end(
        self, finish: FinishReason | None, pieces: list[AnswerPiece], tokens: list[TokenReport]
    ) -> Delta:
        """End the answer and return its last delta. ``finish`` is the engine's reason, if any."""
        self.finished = True
        self.stream.close()
        stopped = self._cut or finish is FinishReason.STOP
        pieces = pieces + self._with_tokens(self._held_back(cut=not stopped))
        reason = "stop" if stopped or self._cut else "length"
        calls = self._parser is not None and self._parser.ended_with_calls
        if self._stop.matched is not None:
            calls = self._has_calls  # calls after a stop string do not count
        if reason == "stop" and calls:
            reason = "tool_calls"
        self._note(pieces)
        if self._recorder is not None:
            self._recorder.end()
        return Delta(join_pieces(pieces), tokens, reason, self._index, self._stop.matched)

    def _note(self, pieces: list[AnswerPiece]) -> None:
        if self._recorder is not None:
            self._recorder.add(pieces)

    @property
    def _cut(self) -> bool:
        """True if a stop string or the last allowed call has ended the answer."""
        done = self._parser is not None and self._parser.done
        return done or self._stop.matched is not None

    def _take_token(self, event: TokenEvent, tokens: list[TokenReport]) -> str:
        """Record an event's token in ``tokens``, and return the text that the token completes."""
        if event.token_id is None:
            assert self._max_tokens == 0, "only a fault comes without a token"
            return ""
        thinking = self._parser is not None and self._parser.reasoning
        self.completion_tokens += 1
        self.reasoning_tokens += thinking
        if event.token_id in self._stop_token_ids:
            # A stop token is no part of the answer, but raw completions report its logprobs.
            if event.logprobs is not None and self._parser is None:
                report = TokenReport(event.token_id, event.logprobs, self._detokenizer.chars)
                tokens.append(report)
            return ""
        text = self._detokenizer.feed(event.token_id)
        if event.logprobs is not None:
            tokens.append(TokenReport(event.token_id, event.logprobs, self._detokenizer.offset))
            self._held += [] if thinking else tokens[-1:]
        return text

    def _with_tokens(self, pieces: list[AnswerPiece]) -> list[AnswerPiece]:
        """Return the pieces. The first text piece gets the tokens whose text was held back."""
        if self._parser is not None and self._parser.calls > self._calls:
            self._calls = self._parser.calls
            # The tokens in _held belong to a call. Only the last may also have text after the call.
            self._held = self._held[-1:] if pieces else []
        if not pieces or not self._held:
            return pieces
        first, held = pieces[0], tuple(self._held)
        self._held.clear()
        return (
            [replace(first, tokens=held), *pieces[1:]] if isinstance(first, TextPiece) else pieces
        )

    def _split(self, text: str) -> list[AnswerPiece]:
        if not text:
            return []
        pieces = self._parser.feed(text) if self._parser else self._content(text)
        return self._before_stop(pieces)

    def _before_stop(self, pieces: list[AnswerPiece]) -> list[AnswerPiece]:
        """Return the pieces before a stop string. Only content is searched for stop strings."""
        before: list[AnswerPiece] = []
        for piece in pieces:
            if isinstance(piece, TextPiece) and piece.channel is Channel.CONTENT:
                before += self._content(self._stop.feed(piece.text))
            elif self._stop.matched is None:
                before += [*self._content(self._stop.flush()), piece]
                self._has_calls = self._has_calls or isinstance(piece, ToolCallStart)
        return before

    def _content(self, text: str) -> list[AnswerPiece]:
        return [TextPiece(Channel.CONTENT, text)] if text else []


NUM_SEEDS = 2**64


class Choices:
    """The ordered answers to all prompts of a request. A fault of the engine ends all answers."""

    def __init__(
        self,
        client: ServingEngine,
        tokenizer: Tokenizer,
        *prompts: Prompt,
        times: RequestTimes | None = None,
        max_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Submit all prompts to the engine, or no prompt if one fails. After ``max_s`` seconds,
        running answers are cut off. Raises the errors of ``ServingEngine.submit_choices``."""
        self._request_times = times or RequestTimes(Latencies(client.limits.max_model_len))
        self._clock = clock
        self._ends_at = clock() + max_s
        self._generations: list[Generation] = []
        self._firsts: list[Generation] = []
        self._prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self._kept_tokens = sum(client.limits.kept_tokens(len(prompt.ids)) for prompt in prompts)
        try:
            for prompt in prompts:
                self._submit(client, tokenizer, prompt)
        except Exception:
            self.close()
            raise

    def _submit(self, client: ServingEngine, tokenizer: Tokenizer, prompt: Prompt) -> None:
        read_with = self._firsts[0].stream if self._firsts else None
        submission = replace(prompt.submission, name=current_request_id())
        streams = client.submit_choices(submission, read_with)
        all_times = self._request_times.answers_to(
            len(prompt.ids), len(streams), prompt.submission.salt.tenant
        )
        for stream, times in zip(streams, all_times, strict=True):
            index = len(self._generations)
            self._generations.append(Generation(stream, tokenizer, prompt, times, index))
        self._firsts.append(self._generations[-len(streams)])

    @property
    def usage(self) -> Usage:
        """Token counts up to now. A prompt with several answers is counted once."""
        return Usage(
            self._prompt_tokens,
            sum(generation.completion_tokens for generation in self._generations),
            sum(generation.reasoning_tokens for generation in self._generations),
            prefix_of_all([first.prefix for first in self._firsts if first.prefix is not None]),
            self._kept_tokens,
            self._request_times.first_token_s,
            self._tokens_per_s,
        )

    @property
    def _tokens_per_s(self) -> float | None:
        """The speed of all answers together, by the engine's clock. The first token of each answer
        does not count. None if one step made all tokens."""
        took_s = max(each.stream.newest_s - each.stream.first_s for each in self._generations)
        later = sum(max(0, each.completion_tokens - 1) for each in self._generations)
        return later / took_s if took_s > 0 else None

    @property
    def finished(self) -> bool:
        return all(generation.finished for generation in self._generations)

    async def steps(self, ping_s: float) -> AsyncIterator[list[Delta]]:
        """Yield lists of new deltas, ordered by choice (answer), until every choice has finished.
        After ``ping_s`` seconds without a delta, yield an empty list. After ``max_s`` seconds, cut
        off the choices. If the caller stops early, abort them. Raises GenerationError."""
        try:
            while running := [choice for choice in self._generations if not choice.finished]:
                left_s = self._ends_at - self._clock()
                if left_s <= 0:
                    yield [choice.cut_off() for choice in running]
                    return
                streams = [choice.stream for choice in running]
                batches = await TokenStream.next_batches(streams, min(ping_s, left_s))
                yield [
                    choice.take(events)
                    for choice, events in zip(running, batches, strict=True)
                    if events
                ]
        except GenerationError:
            for choice in self._generations:
                choice.times.end("error")
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Abort the answers that are still running. Further calls do nothing."""
        for choice in self._generations:
            choice.stream.close()
            choice.times.end("aborted")


def prefix_of_all(reports: list[PrefixReport]) -> PrefixReport | None:
    """Merge the prompts' cache reports: sum their cached tokens, and keep the first cache miss."""
    if not reports:
        return None
    telling = next((report for report in reports if report.miss is not None), reports[0])
    return replace(telling, cached_tokens=sum(report.cached_tokens for report in reports))


def choice_params(params: SamplingParams, choices: int) -> tuple[SamplingParams, ...]:
    """Return the parameters of each choice (answer). The choices' seeds are consecutive numbers."""
    return tuple(replace(params, seed=(params.seed + i) % NUM_SEEDS) for i in range(choices))
