"""How fast an engine computes prompts, told from its counters."""

from engine.types import EngineStats

# Fewer tokens of prompts say little about how long one takes.
LEAST_PROMPT_TOKENS = 64
# A step that generates has a row for each answer: where there are more of these, its time is theirs.
PROMPT_TOKENS_PER_ANSWER_TOKEN = 8
NEWEST_SHARE = 0.5


class PromptSpeed:
    """Tokens of prompts per second, of the times in which prompts were what steps were made of."""

    def __init__(self) -> None:
        self._since = EngineStats()
        self._speed = 0.0

    def of(self, stats: EngineStats) -> float:
        """Return the speed, with what has happened since the last call; 0 while nothing is known."""
        since = self._since
        prompts = stats.prompt_tokens - since.prompt_tokens
        answers = stats.generated_tokens - since.generated_tokens
        seconds = stats.measured.step_seconds.total - since.measured.step_seconds.total
        mostly_prompts = prompts >= PROMPT_TOKENS_PER_ANSWER_TOKEN * answers
        if mostly_prompts and prompts < LEAST_PROMPT_TOKENS:
            return self._speed
        self._since = stats
        if mostly_prompts and seconds > 0:
            newest = prompts / seconds
            self._speed += NEWEST_SHARE * (newest - self._speed) if self._speed else newest
        return self._speed
