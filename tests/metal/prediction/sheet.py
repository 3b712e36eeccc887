"""The prediction's section of METAL.md."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from math import sqrt

from engine.planning.arithmetic import Q4, weights_bytes
from engine.planning.devices import CPU, DEVICES
from engine.planning.shape import ModelShape
from tests.metal.prediction.assumptions import Assumption, Assumptions, Chip, assumptions_for
from tests.metal.prediction.engines import AFTER, AFTER_14, BEFORE, GENERATOR, SERVER, Engine
from tests.metal.prediction.measured import MEASURED
from tests.metal.prediction.model import (
    Machine,
    Work,
    decode_rate,
    decode_step,
    prompt_rate,
    turnover_s,
)
from tests.metal.roofline import MODELS, device, shapes
from tests.metal.sheets import Section, table, three
from tests.models import QWEN3_4B

SECTION = Section("prediction")
K = 1000
KIB = 1024
CONTEXTS = {"2k": 2 * KIB, "32k": 32 * KIB, "100k": 100 * K}
SEQUENCES = (1, 8, 32)
TARGETS = {1: 1.0, 8: 1.2, 32: 1.3}
QWEN3_32B = replace(
    QWEN3_4B,
    num_hidden_layers=64,
    hidden_size=5120,
    num_attention_heads=64,
    intermediate_size=25600,
    tie_word_embeddings=False,
)
SPECS = MODELS | {"32B": QWEN3_32B}
CHIPS = tuple(its.name for its in DEVICES if its is not CPU)
SHOWN = ("M1", "M2 Pro", "M3 Max", "M3 Ultra", "M4 Max", "M5", "M5 Max")
EXAMPLE = "M4 Max", "4B"
# Of a turnover: an answer's tokens, and how much longer than the others the longest sequence is.
ANSWER_TOKENS = 256
LONGER = 4

Value = Callable[[Machine], float]


@cache
def models() -> dict[str, tuple[ModelShape, Work]]:
    """Shape and work of each."""
    return {name: (shape, Work.of(shape)) for name, shape in shapes(SPECS).items()}


@cache
def machine(chip: str) -> Machine:
    """A chip with all assumptions at their values."""
    its = Chip(device(chip))
    return Machine(its, assumptions_for(its))


def fits(chip: str, model: str, context: int, sequences: int) -> bool:
    """Whether the chip is sold with enough memory for weights, K and V."""
    shape, work = models()[model]
    on = device(chip)
    needed = weights_bytes(shape, Q4) + sequences * work.kv_bytes(context)
    return needed <= on.working_set_bytes(on.memory_bytes)


def ratio(
    ours: Engine, theirs: Engine, work: Work, context: int, sequences: int, on: Machine
) -> float:
    """Of tokens per second."""
    theirs_s = decode_step(theirs, on, work, context, sequences).period_s
    return theirs_s / decode_step(ours, on, work, context, sequences).period_s


def spread(value: Value, on: Machine) -> tuple[float, float]:
    """Least and most where each assumption goes to its ends alone; what each does to either side
    is put together as independent errors are."""
    middle = value(on)
    below = above = 0.0
    for _, *ends in on.given.varied():
        moved = [value(replace(on, given=end)) - middle for end in ends]
        below += min(0.0, *moved) ** 2
        above += max(0.0, *moved) ** 2
    return middle - sqrt(below), middle + sqrt(above)


def swings(value: Value, on: Machine) -> list[tuple[float, float, Assumption]]:
    """What the ends of each assumption make of a value, the widest first."""
    found = [
        (value(replace(on, given=low)), value(replace(on, given=high)), on.given[name])
        for name, low, high in on.given.varied()
    ]
    return sorted(found, key=lambda its: -abs(its[0] - its[1]))


# --- tables ---------------------------------------------------------------------------------------


def targets_table() -> str:
    """On how many chips a target is reached, by model and context."""
    rows = []
    for model, (_, work) in models().items():
        for name, context in CONTEXTS.items():
            row = [model, name]
            for sequences, target in TARGETS.items():
                chips = [its for its in CHIPS if fits(its, model, context, sequences)]
                found = [
                    ratio(AFTER, SERVER, work, context, sequences, machine(its)) for its in chips
                ]
                hits = sum(its >= target for its in found)
                told = "hit" if hits == len(found) else "miss" if hits == 0 else "some"
                row.append(
                    f"{told}: {hits} of {len(found)}; {min(found):.2f} to {max(found):.2f}, "
                    f"median {statistics.median(found):.2f}"
                    if found
                    else "does not fit"
                )
            rows.append(row)
    heading = [f"{sequences} at once, {target}" for sequences, target in TARGETS.items()]
    return table(["Qwen3", "context", *heading], rows)


def chips_table(name: str) -> str:
    """Before and after, of every chip."""
    context = CONTEXTS[name]

    def cell(chip: str, model: str) -> str:
        work = models()[model][1]
        fitting = [its for its in SEQUENCES if fits(chip, model, context, its)]
        sides = (
            three(
                f"{ratio(engine, SERVER, work, context, its, machine(chip)):.2f}" for its in fitting
            )
            for engine in (BEFORE, AFTER)
        )
        return " → ".join(sides) if fitting else "-"

    rows = [[chip, *(cell(chip, model) for model in SPECS)] for chip in CHIPS]
    return table([f"{name} tokens", *SPECS], rows)


def ranges_table() -> str:
    """The example's model on some chips, with what is uncertain, beside both baselines."""
    model = EXAMPLE[1]
    work = models()[model][1]
    rows = []
    for chip in SHOWN:
        for name, context in CONTEXTS.items():
            row = [chip, name]
            for ours, theirs in ((AFTER, SERVER), (AFTER, GENERATOR), (AFTER_14, GENERATOR)):
                cells = []
                for sequences in SEQUENCES:
                    if not fits(chip, model, context, sequences):
                        break
                    value = partial(ratio, ours, theirs, work, context, sequences)
                    low, high = spread(value, machine(chip))
                    cells.append(f"{value(machine(chip)):.2f} ({low:.2f} to {high:.2f})")
                row.append(three(cells) or "-")
            rows.append(row)
    heading = ["beside the server", "beside its generator", "14 a layer, beside the generator"]
    return table(["chip", "context", *heading], rows)


def rates_table() -> str:
    """Tokens per second of both."""
    rows = []
    for model, (_, work) in models().items():
        for name, context in CONTEXTS.items():
            row = [model, name]
            for chip in SHOWN:
                fitting = [its for its in SEQUENCES if fits(chip, model, context, its)]
                sides = (
                    three(
                        f"{decode_rate(engine, machine(chip), work, context, its):.0f}"
                        for its in fitting
                    )
                    for engine in (AFTER, SERVER)
                )
                row.append("; ".join(sides) if fitting else "-")
            rows.append(row)
    return table(["Qwen3", "context", *SHOWN], rows)


def prompts_table() -> str:
    """Tokens per second of one prompt, both, and their ratio."""
    rows = []
    for model, (_, work) in models().items():
        for name, tokens in CONTEXTS.items():
            row = [model, name]
            for chip in SHOWN:
                if not fits(chip, model, tokens, 1):
                    row.append("-")
                    continue
                ours, theirs = (
                    prompt_rate(its, machine(chip), work, tokens) for its in (AFTER, SERVER)
                )
                row.append(f"{ours / theirs:.2f}: {ours:.0f}; {theirs:.0f}")
            rows.append(row)
    return table(["Qwen3", "prompt", *SHOWN], rows)


def turnover_table() -> str:
    """Where sequences end and others begin."""
    model, context = EXAMPLE[1], CONTEXTS["2k"]
    work = models()[model][1]

    def cell(chip: str, sequences: int, longest: int) -> str:
        on = machine(chip)
        ours = decode_step(AFTER, on, work, context, sequences).period_s
        theirs = decode_step(SERVER, on, work, context, sequences, longest).period_s
        theirs += sequences / ANSWER_TOKENS * turnover_s(on, work, longest, sequences)
        return f"{theirs / ours:.2f}"

    rows = [
        [chip, *(three(cell(chip, its, times * context) for its in SEQUENCES[1:])
                 for times in (1, LONGER))]
        for chip in SHOWN
    ]  # fmt: skip
    return table(["chip", "all alike", f"one of {LONGER} times the length"], rows)


def swings_table() -> str:
    """What moves the example's ratio most."""
    chip, model = EXAMPLE
    work = models()[model][1]
    rows = []
    for name, context in CONTEXTS.items():
        for sequences in SEQUENCES:
            value = partial(ratio, AFTER, SERVER, work, context, sequences)
            first = swings(value, machine(chip))[:3]
            cells = [f"{its.what}: {low:.2f} to {high:.2f}" for low, high, its in first]
            rows.append([name, str(sequences), f"{value(machine(chip)):.2f}", *cells])
    return table(["context", "at once", "ratio", "most", "then", "then"], rows)


def fit_table() -> str:
    """What others measured, and what the model says."""
    rows = []
    for its in MEASURED:
        predicted = its.predicted(machine(its.chip), models()[its.model][1])
        off = 100 * (predicted / its.tokens_per_s - 1)
        what = "prompt" if its.is_prompt else "decoding"
        rates = [
            f"{rate:.0f}" if rate >= 1000 else f"{rate:.4g}"
            for rate in (its.tokens_per_s, predicted)
        ]
        rows.append(
            [its.chip, its.model, what, str(its.context), *rates, f"{off:+.0f}", its.source]
        )
    heading = ["chip", "Qwen3", "", "tokens", "measured", "model", "%", "source"]
    return table(heading, rows)


def assumptions_table() -> str:
    """All of them; those that differ between chips with each of their values."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for chip in CHIPS:
        for its in assumed(machine(chip).given):
            line = (
                its.what,
                f"{its.value:g} ({its.least:g} to {its.most:g}) {its.unit}",
                its.mark.value,
                its.source,
            )
            rows.setdefault(line, []).append(chip)
    lines = [[*line, where(found)] for line, found in rows.items()]
    return table(["what", "value and range", "mark", "source", "chips"], lines)


def assumed(given: Assumptions) -> Iterable[Assumption]:
    """The assumptions of a chip."""
    return (given[name] for name, _, _ in given.varied())


def where(chips: list[str]) -> str:
    """Which chips a line is for."""
    if len(chips) == len(CHIPS):
        return "all"
    families = sorted({its.split()[0] for its in chips})
    whole = [its for its in CHIPS if its.split()[0] in families]
    return ", ".join(families if len(whole) == len(chips) else chips)


def sheet() -> list[str]:
    """The paragraphs of the section."""
    chip, model = EXAMPLE
    return [
        "How many times as many tokens per second quire has as mlx-lm 0.32.2's server, with 1 / 8 "
        "/ 32 sequences of that many tokens, Qwen3 in 4 bits: computed, all of it. **Targets** are "
        "1.0, 1.2 and 1.3, on the chips that are sold with enough memory. quire has 15 dispatches "
        "a layer here, submits a whole step ahead and ends a command buffer after 200 operations "
        "or 100 million numbers.",
        targets_table(),
        "With long sequences or many, nearly all of a step is weights, K and V, which both read "
        "once, with MLX's own kernels for the weights: there, only a faster kernel of attention "
        "could make a ratio of 1.2. Short steps gain by what is not computed.",
        "**Every chip**: with 17 dispatches a layer, the first layer ahead and MLX's own command "
        "buffers → as above. Where fewer than three stand, more sequences have no room; nor has "
        "one where `-` stands.",
        *(chips_table(name) for name in CONTEXTS),
        f"**What is uncertain**, {model}: each assumption goes to the ends of its range, and what "
        "that does is put together as independent errors are. mlx-lm's server reads each token's "
        "log-probability behind a step that is already queued, and so waits for that step; its "
        "generator alone, which is what others measure, does not.",
        ranges_table(),
        f"What moves the ratio of {model} on an {chip} most, and where to:",
        swings_table(),
        "**Tokens per second** of all sequences together: quire; mlx-lm's server.",
        rates_table(),
        "**Prompts**, one at a time: the ratio, and tokens per second of quire; mlx-lm's server. "
        "quire's chunks follow its budget of half a second, mlx-lm's are 2048 tokens whatever they "
        "take. Both kernels compute 32 rows at a time: quire's chunks are whole multiples of that.",
        prompts_table(),
        f"**Coming and going**, {model} at 2k tokens, 8 / 32 at once, an answer of {ANSWER_TOKENS} "
        "tokens: mlx-lm copies its whole cache when a sequence leaves and when one joins, and has "
        "as many rows for each as for the longest. (The steps in which the new prompts run are not "
        "in it.)",
        turnover_table(),
        "**What others measured** of mlx-lm without a server, and the model: tokens per second. "
        "The times of dispatches and the shares of bandwidth and arithmetic were chosen by these: "
        "they show that the model has the right form, and no more. The smallest model's "
        "prompts are slower than it says, for both alike.",
        fit_table(),
        "**Assumptions.** A share is of what its unit says.",
        assumptions_table(),
    ]
