"""The answers to one prompt or to several, side by side."""

from collections.abc import AsyncIterator
from dataclasses import replace

from engine.client import EngineClient, TokenStream
from engine.types import PrefixReport, SamplingParams
from server.generation import Delta, Generation, Prompt, Usage
from server.text.tokenizer import Tokenizer

NUM_SEEDS = 2**64


class Choices:
    """All answers to the prompts as they come into being; those to one prompt after those to the
    one before. They end together when one has a fault."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, *prompts: Prompt) -> None:
        """Hands all prompts to the engine, or none. Raises what ``EngineClient.submit_choices``
        raises."""
        self._generations: list[Generation] = []
        self._firsts: list[Generation] = []
        self._prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        try:
            for prompt in prompts:
                self._submit(client, tokenizer, prompt)
        except Exception:
            self.close()
            raise

    def _submit(self, client: EngineClient, tokenizer: Tokenizer, prompt: Prompt) -> None:
        streams = client.submit_choices(
            prompt.ids,
            [choice_params(prompt.params, index) for index in range(prompt.choices)],
            priority=prompt.priority,
            salt=prompt.salt,
            system_tokens=prompt.system_tokens,
            constraint=prompt.constraint,
            read_with=self._firsts[0].stream if self._firsts else None,
        )
        answers = [
            Generation(stream, tokenizer, prompt, index)
            for index, stream in enumerate(streams, start=len(self._generations))
        ]
        self._firsts.append(answers[0])
        self._generations += answers

    @property
    def usage(self) -> Usage:
        """Tokens so far. Each prompt counts once, by what its first answer found in the cache."""
        return Usage(
            self._prompt_tokens,
            sum(generation.completion_tokens for generation in self._generations),
            sum(generation.reasoning_tokens for generation in self._generations),
            prefix_of_all([first.prefix for first in self._firsts if first.prefix is not None]),
        )

    async def steps(self, ping_s: float) -> AsyncIterator[list[Delta]]:
        """What each step adds: one delta for every choice that grew, in the order of the choices,
        until each has had one with ``finish``. None at all whenever ``ping_s`` pass in silence.

        Raises GenerationError for a fault of the engine. Leaving the iteration early aborts what
        still runs.
        """
        try:
            while running := [choice for choice in self._generations if not choice.finished]:
                streams = [choice.stream for choice in running]
                batches = await TokenStream.next_batches(streams, ping_s)
                yield [
                    choice.take(events)
                    for choice, events in zip(running, batches, strict=True)
                    if events
                ]
        finally:
            self.close()

    def close(self) -> None:
        """Aborts what has not ended. Idempotent."""
        for generation in self._generations:
            generation.stream.close()


def prefix_of_all(reports: list[PrefixReport]) -> PrefixReport | None:
    """What the cache had of all prompts together; why not more of the first of them that it lacked
    something of. None where nothing is known."""
    if not reports:
        return None
    telling = next((report for report in reports if report.miss is not None), reports[0])
    return replace(telling, cached_tokens=sum(report.cached_tokens for report in reports))


def choice_params(params: SamplingParams, index: int) -> SamplingParams:
    """Choice 0 draws as a request for one choice does; each further one has the seed after."""
    return replace(params, seed=(params.seed + index) % NUM_SEEDS)
