"""How fast an engine computes prompts, told from its counters."""

from engine.types import EngineStats

# A step that generates has a row for each answer: where there are more, its time is theirs.
PROMPTS_PER_ANSWER = 8
# Fewer tokens of prompts say little: a machine that does something else meanwhile is not slow.
LEAST_TOKENS = 1024
# So many tokens back an engine's past counts half.
HALVED_TOKENS = 32_768


class PromptSpeed:
    """Tokens of prompts per second, of the times in which prompts were what steps were made of."""

    def __init__(self) -> None:
        self._since = EngineStats()
        self._tokens = 0.0
        self._seconds = 0.0

    def of(self, stats: EngineStats) -> float:
        """Return the speed, with what has happened since the last call; 0 while little is known."""
        since, self._since = self._since, stats
        prompts = stats.prompt_tokens - since.prompt_tokens
        answers = stats.generated_tokens - since.generated_tokens
        if prompts > PROMPTS_PER_ANSWER * answers:
            self._tokens += prompts
            seconds = stats.measured.step_seconds.total - since.measured.step_seconds.total
            self._seconds += seconds
        if self._tokens > HALVED_TOKENS:
            self._tokens, self._seconds = self._tokens / 2, self._seconds / 2
        known = self._tokens >= LEAST_TOKENS and self._seconds > 0
        return self._tokens / self._seconds if known else 0.0
