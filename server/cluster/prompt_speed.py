"""How fast an engine computes prompts, told from its counters."""

from engine.types import EngineStats

# Fewer tokens of prompts say little: a machine that does something else meanwhile is not slow.
LEAST_TOKENS = 1024
# So many tokens back an engine's past counts half.
HALVED_TOKENS = 32_768


class PromptSpeed:
    """Tokens of prompts per second of the time that steps spend on prompts, whatever answers run
    beside them."""

    def __init__(self) -> None:
        self._since = EngineStats()
        self._tokens = 0.0
        self._seconds = 0.0

    def of(self, stats: EngineStats) -> float:
        """Return the speed, with what has happened since the last call; 0 while little is known."""
        since, self._since = self._since, stats
        self._tokens += stats.timed_prompt_tokens - since.timed_prompt_tokens
        self._seconds += stats.timed_prompt_seconds - since.timed_prompt_seconds
        if self._tokens > HALVED_TOKENS:
            self._tokens, self._seconds = self._tokens / 2, self._seconds / 2
        known = self._tokens >= LEAST_TOKENS and self._seconds > 0
        return self._tokens / self._seconds if known else 0.0
