"""Generate answers: turn prompts into pieces of text, independently of any API's wire format."""

import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from engine.client import TokenStream
from engine.serving import ServingEngine
from engine.types import DraftReport, PrefixReport, Request, SamplingParams
from server.metrics.answer_times import RequestTimes
from server.text.pieces import Delta, Usage
from server.text.pipeline import GenerationError, ParseOptions, TextPipeline
from server.text.reasoning_cache import ReasoningRecorder
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for the engine, with the rules for parsing the answers to it."""

    request: Request
    stop: tuple[str, ...] = ()
    parse_options: ParseOptions | None = None
    """Rules for parsing a chat's answer. With None, the whole answer is content."""
    new_recorder: Callable[[], ReasoningRecorder] | None = None
    """Makes a recorder of each answer's reasoning. With None, no reasoning is recorded."""
    not_enforced: tuple[str, ...] = ()
    """Keywords of the answer's schema that are not enforced, with their places in the schema."""

    @property
    def ids(self) -> tuple[int, ...]:
        return self.request.prompt_ids

    @property
    def params(self) -> SamplingParams:
        """The first answer's sampling parameters. Only the seed of later answers differs."""
        return self.request.params[0]


@dataclass(frozen=True, slots=True)
class _Choice:
    """An answer that is being generated."""

    stream: TokenStream
    text: TextPipeline
    recorder: ReasoningRecorder | None


class Choices:
    """The ordered answers to all prompts of a request. A fault of the engine ends all answers."""

    def __init__(
        self,
        client: ServingEngine,
        tokenizer: Tokenizer,
        *prompts: Prompt,
        times: RequestTimes,
        max_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Submit all prompts to the engine, or no prompt if one fails. After ``max_s`` seconds,
        running answers are cut off. Raises the errors of ``ServingEngine.submit``."""
        self._times = times
        self._clock = clock
        self._ends_at = clock() + max_s
        self._choices: list[_Choice] = []
        self._firsts: list[_Choice] = []
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
        streams = client.submit(prompt.request, read_with)
        self._times.answers_to(len(prompt.ids), len(streams), prompt.request.salt.tenant)
        for index, stream in enumerate(streams, start=len(self._choices)):
            text = TextPipeline(tokenizer, prompt.params, prompt.stop, prompt.parse_options, index)
            recorder = None if prompt.new_recorder is None else prompt.new_recorder()
            self._choices.append(_Choice(stream, text, recorder))
        self._firsts.append(self._choices[-len(streams)])

    @property
    def usage(self) -> Usage:
        """Token counts up to now. A prompt with several answers is counted once."""
        prefixes = [first.text.prefix for first in self._firsts]
        return Usage(
            self._prompt_tokens,
            sum(choice.text.completion_tokens for choice in self._choices),
            sum(choice.text.reasoning_tokens for choice in self._choices),
            prefix_of_all([prefix for prefix in prefixes if prefix is not None]),
            self._kept_tokens,
            drafts_of_all([choice.text.drafts for choice in self._choices]),
            self._times.first_token_s,
            self._times.generating_s,
            self._times.elapsed_s,
            self._tokens_per_s,
        )

    @property
    def _tokens_per_s(self) -> float | None:
        """The speed of all answers together, by the engine's clock. The first token of each answer
        does not count. None if one step made all tokens."""
        took_s = max(each.stream.newest_s - each.stream.first_s for each in self._choices)
        later = sum(max(0, each.text.completion_tokens - 1) for each in self._choices)
        return later / took_s if took_s > 0 else None

    @property
    def finished(self) -> bool:
        return all(choice.text.finished for choice in self._choices)

    async def steps(self, ping_s: float) -> AsyncIterator[list[Delta]]:
        """Yield lists of new deltas, ordered by choice (answer), until every choice has finished.
        After ``ping_s`` seconds without a delta, yield an empty list. After ``max_s`` seconds, cut
        off the choices. If the caller stops early, abort them. Raises GenerationError."""
        try:
            while running := [choice for choice in self._choices if not choice.text.finished]:
                left_s = self._ends_at - self._clock()
                if left_s <= 0:
                    yield [self._watched(choice.text.finish()) for choice in running]
                    return
                streams = [choice.stream for choice in running]
                batches = await TokenStream.next_batches(streams, min(ping_s, left_s))
                yield [
                    self._watched(choice.text.feed(events))
                    for choice, events in zip(running, batches, strict=True)
                    if events
                ]
        except GenerationError:
            self._times.end("error")
            raise
        finally:
            self.close()

    def _watched(self, delta: Delta) -> Delta:
        """Return a delta, after those have seen it who store reasoning and measure times."""
        choice = self._choices[delta.index]
        if delta.finish is not None:
            choice.stream.close()
        if choice.recorder is not None:
            choice.recorder.observe(delta)
        self._times.observe(delta)
        return delta

    def close(self) -> None:
        """Abort the answers that are still running. Further calls do nothing."""
        for choice in self._choices:
            choice.stream.close()
        self._times.end("aborted")


def prefix_of_all(reports: list[PrefixReport]) -> PrefixReport | None:
    """Merge the prompts' cache reports: sum their cached tokens, and keep the first cache miss."""
    if not reports:
        return None
    telling = next((report for report in reports if report.miss is not None), reports[0])
    return replace(telling, cached_tokens=sum(report.cached_tokens for report in reports))


def drafts_of_all(reports: list[DraftReport | None]) -> DraftReport | None:
    """Sum the answers' reports. None means no drafts."""
    known = [report for report in reports if report is not None]
    return DraftReport(*map(sum, zip(*known, strict=True))) if known else None
