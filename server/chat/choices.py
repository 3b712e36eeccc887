"""The answers to one prompt or to several, side by side."""

import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from engine.client import TokenStream
from engine.serving import ServingEngine
from engine.types import PrefixReport, SamplingParams, Submission, TokenEvent
from server.chat.generation import Generation, GenerationError, Prompt
from server.metrics.answer_times import AnswerTimes, Latencies, RequestTimes
from server.protocol.common import current_request_id
from server.text.pieces import Delta, Usage
from server.text.tokenizer import Tokenizer

NUM_SEEDS = 2**64


class Choices:
    """All answers to the prompts while they are generated; those to one prompt after those to the
    one before. They end together when one has a fault."""

    def __init__(
        self,
        client: ServingEngine,
        tokenizer: Tokenizer,
        *prompts: Prompt,
        times: RequestTimes | None = None,
        max_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Submit all prompts to the engine, or none. times: those of the request, where they are
        measured. max_s: seconds by ``clock`` after which running answers are cut off. Raises what
        ``ServingEngine.submit_choices`` raises."""
        self._request_times = times or RequestTimes(Latencies(client.limits.max_model_len))
        self._times: list[AnswerTimes] = []
        """The times of each generation."""
        self._clock = clock
        self._ends_at = clock() + max_s
        self._generations: list[Generation] = []
        self._firsts: list[Generation] = []
        self._prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        block = client.limits.shared_block_tokens
        self._kept_tokens = sum(len(prompt.ids) // block * block for prompt in prompts if block)
        try:
            for prompt in prompts:
                self._submit(client, tokenizer, prompt)
        except Exception:
            self.close()
            raise

    def _submit(self, client: ServingEngine, tokenizer: Tokenizer, prompt: Prompt) -> None:
        asked = Submission(
            prompt.ids,
            tuple(choice_params(prompt.params, index) for index in range(prompt.choices)),
            priority=prompt.priority,
            salt=prompt.salt,
            system_tokens=prompt.system_tokens,
            turns=prompt.turns,
            constraint=prompt.constraint,
            name=current_request_id(),
        )
        read_with = self._firsts[0].stream if self._firsts else None
        streams = client.submit_choices(asked, read_with)
        answers = [
            Generation(stream, tokenizer, prompt, index)
            for index, stream in enumerate(streams, start=len(self._generations))
        ]
        self._firsts.append(answers[0])
        self._generations += answers
        self._times += self._request_times.answers_to(
            len(prompt.ids), len(answers), prompt.salt.tenant
        )

    @property
    def usage(self) -> Usage:
        """Tokens so far. Each prompt counts once, by what its first answer found in the cache."""
        return Usage(
            self._prompt_tokens,
            sum(generation.completion_tokens for generation in self._generations),
            sum(generation.reasoning_tokens for generation in self._generations),
            prefix_of_all([first.prefix for first in self._firsts if first.prefix is not None]),
            self._kept_tokens,
        )

    @property
    def finished(self) -> bool:
        """Whether all choices have had their last deltas."""
        return all(generation.finished for generation in self._generations)

    async def steps(self, ping_s: float) -> AsyncIterator[list[Delta]]:
        """Yield what each step adds: one delta for every choice that grew, in the order of the
        choices, until each has had one with ``finish``. Yield an empty list whenever ``ping_s``
        pass without a delta. When the time is over all running choices end as if they had reached
        their lengths.

        Raises GenerationError for a fault of the engine. Leaving the iteration early aborts what
        still runs.
        """
        timed = self._timed
        try:
            while running := [pair for pair in timed if not pair[0].finished]:
                left_s = self._ends_at - self._clock()
                if left_s <= 0:
                    yield [_cut_off(choice, times) for choice, times in running]
                    return
                streams = [choice.stream for choice, _ in running]
                batches = await TokenStream.next_batches(streams, min(ping_s, left_s))
                yield [
                    _taken(choice, times, events)
                    for (choice, times), events in zip(running, batches, strict=True)
                    if events
                ]
        except GenerationError:
            for times in self._times:
                times.end("error")
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Abort what has not ended. Idempotent."""
        for generation, times in self._timed:
            generation.stream.close()
            times.end("aborted")

    @property
    def _timed(self) -> list[tuple[Generation, AnswerTimes]]:
        return list(zip(self._generations, self._times, strict=True))


def _cut_off(choice: Generation, times: AnswerTimes) -> Delta:
    delta = choice.cut_off()
    times.delivered(choice.completion_tokens, delta.finish)
    return delta


def _taken(choice: Generation, times: AnswerTimes, events: list[TokenEvent]) -> Delta:
    delta = choice.take(events)
    if choice.prefix is not None:
        times.cached_tokens = choice.prefix.cached_tokens
    times.delivered(choice.completion_tokens, delta.finish)
    return delta


def prefix_of_all(reports: list[PrefixReport]) -> PrefixReport | None:
    """Return what the cache had of all prompts together, with the miss of the first one that lacked
    something; None where nothing is known."""
    if not reports:
        return None
    telling = next((report for report in reports if report.miss is not None), reports[0])
    return replace(telling, cached_tokens=sum(report.cached_tokens for report in reports))


def choice_params(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of a choice. Choice 0 samples as a request for one choice does; each
    further one has the seed after."""
    return replace(params, seed=(params.seed + index) % NUM_SEEDS)
