"""The README's tables of Macs: `python -m tests.macs` prints them.

A cell of the first has the context that fits, in thousands of tokens, and the tokens a second of
one chat at 1k tokens, computed. The second has what drafts by a model's own head gain, computed,
and what others have measured with their software."""

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

# Qwen3.6-27B keeps 1.64 of 2 drafts a step (mlx-vlm#1167).
DRAFTER, DRAFTS, KEPT = "qwen3.6:27b", 2, 1.64
# Chips, the least and most cost of 3 rows by that of one, and gains that others have measured.
# M2 Pro: 0.45 to 0.7 more for each row, as before MLX 0.32. M4 Pro: mlx#3852, mlx#3839, and M3 Max
# between them (mlx#3863). M5 Max: mlx#3791.
DRAFTING = (
    ("M1, M2", (1.9, 2.4), "less than 1 (omlx#1311); M1 Ultra 0.7 (mlxcel#1165)"),
    ("M3, M4", (1.13, 1.48), "M3 Ultra 2.2 (omlx#3695); M4 Pro 1.6 (mlx-lm#990)"),
    ("M5", (1.11, 1.11), "M5 Pro 1.3 (mlx-lm#990)"),
)


def table() -> str:
    rows: list[tuple[str, ...]] = [("", *MODELS)]
    for chip, memory in MACS:
        fits = dict(estimates(Config(), Target.of(chip, f"{memory}GiB")))
        rows.append((f"{chip}, {memory} GiB", *(cell(fits.get(name)) for name in MODELS)))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]])


def table_of_drafts() -> str:
    model = dict(estimates(Config(), Target.of("M4 Max", None)))[DRAFTER]
    rows = ["chip|computed|measured by others|by default", "---|---|---|---"]
    for chips, costs, measured in DRAFTING:
        gains = sorted({f"{gain(model, cost):.1f}" for cost in costs})
        rows.append(f"{chips}|{' to '.join(gains)}|{measured}|if bits are equal")
    return "\n".join([*rows, "CPU|||on"])


def gain(model: Estimate, rows_cost: float) -> float:
    """Return the tokens a second of one chat with drafts, by those without, where a step with the
    rows of drafts takes ``rows_cost`` times as long."""
    cost, spec = model.cost, model.cost.spec
    head = spec.vocab_size * spec.hidden_size
    # A draft reads one layer, the matrix that joins its two inputs, and the head.
    read = cost.dense_numbers / len(spec.layers) + 2 * spec.hidden_size**2 + head
    return (1 + KEPT) / (rows_cost + DRAFTS * read / (cost.dense_numbers + head))


def cell(model: Estimate | None) -> str:
    if model is None:
        return "no"
    context = model.plan.memory.max_model_len // 1000
    return f"{context}k, {rate(model.decode_tokens_per_s(SHORT_CONTEXT))}/s"


if __name__ == "__main__":
    print(table(), table_of_drafts(), sep="\n\n")
