"""Greedy answers of random mixtures of experts, hybrids and models with windows, token for token
against mlx-lm's.

``make parity`` prints a table: every family in every form of its files, three seeds each, eight
prompts together and then each alone. mlx-lm's model, in float32 as ours, says each token of an
answer after those before it. Where it says another one, that is a fault, unless ours is as good
within rounding: the gap of both logits is printed.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from engine.models.checkpoint import Checkpoint, read_checkpoint
from engine.models.spec import Experts
from tests.engine.models.families.greedy import ENGINE, answers_of
from tests.engine.models.hybrids import (
    EIGHT_BITS,
    FIELDS,
    MIXED,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    SPEC,
    write_bonsai,
    write_hybrid,
)
from tests.engines import Answers, built_loop
from tests.families import GEMMA2, GEMMA3, GPT_OSS, QWEN3_MOE, ROUTERS, names_apart
from tests.models import write_model
from tests.reference import load_reference

LENGTHS = (1, 17, 63, 64, 65, 100, 150, 200)
NEW_TOKENS = 64
LEAST_DISTINCT = 32
SEEDS = (2, 3, 4)
# Of the logits' standard deviation: ours and mlx-lm's sum float32 in another order, and differ by
# so much (tests/engine/models/families). A gap below it says nothing.
ROUNDING = 1e-4
GAIN = 3.0
BONSAI_FAMILY = "prism_hadamard_qwen35"
TIES = (
    "\nA router's tie is a choice whose last expert and the first one that is left out have the "
    "same logit. Ours takes the lower number, mlx-lm any. In float32, in which both compute here, "
    "ties are so rare that none may be seen; in bfloat16, in which mlx-lm serves such a "
    "checkpoint, its answers may part from ours at any of them."
)
FOUR_BITS: dict[str, Any] = {"bits": 4, "group_size": 64}
MXFP4: dict[str, Any] = {"bits": 4, "mode": "mxfp4"}


@dataclass(frozen=True, slots=True)
class Form:
    """A family, and how files have it."""

    family: str
    stored: str
    """As the table says it."""
    fields: dict[str, Any]
    hub: bool = False
    """Whether names, norms and convolutions are as on the hub; else as MLX's tools write them."""
    packing: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """One line of it."""
        return f"{self.family}, {self.stored}"

    def write(self, folder: Path, seed: int) -> Checkpoint:
        """A checkpoint of random weights."""
        how: dict[str, Any] = {"dtype": "bfloat16", "seed": seed, "gain": GAIN}
        how |= self.packing | self.fields
        spec = replace(SPEC, vocab_size=1024, tie_word_embeddings=seed % 2 == 1)
        if self.family == BONSAI_FAMILY:
            return read_checkpoint(write_bonsai(folder, seed=seed, gain=GAIN, apart=not self.hub))
        if self.family != "qwen3_moe":
            return read_checkpoint(write_hybrid(folder, spec, hub=self.hub, **how))
        write_model(folder, spec, **how)
        return read_checkpoint(names_apart(folder) if self.hub else folder)


def _forms() -> Iterator[Form]:
    mixture = FOUR_BITS | {"layers": ROUTERS}
    for family, fields, packing in (
        ("qwen3_moe", QWEN3_MOE | {"mlp_only_layers": [2]}, mixture),
        ("qwen3_5", FIELDS, FOUR_BITS),
        ("qwen3_5_moe", QWEN3_5_MOE, MIXED),
        ("qwen3_next", QWEN3_NEXT | {"mlp_only_layers": [2]}, MIXED),
    ):
        bits = "4 bits" if family == "qwen3_5" else "4 bits, routers in 8"
        yield Form(family, "bfloat16, the hub's names", fields, hub=True)
        yield Form(family, "bfloat16, MLX's names", fields)
        yield Form(family, f"{bits}, MLX's names", fields, packing=packing)
    for family, fields in (("gemma2", GEMMA2), ("gemma3_text", GEMMA3)):
        yield Form(family, "bfloat16", fields)
        yield Form(family, "4 bits", fields, packing=FOUR_BITS)
    yield Form("gemma3_text", "4 bits, in a model with images", GEMMA3, hub=True, packing=FOUR_BITS)
    fields = GPT_OSS | {"gain": 2.5}  # with 3, rounding grows so that routers choose otherwise
    routers = {"layers": {"mlp.router": EIGHT_BITS}}
    yield Form("gpt_oss", "bfloat16", fields)
    yield Form("gpt_oss", "4 bits, routers in 8", fields, packing=FOUR_BITS | routers)
    yield Form("gpt_oss", "MXFP4, MLX's names", fields, packing=MXFP4)
    yield Form("gpt_oss", "experts in MXFP4, the hub's names", fields, hub=True)
    yield Form(BONSAI_FAMILY, "2 bits, schema 2", {}, hub=True)
    yield Form(BONSAI_FAMILY, "2 bits, schema 1", {})


FORMS = tuple(_forms())


@dataclass(slots=True)
class Routing:
    """What mlx-lm's routers chose: how often, and how often the last expert that was chosen and the
    first that was not had the same logit."""

    choices: int = 0
    ties: int = 0
    """In float32, as both compute here."""
    ties_in_16_bits: int = 0
    """Of the same logits in bfloat16, which mlx-lm computes in when it serves such a checkpoint."""

    def see(self, logits: mx.array, chosen: int) -> None:
        """logits: of all experts."""
        for dtype in (mx.float32, mx.bfloat16):
            its = mx.sort(logits.astype(dtype).astype(mx.float32), axis=-1)
            ties = int(np.sum(np.array(its[..., -chosen] == its[..., -chosen - 1])))
            if dtype == mx.float32:
                self.ties += ties
                self.choices += its.size // its.shape[-1]
            else:
                self.ties_in_16_bits += ties


@dataclass(slots=True)
class Parity:
    """What came of a form, or of several."""

    tokens: int = 0
    distinct: int = NEW_TOKENS
    """Of the answer that repeats itself most."""
    apart: int = 0
    """Tokens that differ between together and alone."""
    gaps: list[float] = field(default_factory=list)
    """Of tokens that mlx-lm says otherwise: how far its logit of ours is below that of its own, in
    standard deviations of the logits."""
    closest: float = float("inf")
    """The least gap between the two best logits of mlx-lm's, in the same."""
    routing: Routing = field(default_factory=Routing)

    @property
    def faults(self) -> int:
        """Tokens that rounding does not explain."""
        return self.apart + sum(gap > ROUNDING for gap in self.gaps)


def compare(checkpoint: Checkpoint, seed: int, lengths: Sequence[int] = LENGTHS) -> Parity:
    """Answers of our engine on a CPU, together and then each alone, against mlx-lm's. lengths: of
    prompts."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, checkpoint.vocab_size, length).tolist() for length in lengths]
    answers = Answers.empty()
    loop = built_loop(checkpoint.path, ENGINE, answers)
    answers_of(loop, answers, dict(enumerate(prompts)), NEW_TOKENS)
    for number, ids in enumerate(prompts, start=100):
        answers_of(loop, answers, {number: ids}, NEW_TOKENS)
    loop.close()
    together = [answers.tokens[number] for number in range(len(prompts))]
    alone = [answers.tokens[number + 100] for number in range(len(prompts))]
    found = Parity()
    model = load_reference(checkpoint)
    _watch(model, checkpoint, found.routing)
    for ids, answer, other in zip(prompts, together, alone, strict=True):
        assert len(answer) == len(other) == NEW_TOKENS
        found.tokens += 2 * len(answer)
        found.distinct = min(found.distinct, len(set(answer)))
        found.apart += sum(a != b for a, b in zip(answer, other, strict=True))
        logits = model(mx.array([[*ids, *answer[:-1]]]))[0, len(ids) - 1 :].astype(mx.float32)
        judge(found, np.array(logits), answer)
    return found


def judge(found: Parity, logits: np.ndarray[Any, Any], answer: Sequence[int]) -> None:
    """Count what is wrong with an answer. logits: mlx-lm's of each token."""
    scale, best = float(logits.std()), np.sort(logits, axis=-1)[:, -2:]
    found.closest = min(found.closest, float((best[:, 1] - best[:, 0]).min()) / scale)
    ours = logits[np.arange(len(answer)), list(answer)]
    wrong = logits.argmax(axis=-1) != np.array(answer)
    found.gaps += ((best[:, 1] - ours)[wrong] / scale).tolist()


def _watch(model: Any, checkpoint: Checkpoint, routing: Routing) -> None:
    """From now on mlx-lm's routers tell what they choose."""
    for layer, spec in zip(model.layers, checkpoint.spec.layers, strict=True):
        if isinstance(spec.mlp, Experts):
            name = "router" if spec.mlp.biases else "gate"
            watched = _Watched(getattr(layer.mlp, name), routing, spec.mlp.chosen)
            setattr(layer.mlp, name, watched)


class _Watched:
    """A router's linear layer."""

    def __init__(self, gate: Any, routing: Routing, chosen: int) -> None:
        self._gate, self._routing, self._chosen = gate, routing, chosen

    def __call__(self, x: mx.array) -> mx.array:
        logits: mx.array = self._gate(x)
        self._routing.see(logits, self._chosen)
        return logits


def _row(form: Form, seed: int, its: Parity) -> str:
    gaps = ", ".join(f"{gap:.1e}" for gap in its.gaps) or "none"
    ties = its.routing
    return (
        f"| {form.title} | {seed} | {its.tokens} | {its.distinct} | {its.apart} | "
        f"{len(its.gaps)} | {gaps} | {its.closest:.1e} | {ties.ties} and {ties.ties_in_16_bits} of "
        f"{ties.choices} |"
    )


def main() -> int:
    """Print the table; return whether anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.models.parity")
    parser.add_argument("--family", help="of this model_type alone")
    family = parser.parse_args().family
    print(
        "| family and form | seed | tokens | distinct, at least | differ alone and together | "
        "differ from mlx-lm's | gaps of these, in standard deviations | closest two logits | "
        "routers' ties in float32 and bfloat16 |\n" + "|---" * 9 + "|"
    )
    wrong = 0
    for form in FORMS:
        if family not in (None, form.family):
            continue
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as folder:
                its = compare(form.write(Path(folder), seed), seed)
            print(_row(form, seed, its), flush=True)
            wrong += its.faults + (its.distinct < LEAST_DISTINCT)
    print(TIES)
    print(f"\n{wrong} faults" if wrong else "\nall tokens are mlx-lm's, within rounding")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
