"""What others have measured of mlx-lm, beside what the model says of the same.

All without a server, one sequence, weights in 4 bits.
"""

from dataclasses import dataclass

from tests.metal.prediction.engines import GENERATE
from tests.metal.prediction.model import Machine, Work, decode_rate, decode_step, prompt_rate

SWEEP = "mlxcel's pylm_{}_2026-09-06.csv"
M5_MAX = SWEEP.format("m5max")
M1_ULTRA = SWEEP.format("m1ultra")
BENCHMARKS = "mlx-lm BENCHMARKS.md"


@dataclass(frozen=True, slots=True)
class Measured:
    """Tokens per second. context: of decoding, in the middle of what was generated; of a prompt,
    its length."""

    chip: str
    model: str
    context: int
    tokens_per_s: float
    source: str
    is_prompt: bool = False

    def predicted(self, on: Machine, work: Work) -> float:
        """What the model says."""
        if not self.is_prompt:
            return decode_rate(GENERATE, on, work, self.context, 1)
        # Others stop the clock before the first token's own step.
        seconds = self.context / prompt_rate(GENERATE, on, work, self.context)
        return self.context / (
            seconds - decode_step(GENERATE, on, work, self.context, 1).period_s
        )  # fmt: skip


def _sweep(chip: str, source: str, rates: dict[str, tuple[float, float]]) -> list[Measured]:
    """Of 512 tokens of prompt and 128 of answer: decoding, prompt."""
    decoding = [Measured(chip, its, 576, rate, source) for its, (rate, _) in rates.items()]
    prompts = [Measured(chip, its, 512, rate, source, True) for its, (_, rate) in rates.items()]
    return decoding + prompts


MEASURED = (
    *_sweep(
        "M5 Max",
        M5_MAX,
        {
            "0.6B": (570.53, 22777),
            "4B": (185.95, 5452),
            "8B": (112.38, 3158),
            "32B": (28.31, 721),  # the text model of Qwen3-VL-32B
        },
    ),
    *_sweep(
        "M1 Ultra",
        M1_ULTRA,
        {
            "0.6B": (238.91, 5141),
            "4B": (116.23, 1001),
            "8B": (80.72, 564),
            "32B": (21.21, 129),
        },
    ),
    Measured("M4 Max", "4B", 2112, 134.52, BENCHMARKS),
    Measured("M4 Max", "4B", 2048, 1622, BENCHMARKS, True),
    Measured("M3 Pro", "4B", 2112, 44.62, "mlx-lm#1569"),
    Measured("M3 Pro", "4B", 2048, 615, "mlx-lm#1569", True),
)
