"""The README's table of Macs and models: `python -m tests.macs` prints it. A cell has the context
that fits, in thousands of tokens, and the tokens a second of one chat at 1k tokens, computed."""

from engine.planning.estimate import Estimate
from server.cli.plan import SHORT_CONTEXT, Target, rate
from server.cli.suggestions import estimates
from server.config import Config

MODELS = ("qwen3:4b", "qwen3:14b", "qwen3-coder:30b", "qwen3.6:27b")
MACS = (
    ("M1", 8),
    ("M4", 16),
    ("M4 Pro", 24),
    ("M5 Max", 36),
    ("M4 Max", 64),
)


def table() -> str:
    rows: list[tuple[str, ...]] = [("", *MODELS)]
    for chip, memory in MACS:
        fits = dict(estimates(Config(), Target.of(chip, f"{memory}GiB")))
        rows.append((f"{chip}, {memory} GiB", *(cell(fits.get(name)) for name in MODELS)))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]])


def cell(model: Estimate | None) -> str:
    if model is None:
        return "no"
    context = model.plan.memory.max_model_len // 1000
    return f"{context}k, {rate(model.decode_tokens_per_s(SHORT_CONTEXT))}/s"


if __name__ == "__main__":
    print(table())
