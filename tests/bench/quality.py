"""The cost of rounding in quality: ``python -m tests.bench.quality``.

Logits of quire with every setting of ``activations`` and of mlx-lm's model are set beside those of
a forward in float64 over the same stored weights. The table has, over positions
of prompts, the KL divergence of a side's next token from the exact one's, in nats, and how often
both have the same best token. The demo model reads the text that it was made from; the random model
of Qwen3-0.6B's dimensions reads random letters, and is judged by the tokens that it tells apart, as
all others have a logit of zero.

quire's rows that are equal bit for bit are one row, which names all of its instruction sets. They
are those that products run with: attention has the best one. K and V are kept as a CPU does by
default, in bfloat16 for these weights, where a row does not say float32.
mlx-lm reads one prompt alone of the random model.

One file, since it is one comparison: the exact logits, the sides, and the texts that all of them
read.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

import metal_ext
from engine.models.checkpoint import Checkpoint, read_checkpoint
from engine.models.weights import load_model
from kvcache.layout import KVFormat
from tests.bench.models import KINDS, ModelStore, quantise
from tests.bench.peers import ROOT
from tests.engine.models.forwards import cache_for, step
from tests.kvcache.managers import join
from tests.reference import load_reference

Numbers = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
DEMO = ROOT / "configs" / "demo"
RANDOM = "qwen3-0.6b"
FORMS = {"bfloat16": None, "4-bit": 4, "8-bit": 8}
"""The bits of a quantised form's weights."""
ACTIVATIONS = ("float32", "bfloat16", "int8")
PROMPTS = {"demo": (8, 256), RANDOM: (4, 64)}
"""The number of prompts, and the tokens of each."""
MLX_PROMPTS = {RANDOM: 1}  # mlx-lm's plain loops take minutes for each
ROLES = {"user": "user", "quire": "assistant"}
SEED = 1
HEADINGS = (
    "model", "weights", "side", "positions", "KL, mean", "KL, 99th percentile", "same best token",
)  # fmt: skip


# --- what is measured ----------------------------------------------------------------------------


def log_softmax(logits: Numbers) -> Numbers:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logs: Numbers = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logs


def kl(exact: Numbers, logits: Numbers) -> Numbers:
    """Return KL(exact || logits) of each row, in nats."""
    p, q = log_softmax(exact), log_softmax(logits)
    divergence: Numbers = (np.exp(p) * (p - q)).sum(axis=-1)
    return divergence


def agreement(exact: Numbers, logits: Numbers) -> float:
    """Return the share of rows with the same best token."""
    return float((exact.argmax(axis=-1) == logits.argmax(axis=-1)).mean())


@dataclass(frozen=True, slots=True)
class Quality:
    """The distance of one side from the exact logits."""

    positions: int
    mean: float
    """The mean KL divergence, nats."""
    high: float
    """Its 99th percentile."""
    same: float
    """The share of positions with the same best token."""

    @classmethod
    def of(cls, exact: Numbers, logits: Numbers) -> "Quality":
        found = kl(exact, logits)
        high = float(np.percentile(found, 99))
        return cls(len(found), float(found.mean()), high, agreement(exact, logits))

    def cells(self) -> tuple[str, ...]:
        return (
            str(self.positions), f"{self.mean:.1e}", f"{self.high:.1e}", f"{100 * self.same:.2f} %"
        )  # fmt: skip


# --- the exact forward ---------------------------------------------------------------------------


class ExactModel:
    """A dense Qwen3 with a tied head, in float64 over its stored weights."""

    def __init__(self, folder: Path) -> None:
        self._config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        assert self._config["model_type"] == "qwen3"
        assert self._config["tie_word_embeddings"]
        assert not self._config.get("rope_scaling")
        loaded = cast(dict[str, mx.array], mx.load(str(folder / "model.safetensors")))
        self._weights = loaded
        self._embedding = self._stored("model.embed_tokens")
        self.tokens: Ids = np.flatnonzero(np.any(self._embedding != 0, axis=1))
        """The tokens that have an embedding: logits of others are zero."""
        self.vocab_size = len(self._embedding)

    def logits(self, prompts: Sequence[Sequence[int]]) -> Numbers:
        """Return the logits of ``tokens`` at all positions, one prompt after the other."""
        positions = np.concatenate([np.arange(len(ids)) for ids in prompts])
        ends = [int(end) for end in np.cumsum([len(ids) for ids in prompts])[:-1]]
        x = self._embedding[np.concatenate(prompts)].astype(np.float64)
        for number in range(self._config["num_hidden_layers"]):
            layer = f"model.layers.{number}"
            x = x + self._attended(
                layer, self._norm(f"{layer}.input_layernorm", x), positions, ends
            )
            x = x + self._gated(layer, self._norm(f"{layer}.post_attention_layernorm", x))
        head = self._embedding[self.tokens].astype(np.float64)
        logits: Numbers = self._norm("model.norm", x) @ head.T
        return logits

    def _attended(self, layer: str, x: Numbers, positions: Ids, ends: list[int]) -> Numbers:
        """ends: the end of each prompt but the last one."""
        its = f"{layer}.self_attn"
        size = self._config["head_dim"]
        q, k, v = (
            (x @ self._matrix(f"{its}.{name}_proj").T).reshape(len(x), -1, size) for name in "qkv"
        )
        theta = self._config.get("rope_parameters", self._config)["rope_theta"]
        q = turned(self._norm(f"{its}.q_norm", q), positions, theta)
        k = turned(self._norm(f"{its}.k_norm", k), positions, theta)
        cut = zip(*(np.split(rows, ends) for rows in (q, k, v)), strict=True)
        heads = np.concatenate([attention(*rows) for rows in cut]).reshape(len(x), -1)
        added: Numbers = heads @ self._matrix(f"{its}.o_proj").T
        return added

    def _gated(self, layer: str, x: Numbers) -> Numbers:
        gate = x @ self._matrix(f"{layer}.mlp.gate_proj").T
        up = x @ self._matrix(f"{layer}.mlp.up_proj").T
        inner = gate / (1 + np.exp(-gate)) * up
        added: Numbers = inner @ self._matrix(f"{layer}.mlp.down_proj").T
        return added

    def _norm(self, name: str, x: Numbers) -> Numbers:
        scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + self._config["rms_norm_eps"])
        normed: Numbers = x / scale * self._matrix(name)
        return normed

    def _matrix(self, name: str) -> Numbers:
        return self._stored(name).astype(np.float64)

    def _stored(self, name: str) -> npt.NDArray[np.float32]:
        """Return a matrix in float32, which holds all stored numbers; codes are multiplied by a
        scale rounded to it."""
        weight = self._weights[f"{name}.weight"]
        if f"{name}.scales" in self._weights:
            scales, biases = (
                self._weights[f"{name}.{part}"].astype(mx.float32) for part in ("scales", "biases")
            )
            packing = self._config["quantization"]
            weight = mx.dequantize(weight, scales, biases, packing["group_size"], packing["bits"])
        return np.array(weight.astype(mx.float32))


def turned(x: Numbers, positions: Ids, theta: float) -> Numbers:
    """Apply RoPE to [tokens, heads, size], whose pairs are a half of the size apart."""
    half = x.shape[-1] // 2
    angles = np.outer(positions, theta ** (-np.arange(half) / half))[:, None]
    sin, cos = np.sin(angles), np.cos(angles)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(q: Numbers, k: Numbers, v: Numbers) -> Numbers:
    """Attend causally within one prompt: [tokens, heads, size]; k and v may have fewer heads."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(rows, group, axis=1).transpose(1, 0, 2) for rows in (k, v))
    scores = q.transpose(1, 0, 2) @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    future = np.triu(np.ones((len(q), len(q)), bool), 1)
    weights = np.exp(log_softmax(np.where(future, -np.inf, scores)))
    heads: Numbers = weights @ v
    return heads.transpose(1, 0, 2)


# --- the sides -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Subject:
    name: str
    weights: str
    folder: Path
    model: ExactModel
    prompts: list[list[int]]


def quire_logits(
    checkpoint: Checkpoint,
    prompts: Sequence[Sequence[int]],
    tokens: Ids,
    workers: metal_ext.CpuWorkers,
    kept: KVFormat,
) -> Numbers:
    """Compute each prompt in one step. kept: the format of K and V."""
    model = load_model(checkpoint, lambda *_: None, workers)
    found = []
    for ids in prompts:
        kv = cache_for(checkpoint, kept)
        assert join(kv, 1, ids)
        logits = step(model, kv, [(1, 0, list(ids))], list(range(len(ids))))
        found.append(np.array(logits)[:, tokens].astype(np.float64))
    return np.concatenate(found)


def mlx_logits(
    checkpoint: Checkpoint, prompts: Sequence[Sequence[int]], tokens: Ids, *, stored: bool
) -> Numbers:
    """stored: compute in the checkpoint's dtype, else in float32."""
    model = load_reference(checkpoint, stored=stored)
    found = [model(mx.array([ids]))[0].astype(mx.float32) for ids in prompts]
    return np.concatenate([np.array(its)[:, tokens] for its in found]).astype(np.float64)


def side_text(ran: Sequence[tuple[str, str]]) -> str:
    """Name a row's pairs of activations and instruction set."""
    of_set: dict[str, list[str]] = {}
    for activations, name in ran:
        of_set.setdefault(name, []).append(activations)
    of_activations: dict[str, list[str]] = {}
    for name, all_activations in of_set.items():
        of_activations.setdefault(", ".join(all_activations), []).append(name)
    return "; ".join(f"{its} on {', '.join(names)}" for its, names in of_activations.items())


Row = tuple[str, Quality]


def quire_rows(
    subject: Subject, exact: Numbers, sets: Sequence[str], threads: int, kept: KVFormat
) -> list[Row]:
    """Return a row for each result that differs in a bit, over all activations and sets. kept: as
    for quire_logits; where it is not float32, a last row has K and V in float32."""
    checkpoint, tokens = read_checkpoint(subject.folder), subject.model.tokens
    rows: dict[bytes, Quality] = {}
    ran: dict[bytes, list[tuple[str, str]]] = {}

    def run(activations: str, name: str, kept: KVFormat) -> Numbers:
        workers = metal_ext.CpuWorkers(threads, name, activations)
        return quire_logits(checkpoint, subject.prompts, tokens, workers, kept)

    for activations in ACTIVATIONS:
        for name in sets:
            logits = run(activations, name, kept)
            digest = hashlib.sha256(logits.tobytes()).digest()
            rows[digest] = Quality.of(exact, logits)
            ran.setdefault(digest, []).append((activations, name))
    wide = ", K and V in float32"
    ending = wide if kept is KVFormat.FLOAT32 else ""
    named = [(f"quire, {side_text(ran[digest])}{ending}", its) for digest, its in rows.items()]
    if kept is not KVFormat.FLOAT32:
        logits = run(ACTIVATIONS[0], sets[0], KVFormat.FLOAT32)
        text = side_text([(ACTIVATIONS[0], sets[0])])
        named.append((f"quire, {text}{wide}", Quality.of(exact, logits)))
    return named


def mlx_rows(subject: Subject, exact: Numbers) -> Iterator[Row]:
    """Yield mlx-lm in bfloat16 and in float32, on the first prompts where all would take too
    long."""
    checkpoint, tokens = read_checkpoint(subject.folder), subject.model.tokens
    prompts = subject.prompts[: MLX_PROMPTS.get(subject.name)]
    first = exact[: sum(len(ids) for ids in prompts)]
    for dtype in ("bfloat16", "float32"):
        logits = mlx_logits(checkpoint, prompts, tokens, stored=dtype == "bfloat16")
        yield f"mlx-lm in {dtype}", Quality.of(first, logits)


# --- models and prompts --------------------------------------------------------------------------


def demo_prompts(tokenizer: Path, count: int, length: int) -> list[list[int]]:
    """Return conversations and prose that the demo model was made from, in turns. length:
    tokens."""
    encoder = Tokenizer.from_file(str(tokenizer))
    texts = (conversations(DEMO / "text" / "dialogues.txt"), prose(DEMO / "text" / "prose.txt"))
    ids = [encoder.encode(text, add_special_tokens=False).ids for text in texts]
    starts = [(its, start) for start in range(0, count * length, length) for its in ids]
    prompts = [its[start : start + length] for its, start in starts[:count]]
    assert all(len(prompt) == length for prompt in prompts), "the text is too short"
    return prompts


def prose(file: Path) -> str:
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    return "\n".join(lines)


def conversations(file: Path) -> str:
    """Return all conversations of a file, in the demo's template without thoughts."""
    turns = (line.partition(": ") for line in prose(file).splitlines())
    return "".join(
        f"<|im_start|>{ROLES[who]}\n{said}<|im_end|>\n" for who, _, said in turns if who in ROLES
    )


def random_prompts(tokens: Ids, count: int, length: int) -> list[list[int]]:
    """Draw prompts from the tokens that a model has an embedding for."""
    rng = np.random.default_rng(SEED)
    prompts: list[list[int]] = rng.choice(tokens, (count, length)).tolist()
    return prompts


def demo_subject(form: str, made: Path) -> Subject:
    """made: an empty folder for other forms of the demo model."""
    stored, bits = DEMO / "model", FORMS[form]
    folder = stored if bits is None else quantise(stored, made / f"demo-{form}", bits)
    prompts = demo_prompts(stored / "tokenizer.json", *PROMPTS["demo"])
    return Subject("demo", form, folder, ExactModel(folder), prompts)


def random_subject(form: str, folder: Path) -> Subject:
    """folder: where the random model is, or goes."""
    store = ModelStore(folder, KINDS[RANDOM])
    bits = FORMS[form]
    path = store.bfloat16() if bits is None else store.quantised(bits)
    model = ExactModel(path)
    prompts = random_prompts(model.tokens, *PROMPTS[RANDOM])
    return Subject(RANDOM, form, path, model, prompts)


# --- the table -----------------------------------------------------------------------------------


def print_rows(subject: Subject, rows: Iterator[Row] | list[Row]) -> None:
    for side, its in rows:
        cells = (subject.name, subject.weights, side, *its.cells())
        print(f"| {' | '.join(cells)} |", flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=tuple(PROMPTS), help="this one alone")
    parser.add_argument("--weights", choices=FORMS, help="these alone")
    text = "instruction sets alone, with commas between them"
    parser.add_argument("--sets", help=text)
    text = "what quire keeps K and V in (default: %(default)s)"
    parser.add_argument("--kv", choices=("bfloat16", "float32"), default="bfloat16", help=text)
    folder = Path(tempfile.gettempdir()) / "quire-bench"
    text = "where the random model is, or goes (default: %(default)s)"
    parser.add_argument("--folder", type=Path, default=folder, help=text)
    parser.add_argument("--threads", type=int, default=2, help="of everybody (default: 2)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parse(arguments)
    has = metal_ext.instruction_sets()
    sets = asked.sets.split(",") if asked.sets else has
    if unknown := [name for name in sets if name not in has]:
        print(f"this processor has no {', '.join(unknown)}", file=sys.stderr)
        return 2
    mx.set_default_device(mx.Device(mx.cpu))
    print(f"| {' | '.join(HEADINGS)} |\n{'|---' * len(HEADINGS)}|")
    with tempfile.TemporaryDirectory() as made:
        for name in [asked.model] if asked.model else PROMPTS:
            for form in [asked.weights] if asked.weights else FORMS:
                demo = name == "demo"
                subject = (
                    demo_subject(form, Path(made)) if demo else random_subject(form, asked.folder)
                )
                measure(subject, sets, asked)
    return 0


def measure(subject: Subject, sets: Sequence[str], asked: argparse.Namespace) -> None:
    exact = subject.model.logits(subject.prompts)
    kept = KVFormat(asked.kv)
    print_rows(subject, quire_rows(subject, exact, sets, asked.threads, kept))
    print_rows(subject, mlx_rows(subject, exact))


if __name__ == "__main__":
    sys.exit(main())
