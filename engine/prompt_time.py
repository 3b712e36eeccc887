"""How much of the steps' time prompts take: answers that run beside them say nothing of how fast
prompts are computed."""

from dataclasses import dataclass

from engine.step_plan import StepPlan

# A device computes fewer rows of a prompt in the time of so many (GPU_TILE_ROWS): their time says
# nothing of longer prompts.
LEAST_ROWS = 32
# A row of a prompt takes at least this part of what the average row of its step takes: less is left
# where decoding alone took long by chance.
LEAST_PART = 0.5


@dataclass(slots=True)
class PromptTime:
    """The tokens of prompts, and the seconds that they took. Both only rise."""

    tokens: int = 0
    seconds: float = 0.0

    def observe(self, plan: StepPlan, seconds: float, decoding_s: float) -> None:
        """Take in a completed step. seconds: of it. decoding_s: that such steps take lately without
        prompts; 0 where nobody knows."""
        rows = plan.prefill_tokens
        if rows < LEAST_ROWS or seconds <= 0:
            return
        part = rows / sum(entry.count for entry in plan.entries)
        beside_s = decoding_s if plan.decodes else 0.0
        self.tokens += rows
        self.seconds += max(seconds - beside_s, LEAST_PART * part * seconds)
