"""Draws the requests of a seed, which may go on from earlier ones."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from engine.types import PrefixSalt, PromptBoundaries, Request, SamplingParams
from tests.engines import request_of
from tests.simulation.recall import Third
from tests.simulation.world import VOCAB, World, draw_tokens

STOP_TOKENS = frozenset(range(0, VOCAB, 60))
# Where stop tokens are held back: an answer would hardly come to one otherwise.
DENSE_STOPS = frozenset(range(0, VOCAB, 4))
HELD_BACK = 5


class Traffic:
    """The requests of a world."""

    def __init__(self, world: World, rng: Random) -> None:
        self._world = world
        self._rng = rng
        self._last_id = 0

    def draw(self, past: Sequence[tuple[Request, list[int]]]) -> Request:
        """Return a request. past: earlier ones, with all tokens that they have by now."""
        if past and self._happens(self._world.turn_rate):
            request = self._draw_turn(*self._rng.choice(past[-8:]))
        elif past and self._happens(self._world.repeat_rate):
            request = self._repeated(self._rng.choice(past[-4:])[0])
        else:
            request = self._draw_fresh()
        if self._happens(self._world.fork_rate):
            others = [self._repeated(request) for _ in range(self._rng.randint(1, 3))]
            params = tuple(
                request.params[0] if request.pooling or each.pooling else each.params[0]
                for each in others
            )
            request = replace(request, params=request.params + params)
        return request

    def _happens(self, rate: float) -> bool:
        return self._rng.random() < rate

    def _draw_fresh(self) -> Request:
        system = self._rng.choice(self._world.system_prompts)[: self._world.longest_prompt]
        if self._happens(0.2):
            system = ()
        rest = self._world.longest_prompt - len(system)
        tail = draw_tokens(self._rng, self._rng.randint(0, rest))
        prompt = system + tail or draw_tokens(self._rng, 1)
        return self._request(prompt, self._rng.choice(self._world.salts), len(system))

    def _draw_turn(self, before: Request, tokens: list[int]) -> Request:
        """Go on with the conversation, or repeat the same prompt."""
        prompt = before.prompt_ids
        if self._happens(0.8):
            prompt = (*tokens, *draw_tokens(self._rng, self._rng.randint(0, 8)))
        prompt = prompt[: self._world.max_model_len - 1]
        return self._request(prompt, before.salt, min(before.boundaries.system_end, len(prompt)))

    def _repeated(self, request: Request) -> Request:
        """Return another request with the same prompt."""
        again = self._request(request.prompt_ids, request.salt, request.boundaries.system_end)
        return replace(again, priority=request.priority)

    def _request(self, prompt: tuple[int, ...], salt: PrefixSalt, system_end: int) -> Request:
        world, rng = self._world, self._rng
        self._last_id += 1
        pools, scores = self._happens(world.pooling_rate), self._happens(world.scoring_rate)
        is_ruled = not pools and self._happens(world.grammar_rate)
        params = SamplingParams(
            max_tokens=rng.randint(1, world.longest_answer),
            seed=rng.getrandbits(64),
            stop_token_ids=STOP_TOKENS if self._happens(world.stop_id_rate) else frozenset(),
            frequency_penalty=float(self._happens(world.penalty_rate)),
        )
        if self._happens(world.min_tokens_rate):
            params = replace(params, min_tokens=HELD_BACK, stop_token_ids=DENSE_STOPS)
        if pools or (scores and self._happens(0.5)):
            params = replace(params, max_tokens=0)
        if scores and not pools:
            params = replace(params, prompt_logprobs=0)
        return request_of(
            self._last_id,
            prompt,
            params,
            priority=rng.randint(-1, 1) if self._happens(world.priority_rate) else 0,
            salt=salt,
            boundaries=self._draw_boundaries(len(prompt), system_end),
            constraint=self._draw_grammar() if is_ruled else None,
            pooling=pools,
        )

    def _draw_boundaries(self, prompt: int, system: int) -> PromptBoundaries:
        """Draw the places where others may leave a prompt; sometimes there are none."""
        if self._happens(0.3):
            return PromptBoundaries(system)
        user_end = self._rng.randint(system, prompt)
        return PromptBoundaries(system, user_end, self._rng.randint(user_end, prompt))

    def _draw_grammar(self) -> Third:
        """Draw a constraint; some cannot be followed beyond a token."""
        fails_at = self._rng.randrange(10) if self._happens(0.2) else None
        return Third(VOCAB, fails_at, self._happens(0.5))
