"""The answers to one prompt, side by side."""

from collections.abc import AsyncIterator
from dataclasses import replace

from engine.client import EngineClient, TokenStream
from engine.types import SamplingParams
from server.generation import Delta, Generation, Prompt, Usage
from server.text.tokenizer import Tokenizer

NUM_SEEDS = 2**64


class Choices:
    """All answers to a prompt as they come into being. They end together when one has a fault."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, prompt: Prompt) -> None:
        """Hands the prompt to the engine. Raises what ``EngineClient.submit_choices`` raises."""
        streams = client.submit_choices(
            prompt.ids,
            [choice_params(prompt.params, index) for index in range(prompt.choices)],
            priority=prompt.priority,
            salt=prompt.salt,
            system_tokens=prompt.system_tokens,
            constraint=prompt.constraint,
        )
        self._prompt_tokens = len(prompt.ids)
        self._generations = [
            Generation(stream, tokenizer, prompt, index) for index, stream in enumerate(streams)
        ]

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(
            self._prompt_tokens,
            sum(generation.completion_tokens for generation in self._generations),
            sum(generation.reasoning_tokens for generation in self._generations),
            self._generations[0].prefix,
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


def choice_params(params: SamplingParams, index: int) -> SamplingParams:
    """Choice 0 draws as a request for one choice does; each further one has the seed after."""
    return replace(params, seed=(params.seed + index) % NUM_SEEDS)
